"""A connection to SQLite that lives in a thread of its own, and the way of a request to it and back.

A request is a function of the connection. It waits in a plain queue, and its result comes back with one wake-up of the event
loop: a general thread pool costs several times as much, and a commit is on the way of every cell. A request that was taken up
is finished whatever becomes of its caller.
"""

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anyio

from gateway.errors import StoreUnavailable
from gateway.store.failures import is_mistake, passes, unavailable
from gateway.store.wal import HARD, WriteAheadLog

T = TypeVar("T")

_PAUSE = 0.05
"""Seconds without a request that count as a pause."""
_LOCK_TIMEOUT = 5.0
"""Seconds to wait for a lock that another program holds on the file."""

_Request = tuple[Callable[[sqlite3.Connection], Any], "asyncio.Future[Any]"]


def connect(path: Path, reading: bool = False) -> sqlite3.Connection:
    """Opens what is there and never makes an empty file: a store that has vanished must not come back as a blank one."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=_LOCK_TIMEOUT)
    try:
        # NORMAL: a commit outlives this process, though the machine's power failing may cost the last few; none is ever half.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(f"PRAGMA journal_size_limit = {HARD}")
        db.execute(f"PRAGMA query_only = {reading:d}")
    except BaseException:
        db.close()
        raise
    return db


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise


class ConnectionThread:
    """Runs requests one after another; behind each waits whoever asked, so there are never more than those. After a failure of the
    file the connection is opened anew for the next request, which therefore works as soon as the cause is gone."""

    def __init__(self, name: str, path: Path, wal: WriteAheadLog | None = None) -> None:
        """The one that has a `wal` writes, others can't."""
        self._name, self._path, self._wal = name, path, wal
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None

    def start(self) -> None:
        # A daemon, so that a gateway that forgets to close its store still ends. Whatever it was doing is then whole or undone.
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._thread is None:
            raise StoreUnavailable("The record of kernels is not open: the gateway is starting or stopping. Try again later.")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._requests.put((work, future))
        return await future

    async def aclose(self) -> None:
        """Finishes what was asked for, then closes the connection."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(thread.join)

    def _serve(self) -> None:
        while (request := self._next()) is not None:
            self._answer(*request)
            if self._wal is not None and self._wal.urgent:
                self._copy_back(self._wal)
        self._drop()

    def _next(self) -> _Request | None:
        if self._wal is not None and self._wal.due:
            try:
                return self._requests.get(timeout=_PAUSE)
            except queue.Empty:
                self._copy_back(self._wal)
        return self._requests.get()

    def _answer(self, work: Callable[[sqlite3.Connection], Any], future: "asyncio.Future[Any]") -> None:
        result: Any = None
        failure: Exception | None = None
        try:
            if self._db is None:
                self._db = connect(self._path, reading=self._wal is None)
            result = work(self._db)
        except (sqlite3.IntegrityError, sqlite3.DataError) as error:
            failure = ValueError(f"A change contradicts what is stored: {error}")
        except (sqlite3.Error, OSError) as error:
            if not passes(error):
                self._drop()
            # A mistake in this program is told as one: no waiting for the disk would mend it.
            failure = error if is_mistake(error) else unavailable(error, self._path)
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, and the thread must live on
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            future.get_loop().call_soon_threadsafe(_settle, future, result, failure)

    def _copy_back(self, wal: WriteAheadLog) -> None:
        if self._db is None:
            return
        try:
            wal.copy_back(self._db)
        except sqlite3.Error as error:
            # No commit depends on it, and the write-ahead log grows meanwhile; if the disk is full the next commit says so.
            unavailable(error, self._path)
            if not passes(error):
                self._drop()

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()


def _settle(future: "asyncio.Future[Any]", result: object, failure: Exception | None) -> None:
    if future.done():
        return  # its caller was cancelled
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)
