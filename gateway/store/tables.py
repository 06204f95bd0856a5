"""The tables of the store in memory, and each change to them, such that a commit that fails half way can be taken back.

They are dicts in no order: whoever reads sorts. What makes a change fail is the same as in the SQL schema.
"""

from dataclasses import replace
from typing import Any

from gateway.store.base import (
    AddEvents,
    AddFrame,
    AddHeld,
    Change,
    Chunk,
    DropEvents,
    DropFrames,
    DropHeld,
    EndKernel,
    ExecutionRow,
    KernelRow,
    LargeValue,
    PutExecution,
    PutKernel,
    PutPosition,
    Tombstone,
    UpdateExecution,
)

_NOTHING: Any = object()


class Tables:
    def __init__(self) -> None:
        self.kernels: dict[str, KernelRow] = {}
        self.executions: dict[str, ExecutionRow] = {}
        self.numbers: dict[str, dict[int, str]] = {}
        """Ids of a kernel's executions by number."""
        self.keys: dict[tuple[str, str], str] = {}
        """Ids of executions by kernel and idempotency key."""
        self.frames: dict[str, dict[int, bytes]] = {}
        self.events: dict[str, dict[int, Chunk]] = {}
        """By log, then by the chunk's last number."""
        self.large: dict[str, dict[tuple[int, str], LargeValue]] = {}
        self.held: dict[str, dict[int, bytes]] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self._undo: list[tuple[dict[Any, Any], Any, Any]] = []

    def commit(self) -> None:
        self._undo.clear()

    def roll_back(self) -> None:
        for table, key, old in reversed(self._undo):
            if old is _NOTHING:
                table.pop(key, None)
            else:
                table[key] = old
        self._undo.clear()

    def apply(self, change: Change) -> None:
        match change:
            case AddEvents(log, chunk, large):
                self._add(self.events.setdefault(log, {}), chunk.last, chunk)
                for value in large:
                    self._add(self.large.setdefault(log, {}), (value.seq, value.media), value)
            case PutExecution(row):
                self._put_execution(row)
            case UpdateExecution(execution_id, document, msg_id, ended_at, size):
                if (known := self.executions.get(execution_id)) is not None:
                    fresh = replace(known, document=document, msg_id=msg_id, ended_at=ended_at, size=size)
                    self._set(self.executions, execution_id, fresh)
            case PutPosition(kernel_id, received, sent):
                if (kernel := self.kernels.get(kernel_id)) is not None:
                    values = (kernel.id, kernel.created_at, kernel.document, kernel.key, kernel.fingerprint, received, sent)
                    self._set(self.kernels, kernel_id, KernelRow(*values))
            case AddFrame(kernel_id, seq, frame):
                self._add(self.frames.setdefault(kernel_id, {}), seq, frame)
            case DropFrames(kernel_id, seq):
                self._drop_to(self.frames, kernel_id, seq)
            case AddHeld(execution_id, _, last, lines):
                self._add(self.held.setdefault(execution_id, {}), last, lines)
            case DropHeld(execution_id, before):
                self._drop_to(self.held, execution_id, before - 1)
            case DropEvents(log, before):
                ended = max((last for last in self.events.get(log, ()) if last < before), default=0)
                for key in [key for key in self.large.get(log, ()) if key[0] <= ended]:
                    self._remove(self.large[log], key)
                self._drop_to(self.events, log, before - 1)
            case PutKernel(row):
                if row.key is not None and any(row.key == k.key and row.id != k.id for k in self.kernels.values()):
                    raise _conflict("another kernel has this key")
                self._set(self.kernels, row.id, row)
            case EndKernel(stone):
                self._remove(self.kernels, stone.kernel_id)
                for table in (self.frames, self.events, self.large):
                    self._remove(table, stone.kernel_id)
                self._set(self.tombstones, stone.kernel_id, stone)

    def remove_execution(self, row: ExecutionRow) -> None:
        """With all that is its own."""
        self._remove(self.numbers[row.kernel_id], row.number)
        if not self.numbers[row.kernel_id]:
            self._remove(self.numbers, row.kernel_id)
        if row.key is not None:
            self._remove(self.keys, (row.kernel_id, row.key))
        for table in (self.executions, self.events, self.large, self.held):
            self._remove(table, row.id)

    def _put_execution(self, row: ExecutionRow) -> None:
        old = self.executions.get(row.id)
        if old is None:
            self._add(self.numbers.setdefault(row.kernel_id, {}), row.number, row.id)
            if row.key is not None:
                self._add(self.keys, (row.kernel_id, row.key), row.id)
        elif (old.kernel_id, old.number, old.key) != (row.kernel_id, row.number, row.key):
            raise _conflict("an execution changes its kernel, number or key")
        self._set(self.executions, row.id, row)

    def _drop_to(self, tables: dict[str, Any], name: str, last: int) -> None:
        table = tables.get(name, {})
        for number in [number for number in table if number <= last]:
            self._remove(table, number)
        if not table:
            self._remove(tables, name)

    def _add(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        if key in table:
            raise _conflict(f"{key!r} is there already")
        self._set(table, key, value)

    def _set(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self._undo.append((table, key, table.get(key, _NOTHING)))
        table[key] = value

    def _remove(self, table: dict[Any, Any], key: Any) -> None:
        if key in table:
            self._undo.append((table, key, table.pop(key)))


def _conflict(what: str) -> ValueError:
    return ValueError(f"A change contradicts what is stored: {what}")
