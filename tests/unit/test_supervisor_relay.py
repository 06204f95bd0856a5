"""The supervisor's loop on this host, between a scripted gateway and a real process with real ZMQ sockets.

Ending a kernel means SIGKILL to every process of a sandbox, and this is none: here it means the kernel's own process group, and
any attempt at more fails the test (see `safe`).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.supervisor import frames, process, relay
from gateway.supervisor.frames import Channel, Kind
from gateway.supervisor.linkend import LinkEnd, LinkLost
from gateway.supervisor.process import KernelProcess
from gateway.supervisor.relay import Relay
from tests.unit import toy_kernel
from tests.unit.hosts import PATIENCE, TERMS, Host


@pytest.fixture(autouse=True)
def safe(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No signal leaves the process groups of the kernels that a test has started; the pids of the kernels killed."""
    killed: list[int] = []
    real_kill = os.kill

    def kill(pid: int, number: int) -> None:
        assert pid > 1, f"os.kill({pid}, {number})"
        real_kill(pid, number)

    def kill_kernel(kernel: KernelProcess) -> None:
        assert kernel.pid > 1
        killed.append(kernel.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(kernel.pid, signal.SIGKILL)

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(KernelProcess, "kill", kill_kernel)
    return killed


@pytest.fixture
def signals() -> Iterator[None]:
    """Gives back the signal handlers, which a Relay takes for the whole process."""
    taken = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in taken]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    yield
    signal.set_wakeup_fd(wakeup)
    for number, handler in zip(taken, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of kernelspecs with the toy kernel in it."""
    directory = tmp_path / "kernels"
    monkeypatch.setattr(process, "_SPEC_DIRS", (str(directory),))
    install(directory, "toy", {"argv": [sys.executable, toy_kernel.__file__, "{connection_file}"], "env": {"FROM_SPEC": "1"}})
    return directory


def install(directory: Path, name: str, spec: Any) -> None:
    (directory / name).mkdir(parents=True)
    (directory / name / "kernel.json").write_text(spec if isinstance(spec, str) else json.dumps(spec))


class Supervisor:
    """A Relay whose loop runs in a thread, and the host that it dials."""

    def __init__(self, host: Host, work: Path) -> None:
        self.host = host
        self.relay = Relay(LinkEnd(host.path), str(work))
        self.thread = threading.Thread(target=self._run)
        self.code: int | None = None
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            self.code = self.relay.run()
        except BaseException as error:  # noqa: BLE001  # told to the test at `end`
            self.error = error

    def end(self) -> int | None:
        """Waits for the loop's end; its exit code."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.code

    def stop(self) -> None:
        if self.relay.exit_code is None:
            self.relay.exit_code = 0
        writer = signal.set_wakeup_fd(-1)
        os.write(writer, b"\0")
        signal.set_wakeup_fd(writer)
        self.end()

    def start(self, **arguments: Any) -> dict[str, Any]:
        return self.host.command("start", **{"kernelspec": "toy", "key": "k", "env": {}, **arguments})

    def order(self, acknowledge: bool = True, **order: Any) -> None:
        """Gives the toy kernel an order and waits until it is done; shell may overtake iopub."""
        before = len(self.host.messages(Channel.SHELL))
        self.host.request(json.dumps(order).encode())
        deadline = time.monotonic() + PATIENCE
        while len(self.host.messages(Channel.SHELL)) == before:
            assert time.monotonic() < deadline
            self.host.take(acknowledge)


@pytest.fixture
def supervisor(tmp_path: Path, specs: Path, signals: None) -> Iterator[Supervisor]:
    work = tmp_path / "work"
    work.mkdir()
    host = Host(tmp_path / "s")
    supervisor = Supervisor(host, work)
    supervisor.thread.start()
    yield supervisor
    try:
        supervisor.stop()
    finally:
        if supervisor.relay.kernel is not None:
            supervisor.relay.end_kernel()
        supervisor.relay.link.close()
        supervisor.relay.context.destroy(0)
        host.close()
    # By this process: another run of the tests may be under way on the same machine.
    assert list(Path("/tmp").glob(f".cellgate-{os.getpid()}-*")) == []


def numbers(host: Host) -> list[int]:
    """The numbers in the outputs taken so far, in order."""
    return [json.loads(parts[6])["number"] for parts in host.messages(Channel.IOPUB) if b"stream" in parts[3]]


def take_outputs(host: Host, count: int, acknowledge: bool = True) -> None:
    """Until so many outputs have been taken since the beginning."""
    missing = count - len(numbers(host))
    while missing > 0:
        frame = host.take(acknowledge)
        missing -= frame.kind is Kind.MESSAGE and b'"msg_type": "stream"' in frame.payload


# a kernel


def test_a_kernel_is_started_and_answers(supervisor: Supervisor) -> None:
    host = supervisor.host
    assert host.greet()["kernel"] is None
    started = supervisor.start()["result"]
    assert started["pid"] > 1
    assert started["interrupt_mode"] == "signal"
    supervisor.order(emit=3)
    take_outputs(host, 3)
    assert numbers(host) == [0, 1, 2]
    assert [frame.seq for frame in host.kept] == list(range(1, len(host.kept) + 1))


def test_the_kernel_gets_its_environment_and_directory(supervisor: Supervisor, specs: Path, tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['FROM_SPEC'], os.environ['FROM_REQUEST'], os.getcwd(), sys.argv[1])"
    argv = [sys.executable, "-c", program, "{resource_dir}"]
    install(specs, "printer", {"argv": argv, "env": {"FROM_SPEC": "a", "FROM_REQUEST": "spec"}})
    supervisor.host.greet()
    supervisor.start(kernelspec="printer", env={"FROM_REQUEST": "b"})
    supervisor.host.until(Kind.EVENT)
    (exit_event,) = supervisor.host.events("kernel_exit")
    assert exit_event["log"] == f"a b {tmp_path / 'work'} {specs / 'printer'}\n"
    assert (exit_event["code"], exit_event["signal"]) == (0, None)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (None, "no kernelspec named 'other'"),
        ("{", "can't be read"),
        ({}, "can't be started"),
        ({"argv": []}, "can't be started"),
        ({"argv": ["/no/such/program"]}, "can't be started"),
    ],
)
def test_a_kernel_that_cannot_be_started(supervisor: Supervisor, specs: Path, spec: Any, reason: str) -> None:
    if spec is not None:
        install(specs, "other", spec)
    supervisor.host.greet()
    reply = supervisor.start(kernelspec="other")
    assert reply["error"]["code"] == "start_failed"
    assert reason in reply["error"]["message"]
    assert "result" in supervisor.start()


