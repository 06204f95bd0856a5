"""A kernel's sandbox from the kernel's point of view: made, watched, frozen and thawed, and removed.

Tells its owner when it is lost (`on_lost`, with a cause). Everything that needs the link goes through `link`, which thaws a frozen
sandbox first.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.abc
import structlog

from gateway.errors import EngineUnavailable, KernelUnavailable, StartFailed
from gateway.kernels import causes, loss
from gateway.kernels.execution import Cause
from gateway.sandboxes.base import Sandbox, SandboxEngine, SandboxSpec
from gateway.sandboxes.link import Link
from gateway.settings import LinkSettings
from gateway.supervisor.frames import Frame

log = structlog.get_logger()

_LOOK = 0.5


class Owner(Protocol):
    """Who a box belongs to."""

    def on_frames(self, batch: list[Frame]) -> None: ...
    async def on_lost(self, cause: Cause) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What the supervisor is told of time, in seconds."""

    lifetime: float
    silence: float
    rate: int


class Box:
    def __init__(
        self, engine: SandboxEngine, spec: SandboxSpec, terms: LinkTerms, settings: LinkSettings, owner: Owner
    ) -> None:
        self.frozen = False
        self.out_of_memory_told = False
        """The supervisor has told of an out-of-memory kill that the box has survived."""
        self._engine = engine
        self._spec, self._terms, self._settings = spec, terms, settings
        self._owner = owner
        self._sandbox: Sandbox | None = None
        self._thawing = anyio.Lock()

    @property
    def present(self) -> bool:
        return self._sandbox is not None

    @property
    def connected(self) -> bool:
        return self._sandbox is not None and self._sandbox.link.connected.is_set()

    @property
    def own_link(self) -> Link | None:
        """The link of the box, connected or not."""
        return self._sandbox.link if self._sandbox is not None else None

    async def open(self, tasks: anyio.abc.TaskGroup) -> Link:
        """Makes the sandbox and waits for its supervisor; its watchers run in `tasks`. Raises what the engine raises, `StartFailed`."""
        self._sandbox = sandbox = await self._engine.create(self._spec, self._make_link)
        tasks.start_soon(self._watch, sandbox)
        while not sandbox.link.connected.is_set():
            with anyio.move_on_after(_LOOK):
                await sandbox.link.connected.wait()
                break
            if end := await sandbox.exit():
                message = causes.from_sandbox(end)["message"]
                raise StartFailed(f"The sandbox ended before its supervisor answered: {message}")
        tasks.start_soon(sandbox.link.keep, self._on_silence)
        return sandbox.link

    async def listen_again(self, restored: dict[str, Any]) -> Link:
        """Takes over the sandbox of an earlier gateway; `restored` goes to its `Link`, which takes nobody until it is guarded. Raises
        `EngineUnavailable`."""
        link = self._make_link(**restored)
        link.hold()
        self._sandbox = await self._engine.adopt(self._spec.kernel_id, lambda: link)
        return self._sandbox.link

    async def reach(self, tasks: anyio.abc.TaskGroup) -> Cause | None:
        """Waits until the supervisor of a box that was taken over has called: None then, else why the box counts as ended."""
        sandbox = self._sandbox
        assert sandbox is not None
        cause = await loss.judge(sandbox, self._settings.lost_timeout, needs_engine=True)
        if cause is None:
            tasks.start_soon(self._watch, sandbox)
            tasks.start_soon(sandbox.link.keep, self._on_silence)
        return cause

    async def check(self) -> None:
        """The engine does not list the box: tells the owner if it is really gone."""
        sandbox = self._sandbox
        if sandbox is None:
            return
        try:
            end = await sandbox.exit()
        except EngineUnavailable:
            return
        if end is not None and sandbox is self._sandbox:
            await self._owner.on_lost(causes.from_sandbox(end, self.out_of_memory_told))

    async def detach(self) -> None:
        """Lets go of it; it waits for the next gateway. Its link is still known: how far it has come is yet to be recorded."""
        if self._sandbox is not None:
            await self._sandbox.detach()

    def _make_link(self, **restored: Any) -> Link:
        terms = self._terms
        return Link(
            self._settings, self._owner.on_frames, terms.lifetime, terms.silence, terms.rate, epoch=self._spec.epoch, **restored
        )

    async def link(self) -> Link:
        """The link of a sandbox that runs; raises `KernelUnavailable` while it can't be reached."""
        if self.frozen:
            await self.thaw()
        sandbox = self._sandbox
        if sandbox is None or not sandbox.link.connected.is_set():
            raise KernelUnavailable("The sandbox of this kernel can't be reached at the moment; try again shortly.")
        return sandbox.link

    async def freeze(self) -> None:
        """Takes the CPU from all processes of the sandbox; memory and state stay. No error where the engine fails: nothing is lost."""
        async with self._thawing:
            sandbox = self._sandbox
            if sandbox is None or self.frozen:
                return
            self.frozen = sandbox.link.frozen = True
            try:
                await sandbox.freeze()
            except EngineUnavailable as error:
                log.warning("not_frozen", reason=error.detail)
                self.frozen = sandbox.link.frozen = False

    async def thaw(self) -> None:
        """Raises `EngineUnavailable` when the engine can't; the sandbox then stays frozen."""
        async with self._thawing:
            sandbox = self._sandbox
            if sandbox is None or not self.frozen:
                return
            await sandbox.thaw()
            self.frozen = sandbox.link.frozen = False

    async def wake(self) -> None:
        """The engine has it frozen without our knowing: a request that was given up has been carried out after all."""
        async with self._thawing:
            if self._sandbox is not None and not self.frozen:
                log.warning("frozen_unasked")
                await self._sandbox.thaw()

    async def remove(self) -> None:
        """Ends it; a failure of the engine is logged, since the next sweep or the box's own lifetime finishes the work."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is None:
            return
        try:
            if self.frozen:
                # Some engines can't end a frozen box.
                with contextlib.suppress(EngineUnavailable):
                    await sandbox.thaw()
            await sandbox.remove()
        except EngineUnavailable as error:
            log.warning("sandbox_not_removed", reason=error.detail)

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """A command to the supervisor; raises `CommandFailed`, `LinkClosed`, `SandboxTimeout`, `KernelUnavailable`."""
        return await (await self.link()).command(op, **arguments)

    async def _watch(self, sandbox: Sandbox) -> None:
        while True:
            await sandbox.link.wait_lost()
            if sandbox is not self._sandbox:
                # Lost because it was removed.
                return
            cause = await loss.judge(sandbox, self._settings.lost_timeout, self.out_of_memory_told)
            if cause is not None:
                await self._owner.on_lost(cause)
                return

    async def _on_silence(self) -> None:
        log.warning("supervisor_silent")
        await self._owner.on_lost(causes.UNREACHABLE)
