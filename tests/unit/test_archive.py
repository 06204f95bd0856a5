"""What only the store knows is read as what is in memory is."""

import contextlib
from typing import Any

import pytest

from gateway.errors import ExecutionNotFound, KernelNotFound
from gateway.kernels import archive
from gateway.kernels import cells as cells_module
from gateway.kernels.archive import ArchivedExecution
from gateway.kernels.execution import Execution, summary_of
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager
from gateway.kernels.wishes import CreateRequest
from gateway.protocol.events import Event
from gateway.testing import FakeEngine, KernelScript, Raise, Sleep, display, printed, result
from tests.unit.kernels import cell, created, ended, managed, quick, run
from tests.unit.stores import LastingStore
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio

CELLS: dict[str, Any] = {
    "hello": [printed("hello\n"), result("2")],
    "fails": [printed("before"), Raise("ValueError", "no")],
    "chatty": [step for number in range(300) for step in (printed(f"{number} "), Sleep(0))],
    "large": [
        display({"image/png": "x" * 200_000, "text/plain": "small", "application/json": {"a": ["y" * 90_000]}}),
        printed("end"),
    ],
    "too much": [printed("x" * 50_000) for _ in range(40)],
}


@pytest.fixture
def store() -> LastingStore:
    return LastingStore()


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single execution of each kernel is kept in memory."""
    monkeypatch.setattr(cells_module, "_KEPT_EXECUTIONS", 1)


def running(store: LastingStore) -> contextlib.AbstractAsyncContextManager[KernelManager]:
    return managed(FakeEngine(KernelScript(cells=CELLS)), quick(max_output=1_000_000), store)


async def evicted(manager: KernelManager, kernel: Kernel, code: str) -> tuple[Execution, ArchivedExecution]:
    """An execution as it was in memory, and as the store has it."""
    before = await run(kernel, code)
    await run(kernel, "hello")
    found = await manager.execution(kernel.id, before.id)
    assert isinstance(found, ArchivedExecution)
    return before, found


@pytest.mark.parametrize("code", [*CELLS, "nothing"])
async def test_an_execution_reads_the_same_from_the_store(store: LastingStore, code: str) -> None:
    async with running(store) as manager:
        kernel = await created(manager, CreateRequest())
        before, found = await evicted(manager, kernel, code)
        assert await found.document() == before.result()
        assert (found.id, found.kernel_id, found.number, found.ended, found.live) == (before.id, kernel.id, 1, True, False)
        assert found.log.last_seq == before.log.last_seq
        assert [event.json for event in await found.log.page(0, 10_000)] == [event.json for event in before.log.since(0)]
        assert summary_of(found.record) == summary_of(before.record())
        await found.stored()


async def test_its_log_is_followed_from_any_number(store: LastingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(store) as manager:
        monkeypatch.setattr(archive, "_PIECE", 2000)
        kernel = await created(manager, CreateRequest())
        before, found = await evicted(manager, kernel, "chatty")
        events = before.log.since(0)
        for after in [*range(0, len(events) + 2, max(1, len(events) // 20)), len(events), -1]:
            read: list[Event] = []
            batches = 0
            async for batch in found.log.follow(after):
                assert batch
                batches += 1
                read += batch
            assert read == [event for event in events if event.seq > after]
            for limit in (1, 7, 10_000):
                assert await found.log.page(after, limit) == read[:limit]


async def test_a_log_that_is_read_while_it_grows_is_the_same_as_what_is_stored(store: LastingStore) -> None:
    async with running(store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("chatty"))
        followed = [event async for batch in execution.log.follow() for event in batch]
        stored = await archive.read_events(store, execution.id, 0, 1 << 30)
        assert [event.json for event in stored] == [event.json for event in followed]
        assert [event.seq for event in stored] == [*range(1, len(stored) + 1)]


async def test_large_values_stand_beside_their_events(store: LastingStore) -> None:
    async with running(store) as manager:
        kernel = await created(manager, CreateRequest())
        _, found = await evicted(manager, kernel, "large")
        (shown,) = [event for event in await found.log.page(0, 100) if event.type == "display"]
        assert list(shown.members["data"]) == ["image/png", "text/plain", "application/json"]
        beside = {value.media: value.data for value in await store.large_values(found.id, shown.seq, shown.seq)}
        assert beside["image/png"] == b'"' + b"x" * 200_000 + b'"'
        assert "text/plain" not in beside


async def test_pages_of_executions_are_newest_first(store: LastingStore) -> None:
    async with running(store) as manager:
        kernel = await created(manager, CreateRequest())
        for _ in range(7):
            await run(kernel, "hello")
        waiting = kernel.execute(cell("chatty"))
        await waiting.stored()
        found: list[dict[str, Any]] = []
        before = None
        while page := await manager.executions(kernel.id, before, 3):
            assert len(page) <= 3
            found += page
            before = page[-1]["number"]
        assert [summary["number"] for summary in found] == [8, 7, 6, 5, 4, 3, 2, 1]
        assert {summary["status"] for summary in found[1:]} == {"ok"}
        assert found[1]["code"] == "hello"
        await ended(waiting)


async def test_what_there_never_was(store: LastingStore) -> None:
    async with running(store) as manager:
        kernel, other = await created(manager, CreateRequest()), await created(manager, CreateRequest())
        assert await manager.executions(kernel.id, None, 10) == []
        execution = await run(kernel, "hello")
        with pytest.raises(ExecutionNotFound):
            await manager.execution(kernel.id, "nonsense")
        with pytest.raises(ExecutionNotFound):
            # It is another kernel's.
            await manager.execution(other.id, execution.id)
        for ask in (manager.execution("nonsense", execution.id), manager.executions("nonsense", None, 10)):
            with pytest.raises(KernelNotFound):
                await ask


async def test_executions_are_read_after_their_kernel(store: LastingStore) -> None:
    async with running(store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = await run(kernel, "fails")
        expected = execution.result()
        await manager.delete(kernel.id)
        found = await manager.execution(kernel.id, execution.id)
        assert await found.document() == expected
        assert [summary["execution_id"] for summary in await manager.executions(kernel.id, None, 10)] == [execution.id]
        with pytest.raises(ExecutionNotFound):
            await manager.execution(kernel.id, "nonsense")


async def test_a_key_of_an_execution_that_has_left_memory_gives_it_again(store: LastingStore) -> None:
    async with running(store) as manager:
        kernel = await created(manager, CreateRequest())
        first, _ = await kernel.submit(cell("hello"), "key", "body")
        assert isinstance(first, Execution)
        await ended(first)
        await run(kernel, "hello")
        await until(lambda: kernel.cells.find(first.id) is None)
        found, replayed = await kernel.submit(cell("hello"), "key", "body")
        assert (found.id, replayed, found.live) == (first.id, True, False)
