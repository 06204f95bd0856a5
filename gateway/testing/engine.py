"""The engine of scripted sandboxes: as `SandboxEngine` demands, and with the faults that a real one can have, at will."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from uuid import uuid4

import anyio.lowlevel

from gateway.errors import EngineUnavailable, ImageMissing
from gateway.sandboxes.base import EngineReport, SandboxExit, SandboxSpec
from gateway.sandboxes.link import Connection, Link
from gateway.testing.kernel import KernelScript
from gateway.testing.supervisor import ScriptedSupervisor


class FakeHost:
    """Where the boxes are: shared by engines of several gateways, as one Docker daemon is."""

    def __init__(self) -> None:
        self.boxes: dict[str, FakeSandbox] = {}
        """By kernel id: all that exist, running or ended."""


class FakeEngine:
    """Attributes are faults that may be set and cleared at any time."""

    def __init__(
        self,
        script: KernelScript | None = None,
        *,
        gateway_id: str = "unnamed",
        images: tuple[str, ...] = ("cellgate-kernel:latest",),
        host: FakeHost | None = None,
    ) -> None:
        self.script = script or KernelScript()
        self.host = host or FakeHost()
        self.images = images
        self.available = True
        """False: every call raises `EngineUnavailable`."""
        self.dials = True
        """False: new boxes run, but their supervisor never calls."""
        self.before_create: Callable[[], Awaitable[None]] | None = None
        """Awaited in each `create`: to make it slow, or to let it fail."""
        self.memory = 0
        """Bytes that its machine has, as `check` tells; 0: unknown."""
        self.created = 0
        self.gateway_id = gateway_id

    @property
    def boxes(self) -> dict[str, "FakeSandbox"]:
        return self.host.boxes

    async def check(self) -> EngineReport:
        self.require()
        return EngineReport("fake", "memory:", "1", "1", "none", findings=(), memory=self.memory)

    async def create(self, spec: SandboxSpec, make_link: Callable[[], Link]) -> "FakeSandbox":
        self.require()
        if self.before_create is not None:
            await self.before_create()
        if spec.image not in self.images:
            raise ImageMissing(f"The image {spec.image} is not on the engine.", image=spec.image)
        box = FakeSandbox(self, spec, make_link())
        try:
            await box.listen()
        except BaseException:
            box.close()
            raise
        self.host.boxes[spec.kernel_id] = box
        self.created += 1
        if self.dials:
            box.supervisor.dial()
        return box

    async def sweep(self) -> int:
        self.require()
        left = [box for box in self.host.boxes.values() if box.gateway_id == self.gateway_id]
        for box in left:
            await box.remove()
        return len(left)

    async def aclose(self) -> None:
        """Nothing is held."""

    def require(self) -> None:
        if not self.available:
            raise EngineUnavailable("The fake engine has been told not to answer.")


class FakeSandbox:
    """One scripted box. `supervisor` is its inside, to be watched and disturbed."""

    def __init__(self, engine: FakeEngine, spec: SandboxSpec, link: Link) -> None:
        self.link, self.spec = link, spec
        self.gateway_id = engine.gateway_id
        self._engine = engine
        self.frozen = False
        self._end: SandboxExit | None = None
        self._server: asyncio.Server | None = None
        # A name in Linux's abstract namespace (unix(7)): nothing on disk to be cleaned up.
        self._address = f"\0cellgate-fake-{uuid4().hex}"
        self.supervisor = ScriptedSupervisor(engine.script, self._address, self._ended)

    async def listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Connection(self.link), sock=listener, start_serving=False)
        await self._server.start_serving()

    def close(self) -> None:
        """The gateway's end of the link."""
        self.link.close()
        if self._server is not None:
            self._server.close()

    def end(self, code: int | None, oom_killed: bool = False) -> None:
        """The box ends as the engine will tell it."""
        self._end = SandboxExit(code, oom_killed)
        self.supervisor.end(code or 0)

    def vanish(self) -> None:
        """Somebody else removes the box."""
        self._end = SandboxExit(None, oom_killed=False, removed=True)
        self._engine.host.boxes.pop(self.spec.kernel_id, None)
        self.supervisor.end(137)

    async def exit(self) -> SandboxExit | None:
        self._engine.require()
        return self._end

    async def freeze(self) -> None:
        self._engine.require()
        self.frozen = True
        self.supervisor.freeze()

    async def thaw(self) -> None:
        self._engine.require()
        self.frozen = False
        self.supervisor.thaw()

    async def remove(self) -> None:
        self.close()
        self._engine.require()
        self._end = self._end or SandboxExit(None, oom_killed=False, removed=True)
        self.supervisor.end(137)
        if self._engine.host.boxes.pop(self.spec.kernel_id, None) is not None:
            self._end = SandboxExit(None, oom_killed=False, removed=True)
        # One round of the loop, in which the closed transport lets go of its socket.
        await anyio.lowlevel.checkpoint()

    def _ended(self, code: int) -> None:
        self._end = self._end or SandboxExit(code, oom_killed=False)
