"""What a file on a disk can do to a store: processes that die, disks that fill, files that are old, foreign or damaged."""

import contextlib
import errno
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from gateway.errors import ConfigurationError, StoreFenced, StoreUnavailable
from gateway.store import schema
from gateway.store.base import (
    AddEvents,
    Change,
    Chunk,
    EndKernel,
    ExecutionRow,
    KernelRow,
    LargeValue,
    PutExecution,
    PutKernel,
    PutPosition,
    Retention,
    Tombstone,
)
from gateway.store.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parent / "golden"
EVERYTHING = 2**40
FORGET = Retention(0.0, EVERYTHING, 0.0, 0)


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


@contextlib.contextmanager
def small_disk(where: Path, size: str = "1m") -> Iterator[Path]:
    """A disk of its own, so that it can be filled and made read-only."""
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", where], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts disks")


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)


def outside(code: str, *arguments: object) -> None:
    """Run by another process: a database that this one has open must not be opened here past SQLite, or its locks are lost."""
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, capture_output=True)


def events(log: str, number: int, size: int = 10) -> AddEvents:
    return AddEvents(log, Chunk(number, number, b"x" * (size - 1) + b"\n"))


async def numbers(store: SqliteStore, log: str) -> list[int]:
    return [chunk.last for chunk in await store.events(log, 0, EVERYTHING)]


async def purge(store: SqliteStore) -> None:
    while await store.purge(FORGET, 1e9):
        pass


async def commit_until_it_fails(store: SqliteStore, log: str) -> tuple[int, StoreUnavailable]:
    for number in range(1, 10_000):
        try:
            await store.commit([events(log, number, 20_000)])
        except StoreUnavailable as error:
            return number - 1, error
    raise AssertionError("it never failed")


# processes

COMMIT = """
import sys
from pathlib import Path
import anyio
from gateway.store.base import AddEvents, Chunk, KernelRow, PutKernel, PutPosition
from gateway.store.sqlite import SqliteStore

async def main(path, number):
    store = SqliteStore(Path(path))
    await store.open()
    await store.commit([PutKernel(KernelRow("k", 1.0, b"{}", received=number))])
    while True:
        number += 1
        chunk = Chunk(number, number, b"x" * 5000)
        await store.commit([AddEvents("a", chunk), PutPosition("k", number, number), AddEvents("b", chunk)])
        print(number, flush=True)

anyio.run(main, sys.argv[1], int(sys.argv[2]))
"""


