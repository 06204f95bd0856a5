"""The native API's execution routes: one body, read as a whole, as JSON Lines or as Server-Sent Events."""

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Body, Depends, Request, Response

from gateway.api import streams
from gateway.api.dependencies import JSON_BODY, TheExecution, TheKernel, problems_of, require_json
from gateway.api.requests import submit
from gateway.api.schemas import EventDocument, ExecuteRequest, InputAnswer, Problem, ResultDocument
from gateway.errors import (
    ExecutionNotFound,
    KernelDead,
    KernelGone,
    KernelNotFound,
    KernelUnavailable,
    LimitExceeded,
    NotWaitingForInput,
    QueueFull,
)
from gateway.kernels.execution import Execution

router = APIRouter(prefix="/v1/kernels/{kernel_id}", tags=["executions"])

_EXAMPLES: dict[str, Any] = {
    "plain": {"summary": "A cell", "value": {"code": "1 + 1"}},
    "bounded": {"summary": "A cell that may run a minute", "value": {"code": "df.groupby('region').sum()", "timeout": 60}},
}


@router.post(
    "/execute",
    summary="Run a cell",
    response_class=Response,
    responses={
        200: {
            "description": "The result, or its events as they come (by the Accept header). A Python exception is a result.",
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/ResultDocument"}},
                **streams.EVENT_CONTENT,
            },
        },
        **problems_of(*JSON_BODY, KernelNotFound, KernelGone, KernelDead, KernelUnavailable, QueueFull, LimitExceeded),
    },
    dependencies=[Depends(require_json)],
)
async def execute(
    kernel: TheKernel, request: Request, body: Annotated[ExecuteRequest, Body(openapi_examples=_EXAMPLES)]
) -> Response:
    form = streams.chosen(request.headers.get("accept"))
    execution = submit(kernel, body, may_ask=False)
    if form != "json":
        return streams.respond(execution.log, form)
    await execution.done.wait()
    return _json(execution)


@router.get(
    "/executions/{execution_id}",
    summary="The result so far, or the whole",
    response_class=Response,
    responses={
        200: {"model": ResultDocument, "description": "The result"},
        **problems_of(KernelNotFound, KernelGone, ExecutionNotFound),
    },
)
async def get_execution(execution: TheExecution) -> Response:
    return _json(execution)


@router.post(
    "/executions/{execution_id}/input",
    status_code=204,
    summary="Answer an input_request",
    responses=problems_of(*JSON_BODY, KernelNotFound, KernelGone, ExecutionNotFound, NotWaitingForInput),
    dependencies=[Depends(require_json)],
)
async def answer_input(kernel: TheKernel, execution: TheExecution, body: InputAnswer) -> None:
    kernel.touch()
    kernel.cells.answer(execution, body.value)


@router.delete(
    "/executions/{execution_id}",
    status_code=202,
    summary="Cancel: a queued cell never runs, a running one is interrupted",
    response_class=Response,
    responses={
        202: {"model": ResultDocument, "description": "The result so far"},
        **problems_of(KernelNotFound, KernelGone, ExecutionNotFound),
    },
)
async def cancel_execution(kernel: TheKernel, execution: TheExecution) -> Response:
    await kernel.cancel(execution)
    return _json(execution, 202)


def _json(execution: Execution, status: int = 200) -> Response:
    return Response(orjson.dumps(execution.result()), status, media_type="application/json")


EXTRA_SCHEMAS = (EventDocument, ResultDocument, Problem)
"""Named in responses by reference only, so the OpenAPI document has to be given them."""
