"""The Docker engine: containers made by the lock-down profile and nothing else.

The docker SDK blocks, so each call runs in a thread, bounded in number; none lies on the way of a cell. A daemon may refuse, hang,
die and come back: what a call may fail with becomes an error of ours here, and soon.
"""

import asyncio
import contextlib
import math
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import anyio
import anyio.to_thread
import docker
import docker.errors
import requests.exceptions
import structlog

from gateway.errors import ConfigurationError, EngineUnavailable, ImageMissing, LinkClosed, StartFailed
from gateway.sandboxes import docker_check, lockdown
from gateway.sandboxes.base import EngineReport, FoundSandbox, SandboxExit, SandboxSpec
from gateway.sandboxes.image import ROOT, source_files
from gateway.sandboxes.link import Connection, Link
from gateway.sandboxes.lockdown import LABEL, LINK_SOCKET, container_body
from gateway.sandboxes.stdio import StdioConnection
from gateway.settings import DockerSettings, Settings

log = structlog.get_logger()
T = TypeVar("T")

_MAX_SOCKET_PATH = 107
_PING, _QUICK = 2.0, 5.0
"""Seconds that a daemon gets to say whether it is there, and to answer a question that costs it nothing."""
_ID = re.compile(r"[0-9A-Za-z-]{1,63}")
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_RUNNING = ("running", "paused")


