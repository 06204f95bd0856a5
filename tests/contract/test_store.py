"""One suite for every store: what kernels may rely on, wherever their records are kept."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from gateway.store.base import (
    AddEvents,
    AddFrame,
    AddHeld,
    Change,
    Chunk,
    DropEvents,
    DropFrames,
    DropHeld,
    EndKernel,
    ExecutionRow,
    KernelRow,
    LargeValue,
    PutExecution,
    PutKernel,
    PutPosition,
    Retention,
    Store,
    Tombstone,
    UpdateExecution,
)
from gateway.store.memory import MemoryStore
from gateway.store.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

EVERYTHING = 2**40
KEEP_ALL = Retention(1e9, EVERYTHING, 1e9, 10**6)
NOW = 1000.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "state" / "store.sqlite3")
    await made.open()
    yield made
    await made.aclose()


def kernel(name: str, created_at: float = 1.5, key: str | None = None, document: bytes = b'{"a":1}') -> KernelRow:
    return KernelRow(name, created_at, document, key, None if key is None else "f-" + key)


def execution(name: str, number: int, kernel_id: str = "k", **values: float | str | bytes | None) -> ExecutionRow:
    row = {"created_at": 2.25, "document": b'{"code":"1"}', **values}
    return ExecutionRow(name, kernel_id, number, **row)  # type: ignore[arg-type]


def chunk(first: int, last: int, size: int = 0) -> Chunk:
    return Chunk(first, last, b"".join(b'{"seq":%d,"x":"%s"}\n' % (n, b"x" * size) for n in range(first, last + 1)))


async def purge(store: Store, now: float = NOW, **bounds: float) -> int:
    """Until there is nothing to do."""
    values = {"keep": 1e9, "max_size": EVERYTHING, "keep_tombstones": 1e9, "max_tombstones": 10**6, **bounds}
    total = 0
    while removed := await store.purge(Retention(**values), now):  # type: ignore[arg-type]
        total += removed
    return total


async def test_an_empty_store(store: Store) -> None:
    assert store.epoch == 1
    assert not await store.kernels()
    assert not await store.tombstones()
    assert not await store.frames("k")
    assert not await store.unfinished("k")
    assert not await store.executions("k", None, 9)
    assert await store.execution("k", "e") is None
    assert await store.execution_of_key("k", "none") is None
    assert not await store.messages("k", 9)
    assert not await store.events("e", 0, 9)
    assert not await store.large_values("e", 0, 9)
    assert await store.last_event("e") == 0
    assert await store.held("e") == []
    assert await store.purge(KEEP_ALL, NOW) == 0
    await store.commit([])
    await store.check()


async def test_kernels_come_back_as_they_were_put(store: Store) -> None:
    first, second = kernel("a", 2.5, "key"), kernel("b", 1.25, document=b"")
    await store.commit([PutKernel(first), PutKernel(second)])
    assert await store.kernels() == [second, first]
    changed = KernelRow("a", 2.5, b"\x00\xff", "key", "other", 5, 6)
    await store.commit([PutKernel(changed)])
    assert await store.kernels() == [second, changed]


async def test_a_position_is_of_one_kernel(store: Store) -> None:
    await store.commit([PutKernel(kernel("a")), PutKernel(kernel("b")), PutPosition("a", 7, 3), PutPosition("nobody", 1, 1)])
    assert [(row.id, row.received, row.sent, row.document) for row in await store.kernels()] == [
        ("a", 7, 3, b'{"a":1}'),
        ("b", 0, 0, b'{"a":1}'),
    ]


async def test_frames_wait_until_they_have_arrived(store: Store) -> None:
    await store.commit([AddFrame("k", seq, b"frame %d" % seq) for seq in (3, 1, 2)])
    await store.commit([AddFrame("other", 1, b"")])
    assert await store.frames("k") == [(1, b"frame 1"), (2, b"frame 2"), (3, b"frame 3")]
    await store.commit([DropFrames("k", 2)])
    assert await store.frames("k") == [(3, b"frame 3")]
    assert await store.frames("other") == [(1, b"")]


async def test_executions_page_from_the_newest(store: Store) -> None:
    rows = [execution(f"e{n}", n) for n in range(1, 8)]
    await store.commit([*map(PutExecution, rows), PutExecution(execution("x1", 1, "other"))])
    assert await store.executions("k", None, 3) == [rows[6], rows[5], rows[4]]
    assert await store.executions("k", 5, 3) == [rows[3], rows[2], rows[1]]
    assert await store.executions("k", 2, 3) == [rows[0]]
    assert await store.executions("k", 1, 3) == []
    assert await store.executions("k", None, 0) == []


async def test_an_execution_is_found_by_id_and_by_key(store: Store) -> None:
    row = execution("e", 1, key="key", fingerprint="f", msg_id="m", size=17, request=b"ask")
    await store.commit([PutExecution(row), PutExecution(execution("x", 1, "other", key="key"))])
    assert await store.execution("k", "e") == await store.execution_of_key("k", "key") == row
    assert await store.execution("other", "e") is None
    ended = execution("e", 1, key="key", fingerprint="f", msg_id="n", size=18, ended_at=9.5, document=b"{}")
    await store.commit([PutExecution(ended)])
    assert await store.execution("k", "e") == ended


async def test_an_update_leaves_the_rest(store: Store) -> None:
    await store.commit([PutExecution(execution("e", 1, key="key", fingerprint="f", request=b"ask"))])
    await store.commit([UpdateExecution("e", b"new", "m", 9.5, 17), UpdateExecution("nobody", b"", None, None, 0)])
    changed = execution("e", 1, key="key", fingerprint="f", request=b"ask", document=b"new", msg_id="m", ended_at=9.5, size=17)
    assert await store.execution("k", "e") == changed
    assert await store.unfinished("k") == []
    assert await store.execution("k", "nobody") is None
    await store.commit([UpdateExecution("e", b"", None, None, 0)])
    assert [row.document for row in await store.unfinished("k")] == [b""]


async def test_unfinished_ones_are_those_without_an_end(store: Store) -> None:
    rows = [execution("a", 3), execution("b", 1), execution("c", 2, ended_at=0.0)]
    await store.commit([PutExecution(row) for row in rows])
    assert await store.unfinished("k") == [rows[1], rows[0]]
    await store.commit([PutExecution(execution("b", 1, ended_at=5.0))])
    assert await store.unfinished("k") == [rows[0]]


async def test_messages_are_the_newest_in_their_order(store: Store) -> None:
    rows = [execution(f"e{n}", n, msg_id=None if n == 3 else f"m{n}") for n in range(1, 6)]
    await store.commit([PutExecution(row) for row in rows])
    assert await store.messages("k", 3) == [("m2", "e2"), ("m4", "e4"), ("m5", "e5")]
    assert await store.messages("k", 0) == []


async def test_events_are_read_by_chunks(store: Store) -> None:
    chunks = [chunk(1, 3), chunk(4, 4), chunk(5, 9), chunk(10, 10)]
    await store.commit([AddEvents("e", part) for part in chunks])
    await store.commit([AddEvents("other", chunk(1, 1))])
    assert await store.last_event("e") == 10
    assert await store.events("e", 0, EVERYTHING) == chunks
    assert await store.events("e", 2, EVERYTHING) == chunks
    assert await store.events("e", 3, EVERYTHING) == chunks[1:]
    assert await store.events("e", 9, EVERYTHING) == chunks[3:]
    assert await store.events("e", 10, EVERYTHING) == []
    two = len(chunks[0].lines) + len(chunks[1].lines)
    assert await store.events("e", 0, two) == chunks[:2]
    assert await store.events("e", 0, two - 1) == chunks[:1]
    assert await store.events("e", 4, 0) == chunks[2:3]


async def test_large_values_stand_beside_their_events(store: Store) -> None:
    values = [LargeValue(1, "image/png", b"p" * 100_000), LargeValue(1, "text/html", b""), LargeValue(4, "image/png", b"q")]
    await store.commit([AddEvents("e", chunk(1, 3), tuple(values[:2])), AddEvents("e", chunk(4, 4), (values[2],))])
    assert await store.large_values("e", 1, 4) == values
    assert await store.large_values("e", 2, 3) == []
    assert await store.large_values("e", 4, 4) == values[2:]


async def test_dropping_events_drops_whole_chunks_and_what_is_theirs(store: Store) -> None:
    values = [LargeValue(n, "a/b", b"%d" % n) for n in (2, 4, 6)]
    await store.commit([AddEvents("e", chunk(2 * n - 1, 2 * n), (values[n - 1],)) for n in (1, 2, 3)])
    await store.commit([DropEvents("e", 2)])
    assert await store.events("e", 0, EVERYTHING) == [chunk(1, 2), chunk(3, 4), chunk(5, 6)]
    await store.commit([DropEvents("e", 4)])
    assert await store.events("e", 0, EVERYTHING) == [chunk(3, 4), chunk(5, 6)]
    assert await store.large_values("e", 0, 9) == values[1:]
    await store.commit([DropEvents("e", 7)])
    assert not await store.large_values("e", 0, 9)
    assert not await store.events("e", 0, 9)
    assert await store.last_event("e") == 0


async def test_held_outputs(store: Store) -> None:
    await store.commit([AddHeld("e", 1, 2, b"one"), AddHeld("e", 3, 3, b"two"), AddHeld("other", 1, 1, b"x")])
    assert await store.held("e") == [b"one", b"two"]
    await store.commit([DropHeld("e", 3)])
    assert await store.held("e") == [b"two"]
    await store.commit([DropHeld("e", 4)])
    assert await store.held("e") == []
    assert await store.held("other") == [b"x"]


async def test_the_end_of_a_kernel_leaves_its_executions(store: Store) -> None:
    row = execution("e", 1, key="x")
    await store.commit(
        [
            PutKernel(kernel("k", key="key")),
            PutKernel(kernel("other")),
            AddFrame("k", 1, b"f"),
            AddFrame("other", 1, b"f"),
            AddEvents("k", chunk(1, 1), (LargeValue(1, "a/b", b"v"),)),
            PutExecution(row),
            AddEvents("e", chunk(1, 2), (LargeValue(1, "a/b", b"v"),)),
        ]
    )
    stone = Tombstone("k", 50.5, b'{"cause":"idle"}')
    await store.commit([EndKernel(stone)])
    assert [found.id for found in await store.kernels()] == ["other"]
    assert not await store.frames("k")
    assert not await store.events("k", 0, 9)
    assert not await store.large_values("k", 0, 9)
    assert await store.frames("other") == [(1, b"f")]
    assert await store.tombstones() == [stone]
    assert await store.execution_of_key("k", "x") == row
    assert await store.events("e", 0, EVERYTHING) == [chunk(1, 2)]
    assert await store.large_values("e", 1, 1) == [LargeValue(1, "a/b", b"v")]
    await store.commit([PutKernel(kernel("new", key="key"))])  # its key is free again


async def test_tombstones_oldest_first_and_the_last_word_counts(store: Store) -> None:
    stones = [Tombstone("b", 2.0, b"2"), Tombstone("a", 3.0, b"3"), Tombstone("c", 1.0, b"1")]
    await store.commit([EndKernel(stone) for stone in stones])
    assert await store.tombstones() == [stones[2], stones[0], stones[1]]
    await store.commit([EndKernel(Tombstone("c", 4.0, b"4"))])
    assert [stone.document for stone in await store.tombstones()] == [b"2", b"3", b"4"]


GOOD: list[Change] = [
    PutKernel(kernel("new", key="fresh")),
    PutKernel(kernel("k", document=b"changed")),
    PutPosition("k", 99, 99),
    AddFrame("k", 2, b"f"),
    DropFrames("k", 1),
    PutExecution(execution("e", 1, key="x", ended_at=9.0, request=b"other")),
    UpdateExecution("e", b"new", "m", 9.5, 17),
    PutExecution(execution("new", 3, key="y")),
    AddEvents("e", chunk(3, 3), (LargeValue(3, "a/b", b"v"),)),
    DropEvents("e", 3),
    AddHeld("e", 2, 2, b"h"),
    DropHeld("e", 2),
    EndKernel(Tombstone("gone", 1.0, b"")),
    EndKernel(Tombstone("k", 1.0, b"")),
]
BAD: list[Change] = [
    PutKernel(kernel("another", key="key")),
    PutExecution(execution("another", 2, key="x")),
    PutExecution(execution("another", 1)),
    PutExecution(execution("e", 5, key="x")),
    PutExecution(execution("e", 1, key="z")),
    PutExecution(execution("e", 1, "another", key="x")),
    AddFrame("k", 1, b"again"),
    AddEvents("e", Chunk(2, 2, b"again\n")),
    AddEvents("e", chunk(9, 9), (LargeValue(1, "a/b", b"again"),)),
    AddHeld("e", 1, 1, b"again"),
]


async def everything(store: Store) -> list[object]:
    return [
        await store.kernels(),
        await store.tombstones(),
        *[await store.frames(name) for name in ("k", "gone")],
        await store.executions("k", None, 99),
        *[await store.execution_of_key("k", key) for key in "xyz"],
        *[await store.events(log, 0, EVERYTHING) for log in ("e", "k", "gone")],
        *[await store.large_values(log, 0, 99) for log in ("e", "k", "gone")],
        await store.held("e"),
    ]


@pytest.mark.parametrize("bad", BAD, ids=lambda change: type(change).__name__)
@pytest.mark.parametrize("before", [len(GOOD) - 2, len(GOOD) - 1, 0])
async def test_a_commit_that_fails_leaves_nothing(store: Store, bad: Change, before: int) -> None:
    await store.commit(
        [
            PutKernel(kernel("k", key="kept")),
            PutKernel(kernel("gone", key="key")),
            AddFrame("k", 1, b"f"),
            AddFrame("gone", 1, b"f"),
            PutExecution(execution("e", 1, key="x")),
            AddEvents("e", chunk(1, 2), (LargeValue(1, "a/b", b"v"),)),
            AddEvents("k", chunk(1, 2), (LargeValue(1, "a/b", b"v"),)),
            AddHeld("e", 1, 1, b"h"),
        ]
    )
    was = await everything(store)
    # DropFrames, DropEvents, DropHeld and the ends make room for what would fail, so they come only after it.
    room = (DropFrames, DropEvents, DropHeld, EndKernel)
    good = [change for change in GOOD[:before] if not isinstance(change, room)]
    with pytest.raises(ValueError, match="contradicts"):
        await store.commit([*good, bad, *GOOD[before:]])
    assert await everything(store) == was
    await store.commit(GOOD)
    assert await everything(store) != was


async def test_a_failure_takes_back_what_was_dropped(store: Store) -> None:
    await store.commit([PutKernel(kernel("k")), AddFrame("k", 1, b"f"), AddEvents("k", chunk(1, 2)), AddHeld("e", 1, 1, b"h")])
    was = await everything(store)
    with pytest.raises(ValueError):
        await store.commit(
            [
                DropFrames("k", 1),
                DropEvents("k", 9),
                DropHeld("e", 9),
                EndKernel(Tombstone("k", 1.0, b"")),
                *2 * [AddFrame("z", 1, b"")],
            ]
        )
    assert await everything(store) == was


async def test_what_is_no_text_fails_alone(store: Store) -> None:
    """A lone surrogate can't be written; the store goes on."""
    if store.durable:
        with pytest.raises(ValueError):
            await store.commit([PutKernel(kernel("a")), PutKernel(kernel("\ud800"))])
    await store.commit([PutKernel(kernel("b"))])
    assert [row.id for row in await store.kernels()] == ["b"]