def test_the_end_of_the_process_is_told_after_its_last_output(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    pid = supervisor.start()["result"]["pid"]
    supervisor.order(say="last words", emit=500, size=100, exit=3)
    while not host.events("kernel_exit"):
        host.take()
    assert numbers(host) == list(range(500))
    (exit_event,) = host.events("kernel_exit")
    assert (exit_event["pid"], exit_event["code"], exit_event["signal"]) == (pid, 3, None)
    assert exit_event["log"].endswith("last words\n")
    assert exit_event["cpu_seconds"] > 0
    assert exit_event["max_rss"] > 1_000_000
    assert host.kept[-1].kind is Kind.EVENT


def test_a_signal_is_told_by_its_name(supervisor: Supervisor) -> None:
    supervisor.host.greet()
    supervisor.start()
    supervisor.order(signal=signal.SIGSEGV)
    while not supervisor.host.events("kernel_exit"):
        supervisor.host.take()
    (exit_event,) = supervisor.host.events("kernel_exit")
    assert (exit_event["code"], exit_event["signal"]) == (None, "SIGSEGV")


def test_kill_ends_the_process_and_says_so_by_the_event(supervisor: Supervisor, safe: list[int]) -> None:
    supervisor.host.greet()
    pid = supervisor.start()["result"]["pid"]
    supervisor.order()
    assert supervisor.host.command("kill") == {"result": {}}
    while not supervisor.host.events("kernel_exit"):
        supervisor.host.take()
    assert supervisor.host.events("kernel_exit")[0]["signal"] == "SIGKILL"
    assert pid in safe
    # Nobody is there, and that is no error.
    assert supervisor.host.command("kill") == {"result": {}}
    assert supervisor.host.command("interrupt") == {"result": {}}


def test_a_second_start_replaces_the_first_without_an_event(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    first = supervisor.start()["result"]["pid"]
    supervisor.order(emit=1)
    second = supervisor.start()["result"]["pid"]
    assert first != second
    supervisor.order(emit=5)
    take_outputs(host, 6)
    assert numbers(host) == [0, 0, 1, 2, 3, 4]
    assert host.events("kernel_exit") == []
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_an_interrupt_reaches_the_process_and_its_children(supervisor: Supervisor, specs: Path) -> None:
    waits = (
        "import time\ntry:\n print('ready', flush=True); time.sleep(600)\nexcept KeyboardInterrupt: print('child', flush=True)"
    )
    program = f"""if True:
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {waits!r}])
        try:
            child.wait()
        except KeyboardInterrupt:
            child.wait()
            print("parent")
    """
    install(specs, "waiter", {"argv": [sys.executable, "-c", program]})
    supervisor.host.greet()
    supervisor.start(kernelspec="waiter")
    deadline = time.monotonic() + PATIENCE
    while "ready" not in supervisor.host.command("log")["result"]["log"]:
        assert time.monotonic() < deadline
    supervisor.host.command("interrupt")
    while not supervisor.host.events("kernel_exit"):
        supervisor.host.take()
    assert supervisor.host.events("kernel_exit")[0]["log"] == "ready\nchild\nparent\n"


def test_the_log_is_the_tail_of_what_the_process_has_said(supervisor: Supervisor) -> None:
    supervisor.host.greet()
    supervisor.start()
    for number in range(5):
        supervisor.order(say=f"{number}" * 10_000)
    deadline = time.monotonic() + PATIENCE
    while not (log := supervisor.host.command("log")["result"]["log"]).endswith("4\n"):
        assert time.monotonic() < deadline
    assert len(log) == process.LOG_TAIL


def test_messages_without_a_kernel_are_acknowledged_and_dropped(supervisor: Supervisor) -> None:
    supervisor.host.greet()
    supervisor.host.request(b"{}")
    assert supervisor.host.until(Kind.ACK).seq == 1
    supervisor.start()
    supervisor.order()
    assert len(supervisor.host.messages(Channel.SHELL)) == 1


def test_a_message_that_comes_twice_is_passed_on_once(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    supervisor.start()
    supervisor.order(emit=1)
    host.sent -= 1
    host.request(json.dumps({"emit": 100}).encode())
    supervisor.order(emit=1)
    take_outputs(host, 2)
    assert numbers(host) == [0, 0]


def test_a_message_without_a_number_is_passed_on_whenever_it_comes(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet(version=2)
    supervisor.start()
    supervisor.order(emit=1)
    order = json.dumps({"emit": 1}).encode()
    unnumbered = frames.pack_message(Channel.SHELL, [b"<IDS|MSG>", b"", b"{}", b"{}", b"{}", order], 0)
    host.send(unnumbered + unnumbered)
    take_outputs(host, 3)
    # It counts for nothing: the next one has the next number.
    assert supervisor.relay.link.received == host.sent
    supervisor.order(emit=1)
    take_outputs(host, 4)


# bounds


def test_a_message_above_the_limit_is_told_and_left_out(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet(max_frame=10_000)
    supervisor.start()
    supervisor.order(emit=1, size=100, id="cell")
    supervisor.order(emit=2, size=20_000, id="cell")
    supervisor.order(emit=1, size=100)
    take_outputs(host, 2)
    reports = [frames.unpack_json(frame.payload) for frame in host.kept if frame.kind is Kind.OVERSIZE]
    assert len(reports) == 2
    assert json.loads(reports[0]["parent"]) == {"msg_id": "cell"}
    assert json.loads(reports[0]["header"])["msg_type"] == "stream"
    assert reports[0]["size"] > 20_000
    assert reports[0]["channel"] == Channel.IOPUB


def test_a_message_of_too_many_parts_is_told_and_left_out(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    supervisor.start()
    supervisor.order(emit=1, buffers=70_000, id="cell")
    supervisor.order(emit=1, buffers=5)
    take_outputs(host, 1)
    (report,) = [frames.unpack_json(frame.payload) for frame in host.kept if frame.kind is Kind.OVERSIZE]
    assert json.loads(report["parent"]) == {"msg_id": "cell"}


def test_congestion_stops_reading_and_nothing_is_lost(supervisor: Supervisor) -> None:
    """Nobody acknowledges: the supervisor takes no more from the kernel, and the kernel waits. Then everything comes, in order."""
    host = supervisor.host
    host.greet(max_unacknowledged=50_000)
    supervisor.start()
    supervisor.order()
    host.request(json.dumps({"emit": 3000, "size": 1000}).encode())
    with pytest.raises(TimeoutError):
        take_until_quiet(host)
    unacknowledged = sum(len(frame.payload) for frame in host.kept)
    assert 45_000 < unacknowledged < 60_000
    assert len(host.messages(Channel.SHELL)) == 1
    host.send(frames.pack(Kind.ACK, seq=host.received))
    take_outputs(host, 3000)
    assert numbers(host) == list(range(3000))


def take_until_quiet(host: Host) -> None:
    assert host.stream is not None
    host.stream.settimeout(0.3)
    try:
        while True:
            host.take(acknowledge=False)
    finally:
        host.stream.settimeout(PATIENCE)


def test_a_kernel_that_dies_while_its_output_waits_loses_none_of_it(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway is away or slow for longer than the supervisor would wait for a dead kernel's sockets to fall silent."""
    monkeypatch.setattr(relay, "_EXIT_PATIENCE", 0.1)
    host = supervisor.host
    host.greet(max_unacknowledged=50_000)
    supervisor.start()
    host.request(json.dumps({"emit": 120, "size": 1000, "exit": 0}).encode())
    with pytest.raises(TimeoutError):
        take_until_quiet(host)
    assert supervisor.relay.kernel is not None
    deadline = time.monotonic() + PATIENCE
    while supervisor.relay._exit is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    assert host.events("kernel_exit") == []
    host.send(frames.pack(Kind.ACK, seq=host.received))
    while not host.events("kernel_exit"):
        host.take()
    assert numbers(host) == list(range(120))
    assert host.kept[-1].kind is Kind.EVENT


# outputs that nobody takes


def until_done(host: Host, orders: int = 1, acknowledge: bool = False) -> None:
    """Until so many orders have been answered and one cell is idle, in whatever order shell and iopub come."""
    missing, idle = orders - len(host.messages(Channel.SHELL)), any(b"status-0" in frame.payload for frame in host.kept)
    while missing > 0 or not idle:
        frame = host.take(acknowledge)
        missing -= frame.kind is Kind.MESSAGE and frame.payload[0] == Channel.SHELL
        idle = idle or b"status-0" in frame.payload


def check_account(host: Host, order: dict[str, Any]) -> int:
    """Each output was taken or counted, in its place, up to the idle; the number of those counted."""
    expected, counted = 0, 0
    for frame in host.kept:
        if frame.kind is Kind.EVENT:
            event = frames.unpack_json(frame.payload)
            if event["event"] == "gap":
                assert event["parent"] == order["id"]
                missing = range(expected, expected + event["messages"])
                assert event["bytes"] == sum(frames.message_size(toy_kernel.output(order, number)) for number in missing)
                expected, counted = missing.stop, counted + event["messages"]
        else:
            channel, parts = frames.unpack_message(frame.payload, 1 << 12)
            if channel is Channel.IOPUB and b"stream" in parts[3]:
                assert json.loads(parts[6])["number"] == expected
                expected += 1
            elif channel is Channel.IOPUB:
                assert b"status" in parts[3]
                assert expected == order["emit"]
    assert expected == order["emit"]
    return counted


FLOOD: dict[str, Any] = {"emit": 3000, "size": 1000, "id": "cell", "idle": True}


def test_outputs_are_left_out_and_counted_where_the_gateway_wants_it_so(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet(version=2, max_unacknowledged=50_000, overflow="drop")
    supervisor.start()
    host.request(json.dumps(FLOOD).encode())
    until_done(host)
    kept = numbers(host)
    assert kept == list(range(len(kept)))
    assert 40 < len(kept) < 60
    assert check_account(host, FLOOD) == 3000 - len(kept)
    assert sum(len(frame.payload) for frame in host.kept) < 60_000


def test_outputs_come_back_when_there_is_room(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet(version=2, max_unacknowledged=50_000, overflow="drop")
    supervisor.start()
    host.request(json.dumps(FLOOD).encode())
    until_done(host)
    host.send(frames.pack(Kind.ACK, seq=host.received))
    host.kept.clear()
    again: dict[str, Any] = {"emit": 20, "size": 1000, "id": "next", "idle": True}
    host.request(json.dumps(again).encode())
    until_done(host, acknowledge=True)
    assert check_account(host, again) == 0


def test_a_kernel_without_a_gateway_goes_on_where_its_outputs_may_be_left_out(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet(version=2, max_unacknowledged=50_000, overflow="drop")
    supervisor.start()
    supervisor.order()
    host.request(json.dumps(FLOOD).encode())
    host.until(Kind.ACK, acknowledge=False)
    host.hang_up()
    while supervisor.relay._requests:
        time.sleep(0.01)
    host.greet(version=2, max_unacknowledged=50_000, overflow="drop")
    until_done(host, orders=2, acknowledge=True)
    assert check_account(host, FLOOD) > 2800


def test_what_may_not_be_left_out_has_a_bound_too(supervisor: Supervisor) -> None:
    """A cell that floods with what is always kept: past twice the bound its kernel waits, and nothing of it is lost."""
    host = supervisor.host
    host.greet(version=2, max_unacknowledged=50_000, overflow="drop")
    supervisor.start()
    supervisor.order()
    host.request(json.dumps({**FLOOD, "kind": "comm_msg"}).encode())
    with pytest.raises(TimeoutError):
        take_until_quiet(host)
    assert 95_000 < sum(len(frame.payload) for frame in host.kept) < 110_000
    host.send(frames.pack(Kind.ACK, seq=host.received))
    until_done(host, orders=2, acknowledge=True)
    found = [json.loads(parts[6])["number"] for parts in host.messages(Channel.IOPUB) if b"comm_msg" in parts[3]]
    assert found == list(range(3000))
    assert host.events("gap") == []


def test_what_is_missing_is_told_before_the_end_of_the_process(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet(version=2, max_unacknowledged=50_000, overflow="drop")
    supervisor.start()
    order = {"emit": 500, "size": 1000, "id": "cell", "exit": 0}
    host.request(json.dumps(order).encode())
    while not host.events("kernel_exit"):
        host.take(acknowledge=False)
    assert check_account(host, order) > 400
    assert b"kernel_exit" in host.kept[-1].payload


def test_what_is_missing_of_a_kernel_is_told_before_the_next_one_is_there(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet(version=2, max_unacknowledged=50_000, overflow="drop")
    supervisor.start()
    order = {"emit": 500, "size": 1000, "id": "cell"}
    host.request(json.dumps(order).encode())
    while not host.messages(Channel.SHELL):
        host.take(acknowledge=False)
    # Shell may have overtaken the last outputs; what a killed process had not handed over is no gap.
    supervisor.start()
    counted = sum(event["messages"] for event in host.events("gap"))
    assert counted > 0
    assert len(numbers(host)) + counted <= 500
    assert not supervisor.relay._overflow.pending


def test_a_gateway_that_wants_everything_is_told_what_the_one_before_did_not_take(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet(version=2, max_unacknowledged=50_000, overflow="drop")
    supervisor.start()
    order = {"emit": 500, "size": 1000, "id": "cell"}
    host.request(json.dumps(order).encode())
    while not host.messages(Channel.SHELL):
        host.take(acknowledge=False)
    host.hang_up()
    host.greet(max_unacknowledged=50_000)
    while len(numbers(host)) + sum(event["messages"] for event in host.events("gap")) < 500:
        host.take()
    assert check_account(host, order) > 0


# the link


def test_a_gateway_that_another_has_replaced_is_refused(supervisor: Supervisor) -> None:
    host = supervisor.host
    assert host.greet(version=2, epoch=5)["epoch"] == 0
    pid = supervisor.start()["result"]["pid"]
    supervisor.order(emit=1)
    take_outputs(host, 1, acknowledge=False)
    host.hang_up()
    assert host.greet(version=2, epoch=4)["epoch"] == 5
    with pytest.raises((EOFError, ConnectionError)):
        # Not one of the frames that are kept for its successor.
        host.frame()
    hello = host.greet(version=2, epoch=6)
    assert (hello["epoch"], hello["kernel"]["pid"]) == (5, pid)
    supervisor.order(emit=1)
    assert supervisor.relay.link.epoch == 6


@pytest.mark.parametrize("version", [0, 3])
def test_a_version_that_is_not_spoken_costs_the_stream_alone(supervisor: Supervisor, version: int) -> None:
    host = supervisor.host
    hello = host.greet(version=version)
    assert (hello["minimum"], hello["version"]) == (1, 2)
    assert host.greet(version=hello["minimum"])["received"] == 0
    supervisor.start()
    supervisor.order(emit=1)


def test_frames_whose_acknowledgement_was_lost_come_again_as_they_were(supervisor: Supervisor) -> None:
    """A gateway is killed between storing and acknowledging, or before it has stored: the next one says what it has."""
    host = supervisor.host
    host.greet()
    supervisor.start()
    supervisor.order(acknowledge=False, emit=20)
    take_outputs(host, 20, acknowledge=False)
    before, stored = [*host.kept], len(host.kept) // 2
    host.hang_up()
    host.received, host.kept = stored, host.kept[:stored]
    host.greet()
    while host.received < len(before):
        host.take()
    assert host.kept == before
    take_outputs(host, 20)
    supervisor.order(emit=1)
    take_outputs(host, 21)


def test_messages_whose_acknowledgement_was_lost_are_passed_on_once(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    supervisor.start()
    supervisor.order(emit=1)
    take_outputs(host, 1)
    host.hang_up()
    assert host.greet()["received"] == host.sent
    host.sent -= 1
    host.request(json.dumps({"emit": 1}).encode())
    supervisor.order(emit=1)
    take_outputs(host, 2)
    assert len(host.messages(Channel.SHELL)) == 2


@pytest.mark.parametrize("cut", [5, frames.HEADER.size + 3, -1])
def test_a_message_cut_by_the_end_of_a_gateway_is_passed_on_whole_and_once(supervisor: Supervisor, cut: int) -> None:
    host = supervisor.host
    host.greet()
    supervisor.start()
    supervisor.order()
    order = json.dumps({"emit": 1}).encode()
    host.send(frames.pack_message(Channel.SHELL, [b"<IDS|MSG>", b"", b"{}", b"{}", b"{}", order], host.sent + 1)[:cut])
    host.hang_up()
    assert host.greet()["received"] == host.sent
    supervisor.order(emit=1)
    take_outputs(host, 1)
    assert len(host.messages(Channel.SHELL)) == 2


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience for the answer to a greeting is short."""
    monkeypatch.setattr(relay, "_HANDSHAKE", 0.2)
    monkeypatch.setattr(relay, "_TICK", 0.05)


def test_a_gateway_that_never_answers_the_greeting_is_called_again(supervisor: Supervisor, hasty: None) -> None:
    """It is stopped, or its successor listens at the same place by now."""
    host = supervisor.host
    host.greet()
    pid = supervisor.start()["result"]["pid"]
    supervisor.order(emit=1)
    for _ in range(3):
        host.accept()
        assert host.frame().kind is Kind.HELLO
        with pytest.raises((EOFError, ConnectionError)):
            host.frame()
    assert host.greet()["kernel"]["pid"] == pid
    time.sleep(0.5)
    supervisor.order(emit=1)
    take_outputs(host, 2)


def test_the_first_greeting_waits_for_its_answer(supervisor: Supervisor, hasty: None) -> None:
    """The secret may be on its way: who hangs up without it can't come back."""
    host = supervisor.host
    host.accept()
    assert host.frame().kind is Kind.HELLO
    time.sleep(0.6)
    assert host.read() == []
    host.send(frames.pack_json(Kind.WELCOME, {"secret": "s", "received": 0, **TERMS}))
    supervisor.start()
    supervisor.order(emit=1)


def test_a_gateway_that_hangs_is_silence(supervisor: Supervisor) -> None:
    """It listens, so that each call is connected; nobody is there."""
    host = supervisor.host
    host.greet(silence=0.5)
    host.hang_up()
    assert supervisor.end() == relay.EXIT_SILENCE


def test_the_lifetime_ends_without_a_gateway_too(supervisor: Supervisor) -> None:
    supervisor.host.greet(lifetime=0.7)
    supervisor.host.close()
    assert supervisor.end() == relay.EXIT_LIFETIME


def test_it_calls_again_and_sends_what_is_missing(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    pid = supervisor.start()["result"]["pid"]
    supervisor.order(emit=10)
    take_outputs(host, 10)
    host.request(json.dumps({"emit": 2000, "size": 100, "sleep": 0.05}).encode())
    take_outputs(host, 200, acknowledge=False)
    host.hang_up()
    hello = host.greet()
    assert (hello["secret"], hello["kernel"]["pid"]) == ("s", pid)
    assert hello["received"] == host.sent
    take_outputs(host, 2010)
    assert numbers(host) == [*range(10), *range(2000)]


def test_what_happens_without_a_gateway_is_told_afterwards(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    supervisor.start()
    supervisor.order()
    host.request(json.dumps({"sleep": 0.2, "emit": 50, "exit": 9}).encode())
    host.until(Kind.ACK)
    host.hang_up()
    time.sleep(0.5)
    host.greet()
    while not host.events("kernel_exit"):
        host.take()
    assert numbers(host) == list(range(50))
    assert host.events("kernel_exit")[0]["code"] == 9


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 30,
        frames.pack(Kind.COMMAND, b"no json"),
        frames.pack(Kind.COMMAND, b"[]"),
        frames.pack(Kind.MESSAGE, b"", 99),
        frames.pack_message(Channel.IOPUB, [b"x"], 99),
        frames.pack(Kind.PONG),
        frames.pack(Kind.DATA, b""),
        frames.pack(Kind.CREDIT, b"1"),
        frames.pack(Kind.WELCOME, b"{}"),
        frames.pack(Kind.WELCOME, b'{"lifetime": "long"}'),
    ],
    ids=["noise", "no JSON", "no object", "message", "iopub", "pong", "data", "credit", "welcome", "welcome of another shape"],
)
def test_nonsense_from_the_gateway_costs_the_stream_alone(supervisor: Supervisor, data: bytes) -> None:
    """A kernel with somebody's variables must not end because a gateway has a fault."""
    host = supervisor.host
    host.greet()
    pid = supervisor.start()["result"]["pid"]
    supervisor.order(emit=1)
    host.send(data)
    assert host.greet()["kernel"]["pid"] == pid
    host.sent = supervisor.relay.link.received
    supervisor.order(emit=1)
    take_outputs(host, 2)


def test_pings_are_answered(supervisor: Supervisor) -> None:
    supervisor.host.greet()
    supervisor.host.send(frames.pack(Kind.PING))
    assert supervisor.host.frame().kind is Kind.PONG


# commands


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("start", {}),
        ("start", {"kernelspec": "toy", "key": "k", "env": None}),
        ("start", {"kernelspec": "toy", "key": "k", "env": {"A": 1}}),
        ("start", {"kernelspec": ["toy"], "key": "k", "env": {}}),
        ("start", {"kernelspec": "to\0y", "key": "k", "env": {}}),
        ("list", {}),
        ("list", {"path": None}),
        ("stat", {"path": 7}),
        ("delete", {"path": ["x"]}),
        ("read", {"path": "x"}),
        ("write", {"path": {}, "stream": 3}),
        ("pack", {"path": ""}),
        ("unpack", {"stream": 3}),
        ("read", {"path": "x", "stream": "3"}),
        ("write", {"path": "y", "stream": -1}),
        ("pack", {"path": "", "stream": 2**32}),
        ("unpack", {"path": "", "stream": None}),
        ("extend", {}),
        ("extend", {"lifetime": "long"}),
        ("no such operation", {}),
        ("", {}),
        (None, {}),
        (["list"], {}),
    ],
)
def test_a_command_of_another_shape_is_refused(supervisor: Supervisor, op: Any, arguments: dict[str, Any]) -> None:
    (Path(supervisor.relay.commands._work.root) / "x").touch()
    supervisor.host.greet()
    reply = supervisor.host.command(op, **arguments)
    assert reply["error"]["code"]
    assert reply["error"]["message"]
    assert "entries" in supervisor.host.command("list", path="")["result"]


def test_a_command_without_a_number_costs_the_stream_alone(supervisor: Supervisor) -> None:
    supervisor.host.greet()
    supervisor.host.send(frames.pack_json(Kind.COMMAND, {"op": "list", "path": ""}))
    supervisor.host.greet()
    assert "result" in supervisor.host.command("list", path="")


def test_memory_is_known_or_none(supervisor: Supervisor) -> None:
    supervisor.host.greet()
    found = supervisor.host.command("memory")["result"]
    assert set(found) == {"memory_used", "memory_peak", "memory_limit", "oom_kills"}
    assert all(value is None or isinstance(value, int) for value in found.values())


def test_end_ends_the_loop(supervisor: Supervisor) -> None:
    supervisor.host.greet()
    supervisor.start()
    assert supervisor.host.command("end") == {"result": {}}
    assert supervisor.end() == 0


def test_files_move_in_and_out(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    content = os.urandom(3 * frames.WINDOW + 17)
    host._commands += 1
    host.send(frames.pack_json(Kind.COMMAND, {"id": host._commands, "op": "write", "path": "a/b", "stream": 9}))
    credit, rest = frames.WINDOW, content
    while rest:
        while credit <= 0:
            credit += frames.unpack_credit(host.until(Kind.CREDIT).payload)[1]
        size = min(frames.CHUNK, credit)
        host.send(frames.pack_data(9, rest[:size]))
        credit, rest = credit - size, rest[size:]
    host.send(frames.pack_data_end(9, {}))
    assert frames.unpack_json(host.until(Kind.REPLY).payload)["result"] == {"size": len(content)}

    assert host.command("read", path="a/b", stream=10) == {"result": {"size": len(content)}}
    found = b""
    while (frame := host.frame()).kind is Kind.DATA:
        chunk = frames.unpack_data(frame.payload)[1]
        found += chunk
        host.send(frames.pack_credit(10, len(chunk)))
    assert frame.kind is Kind.DATA_END
    assert found == content
    assert host.command("stat", path="a/b")["result"] == {"type": "file", "size": len(content)}
    assert host.command("delete", path="a") == {"result": {}}
    assert host.command("list", path="")["result"]["entries"] == []
    assert host.command("stat", path="a/b")["error"]["code"] == "file_not_found"


def test_a_transfer_is_broken_off_with_the_stream(supervisor: Supervisor) -> None:
    host = supervisor.host
    host.greet()
    host.send(frames.pack_json(Kind.COMMAND, {"id": 1, "op": "write", "path": "x", "stream": 9}))
    host.send(frames.pack_data(9, b"half"))
    host.until(Kind.CREDIT)
    host.hang_up()
    host.greet()
    assert host.command("list", path="")["result"]["entries"] == []
    # Its number may be used again.
    host.send(frames.pack_data(9, b"for nobody"))
    assert host.command("list", path="")["result"]["entries"] == []


# the clock


def test_silence_ends_the_box(supervisor: Supervisor) -> None:
    supervisor.host.greet(silence=0.2)
    supervisor.start()
    assert supervisor.end() == relay.EXIT_SILENCE


def test_a_gateway_that_speaks_is_no_silence(supervisor: Supervisor) -> None:
    supervisor.host.greet(silence=1.0)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        supervisor.host.send(frames.pack(Kind.PING))
        supervisor.host.until(Kind.PONG)
        time.sleep(0.05)
    assert supervisor.relay.exit_code is None


def test_a_lost_gateway_is_silence(supervisor: Supervisor) -> None:
    supervisor.host.greet(silence=0.3)
    supervisor.host.close()
    assert supervisor.end() == relay.EXIT_SILENCE


def test_the_lifetime_ends_the_box_however_busy(supervisor: Supervisor) -> None:
    supervisor.host.greet(lifetime=0.5)
    assert supervisor.host.stream is not None
    supervisor.host.stream.settimeout(1.0)
    with contextlib.suppress(OSError, EOFError):
        while True:
            supervisor.host.send(frames.pack(Kind.PING))
            supervisor.host.frame()
    assert supervisor.end() == relay.EXIT_LIFETIME


def test_the_lifetime_can_be_extended(supervisor: Supervisor) -> None:
    supervisor.host.greet(lifetime=0.5)
    assert supervisor.host.command("extend", lifetime=600) == {"result": {}}
    time.sleep(0.7)
    assert "result" in supervisor.host.command("list", path="")
    supervisor.host.command("extend", lifetime=0.1)
    assert supervisor.end() == relay.EXIT_LIFETIME


def test_sigterm_ends_the_box_at_once(supervisor: Supervisor) -> None:
    supervisor.host.greet()
    supervisor.host.command("list", path="")
    os.kill(os.getpid(), signal.SIGTERM)
    assert supervisor.end() == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, to be set: the first item is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_time_in_which_the_box_was_frozen_is_no_silence(tmp_path: Path, signals: None, clock: list[float]) -> None:
    supervisor = Relay(LinkEnd(str(tmp_path / "s")), str(tmp_path))
    supervisor.context.destroy(0)
    supervisor._silence, supervisor._lifetime = 30.0, 1e9
    for _ in range(10):
        clock[0] += 3600
        supervisor._clock()
        assert supervisor.exit_code is None
    # Each of those hours counts as the longest sleep of the loop, 2 s; what is missing are rounds in which it was awake.
    rounds = 0
    while supervisor.exit_code is None:
        clock[0] += 1.0
        supervisor._clock()
        rounds += 1
    assert (supervisor.exit_code, rounds) == (relay.EXIT_SILENCE, 11)


def test_calls_for_a_gateway_become_rare(tmp_path: Path, signals: None, clock: list[float]) -> None:
    supervisor = Relay(LinkEnd(str(tmp_path / "s")), str(tmp_path))
    supervisor.context.destroy(0)
    calls = 0
    while clock[0] < 1060.0:
        supervisor._dial()
        calls += clock[0] < supervisor._redial_at
        clock[0] = max(clock[0] + supervisor._timeout(), supervisor._redial_at)
    # Ten a second at first, then two.
    assert 195 <= calls <= 205
    with Host(tmp_path / "s").listener:
        supervisor._dial()
        assert supervisor.link.connected
        supervisor.link.welcomed = True
        supervisor._lose_link()
    assert supervisor._timeout() == relay._REDIAL


def test_time_in_which_the_box_was_frozen_is_no_wait_for_an_answer(tmp_path: Path, signals: None, clock: list[float]) -> None:
    host = Host(tmp_path / "s")
    supervisor = Relay(LinkEnd(host.path), str(tmp_path))
    supervisor.context.destroy(0)
    supervisor._silence = supervisor._lifetime = 1e9
    supervisor.link.secret = "s"
    supervisor._dial()
    for _ in range(2):
        clock[0] += 3600
        supervisor._clock()
        supervisor._serve({})
    clock[0] += 2.0
    supervisor._clock()
    with pytest.raises(LinkLost):
        supervisor._serve({})
    supervisor._lose_link()
    host.close()


def test_standard_streams_that_end_end_the_box() -> None:
    """In a process of its own, and without a kernel: so there is nothing that could be killed."""
    program = """if True:
        import sys
        from gateway.supervisor.linkend import LinkEnd
        from gateway.supervisor.relay import Relay
        sys.exit(Relay(LinkEnd(None), ".").run())
    """
    done = subprocess.run([sys.executable, "-c", program], input=b"", capture_output=True, timeout=30, check=False)
    assert done.returncode == relay.EXIT_LINK
    assert done.stderr == b""


def test_the_program_refuses_to_run_outside_of_a_sandbox() -> None:
    """Its way of ending a kernel would end everything that its user runs here."""
    command = [sys.executable, "-m", "gateway.supervisor", "--link", "/nowhere"]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert done.returncode == 2
    assert b"only as init's child in a sandbox" in done.stderr
