"""The engines that the contract is tried on, each with what the suite needs to know of it besides its interface."""

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import anyio.to_thread
import docker
import docker.errors

from gateway.sandboxes.base import Sandbox, SandboxEngine
from gateway.sandboxes.docker import DockerEngine, DockerSandbox
from gateway.sandboxes.lockdown import LABEL
from gateway.settings import load
from gateway.testing import FakeEngine, FakeHost, FakeSandbox


class Yard(Protocol):
    """One kind of engine, and a look at it from outside."""

    redials: bool
    """Whether a stream that broke is made anew; standard streams are not, and their end is the end of the box."""

    def engine(self, gateway_id: str) -> SandboxEngine: ...
    def broken_engine(self) -> SandboxEngine: ...
    async def boxes(self, gateway_id: str) -> set[str]:
        """Kernel ids of the boxes that are there."""

    async def remove_from_outside(self, sandbox: Sandbox) -> None: ...
    def abandon(self, sandbox: Sandbox) -> None:
        """What becomes of our end of its link when the gateway is killed."""

    def leftovers(self) -> list[str]:
        """What lies about on this host: link directories."""


class FakeYard:
    redials = True

    def __init__(self) -> None:
        self._host = FakeHost()

    def engine(self, gateway_id: str) -> SandboxEngine:
        return FakeEngine(gateway_id=gateway_id, host=self._host)

    def broken_engine(self) -> SandboxEngine:
        engine = FakeEngine(host=self._host)
        engine.available = False
        return engine

    async def boxes(self, gateway_id: str) -> set[str]:
        return {kernel_id for kernel_id, box in self._host.boxes.items() if box.gateway_id == gateway_id}

    async def remove_from_outside(self, sandbox: Sandbox) -> None:
        assert isinstance(sandbox, FakeSandbox)
        sandbox.vanish()

    def abandon(self, sandbox: Sandbox) -> None:
        assert isinstance(sandbox, FakeSandbox)
        sandbox.abandon()

    def leftovers(self) -> list[str]:
        return []


class DockerYard:
    def __init__(self, link: str, directory: Path) -> None:
        self.redials = link == "socket"
        self._link, self._directory = link, directory
        self._api = docker.APIClient(version="auto", timeout=60)

    def engine(self, gateway_id: str) -> SandboxEngine:
        return DockerEngine(self._settings(gateway_id), gateway_id)

    def broken_engine(self) -> SandboxEngine:
        return DockerEngine(self._settings("broken", url="unix:///nowhere/docker.sock"), "broken")

    def _settings(self, gateway_id: str, **options: Any) -> Any:
        return load(state_dir=self._directory / gateway_id[:8], docker={"link": self._link, **options})

    async def boxes(self, gateway_id: str) -> set[str]:
        def ask() -> set[str]:
            found = self._api.containers(all=True, filters={"label": f"{LABEL}gateway={gateway_id}"})
            return {container["Labels"].get(f"{LABEL}kernel", "") for container in found}

        return await anyio.to_thread.run_sync(ask)

    async def remove_from_outside(self, sandbox: Any) -> None:
        def remove() -> None:
            with contextlib.suppress(docker.errors.NotFound):
                self._api.remove_container(sandbox.name, force=True)

        await anyio.to_thread.run_sync(remove)

    def abandon(self, sandbox: Sandbox) -> None:
        assert isinstance(sandbox, DockerSandbox)
        assert sandbox._server is not None
        assert sandbox.link._transport is not None
        sandbox._server.close()
        sandbox.link._transport.abort()

    async def make_strange(self, gateway_id: str, name: str, labels: dict[str, str]) -> None:
        """A container that no gateway of this version would make."""

        def make() -> None:
            marks = {f"{LABEL}gateway": gateway_id, **{f"{LABEL}{key}": value for key, value in labels.items()}}
            self._api.create_container("cellgate-kernel:latest", name=name, labels=marks, network_disabled=True)

        await anyio.to_thread.run_sync(make)

    async def labels(self, sandbox: Any) -> dict[str, str]:
        def ask() -> dict[str, str]:
            found: dict[str, str] = self._api.inspect_container(sandbox.name)["Config"]["Labels"]
            return found

        return await anyio.to_thread.run_sync(ask)

    def leftovers(self) -> list[str]:
        return sorted(str(path.relative_to(self._directory)) for path in self._directory.glob("*/links/*"))

    def close(self) -> None:
        self._api.close()


YARDS = ("fake", "docker-socket", "docker-stdio")


@contextlib.asynccontextmanager
async def yard(name: str) -> AsyncIterator[Yard]:
    """Whatever a test has made is gone when its block ends, descriptors of this process included; the yard checks it."""
    before = _descriptors()
    if name == "fake":
        yield FakeYard()
    else:
        # Short, since the path of a Unix socket in it ends at 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="cgc-", dir="/tmp"))
        found = DockerYard(name.removeprefix("docker-"), directory)
        try:
            yield found
        finally:
            found.close()
            left = found.leftovers()
            shutil.rmtree(directory, ignore_errors=True)
        assert left == []
    assert _descriptors() <= before


def _descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def new_id() -> str:
    return str(uuid4())


Condition = Callable[[], Any]
