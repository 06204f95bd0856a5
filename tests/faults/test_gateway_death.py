"""F04, F05, F26: the gateway is killed (SIGKILL) in the middle of everything; the next one knows all of it.

`Mortal` is a gateway in a process of its own, on one port and one state directory; `start(dies_at=STEP)` makes one that kills itself
at that step of its own code (or, with "slow engine", only takes its time).
"""

import base64
import contextlib
import json
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import anyio
import httpx2
import pytest

from gateway.app import gateway_id
from gateway.sandboxes.lockdown import LABEL
from gateway.settings import Settings, load
from tests.support import GATEWAY_IDS, Event, Gateway, Kernel, engine, eventually, printed, problem, stdout

pytestmark = pytest.mark.timeout(300)

_START = 120.0
TOKEN = "mortal-" + "x" * 16


# a gateway that can be killed


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kills_after(owner: Any, name: str, wanted: Callable[..., bool] = lambda *_, **__: True) -> None:
    """From now on the process dies as soon as this function has returned."""
    original = getattr(owner, name)
    if multiprocessing.current_process().name == "MainProcess":
        raise RuntimeError("only in a child process")

    async def asynchronous(*arguments: Any, **more: Any) -> Any:
        found = await original(*arguments, **more)
        if wanted(*arguments, **more):
            _die()
        return found

    def synchronous(*arguments: Any, **more: Any) -> Any:
        found = original(*arguments, **more)
        if wanted(*arguments, **more):
            _die()
        return found

    import inspect

    setattr(owner, name, asynchronous if inspect.iscoroutinefunction(original) else synchronous)


def _records_a_kernel(_store: Any, changes: Any) -> bool:
    from gateway.store.base import PutKernel

    return any(isinstance(change, PutKernel) for change in changes)


def _delays(owner: Any, name: str, seconds: float) -> None:
    original = getattr(owner, name)

    async def late(*arguments: Any, **more: Any) -> Any:
        await anyio.sleep(seconds)
        return await original(*arguments, **more)

    setattr(owner, name, late)


def _arm(step: str) -> None:
    import docker

    from gateway.kernels.client import KernelClient
    from gateway.kernels.kernel import Kernel as Served
    from gateway.kernels.kernel_record import KernelRecord
    from gateway.sandboxes import docker as docker_engine
    from gateway.sandboxes.link import Link
    from gateway.store.sqlite import SqliteStore

    arm: dict[str, Callable[[], None]] = {
        "the link listens": lambda: _kills_after(docker_engine.DockerSandbox, "listen"),
        "container made": lambda: _kills_after(docker_engine, "_create"),
        "container started": lambda: _kills_after(docker.APIClient, "start"),
        "link connected": lambda: _kills_after(Link, "greet"),
        "kernel process started": lambda: _kills_after(Link, "command", lambda _link, op, *_, **__: op == "start"),
        "first answer": lambda: _kills_after(KernelClient, "first_answer"),
        "record written": lambda: _kills_after(SqliteStore, "commit", _records_a_kernel),
        "record known": lambda: _kills_after(KernelRecord, "begin"),
        "container removed": lambda: _kills_after(docker.APIClient, "remove_container"),
        "stop recorded": lambda: _kills_after(Served, "_set", lambda _kernel, new: new == "dead"),
        "stop begun": lambda: setattr(docker.APIClient, "remove_container", _die),
        "slow engine": lambda: _delays(docker_engine.DockerSandbox, "wake", 2.0),
        "directory removed": lambda: _kills_after(docker_engine, "_remove_directory"),
    }
    arm[step]()


def _serve(settings: Settings, ready: Any, dies_at: str) -> None:
    from gateway.app import serve
    from gateway.errors import GatewayError

    if dies_at:
        _arm(dies_at)
    try:
        serve(settings, lambda url: ready.put(("url", url)))
    except GatewayError as error:
        ready.put((error.code, error.detail))
        raise SystemExit(1) from None