async def test_purge_by_age(store: Store) -> None:
    rows = [execution(f"e{n}", n, ended_at=float(n) if n < 9 else None) for n in range(1, 10)]
    await store.commit([PutExecution(row) for row in rows])
    await store.commit([AddEvents("e1", chunk(1, 1), (LargeValue(1, "a/b", b"v"),)), AddHeld("e1", 1, 1, b"h")])
    await store.commit([AddEvents("e5", chunk(1, 1))])
    assert await purge(store, keep=NOW - 4.0) == 4
    assert [row.id for row in await store.executions("k", None, 99)] == ["e9", "e8", "e7", "e6", "e5"]
    assert await store.execution("k", "e1") is None
    assert not await store.events("e1", 0, 9)
    assert not await store.large_values("e1", 0, 9)
    assert not await store.held("e1")
    assert await store.last_event("e1") == 0
    assert await store.last_event("e5") == 1
    assert await purge(store, keep=0.0) == 4
    assert [row.id for row in await store.executions("k", None, 99)] == ["e9"]  # it has not ended


async def test_purge_by_size_takes_the_oldest(store: Store) -> None:
    """About half must go; exactly how many is the store's own measure of bytes."""
    for n in range(1, 21):
        ended = execution(f"e{n}", 21 - n, ended_at=float(n), size=200_000)
        await store.commit([PutExecution(ended), AddEvents(f"e{n}", chunk(1, 1, 200_000))])
    removed = await purge(store, max_size=2_000_000)
    assert 8 <= removed <= 14
    left = [row.id for row in await store.executions("k", None, 99)]
    assert left == [f"e{n}" for n in range(removed + 1, 21)]
    assert await store.last_event("e1") == 0
    assert await store.last_event("e20") == 1
    assert await purge(store, max_size=2_000_000) == 0


