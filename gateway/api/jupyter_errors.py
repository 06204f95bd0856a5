"""Errors as Jupyter's clients know them: ``{"message", "reason"}``, with the status that a Jupyter server would give.

Nothing but an error's own text is ever told: no traceback, no path of this machine.
"""

from typing import Any

import orjson
from starlette.types import Scope

from gateway.errors import (
    GatewayError,
    InvalidRequest,
    KernelGone,
    KernelNotFound,
    LimitExceeded,
    MethodNotAllowed,
    NoCapacity,
    NotFound,
    TooManyKernels,
)

_STATUS: dict[type[GatewayError], int] = {
    InvalidRequest: 400,
    KernelGone: 404,
    LimitExceeded: 403,
    NoCapacity: 403,
    TooManyKernels: 403,
}
"""Where a Jupyter server gives another status than the native API."""
_FACTS = ("limit", "maximum", "log", "cause", "ended_at")
"""Members of an error that are told besides, as far as it has them."""


def speaks_jupyter(path: str) -> bool:
    """Whether the clients of this path (below the base URL) are Jupyter's."""
    return path in ("/api", "/kernelspecs") or path.startswith(("/api/", "/kernelspecs/"))


def route_path(scope: Scope) -> str:
    """The path of a request below the base URL."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def status_of(error: GatewayError) -> int:
    kind = next((kind for kind in type(error).__mro__ if kind in _STATUS), None)
    return error.status if kind is None else _STATUS[kind]


def encode(error: GatewayError) -> bytes:
    # Jupyter's clients show both.
    return orjson.dumps({"message": _text(error), "reason": error.title, "cellgate": facts_of(error)}, default=str)


def facts_of(error: GatewayError) -> dict[str, Any]:
    """What a program wants to know: the code of the native API, and what belongs to it."""
    facts = {name: error.members[name] for name in _FACTS if name in error.members}
    return {"code": error.code, "retryable": error.retryable, **facts}


def _text(error: GatewayError) -> str:
    if type(error) is NotFound:
        return "Cellgate serves no such path. Of Jupyter's API it has kernels, kernelspecs and sessions, but no contents and no terminals."
    if isinstance(error, MethodNotAllowed):
        return "This path does not take this method; see the Allow header."
    if isinstance(error, KernelGone | KernelNotFound):
        cause = error.members.get("cause") or {}
        return f"Kernel does not exist: {error.members.get('kernel_id')}. {cause.get('message', '')}".strip()
    return error.detail.replace("/v1/", "/api/")