class Mortal:
    """`with Mortal(link={…}) as mortal:` gives one that runs; settings as for `gateway.settings.load`."""

    def __init__(self, state_dir: Path | None = None, **overrides: Any) -> None:
        # Short: the path of a Unix socket ends in it.
        self.directory = state_dir or Path(tempfile.mkdtemp(prefix="cgm-", dir="/tmp"))
        self._guest = state_dir is not None
        self.overrides = {"token": TOKEN, "log_level": "error", **overrides}
        self.port = 0
        self._process: Any = None
        self._ready: Any = None
        self._others: list[httpx2.Client] = []
        self.id = gateway_id(self.directory)
        GATEWAY_IDS.append(self.id)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for http in self._others:
            http.close()
        if self._process is not None:
            self.kill()
        if self._guest:
            return
        with contextlib.closing(engine()) as api:
            for kernel_id in self.containers():
                api.remove_container(f"cellgate-{kernel_id}", force=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def launch(self, dies_at: str = "", **overrides: Any) -> None:
        """Starts it and does not wait. `overrides` stay for the starts after it."""
        self.overrides = {**self.overrides, **overrides}
        server = {**self.overrides.get("server", {}), "port": self.port}
        self.settings = load(**{**self.overrides, "state_dir": self.directory, "server": server})
        spawn = multiprocessing.get_context("spawn")
        self._ready = spawn.Queue()
        self._process = spawn.Process(target=_serve, args=(self.settings, self._ready, dies_at), daemon=True)
        self._process.start()

    def start(self, dies_at: str = "", **overrides: Any) -> None:
        """Starts it and waits until it answers, on the same port as before."""
        self.launch(dies_at, **overrides)
        kind, said = self.word()
        assert kind == "url", said
        self.port = int(said.rpartition(":")[2])
        self.gateway = Gateway(said, self.settings)
        self._others.append(self.gateway.http)

    def word(self) -> tuple[str, str]:
        """What it says first: ("url", URL) or an error's code and text."""
        deadline = time.monotonic() + _START
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                found: tuple[str, str] = self._ready.get(timeout=1)
                return found
            assert self._process.is_alive() or not self._ready.empty(), f"it ended without a word ({self._process.exitcode})"
        raise AssertionError(f"it said nothing within {_START:g} s")

    @property
    def pid(self) -> int:
        found: int = self._process.pid
        return found

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def terminate(self) -> None:
        self._process.terminate()
        self.wait()

    def wait(self) -> None:
        """Until the process has ended, however."""
        self._process.join(_START)
        assert not self._process.is_alive()

    def reborn(self) -> None:
        self.kill()
        self.start()

    def kernel(self, kernel: Kernel | None = None, **body: Any) -> Kernel:
        """A new kernel, or one of before seen through the gateway that runs now."""
        return self.gateway.new_kernel(**body) if kernel is None else Kernel(self.gateway, kernel.id)

    def containers(self) -> list[str]:
        """Kernel ids."""
        with contextlib.closing(engine()) as api:
            found = api.containers(all=True, filters={"label": f"{LABEL}gateway={self.id}"})
        return sorted(container["Labels"][f"{LABEL}kernel"] for container in found)

    def links(self) -> list[str]:
        try:
            return sorted(os.listdir(self.directory / "links"))
        except FileNotFoundError:
            return []

    def kernels(self) -> dict[str, str]:
        """States by id."""
        found = self.gateway.http.get("/v1/kernels").json()["kernels"]
        return {kernel["id"]: kernel["state"] for kernel in found}


def submit(kernel: Kernel, code: str, **fields: Any) -> str:
    """A cell that nobody waits for."""
    answer = kernel.post(code, detach=True, **fields)
    assert answer.status_code == 202, answer.text
    found: str = answer.json()["execution_id"]
    return found


def read_on(kernel: Kernel, execution_id: str, after: int = 0) -> list[Event]:
    """Its events numbered above `after`, to the last."""
    path = f"{kernel.path}/executions/{execution_id}/events"
    answer = kernel.http.get(path, params={"after": after}, headers={"Accept": "application/x-ndjson"}, timeout=240)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.iter_lines()]


def so_far(kernel: Kernel, execution_id: str) -> list[Event]:
    """What can be read at this moment."""
    found: list[Event] = kernel.http.get(f"{kernel.path}/executions/{execution_id}/events").json()["events"]
    return found


