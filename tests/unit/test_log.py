"""The log of events: every reader sees every event once and in order, whenever it comes and however slow it is."""

import re

import anyio
import anyio.lowlevel
import pytest

from gateway.kernels.log import EventLog, timestamp
from gateway.protocol.events import Event, Payload

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
    assert events[0].members == {"events": 7}
    assert [event.type for event in await collect(log, 6)] == ["gap", "stream", "stream", "stream"]
    assert [event.type for event in await collect(log, 7)] == ["stream", "stream", "stream"]


async def test_a_reader_that_falls_behind_while_it_reads_is_told() -> None:
    log = bounded(3000, [500] * 2)
    reader = log.follow()
    assert [event.seq for event in await anext(reader)] == [1, 2]
    for value in range(3, 9):
        log.append_bounded(number(value), 500)
    gap, *rest = await anext(reader)
    assert (gap.type, gap.members) == ("gap", {"events": 3})
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
