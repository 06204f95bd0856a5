"""The native API's kernel routes: what runs, start it, interrupt it, end it."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Response

from gateway.api.dependencies import JSON_BODY, Manager, TheKernel, problems_of, require_json
from gateway.api.documents import Interrupted, KernelDocument, KernelList, KernelSpecDocument, KernelSpecList
from gateway.api.reading import DATA_CONTENT, EventNumber, HowToRead, data_of
from gateway.api.requests import REPLAYED, IdempotencyKey, fingerprint
from gateway.api.schemas import InterruptRequest, KeepAlive, KernelCreate
from gateway.api.streams import PAGE_CONTENT
from gateway.errors import (
    DataNotFound,
    EngineUnavailable,
    IdempotencyConflict,
    ImageMissing,
    KernelDead,
    KernelGone,
    KernelNotFound,
    LimitExceeded,
    NoCapacity,
    ShuttingDown,
    SpecNotFound,
    StartFailed,
    StartTimeout,
    StoreUnavailable,
    TooManyKernels,
)
from gateway.kernels import wishes
from gateway.kernels.wishes import CreateRequest

router = APIRouter(prefix="/v1", tags=["kernels"])

_EXAMPLES: dict[str, Any] = {
    "default": {"summary": "The default spec with its limits", "value": {}},
    "chosen": {
        "summary": "More memory, a variable and a label",
        "value": {"spec": "python3", "limits": {"memory": "2g", "cpus": 2}, "env": {"STAGE": "demo"}, "label": "sales report"},
    },
}


@router.get("/kernelspecs", responses=problems_of(), summary="What can be started")
async def list_kernelspecs(manager: Manager) -> KernelSpecList:
    specs = [KernelSpecDocument.of(name, spec) for name, spec in manager.specs().items()]
    return KernelSpecList(default=manager.default_spec, kernelspecs=specs)


@router.get("/kernels", responses=problems_of(), summary="The kernels there are")
async def list_kernels(manager: Manager) -> KernelList:
    return KernelList(kernels=[KernelDocument.of(kernel) for kernel in manager.list()])


@router.post(
    "/kernels",
    status_code=201,
    summary="Start a kernel",
    description="Answers once the kernel answers, or with the reason why it does not and the last lines of its log.",
    responses=problems_of(
        *JSON_BODY,
        *(SpecNotFound, LimitExceeded, TooManyKernels, NoCapacity, StartFailed, StartTimeout, EngineUnavailable, ImageMissing),
        *(IdempotencyConflict, StoreUnavailable, ShuttingDown),
    ),
    dependencies=[Depends(require_json)],
)
async def create_kernel(
    manager: Manager,
    response: Response,
    body: Annotated[KernelCreate, Body(openapi_examples=_EXAMPLES)] | None = None,
    key: IdempotencyKey = None,
) -> KernelDocument:
    wanted = body or KernelCreate()
    limits = wanted.limits
    create = CreateRequest(
        spec=wanted.spec,
        memory=limits.memory,
        cpus=limits.cpus,
        pids=limits.pids,
        idle_timeout=wanted.idle_timeout,
        lifetime=wanted.lifetime,
        on_death=wanted.on_death,
        env=wanted.env,
        label=wanted.label,
    )
    kernel, replayed = await manager.create(create, key, None if key is None else fingerprint(wanted))
    if replayed:
        response.headers.update(REPLAYED)
    response.headers["Location"] = f"/v1/kernels/{kernel.id}"
    return KernelDocument.of(kernel)


@router.get("/kernels/{kernel_id}", responses=problems_of(KernelNotFound, KernelGone), summary="One kernel")
async def get_kernel(kernel: TheKernel) -> KernelDocument:
    return KernelDocument.of(kernel)


@router.delete(
    "/kernels/{kernel_id}",
    status_code=204,
    responses=problems_of(KernelNotFound, KernelGone),
    summary="End a kernel and remove its sandbox",
)
async def delete_kernel(kernel_id: str, manager: Manager) -> None:
    await manager.delete(kernel_id)


@router.post(
    "/kernels/{kernel_id}/interrupt",
    status_code=202,
    responses=problems_of(*JSON_BODY, KernelNotFound, KernelGone, KernelDead),
    summary="Interrupt the running cell",
    description="SIGINT first, and harder steps while the cell goes on, as far as `up_to`; each is an event of the cell.",
    dependencies=[Depends(require_json)],
)
async def interrupt_kernel(kernel: TheKernel, body: InterruptRequest | None = None) -> Interrupted:
    execution = await kernel.interrupt(up_to=(body or InterruptRequest()).up_to)
    return Interrupted(execution_id=execution.id if execution else None)


@router.post(
    "/kernels/{kernel_id}/keepalive",
    responses=problems_of(*JSON_BODY, KernelNotFound, KernelGone, LimitExceeded),
    summary="Start the idle time anew, and extend the lifetime",
    dependencies=[Depends(require_json)],
)
async def keep_alive(kernel: TheKernel, body: KeepAlive | None = None) -> KernelDocument:
    await kernel.extend(wishes.lifetime_left((body or KeepAlive()).lifetime, kernel.age, kernel.request.spec))
    return KernelDocument.of(kernel)


@router.post(
    "/kernels/{kernel_id}/restart",
    responses=problems_of(KernelNotFound, KernelGone, KernelDead, StartFailed, StartTimeout),
    summary="A new process in the same sandbox: id and files stay",
)
async def restart_kernel(kernel: TheKernel) -> KernelDocument:
    await kernel.restart()
    return KernelDocument.of(kernel)


@router.get(
    "/kernels/{kernel_id}/events",
    responses={200: {"content": PAGE_CONTENT, "description": "Events"}, **problems_of(KernelNotFound, KernelGone)},
    response_class=Response,
    summary="The kernel's own events: state changes, and output that came outside of any cell",
)
async def read_kernel_events(kernel: TheKernel, manager: Manager, reading: HowToRead) -> Response:
    return await reading.of(kernel.log, f"/v1/kernels/{kernel.id}/events", manager)


@router.get(
    "/kernels/{kernel_id}/events/{seq}/data",
    responses={
        200: {"content": DATA_CONTENT, "description": "Its bytes; the media type is the one asked for"},
        **problems_of(KernelNotFound, KernelGone, DataNotFound),
    },
    response_class=Response,
    summary="One value of the MIME bundle of a kernel's own event",
)
async def read_kernel_data(kernel: TheKernel, seq: EventNumber, mime: Annotated[str, Query(alias="type")]) -> Response:
    return await data_of(kernel.log, seq, mime)