async def test_purge_of_an_execution_larger_than_a_piece(store: Store) -> None:
    await store.commit([PutExecution(execution("e", 1, ended_at=1.0)), PutExecution(execution("f", 2, ended_at=2.0))])
    for n in range(1, 31):
        await store.commit([AddEvents("e", chunk(n, n, 1_000_000))])
    await store.commit([AddEvents("f", chunk(1, 1))])
    assert await store.purge(Retention(1e9, 1_000_000, 0, 0), NOW) > 0
    assert await store.execution("k", "e") is None
    assert await store.last_event("e") == 0
    assert await store.events("e", 0, EVERYTHING) == []
    await purge(store, max_size=1_000_000)
    assert await store.last_event("f") == 1
    assert await store.size() < 1_000_000


async def test_purge_of_tombstones(store: Store) -> None:
    await store.commit([EndKernel(Tombstone(f"k{n:03}", float(n), b"")) for n in range(1, 401)])
    assert await purge(store, keep_tombstones=NOW - 10.0) == 10
    assert await purge(store, max_tombstones=100) == 290
    assert [stone.kernel_id for stone in await store.tombstones()] == [f"k{n:03}" for n in range(301, 401)]
    assert await purge(store, max_tombstones=100) == 0
    assert await purge(store, max_tombstones=0) == 100


