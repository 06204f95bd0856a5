"""What faces read: a log of events, and an execution in memory or in the store. They are alike to whoever reads."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from gateway.protocol.events import Event


class EventSource(Protocol):
    @property
    def last_seq(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def follow(self, after: int = 0) -> AsyncIterator[list[Event]]: ...
    async def page(self, after: int, limit: int) -> list[Event]: ...


class ExecutionView(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def kernel_id(self) -> str: ...
    @property
    def log(self) -> EventSource: ...
    async def document(self) -> dict[str, Any]: ...
    async def stored(self) -> None: ...


def path_of(execution: ExecutionView) -> str:
    """Where the execution can be read."""
    return f"/v1/kernels/{execution.kernel_id}/executions/{execution.id}"


def events_path(execution: ExecutionView) -> str:
    return f"{path_of(execution)}/events"
