"""The log of events: every reader sees every event once and in order, whenever it comes and however slow it is."""

import re

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.kernels.log import EventLog, timestamp
from gateway.protocol.events import Event, Payload
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio


def number(value: int) -> Payload:
    return Payload("stream", {"name": "stdout", "text": str(value)})


def filled(count: int) -> EventLog:
    log = EventLog("e")
    log.append(number(value) for value in range(1, count + 1))
    return log


async def collect(log: EventLog, after: int = 0) -> list[Event]:
    return [event async for batch in log.follow(after) for event in batch]


def test_events_are_numbered_from_one() -> None:
    log = EventLog("e")
    assert log.last_seq == 0
    log.append([number(1), number(2)])
    log.append([number(3)])
    events = log.since(0)
    assert [(event.seq, event.members["text"], event.execution_id) for event in events] == [(n, str(n), "e") for n in (1, 2, 3)]
    assert log.last_seq == 3


def test_a_time_is_what_jupyters_clients_parse() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", timestamp())
    assert filled(1).since(0)[0].time.endswith("Z")


@pytest.mark.parametrize("after", range(12))
def test_since_any_number(after: int) -> None:
    assert [event.seq for event in filled(10).since(after)] == list(range(after + 1, 11))


@pytest.mark.parametrize("after", range(12))
async def test_follow_from_any_number(after: int) -> None:
    log = filled(10)
    log.close()
    assert [event.seq for event in await collect(log, after)] == list(range(after + 1, 11))


@pytest.mark.parametrize("after", [-1, -100])
async def test_before_the_first_there_was_nothing(after: int) -> None:
    """No gap is told of events that never were."""
    log = filled(3)
    log.close()
    assert [(event.seq, event.type) for event in await collect(log, after)] == [(1, "stream"), (2, "stream"), (3, "stream")]


async def test_many_readers_each_see_all_of_it() -> None:
    log = EventLog("e")
    found: dict[int, list[int]] = {}

    async def read(reader: int) -> None:
        seen = found[reader] = []
        async for batch in log.follow(reader):
            seen.extend(event.seq for event in batch)
            for _ in range(reader):
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        for reader in range(20):
            tasks.start_soon(read, reader)
        for value in range(1, 101):
            log.append([number(value)])
            if value % 7 == 0:
                await anyio.lowlevel.checkpoint()
        log.close()
    assert found == {reader: list(range(reader + 1, 101)) for reader in range(20)}


async def test_a_slow_reader_gets_what_came_meanwhile_as_one_batch() -> None:
    log = filled(1)
    reader = log.follow()
    assert [event.seq for event in await anext(reader)] == [1]
    log.append([number(2)])
    log.append([number(3), number(4)])
    assert [event.seq for event in await anext(reader)] == [2, 3, 4]


async def test_a_reader_waits_until_there_is_something() -> None:
    log = EventLog("e")
    reader = log.follow()
    with anyio.move_on_after(0.02) as waited:
        await anext(reader)
    assert waited.cancelled_caught
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, log)
        await anyio.lowlevel.checkpoint()
        log.append([number(1)])
        log.close()


async def test_a_closed_log_ends_its_readers_after_the_last_event() -> None:
    log = filled(2)
    log.close()
    assert log.closed
    assert len(await collect(log)) == 2
    assert await collect(log, 2) == []
    assert await collect(log, 99) == []


async def test_readers_that_wait_end_when_the_log_is_closed() -> None:
    log = EventLog(None)
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(collect, log)
        await anyio.lowlevel.checkpoint()
        log.close()


# bounded


def bounded(keep: int, sizes: list[int]) -> EventLog:
    log = EventLog(None, keep_bytes=keep)
    for value, size in enumerate(sizes, start=1):
        log.append_bounded(number(value), size)
    return log


def test_a_bounded_log_forgets_the_oldest() -> None:
    # Each event costs its size and 500 bytes.
    log = bounded(3000, [500] * 10)
    assert [event.seq for event in log.since(0)] == [8, 9, 10]
    assert log.last_seq == 10


def test_a_bounded_log_keeps_the_last_event_however_large() -> None:
    assert [event.seq for event in bounded(1000, [100, 1_000_000]).since(0)] == [2]
    assert [event.seq for event in bounded(1000, [1_000_000, 100]).since(0)] == [2]


