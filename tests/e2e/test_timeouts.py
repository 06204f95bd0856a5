"""A cell that runs too long is ended, by steps each harder than the one before, and each step is told.

The steps follow each other at once here (`interrupt_grace`); what is checked is their order, their effect and what they leave.
"""

from collections.abc import Iterator

import pytest

from tests.support import Event, Gateway, Kernel, printed, running

SPIN = "while True: pass"
DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


@pytest.fixture(scope="module")
def impatient() -> Iterator[Gateway]:
    settings = {"interrupt_grace": 0.5}
    with running(kernels=settings, link={"command_timeout": 1.0, "ping_interval": 0.5, "lost_timeout": 3.0}) as gateway:
        yield gateway


@pytest.fixture
def kernel(impatient: Gateway) -> Iterator[Kernel]:
    with impatient.kernel() as started:
        started.run("kept = 'kept'\nopen('file', 'w').write('kept')")
        yield started


def steps(events: list[Event]) -> list[tuple[str, str]]:
    return [(event["step"], event["reason"]) for event in events if event["type"] == "interrupt"]


def test_a_cell_past_its_timeout_is_interrupted_and_the_variables_stay(kernel: Kernel) -> None:
    events = kernel.events(f"print('in', flush=True)\n{SPIN}", timeout=0.5)
    ended = events[-1]
    assert (ended["status"], ended["variables"], ended["kernel_state"]) == ("timeout", "kept", "idle")
    assert (ended["cause"]["code"], ended["cause"]["timeout"], ended["cause"]["step"]) == ("cell_timeout", 0.5, "interrupt")
    assert ended["duration"] >= 0.5
    assert steps(events) == [("interrupt", "timeout")]
    assert printed(events) == "in\n"
    assert kernel.value("kept") == "'kept'"


def test_a_cell_that_swallows_one_interrupt_gets_another(kernel: Kernel) -> None:
    # Not `while True: pass`: CPython 3.11 does not count its jump as inside of the try.
    loop = "while True: time.sleep(0.01)"
    code = f"import time\ntry:\n    {loop}\nexcept KeyboardInterrupt:\n    print('not yet', flush=True)\n    {loop}"
    events = kernel.events(code, timeout=0.5)
    ended = events[-1]
    assert (ended["status"], ended["variables"], ended["cause"]["step"]) == ("timeout", "kept", "interrupt_again")
    assert steps(events) == [("interrupt", "timeout"), ("interrupt_again", "timeout")]
    assert printed(events) == "not yet\n"
    assert kernel.value("kept") == "'kept'"


def test_a_cell_that_ignores_interrupts_is_killed_and_the_files_stay(kernel: Kernel) -> None:
    events = kernel.events(f"{DEAF}print('deaf', flush=True)\n{SPIN}", timeout=0.5)
    ended = events[-1]
    assert (ended["status"], ended["variables"], ended["kernel_state"]) == ("timeout", "lost", "dead")
    assert (ended["cause"]["code"], ended["cause"]["step"]) == ("cell_timeout", "kill_kernel")
    assert steps(events) == [("interrupt", "timeout"), ("interrupt_again", "timeout"), ("kill_kernel", "timeout")]
    assert printed(events) == "deaf\n"
    document = kernel.document()
    assert (document["state"], document["cause"]["signal"]) == ("dead", "SIGKILL")
    # Killed by us: it must not be told as out of memory.
    assert document["cause"]["code"] == "signal"
    assert kernel.restart()["state"] == "idle"
    assert kernel.value("'kept' in globals(), open('file').read()") == "(False, 'kept')"


def test_cells_behind_one_that_is_killed_end_with_the_cause(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        socket.send("execute", code=DEAF + SPIN, timeout=0.5, request_id="a")
        socket.send("execute", code="1", request_id="b")
        assert socket.until_type("ended", "a")["status"] == "timeout"
        behind = socket.until_type("ended", "b")
    assert (behind["status"], behind["variables"], behind["cause"]["code"]) == ("aborted", "lost", "signal")


def test_the_last_step_ends_the_sandbox(kernel: Kernel) -> None:
    # With its supervisor stopped, nobody in the box takes orders any more.
    code = DEAF + "import os\nprint('in', flush=True)\nos.kill(os.getppid(), signal.SIGSTOP)\n" + SPIN
    events = kernel.events(code, timeout=0.5)
    ended = events[-1]
    assert (ended["status"], ended["variables"], ended["kernel_state"]) == ("timeout", "lost", "dead")
    assert ended["cause"]["code"] == "cell_timeout"
    refused = kernel.http.get(kernel.file("file"))
    assert refused.status_code in (409, 410)
    assert refused.json()["code"] in ("kernel_dead", "kernel_gone")
    assert refused.json()["cause"]["code"] in ("sandbox_killed", "sandbox_unreachable")


def test_a_stopped_supervisor_is_noticed_without_any_cell(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        socket.send("execute", code="import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)", request_id="stops")
        state = socket.until(lambda event: event["type"] == "state" and event["state"] == "dead")
    assert state["cause"]["code"] == "sandbox_unreachable"


def test_a_timeout_counts_from_the_start_not_from_the_queue(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        # The first cell lasts longer than the second one's timeout, which waits behind it.
        socket.send("execute", code="import time\ntime.sleep(1)", request_id="long")
        socket.send("execute", code="'ran'", timeout=0.5, request_id="short")
        assert socket.until_type("ended", "long")["status"] == "ok"
        assert socket.until_type("ended", "short")["status"] == "ok"


def test_an_interrupt_by_hand_climbs_as_far_as_it_may(kernel: Kernel) -> None:
    # The cell outlives several of the ladder's pauses, so a harder step would meet it.
    with kernel.submitted(f"{DEAF}import time\nprint('deaf', flush=True)\ntime.sleep(2)") as cell:
        cell.wait_for("stream")
        answer = kernel.http.post(f"{kernel.path}/interrupt", json={"up_to": "interrupt"})
        assert (answer.status_code, answer.json()) == (202, {"execution_id": cell.execution_id})
        ended = cell.end()
    assert (ended["status"], ended["variables"]) == ("ok", "kept")
    assert steps(cell.events) == [("interrupt", "client")]
    with kernel.submitted(f"{DEAF}print('deaf', flush=True)\n{SPIN}") as cell:
        cell.wait_for("stream")
        kernel.interrupt()
        ended = cell.end()
    # Without a bound the ladder ends the process.
    assert (ended["status"], ended["variables"], ended["kernel_state"]) == ("died", "lost", "dead")
    assert steps(cell.events) == [(step, "client") for step in ("interrupt", "interrupt_again", "kill_kernel")]
    assert kernel.value("open('file').read()") == "'kept'"