class Daemon:
    """Calls to one Docker daemon. Cheap to make: the first call connects.

    After a call that was not answered, the next ones ask first whether the daemon is there, all with one question, and fail
    within `_PING` seconds while it is not. So do calls that have waited long for their turn behind others that hang.
    """

    def __init__(self, settings: DockerSettings) -> None:
        self.url = settings.url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._timeout = settings.timeout
        # Questions have slots of their own, so that they never wait behind work that hangs.
        self._work, self._questions = (anyio.Semaphore(settings.parallel_calls) for _ in range(2))
        self._threads = anyio.CapacityLimiter(math.inf)
        self._clients: dict[float, docker.APIClient] = {}
        self._making = threading.Lock()
        self._version = "auto"
        self._asking = anyio.Lock()
        self._doubtful = True
        self._failed_at = -math.inf

    async def call(
        self, function: Callable[[docker.APIClient], T], *, whole: bool = False, quick: bool = False, again: bool = True
    ) -> T:
        """Runs `function` with an API client in a thread; raises `EngineUnavailable` when the daemon does not answer.

        `whole`: a cancelled caller waits for the end of the call, since what it makes or removes must be known. `quick`: a
        question, which gets little time. `again`: it may be run a second time when a kept-alive connection turns out to be broken.
        """
        async with self._slot(self._questions if quick else self._work):
            client = partial(self._client, min(_QUICK, self._timeout) if quick else self._timeout)
            return await self._attempt(partial(_run, function, client, again), whole)

    async def be_sure(self) -> None:
        """Raises `EngineUnavailable` when there was reason to doubt that the daemon is there, and it is not."""
        if not self._doubtful:
            return
        since = time.monotonic()
        async with self._asking:
            if self._failed_at > since:
                # Somebody has asked meanwhile.
                raise self._unavailable()
            if self._doubtful:
                # One that answers with an error is there.
                with contextlib.suppress(docker.errors.APIError):
                    await self._attempt(self._ask, whole=False)

    async def aclose(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await anyio.to_thread.run_sync(client.close)

    @contextlib.asynccontextmanager
    async def _slot(self, slots: anyio.Semaphore) -> AsyncIterator[None]:
        while True:
            await self.be_sure()
            with anyio.move_on_after(_QUICK) as patience:
                await slots.acquire()
            if not patience.cancelled_caught:
                break
            self._doubtful = True
        try:
            # Those who had the slot before may have found out.
            await self.be_sure()
            yield
        finally:
            slots.release()

    async def _attempt(self, function: Callable[[], T], whole: bool) -> T:
        try:
            found = await anyio.to_thread.run_sync(function, abandon_on_cancel=not whole, limiter=self._threads)
        except docker.errors.APIError:
            # The daemon has answered, and refused: for the caller to judge. (It is a RequestException too.)
            self._doubtful = False
            raise
        except (requests.exceptions.RequestException, OSError, docker.errors.DockerException) as error:
            # Where the engine is, is for the log: clients get the text.
            log.warning("engine_does_not_answer", url=self.url, reason=type(error).__name__)
            self._doubtful, self._failed_at = True, time.monotonic()
            raise self._unavailable() from None
        self._doubtful = False
        return found

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable(
            "The Docker engine does not answer. Is dockerd running, and may this user reach its socket (DOCKER_HOST, docker.url)? "
            "`cellgate doctor` tells more."
        )

    def _ask(self) -> None:
        with self._making:
            if self._version == "auto":
                # Making a client asks the daemon for its version; the others take that, and so need no answer to be made.
                first = docker.APIClient(base_url=self.url, version="auto", timeout=min(_QUICK, self._timeout))  # type: ignore[arg-type]
                self._version = first.api_version
                first.close()
                return
        _run(lambda api: api.ping(), partial(self._client, min(_PING, self._timeout)), again=True)

    def _client(self, timeout: float) -> docker.APIClient:
        with self._making:
            if timeout not in self._clients:
                self._clients[timeout] = docker.APIClient(base_url=self.url, version=self._version, timeout=timeout)  # type: ignore[arg-type]
            return self._clients[timeout]


class DockerEngine:
    """Boxes of one gateway's identity on one daemon."""

    def __init__(self, settings: Settings, gateway_id: str = "unnamed") -> None:
        self._settings = settings
        self._gateway_id = gateway_id
        self._daemon = Daemon(settings.docker)
        self.call = self._daemon.call
        self._seccomp = source_files(ROOT)["kernel-image/seccomp.json"].read_text()
        self._links = settings.state_dir / "links"
        # With "auto" a guess until `check` has asked: a daemon that does not answer can't be asked, and its boxes go on.
        self._stdio = settings.docker.link == "stdio" or (
            settings.docker.link == "auto" and not docker_check.shares_paths(self._daemon.url, {})
        )
        self._security: tuple[str, ...] | None = None
        """What the host has besides seccomp; None until `check` has asked."""

    @property
    def adopts(self) -> bool:
        """A box whose link is its stdin ends with the gateway that holds it."""
        return not self._stdio

    async def check(self) -> EngineReport:
        url = self._daemon.url
        images = {spec.image for spec in self._settings.kernels.specs.values()}
        try:
            version = await self.call(lambda api: api.version())
            info = await self.call(lambda api: api.info())
            found = {image: await self._inspect_image(image) for image in sorted(images)}
        except EngineUnavailable as error:
            # Asked by the operator, who should know where it was looked for.
            raise EngineUnavailable(f"{error.detail} It was looked for at {url}.") from None
        except docker.errors.APIError as error:
            raise EngineUnavailable(f"The engine can't tell about itself: {error.explanation or error}") from None
        report = docker_check.report(self._settings, url, version, info, found)
        if self._settings.docker.link == "auto":
            self._stdio = not docker_check.shares_paths(url, info)
        if not self._stdio:
            _check_length(self._links / str(uuid4()) / LINK_SOCKET)
        self._security = docker_check.security_options(info)
        return report

    async def _inspect_image(self, image: str) -> dict[str, Any] | None:
        try:
            return await self.call(lambda api: dict(api.inspect_image(image)))  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            return None

    async def create(self, spec: SandboxSpec, make_link: Callable[[], Link]) -> "DockerSandbox":
        # Before anything is made that would have to be removed again.
        await self._daemon.be_sure()
        if self._security is None:
            # The gateway was started while the engine was away: no box without all of the lock-down.
            await self.check()
        sandbox = DockerSandbox(self, spec.kernel_id, make_link())
        try:
            directory = None if self._stdio else await sandbox.listen(self._links)
            body = container_body(
                spec,
                gateway_id=self._gateway_id,
                runtime=self._settings.docker.runtime,
                seccomp=self._seccomp,
                link_directory=directory,
                extra_security=self._security or (),
            )
            await self.call(lambda api: _create(api, body, sandbox.name), whole=True, again=False)
            if self._stdio:
                await sandbox.attach()
            await self.call(lambda api: api.start(sandbox.name), whole=True)
        except docker.errors.ImageNotFound:
            await self._undo(sandbox)
            raise ImageMissing(
                f"The image {spec.image} is not on the engine. Build it with scripts/image; the gateway never pulls one.",
                image=spec.image,
            ) from None
        except docker.errors.APIError as error:
            await self._undo(sandbox)
            raise StartFailed(f"The engine refused to start the sandbox: {error.explanation or error}") from None
        except BaseException:
            await self._undo(sandbox)
            raise
        return sandbox

    async def _undo(self, sandbox: "DockerSandbox") -> None:
        """Removes what `create` has made so far; what can't be removed now is there for `list` to find."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(self._settings.docker.timeout):
            try:
                await sandbox.remove()
            except EngineUnavailable as error:
                log.warning("sandbox_not_removed", container=sandbox.name, reason=error.detail)

    async def adopt(self, kernel_id: str, make_link: Callable[[], Link]) -> "DockerSandbox":
        if not self.adopts:
            raise RuntimeError("a box whose link is its stdin can't be adopted")
        if not _ID.fullmatch(kernel_id):
            raise ValueError(f"not the id of a kernel: {kernel_id!r}")
        sandbox = DockerSandbox(self, kernel_id, make_link())
        try:
            await sandbox.listen(self._links, anew=False)
            await sandbox.wake()
        except EngineUnavailable as error:
            # The supervisor dials in without the engine; one that is frozen does so when a thaw of the gateway's gets through.
            log.warning("adopted_without_engine", container=sandbox.name, reason=error.detail)
        except BaseException:
            await sandbox.detach()
            raise
        return sandbox

    async def list(self) -> Sequence[FoundSandbox]:
        # Directories first: one is made before its container.
        left = set() if self._stdio else await anyio.to_thread.run_sync(partial(_names, self._links))
        label = f"{LABEL}gateway={self._gateway_id}"
        try:
            containers = await self.call(lambda api: api.containers(all=True, filters={"label": label}), quick=True)
        except docker.errors.APIError as error:
            raise EngineUnavailable(f"The engine can't tell which sandboxes there are: {error.explanation or error}") from None
        found = [
            lockdown.found(
                _kernel_id(container),
                container.get("State") in _RUNNING,
                container.get("Labels") or {},
                container.get("State") == "paused",
            )
            for container in containers
        ]
        left -= {sandbox.kernel_id for sandbox in found}
        return [*found, *(FoundSandbox(kernel_id, running=False) for kernel_id in sorted(left))]

    async def discard(self, kernel_id: str) -> None:
        if _ID.fullmatch(kernel_id):
            await self._discard_container(_name(kernel_id))
            await _remove_directory(self._links / kernel_id)
        elif _CONTAINER_ID.fullmatch(kernel_id):
            await self._discard_container(kernel_id)

    async def _discard_container(self, name: str) -> None:
        """Removes the container if it is one of ours."""
        try:
            found = await self.inspect(name)
        except docker.errors.NotFound:
            return
        if ((found.get("Config") or {}).get("Labels") or {}).get(f"{LABEL}gateway") != self._gateway_id:
            return
        if found["State"].get("Paused"):
            await self.change(lambda api: api.unpause(found["Id"]))
        await self.remove(found["Id"])

    async def inspect(self, name: str) -> dict[str, Any]:
        """Raises `EngineUnavailable`, and `docker.errors.NotFound` when there is no such container."""
        try:
            return await self.call(lambda api: dict(api.inspect_container(name)), quick=True)
        except docker.errors.NotFound:
            raise
        except docker.errors.APIError as error:
            raise EngineUnavailable(f"The engine can't tell about a sandbox: {error.explanation or error}") from None

    async def change(self, function: Callable[[docker.APIClient], None]) -> None:
        """Freezes or thaws; no error when it is gone, or already as it should be."""
        try:
            await self.call(function, whole=True)
        except docker.errors.APIError as error:
            if error.status_code not in (404, 409) and "not paused" not in str(error):
                raise EngineUnavailable(
                    f"The engine could not freeze or thaw a sandbox: {error.explanation or error}"
                ) from None

    async def remove(self, name: str) -> None:
        try:
            await self.call(lambda api: api.remove_container(name, force=True, v=True), whole=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            # 409: somebody else is removing it at this moment, which is as good.
            if error.status_code != 409:
                raise EngineUnavailable(f"The engine could not remove a sandbox: {error.explanation or error}") from None

    async def aclose(self) -> None:
        await self._daemon.aclose()


class DockerSandbox:
    """One container, its link directory and its listening socket."""

    def __init__(self, engine: DockerEngine, kernel_id: str, link: Link) -> None:
        self._engine = engine
        self.link = link
        self.name = _name(kernel_id)
        self._directory: Path | None = None
        self._server: asyncio.Server | None = None
        self._kernel_id = kernel_id

    async def listen(self, links: Path, anew: bool = True) -> Path:
        """Opens the socket that the supervisor will dial; the directory to mount. It is kept unless `anew`: a container that has
        it mounted would never see another one."""
        directory = links / self._kernel_id
        path = directory / LINK_SOCKET
        await anyio.to_thread.run_sync(partial(_make_directory, directory, anew))
        self._directory = directory
        loop = asyncio.get_running_loop()
        # In two steps, so that a cancelled create finds the server and closes it.
        self._server = await loop.create_unix_server(lambda: Connection(self.link), path, start_serving=False)
        await self._server.start_serving()
        # The sandbox's user is another than ours; the directory above is closed to all other users of this host.
        path.chmod(0o666)
        return directory

    async def attach(self) -> None:
        """Takes the container's stdin and stdout as the link; before it is started, so nothing is missed."""
        params = {"stdin": 1, "stdout": 1, "stderr": 0, "stream": 1}
        descriptor = await self._engine.call(
            lambda api: _duplicate(api.attach_socket(self.name, params)), whole=True, again=False
        )
        stream = socket.socket(fileno=descriptor)
        stream.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: StdioConnection(self.link), sock=stream)

    async def wake(self) -> None:
        """Thaws it if it is frozen; raises `EngineUnavailable`."""
        try:
            found = await self._engine.inspect(self.name)
        except docker.errors.NotFound:
            return
        if found["State"].get("Paused"):
            await self.thaw()

    async def exit(self) -> SandboxExit | None:
        try:
            found = await self._engine.inspect(self.name)
        except docker.errors.NotFound:
            return SandboxExit(code=None, oom_killed=False, removed=True)
        state = found["State"]
        if state.get("Running"):
            return None
        return SandboxExit(code=state.get("ExitCode"), oom_killed=bool(state.get("OOMKilled")))

    async def freeze(self) -> None:
        await self._engine.change(lambda api: api.pause(self.name))

    async def thaw(self) -> None:
        await self._engine.change(lambda api: api.unpause(self.name))

    async def detach(self) -> None:
        self.link.close()
        if self._server is not None:
            self._server.close()

    async def remove(self) -> None:
        # It ends by itself where the engine does not answer.
        with contextlib.suppress(LinkClosed):
            self.link.post("end")
        await self.detach()
        try:
            await self._engine.remove(self.name)
        finally:
            if self._directory is not None:
                with anyio.CancelScope(shield=True):
                    await _remove_directory(self._directory)


