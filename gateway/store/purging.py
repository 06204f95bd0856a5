"""Forgetting what is too old or too much, in pieces small enough that a commit which waits behind one is not held up.

An execution goes from view at once and its content follows: its row is deleted and its log is noted as doomed in the same
transaction, then as much of it is deleted as the piece allows. A doomed log that is left over comes first the next time.
"""

import sqlite3

from gateway.store.base import Retention

AT_ONCE = 32
"""Executions, and tombstones, of one piece."""
_BYTES_AT_ONCE = 8 * 1024 * 1024
_ROW = 200
"""Bytes that deleting a row is taken to cost besides its blob."""
_VACUUM_PAGES = 256
"""Pages given back in one piece."""
VACUUM_PIECES = 16
"""Pieces a purge: twice what it deletes, so that what was freed is given back as fast."""

_PIECES = (
    ("SELECT rowid, length(lines) FROM events WHERE log = ? ORDER BY last LIMIT 64", "DELETE FROM events WHERE rowid = ?"),
    (
        "SELECT rowid, length(data) FROM large_values WHERE log = ? ORDER BY seq LIMIT 64",
        "DELETE FROM large_values WHERE rowid = ?",
    ),
    ("SELECT rowid, length(lines) FROM held WHERE log = ? ORDER BY last LIMIT 64", "DELETE FROM held WHERE rowid = ?"),
)


class Piece:
    """One piece of a purge, inside a transaction of its own."""

    def __init__(self, db: sqlite3.Connection, retention: Retention, now: float) -> None:
        self._db, self._retention, self._now = db, retention, now
        self._room = _BYTES_AT_ONCE

    def run(self) -> int:
        """The number of executions and tombstones removed; a piece that only deletes content of one removed before counts 1."""
        removed = self._tombstones()
        doomed = self._db.execute("SELECT log FROM doomed").fetchall()
        for (log,) in doomed:
            self._sweep(log)
        removed += self._executions()
        return removed or min(1, len(doomed))

    def _tombstones(self) -> int:
        (count,) = self._db.execute("SELECT count(*) FROM tombstones").fetchone()
        excess = count - self._retention.max_tombstones
        too_old = self._now - self._retention.keep_tombstones
        sql = "SELECT ended_at, kernel_id FROM tombstones ORDER BY ended_at, kernel_id LIMIT ?"
        rows = self._db.execute(sql, (AT_ONCE,)).fetchall()
        going = [(kernel_id,) for index, (ended_at, kernel_id) in enumerate(rows) if index < excess or ended_at <= too_old]
        self._db.executemany("DELETE FROM tombstones WHERE kernel_id = ?", going)
        return len(going)

    def _executions(self) -> int:
        too_old = self._now - self._retention.keep
        sql = "SELECT ended_at, id FROM executions WHERE ended_at IS NOT NULL ORDER BY ended_at, id LIMIT ?"
        removed = 0
        for ended_at, execution_id in self._db.execute(sql, (AT_ONCE,)).fetchall():
            # With no room left some content is doomed and still there; its size must not make another execution go.
            if self._room <= 0 or not (ended_at <= too_old or self._used() > self._retention.max_size):
                break
            self._db.execute("DELETE FROM executions WHERE id = ?", (execution_id,))
            self._db.execute("DELETE FROM requests WHERE id = ?", (execution_id,))
            self._db.execute("INSERT OR IGNORE INTO doomed VALUES (?)", (execution_id,))
            self._sweep(execution_id)
            removed += 1
        return removed

    def _used(self) -> int:
        """Bytes in use. Free pages are not: they are reused or given back."""
        sql = "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        return int(self._db.execute(sql).fetchone()[0])

    def _sweep(self, log: str) -> None:
        """Deletes content of a doomed log while there is room."""
        for select, delete in _PIECES:
            while rows := self._db.execute(select, (log,)).fetchall():
                going = []
                for rowid, size in rows:
                    if self._room <= 0:
                        break
                    self._room -= size + _ROW
                    going.append((rowid,))
                self._db.executemany(delete, going)
                if self._room <= 0:
                    return
        self._db.execute("DELETE FROM doomed WHERE log = ?", (log,))


def give_back(db: sqlite3.Connection) -> int:
    """Returns some free pages to the disk; how many. 0: there are none."""
    (free,) = db.execute("PRAGMA freelist_count").fetchone()
    if free:
        # A script, because this pragma works one page a step: a script's steps are all taken in one go.
        db.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
    return min(int(free), _VACUUM_PAGES)
