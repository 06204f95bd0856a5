"""Faults from outside of the cell: the box, its supervisor, the start, many neighbours, nobody who asks."""

import contextlib
import json
import os
import signal
import time

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from gateway.bench.subject import Subject
from tests.faults.cells import KEPT, LOST, ending, prepared
from tests.faults.matrix import Fault, Outcome, words
from tests.support import Event, Gateway, Kernel, engine, eventually, problem, running

NOTHING = "-"


def gone_with_box(gateway: Gateway, harm: str, codes: set[str]) -> Outcome:
    """Does `harm` to the container under a running cell."""
    with gateway.kernel() as kernel, contextlib.closing(engine()) as api:
        prepared(kernel)
        with kernel.submitted("import time; time.sleep(600)") as cell:
            if harm == "kill":
                api.kill(kernel.container)
            elif harm == "remove":
                api.remove_container(kernel.container, force=True)
            else:
                api.stop(kernel.container, timeout=1)
            end = cell.end()
        assert end["status"] == "died"
        assert end["cause"]["code"] in codes, end
        assert end["variables"] == LOST
        problem(kernel.post("1"), 409, "kernel_dead")
        return Outcome(words(cell.events), LOST, LOST)


def kill_container(gateway: Gateway) -> Outcome:
    return gone_with_box(gateway, "kill", {"sandbox_ended"})


def remove_container(gateway: Gateway) -> Outcome:
    return gone_with_box(gateway, "remove", {"sandbox_removed", "sandbox_ended"})


def stop_container(gateway: Gateway) -> Outcome:
    return gone_with_box(gateway, "stop", {"sandbox_ended"})


def kill_supervisor(gateway: Gateway) -> Outcome:
    with gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events("import os, signal; os.kill(os.getppid(), signal.SIGKILL); import time; time.sleep(600)")
        assert ending(events)["cause"]["code"] == "sandbox_ended"
        return Outcome(words(events), LOST, LOST)


def stop_supervisor(_gateway: Gateway) -> Outcome:
    """A supervisor that says nothing more is given up after `lost_timeout`."""
    with running(link={"ping_interval": 0.5, "lost_timeout": 2}) as gateway, gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events("import os, signal; os.kill(os.getppid(), signal.SIGSTOP); import time; time.sleep(600)")
        assert ending(events)["cause"]["code"] == "sandbox_unreachable"
        return Outcome(words(events), LOST, LOST)


def busy_neighbours(gateway: Gateway) -> Outcome:
    """More spinning kernels than cores; each is interrupted at its deadline and lives."""
    with contextlib.ExitStack() as stack:
        kernels = [stack.enter_context(gateway.kernel()) for _ in range(4)]
        cells = [stack.enter_context(kernel.submitted("while True: pass", timeout=6)) for kernel in kernels]
        ends = [cell.end() for cell in cells]
        assert [end["status"] for end in ends] == ["timeout"] * 4
        assert [kernel.value("1+1") for kernel in kernels] == ["2"] * 4
        return Outcome(words(cells[0].events), KEPT, KEPT)


_CHATTER = """
import threading, time
def chatter():
    while True:
        print('busy!', flush=True)
        time.sleep(0.05)
threading.Thread(target=chatter, daemon=True).start()
"""


def fake_activity(_gateway: Gateway) -> Outcome:
    """A thread that prints for ever is no reason to live."""
    with running(culling={"cull_interval": 0.2}) as gateway, gateway.kernel(idle_timeout=2) as kernel:
        kernel.run(_CHATTER)
        with kernel.socket() as socket:
            closed = _closed(socket.connection)
        document = problem(kernel.post("1"), 410, "kernel_gone")
        assert document["cause"]["code"] == "idle_timeout"
        return Outcome(f"WebSocket closed ({closed}), then 410 kernel_gone(idle_timeout)", LOST, LOST)


def _closed(connection: ClientConnection) -> int:
    """The code with which the gateway closes it."""

    def read_on() -> None:
        while True:
            connection.recv(timeout=60)

    with pytest.raises(ConnectionClosed) as caught:
        read_on()
    assert caught.value.rcvd is not None
    return int(caught.value.rcvd.code)


def lifetime(_gateway: Gateway) -> Outcome:
    """The hard end comes in the middle of a cell."""
    with running(culling={"cull_interval": 0.2}) as gateway, gateway.kernel(lifetime=3) as kernel:
        events = kernel.events("import time; time.sleep(600)")
        assert ending(events)["cause"]["code"] == "lifetime"
        return Outcome(words(events), LOST, LOST)


def broken_start(_gateway: Gateway) -> Outcome:
    """A kernel that ends at once: the create says so, with its last words."""
    spec = {"python3": {"env": {"PYTHONHOME": "/nowhere"}}}
    with running(kernels={"specs": spec}) as gateway:
        answer = gateway.http.post("/v1/kernels", json={})
        document = problem(answer, 502, "start_failed")
        assert "encodings" in document["log"], document
        with contextlib.closing(engine()) as api:
            assert api.containers(all=True, filters={"label": f"org.cellgate.gateway={gateway.id}"}) == []
        return Outcome("502 start_failed with the log", NOTHING, NOTHING)


