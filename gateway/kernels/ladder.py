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
STEPS: tuple[Step, ...] = ("interrupt", "interrupt_again", "kill_kernel", "kill_sandbox")


async def climb(kernel: "Kernel", execution: Execution, reason: str) -> None:
    """Steps until the execution has ended. Bound to it: a step for a cell that has ended is not taken."""
    grace = kernel.interrupt_grace
    for step in STEPS:
        if execution.ended:
            return
        if step in ("interrupt", "interrupt_again"):
            await kernel.signal_cell(execution, step, reason)
        else:
            execution.last_step = step
            execution.tell(Payload("interrupt", {"step": step, "reason": reason}))
            if step == "kill_kernel":
                await kernel.kill_process()
            else:
                await kernel.end_sandbox(causes.UNREACHABLE)
        with anyio.move_on_after(grace):
            await execution.done.wait()
