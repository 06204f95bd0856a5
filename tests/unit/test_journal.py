"""Rounds of the journal: each one moment, in order, told to nobody before it is stored, and lost by no failure of the store."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import StoreUnavailable
from gateway.kernels import journal as journal_module
from gateway.kernels.journal import Journal
from gateway.store.base import AddFrame, Change, PutPosition
from tests.unit.stores import LastingStore
from tests.unit.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_RETRY", 0.002)


class Counter:
    """Something with a record: each `add` makes one change, and a position that must be the number of all of them."""

    def __init__(self, journal: Journal, name: str = "k") -> None:
        self.name, self.made, self.taken, self.safe = name, 0, 0, 0
        self._journal = journal

    def add(self) -> None:
        self.made += 1
        self._journal.changed(self)

    def take_changes(self) -> tuple[Sequence[Change], Callable[[], None]]:
        fresh = range(self.taken + 1, self.made + 1)
        self.taken = last = self.made
        changes: list[Change] = [AddFrame(self.name, number, b"%d" % number) for number in fresh]
        return [*changes, PutPosition(self.name, last, 0)], lambda: self.tell(last)

    def tell(self, last: int) -> None:
        self.safe = last


def numbers(commit: Sequence[Change], name: str = "k") -> list[int]:
    return [change.seq for change in commit if isinstance(change, AddFrame) and change.kernel_id == name]


@contextlib.asynccontextmanager
async def running(store: LastingStore, on_fenced: Callable[[], None] = lambda: None) -> AsyncIterator[Journal]:
    journal = Journal(store, on_fenced)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.run)
        yield journal
        tasks.cancel_scope.cancel()


async def test_what_was_announced_is_stored_and_then_told() -> None:
    store = LastingStore()
    async with running(store) as journal:
        counter = Counter(journal)
        counter.add()
        assert counter.safe == 0
        await journal.flush()
        assert counter.safe == 1
        assert await store.frames("k") == [(1, b"1")]


async def test_what_is_announced_often_is_asked_once_a_round() -> None:
    store = LastingStore()
    async with running(store) as journal:
        counter = Counter(journal)
        for _ in range(100):
            counter.add()
        await journal.flush()
        assert [numbers(commit) for commit in store.commits] == [[*range(1, 101)]]


async def test_a_round_is_one_moment_of_all_that_take_part() -> None:
    """Two that always change together are never stored apart, whatever happens while a round is under way."""
    store = LastingStore()
    async with running(store) as journal:
        left, right = Counter(journal, "l"), Counter(journal, "r")
        for number in range(50):
            left.add()
            right.add()
            for _ in range(number % 4):
                await anyio.lowlevel.checkpoint()
        await journal.flush()
        assert len(store.commits) > 2
        for commit in store.commits:
            assert numbers(commit, "l") == numbers(commit, "r")
            positions = {change.kernel_id: change.received for change in commit if isinstance(change, PutPosition)}
            assert positions == dict.fromkeys("lr", numbers(commit, "l")[-1])


async def test_what_comes_during_a_round_is_in_the_next() -> None:
    store = LastingStore()
    async with running(store) as journal:
        store.hold()
        counter = Counter(journal)
        counter.add()
        await until(lambda: store.attempts)
        counter.add()
        assert counter.safe == 0
        store.release()
        await journal.flush()
        assert [numbers(commit) for commit in store.commits] == [[1], [2]]
        assert counter.safe == 2


async def test_loose_changes_come_after_what_was_announced_before() -> None:
    store = LastingStore()
    async with running(store) as journal:
        counter = Counter(journal)
        counter.add()
        journal.write(AddFrame("k", 1001, b""), AddFrame("k", 1002, b""))
        journal.write(AddFrame("k", 1003, b""))
        await journal.flush()
        assert [numbers(commit) for commit in store.commits] == [[1, 1001, 1002, 1003]]


async def test_a_round_in_which_nothing_has_changed_is_no_commit() -> None:
    store = LastingStore()

    class Nothing:
        told = 0

        def take_changes(self) -> tuple[Sequence[Change], Callable[[], None]]:
            return (), self.tell

        def tell(self) -> None:
            self.told += 1

    async with running(store) as journal:
        nothing = Nothing()
        journal.changed(nothing)
        await journal.flush()
        assert (store.attempts, nothing.told) == (0, 1)


# flush


async def test_a_flush_of_nothing_returns_at_once() -> None:
    journal = Journal(LastingStore())
    with anyio.fail_after(PATIENCE):
        # Not even a task that could store something is needed.
        await journal.flush()
        await journal.flush(0)


async def test_a_flush_during_a_round_waits_for_that_round() -> None:
    """Nothing new was announced, but what was is not stored yet."""
    store = LastingStore()
    async with running(store) as journal:
        store.hold()
        counter = Counter(journal)
        counter.add()
        await until(lambda: store.attempts)
        with pytest.raises(StoreUnavailable, match="too slow"):
            await journal.flush(0.01)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(journal.flush)
            await anyio.lowlevel.checkpoint()
            store.release()
        assert counter.safe == 1


async def test_a_flush_waits_for_no_more_than_was_there() -> None:
    """Else it would never end while cells put out."""
    store = LastingStore()
    async with running(store) as journal, anyio.create_task_group() as tasks:
        counter = Counter(journal)
        counter.add()

        async def go_on() -> None:
            while True:
                counter.add()
                await anyio.lowlevel.checkpoint()

        tasks.start_soon(go_on)
        with anyio.fail_after(PATIENCE):
            await journal.flush()
        assert counter.safe >= 1
        tasks.cancel_scope.cancel()


async def test_a_flush_has_patience() -> None:
    store = LastingStore()
    store.failing = True
    async with running(store) as journal:
        counter = Counter(journal)
        counter.add()
        await until(lambda: journal.failure)
        with pytest.raises(StoreUnavailable, match="disk is full"):
            await journal.flush(0.01)
        store.failing = False
        await journal.flush(PATIENCE)
        assert counter.safe == 1


# failures


async def test_while_the_store_fails_nothing_is_told_and_new_work_is_refused() -> None:
    store = LastingStore()
    async with running(store) as journal:
        journal.require()
        store.failing = True
        counter = Counter(journal)
        counter.add()
        await until(lambda: store.attempts > 3)
        counter.add()
        with pytest.raises(StoreUnavailable, match="disk is full"):
            journal.require()
        assert (counter.safe, store.commits) == (0, [])
        store.failing = False
        await journal.flush()
        journal.require()
        assert journal.failure is None
        # The round that failed, and then what came meanwhile: each once and in order.
        assert [numbers(commit) for commit in store.commits] == [[1], [2]]
        assert counter.safe == 2


@given(script=st.lists(st.sampled_from(["add", "fail", "work", "hold", "release", "step", "flush"]), max_size=60))
def test_everything_is_stored_once_and_in_order_whatever_the_store_does(script: list[str]) -> None:
    async def play() -> None:
        store = LastingStore()
        async with running(store) as journal:
            counter = Counter(journal)
            for step in script:
                await act(step, store, journal, counter)
                stored = [number for commit in store.commits for number in numbers(commit)]
                assert stored == [*range(1, len(stored) + 1)]
                assert counter.safe <= len(stored)
            store.failing = False
            store.release()
            await journal.flush()
            assert [number for commit in store.commits for number in numbers(commit)] == [*range(1, counter.made + 1)]
            assert counter.safe == counter.made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "_RETRY", 0.0)
        anyio.run(play)


async def act(step: str, store: LastingStore, journal: Journal, counter: Counter) -> None:
    if step == "add":
        counter.add()
    elif step in ("fail", "work"):
        store.failing = step == "fail"
    elif step == "hold":
        store.hold()
    elif step == "release":
        store.release()
    elif step == "flush":
        with contextlib.suppress(StoreUnavailable):
            made = counter.made
            await journal.flush(0)
            assert counter.safe >= made
    else:
        await anyio.lowlevel.checkpoint()


async def test_once_another_gateway_has_the_store_nothing_is_told_any_more() -> None:
    store = LastingStore()
    fenced: list[Any] = []
    async with running(store, lambda: fenced.append(1)) as journal:
        counter = Counter(journal)
        store.fenced = True
        counter.add()
        await until(lambda: fenced)
        store.fenced = False
        counter.add()
        with pytest.raises(StoreUnavailable, match="Another gateway"):
            await journal.flush(0.02)
        with pytest.raises(StoreUnavailable, match="Another gateway"):
            journal.require()
        assert (fenced, counter.safe, store.commits, store.attempts) == ([1], 0, [], 1)