def test_a_bounded_log_keeps_what_fits() -> None:
    assert [event.seq for event in bounded(1000, [0, 0]).since(0)] == [1, 2]
    assert [event.seq for event in bounded(999, [0, 0]).since(0)] == [2]


def test_many_small_events_are_bounded_too() -> None:
    assert len(bounded(1_000_000, [0] * 10_000).since(0)) == 2000


async def test_a_reader_that_is_behind_is_told_of_the_gap() -> None:
    log = bounded(3000, [500] * 10)
    log.close()
    events = await collect(log)
    assert [(event.seq, event.type) for event in events] == [(7, "gap"), (8, "stream"), (9, "stream"), (10, "stream")]
    assert events[0].members == {"events": 7, "bytes": None}
    assert [event.type for event in await collect(log, 6)] == ["gap", "stream", "stream", "stream"]
    assert [event.type for event in await collect(log, 7)] == ["stream", "stream", "stream"]


async def test_a_reader_that_falls_behind_while_it_reads_is_told() -> None:
    log = bounded(3000, [500] * 2)
    reader = log.follow()
    assert [event.seq for event in await anext(reader)] == [1, 2]
    for value in range(3, 9):
        log.append_bounded(number(value), 500)
    gap, *rest = await anext(reader)
    assert (gap.type, gap.members) == ("gap", {"events": 3, "bytes": None})
    assert [event.seq for event in rest] == [6, 7, 8]


async def test_numbers_and_gaps_add_up() -> None:
    """What was told and what is missing is all there was."""
    log = EventLog(None, keep_bytes=5000)
    told = missing = 0

    async def read() -> None:
        nonlocal told, missing
        async for batch in log.follow():
            for event in batch:
                missing += event.members["events"] if event.type == "gap" else 0
                told += event.type != "gap"
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        for value in range(500):
            log.append_bounded(number(value), 200)
            if value % 10 == 0:
                await anyio.lowlevel.checkpoint()
        log.close()
    assert told + missing == 500
    assert told > 0
    assert missing > 0


# guarded: what is not stored can't be read


def guarded(keep_bytes: int | None = None) -> tuple[EventLog, list[int]]:
    """A log whose owner has to publish, and how often the owner was called."""
    calls: list[int] = []
    return EventLog("e", keep_bytes, lambda _within: calls.append(1)), calls


def seqs(events: list[Event]) -> list[int]:
    return [event.seq for event in events]


def test_an_event_can_be_read_when_it_is_published() -> None:
    log, calls = guarded()
    log.append([number(1), number(2)])
    assert (log.last_seq, log.since(0), log.read(0), len(calls)) == (0, [], [], 1)
    assert seqs(log.take()) == [1, 2]
    assert log.last_taken == 2
    log.append([number(3)])
    log.publish(2)
    assert (log.last_seq, seqs(log.since(0)), seqs(log.since(1))) == (2, [1, 2], [2])
    assert seqs(log.take()) == [3]
    assert log.take() == []
    log.publish(0)
    assert log.last_seq == 2
    log.publish(3)
    assert seqs(log.since(0)) == [1, 2, 3]


async def test_a_log_is_closed_once_its_last_event_can_be_read() -> None:
    log, calls = guarded()
    log.append([number(1)])
    log.close()
    assert len(calls) == 2
    assert not log.closed
    assert not log.finished.is_set()
    log.publish(1)
    assert log.closed
    assert log.finished.is_set()
    assert seqs(await collect(log)) == [1]


async def test_a_log_that_is_closed_after_its_last_event_was_stored_needs_no_other() -> None:
    log, _ = guarded()
    log.append([number(1)])
    log.publish(1)
    log.close()
    assert log.closed
    assert log.finished.is_set()


async def test_a_reader_waits_for_the_publication() -> None:
    log, _ = guarded()
    found: list[int] = []

    async def read() -> None:
        async for batch in log.follow():
            found.extend(seqs(batch))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        log.append([number(1), number(2), number(3)])
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert found == []
        log.publish(2)
        await until(lambda: found)
        assert found == [1, 2]
        log.close()
        await anyio.lowlevel.checkpoint()
        log.publish(3)
    assert found == [1, 2, 3]


