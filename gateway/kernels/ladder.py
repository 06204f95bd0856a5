"""How a cell that does not stop is made to: each step harder than the one before, each told as an event, none skipped.

interrupt → grace → interrupt again → grace → kill the kernel process (files stay) → grace → kill the sandbox.
"""

from typing import TYPE_CHECKING, Literal

import anyio

from gateway.kernels import causes
from gateway.kernels.execution import Execution
from gateway.protocol.events import Payload

if TYPE_CHECKING:
    from gateway.kernels.kernel import Kernel

Step = Literal["interrupt", "interrupt_again", "kill_kernel", "kill_sandbox"]
Reason = Literal["timeout", "client"]
STEPS: tuple[Step, ...] = ("interrupt", "interrupt_again", "kill_kernel", "kill_sandbox")


async def climb(kernel: "Kernel", execution: Execution, reason: Reason, up_to: Step) -> None:
    """Steps until the execution has ended. Bound to it: a step for a cell that has ended is not taken.

    One climber a cell, since two would take each step twice; who comes later makes that one go as far as he would.
    """
    execution.ladder = _further(execution.ladder, (reason, up_to))
    execution.changed()
    if execution.climbing:
        return
    execution.climbing = True
    try:
        for number, step in enumerate(STEPS):
            why, end = execution.ladder or (reason, up_to)
            if execution.ended or number > STEPS.index(end):
                break
            execution.last_step = step
            execution.tell(Payload("interrupt", {"step": step, "reason": why}))
            await _take(kernel, execution, step)
            with anyio.move_on_after(kernel.settings.kernels.interrupt_grace):
                await execution.done.wait()
        execution.ladder = None
        execution.changed()
    finally:
        execution.climbing = False


def _further(one: tuple[Reason, Step] | None, other: tuple[Reason, Step]) -> tuple[Reason, Step]:
    return one if one is not None and STEPS.index(one[1]) >= STEPS.index(other[1]) else other


async def signal_once(kernel: "Kernel") -> None:
    """An interrupt as Jupyter's is: each is one signal, however soon after the last, and no harder step follows. Raises `KernelDead`,
    `KernelGone`, `KernelUnavailable`."""
    kernel.require_alive()
    kernel.require_reached()
    kernel.touch()
    current = kernel.cells.current
    if current is None:
        return
    current.interrupted = True
    current.tell(Payload("interrupt", {"step": "interrupt", "reason": "client"}))
    current.changed()
    await kernel.signal_cell(current)


async def _take(kernel: "Kernel", execution: Execution, step: Step) -> None:
    if step in ("interrupt", "interrupt_again"):
        await kernel.signal_cell(execution)
    elif step == "kill_kernel":
        await kernel.kill_process()
    else:
        await kernel.on_lost(causes.KILLED)
