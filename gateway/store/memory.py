"""The store of a gateway that need not outlive itself: the same contract, in dicts, with nothing to wait for."""

from collections.abc import Iterable, Sequence

from gateway.store.base import Change, Chunk, ExecutionRow, KernelRow, LargeValue, Retention, Tombstone
from gateway.store.tables import Tables

_AT_ONCE = 256
"""Executions, and tombstones, that one purge removes."""


class MemoryStore:
    """A `gateway.store.base.Store`. A change that contradicts what is stored raises ValueError."""

    def __init__(self) -> None:
        self.durable = False
        self.epoch = 1
        self._tables = Tables()

    async def open(self) -> None:
        pass

    async def commit(self, changes: Sequence[Change]) -> None:
        try:
            for change in changes:
                self._tables.apply(change)
        except BaseException:
            self._tables.roll_back()
            raise
        self._tables.commit()

    async def kernels(self) -> list[KernelRow]:
        return sorted(self._tables.kernels.values(), key=lambda row: (row.created_at, row.id))

    async def frames(self, kernel_id: str) -> list[tuple[int, bytes]]:
        return sorted(self._tables.frames.get(kernel_id, {}).items())

    async def unfinished(self, kernel_id: str) -> list[ExecutionRow]:
        return [row for row in self._by_number(kernel_id) if row.ended_at is None]

    async def executions(self, kernel_id: str, before: int | None, limit: int) -> list[ExecutionRow]:
        rows = [row for row in self._by_number(kernel_id) if before is None or row.number < before]
        return rows[::-1][:limit]

    async def execution(self, kernel_id: str, execution_id: str) -> ExecutionRow | None:
        row = self._tables.executions.get(execution_id)
        return row if row is not None and row.kernel_id == kernel_id else None

    async def execution_of_key(self, kernel_id: str, key: str) -> ExecutionRow | None:
        execution_id = self._tables.keys.get((kernel_id, key))
        return None if execution_id is None else self._tables.executions[execution_id]

    async def messages(self, kernel_id: str, limit: int) -> list[tuple[str, str]]:
        found = [(row.msg_id, row.id) for row in self._by_number(kernel_id) if row.msg_id is not None]
        return found[max(0, len(found) - limit) :]

    async def last_event(self, log: str) -> int:
        return max(self._tables.events.get(log, ()), default=0)

    async def events(self, log: str, after: int, max_bytes: int) -> list[Chunk]:
        found: list[Chunk] = []
        for last, chunk in sorted(self._tables.events.get(log, {}).items()):
            if last <= after:
                continue
            max_bytes -= len(chunk.lines)
            if found and max_bytes < 0:
                break
            found.append(chunk)
        return found

    async def large_values(self, log: str, first: int, last: int) -> list[LargeValue]:
        return [value for (seq, _), value in sorted(self._tables.large.get(log, {}).items()) if first <= seq <= last]

    async def held(self, execution_id: str) -> list[bytes]:
        return [lines for _, lines in sorted(self._tables.held.get(execution_id, {}).items())]

    async def tombstones(self) -> list[Tombstone]:
        return sorted(self._tables.tombstones.values(), key=lambda stone: (stone.ended_at, stone.kernel_id))

    async def purge(self, retention: Retention, now: float) -> int:
        removed = 0
        stones = await self.tombstones()
        excess = len(stones) - retention.max_tombstones
        for index, stone in enumerate(stones[:_AT_ONCE]):
            if index < excess or stone.ended_at <= now - retention.keep_tombstones:
                del self._tables.tombstones[stone.kernel_id]
                removed += 1
        return removed + self._purge_executions(retention, now, await self.size())

    async def size(self) -> int:
        tables = self._tables
        rows: Iterable[KernelRow | ExecutionRow | Tombstone]
        rows = (*tables.kernels.values(), *tables.executions.values(), *tables.tombstones.values())
        frames = sum(len(frame) for table in tables.frames.values() for frame in table.values())
        requests = sum(len(row.request) for row in tables.executions.values())
        logs = {*tables.events, *tables.large, *tables.held}
        return sum(len(row.document) for row in rows) + requests + frames + sum(map(self._log_size, logs))

    async def check(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def _by_number(self, kernel_id: str) -> list[ExecutionRow]:
        return [self._tables.executions[id_] for _, id_ in sorted(self._tables.numbers.get(kernel_id, {}).items())]

    def _purge_executions(self, retention: Retention, now: float, size: int) -> int:
        ended = [(row.ended_at, row.id, row) for row in self._tables.executions.values() if row.ended_at is not None]
        removed = 0
        for ended_at, _, row in sorted(ended, key=lambda entry: entry[:2])[:_AT_ONCE]:
            if not (ended_at <= now - retention.keep or size > retention.max_size):
                break
            size -= len(row.document) + len(row.request) + self._log_size(row.id)
            self._tables.remove_execution(row)
            removed += 1
        self._tables.commit()
        return removed

    def _log_size(self, log: str) -> int:
        chunks = self._tables.events.get(log, {}).values()
        values = self._tables.large.get(log, {}).values()
        held = self._tables.held.get(log, {}).values()
        return sum(len(c.lines) for c in chunks) + sum(len(v.data) for v in values) + sum(map(len, held))
