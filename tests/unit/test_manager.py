"""The one who keeps the kernels: exact limits under parallel requests, look-up, ends, and what is remembered of them."""

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from gateway.errors import (
    KernelGone,
    KernelNotFound,
    LimitExceeded,
    NoCapacity,
    ShuttingDown,
    SpecNotFound,
    StartFailed,
    StoreUnavailable,
    TooManyKernels,
)
from gateway.kernels import journal as journal_module
from gateway.kernels import manager as manager_module
from gateway.kernels.execution import Execution
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager
from gateway.kernels.wishes import CreateRequest
from gateway.settings import MIB
from gateway.testing import Die, FakeEngine, KernelScript, Raise, Sleep, printed
from tests.unit.kernels import (
    back,
    box_of,
    cell,
    created,
    doomed,
    ended,
    managed,
    process_of,
    quick,
    run,
    successor,
    text,
    types,
)
from tests.unit.stores import LastingStore
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio

CELLS: dict[str, Any] = {
    "hello": [printed("hello")],
    "naps": [Sleep(0.05)],
    "sleeps": [Sleep(600)],
    "fails": [Raise("E")],
    "dies": [Die(signal="SIGKILL")],
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(KernelScript(cells=CELLS))


async def create_many(manager: KernelManager, count: int) -> tuple[list[Kernel], list[Exception]]:
    """So many creates at once."""
    kernels: list[Kernel] = []
    failures: list[Exception] = []

    async def create() -> None:
        try:
            kernels.append(await created(manager, CreateRequest()))
        except Exception as error:  # noqa: BLE001  # looked at by the caller
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(create)
    return kernels, failures


# limits


@pytest.mark.parametrize("limit", [1, 7, 50])
async def test_parallel_creates_meet_the_limit_exactly(engine: FakeEngine, limit: int) -> None:
    async with managed(engine, quick(max_kernels=limit)) as manager:
        kernels, failures = await create_many(manager, 50)
        assert len(kernels) == limit
        assert {type(failure) for failure in failures} <= {TooManyKernels}
        assert engine.created == limit
        assert {kernel.id for kernel in manager.list()} == set(engine.boxes)
        if limit < 50:
            await manager.delete(kernels[0].id)
            await created(manager, CreateRequest())
            with pytest.raises(TooManyKernels):
                await created(manager, CreateRequest())


async def test_a_failed_start_gives_its_place_back(engine: FakeEngine) -> None:
    async with managed(engine, quick(max_kernels=3)) as manager:
        engine.script.start = Die(code=1)
        for _ in range(3):
            kernels, failures = await create_many(manager, 3)
            assert kernels == []
            assert {type(failure) for failure in failures} == {StartFailed}
        engine.script.start = None
        kernels, failures = await create_many(manager, 3)
        assert (len(kernels), failures) == (3, [])


async def test_starts_wait_for_each_other(engine: FakeEngine) -> None:
    under_way = most = 0

    async def before_create() -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await anyio.sleep(0.005)
        under_way -= 1

    engine.before_create = before_create
    async with managed(engine, quick(max_parallel_starts=3)) as manager:
        kernels, failures = await create_many(manager, 20)
        assert (len(kernels), failures, most) == (20, [], 3)


async def test_a_dead_kernel_keeps_its_place_while_its_box_is_there(engine: FakeEngine) -> None:
    async with managed(engine, quick(max_kernels=1)) as manager:
        kernel = await created(manager, CreateRequest(on_death="stay"))
        await run(kernel, "dies")
        assert kernel.state == "dead"
        with pytest.raises(TooManyKernels):
            await created(manager, CreateRequest())
        box_of(engine, kernel).vanish()
        await until(lambda: kernel.gone)
        await created(manager, CreateRequest())


async def test_memory_is_promised_only_once(engine: FakeEngine) -> None:
    settings = quick(memory_overcommit=1.0)
    engine.memory = 3 * 1024 * MIB
    async with managed(engine, settings) as manager:
        manager._memory = engine.memory
        kernels, failures = await create_many(manager, 5)
        assert len(kernels) == 3
        assert {type(failure) for failure in failures} == {NoCapacity}


@pytest.mark.parametrize(
    "request_",
    [
        CreateRequest(memory=1),
        CreateRequest(memory=1 << 50),
        CreateRequest(cpus=1000.0),
        CreateRequest(pids=3),
        CreateRequest(lifetime=1e12),
        CreateRequest(idle_timeout=1e12),
    ],
)
async def test_wishes_above_a_maximum_are_refused_before_anything_is_made(engine: FakeEngine, request_: CreateRequest) -> None:
    async with managed(engine) as manager:
        with pytest.raises(LimitExceeded):
            await created(manager, request_)
        assert (manager.list(), engine.created) == ([], 0)


async def test_an_unknown_spec_is_refused(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        with pytest.raises(SpecNotFound, match="'r'"):
            await created(manager, CreateRequest(spec="r"))


# look-up


async def test_kernels_are_found_by_their_id(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernels, _ = await create_many(manager, 3)
        assert {kernel.id for kernel in manager.list()} == {kernel.id for kernel in kernels}
        assert all(manager.get(kernel.id) is kernel for kernel in kernels)
        for wrong in ("", "x", "x" * 10_000, kernels[0].id.upper()):
            with pytest.raises(KernelNotFound) as error:
                manager.get(wrong)
            assert len(error.value.detail) < 200


async def test_of_an_ended_kernel_its_end_is_remembered(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernel = await created(manager, CreateRequest(label="mine"))
        execution = await run(kernel, "fails")
        await manager.delete(kernel.id)
        assert manager.list() == []
        for ask in (manager.get, lambda kernel_id: manager._tombstones.check(kernel_id)):
            with pytest.raises(KernelGone, match="deleted") as gone:
                ask(kernel.id)
            members = gone.value.members
            assert (members["kernel_id"], members["label"], members["cause"]["code"]) == (kernel.id, "mine", "kernel_deleted")
            assert members["last_execution"]["execution_id"] == execution.id
            assert members["last_execution"]["status"] == "error"
        with pytest.raises(KernelGone):
            await manager.delete(kernel.id)


async def test_two_deletes_at_once(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernel = await created(manager, CreateRequest())
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(manager.delete, kernel.id)
        assert engine.boxes == {}


async def test_a_kernel_that_died_first_is_deleted_with_its_own_cause(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernel = await created(manager, CreateRequest(on_death="stay"))
        await run(kernel, "dies")
        await manager.delete(kernel.id)
        with pytest.raises(KernelGone) as gone:
            manager.get(kernel.id)
        assert gone.value.members["cause"]["code"] == "signal"


async def test_the_dead_are_forgotten_beyond_the_bound(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "_KEPT_DEAD", 3)
    async with managed(engine) as manager:
        dead: list[Kernel] = []
        for _ in range(6):
            dead.append(await created(manager, CreateRequest()))
            box_of(engine, dead[-1]).vanish()
            await until(lambda: dead[-1].gone)
        living = await created(manager, CreateRequest())
        assert manager.list() == [*dead[-3:], living]
        for kernel in dead[:3]:
            assert kernel.log.closed
            with pytest.raises(KernelGone, match="removed from outside"):
                manager.get(kernel.id)
        assert all(manager.get(kernel.id).cause is not None for kernel in dead[3:])


# the end


async def test_stop_all_ends_everything_at_once(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernels, _ = await create_many(manager, 10)
        executions = [kernel.execute(cell("sleeps")) for kernel in kernels]
        await manager.stop_all()
        assert engine.boxes == {}
        for execution in executions:
            assert (await ended(execution))["cause"]["code"] == "gateway_stopped"
        assert all(kernel.log.closed for kernel in kernels)
        with pytest.raises(ShuttingDown):
            await created(manager, CreateRequest())


async def test_stop_all_breaks_off_starts(engine: FakeEngine) -> None:
    engine.script.answers_info = False
    async with (
        managed(engine, quick(specs={"python3": {"start_timeout": 60.0}})) as manager,
        anyio.create_task_group() as tasks,
    ):
        failures: list[Exception] = []

        async def create() -> None:
            failures.extend((await create_many(manager, 3))[1])

        tasks.start_soon(create)
        await until(lambda: len(engine.boxes) == 3)
        with anyio.fail_after(5):
            await manager.stop_all()
        await until(lambda: len(failures) == 3)
        assert {type(failure) for failure in failures} == {StartFailed}
        assert engine.boxes == {}


async def test_stop_all_with_an_engine_that_does_not_answer(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernels, _ = await create_many(manager, 3)
        engine.available = False
        await manager.stop_all()
        assert all(kernel.state == "dead" for kernel in kernels)


async def test_a_drain_lets_cells_end_and_takes_no_new_ones(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernel = await created(manager, CreateRequest())
        running, waiting = kernel.execute(cell("naps")), kernel.execute(cell("hello"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.drain, 10.0)
            await until(lambda: kernel.draining)
            with pytest.raises(ShuttingDown):
                kernel.execute(cell("hello"))
            with pytest.raises(ShuttingDown):
                await created(manager, CreateRequest())
        assert (running.status, waiting.status, text(waiting)) == ("ok", "ok", "hello")


async def test_a_drain_does_not_wait_for_ever(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("sleeps"))
        with anyio.fail_after(5):
            await manager.drain(0.05)
        assert not execution.ended


async def test_kernels_do_not_disturb_each_other(engine: FakeEngine) -> None:
    """One dies, one is restarted, one is deleted, one breaks its link; the rest goes on."""
    async with managed(engine) as manager:
        kernels, _ = await create_many(manager, 6)
        executions = [kernel.execute(cell("naps")) for kernel in kernels]
        box_of(engine, kernels[0]).end(137)
        box_of(engine, kernels[1]).supervisor.drop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kernels[2].restart)
            tasks.start_soon(manager.delete, kernels[3].id)
        assert [(await ended(execution))["status"] for execution in executions] == ["died", "ok", "died", "died", "ok", "ok"]
        for kernel in (kernels[1], kernels[2], kernels[4], kernels[5]):
            assert (await run(kernel, "hello")).status == "ok"


# letting go


async def test_kernels_that_are_let_go_wait_for_the_next_gateway(engine: FakeEngine) -> None:
    store = LastingStore()
    async with doomed(engine, store) as manager:
        kernels, _ = await create_many(manager, 3)
        running, waiting = kernels[0].execute(cell("naps")), kernels[0].execute(cell("hello"))
        await waiting.stored()
        processes = [process_of(engine, kernel) for kernel in kernels]
        assert not manager.leaving.is_set()
        await manager.detach_all()
        assert manager.leaving.is_set()
        with pytest.raises(ShuttingDown):
            await created(manager, CreateRequest())
        with pytest.raises(ShuttingDown):
            kernels[0].execute(cell("hello"))
        assert len(engine.boxes) == 3
    async with managed(successor(engine), store=store.successor()) as manager:
        for kernel, process in zip(kernels, processes, strict=True):
            again = await back(manager, kernel.id)
            assert again.alive
            assert process_of(engine, again) is process
        for execution in (running, waiting):
            after = await manager.execution(kernels[0].id, execution.id)
            if isinstance(after, Execution):
                await ended(after)
            assert (await after.document())["status"] == "ok"
        assert processes[0].codes == ["naps", "hello"]


@pytest.mark.parametrize("pause", range(6))
async def test_what_was_just_asked_for_is_done_by_the_next_gateway(engine: FakeEngine, pause: int) -> None:
    """The request was made and neither stored nor sent when the kernels were let go."""
    store = LastingStore()
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        await run(kernel, "hello")
        execution = kernel.execute(cell("hello"))
        for _ in range(pause):
            await anyio.lowlevel.checkpoint()
        await manager.detach_all()
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        assert again.alive
        found = await manager.execution(kernel.id, execution.id)
        if isinstance(found, Execution):
            await ended(found)
        assert (await found.document())["outputs"] == [{"output_type": "stream", "name": "stdout", "text": "hello"}]
        assert process_of(engine, again).codes == ["hello", "hello"]


async def test_outputs_on_their_way_are_told_once(engine: FakeEngine) -> None:
    engine.script.cells = {"counts": [step for n in range(200) for step in (printed(f"{n} "), Sleep(0.001))]}
    store = LastingStore()
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("counts"))
        await until(lambda: "10 " in text(execution))
        await manager.detach_all()
    async with managed(successor(engine), store=store.successor()) as manager:
        after = (await back(manager, kernel.id)).cells.get(execution.id)
        await ended(after)
        assert text(after) == "".join(f"{n} " for n in range(200))
        assert types(after).count("ended") == 1


async def test_a_kernel_that_is_half_made_ends_when_the_others_are_let_go(engine: FakeEngine) -> None:
    store = LastingStore()
    async with doomed(engine, store, quick(specs={"python3": {"start_timeout": 60.0}})) as manager:
        kept = await created(manager, CreateRequest())
        engine.script.answers_info = False
        async with anyio.create_task_group() as tasks:
            failures: list[Exception] = []

            async def create() -> None:
                failures.extend((await create_many(manager, 1))[1])

            tasks.start_soon(create)
            await until(lambda: len(engine.boxes) == 2)
            await manager.detach_all()
        assert [type(failure) for failure in failures] == [StartFailed]
        assert set(engine.boxes) == {kept.id}
    engine.script.answers_info = True
    async with managed(successor(engine), store=store.successor()) as manager:
        assert [kernel.id for kernel in manager.list()] == [kept.id]


@pytest.mark.parametrize("why", ["memory", "stdin"])
async def test_kernels_that_could_not_be_taken_up_again_are_stopped(engine: FakeEngine, why: str) -> None:
    store = LastingStore()
    store.durable = why != "memory"
    engine.adopts = why != "stdin"
    async with managed(engine, store=store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("sleeps"))
        await manager.detach_all()
        assert (await ended(execution))["cause"]["code"] == "gateway_stopped"
        assert (engine.boxes, manager.list()) == ({}, [])
        assert not manager.leaving.is_set()


async def test_with_a_store_that_fails_new_work_is_refused_and_what_runs_goes_on(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY", 0.005)
    store = LastingStore()
    async with managed(engine, store=store) as manager:
        kernel = await created(manager, CreateRequest())
        running, waiting = kernel.execute(cell("naps")), kernel.execute(cell("hello"))
        await waiting.stored()
        store.failing = True
        manager.journal.changed(kernel.record)
        await until(lambda: manager.degraded == "store_unavailable")
        for refused in (lambda: created(manager, CreateRequest()), kernel.restart):
            with pytest.raises(StoreUnavailable):
                await refused()
        with pytest.raises(StoreUnavailable):
            kernel.execute(cell("hello"))
        assert kernel.alive
        store.failing = False
        assert (await ended(waiting))["status"] == (await ended(running))["status"] == "ok"
        assert manager.degraded is None
        assert process_of(engine, kernel).codes == ["naps", "hello"]
        assert (await run(kernel, "hello")).status == "ok"
