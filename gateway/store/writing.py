"""Each change as SQL. One statement a change where it can be: with every statement the thread hands the interpreter over, and
under a busy event loop it waits to get it back."""

import sqlite3

from gateway.errors import StoreFenced
from gateway.store.base import (
    AddEvents,
    AddFrame,
    AddHeld,
    Change,
    DropEvents,
    DropFrames,
    DropHeld,
    EndKernel,
    ExecutionRow,
    PutExecution,
    PutKernel,
    PutPosition,
    Tombstone,
    UpdateExecution,
)

# ON CONFLICT (id), not OR REPLACE: that would also delete another row that has the same key.
_PUT_KERNEL = """
INSERT INTO kernels (id, created_at, document, key, fingerprint, received, sent) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET created_at = excluded.created_at, document = excluded.document, key = excluded.key,
    fingerprint = excluded.fingerprint, received = excluded.received, sent = excluded.sent
"""
# Kernel, number and key are not among what is updated, so that their indexes are not written again with every event.
_PUT_EXECUTION = """
INSERT INTO executions (id, kernel_id, number, created_at, document, key, fingerprint, msg_id, ended_at, size, request)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET created_at = excluded.created_at, document = excluded.document,
    fingerprint = excluded.fingerprint, msg_id = excluded.msg_id, ended_at = excluded.ended_at, size = excluded.size,
    request = excluded.request
WHERE kernel_id = excluded.kernel_id AND number = excluded.number AND key IS excluded.key
"""
_PUT_REQUEST = """
INSERT INTO requests (id, request) VALUES (?, ?)
ON CONFLICT (id) DO UPDATE SET request = excluded.request WHERE request <> excluded.request
"""
_SMALL = 1024
"""Bytes of a request that stands in the execution's own row."""
_UPDATE_EXECUTION = "UPDATE executions SET document = ?, msg_id = ?, ended_at = ?, size = ? WHERE id = ?"
_PUT_TOMBSTONE = """
INSERT INTO tombstones (kernel_id, ended_at, document) VALUES (?, ?, ?)
ON CONFLICT (kernel_id) DO UPDATE SET ended_at = excluded.ended_at, document = excluded.document
"""
_ADD_EVENTS = "INSERT INTO events (log, first, last, lines) VALUES (?, ?, ?, ?)"
_ADD_LARGE = "INSERT INTO large_values (log, seq, media, data) VALUES (?, ?, ?, ?)"
_ADD_HELD = "INSERT INTO held (log, first, last, lines) VALUES (?, ?, ?, ?)"
_DROP_LARGE = "DELETE FROM large_values WHERE log = ?1 AND seq <= (SELECT max(last) FROM events WHERE log = ?1 AND last < ?2)"
_FENCED = "Another gateway has opened this state directory since. This one records nothing more; ask the other one."


def guard(db: sqlite3.Connection, epoch: int) -> None:
    """Inside a transaction: raises `StoreFenced` unless the file's epoch is still `epoch`."""
    if db.execute("SELECT epoch FROM meta").fetchone() != (epoch,):
        raise StoreFenced(_FENCED)


def apply(db: sqlite3.Connection, change: Change) -> None:
    match change:
        case AddEvents(log, chunk, large):
            db.execute(_ADD_EVENTS, (log, chunk.first, chunk.last, chunk.lines))
            for value in large:
                db.execute(_ADD_LARGE, (log, value.seq, value.media, value.data))
        case PutExecution(row):
            _put_execution(db, row)
        case UpdateExecution(execution_id, document, msg_id, ended_at, size):
            db.execute(_UPDATE_EXECUTION, (document, msg_id, ended_at, size, execution_id))
        case PutPosition(kernel_id, received, sent):
            db.execute("UPDATE kernels SET received = ?, sent = ? WHERE id = ?", (received, sent, kernel_id))
        case AddFrame(kernel_id, seq, frame):
            db.execute("INSERT INTO frames (kernel_id, seq, frame) VALUES (?, ?, ?)", (kernel_id, seq, frame))
        case DropFrames(kernel_id, seq):
            db.execute("DELETE FROM frames WHERE kernel_id = ? AND seq <= ?", (kernel_id, seq))
        case AddHeld(execution_id, first, last, lines):
            db.execute(_ADD_HELD, (execution_id, first, last, lines))
        case DropHeld(execution_id, before):
            db.execute("DELETE FROM held WHERE log = ? AND last < ?", (execution_id, before))
        case DropEvents(log, before):
            db.execute(_DROP_LARGE, (log, before))
            db.execute("DELETE FROM events WHERE log = ? AND last < ?", (log, before))
        case PutKernel(r):
            db.execute(_PUT_KERNEL, (r.id, r.created_at, r.document, r.key, r.fingerprint, r.received, r.sent))
        case EndKernel(stone):
            _end(db, stone)


def _put_execution(db: sqlite3.Connection, r: ExecutionRow) -> None:
    small = r.request if len(r.request) <= _SMALL else None
    values = (r.id, r.kernel_id, r.number, r.created_at, r.document, r.key, r.fingerprint, r.msg_id, r.ended_at, r.size, small)
    if db.execute(_PUT_EXECUTION, values).rowcount == 0:
        raise ValueError("A change contradicts what is stored: an execution changes its kernel, number or key")
    if small is None:
        db.execute(_PUT_REQUEST, (r.id, r.request))


def _end(db: sqlite3.Connection, stone: Tombstone) -> None:
    for statement in (
        "DELETE FROM kernels WHERE id = ?",
        "DELETE FROM frames WHERE kernel_id = ?",
        "DELETE FROM events WHERE log = ?",
        "DELETE FROM large_values WHERE log = ?",
    ):
        db.execute(statement, (stone.kernel_id,))
    db.execute(_PUT_TOMBSTONE, (stone.kernel_id, stone.ended_at, stone.document))
