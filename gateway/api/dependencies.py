"""What routes ask for by type: the manager, the kernel of the path, a JSON body; and how errors are documented."""

from typing import Annotated, Any

from fastapi import Depends, Request, WebSocket

from gateway.api import problems
from gateway.api.views import ExecutionView
from gateway.errors import (
    BodyTooLarge,
    ForbiddenOrigin,
    GatewayError,
    InvalidRequest,
    MalformedBody,
    Unauthorized,
    UnsupportedMediaType,
)
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager

# Coroutines, though they wait for nothing: a plain function would be run in a thread, and every request would go there and back.


async def get_manager(request: Request) -> KernelManager:
    manager: KernelManager = request.app.state.manager
    return manager


Manager = Annotated[KernelManager, Depends(get_manager)]


async def get_kernel(kernel_id: str, manager: Manager) -> Kernel:
    return manager.get(kernel_id)


TheKernel = Annotated[Kernel, Depends(get_kernel)]


async def get_execution(kernel_id: str, execution_id: str, manager: Manager) -> ExecutionView:
    """In memory or in the store, also of a kernel that is gone."""
    return await manager.execution(kernel_id, execution_id)


TheExecution = Annotated[ExecutionView, Depends(get_execution)]


def socket_manager(socket: WebSocket) -> KernelManager:
    manager: KernelManager = socket.app.state.manager
    return manager


async def require_json(request: Request) -> None:
    """A body has to say that it is JSON: a web page can't send that without a preflight (RFC 9110 section 8.3)."""
    declared = request.headers.get("content-type", "")
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    if has_body and declared.partition(";")[0].strip().lower() not in ("application/json", ""):
        raise UnsupportedMediaType(f"This route takes application/json, not {declared[:80]!r}.")


JSON_BODY: tuple[type[GatewayError], ...] = (MalformedBody, BodyTooLarge, UnsupportedMediaType)
"""What any route with a JSON body may answer with."""
_EVERYWHERE: tuple[type[GatewayError], ...] = (Unauthorized, ForbiddenOrigin, InvalidRequest)


def problems_of(*errors: type[GatewayError]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for the errors a route may answer with besides those of every route; several under one status joined."""
    found: dict[int | str, dict[str, Any]] = {}
    for error in (*_EVERYWHERE, *errors):
        title = (error.__doc__ or "").strip()
        example = {
            "type": f"urn:cellgate:error:{error.code}",
            "title": title,
            "status": error.status,
            "code": error.code,
            "detail": f"{title}.",
            "retryable": error.retryable,
        }
        entry = found.setdefault(
            error.status,
            {
                "description": "",
                "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}},
            },
        )
        entry["description"] = f"{entry['description']}; {title}".lstrip("; ")
        entry["content"][problems.MEDIA_TYPE]["examples"][error.code] = {"value": example}
    return found
