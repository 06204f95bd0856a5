"""What went wrong with a file, in words for whoever has to mend it.

A client may see the text of `StoreUnavailable`, so it has no path; the log has it. Which connection failed makes no difference:
the causes are those of one disk and one file.
"""

import errno
import os
import sqlite3
from pathlib import Path

import structlog

from gateway.errors import ConfigurationError, StoreUnavailable

_log = structlog.get_logger()

_FULL = "The disk is full: the record of kernels has no room to grow. Free some space there; nothing else needs to be done."
_READ_ONLY = (
    "The record of kernels can't be written: its disk or file is read-only for this gateway. Make it writable; nothing else"
    " needs to be done."
)
_DAMAGED = "The record of kernels is damaged. Stop the gateway, then restore its file from a copy, or move it away to begin an empty one."
_LOCKED = (
    "Another program holds the record of kernels locked. Find and end that program; the gateway goes on once the lock is free."
)
_MISSING = "The record of kernels can't be opened: its file is gone or out of reach. Put it back, or start the gateway anew."
_NO_MEMORY = "The machine has no memory left to record what happens. Free some memory; nothing else needs to be done."
_BROKEN = (
    "The disk fails: the record of kernels can't be read or written. See the gateway's log and the system's for the cause."
)

_TEXTS = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_PROTOCOL: _LOCKED,
    sqlite3.SQLITE_CANTOPEN: _MISSING,
    sqlite3.SQLITE_NOMEM: _NO_MEMORY,
}

_ERRNO_TEXTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.EPERM: _READ_ONLY,
    errno.ENOENT: _MISSING,
}


_UNCLEAR = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_PASSING = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)


def passes(error: sqlite3.Error | OSError) -> bool:
    """Whether the connection is as good as before once the cause is gone. On a full disk it must be kept: there is no room to
    open another one, and what is stored can still be read."""
    return _code(error) & 0xFF in _PASSING


def is_mistake(error: sqlite3.Error | OSError) -> bool:
    """Wrong SQL, or a wrong use of the module."""
    return isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError) or _code(error) == sqlite3.SQLITE_ERROR


def explain(error: sqlite3.Error | OSError, path: Path) -> str:
    """What happened and what to do, without a path."""
    if isinstance(error, OSError):
        return _ERRNO_TEXTS.get(error.errno or 0, _BROKEN)
    code = _code(error) & 0xFF  # the low byte of an extended code is the plain one
    return (code in _UNCLEAR and _of_the_disk(path)) or _TEXTS.get(code, _BROKEN)


def _code(error: sqlite3.Error | OSError) -> int:
    """0 for an error that SQLite did not number."""
    return int(getattr(error, "sqlite_errorcode", 0))


def _of_the_disk(path: Path) -> str | None:
    """SQLite says "I/O error" for some writes to a full disk, and "can't open" on one that is read-only."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return None
    if disk.f_flag & os.ST_RDONLY:
        return _READ_ONLY
    return None if disk.f_bavail else _FULL


def unavailable(error: sqlite3.Error | OSError, path: Path) -> StoreUnavailable:
    """For a store that was open; the log gets what the client must not see."""
    _log.warning("store_failed", path=str(path), error=str(error), code=getattr(error, "sqlite_errorname", None))
    return StoreUnavailable(explain(error, path))


def refused(error: sqlite3.Error | OSError, path: Path) -> ConfigurationError:
    """For a store that can't be opened: said to the operator at the start, so it names the file."""
    return ConfigurationError(f"The store {path} can't be opened ({error}). {explain(error, path)}")
