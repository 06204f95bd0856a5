"""The engine of scripted sandboxes: as `SandboxEngine` demands, and with the faults that a real one can have, at will."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from uuid import uuid4

import anyio
import anyio.lowlevel

from gateway.errors import EngineUnavailable, ImageMissing
from gateway.sandboxes.base import EngineReport, FoundSandbox, Limits, SandboxExit, SandboxSpec
from gateway.sandboxes.link import Connection, Link
from gateway.testing.kernel import KernelScript
from gateway.testing.supervisor import ScriptedSupervisor

EXIT_STREAM = 5
"""As the real supervisor ends when its link was its standard input, and that is closed."""
_REMOVED = SandboxExit(None, oom_killed=False, removed=True)
_NO_LIMITS = Limits(0, 0.0, 0)


class FakeHost:
    """Where the boxes are: shared by engines of several gateways, as one Docker daemon is, and there after a gateway has gone."""

    def __init__(self) -> None:
        self.boxes: dict[str, FakeSandbox] = {}
        """By kernel id: all that exist, running or ended, each as the last gateway that made or adopted it has it."""


class FakeEngine:
    """Attributes are faults that may be set and cleared at any time.

    A gateway that is killed: `abandon` each of its boxes and set `available` to False, so that nothing it still does comes
    through. Its successor is another engine on the same `host` with the same `gateway_id`.
    """

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
        """False: every call raises `EngineUnavailable`, except that boxes can be adopted."""
        self.adopts = True
        """False: like a box whose link is its stdin, one ends when its gateway lets go of it."""
        self.dials = True
        """False: new boxes run, but their supervisor never calls."""
        self.before_create: Callable[[], Awaitable[None]] | None = None
        """Awaited in each `create`: to make it slow, or to let it fail."""
        self.after_create: Callable[[], Awaitable[None]] | None = None
        """Awaited in each `create` once the box exists and before anybody has been told. When it raises or is cancelled the box
        is removed, unless `available` is False by then: so a gateway dies in the middle."""
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
        box = FakeSandbox(self, FakeInside(self, spec), make_link())
        try:
            await box.listen()
            self.host.boxes[spec.kernel_id] = box
            self.created += 1
            if self.dials:
                box.supervisor.dial()
            if self.after_create is not None:
                await self.after_create()
        except BaseException:
            with anyio.CancelScope(shield=True), contextlib.suppress(EngineUnavailable):
                await box.remove()
            raise
        return box

    async def adopt(self, kernel_id: str, make_link: Callable[[], Link]) -> "FakeSandbox":
        if not self.adopts:
            raise RuntimeError("boxes of this engine can't be adopted")
        before = self.host.boxes.get(kernel_id)
        if before is None:
            inside = FakeInside(self, SandboxSpec(kernel_id, "", _NO_LIMITS, 0, 0, 0))
            inside.end(_REMOVED, 137)
        else:
            before.abandon()
            inside = before.inside
        box = FakeSandbox(self, inside, make_link())
        try:
            await box.listen()
            if self.available:
                await box.thaw()
        except BaseException:
            box.close()
            raise
        if before is not None:
            self.host.boxes[kernel_id] = box
        return box

    async def list(self) -> Sequence[FoundSandbox]:
        self.require()
        return [
            FoundSandbox(kernel_id, box.inside.ended is None, box.frozen, box.spec.epoch, box.spec.owner, box.spec.expires_at)
            for kernel_id, box in self.host.boxes.items()
            if box.gateway_id == self.gateway_id
        ]

    async def discard(self, kernel_id: str) -> None:
        self.require()
        box = self.host.boxes.get(kernel_id)
        if box is not None and box.gateway_id == self.gateway_id:
            # The engine it was made with may be that of a gateway which is dead.
            box._engine = self
            await box.remove()

    async def aclose(self) -> None:
        """Nothing is held."""

    def require(self) -> None:
        if not self.available:
            raise EngineUnavailable("The fake engine has been told not to answer.")


class FakeInside:
    """What of a box outlives its gateway: the supervisor, and how it ended."""

    def __init__(self, engine: FakeEngine, spec: SandboxSpec) -> None:
        self.spec, self.gateway_id, self.host = spec, engine.gateway_id, engine.host
        self.frozen = False
        self.ended: SandboxExit | None = None
        # A name in Linux's abstract namespace (unix(7)): nothing on disk to be cleaned up.
        self.address = f"\0cellgate-fake-{uuid4().hex}"
        self.supervisor = ScriptedSupervisor(engine.script, self.address, self._on_exit)

    def end(self, how: SandboxExit, code: int) -> None:
        self.ended = how
        self.supervisor.end(code)

    def _on_exit(self, code: int) -> None:
        self.ended = self.ended or SandboxExit(code, oom_killed=False)


class FakeSandbox:
    """One scripted box as one gateway has it. `supervisor` is its inside, to be watched and disturbed."""

    def __init__(self, engine: FakeEngine, inside: FakeInside, link: Link) -> None:
        self.link, self.inside = link, inside
        self._engine = engine
        self._server: asyncio.Server | None = None
        self._transports: set[asyncio.BaseTransport] = set()

    @property
    def spec(self) -> SandboxSpec:
        return self.inside.spec

    @property
    def gateway_id(self) -> str:
        return self.inside.gateway_id

    @property
    def supervisor(self) -> ScriptedSupervisor:
        return self.inside.supervisor

    @property
    def frozen(self) -> bool:
        return self.inside.frozen

    async def listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            await self._bind(listener)
        except BaseException:
            listener.close()
            raise
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Remembered(self.link, self._transports), sock=listener, start_serving=False
        )
        await self._server.start_serving()

    async def _bind(self, listener: socket.socket) -> None:
        for _ in range(100):
            try:
                listener.bind(self.inside.address)
            except OSError:
                # Some loops close the listener of the gateway before only in their next round.
                await anyio.lowlevel.checkpoint()
            else:
                return
        raise RuntimeError("the address of this box is still in use")

    def close(self) -> None:
        """The gateway's end of the link."""
        self.link.close()
        if self._server is not None:
            self._server.close()

    async def detach(self) -> None:
        self.close()
        self._let_go()
        # One round of the loop, in which the closed transport lets go of its socket.
        await anyio.lowlevel.checkpoint()

    def abandon(self) -> None:
        """The gateway was killed: nothing listens any more and the stream is cut, without a word to the box or to the link."""
        if self._server is not None:
            self._server.close()
        for transport in list(self._transports):
            transport.abort()  # type: ignore[attr-defined]
        self._let_go()

    def _let_go(self) -> None:
        if not self._engine.adopts and self.inside.ended is None:
            self.supervisor.end(EXIT_STREAM)

    def end(self, code: int | None, oom_killed: bool = False) -> None:
        """The box ends as the engine will tell it."""
        self.inside.end(SandboxExit(code, oom_killed), code or 0)

    def vanish(self) -> None:
        """Somebody else removes the box."""
        self.inside.host.boxes.pop(self.spec.kernel_id, None)
        self.inside.end(_REMOVED, 137)

    async def exit(self) -> SandboxExit | None:
        self._engine.require()
        return self.inside.ended

    async def freeze(self) -> None:
        self._engine.require()
        self.inside.frozen = True
        self.supervisor.freeze()

    async def thaw(self) -> None:
        self._engine.require()
        if self.inside.frozen:
            self.inside.frozen = False
            self.supervisor.thaw()

    async def remove(self) -> None:
        self.close()
        self._engine.require()
        self.inside.end(_REMOVED, 137)
        self.inside.host.boxes.pop(self.spec.kernel_id, None)
        # As in `detach`.
        await anyio.lowlevel.checkpoint()


class _Remembered(Connection):
    """A connection that can be cut without asking the link."""

    def __init__(self, link: Link, transports: set[asyncio.BaseTransport]) -> None:
        super().__init__(link)
        self._transports = transports
        self._own: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._own = transport
        self._transports.add(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._own is not None:
            self._transports.discard(self._own)
        super().connection_lost(exc)
