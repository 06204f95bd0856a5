"""The boxes there are, held against the kernels there should be: no orphan, no ghost.

It looks at states, not at changes, so nothing depends on having seen an event: what a gateway that died has half made, what an
engine has lost, what somebody has removed, all come out in the next round.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import structlog

from gateway.errors import EngineUnavailable
from gateway.sandboxes.base import FoundSandbox, SandboxEngine

log = structlog.get_logger()


class Inhabited(Protocol):
    """A kernel that has a box, as far as is known."""

    @property
    def id(self) -> str: ...

    @property
    def frozen(self) -> bool:
        """It has asked for that."""

    async def wake_box(self) -> None:
        """The box is frozen although nobody wants that: a request that was given up has been carried out after all."""

    async def check_box(self) -> None:
        """Finds out whether the box is really gone, and ends the kernel then."""


def orphans(found: Iterable[FoundSandbox], known: Collection[str]) -> list[str]:
    """Boxes of which no kernel is known."""
    return [box.kernel_id for box in found if box.kernel_id not in known]


def ghosts(found: Iterable[FoundSandbox], inhabited: Iterable[Inhabited]) -> list[Inhabited]:
    """Kernels whose box does not run."""
    running = {box.kernel_id for box in found if box.running}
    return [kernel for kernel in inhabited if kernel.id not in running]


async def look(
    engine: SandboxEngine, known: Callable[[], Collection[str]], inhabited: Callable[[], Iterable[Inhabited]]
) -> int:
    """One round; the number of boxes removed. Raises `EngineUnavailable`.

    The kernels with a box are asked for before the engine is, those that are known after it: a box that is made or removed
    meanwhile is taken neither for a ghost nor for an orphan.
    """
    before = list(inhabited())
    found = await engine.list()
    removed = 0
    for kernel_id in orphans(found, known()):
        try:
            await engine.discard(kernel_id)
        except EngineUnavailable as error:
            log.warning("sandbox_not_removed", kernel_id=kernel_id, reason=error.detail)
        else:
            removed += 1
    paused = {box.kernel_id for box in found if box.frozen}
    for kernel in before:
        if kernel.id in paused and not kernel.frozen:
            await kernel.wake_box()
    for kernel in ghosts(found, before):
        await kernel.check_box()
    return removed