def whole(events: list[Event]) -> list[Event]:
    """Checks that nothing is missing, and that nobody says so."""
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    odd = [event for event in events if event["type"] in ("gap", "warning", "truncated")]
    assert not odd, f"{odd}, then {events[-1]}"
    assert events[-1]["type"] == "ended", events[-1]
    return events


def until(kernel: Kernel, execution_id: str, kind: str) -> None:
    """Waits until it has an event of this type."""
    eventually(lambda: any(event["type"] == kind for event in so_far(kernel, execution_id)), kind)


def state(kernel: Kernel, *wanted: str) -> None:
    eventually(lambda: kernel.document()["state"] in wanted, f"state {wanted}")


@contextlib.contextmanager
def broken_off() -> Iterator[None]:
    """A request during which the gateway dies."""
    with pytest.raises((httpx2.NetworkError, httpx2.RemoteProtocolError)):
        yield


# F04


_LONG = """
import io, time
import matplotlib.pyplot as plt
from IPython.display import Image, display
treasure = 42
for number in range(120):
    print("line", number, flush=True)
    time.sleep(0.05)
plt.plot([1, 2, 3])
plt.savefig(buffer := io.BytesIO())
plt.close()
display(Image(buffer.getvalue()))
print("end")
'the value'
"""


def test_a_cell_goes_on_without_its_gateway() -> None:
    with Mortal() as mortal:
        kernel = mortal.kernel()
        begun: list[Event] = []
        with (
            broken_off(),
            kernel.http.stream(
                "POST", f"{kernel.path}/execute", json={"code": _LONG}, headers={"Accept": "application/x-ndjson"}
            ) as answer,
        ):
            for line in answer.iter_lines():
                begun.append(json.loads(line))
                if "line 5" in printed(begun):
                    mortal.kill()
        time.sleep(1)
        mortal.start()
        kernel = mortal.kernel(kernel)
        events = whole(begun + read_on(kernel, begun[0]["execution_id"], begun[-1]["seq"]))
        assert printed(events) == "".join(f"line {number}\n" for number in range(120)) + "end\n"
        assert [event["type"] for event in events if event["type"] in ("display", "result")] == ["display", "result"]
        picture = next(event["data"]["image/png"] for event in events if event["type"] == "display")
        assert base64.b64decode(picture).startswith(b"\x89PNG")
        assert (events[-1]["status"], events[-1]["variables"]) == ("ok", "kept")
        result = kernel.http.get(f"{kernel.path}/executions/{begun[0]['execution_id']}").json()
        assert (stdout(result), result["last_seq"]) == (printed(events), events[-1]["seq"])
        # all else goes on working
        assert kernel.value("treasure") == "42"
        assert kernel.http.put(kernel.file("there/and"), content=b"back again").status_code == 201
        mortal.reborn()
        kernel = mortal.kernel(kernel)
        state(kernel, "idle")
        assert kernel.http.get(kernel.file("there/and")).content == b"back again"
        assert kernel.http.put(kernel.file("more"), content=bytes(3_000_000)).status_code == 201
        with kernel.submitted("import time; time.sleep(600)") as cell:
            kernel.interrupt()
            assert cell.end()["status"] == "error"
        assert kernel.value("treasure") == "42"
        kernel.restart()
        assert kernel.value("'treasure' in globals()") == "False"


def test_a_cell_that_ends_while_nobody_is_there() -> None:
    with Mortal() as mortal:
        kernel = mortal.kernel()
        running = submit(kernel, "import time; time.sleep(1.5); treasure = 42; print('done'); treasure")
        waiting = [submit(kernel, f"print({number}, treasure)") for number in range(3)]
        until(kernel, running, "started")
        mortal.kill()
        time.sleep(3)
        mortal.start()
        kernel = mortal.kernel(kernel)
        events = whole(read_on(kernel, running))
        assert (printed(events), events[-1]["status"], events[-1]["cause"]) == ("done\n", "ok", None)
        for number, execution_id in enumerate(waiting):
            events = whole(read_on(kernel, execution_id))
            assert (printed(events), events[-1]["status"]) == (f"{number} 42\n", "ok")
        assert kernel.document()["execution_count"] == 4