def committed_until_killed(path: Path, start: int, lines: int) -> int:
    """The last number that a process said was committed, before it was killed in the midst of the next one."""
    command = [sys.executable, "-c", COMMIT, str(path), str(start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(lines):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        return max([last, *map(int, re.findall(r"(\d+)\n", process.stdout.read()))])


@pytest.mark.parametrize("lines", [1, 200])
async def test_what_was_committed_survives_sigkill(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "store"
    stored = 0
    for turn in range(1, 5):
        last = committed_until_killed(path, stored, lines * turn)
        async with opened(path) as store:
            (kernel,) = await store.kernels()
            stored = kernel.received
            assert stored >= last
            assert await numbers(store, "a") == await numbers(store, "b") == list(range(1, stored + 1))
            assert store.epoch == 2 * turn


async def test_a_second_opening_fences_the_first(tmp_path: Path) -> None:
    path = tmp_path / "store"
    async with opened(path) as first:
        await first.commit([events("a", 1)])
        async with opened(path) as second:
            assert (first.epoch, second.epoch) == (1, 2)
            for change in (events("a", 2), PutPosition("nobody", 1, 1)):
                with pytest.raises(StoreFenced):
                    await first.commit([change])
            for refused in (first.check(), first.purge(FORGET, 1e9), first.commit([])):
                with pytest.raises(StoreFenced):
                    await refused
            await second.commit([events("a", 3)])
            assert await numbers(first, "a") == await numbers(second, "a") == [1, 3]


async def test_not_open_and_closed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    with pytest.raises(StoreUnavailable):
        await store.kernels()
    await store.aclose()
    await store.open()
    async with anyio.create_task_group() as tasks:
        for number in range(1, 50):
            changes: list[Change] = [events("a", number)]
            tasks.start_soon(store.commit, changes)
        await anyio.sleep(0.01)
        await store.aclose()
    with pytest.raises(StoreUnavailable):
        await store.commit([])
    assert os.listdir(tmp_path) == ["store"]  # the journal is gone: it was copied back
    async with opened(tmp_path / "store") as again:
        assert await numbers(again, "a") == list(range(1, 50))


async def test_files_are_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "store"
    async with opened(path) as store:
        await store.commit([events("a", 1)])
        await store.kernels()
        assert path.parent.stat().st_mode & 0o777 == 0o700
        modes = {found.name: found.stat().st_mode & 0o777 for found in path.parent.iterdir()}
    assert modes == {"store": 0o600, "store-wal": 0o600, "store-shm": 0o600}
    path.chmod(0o644)
    async with opened(path):
        assert path.stat().st_mode & 0o777 == 0o600


# versions


def restore(path: Path, dump: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript((GOLDEN / dump).read_text())


def version(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


@pytest.mark.parametrize("number", range(1, len(schema.MIGRATIONS) + 1))
async def test_every_version_there_was_can_be_opened(tmp_path: Path, number: int) -> None:
    path = tmp_path / "store"
    restore(path, f"store-{number}.sql")
    async with opened(path) as store:
        assert store.epoch == 2
        kernel = KernelRow("k1", 1.5, b'{"spec":"python3"}', "key", "print", 7, 3)
        assert await store.kernels() == [kernel, KernelRow("k2", 2.5, b"{}")]
        assert await store.frames("k1") == [(4, b"\x00frame")]
        assert await store.events("k1", 0, 99) == [Chunk(1, 2, b'{"seq":1}\n{"seq":2}\n')]
        ended = ExecutionRow("e1", "k1", 1, 3.25, b'{"code":"1"}', "ekey", "eprint", "m1", 4.5, 20, b"ask 1")
        running = ExecutionRow("e2", "k1", 2, 5.25, b'{"code":"2"}', None, None, "m2")
        assert await store.executions("k1", None, 9) == [running, ended]
        assert await store.unfinished("k1") == [running]
        assert await store.large_values("e1", 1, 1) == [LargeValue(1, "image/png", b'"aGk="')]
        assert await store.held("e2") == [b"held"]
        assert await store.tombstones() == [Tombstone("k0", 0.5, b'{"cause":"idle"}')]
        await store.commit([PutPosition("k1", 8, 4)])
    assert version(path) == len(schema.MIGRATIONS)


async def test_a_migration_is_whole_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    restore(path, "store-1.sql")
    one = schema.MIGRATIONS[:1]
    good = ("ALTER TABLE kernels ADD COLUMN owner TEXT", "UPDATE kernels SET owner = 'me'")
    monkeypatch.setattr(schema, "MIGRATIONS", [*one, good, ("CREATE TABLE more (a)", "INSERT INTO nowhere VALUES (1)")])
    with pytest.raises(ConfigurationError, match=re.escape(str(path))):
        await SqliteStore(path).open()
    assert version(path) == 1
    monkeypatch.setattr(schema, "MIGRATIONS", one)
    async with opened(path) as store:
        assert [kernel.id for kernel in await store.kernels()] == ["k1", "k2"]
        assert store.epoch == 2
    monkeypatch.setattr(schema, "MIGRATIONS", [*one, good])
    async with opened(path) as store:
        assert [kernel.id for kernel in await store.kernels()] == ["k1", "k2"]
    assert version(path) == 2
    monkeypatch.setattr(schema, "MIGRATIONS", one)
    with pytest.raises(ConfigurationError, match="later version"):
        await SqliteStore(path).open()
    assert version(path) == 2


# files that are none


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


async def refused(path: Path, match: str) -> None:
    before = content(path)
    with pytest.raises(ConfigurationError, match=match) as caught:
        await SqliteStore(path).open()
    assert str(path) in caught.value.detail
    assert content(path) == before


async def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(b"this is my diary\n" * 1000)
    await refused(path, "damaged")


async def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE songs (title)")
    await refused(path, "another program")


async def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    await refused(tmp_path / "file" / "store", "can't be opened")
    await refused(tmp_path, "can't be opened")


async def grown(path: Path) -> None:
    async with opened(path) as store:
        for number in range(1, 101):
            await store.commit([events("a", number, 3000)])


@pytest.mark.parametrize("keep", [0.97, 0.5, 0.02])
async def test_a_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "store"
    await grown(path)
    os.truncate(path, int(path.stat().st_size * keep))
    await refused(path, "damaged")


async def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    await grown(path)
    with path.open("r+b") as file:
        file.seek(4096 * 5)
        file.write(b"\xff" * 4096 * 20)
    await refused(path, "damaged")


async def test_pages_that_go_bad_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "store"
    await grown(path)
    async with opened(path) as store:
        outside("import sys; f = open(sys.argv[1], 'r+b'); f.seek(4096 * 5); f.write(b'\\xff' * 4096 * 400)", path)
        with pytest.raises(StoreUnavailable, match="damaged") as caught:
            await store.events("a", 0, EVERYTHING)
        assert str(path) not in caught.value.detail
        _, error = await commit_until_it_fails(store, "b")
        assert "damaged" in error.detail


async def test_a_file_that_vanished_is_not_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "store"
    async with opened(path) as store:
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreUnavailable):
            await store.size()
        with pytest.raises(StoreUnavailable, match="gone"):
            await store.kernels()
        assert not path.exists()


async def test_a_lock_of_another_program_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.connection._LOCK_TIMEOUT", 0.05)
    path = tmp_path / "store"
    async with opened(path) as store:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked"):
                await store.commit([events("a", 1)])
            assert await numbers(store, "a") == []
            other.execute("ROLLBACK")
        await store.commit([events("a", 1)])


# disks


@needs_root
@pytest.mark.parametrize("filled_by", ["others", "itself"])
async def test_a_full_disk_costs_nothing_that_was_committed(tmp_path: Path, filled_by: str) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(2_000_000))  # as much again as the journal gets, which is copied back at the end
        async with opened(disk / "store") as store:
            await store.commit([PutKernel(KernelRow("k", 1.0, b"{}"))])
            if filled_by == "others":
                fill(disk)
            count, error = await commit_until_it_fails(store, "a")
            assert "full" in error.detail
            assert str(disk) not in error.detail
            fill(disk)
            with pytest.raises(StoreUnavailable, match="full"):
                await store.check()
            assert await numbers(store, "a") == list(range(1, count + 1))
            ballast.unlink()
            await store.check()
            await store.commit([events("a", count + 1)])
            assert await numbers(store, "a") == list(range(1, count + 2))
        async with opened(disk / "store") as store:
            assert await numbers(store, "a") == list(range(1, count + 2))
            assert [kernel.id for kernel in await store.kernels()] == ["k"]


@needs_root
async def test_no_start_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        (disk / "store").touch()
        await refused(disk / "store", "full")


@needs_root
async def test_a_disk_that_turns_read_only(tmp_path: Path) -> None:
    """A test can turn it only while no file on it is open for writing, so the connections are made to fail first: they are opened
    anew by the next request."""

    def fails(_: object) -> None:
        raise OSError(errno.EIO, "pretended")

    with small_disk(tmp_path / "disk", "2m") as disk:
        async with opened(disk / "store") as store:
            for thread in (store._writer, store._reader):
                with pytest.raises(StoreUnavailable, match="disk fails"):
                    await thread.run(fails)
            remount(disk, "ro")
            with pytest.raises(StoreUnavailable, match="read-only") as caught:
                await store.commit([events("a", 1)])
            assert str(disk) not in caught.value.detail
            with pytest.raises(StoreUnavailable):
                await store.check()
            remount(disk, "rw")
            await store.check()
            await store.commit([events("a", 1)])
        remount(disk, "ro")
        await refused(disk / "store", "read-only")


# room


async def test_the_journal_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "store"
    largest = 0
    async with opened(path) as store:
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                for _ in range(200):
                    await store.events("a", 0, 1_000_000)
                    await anyio.sleep(0.002)

            tasks.start_soon(read)
            for number in range(1, 2001):
                await store.commit([events("a", number, 20_000)])
                largest = max(largest, (tmp_path / "store-wal").stat().st_size)
        assert largest < 64 * 1024 * 1024
        assert await store.last_event("a") == 2000
        await purge(store)
        assert (tmp_path / "store-wal").stat().st_size == 0


async def test_room_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    async with opened(path) as store:
        for number in range(1, 21):
            name = f"e{number}"
            await store.commit(
                [PutExecution(ExecutionRow(name, "k", number, 1.0, b"{}", ended_at=1.0)), events(name, 1, 2_000_000)]
            )
        await store.commit([EndKernel(Tombstone("k", 1.0, b"{}"))])
        assert await store.size() > 40_000_000
        await purge(store)
        assert await store.size() < 1_000_000
        assert path.stat().st_size < 1_000_000
        assert await store.executions("k", None, 9) == []