def _name(kernel_id: str) -> str:
    return f"cellgate-{kernel_id}"


def _kernel_id(container: dict[str, Any]) -> str:
    """The kernel that a container of `GET /containers/json` stands for: its label, if that is what its name says too. Else the
    container's own id, by which it can be discarded at least."""
    labelled = str((container.get("Labels") or {}).get(f"{LABEL}kernel", ""))
    named = f"/{_name(labelled)}" in (container.get("Names") or [])
    return labelled if named and _ID.fullmatch(labelled) else str(container["Id"])


def _run(function: Callable[[docker.APIClient], T], client: Callable[[], docker.APIClient], again: bool) -> T:
    try:
        return function(client())
    except requests.exceptions.ConnectionError as error:
        if not again or not _broken(error):
            raise
    return function(client())


def _broken(error: requests.exceptions.ConnectionError) -> bool:
    """Whether the connection was closed or refused, as one kept from before the daemon was restarted is; not: a time-out."""
    return any(isinstance(cause, ConnectionError) for outer in error.args for cause in getattr(outer, "args", ()))


def _create(api: docker.APIClient, body: dict[str, Any], name: str) -> None:
    try:
        api.create_container_from_config(body, name)  # type: ignore[no-untyped-call]
    except requests.exceptions.ConnectionError as error:
        if not _broken(error):
            raise
        try:
            # It may have been made before the connection broke.
            api.inspect_container(name)
        except docker.errors.NotFound:
            api.create_container_from_config(body, name)  # type: ignore[no-untyped-call]


def _check_length(path: Path) -> None:
    """Raises `ConfigurationError` when a link's socket could not be bound at a path like this."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigurationError(f"state_dir is too long: {path} exceeds the {_MAX_SOCKET_PATH} bytes of a Unix socket path.")


def _make_directory(directory: Path, anew: bool) -> None:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if anew:
        shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o755, exist_ok=not anew)
    directory.chmod(0o755)
    # Of the gateway before.
    (directory / LINK_SOCKET).unlink(missing_ok=True)


async def _remove_directory(directory: Path) -> None:
    await anyio.to_thread.run_sync(partial(shutil.rmtree, directory, ignore_errors=True))


def _names(directory: Path) -> set[str]:
    """Of the link directories in it."""
    try:
        return {name for name in os.listdir(directory) if _ID.fullmatch(name)}
    except FileNotFoundError:
        return set()


def _duplicate(attached: Any) -> int:
    """A descriptor of our own for the hijacked connection; the SDK's wrappers are closed."""
    descriptor = os.dup(attached.fileno())
    attached._response.close()
    return descriptor