def test_a_sandbox_that_calls_early_is_not_heard_too_early() -> None:
    """It calls as soon as somebody listens, which is before the new gateway knows what to do with what it says."""
    with Mortal() as mortal:
        kernel = mortal.kernel()
        running = submit(kernel, "import time; time.sleep(1); print('done'); treasure = 42")
        until(kernel, running, "started")
        mortal.kill()
        time.sleep(2)
        mortal.start(dies_at="slow engine")
        kernel = mortal.kernel(kernel)
        events = whole(read_on(kernel, running))
        assert (printed(events), events[-1]["status"]) == ("done\n", "ok")
        assert kernel.value("treasure") == "42"


def test_a_question_waits_for_the_next_gateway() -> None:
    with Mortal() as mortal:
        kernel = mortal.kernel()
        asked = submit(kernel, "names = [input('first? '), input('second? ')]; print(names)", allow_stdin=True)

        def questions() -> int:
            return sum(event["type"] == "input_request" for event in so_far(kernel, asked))

        for number, value in enumerate(("Ada", "Grace"), 1):
            eventually(lambda number=number: questions() == number, "asked")  # type: ignore[misc]
            mortal.reborn()
            kernel = mortal.kernel(kernel)
            answered(kernel, asked, value)
        events = whole(read_on(kernel, asked))
        assert printed(events) == "['Ada', 'Grace']\n"


def answered(kernel: Kernel, asked: str, value: str) -> None:
    def taken() -> bool:
        answer = kernel.http.post(f"{kernel.path}/executions/{asked}/input", json={"value": value})
        if answer.status_code == 204:
            return True
        # It may not have called the new gateway yet.
        assert problem(answer, 409, "kernel_unavailable")["retryable"]
        return False

    eventually(taken, "answered")


@pytest.mark.parametrize("away", [0, 4])
def test_a_deadline_counts_on(away: float) -> None:
    """Also when it passes while nobody is there."""
    with Mortal(kernels={"interrupt_grace": 2.0}) as mortal:
        kernel = mortal.kernel()
        kernel.run("treasure = 42")
        endless = submit(kernel, "import time\nwhile True: time.sleep(0.1)", timeout=3)
        until(kernel, endless, "started")
        mortal.kill()
        time.sleep(away)
        mortal.start()
        kernel = mortal.kernel(kernel)
        end = read_on(kernel, endless)[-1]
        assert (end["status"], end["cause"]["code"], end["cause"]["step"]) == ("timeout", "cell_timeout", "interrupt")
        assert kernel.value("treasure") == "42"


def test_a_cell_that_met_its_deadline_is_no_timeout() -> None:
    with Mortal() as mortal:
        kernel = mortal.kernel()
        running = submit(kernel, "import time; time.sleep(1); print('in time')", timeout=3)
        until(kernel, running, "started")
        mortal.kill()
        time.sleep(4)
        mortal.start()
        events = whole(read_on(mortal.kernel(kernel), running))
        assert (printed(events), events[-1]["status"]) == ("in time\n", "ok")


def test_a_cancelled_cell_stays_cancelled() -> None:
    with Mortal(kernels={"interrupt_grace": 600.0}) as mortal:
        kernel = mortal.kernel()
        deaf = (
            "import time\nwhile True:\n"
            "    try: time.sleep(0.2)\n"
            "    except KeyboardInterrupt:\n"
            "        print('heard', flush=True)\n"
            "        if (count := globals().get('count', 0) + 1) > 1: raise\n"
        )
        running = submit(kernel, deaf)
        waiting = submit(kernel, "print('never')")
        until(kernel, running, "started")
        assert kernel.http.delete(f"{kernel.path}/executions/{waiting}").status_code == 202
        assert kernel.http.delete(f"{kernel.path}/executions/{running}").status_code == 202
        eventually(lambda: "heard" in printed(so_far(kernel, running)), "interrupted")
        mortal.reborn()
        kernel = mortal.kernel(kernel)
        end = read_on(kernel, running)[-1]
        assert (end["status"], end["cause"]["code"]) == ("cancelled", "cancelled")
        assert read_on(kernel, waiting)[-1]["status"] == "cancelled"


