"""The native API's execution requests: run a cell, answer its questions, cancel it. The answer is read as a client likes."""

from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Body, Depends, Request, Response

from gateway.api import attendance, streams
from gateway.api.dependencies import JSON_BODY, Manager, TheExecution, TheKernel, problems_of, require_json
from gateway.api.documents import EventDocument, EventPage, Problem, ResultDocument
from gateway.api.requests import REPLAYED, IdempotencyKey, answer, cancel, prefers_async, submit
from gateway.api.schemas import ExecuteRequest, InputAnswer
from gateway.api.views import ExecutionView, path_of
from gateway.errors import (
    ExecutionNotFound,
    IdempotencyConflict,
    KernelDead,
    KernelGone,
    KernelNotFound,
    KernelUnavailable,
    LimitExceeded,
    NotWaitingForInput,
    QueueFull,
    ShuttingDown,
    StoreUnavailable,
)

router = APIRouter(prefix="/v1/kernels/{kernel_id}", tags=["executions"])

_EXAMPLES: dict[str, Any] = {
    "plain": {"summary": "A cell", "value": {"code": "1 + 1"}},
    "bounded": {"summary": "A cell that may run a minute", "value": {"code": "df.groupby('region').sum()", "timeout": 60}},
    "detached": {"summary": "A cell that is read later", "value": {"code": "model.fit(x, y)", "detach": True}},
}
_RESULT = {"application/json": {"schema": {"$ref": "#/components/schemas/ResultDocument"}}}
_TEXT = {"schema": {"type": "string"}}
_REPLAYED = {"Idempotency-Replayed": {"description": "`true`: the key has been seen before; this is what it gave", **_TEXT}}
_PREFER = {
    "name": "Prefer",
    "in": "header",
    "required": False,
    "description": "`respond-async` asks for the same as `detach` (RFC 7240)",
    "schema": {"type": "string"},
}


@router.post(
    "/execute",
    summary="Run a cell",
    response_class=Response,
    responses={
        200: {
            "description": "The result, or its events as they come (by the Accept header). A Python exception is a result.",
            "content": {**_RESULT, **streams.EVENT_CONTENT},
            "headers": _REPLAYED,
        },
        202: {
            "description": "Detached: the result so far",
            "content": _RESULT,
            "headers": {
                "Location": {"description": "Where the execution is read", **_TEXT},
                "Preference-Applied": {"description": "`respond-async`, if Prefer asked for it", **_TEXT},
                **_REPLAYED,
            },
        },
        **problems_of(
            *(*JSON_BODY, KernelNotFound, KernelGone, KernelDead, KernelUnavailable, QueueFull, LimitExceeded),
            *(IdempotencyConflict, StoreUnavailable, ShuttingDown),
        ),
    },
    openapi_extra={"parameters": [_PREFER]},
    dependencies=[Depends(require_json)],
)
async def execute(
    kernel: TheKernel,
    manager: Manager,
    request: Request,
    body: Annotated[ExecuteRequest, Body(openapi_examples=_EXAMPLES)],
    key: IdempotencyKey = None,
) -> Response:
    form = streams.chosen(request.headers.get("accept"))
    execution, replayed = await submit(kernel, body, key, may_ask=False)
    headers = dict(REPLAYED) if replayed else {}
    preferred = prefers_async(request.headers.getlist("prefer"))
    if body.detach or preferred:
        await attendance.attend(execution.stored, manager.leaving)
        if execution.log.last_seq == 0:
            raise attendance.shutting_down(execution)
        headers["Location"] = path_of(execution)
        if preferred:
            headers["Preference-Applied"] = "respond-async"
        return await _result(execution, 202, headers)
    unattended = partial(attendance.cancel_unattended, manager, kernel, execution)
    on_left = unattended if body.on_disconnect == "interrupt" else None
    if form != "json":
        return streams.EventStream(execution.log, form, manager.leaving, headers=headers, on_left=on_left)
    ended = partial(attendance.until_ended, execution)
    if on_left is None:
        # Nothing but the end is waited for, and the gateway's leaving ends that too.
        await ended()
    elif await attendance.attend(ended, manager.leaving, request.receive) == "client_left":
        await on_left()
    if manager.leaving.is_set() and not execution.log.closed:
        raise attendance.shutting_down(execution)
    return await _result(execution, headers=headers)


@router.post(
    "/executions/{execution_id}/input",
    status_code=204,
    summary="Answer an input_request",
    responses=problems_of(*JSON_BODY, KernelNotFound, KernelGone, ExecutionNotFound, NotWaitingForInput, StoreUnavailable),
    dependencies=[Depends(require_json)],
)
async def answer_input(kernel: TheKernel, execution: TheExecution, body: InputAnswer) -> None:
    await answer(kernel, execution, body.value)


@router.delete(
    "/executions/{execution_id}",
    status_code=202,
    summary="Cancel: a queued cell never runs, a running one is interrupted",
    response_class=Response,
    responses={
        202: {"model": ResultDocument, "description": "The result so far"},
        **problems_of(KernelNotFound, KernelGone, ExecutionNotFound, StoreUnavailable),
    },
)
async def cancel_execution(kernel: TheKernel, execution: TheExecution) -> Response:
    await cancel(kernel, execution)
    return await _result(execution, 202)


async def _result(execution: ExecutionView, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(await execution.document()), status, headers, "application/json")


EXTRA_SCHEMAS = (EventDocument, EventPage, ResultDocument, Problem)
"""Named in responses by reference only, so the OpenAPI document has to be given them."""