def crash_loop(_gateway: Gateway) -> Outcome:
    """A kernel that dies again and again is brought back a few times, then only by hand."""
    with running(kernels={"max_restarts": 2}) as gateway, gateway.kernel() as kernel:
        prepared(kernel)
        said: list[Event] = []
        for _ in range(3):
            said += kernel.events("import os; os._exit(1)")
        problem(kernel.post("1"), 409, "kernel_dead")
        kernel.restart()
        assert kernel.value("open('treasure').read()") == "'42'"
        return Outcome(f"{words(said)}, 409 kernel_dead, restart by hand", LOST, KEPT)


def queue_behind_death(gateway: Gateway) -> Outcome:
    """Cells that wait behind one that kills the kernel end with its cause."""
    with gateway.kernel() as kernel, kernel.socket() as socket:
        socket.send("execute", code="import time, os; time.sleep(1); os._exit(3)", request_id="first")
        for number in range(5):
            socket.send("execute", code="1", request_id=f"behind {number}")
        ends = [socket.until_type("ended") for _ in range(6)]
        assert [end["status"] for end in ends] == ["died", *["aborted"] * 5]
        assert {end["cause"]["code"] for end in ends} == {"exit"}
        return Outcome("ended(died: exit), 5 × ended(aborted: exit)", LOST, KEPT)


def late_interrupt(gateway: Gateway) -> Outcome:
    """An interrupt that comes as the cell ends never hits the next one."""
    with gateway.kernel() as kernel, kernel.socket() as socket:
        for number in range(20):
            first = socket.execute("import time; time.sleep(0.02)", request_id=f"a{number}")
            kernel.interrupt()
            second = socket.execute("sum(range(100_000))", request_id=f"b{number}")
            assert first[-1]["status"] in ("ok", "error")
            assert second[-1]["status"] == "ok", second[-1]
        return Outcome("20 × ended(ok)", KEPT, KEPT)


def frozen_deadline(_gateway: Gateway) -> Outcome:
    """A frozen kernel is thawed by the next call, and culled in time all the same."""
    with running(culling={"cull_interval": 0.2, "freeze_after": 0.3}) as gateway, gateway.kernel(idle_timeout=3) as kernel:
        prepared(kernel)
        eventually(lambda: kernel.document()["frozen"], "frozen")
        assert kernel.value("treasure") == "42"
        eventually(lambda: kernel.document()["frozen"], "frozen again")
        eventually(lambda: gateway.http.get(kernel.path).status_code == 410, "culled")
        return Outcome("frozen, thawed by a cell, frozen, 410 kernel_gone(idle_timeout)", LOST, LOST)


def stalled_gateway(_gateway: Gateway) -> Outcome:
    """The gateway stands still for longer than a supervisor may be silent; nobody is taken for dead after that."""
    with Subject(link={"ping_interval": 0.5, "lost_timeout": 2}) as subject:
        kernel_id, _ = subject.create()
        path = f"/v1/kernels/{kernel_id}"
        body = {"code": "import time; treasure = 42; time.sleep(6); print(treasure)"}
        with subject.http.stream("POST", f"{path}/execute", json=body, headers={"Accept": "application/x-ndjson"}) as answer:
            lines = answer.iter_lines()
            events = [json.loads(next(lines)), json.loads(next(lines))]
            os.kill(subject.pid, signal.SIGSTOP)
            time.sleep(4)
            os.kill(subject.pid, signal.SIGCONT)
            events += [json.loads(line) for line in lines]
        assert ending(events)["status"] == "ok"
        after = subject.http.post(f"{path}/execute", json={"code": "treasure"}).json()
        assert after["status"] == "ok", after
        subject.delete(kernel_id)
        return Outcome(words(events), KEPT, KEPT)


def deleted_while_busy(gateway: Gateway) -> Outcome:
    kernel: Kernel = gateway.new_kernel()
    with kernel.submitted("import time; time.sleep(600)") as cell:
        kernel.delete()
        end = cell.end()
        assert (end["status"], end["cause"]["code"]) == ("died", "kernel_deleted")
    problem(kernel.post("1"), 410, "kernel_gone")
    return Outcome(f"{words(cell.events)}, 410 kernel_gone(kernel_deleted)", LOST, LOST)


FAULTS = [
    Fault("F02", "the container is killed from outside", kill_container),
    Fault("F02b", "the container is removed from outside", remove_container),
    Fault("F02c", "the container is stopped from outside", stop_container),
    Fault("F03", "a cell kills the supervisor", kill_supervisor),
    Fault("F03b", "a cell stops the supervisor (SIGSTOP)", stop_supervisor),
    Fault("F17", "the gateway stands still for longer than a supervisor may be silent", stalled_gateway),
    Fault("F18", "the kernel process ends at its start", broken_start),
    Fault("F18b", "the kernel dies again and again", crash_loop),
    Fault("R11", "4 kernels spin on all cores", busy_neighbours),
    Fault("R19", "a thread fakes activity while a WebSocket is open", fake_activity),
    Fault("R19b", "the lifetime ends in the middle of a cell", lifetime),
    Fault("R20", "cells wait behind one that kills the kernel", queue_behind_death),
    Fault("R20b", "an interrupt comes as its cell ends", late_interrupt),
    Fault("R20c", "an idle kernel is frozen, used, and culled", frozen_deadline),
    Fault("R20d", "the kernel is deleted while a cell runs", deleted_while_busy),
]
