"""The Docker engine: containers made by the lock-down profile and nothing else.

The docker SDK blocks, so each call runs in a thread under a limiter of its own; none lies on the way of a cell. What a call may
fail with becomes an error of ours here.
"""

import asyncio
import os
import shutil
import socket
from collections.abc import Callable
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

from gateway.errors import ConfigurationError, EngineUnavailable, ImageMissing, StartFailed
from gateway.sandboxes import docker_check
from gateway.sandboxes.base import EngineReport, SandboxExit, SandboxSpec
from gateway.sandboxes.image import ROOT, source_files
from gateway.sandboxes.link import Connection, Link
from gateway.sandboxes.lockdown import LABEL, LINK_SOCKET, container_body
from gateway.sandboxes.stdio import StdioConnection
from gateway.settings import Settings

log = structlog.get_logger()
T = TypeVar("T")

_MAX_SOCKET_PATH = 107


class DockerEngine:
    """Speaks to one Docker daemon. Cheap to make: the first call connects."""

    def __init__(self, settings: Settings, gateway_id: str = "unnamed") -> None:
        self._settings = settings
        self._gateway_id = gateway_id
        self._limiter = anyio.CapacityLimiter(settings.docker.parallel_calls)
        self._api: docker.APIClient | None = None
        self._seccomp = source_files(ROOT)["kernel-image/seccomp.json"].read_text()
        self._links = settings.state_dir / "links"
        self._stdio = settings.docker.link == "stdio"
        self._security: tuple[str, ...] = ()

    async def call(self, function: Callable[[docker.APIClient], T], whole: bool = False) -> T:
        """Runs `function` with the API client in a thread; raises `EngineUnavailable` when the daemon does not answer.

        `whole`: a cancelled caller waits for the end of the call, since what it makes or removes must be known.
        """
        try:
            return await anyio.to_thread.run_sync(
                partial(self._run, function), abandon_on_cancel=not whole, limiter=self._limiter
            )
        except docker.errors.APIError:
            # The daemon has answered, and refused: for the caller to judge. (It is a RequestException too.)
            raise
        except (requests.exceptions.RequestException, OSError, docker.errors.DockerException) as error:
            # Where the engine is, is for the log: clients get the text.
            log.warning("engine_does_not_answer", url=self._url(), reason=type(error).__name__)
            raise EngineUnavailable(
                "The Docker engine does not answer. Is dockerd running, and may this user reach its socket (DOCKER_HOST, docker.url)? "
                "`cellgate doctor` tells more."
            ) from None

    def _run(self, function: Callable[[docker.APIClient], T]) -> T:
        if self._api is None:
            options = self._settings.docker
            self._api = docker.APIClient(base_url=self._url(), version="auto", timeout=int(options.timeout))
        return function(self._api)

    def _url(self) -> str:
        return self._settings.docker.url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"

    async def check(self) -> EngineReport:
        try:
            version = await self.call(lambda api: api.version())
        except EngineUnavailable as error:
            # Asked by the operator, who should know where it was looked for.
            raise EngineUnavailable(f"{error.detail} It was looked for at {self._url()}.") from None
        info = await self.call(lambda api: api.info())
        images = {spec.image for spec in self._settings.kernels.specs.values()}
        found = {image: await self._inspect_image(image) for image in sorted(images)}
        report = docker_check.report(self._settings, self._url(), version, info, found)
        if self._settings.docker.link == "auto":
            self._stdio = not docker_check.shares_paths(self._url(), info)
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
        sandbox = DockerSandbox(self, spec.kernel_id, make_link())
        try:
            directory = None if self._stdio else await sandbox.listen(self._links)
            body = container_body(
                spec,
                gateway_id=self._gateway_id,
                runtime=self._settings.docker.runtime,
                seccomp=self._seccomp,
                link_directory=directory,
                extra_security=self._security,
            )
            await self.call(lambda api: api.create_container_from_config(body, sandbox.name), whole=True)  # type: ignore[no-untyped-call]
            if self._stdio:
                await sandbox.attach()
            await self.call(lambda api: api.start(sandbox.name), whole=True)
        except docker.errors.ImageNotFound:
            await sandbox.remove()
            raise ImageMissing(
                f"The image {spec.image} is not on the engine. Build it with scripts/image; the gateway never pulls one.",
                image=spec.image,
            ) from None
        except docker.errors.APIError as error:
            await sandbox.remove()
            raise StartFailed(f"The engine refused to start the sandbox: {error.explanation or error}") from None
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(self._settings.docker.timeout):
                await sandbox.remove()
            raise
        return sandbox

    async def sweep(self) -> int:
        label = f"{LABEL}gateway={self._gateway_id}"
        left = await self.call(lambda api: api.containers(all=True, filters={"label": label}))
        for container in left:
            await self._remove(container["Id"])
        await anyio.to_thread.run_sync(partial(shutil.rmtree, self._links, ignore_errors=True))
        return len(left)

    async def _remove(self, name: str) -> None:
        try:
            await self.call(lambda api: api.remove_container(name, force=True, v=True), whole=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            # 409: somebody else is removing it at this moment, which is as good.
            if error.status_code != 409:
                raise EngineUnavailable(f"The engine could not remove a sandbox: {error.explanation or error}") from None

    async def aclose(self) -> None:
        api, self._api = self._api, None
        if api is not None:
            await anyio.to_thread.run_sync(api.close)


class DockerSandbox:
    """One container, its link directory and its listening socket."""

    def __init__(self, engine: DockerEngine, kernel_id: str, link: Link) -> None:
        self._engine = engine
        self.link = link
        self.name = f"cellgate-{kernel_id}"
        self._directory: Path | None = None
        self._server: asyncio.Server | None = None
        self._kernel_id = kernel_id

    async def listen(self, links: Path) -> Path:
        """Opens the socket that the supervisor will dial; the directory to mount."""
        directory = links / self._kernel_id
        path = directory / LINK_SOCKET
        await anyio.to_thread.run_sync(partial(_make_directory, directory))
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
        descriptor = await self._engine.call(lambda api: _duplicate(api.attach_socket(self.name, params)), whole=True)
        stream = socket.socket(fileno=descriptor)
        stream.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: StdioConnection(self.link), sock=stream)

    async def exit(self) -> SandboxExit | None:
        try:
            found = await self._engine.call(lambda api: api.inspect_container(self.name))
        except docker.errors.NotFound:
            return SandboxExit(code=None, oom_killed=False, removed=True)
        except docker.errors.APIError as error:
            raise EngineUnavailable(f"The engine can't tell about a sandbox: {error.explanation or error}") from None
        state = found["State"]
        if state.get("Running"):
            return None
        return SandboxExit(code=state.get("ExitCode"), oom_killed=bool(state.get("OOMKilled")))

    async def freeze(self) -> None:
        await self._change(lambda api: api.pause(self.name))

    async def thaw(self) -> None:
        await self._change(lambda api: api.unpause(self.name))

    async def _change(self, function: Callable[[docker.APIClient], None]) -> None:
        try:
            await self._engine.call(function, whole=True)
        except docker.errors.APIError as error:
            if error.status_code not in (404, 409) and "not paused" not in str(error):
                # 404, 409: gone, or already as it should be.
                raise EngineUnavailable(
                    f"The engine could not freeze or thaw a sandbox: {error.explanation or error}"
                ) from None

    async def remove(self) -> None:
        self.link.close()
        if self._server is not None:
            self._server.close()
        try:
            await self._engine._remove(self.name)
        finally:
            if self._directory is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(partial(shutil.rmtree, self._directory, ignore_errors=True))


def _check_length(path: Path) -> None:
    """Raises `ConfigurationError` when a link's socket could not be bound at a path like this."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigurationError(f"state_dir is too long: {path} exceeds the {_MAX_SOCKET_PATH} bytes of a Unix socket path.")


def _make_directory(directory: Path) -> None:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)


def _duplicate(attached: Any) -> int:
    """A descriptor of our own for the hijacked connection; the SDK's wrappers are closed."""
    descriptor = os.dup(attached.fileno())
    attached._response.close()
    return descriptor
