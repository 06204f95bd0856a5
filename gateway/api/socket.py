"""The native WebSocket: any number of executions over one connection, each event a text frame.

Each execution has a task that follows its log at the client's pace, so a slow client slows nobody and loses nothing. The client's
`request_id` is put into the events that answer it. Vocabulary: docs/native-api.md.
"""

from typing import Any

import anyio
import anyio.abc
import orjson
import structlog
from fastapi import APIRouter, WebSocket
from pydantic import ValidationError
from starlette.websockets import WebSocketDisconnect

from gateway.api import attendance, problems, streams
from gateway.api.dependencies import socket_manager
from gateway.api.operations import (
    AFTER,
    OPERATIONS,
    Cancel,
    Execute,
    Follow,
    Input,
    Operation,
    RequestId,
    Simple,
    request_id_of,
)
from gateway.api.requests import answer, cancel, submit
from gateway.api.streams import Encode
from gateway.api.views import EventSource, ExecutionView, events_path
from gateway.errors import GatewayError, InvalidRequest, QueueFull
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager

log = structlog.get_logger()
router = APIRouter()

_MAX_FOLLOWED = 256
"""Executions that one connection may follow at once."""


@router.websocket("/v1/kernels/{kernel_id}/ws")
async def native_socket(socket: WebSocket, kernel_id: str) -> None:
    manager = socket_manager(socket)
    try:
        kernel = manager.get(kernel_id)
        after = _after(socket, kernel.log.last_seq)
    except GatewayError as error:
        await socket.send_denial_response(problems.response(error))
        return
    await socket.accept()
    kernel.connections += 1
    try:
        await _Conversation(socket, manager, kernel).run(after)
    finally:
        kernel.connections -= 1


def _after(socket: WebSocket, default: int) -> int:
    text = socket.query_params.get("after")
    try:
        return default if text is None else AFTER.validate_python(text)
    except ValidationError:
        raise InvalidRequest("after is the number of an event: 0, 1, 2 and so on.") from None


class _Conversation:
    def __init__(self, socket: WebSocket, manager: KernelManager, kernel: Kernel) -> None:
        self._socket, self._manager, self._kernel = socket, manager, kernel
        self._followed = 0
        self._unattended: dict[str, ExecutionView] = {}
        """What is to be cancelled when this connection goes away."""
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self, after: int) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._follow_kernel, after)
                tasks.start_soon(self._leave)
                await self._listen()
                tasks.cancel_scope.cancel()
        except* (WebSocketDisconnect, RuntimeError):
            # The client left while something was being sent.
            log.debug("socket_closed", kernel_id=self._kernel.id)
        # The last one first: none of them begins when one before it ends.
        for execution in reversed(self._unattended.values()):
            await attendance.cancel_unattended(self._manager, self._kernel, execution)

    async def _leave(self) -> None:
        await self._manager.leaving.wait()
        await self._socket.close(1012, "The gateway is stopping.")

    async def _listen(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            await self._take(text if text is not None else message.get("bytes") or b"")

    async def _take(self, frame: str | bytes) -> None:
        request_id: RequestId = None
        try:
            operation = OPERATIONS.validate_json(frame)
            request_id = operation.request_id
            await self._perform(operation)
        except ValidationError as error:
            summary = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            await self._refuse(request_id_of(frame), InvalidRequest(f"{summary}."))
        except GatewayError as error:
            await self._refuse(request_id, error)

    async def _perform(self, operation: Operation) -> None:
        if isinstance(operation, Execute):
            await self._execute(operation)
        elif isinstance(operation, Follow):
            await self._follow_again(operation)
        elif isinstance(operation, Input):
            execution = await self._manager.execution(self._kernel.id, operation.execution_id)
            await answer(self._kernel, execution, operation.value)
        elif isinstance(operation, Cancel):
            await cancel(self._kernel, await self._manager.execution(self._kernel.id, operation.execution_id))
        elif operation.op == "ping":
            await self._send({"type": "pong", "request_id": operation.request_id})
        else:
            assert self._tasks is not None
            self._tasks.start_soon(self._change, operation)

    async def _change(self, operation: Simple) -> None:
        """Interrupt and restart take a while; the client's other requests need not wait for them."""
        try:
            if operation.op == "interrupt":
                await self._kernel.interrupt()
            else:
                await self._kernel.restart()
            await self._send({"type": "done", "op": operation.op, "request_id": operation.request_id})
        except GatewayError as error:
            await self._refuse(operation.request_id, error)

    async def _execute(self, operation: Execute) -> None:
        self._require_room()
        execution, replayed = await submit(self._kernel, operation, operation.idempotency_key, may_ask=True)
        if operation.on_disconnect == "interrupt":
            self._unattended[execution.id] = execution
        accepted = {"replayed": True} if replayed else {}
        self._start_following(execution, 0, operation.request_id, streams.plain, accepted)

    async def _follow_again(self, operation: Follow) -> None:
        self._require_room()
        execution = await self._manager.execution(self._kernel.id, operation.execution_id)
        encode = streams.encoder(operation.large, events_path(execution))
        self._start_following(execution, operation.after, operation.request_id, encode, {})

    def _require_room(self) -> None:
        if self._followed >= _MAX_FOLLOWED:
            raise QueueFull(f"This connection follows {_MAX_FOLLOWED} executions already.", limit=_MAX_FOLLOWED)

    def _start_following(
        self, execution: ExecutionView, after: int, request_id: RequestId, encode: Encode, accepted: dict[str, Any]
    ) -> None:
        assert self._tasks is not None
        self._followed += 1
        self._tasks.start_soon(self._follow, execution, after, request_id, encode, accepted)

    async def _follow(
        self, execution: ExecutionView, after: int, request_id: RequestId, encode: Encode, accepted: dict[str, Any]
    ) -> None:
        try:
            await execution.stored()
            await self._send({"type": "accepted", "execution_id": execution.id, "request_id": request_id, **accepted})
            await self._forward(execution.log, after, request_id, encode)
            self._unattended.pop(execution.id, None)
        except GatewayError as error:
            await self._refuse(request_id, error)
        finally:
            self._followed -= 1

    async def _follow_kernel(self, after: int) -> None:
        await self._forward(self._kernel.log, after, None, streams.plain)
        await self._socket.close(1000, "The kernel is gone.")

    async def _forward(self, events: EventSource, after: int, request_id: RequestId, encode: Encode) -> None:
        suffix = b"}" if request_id is None else b',"request_id":' + orjson.dumps(request_id) + b"}"
        async for batch in events.follow(after):
            for event in batch:
                await self._socket.send_text((encode(event)[:-1] + suffix).decode())

    async def _refuse(self, request_id: RequestId, error: GatewayError) -> None:
        await self._send({"type": "refused", "request_id": request_id, "problem": problems.document(error)})

    async def _send(self, value: dict[str, Any]) -> None:
        await self._socket.send_text(orjson.dumps(value, default=str).decode())
