"""The native WebSocket: any number of executions over one connection, each event a text frame.

Each execution has a task that follows its log at the client's pace, so a slow client slows nobody and loses nothing. The client's
`request_id` is put into the events that answer it. Vocabulary: docs/native-api.md.
"""

from typing import Annotated, Any, Literal

import anyio
import anyio.abc
import orjson
import structlog
from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.websockets import WebSocketDisconnect

from gateway.api import problems
from gateway.api.dependencies import socket_kernel
from gateway.api.requests import submit
from gateway.api.schemas import ExecuteRequest, Text
from gateway.errors import GatewayError, InvalidRequest, QueueFull
from gateway.kernels.execution import Execution
from gateway.kernels.kernel import Kernel
from gateway.kernels.log import EventLog

log = structlog.get_logger()
router = APIRouter()

_MAX_FOLLOWED = 256
"""Executions that one connection may follow at once."""


class _Operation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    request_id: Text | Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(default=None, union_mode="left_to_right")


class _Execute(_Operation, ExecuteRequest):
    op: Literal["execute"]


class _Input(_Operation):
    op: Literal["input"]
    execution_id: str
    value: Text = Field(max_length=1_000_000)


class _Cancel(_Operation):
    op: Literal["cancel"]
    execution_id: str


class _Simple(_Operation):
    op: Literal["interrupt", "restart", "ping"]


_OPERATIONS: TypeAdapter[_Execute | _Input | _Cancel | _Simple] = TypeAdapter(
    Annotated[_Execute | _Input | _Cancel | _Simple, Field(discriminator="op")]
)


@router.websocket("/v1/kernels/{kernel_id}/ws")
async def native_socket(socket: WebSocket, kernel_id: str) -> None:
    try:
        kernel = socket_kernel(socket, kernel_id)
    except GatewayError as error:
        await socket.send_denial_response(problems.response(error))
        return
    await socket.accept()
    kernel.connections += 1
    try:
        await _Conversation(socket, kernel).run()
    finally:
        kernel.connections -= 1


class _Conversation:
    def __init__(self, socket: WebSocket, kernel: Kernel) -> None:
        self._socket = socket
        self._kernel = kernel
        self._followed = 0
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._follow_kernel)
                await self._listen()
                tasks.cancel_scope.cancel()
        except* (WebSocketDisconnect, RuntimeError):
            # The client left while something was being sent; its executions go on.
            log.debug("socket_closed", kernel_id=self._kernel.id)

    async def _listen(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            await self._take(text if text is not None else message.get("bytes") or b"")

    async def _take(self, frame: str | bytes) -> None:
        request_id: str | int | None = None
        try:
            operation = _OPERATIONS.validate_json(frame)
            request_id = operation.request_id
            await self._perform(operation)
        except ValidationError as error:
            summary = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            await self._refuse(_request_id_of(frame), InvalidRequest(f"{summary}."))
        except GatewayError as error:
            await self._refuse(request_id, error)

    async def _perform(self, operation: _Execute | _Input | _Cancel | _Simple) -> None:
        if isinstance(operation, _Execute):
            await self._execute(operation)
        elif isinstance(operation, _Input):
            self._kernel.touch()
            self._kernel.cells.answer(self._kernel.cells.get(operation.execution_id), operation.value)
        elif isinstance(operation, _Cancel):
            await self._kernel.cancel(self._kernel.cells.get(operation.execution_id))
        elif operation.op == "ping":
            await self._send({"type": "pong", "request_id": operation.request_id})
        else:
            assert self._tasks is not None
            self._tasks.start_soon(self._change, operation)

    async def _change(self, operation: _Simple) -> None:
        """Interrupt and restart take a while; the client's other requests need not wait for them."""
        try:
            if operation.op == "interrupt":
                await self._kernel.interrupt()
            else:
                await self._kernel.restart()
            await self._send({"type": "done", "op": operation.op, "request_id": operation.request_id})
        except GatewayError as error:
            await self._refuse(operation.request_id, error)

    async def _execute(self, operation: _Execute) -> None:
        if self._followed >= _MAX_FOLLOWED:
            raise QueueFull(f"This connection follows {_MAX_FOLLOWED} executions already.", limit=_MAX_FOLLOWED)
        assert self._tasks is not None
        execution = submit(self._kernel, operation, may_ask=True)
        self._followed += 1
        self._tasks.start_soon(self._follow, execution, operation.request_id)

    async def _follow(self, execution: Execution, request_id: str | int | None) -> None:
        await self._send({"type": "accepted", "execution_id": execution.id, "request_id": request_id})
        await self._forward(execution.log, 0, request_id)
        self._followed -= 1

    async def _follow_kernel(self) -> None:
        await self._forward(self._kernel.log, self._kernel.log.last_seq, None)
        await self._socket.close(1000, "The kernel is gone.")

    async def _forward(self, events: EventLog, after: int, request_id: str | int | None) -> None:
        suffix = b"}" if request_id is None else b',"request_id":' + orjson.dumps(request_id) + b"}"
        async for batch in events.follow(after):
            for event in batch:
                await self._socket.send_text((event.json[:-1] + suffix).decode())

    async def _refuse(self, request_id: str | int | None, error: GatewayError) -> None:
        await self._send({"type": "refused", "request_id": request_id, "problem": problems.document(error)})

    async def _send(self, value: dict[str, Any]) -> None:
        await self._socket.send_text(orjson.dumps(value, default=str).decode())


def _request_id_of(frame: str | bytes) -> str | int | None:
    """The request_id of a frame that is otherwise wrong, so that its sender can tell which one was refused."""
    try:
        value = orjson.loads(frame)
    except orjson.JSONDecodeError:
        return None
    found = value.get("request_id") if isinstance(value, dict) else None
    return found if isinstance(found, str | int) else None
