"""Jupyter's kernels: what https://jupyter-server.readthedocs.io/en/latest/developers/rest-api.html has at /api/kernels, without the
WebSocket. Where the answers differ from Jupyter's, docs/jupyter-compatibility.md says why."""

from contextlib import suppress
from typing import Any

import anyio
from fastapi import APIRouter, Request, Response

from gateway.api.dependencies import Manager, TheKernel
from gateway.api.jupyter_bodies import create_of, read_body
from gateway.api.jupyter_models import kernel_model
from gateway.errors import KernelUnavailable, StartFailed, StartTimeout
from gateway.kernels import ladder
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager
from gateway.kernels.state import KernelState
from gateway.kernels.wishes import CreateRequest

router = APIRouter(prefix="/api/kernels", include_in_schema=False)

_SLACK = 1.0
"""Seconds past KERNEL_LAUNCH_TIMEOUT in which a start that took too long may say so itself, with the kernel's log."""


@router.get("")
async def list_kernels(manager: Manager) -> list[dict[str, Any]]:
    return [kernel_model(kernel) for kernel in manager.list()]


@router.post("", status_code=201)
async def create_kernel(manager: Manager, request: Request, response: Response) -> dict[str, Any]:
    create = create_of(await read_body(request), request.app.state.settings.jupyter)
    kernel = await _started(manager, create)
    response.headers["Location"] = f"/api/kernels/{kernel.id}"
    return kernel_model(kernel)


async def _started(manager: KernelManager, create: CreateRequest) -> Kernel:
    """A kernel within the time that the client waits, the time in the queue included; else it would wait for nothing and leave a
    kernel that nobody knows."""
    timeout = create.start_timeout
    with anyio.move_on_after(None if timeout is None else timeout + _SLACK):
        return (await manager.create(create))[0]
    raise StartTimeout(f"The kernel was not ready within {timeout:g} s, which is the launch timeout, and was ended.")


@router.get("/{kernel_id}")
async def get_kernel(kernel: TheKernel) -> dict[str, Any]:
    return kernel_model(kernel)


@router.delete("/{kernel_id}", status_code=204)
async def delete_kernel(kernel_id: str, manager: Manager) -> None:
    await manager.delete(kernel_id)


@router.post("/{kernel_id}/interrupt", status_code=204)
async def interrupt_kernel(kernel: TheKernel) -> None:
    # No harder step: a cell of a notebook may catch it and go on.
    await ladder.signal_once(kernel)


@router.post("/{kernel_id}/restart")
async def restart_kernel(kernel: TheKernel) -> dict[str, Any]:
    if not kernel.started:
        raise KernelUnavailable(f"The kernel is {kernel.state} at the moment; try again shortly.", kernel_id=kernel.id)
    if kernel.state is KernelState.RESTARTING:
        await _wait_for_restart(kernel)
    else:
        await kernel.restart()
    return kernel_model(kernel)


async def _wait_for_restart(kernel: Kernel) -> None:
    """Who asks for a restart while there is one has what they want when that is over."""
    with suppress(TimeoutError), anyio.fail_after(kernel.request.spec.start_timeout):
        while kernel.state is KernelState.RESTARTING:
            await kernel.log.changed()
    if not kernel.alive:
        reason = (kernel.cause or {}).get("message", f"It is {kernel.state}.")
        raise StartFailed(f"The kernel was not restarted. {reason}", kernel_id=kernel.id)
