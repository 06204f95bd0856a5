"""One gateway a state directory, whatever becomes of the process that holds it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from gateway.errors import ConfigurationError
from gateway.store.lock import Lease

pytestmark = pytest.mark.anyio

HOLD = """
import subprocess, sys, time
from pathlib import Path
import anyio
from gateway.store.lock import Lease
lease = anyio.run(Lease.acquire, Path(sys.argv[1]), 0.0)
child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def holder(state_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lease, and a child of its own that lives on without it."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(state_dir)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


async def test_a_second_one_is_told_who_has_it(tmp_path: Path) -> None:
    with holder(tmp_path) as process, pytest.raises(ConfigurationError) as caught:
        await Lease.acquire(tmp_path, 0.0)
    assert caught.value.detail == (
        f"Another gateway (process {process.pid}) uses the state directory {tmp_path}. Stop it, choose another state_dir, or wait"
        " for it with store.lock_wait."
    )


async def test_sigkill_frees_it_though_a_child_lives_on(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        lease = await Lease.acquire(tmp_path, 0.0)
        lease.release()


async def test_waits_until_it_is_free(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        async with anyio.create_task_group() as tasks:

            async def kill_later() -> None:
                await anyio.sleep(0.3)
                assert not taken
                process.kill()

            taken: list[Lease] = []
            tasks.start_soon(kill_later)
            taken.append(await Lease.acquire(tmp_path, 30.0))
        taken[0].release()


async def test_gives_up_when_the_wait_is_over(tmp_path: Path) -> None:
    first = await Lease.acquire(tmp_path, 0.0)
    try:
        with pytest.raises(ConfigurationError):
            await Lease.acquire(tmp_path, 0.25)
    finally:
        first.release()


async def test_the_same_process_has_it_once(tmp_path: Path) -> None:
    first = await Lease.acquire(tmp_path / "new" / "state", 0.0)
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
        await Lease.acquire(tmp_path / "new" / "state", 0.0)
    other = await Lease.acquire(tmp_path, 0.0)
    first.release()
    first.release()
    again = await Lease.acquire(tmp_path / "new" / "state", 0.0)
    again.release()
    other.release()


async def test_a_cancelled_wait_holds_nothing(tmp_path: Path) -> None:
    first = await Lease.acquire(tmp_path, 0.0)
    with anyio.move_on_after(0.15):
        await Lease.acquire(tmp_path, 30.0)
    first.release()
    again = await Lease.acquire(tmp_path, 0.0)
    again.release()


async def test_modes(tmp_path: Path) -> None:
    lease = await Lease.acquire(tmp_path / "state", 0.0)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / "gateway.lock").stat().st_mode & 0o777 == 0o600
    lease.release()


async def test_a_state_dir_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="can't be used"):
        await Lease.acquire(tmp_path / "file", 0.0)