def test_a_frozen_kernel_is_taken_over() -> None:
    with Mortal(culling={"freeze_after": 0.5, "cull_interval": 0.2}) as mortal:
        kernel = mortal.kernel()
        kernel.run("treasure = 42")
        eventually(lambda: kernel.document()["frozen"], "frozen")
        mortal.reborn()
        kernel = mortal.kernel(kernel)
        assert kernel.value("treasure") == "42"
        eventually(lambda: kernel.document()["frozen"], "frozen again")
        assert kernel.value("treasure") == "42"


def test_output_of_a_thread_is_told_once() -> None:
    """Also what comes outside of any cell."""
    code = (
        "import threading, time\n"
        "def chatter():\n    for number in range(100): print('tick', number, flush=True); time.sleep(0.05)\n"
        "threading.Thread(target=chatter).start()"
    )
    with Mortal() as mortal:
        kernel = mortal.kernel()
        started = submit(kernel, code)
        end = read_on(kernel, started)[-1]
        assert end["status"] == "ok"

        def heard() -> str:
            own = kernel.http.get(f"{kernel.path}/events").json()["events"]
            assert [event["seq"] for event in own] == list(range(1, len(own) + 1))
            return printed(so_far(kernel, started)) + printed([e for e in own if e.get("from_execution") == started])

        for wanted in ("tick 10\n", "tick 40\n"):
            eventually(lambda wanted=wanted: wanted in heard(), wanted)  # type: ignore[misc]
            mortal.reborn()
            kernel = mortal.kernel(kernel)
        eventually(lambda: "tick 99\n" in heard(), "all of it")
        assert heard() == "".join(f"tick {number}\n" for number in range(100))


_FLOOD = """
for number in range(40_000):
    print(number, "x" * 80)
"""


def test_a_flood_waits_for_the_next_gateway() -> None:
    """More than may be kept: the cell is held up, and nothing is left out."""
    with Mortal(link={"max_unacknowledged": 256 * 1024}) as mortal:
        kernel = mortal.kernel()
        running = submit(kernel, "import time; time.sleep(1)" + _FLOOD)
        until(kernel, running, "started")
        mortal.kill()
        time.sleep(5)
        mortal.start()
        events = whole(read_on(mortal.kernel(kernel), running))
        assert printed(events) == "".join(f"{number} {'x' * 80}\n" for number in range(40_000))


_SHOWS = """
from IPython.display import display
for last in range(3000):  # each a message of its own, so that they can be counted
    display({"text/plain": f"{last} " + "x" * 1000}, raw=True)
"""


def test_a_flood_that_may_be_left_out_is_counted() -> None:
    with Mortal(link={"max_unacknowledged": 256 * 1024, "overflow": "drop"}) as mortal:
        kernel = mortal.kernel()
        running = submit(kernel, "import time; time.sleep(1)" + _SHOWS)
        until(kernel, running, "started")
        mortal.kill()
        with contextlib.closing(engine()) as api:
            eventually(lambda: _cpu_at_rest(api, kernel), "the cell has ended")
        mortal.start()
        kernel = mortal.kernel(kernel)
        events = read_on(kernel, running)
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        left_out = sum(event["events"] for event in events if event["type"] == "gap")
        came = [int(event["data"]["text/plain"].split()[0]) for event in events if event["type"] == "display"]
        assert left_out > 0
        assert len(came) + left_out == 3000
        assert came == sorted(set(came))
        result = kernel.http.get(f"{kernel.path}/executions/{running}").json()
        assert result["gap"]["events"] == left_out
        assert kernel.value("last") == "2999"


def _cpu_at_rest(api: Any, kernel: Kernel) -> bool:
    def used() -> int:
        found: int = api.stats(kernel.container, stream=False, one_shot=True)["cpu_stats"]["cpu_usage"]["total_usage"]
        return found

    before = used()
    time.sleep(1)
    return used() - before < 100_000_000


# what ends while nobody is there


def _processes(api: Any, kernel: Kernel) -> str:
    return str(api.top(kernel.container)["Processes"])


