"""Why a kernel ended: every observation becomes one cause with a code, a text that says what to do, and its facts."""

from typing import Any

import orjson
import pytest

from gateway.kernels import causes
from gateway.sandboxes.base import SandboxExit

MIB = 1 << 20


@pytest.mark.parametrize(
    ("exit_info", "code", "parts"),
    [
        ({"code": 0, "signal": None}, "exit", ["exit code 0", "restart the kernel"]),
        ({"code": 3, "signal": None}, "exit", ["exit code 3"]),
        ({"code": 70, "signal": None}, "output_lost", ["could not send outputs"]),
        ({"code": None, "signal": "SIGSEGV"}, "signal", ["SIGSEGV", "files are still there"]),
        ({"code": None, "signal": "SIGKILL", "oom_kills": 0}, "signal", ["SIGKILL"]),
        ({"code": None, "signal": "SIGKILL", "oom_kills": None}, "signal", ["SIGKILL"]),
        ({"code": None, "signal": "SIGKILL"}, "signal", ["SIGKILL"]),
        ({"code": None, "signal": "SIGTERM", "oom_kills": 4}, "signal", ["SIGTERM"]),
        (
            {"signal": "SIGKILL", "oom_kills": 1, "memory_peak": 1000 * MIB, "memory_limit": 1024 * MIB},
            "out_of_memory",
            ["peak 1000 MiB", "limit 1024 MiB", "more memory"],
        ),
        ({"signal": "SIGKILL", "oom_kills": 1, "memory_peak": None, "memory_limit": None}, "out_of_memory", ["used up."]),
        ({"signal": "SIGKILL", "oom_kills": 1, "memory_peak": "x", "memory_limit": 1.5}, "out_of_memory", ["used up."]),
        ({}, "exit", ["exit code None"]),
        ({"code": [1], "signal": {"a": 1}, "log": 7}, "signal", []),
    ],
)
def test_the_end_of_a_process(exit_info: dict[str, Any], code: str, parts: list[str]) -> None:
    cause = causes.from_process(exit_info)
    assert cause["code"] == code
    assert all(part in cause["message"] for part in parts)
    assert cause["exit_code"] == exit_info.get("code")
    assert cause["signal"] == exit_info.get("signal")
    assert orjson.dumps(cause)


@pytest.mark.parametrize("log", [None, "", "short", "x" * 100_000])
def test_the_log_of_a_process_is_its_tail(log: str | None) -> None:
    assert causes.from_process({"code": 1, "log": log})["log"] == (log or "")[-4000:]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (SandboxExit(3, False), "lifetime"),
        (SandboxExit(4, False), "silence"),
        (SandboxExit(5, False), "link_lost"),
        (SandboxExit(137, True), "out_of_memory"),
        (SandboxExit(3, True), "out_of_memory"),
        (SandboxExit(137, False), "sandbox_ended"),
        (SandboxExit(0, False), "sandbox_ended"),
        (SandboxExit(None, False), "sandbox_ended"),
        (SandboxExit(None, False, removed=True), "sandbox_removed"),
    ],
)
def test_the_end_of_a_sandbox(end: SandboxExit, code: str) -> None:
    cause = causes.from_sandbox(end)
    assert cause["code"] == code
    assert "create a new kernel" in cause["message"]


@pytest.mark.parametrize(
    ("name", "value", "interrupted", "code"),
    [
        ("ZeroDivisionError", "division by zero", False, "exception"),
        ("ValueError", "", False, "exception"),
        ("KeyboardInterrupt", "", True, "interrupted"),
        ("KeyboardInterrupt", "", False, "exception"),
        ("ValueError", "x", True, "exception"),
        ("OSError", "[Errno 28] No space left on device", False, "disk_full"),
        ("BlockingIOError", "[Errno 11] Resource temporarily unavailable", False, "process_limit"),
        ("RuntimeError", "can't start new thread", False, "process_limit"),
        ("MemoryError", "", False, "memory_error"),
        ("_ArrayMemoryError", "Unable to allocate 7 GiB", False, "memory_error"),
    ],
)
def test_an_exception(name: str, value: str, interrupted: bool, code: str) -> None:
    cause = causes.from_reply(name, value, interrupted)
    assert cause["code"] == code
    assert cause["message"]


def test_every_fixed_cause_has_a_code_and_a_sentence() -> None:
    fixed = [value for name, value in vars(causes).items() if name.isupper() and isinstance(value, dict) and "code" in value]
    fixed += [causes.idle(60), causes.lifetime(5), causes.busy(2)]
    # One code can have several sentences, but no sentence stands twice.
    assert len({cause["message"] for cause in fixed}) == len(fixed)
    assert {cause["code"] for cause in fixed} >= {
        "gateway_restarted",
        "gateway_stopped",
        "sandbox_unreachable",
        "kernel_deleted",
    }
    assert all(cause["message"].endswith((".", ").")) for cause in fixed)
    assert causes.idle(90)["timeout"] == 90
