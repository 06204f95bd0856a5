"""A short run of the fuzzer in every run of the tests; `scripts/fuzz-link` is the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.protocol.messages import decode_json
from tests.fuzz import driver
from tests.fuzz.driver import Fuzzer, peak_memory

ROOT = Path(__file__).parents[2]
INPUTS = 20_000


@pytest.mark.parametrize("seed", [1, 2])
def test_wrong_inputs_give_values_or_the_readers_own_errors(seed: int) -> None:
    fuzzer, before = Fuzzer(seed), peak_memory()
    fuzzer.run(INPUTS // 2)
    counts = fuzzer.counts
    # Neither all good nor all bad: then nothing behind the first check would have been tried.
    for name in ("streams read", "streams refused", "messages read", "messages refused"):
        assert counts[name] > INPUTS // 50, counts
    for kind in ("stream", "display", "update_display", "result", "error", "clear_output", "input_request"):
        assert counts[kind] > 50, counts
    assert peak_memory() - before < 100


def test_a_fault_is_shown_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(raw: bytes) -> object:
        """As `decode_json` would be if it had forgotten something."""
        if b"NaN" in raw:
            raise ZeroDivisionError
        return decode_json(raw)

    monkeypatch.setattr("gateway.protocol.messages.decode_json", careless)
    with pytest.raises(ZeroDivisionError) as failure:
        Fuzzer(1).run(INPUTS)
    assert "NaN" in failure.value.__notes__[0]


def test_the_same_seed_gives_the_same_run() -> None:
    counts = []
    for _ in range(2):
        fuzzer = Fuzzer(7)
        fuzzer.run(500)
        counts.append(fuzzer.counts)
    assert counts[0] == counts[1]


def test_the_script_ends_by_itself_and_tells_what_it_did() -> None:
    command = [str(ROOT / "scripts" / "fuzz-link"), "--inputs", "500", "--seed", "3"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    lines = done.stdout.splitlines()
    assert lines[0] == "seed 3"
    assert any(line.split() == ["inputs", "500"] for line in lines)
    assert "peak memory" in lines[-1]
    assert driver.__doc__ is not None
