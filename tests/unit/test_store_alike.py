"""Both stores after the same random commits: they refuse the same ones, and answer every question alike."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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

KERNELS, EXECUTIONS, LOGS = ("k1", "k2"), ("e1", "e2", "e3"), ("k1", "e1", "e2")
MEDIA = ("a/b", "text/plain")

number = st.integers(1, 4)
blob = st.binary(max_size=8)
key = st.none() | st.sampled_from(["x", "y"])
when = st.integers(1, 5).map(float)
kernel = st.sampled_from(KERNELS)
execution = st.sampled_from(EXECUTIONS)
log = st.sampled_from(LOGS)
large = st.lists(st.builds(LargeValue, number, st.sampled_from(MEDIA), blob), max_size=2).map(tuple)
change: st.SearchStrategy[Change] = st.one_of(
    st.builds(PutKernel, st.builds(KernelRow, kernel, when, blob, key, key, number, number)),
    st.builds(PutPosition, kernel, number, number),
    st.builds(AddFrame, kernel, number, blob),
    st.builds(DropFrames, kernel, number),
    st.builds(
        PutExecution,
        st.builds(ExecutionRow, execution, kernel, number, when, blob, key, key, key, st.none() | when, number, blob),
    ),
    st.builds(UpdateExecution, execution, blob, key, st.none() | when, number),
    st.builds(AddEvents, log, number.map(lambda n: Chunk(2 * n - 1, 2 * n, b"%d\n" % n)), large),
    st.builds(DropEvents, log, st.integers(1, 9)),
    st.builds(AddHeld, execution, number, number, blob),
    st.builds(DropHeld, execution, number),
    st.builds(EndKernel, st.builds(Tombstone, kernel, when, blob)),
)
# Sizes are each store's own measure, so nothing goes by size here.
retention = st.builds(Retention, when, st.just(2**40), when, st.integers(0, 3))


async def answers(store: Store) -> list[object]:
    found: list[object] = [await store.kernels(), await store.tombstones()]
    for name in KERNELS:
        found += [await store.frames(name), await store.unfinished(name), await store.messages(name, 2)]
        found += [await store.executions(name, before, 2) for before in (None, 3)]
        found += [await store.execution_of_key(name, text) for text in "xy"]
        found += [await store.execution(name, execution_id) for execution_id in EXECUTIONS]
    for name in LOGS:
        found += [await store.last_event(name), await store.large_values(name, 2, 3)]
        found += [await store.events(name, after, size) for after in range(5) for size in (0, 4, 99)]
    found += [await store.held(name) for name in EXECUTIONS]
    return found


async def outcome(store: Store, step: Sequence[Change] | Retention) -> object:
    try:
        if isinstance(step, Retention):
            return await store.purge(step, 6.0)
        await store.commit(step)
    except ValueError:
        return ValueError
    return None


async def compare(path: Path, steps: list[list[Change] | Retention]) -> None:
    memory, sqlite = MemoryStore(), SqliteStore(path)
    await sqlite.open()
    try:
        for step in steps:
            assert await outcome(memory, step) == await outcome(sqlite, step)
            assert await answers(memory) == await answers(sqlite)
    finally:
        await sqlite.aclose()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(change, min_size=1, max_size=4) | retention, min_size=1, max_size=12))
def test_both_stores_are_alike(steps: list[list[Change] | Retention]) -> None:
    with tempfile.TemporaryDirectory() as place:
        anyio.run(compare, Path(place) / "store", steps)
