"""The Docker engine against a daemon that hangs, breaks connections and comes back: a script that speaks just enough of its API.

What is looked at is which calls fail and what the daemon was asked; how long anything takes is not.
"""

import contextlib
import json
import shutil
import socketserver
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.errors import EngineUnavailable
from gateway.sandboxes import docker as subject
from gateway.sandboxes.base import FoundSandbox, Limits, SandboxSpec
from gateway.sandboxes.docker import DockerEngine
from gateway.sandboxes.link import Link
from gateway.settings import MIB, LinkSettings, load
from gateway.supervisor import frames
from gateway.supervisor.frames import Decoder, Kind
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio

KERNEL = "0f1e2d3c-0000-4000-8000-000000000000"
SPEC = SandboxSpec(KERNEL, "cellgate-kernel:latest", Limits(512 * MIB, 1.0, 64), MIB, MIB, MIB)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    daemon: "ScriptedDaemon"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        assert isinstance(self.server, _Server)
        daemon = self.server.daemon
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        path = self.path.removeprefix("/v1.41")
        daemon.calls.append(f"{self.command} {path.partition('?')[0]}")
        daemon.hanging.wait()
        if daemon.breaks_before:
            daemon.breaks_before -= 1
            self.close_connection = True
            return
        status, found = daemon.answer(self.command, path, body)
        if daemon.breaks_after:
            daemon.breaks_after -= 1
            self.close_connection = True
            return
        text = b"" if status == 204 else json.dumps(found).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


class ScriptedDaemon:
    def __init__(self, directory: Path) -> None:
        self.url = f"unix://{directory}/s"
        self.calls: list[str] = []
        self.containers: dict[str, dict[str, Any]] = {}
        self.breaks_before = self.breaks_after = 0
        """So many of the next requests get no answer: the connection is closed before, or after it was done what they ask for."""
        self.security = ["name=seccomp,profile=default"]
        self.broken = ""
        """Path of requests that are answered with 500."""
        self.hanging = threading.Event()
        self.resume()
        self._server = _Server(f"{directory}/s", _Handler)
        self._server.daemon = self
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def hang(self) -> None:
        self.hanging.clear()

    def resume(self) -> None:
        self.hanging.set()

    def count(self, call: str) -> int:
        return self.calls.count(call)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        name = path.removeprefix("/containers/").partition("/")[0]
        if path == self.broken:
            return 500, {"message": "a fault"}
        match method, path:
            case "GET", "/version":
                return 200, {"ApiVersion": "1.41", "Version": "20.10.24"}
            case "GET", "/_ping":
                return 200, "OK"
            case "GET", "/info":
                return 200, {"SecurityOptions": self.security, "Runtimes": {"runc": {}}, "MemTotal": 1 << 33}
            case "GET", _ if path.startswith("/images/"):
                return 200, {"Config": {"Labels": {}}, "Size": 1}
            case "GET", "/containers/json":
                return 200, [
                    {"Id": name, "Names": [f"/{name}"], "State": "running", "Labels": container["Labels"]}
                    for name, container in self.containers.items()
                ]
            case "POST", "/containers/create":
                self.containers[query.removeprefix("name=")] = body
                return 201, {"Id": "1", "Warnings": []}
            case "DELETE", _:
                return (204, None) if self.containers.pop(name, None) else (404, {"message": "No such container"})
            case "GET", _ if name in self.containers:
                state = {"Running": True, "Paused": False}
                return 200, {"Id": name, "State": state, "Config": {"Labels": self.containers[name]["Labels"]}}
            case "GET", _:
                return 404, {"message": "No such container"}
        return 204, None

    def close(self) -> None:
        self.resume()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def directory() -> Iterator[Path]:
    # Short, since the path of a Unix socket in it ends at 107 bytes.
    found = Path(tempfile.mkdtemp(prefix="cgd-", dir="/tmp"))
    yield found
    shutil.rmtree(found)


@pytest.fixture
def daemon(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDaemon]:
    monkeypatch.setattr(subject, "_PING", 0.3)
    monkeypatch.setattr(subject, "_QUICK", 0.5)
    scripted = ScriptedDaemon(directory)
    with contextlib.closing(scripted):
        yield scripted


@contextlib.asynccontextmanager
async def engine_at(daemon: ScriptedDaemon, directory: Path, **options: Any) -> AsyncIterator[DockerEngine]:
    settings = load(state_dir=directory / "state", docker={"url": daemon.url, "link": "socket", "timeout": 1.0, **options})
    engine = DockerEngine(settings, "ours")
    yield engine
    await engine.aclose()