def test_a_kernel_process_that_dies_meanwhile() -> None:
    with Mortal() as mortal:
        kernel = mortal.kernel()
        kernel.run("open('treasure', 'w').write('42')")
        running = submit(kernel, "import os, time; print('last words', flush=True); time.sleep(1.5); os._exit(3)")
        behind = submit(kernel, "1")
        until(kernel, running, "stream")
        mortal.kill()
        with contextlib.closing(engine()) as api:
            eventually(lambda: "cellgate_kernel" not in _processes(api, kernel), "the process has ended")
        mortal.start()
        kernel = mortal.kernel(kernel)
        events = whole(read_on(kernel, running))
        end = events[-1]
        assert (printed(events), end["status"], end["variables"]) == ("last words\n", "died", "lost")
        assert (end["cause"]["code"], end["cause"]["exit_code"]) == ("exit", 3)
        assert (read_on(kernel, behind)[-1]["status"], kernel.document()["state"]) == ("aborted", "dead")
        after = kernel.events("print(open('treasure').read())")
        assert [event.get("code") for event in after if event["type"] == "warning"] == ["kernel_restarted"]
        assert printed(after) == "42\n"


def test_a_container_that_is_removed_meanwhile() -> None:
    with Mortal() as mortal:
        kernel, idle = mortal.kernel(), mortal.kernel()
        running = submit(kernel, "import time; print('last words', flush=True); time.sleep(600)")
        until(kernel, running, "stream")
        mortal.kill()
        with contextlib.closing(engine()) as api:
            for gone in (kernel, idle):
                api.remove_container(gone.container, force=True)
        mortal.start()
        kernel, idle = mortal.kernel(kernel), mortal.kernel(idle)
        events = read_on(kernel, running)
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert [event["code"] for event in events if event["type"] == "warning"] == ["output_may_be_missing"]
        end = events[-1]
        assert (printed(events), end["status"], end["cause"]["code"]) == ("last words\n", "died", "sandbox_removed")
        for gone in (kernel, idle):
            state(gone, "dead")
            assert gone.document()["cause"]["code"] == "sandbox_removed"
            problem(gone.post("1"), 409, "kernel_dead")
        # and the gateway after that still knows
        mortal.reborn()
        kernel, idle = mortal.kernel(kernel), mortal.kernel(idle)
        assert mortal.kernels() == {kernel.id: "dead", idle.id: "dead"}
        assert read_on(kernel, running) == events
        problem(idle.post("1"), 409, "kernel_dead")
        eventually(lambda: mortal.links() == [], "link directories removed")


# F05: at each step of a create


_UNRECORDED = [
    "the link listens",
    "container made",
    "container started",
    "link connected",
    "kernel process started",
    "first answer",
]
_RECORDED = ["record written", "record known"]


def _create(mortal: Mortal, key: str) -> httpx2.Response:
    return mortal.gateway.http.post("/v1/kernels", json={"label": "mine"}, headers={"Idempotency-Key": key})


@pytest.mark.parametrize("step", _UNRECORDED + _RECORDED)
def test_killed_in_a_create(step: str) -> None:
    with Mortal() as mortal:
        mortal.kill()
        mortal.start(dies_at=step)
        with broken_off():
            _create(mortal, "key")
        mortal.wait()
        mortal.start()
        if step in _UNRECORDED:
            assert mortal.kernels() == {}
            eventually(lambda: mortal.containers() == [], "no orphan")
            eventually(lambda: mortal.links() == [], "no link directory")
        else:
            (kernel_id,) = mortal.kernels()
            assert mortal.containers() == mortal.links() == [kernel_id]
        answer = _create(mortal, "key")
        assert answer.status_code == 201, answer.text
        assert answer.headers.get("idempotency-replayed") == (None if step in _UNRECORDED else "true")
        kernel = Kernel(mortal.gateway, answer.json()["id"])
        assert (list(mortal.kernels()), mortal.containers()) == ([kernel.id], [kernel.id])
        if step in _RECORDED:
            assert kernel.id == kernel_id
        assert kernel.value("6 * 7") == "42"
        mortal.reborn()
        kernel = mortal.kernel(kernel)
        assert _create(mortal, "key").json()["id"] == kernel.id
        problem(
            mortal.gateway.http.post("/v1/kernels", json={}, headers={"Idempotency-Key": "key"}), 409, "idempotency_conflict"
        )
        kernel.delete()
        assert (mortal.kernels(), mortal.containers(), mortal.links()) == ({}, [], [])


