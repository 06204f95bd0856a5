"""The tables, how an older file becomes a newer one, and what a file must be to be opened at all.

A migration is a list of statements; its number is its place, kept in the file's `user_version`. One that was ever released is
never changed. All that are missing run in one transaction: a file is of the old version or of the new one.
"""

import contextlib
import os
import sqlite3
from pathlib import Path

from gateway.errors import ConfigurationError
from gateway.store.connection import connect, transaction
from gateway.store.failures import refused

APPLICATION_ID = 0x43474154
"""Marks the file as ours ("CGAT"), so that a wrong path never adds tables to someone else's database."""

_CHECKED_BELOW = 256 * 1024 * 1024
"""Bytes of a file that is read through at the start; a larger one would hold the start up."""

# Ids are text as the writer gives them. Blobs stand last, so that reading the columns before them does not read the blobs.
# Chunks are found by their last number: "above n" is then one step into an index, and so is the end of a log.
# Few indexes: a commit costs by the pages that it changes, and each index is one more. Rowid tables for the same reason: without
# rowids a row of a kilobyte gets a page of its own.
MIGRATIONS: list[tuple[str, ...]] = [
    (
        "CREATE TABLE meta (epoch INTEGER NOT NULL, probe BLOB)",
        "INSERT INTO meta (epoch) VALUES (0)",
        (
            "CREATE TABLE kernels (id TEXT PRIMARY KEY, created_at REAL NOT NULL, key TEXT UNIQUE, fingerprint TEXT,"
            " received INTEGER NOT NULL, sent INTEGER NOT NULL, document BLOB NOT NULL)"
        ),
        "CREATE TABLE frames (kernel_id TEXT NOT NULL, seq INTEGER NOT NULL, frame BLOB NOT NULL, UNIQUE (kernel_id, seq))",
        (
            "CREATE TABLE executions (id TEXT PRIMARY KEY, kernel_id TEXT NOT NULL, number INTEGER NOT NULL,"
            " created_at REAL NOT NULL, key TEXT, fingerprint TEXT, msg_id TEXT, ended_at REAL, size INTEGER NOT NULL,"
            " request BLOB, document BLOB NOT NULL, UNIQUE (kernel_id, number))"
        ),
        # Large ones, apart because they never change: a row is written whole with each of its changes.
        "CREATE TABLE requests (id TEXT PRIMARY KEY, request BLOB NOT NULL)",
        "CREATE UNIQUE INDEX executions_key ON executions (kernel_id, key) WHERE key IS NOT NULL",
        "CREATE INDEX executions_ended ON executions (ended_at, id) WHERE ended_at IS NOT NULL",
        (
            "CREATE TABLE events (log TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, lines BLOB NOT NULL,"
            " UNIQUE (log, last))"
        ),
        (
            "CREATE TABLE large_values (log TEXT NOT NULL, seq INTEGER NOT NULL, media TEXT NOT NULL, data BLOB NOT NULL,"
            " UNIQUE (log, seq, media))"
        ),
        (
            "CREATE TABLE held (log TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, lines BLOB NOT NULL,"
            " UNIQUE (log, last))"
        ),
        "CREATE TABLE tombstones (kernel_id TEXT PRIMARY KEY, ended_at REAL NOT NULL, document BLOB NOT NULL)",
        "CREATE INDEX tombstones_ended ON tombstones (ended_at, kernel_id)",
        # Logs whose execution is purged and whose content still has to go, piece by piece.
        "CREATE TABLE doomed (log TEXT PRIMARY KEY)",
    ),
]


def prepare(path: Path) -> int:
    """Makes, checks and migrates the file, begins a new epoch and gives its number; raises `ConfigurationError`."""
    try:
        _make(path)
        with contextlib.closing(connect(path)) as db:
            new = _check(db, path)
            if new:
                # Can't be set later. Free pages are then given back piece by piece.
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL").fetchone()
            with transaction(db):
                _migrate(db)
                (epoch,) = db.execute("UPDATE meta SET epoch = epoch + 1 RETURNING epoch").fetchone()
    except (sqlite3.Error, OSError) as error:
        raise refused(error, path) from error
    return int(epoch)


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A file that exists is not opened here: closing it would drop the locks that SQLite holds on it in this process.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    path.chmod(0o600)  # SQLite gives its other files the same mode


def _check(db: sqlite3.Connection, path: Path) -> bool:
    """Refuses what is not ours, not whole, or from a later version, before anything in it is changed. Whether it is blank."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application != APPLICATION_ID and (application or version or tables):
        raise ConfigurationError(f"The file {path} is a database of another program. Choose another store.path.")
    if version > len(MIGRATIONS):
        raise ConfigurationError(
            f"The store {path} was written by a later version of Cellgate (format {version}, this one knows {len(MIGRATIONS)})."
            " Install that version again, or choose another store.path."
        )
    if path.stat().st_size < _CHECKED_BELOW:
        (finding,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if finding != "ok":
            raise ConfigurationError(
                f"The store {path} is damaged ({finding}). Restore it from a copy, or move it away to begin an empty one."
            )
    return not tables


def _migrate(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    for number, statements in enumerate(MIGRATIONS[version:], version + 1):
        for statement in statements:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {number}")
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