@pytest.fixture
async def engine(daemon: ScriptedDaemon, directory: Path) -> AsyncIterator[DockerEngine]:
    async with engine_at(daemon, directory) as found:
        yield found


def make_link() -> Link:
    return Link(LinkSettings(), lambda _: None, 60.0, 60.0)


def links(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("state/links/*")]


async def test_a_box_is_made_found_and_removed(engine: DockerEngine, daemon: ScriptedDaemon, directory: Path) -> None:
    sandbox = await engine.create(SPEC, make_link)
    assert links(directory) == [KERNEL]
    assert await engine.list() == [FoundSandbox(KERNEL, running=True)]
    assert await sandbox.exit() is None
    await sandbox.remove()
    assert (await engine.list(), links(directory)) == ([], [])


async def test_a_daemon_that_is_known_to_hang_costs_a_question_only(
    engine: DockerEngine, daemon: ScriptedDaemon, directory: Path
) -> None:
    sandbox = await engine.create(SPEC, make_link)
    daemon.hang()
    with pytest.raises(EngineUnavailable):
        await engine.list()
    daemon.calls.clear()
    for call in (lambda: engine.create(SPEC, make_link), engine.list, sandbox.exit, sandbox.freeze, sandbox.thaw):
        with pytest.raises(EngineUnavailable):
            await call()
    assert set(daemon.calls) == {"GET /_ping"}
    assert links(directory) == [KERNEL]
    daemon.resume()
    assert len(await engine.list()) == 1
    assert await sandbox.exit() is None
    await sandbox.remove()


async def test_all_who_wait_are_answered_by_one_question(engine: DockerEngine, daemon: ScriptedDaemon) -> None:
    await engine.list()
    daemon.hang()
    with pytest.raises(EngineUnavailable):
        await engine.list()
    daemon.calls.clear()
    failed = 0

    async def ask() -> None:
        nonlocal failed
        with pytest.raises(EngineUnavailable):
            await engine.list()
        failed += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(ask)
    assert failed == 20
    # Those who had no slot at first ask once more.
    assert 1 <= daemon.count("GET /_ping") <= 3
    daemon.resume()


async def test_calls_that_hang_do_not_hold_up_the_others(daemon: ScriptedDaemon, directory: Path) -> None:
    """Two that hang have all the slots; a third gets to know it before they do, and a question does not wait for them at all."""
    async with engine_at(daemon, directory, parallel_calls=2, timeout=20.0) as engine:
        await engine.list()
        daemon.hang()
        ended: list[str] = []

        async def remove(name: str) -> None:
            with contextlib.suppress(EngineUnavailable):
                await engine.remove(name)
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(remove, "first")
            tasks.start_soon(remove, "second")
            await until(lambda: daemon.count("DELETE /containers/first") + daemon.count("DELETE /containers/second") == 2)
            with pytest.raises(EngineUnavailable):
                await engine.remove("third")
            with pytest.raises(EngineUnavailable):
                await engine.list()
            assert ended == []
            assert daemon.count("DELETE /containers/third") == 0
            daemon.resume()


async def test_a_long_wait_for_a_slot_is_no_failure_while_the_daemon_answers(daemon: ScriptedDaemon, directory: Path) -> None:
    async with engine_at(daemon, directory, parallel_calls=1, timeout=20.0) as engine:
        begun, release = threading.Event(), threading.Event()

        def occupy(_: object) -> None:
            begun.set()
            release.wait(20)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.call, occupy)
            await until(begun.is_set)
            tasks.start_soon(engine.remove, "waiting")
            await until(lambda: daemon.count("GET /_ping") >= 2)
            assert daemon.count("DELETE /containers/waiting") == 0
            release.set()
        assert daemon.count("DELETE /containers/waiting") == 1


async def test_a_broken_connection_is_no_failure_of_what_can_be_repeated(
    engine: DockerEngine, daemon: ScriptedDaemon, directory: Path
) -> None:
    sandbox = await engine.create(SPEC, make_link)
    for call in (engine.list, sandbox.exit, sandbox.freeze, sandbox.thaw):
        for way in ("breaks_before", "breaks_after"):
            setattr(daemon, way, 1)
            await call()
    daemon.breaks_before = 2
    with pytest.raises(EngineUnavailable):
        await engine.list()
    daemon.breaks_before = 1
    # The question whether it is there may be repeated too.
    assert len(await engine.list()) == 1
    daemon.breaks_after = 1
    await sandbox.remove()
    assert (daemon.containers, links(directory)) == ({}, [])


