"""Waiting for a cell on behalf of a client: it can leave meanwhile, and the gateway can let go of what runs."""

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

import anyio
from starlette.types import Receive

from gateway.api.requests import cancel
from gateway.api.views import ExecutionView, path_of
from gateway.errors import GatewayError, ShuttingDown
from gateway.kernels.execution import Execution
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager

Outcome = Literal["done", "client_left", "gateway_leaves"]


async def attend(work: Callable[[], Awaitable[object]], leaving: anyio.Event, receive: Receive | None = None) -> Outcome:
    """Does `work` until it is done, the gateway leaves, or the client of this request is gone; and tells which came first.

    `receive` None means that it does not matter whether the client is there. Raises the `GatewayError` that `work` raises.
    """
    outcome: Outcome = "done"

    try:
        async with anyio.create_task_group() as tasks:

            async def break_off(awaited: Callable[[], Awaitable[object]], reason: Outcome) -> None:
                nonlocal outcome
                await awaited()
                outcome = reason
                tasks.cancel_scope.cancel()

            tasks.start_soon(break_off, leaving.wait, "gateway_leaves")
            if receive is not None:
                tasks.start_soon(break_off, partial(_disconnect, receive), "client_left")
            await work()
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        errors, others = group.split(GatewayError)
        if errors is None or others is not None:
            raise
        raise _first(errors) from None
    return outcome


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def until_ended(execution: ExecutionView) -> None:
    """Waits until its last event can be read, or the gateway lets go of it."""
    if isinstance(execution, Execution):  # any other has ended
        await execution.log.settled.wait()


async def cancel_unattended(manager: KernelManager, kernel: Kernel, execution: ExecutionView) -> None:
    """Cancels a cell whose client is gone, unless it has ended, or all clients go because the gateway does."""
    if execution.log.closed or manager.stopping:
        return
    with anyio.move_on_after(kernel.settings.link.command_timeout, shield=True), contextlib.suppress(GatewayError):
        await cancel(kernel, execution)


def shutting_down(execution: ExecutionView) -> ShuttingDown:
    """What those are told who wait for a cell when the gateway leaves."""
    if execution.log.last_seq == 0:
        return ShuttingDown(
            "The gateway is stopping, and the cell could not be recorded any more. Send it again when the gateway is back.",
            kernel_id=execution.kernel_id,
        )
    path = path_of(execution)
    return ShuttingDown(
        f"The gateway is stopping. The cell goes on; once the gateway is back, its outputs and its end are at {path}.",
        execution_id=execution.id,
        kernel_id=execution.kernel_id,
        execution=path,
    )
