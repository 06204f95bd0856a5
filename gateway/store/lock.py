"""One gateway a state directory: a lock that lives exactly as long as its process.

It is a lock of the system on an open file, so it goes with the process however that ends, and nothing stale is left to be cleared
up. The file itself stays: removing it would let two gateways lock two files of one name.
"""

import contextlib
import fcntl
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import anyio
import structlog

from gateway.errors import ConfigurationError

_log = structlog.get_logger()

_POLL = 0.1
"""Seconds between two tries."""


class Lease:
    """The right to use a state directory. Another process or another `Lease` of this one can't have it at the same time."""

    def __init__(self, file: int) -> None:
        self._file: int | None = file

    @classmethod
    async def acquire(cls, state_dir: Path, wait: float) -> "Lease":
        """Waits up to `wait` seconds for the present holder to end; raises `ConfigurationError`."""
        path = state_dir / "gateway.lock"
        try:
            os.makedirs(state_dir, mode=0o700, exist_ok=True)
            # Python opens files close-on-exec: no kernel, and nothing else that the gateway starts, keeps the lock.
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(state_dir, error) from error
        try:
            await _lock(file, state_dir, wait)
            _sign(file)
        except OSError as error:
            os.close(file)
            raise _unusable(state_dir, error) from error
        except BaseException:
            os.close(file)
            raise
        return cls(file)

    def release(self) -> None:
        """Done twice it does nothing."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
            os.close(file)


def holder(state_dir: Path) -> str | None:
    """Process id of the gateway that uses this state directory, "unknown" if it does not say; None when nobody does."""
    try:
        file = os.open(state_dir / "gateway.lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(file, 100, 0).partition(b" ")[0].decode("ascii", "replace") or "unknown"
    finally:
        os.close(file)
    return None


async def _lock(file: int, state_dir: Path, wait: float) -> None:
    deadline = time.monotonic() + wait
    waiting = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file)
        else:
            return
        if time.monotonic() >= deadline:
            raise ConfigurationError(
                f"Another gateway{holder} uses the state directory {state_dir}. Stop it, choose another state_dir, or wait for"
                " it with store.lock_wait."
            )
        if not waiting:
            _log.info("waiting_for_other_gateway", state_dir=str(state_dir), seconds=wait)
            waiting = True
        await anyio.sleep(_POLL)


def _sign(file: int) -> None:
    """For people, and for the message of whoever comes second."""
    with contextlib.suppress(OSError):  # a full disk makes the message poorer, the lock holds
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()} {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode(), 0)


def _holder(file: int) -> str:
    """Empty in the moment between the other's locking and signing."""
    pid = os.pread(file, 100, 0).partition(b" ")[0]
    return f" (process {int(pid)})" if pid.isdigit() else ""


def _unusable(state_dir: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"The state directory {state_dir} can't be used: {error.strerror}. Choose another state_dir.")
