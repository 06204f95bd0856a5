"""Jupyter's sessions: a notebook's path and the kernel it has. The rules are in `gateway.kernels.sessions`."""

from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from gateway.api.dependencies import Manager
from gateway.api.jupyter_bodies import Body, id_of, label_of, object_of, read_body, text_of
from gateway.api.jupyter_errors import encode, facts_of
from gateway.api.jupyter_models import session_model
from gateway.errors import (
    EngineUnavailable,
    GatewayError,
    ImageMissing,
    InvalidRequest,
    KernelGone,
    KernelNotFound,
    SpecNotFound,
    StartFailed,
    StartTimeout,
)
from gateway.kernels.sessions import Sessions
from gateway.kernels.wishes import CreateRequest
from gateway.settings import JupyterSettings

router = APIRouter(prefix="/api/sessions", include_in_schema=False)


async def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


TheSessions = Annotated[Sessions, Depends(_sessions)]


@router.get("")
async def list_sessions(sessions: TheSessions) -> list[dict[str, Any]]:
    return [session_model(*found) for found in sessions.list()]


@router.post("", status_code=201, response_model=None)
async def create_session(sessions: TheSessions, request: Request, response: Response) -> dict[str, Any] | Response:
    body = _plain(await _required(request))
    path, kind = text_of(body, "path"), text_of(body, "type")
    for member, value in (("path", path), ("type", kind)):
        if value is None:
            raise InvalidRequest(f"Missing field in JSON data: {member}")
    kernel = object_of(body, "kernel") or {}
    kernel_id = id_of(text_of(kernel, "id"))
    create = _create(text_of(kernel, "name"), kernel_id, path or "", request.app.state.settings.jupyter)
    try:
        found = await sessions.open(path or "", text_of(body, "name") or "", kind or "", create)
    except (SpecNotFound, StartFailed, StartTimeout, EngineUnavailable, ImageMissing) as error:
        return _not_started(error, create.spec)
    response.headers["Location"] = f"/api/sessions/{found[0].id}"
    return session_model(*found)


@router.get("/{session_id}")
async def get_session(session_id: str, sessions: TheSessions) -> dict[str, Any]:
    return session_model(*sessions.get(session_id))


@router.patch("/{session_id}", response_model=None)
async def change_session(
    session_id: str, sessions: TheSessions, manager: Manager, request: Request
) -> dict[str, Any] | Response:
    body = _plain(await _required(request))
    before, _ = sessions.get(session_id)
    path, name, kind = text_of(body, "path"), text_of(body, "name"), text_of(body, "type")
    kernel = object_of(body, "kernel") or {}
    kernel_id, spec = text_of(kernel, "id"), text_of(kernel, "name")
    if kernel_id is None and spec is not None:
        create = _create(spec, None, before.path, request.app.state.settings.jupyter)
        try:
            kernel_id = (await manager.create(create))[0].id
        except (SpecNotFound, StartFailed, StartTimeout, EngineUnavailable, ImageMissing) as error:
            return _not_started(error, spec)
    return session_model(*await sessions.change(session_id, path=path, name=name, kind=kind, kernel_id=kernel_id))


@router.delete("/{session_id}", status_code=204, response_model=None)
async def delete_session(session_id: str, sessions: TheSessions) -> Response:
    try:
        await sessions.close(session_id)
    except (KernelGone, KernelNotFound) as error:
        return Response(encode(error), 410, media_type="application/json")
    return Response(status_code=204)


async def _required(request: Request) -> Body:
    body = await read_body(request)
    if body is None:
        raise InvalidRequest("No JSON data provided.")
    return body


def _plain(body: Body) -> Body:
    """Clients of Jupyter Notebook 4 say `notebook.path` for `path`."""
    notebook = object_of(body, "notebook") or {}
    if "path" not in notebook or "path" in body:
        return body
    return {"name": notebook.get("name"), **body, "path": notebook["path"], "type": body.get("type") or "notebook"}


def _create(spec: str | None, kernel_id: str | None, path: str, settings: JupyterSettings) -> CreateRequest:
    kernel_id = kernel_id or str(uuid4())
    return CreateRequest(
        spec=spec or None,
        # The last is where ipykernel takes the name of the notebook from.
        env={"KERNEL_GATEWAY": "1", "KERNEL_ID": kernel_id, "JPY_SESSION_NAME": path},
        label=label_of(path),
        kernel_id=kernel_id,
        start_timeout=settings.launch_timeout or None,
    )


def _not_started(error: GatewayError, spec: str | None) -> Response:
    """As a Jupyter server, which answers 501 and two texts of different length."""
    short = f"{spec} not found" if isinstance(error, SpecNotFound) else error.title
    content = {"message": error.detail, "short_message": short, "reason": error.title, "cellgate": facts_of(error)}
    return JSONResponse(content, 501)
