"""What only the store knows: executions that ended some time ago, and the kernels of a gateway that is no more.

An `ArchivedExecution` is read as a live one is (`document`, `log`), a piece at a time: a reader of a large output holds a chunk of it,
not the whole.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.kernels import records
from gateway.kernels.budget import OutputBudget
from gateway.kernels.execution import Execution, result_of
from gateway.kernels.journal import Journal
from gateway.protocol.events import Event
from gateway.settings import KernelSettings
from gateway.store.base import ExecutionRow, KernelRow, Store

_PIECE = 1024 * 1024
"""Bytes of events that are read at once."""
_ORIGINS = 4096


class ArchivedLog:
    """The events of an execution that has ended."""

    closed = True

    def __init__(self, store: Store, log: str, last_seq: int) -> None:
        self.last_seq = last_seq
        self._store, self._log = store, log

    async def follow(self, after: int = 0) -> AsyncIterator[list[Event]]:
        """Batches of the events above `after`, to the last."""
        while True:
            events = await read_events(self._store, self._log, after, _PIECE)
            if not events:
                return
            after = events[-1].seq
            yield events

    async def page(self, after: int, limit: int) -> list[Event]:
        found: list[Event] = []
        async for events in self.follow(after):
            found += events
            if len(found) >= limit:
                break
        return found[:limit]


class ArchivedExecution:
    """An execution that has ended, as it was recorded."""

    live = False
    ended = True

    def __init__(self, store: Store, row: ExecutionRow) -> None:
        self.id, self.kernel_id, self.number = row.id, row.kernel_id, row.number
        self.fingerprint = row.fingerprint
        self.record: dict[str, Any] = orjson.loads(row.document)
        self.log = ArchivedLog(store, row.id, self.record["last_seq"])

    async def stored(self) -> None:
        """It is."""

    async def document(self) -> dict[str, Any]:
        """`Result` of docs/native-api.md."""
        events = [event async for batch in self.log.follow() for event in batch]
        return result_of(self.record, events)


async def find(store: Store, kernel_id: str, execution_id: str) -> ArchivedExecution | None:
    row = await store.execution(kernel_id, execution_id)
    return _ended(store, row)


async def of_key(store: Store, kernel_id: str, key: str) -> ArchivedExecution | None:
    row = await store.execution_of_key(kernel_id, key)
    return _ended(store, row)


def _ended(store: Store, row: ExecutionRow | None) -> ArchivedExecution | None:
    return ArchivedExecution(store, row) if row is not None and row.ended_at is not None else None


async def read_events(store: Store, log: str, after: int, max_bytes: int) -> list[Event]:
    chunks = await store.events(log, after, max_bytes)
    if not chunks:
        return []
    large = await store.large_values(log, max(after + 1, chunks[0].first), chunks[-1].last)
    return [event for chunk in chunks for event in records.from_chunk(chunk, large, after)]


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """All that a gateway needs to take up a kernel of the one before it."""

    row: KernelRow
    document: dict[str, Any]
    frames: list[tuple[int, bytes]]
    unfinished: list[Execution]
    origins: list[tuple[str, str]]
    events: list[Event]
    """The kernel's own, as far as they are kept."""
    last_event: int
    last: dict[str, Any] | None
    """The record of the execution that was asked for last."""


async def load_kernel(store: Store, row: KernelRow, journal: Journal, settings: KernelSettings) -> StoredKernel:
    return StoredKernel(
        row=row,
        document=orjson.loads(row.document),
        frames=await store.frames(row.id),
        unfinished=[await _unfinished(store, found, journal, settings) for found in await store.unfinished(row.id)],
        origins=await store.messages(row.id, _ORIGINS),
        events=await _all_events(store, row.id),
        last_event=await store.last_event(row.id),
        last=next(iter(await summaries(store, row.id, None, 1)), None),
    )


async def _unfinished(store: Store, row: ExecutionRow, journal: Journal, settings: KernelSettings) -> Execution:
    budget = OutputBudget(settings.max_output, settings.max_output_events)
    return Execution.restored(row, budget, await _all_events(store, row.id), await store.held(row.id), journal)


async def _all_events(store: Store, log: str) -> list[Event]:
    found: list[Event] = []
    while events := await read_events(store, log, found[-1].seq if found else 0, _PIECE):
        found += events
    return found


async def summaries(store: Store, kernel_id: str, before: int | None, limit: int) -> Sequence[dict[str, Any]]:
    """The records of executions, newest first."""
    return [orjson.loads(row.document) for row in await store.executions(kernel_id, before, limit)]