async def test_purged_keys_and_numbers_are_free(store: Store) -> None:
    await store.commit([PutExecution(execution("e", 1, key="x", ended_at=1.0))])
    assert await purge(store, keep=0.0) == 1
    await store.commit([PutExecution(execution("f", 1, key="x"))])
    found = await store.execution_of_key("k", "x")
    assert found is not None
    assert found.id == "f"


async def test_size_grows_and_shrinks(store: Store) -> None:
    empty = await store.size()
    await store.commit([PutExecution(execution("e", 1, ended_at=1.0)), AddEvents("e", chunk(1, 1, 3_000_000))])
    full = await store.size()
    assert full >= empty + 3_000_000
    await purge(store, keep=0.0)
    assert await store.size() < full - 2_500_000


async def test_commits_take_effect_in_the_order_they_were_begun(store: Store) -> None:
    await store.commit([PutKernel(kernel("k"))])
    async with anyio.create_task_group() as tasks:
        for n in range(1, 201):
            changes: list[Change] = [PutPosition("k", n, n), AddEvents("k", chunk(n, n))]
            tasks.start_soon(store.commit, changes)
    (row,) = await store.kernels()
    assert (row.received, row.sent) == (200, 200)
    assert await store.last_event("k") == 200


async def test_reads_see_whole_commits_while_others_are_under_way(store: Store) -> None:
    await store.commit([PutKernel(kernel("k"))])
    done = anyio.Event()

    async def read() -> None:
        seen = 0
        while not done.is_set():
            chunks = await store.events("k", 0, EVERYTHING)
            numbers = [number for part in chunks for number in (part.first, part.last)]
            assert numbers == list(range(1, len(numbers) + 1))
            assert len(numbers) % 4 == 0  # two chunks a commit
            assert len(numbers) >= seen
            seen = len(numbers)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(read)
        for n in range(1, 601, 4):
            await store.commit([AddEvents("k", chunk(n, n + 1)), AddEvents("k", chunk(n + 2, n + 3))])
            assert await store.last_event("k") == n + 3  # what was committed is seen at once
            await anyio.lowlevel.checkpoint()
        done.set()


async def test_a_cancelled_commit_is_whole_or_nothing(store: Store) -> None:
    for n in range(1, 101):
        with anyio.CancelScope() as scope:
            if n % 2:
                scope.cancel()
            await store.commit([AddEvents("a", chunk(n, n)), AddEvents("b", chunk(n, n))])
    await store.commit([])
    first = await store.events("a", 0, EVERYTHING)
    assert first == await store.events("b", 0, EVERYTHING)
    assert {part.first for part in first} >= set(range(2, 101, 2))