@pytest.mark.parametrize(("way", "posts"), [("breaks_before", 2), ("breaks_after", 1)])
async def test_a_create_is_repeated_only_when_nothing_was_made(
    engine: DockerEngine, daemon: ScriptedDaemon, way: str, posts: int
) -> None:
    await engine.check()
    setattr(daemon, way, 1)
    sandbox = await engine.create(SPEC, make_link)
    assert daemon.count("POST /containers/create") == posts
    assert list(daemon.containers) == [sandbox.name]
    await sandbox.remove()


async def test_a_create_that_hangs_leaves_nothing_here(engine: DockerEngine, daemon: ScriptedDaemon, directory: Path) -> None:
    """What the daemon makes of it later is there for `list` to find."""
    await engine.check()
    daemon.hang()
    with pytest.raises(EngineUnavailable):
        await engine.create(SPEC, make_link)
    assert links(directory) == []
    daemon.resume()
    await until(lambda: daemon.containers)
    await engine.discard(KERNEL)
    assert await engine.list() == []


def security_of(daemon: ScriptedDaemon) -> list[str]:
    (container,) = daemon.containers.values()
    return [option.partition("{")[0] for option in container["HostConfig"]["SecurityOpt"]]


@pytest.mark.parametrize("checks", ["in vain", "never", "well"])
async def test_the_first_box_has_all_of_the_lockdown_whenever_the_engine_was_asked(
    daemon: ScriptedDaemon, engine: DockerEngine, checks: str
) -> None:
    daemon.security.append("name=apparmor")
    if checks == "in vain":
        daemon.hang()
        with pytest.raises(EngineUnavailable):
            await engine.check()
        with pytest.raises(EngineUnavailable):
            await engine.create(SPEC, make_link)
        daemon.resume()
    elif checks == "well":
        await engine.check()
    sandbox = await engine.create(SPEC, make_link)
    assert security_of(daemon) == ["no-new-privileges:true", "seccomp=", "apparmor=docker-default"]
    await sandbox.remove()


async def test_a_question_that_is_answered_with_an_error_is_answered(engine: DockerEngine, daemon: ScriptedDaemon) -> None:
    await engine.check()
    daemon.hang()
    with pytest.raises(EngineUnavailable):
        await engine.list()
    daemon.broken = "/_ping"
    daemon.resume()
    assert await engine.list() == []


@pytest.mark.parametrize("path", ["/version", "/info", "/images/cellgate-kernel:latest/json", "/containers/json"])
async def test_a_daemon_that_answers_with_a_fault_of_its_own_is_unavailable(
    engine: DockerEngine, daemon: ScriptedDaemon, directory: Path, path: str
) -> None:
    """As one does that is about to end."""
    daemon.broken = path
    if path == "/containers/json":
        with pytest.raises(EngineUnavailable):
            await engine.list()
        return
    with pytest.raises(EngineUnavailable):
        await engine.check()
    with pytest.raises(EngineUnavailable):
        await engine.create(SPEC, make_link)
    assert (daemon.containers, links(directory)) == ({}, [])
    daemon.broken = ""
    sandbox = await engine.create(SPEC, make_link)
    await sandbox.remove()


async def test_a_box_is_adopted_without_the_engine(engine: DockerEngine, daemon: ScriptedDaemon, directory: Path) -> None:
    made = await engine.create(SPEC, make_link)
    place = (directory / f"state/links/{KERNEL}").stat()
    await made.detach()
    daemon.hang()
    async with engine_at(daemon, directory) as later:
        taken = await later.adopt(KERNEL, make_link)
        stream = await anyio.connect_unix(directory / f"state/links/{KERNEL}/link.sock")
        async with stream:
            await stream.send(frames.pack_json(Kind.HELLO, {"version": frames.VERSION, "secret": "", "received": 0}))
            (welcome, *_) = Decoder(1 << 20).feed(await stream.receive())
        assert welcome.kind is Kind.WELCOME
        # The very directory that is mounted in the container.
        assert (directory / f"state/links/{KERNEL}").stat().st_ino == place.st_ino
        daemon.resume()
        await taken.remove()
    assert (daemon.containers, links(directory)) == ({}, [])


async def test_only_names_that_are_ids_become_paths(engine: DockerEngine, directory: Path) -> None:
    (directory / "state/links").mkdir(parents=True)
    (directory / "state/kept").mkdir()
    for name in ("..", "../kept", "", ".", "a/../../kept", f"{directory}/state/kept", "..\0"):
        await engine.discard(name)
        with pytest.raises(ValueError):
            await engine.adopt(name, make_link)
    assert (directory / "state/kept").exists()
    assert (directory / "state/links").exists()
