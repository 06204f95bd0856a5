"""The store in a SQLite file: what lets kernels outlive the gateway that started them.

Two threads, each with a connection of its own: commits never wait for someone who reads through a long log, and readers see the
last commit. The file's epoch is compared inside every commit, so that a gateway which was taken for dead can write nothing once
another one has taken over.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from anyio import to_thread

from gateway.errors import ConfigurationError, StoreUnavailable
from gateway.store import purging, reading, schema
from gateway.store.base import Change, Chunk, ExecutionRow, KernelRow, LargeValue, Retention, Tombstone
from gateway.store.connection import ConnectionThread, transaction
from gateway.store.wal import PAGE, WriteAheadLog, weight
from gateway.store.writing import apply, guard

_PROBE = 64 * 1024
"""Bytes that `check` writes: a store with room for less is not said to work again."""


class SqliteStore:
    """A `gateway.store.base.Store`. A change that contradicts what is stored raises ValueError."""

    def __init__(self, path: Path) -> None:
        self.durable = True
        self.epoch = 0
        self._path = path
        self._wal = WriteAheadLog()
        self._writer = ConnectionThread("store-writer", path, self._wal)
        self._reader = ConnectionThread("store-reader", path)

    async def open(self) -> None:
        self.epoch = await to_thread.run_sync(schema.prepare, self._path)
        try:
            for thread in (self._writer, self._reader):
                thread.start()
                # Both connections stand from the start: on a disk that is full later there would be no room to open one.
                await thread.run(lambda db: db.execute("SELECT epoch FROM meta").fetchall())
        except StoreUnavailable as error:
            await self.aclose()
            raise ConfigurationError(f"The store {self._path} can't be opened. {error.detail}") from error

    async def commit(self, changes: Sequence[Change]) -> None:
        batch = tuple(changes)
        await self._writer.run(lambda db: self._commit(db, batch))

    async def kernels(self) -> list[KernelRow]:
        return await self._reader.run(reading.kernels)

    async def frames(self, kernel_id: str) -> list[tuple[int, bytes]]:
        return await self._reader.run(lambda db: reading.frames(db, kernel_id))

    async def unfinished(self, kernel_id: str) -> list[ExecutionRow]:
        return await self._reader.run(lambda db: reading.unfinished(db, kernel_id))

    async def executions(self, kernel_id: str, before: int | None, limit: int) -> list[ExecutionRow]:
        return await self._reader.run(lambda db: reading.executions(db, kernel_id, before, limit))

    async def execution(self, kernel_id: str, execution_id: str) -> ExecutionRow | None:
        return await self._reader.run(lambda db: reading.execution(db, kernel_id, execution_id))

    async def execution_of_key(self, kernel_id: str, key: str) -> ExecutionRow | None:
        return await self._reader.run(lambda db: reading.execution_of_key(db, kernel_id, key))

    async def messages(self, kernel_id: str, limit: int) -> list[tuple[str, str]]:
        return await self._reader.run(lambda db: reading.messages(db, kernel_id, limit))

    async def last_event(self, log: str) -> int:
        return await self._reader.run(lambda db: reading.last_event(db, log))

    async def events(self, log: str, after: int, max_bytes: int) -> list[Chunk]:
        return await self._reader.run(lambda db: reading.events(db, log, after, max_bytes))

    async def large_values(self, log: str, first: int, last: int) -> list[LargeValue]:
        return await self._reader.run(lambda db: reading.large_values(db, log, first, last))

    async def held(self, execution_id: str) -> list[bytes]:
        return await self._reader.run(lambda db: reading.held(db, execution_id))

    async def tombstones(self) -> list[Tombstone]:
        return await self._reader.run(reading.tombstones)

    async def purge(self, retention: Retention, now: float) -> int:
        removed = await self._writer.run(lambda db: self._purge(db, retention, now))
        # Each piece is a request of its own: commits get in between.
        for _ in range(purging.VACUUM_PIECES):
            if not await self._writer.run(self._give_back):
                break
        await self._writer.run(lambda db: self._shorten(db, removed))
        return removed

    async def size(self) -> int:
        return await self._reader.run(lambda _: _length(self._path))

    async def check(self) -> None:
        await self._writer.run(self._probe)

    async def aclose(self) -> None:
        # The reader first: whoever closes last copies the write-ahead log back, and that is the writer's business.
        await self._reader.aclose()
        await self._writer.aclose()

    # in the thread that writes

    def _commit(self, db: sqlite3.Connection, changes: Sequence[Change]) -> None:
        with transaction(db):
            guard(db, self.epoch)
            for change in changes:
                apply(db, change)
        self._wal.wrote(len(changes), sum(map(weight, changes)))

    def _purge(self, db: sqlite3.Connection, retention: Retention, now: float) -> int:
        with transaction(db):
            guard(db, self.epoch)
            removed = purging.Piece(db, retention, now).run()
        self._wal.wrote(removed, 0)
        return removed

    def _give_back(self, db: sqlite3.Connection) -> int:
        pages = purging.give_back(db)
        self._wal.wrote(0, 2 * pages * PAGE)  # a page that is moved, and who points to it
        return pages

    def _shorten(self, db: sqlite3.Connection, removed: int) -> None:
        # While there is more to remove the write-ahead log will be needed again at once.
        if self._wal.due or (self._wal.pending and not removed):
            self._wal.truncate(db)

    def _probe(self, db: sqlite3.Connection) -> None:
        with transaction(db):
            guard(db, self.epoch)
            db.execute("UPDATE meta SET probe = zeroblob(?)", (_PROBE,))
        self._wal.wrote(1, _PROBE)


def _length(path: Path) -> int:
    """Of the file and its write-ahead log. That the file is gone is an error, that there is no write-ahead log is not."""
    try:
        wal = Path(f"{path}-wal").stat().st_size
    except FileNotFoundError:
        wal = 0
    return path.stat().st_size + wal
