"""Each question as SQL: functions of a connection, run on the one that only reads.

Every one of them ends its read before it returns: a statement left half read would keep the write-ahead log from beginning anew.
"""

import contextlib
import sqlite3
from typing import Any

from gateway.store.base import Chunk, ExecutionRow, KernelRow, LargeValue, Tombstone

_KERNEL = "SELECT id, created_at, document, key, fingerprint, received, sent FROM kernels"
_EXECUTION = (
    "SELECT e.id, kernel_id, number, created_at, document, key, fingerprint, msg_id, ended_at, size,"
    " coalesce(e.request, r.request) FROM executions AS e LEFT JOIN requests AS r USING (id)"
)
_ALIVE = "log NOT IN (SELECT log FROM doomed)"
"""A purged execution's content goes piece by piece, but from view it goes at once."""
_EVENTS = f"SELECT first, last, lines FROM events WHERE log = ? AND last > ? AND {_ALIVE} ORDER BY last"  # noqa: S608
_LAST_EVENT = f"SELECT max(last) FROM events WHERE log = ? AND {_ALIVE}"  # noqa: S608
_LARGE = f"SELECT seq, media, data FROM large_values WHERE log = ? AND {_ALIVE}"  # noqa: S608
_HELD = f"SELECT lines FROM held WHERE log = ? AND {_ALIVE} ORDER BY last"  # noqa: S608


def kernels(db: sqlite3.Connection) -> list[KernelRow]:
    return [KernelRow(*row) for row in db.execute(f"{_KERNEL} ORDER BY created_at, id").fetchall()]


def frames(db: sqlite3.Connection, kernel_id: str) -> list[tuple[int, bytes]]:
    return db.execute("SELECT seq, frame FROM frames WHERE kernel_id = ? ORDER BY seq", (kernel_id,)).fetchall()


def unfinished(db: sqlite3.Connection, kernel_id: str) -> list[ExecutionRow]:
    rows = db.execute(f"{_EXECUTION} WHERE kernel_id = ? AND ended_at IS NULL ORDER BY number", (kernel_id,)).fetchall()
    return [ExecutionRow(*row) for row in rows]


def executions(db: sqlite3.Connection, kernel_id: str, before: int | None, limit: int) -> list[ExecutionRow]:
    bound = 2**63 - 1 if before is None else before
    sql = f"{_EXECUTION} WHERE kernel_id = ? AND number < ? ORDER BY number DESC LIMIT ?"
    return [ExecutionRow(*row) for row in db.execute(sql, (kernel_id, bound, limit)).fetchall()]


def execution(db: sqlite3.Connection, kernel_id: str, execution_id: str) -> ExecutionRow | None:
    row = _one(db, f"{_EXECUTION} WHERE e.id = ? AND kernel_id = ?", execution_id, kernel_id)
    return None if row is None else ExecutionRow(*row)


def execution_of_key(db: sqlite3.Connection, kernel_id: str, key: str) -> ExecutionRow | None:
    row = _one(db, f"{_EXECUTION} WHERE kernel_id = ? AND key = ?", kernel_id, key)
    return None if row is None else ExecutionRow(*row)


def messages(db: sqlite3.Connection, kernel_id: str, limit: int) -> list[tuple[str, str]]:
    sql = "SELECT msg_id, id FROM executions WHERE kernel_id = ? AND msg_id IS NOT NULL ORDER BY number DESC LIMIT ?"
    return db.execute(sql, (kernel_id, limit)).fetchall()[::-1]


def last_event(db: sqlite3.Connection, log: str) -> int:
    (last,) = db.execute(_LAST_EVENT, (log,)).fetchone()
    return last or 0


def events(db: sqlite3.Connection, log: str, after: int, max_bytes: int) -> list[Chunk]:
    found: list[Chunk] = []
    with contextlib.closing(db.execute(_EVENTS, (log, after))) as rows:
        for row in rows:
            chunk = Chunk(*row)
            max_bytes -= len(chunk.lines)
            if found and max_bytes < 0:
                break
            found.append(chunk)
    return found


def large_values(db: sqlite3.Connection, log: str, first: int, last: int) -> list[LargeValue]:
    rows = db.execute(f"{_LARGE} AND seq BETWEEN ? AND ? ORDER BY seq, media", (log, first, last)).fetchall()
    return [LargeValue(*row) for row in rows]


def held(db: sqlite3.Connection, execution_id: str) -> list[bytes]:
    return [lines for (lines,) in db.execute(_HELD, (execution_id,)).fetchall()]


def tombstones(db: sqlite3.Connection) -> list[Tombstone]:
    rows = db.execute("SELECT kernel_id, ended_at, document FROM tombstones ORDER BY ended_at, kernel_id").fetchall()
    return [Tombstone(*row) for row in rows]


def _one(db: sqlite3.Connection, sql: str, *values: str | int) -> tuple[Any, ...] | None:
    rows: list[tuple[Any, ...]] = db.execute(sql, values).fetchall()
    return rows[0] if rows else None
