"""Who has to go, and why: a pure function over plain data, and the loop around it.

What counts is what clients have asked for. What a kernel emits does not, so a thread that prints for ever keeps nobody alive.
Option names and their meaning are those of Jupyter's MappingKernelManager (cull_idle_timeout, cull_connected, cull_busy).
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from gateway.kernels import causes
from gateway.kernels.execution import Cause
from gateway.settings import CullingSettings


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the culler is told of a kernel. Times are on the monotonic clock; 0 for a limit means that there is none."""

    id: str
    born: float
    idle_since: float
    busy_since: float | None
    """None while no cell is in the kernel or waits for it."""
    connections: int
    frozen: bool
    freezable: bool
    idle_timeout: float
    lifetime: float
    busy_timeout: float


@dataclass(frozen=True, slots=True)
class Verdict:
    id: str
    action: Literal["cull", "freeze"]
    cause: Cause | None = None


def select(candidates: Iterable[Candidate], now: float, settings: CullingSettings) -> list[Verdict]:
    """The kernels to end or to freeze at the time `now`, each with its cause."""
    verdicts = (_judge(candidate, now, settings) for candidate in candidates)
    return [verdict for verdict in verdicts if verdict is not None]


def _judge(kernel: Candidate, now: float, settings: CullingSettings) -> Verdict | None:
    if kernel.lifetime and now - kernel.born >= kernel.lifetime:
        return Verdict(kernel.id, "cull", causes.lifetime(kernel.lifetime))
    busy = kernel.busy_since is not None
    if kernel.busy_timeout and kernel.busy_since is not None and now - kernel.busy_since >= kernel.busy_timeout:
        return Verdict(kernel.id, "cull", causes.busy(kernel.busy_timeout))
    idle = now - kernel.idle_since
    may_cull = (not busy or settings.cull_busy) and (not kernel.connections or settings.cull_connected)
    if kernel.idle_timeout and idle >= kernel.idle_timeout and may_cull:
        return Verdict(kernel.id, "cull", causes.idle(kernel.idle_timeout))
    if settings.freeze_after and kernel.freezable and not kernel.frozen and not busy and idle >= settings.freeze_after:
        return Verdict(kernel.id, "freeze")
    return None


async def run(
    candidates: Callable[[], Sequence[Candidate]],
    carry_out: Callable[[Verdict], Coroutine[Any, Any, None]],
    settings: CullingSettings,
) -> None:
    """Looks every `cull_interval` seconds until cancelled."""
    while True:
        await anyio.sleep(settings.cull_interval)
        async with anyio.create_task_group() as tasks:
            for verdict in select(candidates(), anyio.current_time(), settings):
                tasks.start_soon(carry_out, verdict)
