"""What is stored of a kernel: enough for the next gateway, together with how far its link has come, and no more once it is buried."""

from typing import Any

import anyio
import orjson
import pytest

from gateway.kernels import kernel_record
from gateway.kernels.kernel_record import phase_of
from gateway.kernels.state import KernelState
from gateway.kernels.wishes import CreateRequest
from gateway.store.base import AddEvents, AddFrame, Change, EndKernel, PutExecution, PutKernel, PutPosition, UpdateExecution
from gateway.testing import FakeEngine, KernelScript, Sleep, printed
from tests.unit.kernels import box_of, cell, created, managed, process_of, run
from tests.unit.stores import LastingStore
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio

CELLS: dict[str, Any] = {
    "hello": [printed("hello")],
    "counts": [step for number in range(50) for step in (printed(f"{number} "), Sleep(0.001))],
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(KernelScript(cells=CELLS))


async def document(store: LastingStore) -> dict[str, Any]:
    (row,) = await store.kernels()
    found: dict[str, Any] = orjson.loads(row.document)
    return found


async def test_a_kernel_is_recorded_when_its_create_returns(engine: FakeEngine) -> None:
    store = LastingStore()
    async with managed(engine, store=store) as manager:
        request = CreateRequest(label="mine", env={"A": "b"}, lifetime=1000.0, memory=300 << 20)
        kernel, _ = await manager.create(request, "key", "body")
        (row,) = await store.kernels()
        assert (row.id, row.created_at, row.key, row.fingerprint) == (kernel.id, kernel.created, "key", "body")
        found = await document(store)
        assert found["secret"] == box_of(engine, kernel).link.secret
        assert (found["phase"], found["gone"], found["cause"]) == ("ready", False, None)
        assert kernel_record.request_of(found) == kernel.request
        kernel_record.check(found)
        assert found["process"]["key"] != found["secret"]
        # The kernel's own events, too.
        assert await store.last_event(kernel.id) == kernel.log.last_seq > 0


async def test_effects_and_position_are_in_one_commit(engine: FakeEngine) -> None:
    """Whatever the last commit is, the frames up to its position have had their effects in it, and no later ones."""
    store = LastingStore()
    async with managed(engine, store=store) as manager:
        kernel = await created(manager, CreateRequest())
        for _ in range(3):
            await run(kernel, "counts")
        await manager.journal.flush()
        commits = [commit for commit in store.commits if any(isinstance(change, AddEvents) for change in commit)]
        assert len(commits) > 10
        outputs = 0
        for commit in store.commits:
            told = [change for change in commit if isinstance(change, AddEvents) and change.log != kernel.id]
            streams = sum(change.chunk.lines.count(b'"type":"stream"') for change in told)
            outputs += streams
            # What a kernel says comes over its link, so events of outputs never come without a new position.
            assert not streams or positions(commit)
        assert outputs > 30
        received = [number for commit in store.commits for number in positions(commit)]
        assert received == sorted(received)


def positions(commit: list[Change]) -> list[int]:
    found = [change.received for change in commit if isinstance(change, PutPosition)]
    return found + [change.row.received for change in commit if isinstance(change, PutKernel)]


async def test_a_cell_and_its_request_are_in_one_commit(engine: FakeEngine) -> None:
    """Never is a cell stored as handed to the kernel without the frame that hands it over, and never the other way round."""
    store = LastingStore()
    async with managed(engine, store=store) as manager:
        kernel = await created(manager, CreateRequest())
        first = len(store.commits)
        for _ in range(5):
            await run(kernel, "hello")
        known: set[str] = set()
        for commit in store.commits[first:]:
            sent = set()
            for change in commit:
                if isinstance(change, UpdateExecution) and change.msg_id:
                    sent.add(change.msg_id)
                elif isinstance(change, PutExecution) and change.row.msg_id:
                    sent.add(change.row.msg_id)
            made = [change.frame for change in commit if isinstance(change, AddFrame)]
            fresh = sent - known
            assert len(made) == len(fresh)
            assert all(any(msg_id.encode() in frame for frame in made) for msg_id in fresh)
            known |= sent
        assert len(known) == 5


async def test_what_the_kernel_has_got_is_forgotten(engine: FakeEngine) -> None:
    store = LastingStore()
    async with managed(engine, store=store) as manager:
        kernel = await created(manager, CreateRequest())
        for _ in range(70):
            await run(kernel, "hello")
        await until(lambda: not box_of(engine, kernel).link._unacknowledged)
        kernel.record.changed()
        await manager.journal.flush()
        left = [seq for seq, _ in await store.frames(kernel.id)]
        # Many at once, and never the last, whose number is needed.
        assert 1 <= len(left) < 70
        assert left[-1] == box_of(engine, kernel).link._sent


async def test_the_document_is_written_where_it_has_changed(engine: FakeEngine) -> None:
    store = LastingStore()
    async with managed(engine, store=store) as manager:
        kernel = await created(manager, CreateRequest())
        await manager.journal.flush()
        before = len(store.commits)
        process = process_of(engine, kernel)
        for _ in range(5):
            process.publish("status", {"execution_state": "idle"}, {"msg_id": "nobody's"})
        await until(lambda: len(store.commits) > before)
        await manager.journal.flush()
        changes = [change for commit in store.commits[before:] for change in commit]
        assert changes
        assert any(isinstance(change, PutPosition) for change in changes)
        assert not any(isinstance(change, PutKernel) for change in changes)


async def test_its_end_is_the_last_that_is_written(engine: FakeEngine) -> None:
    store = LastingStore()
    async with managed(engine, store=store) as manager:
        kernel, _ = await manager.create(CreateRequest(label="mine"), "key", "body")
        execution = await run(kernel, "hello")
        kernel.execute(cell("counts"))
        await manager.delete(kernel.id)
        kernel.record.changed()
        await manager.journal.flush()
        assert await store.kernels() == []
        assert (await store.frames(kernel.id), await store.last_event(kernel.id)) == ([], 0)
        (stone,) = await store.tombstones()
        found = orjson.loads(stone.document)
        assert (found["label"], found["cause"]["code"], found["usage"]["executions"]) == ("mine", "kernel_deleted", 2)
        assert kernel_record.key_of(stone) == ("key", "body")
        assert (await store.execution(kernel.id, execution.id)) is not None
        ends = [
            number for number, commit in enumerate(store.commits) if any(isinstance(change, EndKernel) for change in commit)
        ]
        assert len(ends) == 1
        for commit in store.commits[ends[0] + 1 :]:
            assert not any(isinstance(change, PutKernel | PutPosition | AddFrame) for change in commit)
        with anyio.fail_after(10):
            await kernel.log.finished.wait()


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("idle", "ready"),
        ("busy", "ready"),
        ("interrupting", "ready"),
        ("restarting", "launching"),
        ("dead", "dead"),
        ("stopping", "stopping"),
        ("starting", "before"),
        ("requested", "before"),
        ("recovering", "before"),
    ],
)
def test_what_the_next_gateway_has_to_do(state: str, phase: str) -> None:
    before: Any = "before"
    assert phase_of(KernelState(state), before) == phase


def test_every_state_has_a_meaning_for_the_next_gateway() -> None:
    for state in KernelState:
        for before in ("ready", "launching", "dead", "stopping"):
            assert phase_of(state, before) in ("ready", "launching", "dead", "stopping")
