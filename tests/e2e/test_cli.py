"""The command line with real kernels, as a user would call it: each command a process of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.notebook import document
from gateway.notebook.parameters import INJECTED_TAG
from tests.support import Gateway, Kernel, running
from tests.unit.test_notebook import loads, notebook, outputs

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "notebooks" / "tour.ipynb"
DATA = ROOT / "notebooks" / "data" / "macrodata.csv"
COMMAND = [sys.executable, "-m", "gateway"]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Command = Callable[..., Ran]


def environment(gateway: Gateway | None, **more: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("CELLGATE_")}
    where = {"CELLGATE_URL": gateway.url, "CELLGATE_TOKEN": gateway.token} if gateway else {}
    return found | where | more


def call(directory: Path, gateway: Gateway | None, *arguments: str) -> Ran:
    ran = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment(gateway),
        timeout=110,
        check=False,
    )
    assert "Traceback (most recent call last):\n  File" not in ran.stderr, ran.stderr
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture
def cellgate(gateway: Gateway, tmp_path: Path) -> Command:
    return lambda *arguments: call(tmp_path, gateway, *arguments)


def texts(cell: Any) -> str:
    return "".join(str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs)


def test_the_tour_runs_and_its_results_stand_alone(cellgate: Command, tmp_path: Path) -> None:
    files = ("-o", "tour.ipynb", "--html", "tour.html", "--figures", "figures")
    ran = cellgate("run", str(TOUR), "--upload", str(DATA), "-p", "resamples=200", *files)
    assert (ran.code, ran.err) == (0, "")
    written = document.read(tmp_path / "tour.ipynb")
    cells = [cell for cell in written.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert cells[1].metadata["tags"] == [INJECTED_TAG]
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert all(set(cell.metadata["execution"]) >= {"iopub.status.busy", "shell.execute_reply"} for cell in cells)
    everything = "".join(map(texts, cells))
    assert "203 quarters, 1959Q1 to 2009Q3" in everything
    assert "OLS Regression Results" in everything
    assert "fitting" not in everything  # the display that was updated in place
    figures = sorted(path.read_bytes()[:8] for path in (tmp_path / "figures").iterdir())
    assert figures == [b"\x89PNG\r\n\x1a\n"] * 2
    page = (tmp_path / "tour.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert loads(page) == []
    assert "resampling |██████████████████████████████| 100%" in ran.out.splitlines()


def test_the_repository_s_tour_has_no_outputs() -> None:
    for cell in document.read(TOUR).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_a_failing_notebook_keeps_what_it_had(cellgate: Command, tmp_path: Path) -> None:
    document.write(notebook("x = 6 * 7\nprint(x)", "def f():\n    return x / 0\nf()", "print('never')"), tmp_path / "bad.ipynb")
    ran = cellgate("run", "bad.ipynb")
    assert ran.code == 1
    assert "ZeroDivisionError: division by zero" in ran.out
    assert "return x / 0" in ran.out
    assert "Stopped at cell 2 of 3" in ran.out
    written = document.read(tmp_path / "bad.executed.ipynb")
    assert [[output.output_type for output in outputs(written, number)] for number in (1, 2, 3)] == [["stream"], ["error"], []]


HOG = "hoard = []\nwhile True: hoard.append(bytearray(b'x') * (10 << 20))"


def test_a_kernel_that_runs_out_of_memory_is_named_in_the_notebook(cellgate: Command, tmp_path: Path) -> None:
    document.write(notebook("print('before')", HOG, "print('never')"), tmp_path / "big.ipynb")
    ran = cellgate("run", "big.ipynb")
    assert ran.code == 1
    assert "memory" in ran.out.splitlines()[-2]
    written = document.read(tmp_path / "big.executed.ipynb")
    assert outputs(written, 2)[-1]["ename"] == "KernelDied"
    assert "memory" in outputs(written, 2)[-1]["evalue"]


def test_ctrl_c_leaves_a_notebook_and_no_kernel(gateway: Gateway, tmp_path: Path) -> None:
    source = "import time\nprint('started', flush=True)\ntime.sleep(100)"
    document.write(notebook(source, "print('never')"), tmp_path / "long.ipynb")
    before = {kernel["id"] for kernel in gateway.http.get("/v1/kernels").json()["kernels"]}
    command = [*COMMAND, "run", "long.ipynb"]
    pipe = subprocess.PIPE
    env = environment(gateway, PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env, cwd=tmp_path, text=True) as process:
        assert process.stdout
        assert any(line == "started\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "Interrupted in cell 1 of 2." in out
    shown = outputs(document.read(tmp_path / "long.executed.ipynb"), 1)
    assert [output.get("text", output.get("ename")) for output in shown] == ["started\n", "KeyboardInterrupt"]
    assert {kernel["id"] for kernel in gateway.http.get("/v1/kernels").json()["kernels"]} == before


def test_exec_in_a_kernel_that_stays(cellgate: Command, kernel: Kernel) -> None:
    assert cellgate("exec", "x = 6 * 7", "--kernel", kernel.id) == Ran(0, "", "")
    assert cellgate("exec", "print('[x]', x); x", "--kernel", kernel.id) == Ran(0, "[x] 42\n42\n", "")
    found = json.loads(cellgate("exec", "--json", "x / 0", "--kernel", kernel.id).out)
    assert (found["status"], found["kernel_id"]) == ("error", kernel.id)
    assert kernel.document()["state"] == "idle"


def test_exec_moves_files_in_and_out(cellgate: Command, tmp_path: Path) -> None:
    (tmp_path / "a b.csv").write_text("1,2")
    code = "import shutil; shutil.copy('a b.csv', 'out.csv'); print(open('a b.csv').read())"
    assert cellgate("exec", code, "--upload", "a b.csv", "--download", "out.csv") == Ran(0, "1,2\n", "")
    assert (tmp_path / "out.csv").read_text() == "1,2"


def test_exec_past_its_timeout_says_so(cellgate: Command) -> None:
    ran = cellgate("exec", "import time; time.sleep(100)", "--timeout", "0.5")
    assert ran.code == 1
    assert "KeyboardInterrupt" in ran.out
    assert "timeout of 0.5 s" in ran.err


def test_kernels_are_listed_and_stopped(tmp_path: Path) -> None:
    with running() as gateway:
        kernel = gateway.new_kernel(label="mine")
        table = call(tmp_path, gateway, "kernels", "list")
        assert kernel.id in table.out
        assert "mine" in table.out
        assert call(tmp_path, gateway, "kernels", "stop", kernel.id) == Ran(0, f"stopped {kernel.id}\n", "")
        gateway.new_kernel()
        assert call(tmp_path, gateway, "kernels", "stop", "--all").code == 0
        assert call(tmp_path, gateway, "kernels", "list").out == "No kernel runs.\n"


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path leaves room for that of a Unix socket in it, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="cg-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.parametrize("deep", [False, True])
def test_without_an_address_a_private_gateway_does_it_and_leaves_nothing(short: Path, tmp_path: Path, deep: bool) -> None:
    temporary = tmp_path / "so deep that a socket would not fit" if deep else short
    temporary.mkdir(exist_ok=True)
    code = (
        "import socket\ntry:\n    socket.create_connection(('10.0.0.1', 80), 1)\nexcept OSError as e:\n    print('no network')"
    )
    command = [*COMMAND, "exec", code]
    env = environment(None, TMPDIR=str(temporary))
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=110, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "no network\n", "")
    assert list(temporary.iterdir()) == []


def test_serve_says_how_to_call_it_and_the_line_works(short: Path) -> None:
    state = short / "state"
    command = [*COMMAND, "serve", "--port", "0", "--state-dir", str(state), "--log-level", "error", "--on-shutdown", "stop"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(None)) as process:
        assert process.stderr
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("T="):
                break
        answer = subprocess.run(["bash", "-c", said[-1]], capture_output=True, text=True, timeout=100, check=False)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert (state / "token").read_text().strip() in "".join(said)
    events = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [event["type"] for event in events] == ["queued", "started", "result", "ended"]
    assert events[2]["data"]["text/plain"] == "42"
    assert "Traceback" not in rest


def test_doctor_finds_this_machine_ready(tmp_path: Path) -> None:
    found = json.loads(call(tmp_path, None, "doctor", "--json").out)
    assert found["ready"], found
    assert found["engine"]["engine"] == "docker"
