"""What Jupyter's clients ask of the server itself: whether it is there, how busy it is, who they are."""

from typing import Any

import orjson
from fastapi import APIRouter, Request

from gateway import __version__
from gateway.api.dependencies import Manager
from gateway.errors import InvalidRequest

router = APIRouter(prefix="/api", include_in_schema=False)

JUPYTER_VERSION = "2.21.1"
"""The Jupyter Server whose API this is: clients compare it to know what they may ask for."""
_RESOURCES = {"kernels", "kernelspecs", "sessions", "server", "api"}


@router.get("")
async def get_version() -> dict[str, str]:
    """Open to all: clients ask it until a server is up."""
    return {"version": JUPYTER_VERSION, "cellgate_version": __version__}


@router.get("/status")
async def get_status(manager: Manager, request: Request) -> dict[str, Any]:
    kernels, started = manager.list(), request.app.state.started
    return {
        "started": started,
        "last_activity": max([started, *(kernel.last_activity for kernel in kernels)]),
        "kernels": len(kernels),
        "connections": sum(kernel.connections for kernel in kernels),
    }


@router.get("/me")
async def get_identity(permissions: str | None = None) -> dict[str, Any]:
    """The one owner of the token. `permissions` is a JSON object of resources and actions; what is there may be done."""
    identity = {
        "username": "cellgate",
        "name": "Cellgate",
        "display_name": "Cellgate",
        "initials": "C",
        "avatar_url": None,
        "color": None,
    }
    return {"identity": identity, "permissions": _granted(permissions)}


def _granted(permissions: str | None) -> dict[str, list[str]]:
    try:
        asked = orjson.loads(permissions or "{}")
        if not all(isinstance(action, str) for actions in asked.values() for action in actions):
            raise TypeError
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        raise InvalidRequest('permissions has to be a JSON object as {"kernels": ["read", "execute"]}.') from None
    return {resource: [*actions] if resource in _RESOURCES else [] for resource, actions in asked.items()}
