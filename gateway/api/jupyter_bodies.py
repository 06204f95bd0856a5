"""What Jupyter's clients send: JSON under any media type, or nothing at all; and what a kernel gets of it.

They post text/plain (@jupyterlab/services), no media type (Enterprise Gateway's client) and no body (smolagents), so the media type
says nothing here. That a foreign web page could send such a body without a preflight is met by the door: Origin, then token.
"""

from pathlib import PurePosixPath
from typing import Any
from uuid import UUID, uuid4

import orjson
from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from gateway.api.schemas import KernelCreate, may_be_set
from gateway.errors import InvalidRequest, MalformedBody
from gateway.kernels.wishes import CreateRequest
from gateway.settings import JupyterSettings

Body = dict[str, Any]
_MAX_TEXT = 4096


async def read_body(request: Request) -> Body | None:
    """The JSON object of a body, None without one; raises `InvalidRequest`, `MalformedBody`, `BodyTooLarge`."""
    try:
        content = await request.body()
    except ClientDisconnect:
        raise MalformedBody("The body did not come to its end.") from None
    if not content.strip():
        return None
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise InvalidRequest("The body has to be a JSON object.")
    return found


def text_of(body: Body, name: str) -> str | None:
    """A member that is a text; None when it is null or absent. Raises `InvalidRequest`."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _MAX_TEXT or "\0" in value:
        raise InvalidRequest(f"{name} has to be a text of at most {_MAX_TEXT} characters.")
    return value


def object_of(body: Body, name: str) -> Body | None:
    """A member that is an object; None when it is null or absent. Raises `InvalidRequest`."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest(f"{name} has to be an object.")
    return value


def id_of(value: str | None) -> str | None:
    """A kernel id that a client has chosen; raises `InvalidRequest`."""
    if not value:
        return None
    try:
        return str(UUID(value))
    except ValueError:
        raise InvalidRequest("A kernel id has to be a UUID.") from None


def create_of(body: Body | None, settings: JupyterSettings) -> CreateRequest:
    """A kernel as the body of POST /api/kernels asks for it; raises `InvalidRequest`."""
    body = body or {}
    env = _env(object_of(body, "env") or {}, settings)
    kernel_id = id_of(text_of(body, "kernel_id") or env.get("KERNEL_ID")) or str(uuid4())
    return CreateRequest(
        spec=text_of(body, "name") or None,
        env={**env, "KERNEL_GATEWAY": "1", "KERNEL_ID": kernel_id},
        label=label_of(text_of(body, "path")),
        kernel_id=kernel_id,
        start_timeout=_launch_timeout(env, settings),
    )


def label_of(path: str | None) -> str:
    """The end of a path, as the label of its kernel."""
    return (path or "")[-200:]


def _env(wanted: Body, settings: JupyterSettings) -> dict[str, str]:
    """The variables that reach the kernel; those that may not are left out, as Jupyter's gateways do."""
    allowed = set(settings.client_envs)
    kept = {
        name: value
        for name, value in wanted.items()
        if may_be_set(name) and (name.startswith("KERNEL_") or name in allowed or "*" in allowed)
    }
    if not _is_inside(kept.get("KERNEL_WORKING_DIR")):
        del kept["KERNEL_WORKING_DIR"]
    try:
        return KernelCreate(env=kept).env
    except ValidationError as error:
        found = error.errors()[0]
        raise InvalidRequest(f"{'.'.join(str(part) for part in found['loc'])}: {found['msg']}.") from None


def _is_inside(directory: object) -> bool:
    """Absent, or a relative path within the work directory. Others name places of the client's machine."""
    if not isinstance(directory, str):
        return directory is None
    path = PurePosixPath(directory)
    return not path.is_absolute() and ".." not in path.parts


def _launch_timeout(env: dict[str, str], settings: JupyterSettings) -> float | None:
    try:
        asked = float(env.get("KERNEL_LAUNCH_TIMEOUT", ""))
    except ValueError:
        asked = 0.0
    # Neither NaN nor infinity is a time.
    if 0 < asked < 1e9:
        return asked
    return settings.launch_timeout or None