@pytest.mark.parametrize("seq", [1, 2])
async def test_until_waits_for_one_event_or_the_end(seq: int) -> None:
    log, _ = guarded()
    log.append([number(1)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.until, seq)
        await anyio.lowlevel.checkpoint()
        log.publish(1)
        if seq == 2:
            log.close()


def test_a_log_that_is_guarded_later_has_all_of_it_to_be_stored() -> None:
    log = EventLog(None, keep_bytes=1000)
    for value in range(5):
        log.append_bounded(number(value), 0)
    assert seqs(log.since(0)) == [4, 5]
    log.guard(lambda _within: None)
    log.append_bounded(number(5), 0)
    assert seqs(log.take()) == [5, 6]
    assert log.first_kept == 5


def test_a_log_is_restored_as_it_was() -> None:
    before, _ = guarded()
    before.append([number(1), number(2), number(3)])
    log, _ = guarded()
    log.restore(before.take()[1:], 3)
    log.guard(lambda _within: None, fresh=False)
    assert (log.last_seq, log.last_taken, seqs(log.read(1)), log.take()) == (3, 3, [2, 3], [])
    assert [event.type for event in log.read(0)] == ["gap", "stream", "stream"]
    log.append([number(4)])
    assert seqs(log.take()) == [4]


def test_what_is_not_published_is_not_forgotten() -> None:
    """However much comes while the store is away: it has not been stored yet."""
    log, _ = guarded(keep_bytes=1000)
    for value in range(20):
        log.append_bounded(number(value), 100)
    assert len(log.take()) == 20
    log.publish(20)
    log.append_bounded(number(20), 100)
    assert log.first_kept == 21
    assert seqs(log.take()) == [21]


class Reading:
    """A reader with a place of its own, and what it has seen: numbers, and those that a gap stands for."""

    def __init__(self, after: int) -> None:
        self.after = self.first = after
        self.told = 0
        self.missing = 0

    def read(self, log: EventLog, limit: int | None = None) -> None:
        events = log.read(self.after)
        for event in events if limit is None else events[:limit]:
            if event.type == "gap":
                assert self.told == 0 or event.seq > self.after
                self.missing += event.members["events"]
                assert event.seq - self.after == event.members["events"]
            else:
                assert event.seq == self.after + 1
                assert event.members["text"] == str(event.seq)
                self.told += 1
            self.after = event.seq
            assert event.seq <= log.last_seq


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 900)),
            st.tuples(st.just("take"), st.just(0)),
            st.tuples(st.just("store"), st.just(0)),
            st.tuples(st.just("reader"), st.integers(0, 100)),
            st.tuples(st.just("read"), st.integers(0, 20)),
            st.tuples(st.just("peek"), st.integers(0, 20)),
        ),
        max_size=80,
    ),
    st.sampled_from([None, 600, 2000]),
)
def test_readers_see_what_is_published_once_and_in_order(script: list[tuple[str, int]], keep: int | None) -> None:
    """Readers at any place and pace: nothing that is not published, everything else once, or counted by a gap."""
    log, _ = guarded(keep)
    readers, under_way, stored, made = [Reading(0)], 0, 0, 0
    for step, value in script:
        if step == "append":
            made += 1
            if keep is None:
                log.append([number(made)])
            else:
                log.append_bounded(number(made), value)
        elif step == "take":
            # As the journal does: one round at a time.
            if under_way == stored:
                taken = log.take()
                assert seqs(taken) == [*range(stored + 1, made + 1)]
                under_way = made
        elif step == "store":
            stored = under_way
            log.publish(stored)
        elif step == "reader":
            readers.append(Reading(min(value, stored)))
        else:
            readers[value % len(readers)].read(log, 1 if step == "peek" else None)
        assert log.last_seq == stored
        assert all(event.seq <= stored for event in log.since(0))
    log.publish(made)
    log.close()
    assert log.closed
    for reader in readers:
        reader.read(log)
        assert reader.after == made
        assert reader.told + reader.missing == made - reader.first
        assert keep is not None or reader.missing == 0