@pytest.mark.parametrize("step", ["stop begun", "container removed", "directory removed", "stop recorded"])
def test_killed_in_a_delete(step: str) -> None:
    """What was begun is finished, and told as what it was."""
    with Mortal() as mortal:
        kernel = mortal.kernel()
        running = submit(kernel, "import time; print('last words', flush=True); time.sleep(600)")
        until(kernel, running, "stream")
        mortal.kill()
        mortal.start(dies_at=step)
        kernel = mortal.kernel(kernel)
        state(kernel, "busy")
        with broken_off():
            kernel.http.delete(kernel.path)
        mortal.wait()
        mortal.start()
        kernel = mortal.kernel(kernel)
        eventually(lambda: kernel.http.get(kernel.path).status_code == 410, "gone")
        document = problem(kernel.http.get(kernel.path), 410, "kernel_gone")
        assert document["cause"]["code"] == "kernel_deleted"
        eventually(lambda: (mortal.containers(), mortal.links()) == ([], []), "nothing is left")
        events = read_on(kernel, running)
        assert (printed(events), events[-1]["status"]) == ("last words\n", "died")
        assert events[-1]["cause"]["code"] == "kernel_deleted"


@pytest.mark.parametrize("step", ["kernel process started", "first answer"])
def test_killed_while_a_process_is_made_anew(step: str) -> None:
    """A cell that brings a dead kernel back runs once, in whatever process is there in the end."""
    with Mortal() as mortal:
        kernel = mortal.kernel()
        kernel.execute("import os; os._exit(1)")
        mortal.kill()
        mortal.start(dies_at=step)
        kernel = mortal.kernel(kernel)
        with contextlib.suppress(httpx2.TransportError):
            eventually(lambda: _revives(kernel), "accepted")
        mortal.wait()
        mortal.start()
        kernel = mortal.kernel(kernel)
        state(kernel, "idle")
        found = kernel.http.get(f"{kernel.path}/executions").json()["executions"]
        if len(found) == 2:
            events = read_on(kernel, found[0]["execution_id"])
            assert [event["code"] for event in events if event["type"] == "warning"] == ["kernel_restarted"]
            assert (printed(events), events[-1]["status"]) == ("here\n", "ok")
        assert kernel.value("open('log').read()" if len(found) == 2 else "'x'") == "'x'"


def _revives(kernel: Kernel) -> bool:
    code = "open('log', 'a').write('x'); print('here')"
    return kernel.http.post(f"{kernel.path}/execute", json={"code": code, "detach": True}).status_code == 202


# F26


def test_other_settings_than_before() -> None:
    spec = {"limits": {"memory": "512m"}, "cell_timeout": 77.0, "env": {"STAGE": "old"}}
    with Mortal(kernels={"specs": {"python3": spec, "old": spec}, "default_spec": "old"}) as mortal:
        kernel = mortal.kernel()
        kernel.run("treasure = 42")
        before = kernel.document()
        assert (before["spec"], before["limits"]["memory"]) == ("old", 512 * 1024 * 1024)
        mortal.kill()
        # its spec is gone, the other means something else, the limits on the number of kernels and of output are others
        other = {"limits": {"memory": "256m"}, "env": {"STAGE": "new"}}
        mortal.start(
            kernels={"specs": {"python3": other}, "max_kernels": 1, "max_output": 1_000_000},
            link={"max_unacknowledged": 1024 * 1024, "ping_interval": 1.0},
        )
        kernel = mortal.kernel(kernel)
        state(kernel, "idle")
        after = kernel.document()
        same = ("id", "spec", "limits", "cell_timeout", "created_at", "expires_at", "label", "execution_count")
        assert [after[name] for name in same] == [before[name] for name in same]
        assert kernel.value("treasure") == "42"
        problem(mortal.gateway.http.post("/v1/kernels", json={}), 429, "too_many_kernels")
        problem(mortal.gateway.http.post("/v1/kernels", json={"spec": "old"}), 404, "spec_not_found")
        # and by hand: its process starts as it always did
        kernel.restart()
        assert kernel.value("__import__('os').environ['STAGE']") == "'old'"
