"""When the write-ahead log is copied back into the database, so that no cell waits for it and the log stays bounded.

SQLite's own rule (every 1,000 pages, inside the commit that gets there) makes some cell pay for a copy and two syncs. Here it
happens in a pause between commits; only a log that finds no pause is copied regardless. It runs on the connection that
writes, never on another one: SQLite before 3.51.3 can damage a database when one connection writes while another copies back.
"""

import sqlite3

from gateway.store.base import AddEvents, AddFrame, AddHeld, Change, PutExecution, PutKernel, UpdateExecution

SOFT = 4 * 1024 * 1024
"""Bytes written after which the next pause is used."""
HARD = 16 * 1024 * 1024
"""Bytes written after which there is no waiting for a pause; also what the write-ahead log's file may keep for reuse."""
CEILING = 64 * 1024 * 1024
"""Bytes of the write-ahead log itself past which readers are waited for, so that it can begin anew."""
PAGE = 4096

_PAGES_A_CHANGE = 3
"""A change dirties its table's page and some index pages, and each is written whole."""


class WriteAheadLog:
    """Counts what was written since the last copy. Belongs to the thread that writes."""

    def __init__(self) -> None:
        self.pending = 0
        """Bytes."""

    @property
    def due(self) -> bool:
        return self.pending >= SOFT

    @property
    def urgent(self) -> bool:
        return self.pending >= HARD

    def wrote(self, changes: int, payload: int) -> None:
        """An estimate is enough: SQLite tells the real length only when asked to copy."""
        self.pending += payload + changes * _PAGES_A_CHANGE * PAGE

    def copy_back(self, db: sqlite3.Connection) -> None:
        self.pending = 0  # also when it fails, so that it is not tried again at once
        _, length, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if length * PAGE > CEILING:
            self.truncate(db)
        else:
            self.pending = (length - copied) * PAGE

    def truncate(self, db: sqlite3.Connection) -> None:
        """Copies everything and gives the write-ahead log's space back."""
        self.pending = 0
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def weight(change: Change) -> int:
    """About how many bytes of payload it writes."""
    match change:
        case AddEvents(_, chunk, large):
            return len(chunk.lines) + sum(len(value.data) for value in large)
        case AddHeld(lines=payload) | AddFrame(frame=payload):
            return len(payload)
        case PutExecution(row):
            return len(row.document) + len(row.request)
        case PutKernel(row):
            return len(row.document)
        case UpdateExecution(document=payload):
            return len(payload)
        case _:
            return 0
