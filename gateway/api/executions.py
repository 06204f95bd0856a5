"""The native API's way back to executions: of kernels that run and of kernels that are gone, as long as they are kept."""

from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Response

from gateway.api.dependencies import Manager, TheExecution, problems_of
from gateway.api.documents import ResultDocument, SummaryDocument, SummaryPage
from gateway.api.reading import DATA_CONTENT, EventNumber, HowToRead, data_of
from gateway.api.streams import PAGE_CONTENT
from gateway.api.views import events_path
from gateway.errors import DataNotFound, ExecutionNotFound, KernelNotFound, StoreUnavailable

router = APIRouter(prefix="/v1/kernels/{kernel_id}/executions", tags=["executions"])

_ERRORS = (KernelNotFound, ExecutionNotFound, StoreUnavailable)


@router.get("", summary="Executions, newest first", responses=problems_of(KernelNotFound, StoreUnavailable))
async def list_executions(
    kernel_id: str,
    manager: Manager,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    before: Annotated[int | None, Query(ge=1, lt=2**63, description="Those with a number below")] = None,
) -> SummaryPage:
    # One more than asked for tells whether there is another page.
    found = await manager.executions(kernel_id, before, limit + 1)
    shown = [SummaryDocument.model_validate(summary) for summary in found[:limit]]
    return SummaryPage(executions=shown, next=shown[-1].number if len(found) > limit else None)


@router.get(
    "/{execution_id}",
    summary="The result so far, or the whole",
    response_class=Response,
    responses={200: {"model": ResultDocument, "description": "The result"}, **problems_of(*_ERRORS)},
)
async def get_execution(execution: TheExecution) -> Response:
    return Response(orjson.dumps(await execution.document()), media_type="application/json")


@router.get(
    "/{execution_id}/events",
    summary="Its events: a page of JSON, or a stream to follow (by the Accept header)",
    response_class=Response,
    responses={200: {"content": PAGE_CONTENT, "description": "Events"}, **problems_of(*_ERRORS)},
)
async def read_events(execution: TheExecution, manager: Manager, reading: HowToRead) -> Response:
    return await reading.of(execution.log, events_path(execution), manager)


@router.get(
    "/{execution_id}/events/{seq}/data",
    summary="One value of an event's MIME bundle",
    response_class=Response,
    responses={
        200: {"content": DATA_CONTENT, "description": "Its bytes; the media type is the one asked for"},
        **problems_of(*_ERRORS, DataNotFound),
    },
)
async def read_data(execution: TheExecution, seq: EventNumber, mime: Annotated[str, Query(alias="type")]) -> Response:
    return await data_of(execution.log, seq, mime)
