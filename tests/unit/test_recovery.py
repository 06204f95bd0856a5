"""Kernels that survive their gateway: killed at any moment, the next one goes on where the last commit was.

A gateway that is killed is `doomed` (see tests/unit/kernels.py): its boxes run on, its store is as of the last commit, and nothing
it still does reaches either. The next one is another manager on the same store and the same boxes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson
import pytest

from gateway.errors import (
    GatewayError,
    IdempotencyConflict,
    KernelDead,
    KernelGone,
    KernelUnavailable,
    NotWaitingForInput,
)
from gateway.kernels import kernel_record
from gateway.kernels.archive import ArchivedExecution
from gateway.kernels.box import Box
from gateway.kernels.execution import Execution
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager
from gateway.kernels.state import KernelState
from gateway.kernels.wishes import CreateRequest
from gateway.protocol.events import Event
from gateway.sandboxes.link import Link
from gateway.settings import load
from gateway.store.base import KernelRow, PutKernel
from gateway.testing import Ask, Die, FakeEngine, FakeSandbox, KernelScript, Raise, ScriptedKernel, Sleep, Steps, printed
from tests.unit.kernels import (
    QUICK,
    back,
    box_of,
    cell,
    created,
    doomed,
    ended,
    kill,
    managed,
    process_of,
    quick,
    run,
    states,
    steps,
    successor,
    text,
    types,
)
from tests.unit.stores import LastingStore
from tests.unit.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


def stepping(count: int) -> Callable[[], Steps]:
    """A cell that prints a number and waits until the test lets it go on, with `go_on`."""

    def cell_() -> Steps:
        for number in range(count):
            yield printed(f"{number} ")
            try:
                yield Sleep(math.inf)
            except KeyboardInterrupt:
                continue

    return cell_


def asks() -> Steps:
    name = yield Ask("name? ")
    yield printed(f"hello {name}")


def deaf() -> Steps:
    while True:
        try:
            yield Sleep(math.inf)
        except KeyboardInterrupt:
            continue


CELLS: dict[str, Any] = {
    "hello": [printed("hello")],
    "steps": stepping(5),
    "sleeps": [printed("asleep"), Sleep(math.inf)],
    "flood": [printed(f"{number} ") for number in range(500)],
    "asks": asks,
    "deaf": deaf,
    "fails": [Raise("ValueError", "no")],
    "dies": [Die(signal="SIGSEGV")],
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(KernelScript(cells=CELLS))


@pytest.fixture
def store() -> LastingStore:
    return LastingStore()


def go_on(process: ScriptedKernel) -> None:
    process.interrupt()


async def printed_so_far(execution: Execution, what: str) -> None:
    await until(lambda: what in text(execution), what)


def live(kernel: Kernel, execution_id: str) -> Execution:
    found = kernel.cells.find(execution_id)
    assert found is not None
    return found


# cells


async def test_a_running_cell_goes_on_and_ends_once(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest(label="mine"))
        execution = kernel.execute(cell("steps"))
        await printed_so_far(execution, "0")
        process = process_of(engine, kernel)
        go_on(process)
        await printed_so_far(execution, "1")
        seen: list[Event] = execution.log.since(0)
    # Nobody is there, and it goes on all the same.
    go_on(process)
    go_on(process)
    async with managed(successor(engine), store=store.successor()) as manager:
        assert [found.id for found in manager.list()] == [kernel.id]
        again = await back(manager, kernel.id)
        assert (again.request.label, again.created_at, again.state) == ("mine", kernel.created_at, KernelState.BUSY)
        after = live(again, execution.id)
        assert after.log.since(0)[: len(seen)] == seen
        await printed_so_far(after, "3")
        for _ in range(2):
            go_on(process)
        await ended(after)
        assert (after.status, text(after)) == ("ok", "0 1 2 3 4 ")
        assert [event.seq for event in after.log.since(0)] == [*range(1, after.log.last_seq + 1)]
        assert types(after)[:2] == ["queued", "started"]
        # The same process: its variables are what they were.
        assert process_of(engine, again) is process
        assert (await run(again, "hello")).execution_count == 2
        assert process.codes == ["steps", "hello"]


async def test_a_cell_that_ended_while_nobody_was_there(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("steps"))
        await printed_so_far(execution, "0")
        process = process_of(engine, kernel)
    for _ in range(5):
        go_on(process)
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        after = live(again, execution.id)
        await ended(after)
        assert (after.status, text(after), after.execution_count) == ("ok", "0 1 2 3 4 ", 1)
        assert after.request == execution.request


async def test_queued_cells_run_once(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        running = kernel.execute(cell("steps"))
        waiting = [kernel.execute(cell("hello")) for _ in range(3)]
        await kernel.cancel(waiting[1])
        await waiting[2].stored()
        await printed_so_far(running, "0")
        process = process_of(engine, kernel)
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        assert again.cells.queue_length == 2
        new = again.execute(cell("hello"))
        for _ in range(5):
            go_on(process)
        await ended(new)
        assert process.codes == ["steps", "hello", "hello", "hello"]
        for before in (running, waiting[0], waiting[2]):
            assert (await ended(live(again, before.id)))["status"] == "ok"
        cancelled = await manager.execution(kernel.id, waiting[1].id)
        assert (await cancelled.document())["status"] == "cancelled"
        assert [record["number"] for record in await manager.executions(kernel.id, None, 10)] == [5, 4, 3, 2, 1]


async def test_cells_that_are_asked_for_while_the_sandbox_is_waited_for(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        box_of(engine, kernel).supervisor.redials = False
    async with managed(successor(engine), store=store.successor()) as manager:
        again = manager.get(kernel.id)
        assert again.state is KernelState.RECOVERING
        execution = again.execute(cell("hello"))
        await execution.stored()
        assert not execution.running
        supervisor = box_of(engine, again).supervisor
        supervisor.redials = True
        supervisor.dial()
        await ended(execution)
        assert text(execution) == "hello"


async def test_numbers_go_on_after_a_cell_that_never_ran(engine: FakeEngine, store: LastingStore) -> None:
    """Nothing went over the link for it, and its number is taken all the same."""
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        running = kernel.execute(cell("steps"))
        await printed_so_far(running, "0")
        await manager.journal.flush()
        withdrawn = kernel.execute(cell("hello"))
        await kernel.cancel(withdrawn)
        await withdrawn.done.wait()
        process = process_of(engine, kernel)
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        execution = again.execute(cell("hello"))
        for _ in range(5):
            go_on(process)
        await ended(execution)
        assert (withdrawn.number, execution.number) == (2, 3)


async def test_a_question_is_answered_after_the_restart(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("asks", allow_stdin=True))
        await until(lambda: "input_request" in types(execution))
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        after = live(again, execution.id)
        again.cells.answer(after, "Ada")
        with pytest.raises(NotWaitingForInput):
            again.cells.answer(after, "Ada")
        await ended(after)
        assert text(after) == "hello Ada"
        assert types(after).count("input_request") == 1


async def test_an_answer_that_was_given_is_given_once(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("asks", allow_stdin=True))
        await until(lambda: execution.input_request)
        box_of(engine, kernel).supervisor.redials = False
        box_of(engine, kernel).supervisor.drop()
        kernel.cells.answer(execution, "Ada")
        await manager.journal.flush()
    box = engine.boxes[kernel.id]
    box.supervisor.redials = True
    box.supervisor.dial()
    async with managed(successor(engine), store=store.successor()) as manager:
        after = live(await back(manager, kernel.id), execution.id)
        await ended(after)
        assert text(after) == "hello Ada"


async def test_late_output_is_told_by_the_cell_it_comes_from(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = await run(kernel, "hello")
        process = process_of(engine, kernel)
    process.publish("stream", {"name": "stdout", "text": "late"}, process.requests[0])
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        await until(lambda: [event for event in again.log.since(0) if event.type == "stream"])
        (late,) = [event for event in again.log.since(0) if event.type == "stream"]
        assert late.members == {"name": "stdout", "text": "late", "from_execution": execution.id}
        assert [event.seq for event in again.log.since(0)] == [*range(1, again.log.last_seq + 1)]
        await until(lambda: states(again) == ["starting", "idle", "recovering", "idle"])


async def test_a_flood_is_whole(engine: FakeEngine, store: LastingStore) -> None:
    """Gateway after gateway, each killed in the middle of it."""
    numbers = [step for number in range(400) for step in (printed(f"{number} "), Sleep(0.001))]
    engine.script.cells = {"flood": numbers}
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("flood"))
        await execution.stored()
    for round_ in range(5):
        engine, store = successor(engine), store.successor()
        async with doomed(engine, store) as manager:
            after = live(await back(manager, kernel.id), execution.id)
            await printed_so_far(after, f"{20 * round_ + 5} ")
    async with managed(successor(engine), store=store.successor()) as manager:
        found = await manager.execution(kernel.id, execution.id)
        assert isinstance(found, Execution)
        await ended(found)
        assert text(found) == "".join(f"{number} " for number in range(400))


async def test_what_comes_before_the_gateway_is_ready_for_it_is_not_lost(engine: FakeEngine, store: LastingStore) -> None:
    """An engine listens, then has other things to do before `adopt` returns; the supervisor does not wait for that."""

    class Slow(FakeEngine):
        async def adopt(self, kernel_id: str, make_link: Callable[[], Link]) -> FakeSandbox:
            box = await super().adopt(kernel_id, make_link)
            supervisor = box.supervisor
            supervisor.redials = False
            supervisor.dial()
            await until(lambda: supervisor._socket is None or supervisor.greetings > 1, "an answer to the call")
            supervisor.redials = True
            supervisor.dial()
            return box

    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("steps"))
        await printed_so_far(execution, "0")
        process = process_of(engine, kernel)
    go_on(process)
    go_on(process)
    async with managed(Slow(engine.script, host=engine.host), store=store.successor()) as manager:
        after = live(await back(manager, kernel.id), execution.id)
        for _ in range(3):
            go_on(process)
        await ended(after)
        assert text(after) == "0 1 2 3 4 "


# the ladder


async def test_a_cell_past_its_time_is_stopped_by_the_next_gateway(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("sleeps", timeout=0.5))
        await printed_so_far(execution, "asleep")
    await anyio.sleep(0.5)
    async with managed(successor(engine), store=store.successor()) as manager:
        after = live(await back(manager, kernel.id), execution.id)
        end = await ended(after)
        assert (end["status"], end["cause"]["code"]) == ("timeout", "cell_timeout")
        assert steps(after) == ["interrupt"]


@pytest.mark.parametrize("why", ["timeout", "cancelled"])
async def test_a_ladder_is_climbed_on(engine: FakeEngine, store: LastingStore, why: str) -> None:
    async with doomed(engine, store, quick(interrupt_grace=60.0)) as manager:
        kernel = await created(manager, CreateRequest(on_death="stay"))
        execution = kernel.execute(cell("deaf", timeout=0.02 if why == "timeout" else 60.0))
        await until(lambda: execution.running)
        if why == "cancelled":
            await kernel.cancel(execution)
        await until(lambda: steps(execution))
    async with managed(successor(engine), store=store.successor()) as manager:
        after = live(await back(manager, kernel.id), execution.id)
        end = await ended(after)
        assert end["status"] == ("died" if why == "cancelled" else "timeout")
        assert steps(after)[-1] == "kill_kernel"


@pytest.mark.parametrize("up_to", ["interrupt", "kill_sandbox"])
async def test_an_interrupt_is_climbed_on_as_far_as_it_was_to_go(engine: FakeEngine, store: LastingStore, up_to: Any) -> None:
    async with doomed(engine, store, quick(interrupt_grace=60.0)) as manager:
        kernel = await created(manager, CreateRequest(on_death="stay"))
        execution = kernel.execute(cell("deaf"))
        await until(lambda: execution.running)
        await kernel.interrupt(up_to=up_to)
        await until(lambda: steps(execution))
        await manager.journal.flush()
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        after = live(again, execution.id)
        if up_to == "kill_sandbox":
            assert (await ended(after))["status"] == "died"
            assert steps(after)[-1] == "kill_kernel"
        else:
            await until(lambda: not after.climbing)
            assert again.state in (KernelState.BUSY, KernelState.INTERRUPTING)
            assert set(steps(after)) == {"interrupt"}


# ends


async def test_a_process_that_died_meanwhile(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        running, waiting = kernel.execute(cell("sleeps")), kernel.execute(cell("hello"))
        await printed_so_far(running, "asleep")
    engine.boxes[kernel.id].supervisor.die(Die(signal="SIGSEGV", log="core dumped"))
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        end = await ended(live(again, running.id))
        assert (end["status"], end["cause"]["code"], end["cause"]["log"]) == ("died", "signal", "core dumped")
        assert (await ended(live(again, waiting.id)))["status"] == "aborted"
        assert again.state is KernelState.DEAD
        assert not again.gone
        revived = await run(again, "hello")
        assert types(revived)[0] == "warning"
        assert (revived.status, text(revived)) == ("ok", "hello")


@pytest.mark.parametrize("how", ["vanished", "ended"])
async def test_a_box_that_is_gone_ends_its_kernel(engine: FakeEngine, store: LastingStore, how: str) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        other = await created(manager, CreateRequest())
        running, waiting = kernel.execute(cell("sleeps")), kernel.execute(cell("hello"))
        await printed_so_far(running, "asleep")
    if how == "vanished":
        engine.boxes[kernel.id].vanish()
    else:
        engine.boxes[kernel.id].end(3)
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        code = "sandbox_removed" if how == "vanished" else "lifetime"
        after = live(again, running.id)
        end = await ended(after)
        assert (end["status"], end["cause"]["code"], end["variables"]) == ("died", code, "lost")
        assert [warning["code"] for warning in after.result()["warnings"]] == ["output_may_be_missing"]
        last = live(again, waiting.id)
        assert ((await ended(last))["status"], last.result()["warnings"]) == ("aborted", [])
        assert (again.state, again.gone) == (KernelState.DEAD, True)
        with pytest.raises(KernelDead):
            again.execute(cell("hello"))
        assert (await run(await back(manager, other.id), "hello")).status == "ok"
        await until(lambda: set(engine.boxes) == {other.id})


async def test_a_box_whose_supervisor_never_calls(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
    engine.boxes[kernel.id].supervisor.freeze()
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        assert again.cause is not None
        assert again.cause["code"] == "sandbox_unreachable"
        await until(lambda: engine.boxes == {})


async def test_a_dead_kernel_stays_dead_with_its_cause(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        stays, revives, gone = [await created(manager, CreateRequest(on_death=how)) for how in ("stay", "restart", "restart")]
        for kernel in (stays, revives):
            await run(kernel, "dies")
        box_of(engine, gone).vanish()
        await until(lambda: gone.gone)
        await manager.journal.flush()
    for _ in range(2):
        engine, store = successor(engine), store.successor()
        async with doomed(engine, store) as manager:
            for kernel, code in ((stays, "signal"), (revives, "signal"), (gone, "sandbox_removed")):
                again = manager.get(kernel.id)
                assert again.state is KernelState.DEAD
                assert again.cause is not None
                assert again.cause["code"] == code
            assert manager.get(gone.id).gone
            await until(lambda: manager.get(revives.id)._may_revive())
            assert not manager.get(stays.id).gone
            with pytest.raises(KernelDead, match="SIGSEGV"):
                manager.get(stays.id).execute(cell("hello"))
    engine, store = successor(engine), store.successor()
    async with managed(engine, store=store) as manager:
        again = manager.get(revives.id)
        await until(lambda: box_of(engine, again).link.connected.is_set())
        assert text(await run(again, "hello")) == "hello"
        await manager.get(stays.id).restart()
        assert text(await run(manager.get(stays.id), "hello")) == "hello"


async def test_boxes_that_cannot_be_taken_over_end_with_the_reason(engine: FakeEngine, store: LastingStore) -> None:
    engine.adopts = False
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        running, waiting = kernel.execute(cell("sleeps")), kernel.execute(cell("hello"))
        await printed_so_far(running, "asleep")
    after_it = successor(engine)
    after_it.adopts = False
    async with managed(after_it, store=store.successor()) as manager:
        again = manager.get(kernel.id)
        assert (again.state, again.gone) == (KernelState.DEAD, True)
        end = await ended(live(again, running.id))
        assert (end["status"], end["cause"]["code"]) == ("died", "gateway_restarted")
        assert text(live(again, running.id)) == "asleep"
        assert (await ended(live(again, waiting.id)))["status"] == "aborted"
        # Nothing is left of the box, although the kernel stays listed.
        await until(lambda: engine.boxes == {})
        assert manager.list() == [again]


async def test_an_engine_that_does_not_answer_at_the_start(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("steps"))
        await printed_so_far(execution, "0")
        process = process_of(engine, kernel)
    after_it = successor(engine)
    after_it.available = False
    async with managed(after_it, quick(reconcile_interval=0.01), store.successor()) as manager:
        assert manager.degraded == "engine_unavailable"
        again = await back(manager, kernel.id)
        for _ in range(5):
            go_on(process)
        await ended(live(again, execution.id))
        assert text(live(again, execution.id)) == "0 1 2 3 4 "
        after_it.available = True
        await until(lambda: manager.degraded is None)


# under way


async def test_a_restart_under_way_is_finished(engine: FakeEngine, store: LastingStore) -> None:
    async with (
        doomed(engine, store, quick(specs={"python3": {"start_timeout": 60.0}})) as manager,
        anyio.create_task_group() as tasks,
    ):
        kernel = await created(manager, CreateRequest())
        old = process_of(engine, kernel)
        running = kernel.execute(cell("sleeps"))
        await printed_so_far(running, "asleep")
        engine.script.answers_info = False
        tasks.start_soon(ignoring, kernel.restart)
        await until(lambda: box_of(engine, kernel).supervisor.kernel is not old)
        await running.done.wait()
        kill(engine, store)
        tasks.cancel_scope.cancel()
    engine.script.answers_info = True
    # The old process was ended for the new one, and that was not told yet.
    engine.boxes[kernel.id].supervisor.event({"event": "kernel_exit", "pid": 1, "code": None, "signal": "SIGKILL"})
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        assert again.state is KernelState.IDLE
        assert (await (await manager.execution(kernel.id, running.id)).document())["cause"]["code"] == "kernel_restarted"
        execution = await run(again, "hello")
        assert (execution.status, execution.execution_count) == ("ok", 1)


async def ignoring(call: Callable[[], Any]) -> None:
    try:
        await call()
    except GatewayError:
        return


async def test_a_cell_that_was_to_revive_its_kernel_does_so(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store, quick(specs={"python3": {"start_timeout": 60.0}})) as manager:
        kernel = await created(manager, CreateRequest())
        await run(kernel, "dies")
        engine.script.answers_info = False
        execution = kernel.execute(cell("hello"))
        await execution.stored()
    engine.script.answers_info = True
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        after = live(again, execution.id)
        await ended(after)
        assert (after.status, text(after), types(after)[0]) == ("ok", "hello", "warning")


async def test_a_restart_that_fails_after_all_leaves_a_dead_kernel(engine: FakeEngine, store: LastingStore) -> None:
    async with (
        doomed(engine, store, quick(specs={"python3": {"start_timeout": 60.0}})) as manager,
        anyio.create_task_group() as tasks,
    ):
        kernel = await created(manager, CreateRequest())
        old = process_of(engine, kernel)
        engine.script.answers_info = False
        tasks.start_soon(ignoring, kernel.restart)
        await until(lambda: box_of(engine, kernel).supervisor.kernel is not old)
        kill(engine, store)
        tasks.cancel_scope.cancel()
    engine.script.answers_info = True
    engine.script.refuses_start = "no"
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        assert again.state is KernelState.DEAD
        assert again.cause is not None
        assert again.cause["code"] == "restart_failed"


async def test_a_delete_under_way_is_finished(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager, anyio.create_task_group() as tasks:
        kernel = await created(manager, CreateRequest(label="mine"))
        running = kernel.execute(cell("sleeps"))
        await printed_so_far(running, "asleep")

        def after(_number: int) -> None:
            if kernel.state is KernelState.STOPPING:
                kill(engine, store)

        store.after = after
        tasks.start_soon(manager.delete, kernel.id)
        await until(lambda: store.dead)
        tasks.cancel_scope.cancel()
    assert kernel.id in engine.boxes
    async with managed(successor(engine), quick(reconcile_interval=0.01), store.successor()) as manager:
        await until(lambda: manager.list() == [])
        await until(lambda: engine.boxes == {})
        with pytest.raises(KernelGone) as gone:
            manager.get(kernel.id)
        assert (gone.value.members["cause"]["code"], gone.value.members["label"]) == ("kernel_deleted", "mine")
        found = await manager.execution(kernel.id, running.id)
        assert (await found.document())["cause"]["code"] == "kernel_deleted"


# time


async def test_idle_time_starts_anew_and_the_lifetime_goes_on(
    engine: FakeEngine, store: LastingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_record, "_FIGURES_AGE", 0.0)
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest(lifetime=1000.0))
        await kernel.extend(2000.0)
        await run(kernel, "hello")
        await manager.journal.flush()
        expires, activity, touched = kernel.expires_at, kernel.last_activity, anyio.current_time()
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        candidate = again.candidate()
        assert candidate.idle_since >= touched
        assert again.expires_at == expires
        assert again.last_activity == activity
        assert candidate.lifetime == kernel.lifetime
        assert abs(again.age - (time.time() - kernel.created)) < 1.0
        supervisor = box_of(engine, again).supervisor
        assert abs(supervisor._timers["lifetime"].when() - anyio.current_time() - 2000.0) < 60.0


async def test_a_lifetime_that_is_over_ends_the_kernel(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest(lifetime=1000.0))
    (row,) = await store.kernels()
    row = KernelRow(row.id, row.created_at - 2000.0, row.document, row.key, row.fingerprint, row.received, row.sent)
    store = store.successor()
    await store.commit([PutKernel(row)])
    async with managed(successor(engine), store=store) as manager:

        def over() -> bool:
            return manager.list() == [] or manager.get(kernel.id).gone

        await until(over)


async def test_usage_and_counts_go_on(engine: FakeEngine, store: LastingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_record, "_FIGURES_AGE", 0.0)
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        box_of(engine, kernel).supervisor.event({"event": "usage", "cpu_seconds": 1.5, "memory_used": 7, "memory_peak": 9})
        for _ in range(3):
            await run(kernel, "hello")
        await manager.journal.flush()
        usage = kernel.usage()
    assert usage["cpu_seconds"] == 1.5
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        assert again.usage() == usage
        assert again.cells.execution_count == 3
        assert (await run(again, "hello")).number == 4


async def test_numbers_are_right_though_figures_are_stored_seldom(
    engine: FakeEngine, store: LastingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_record, "_FIGURES_AGE", math.inf)
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        for _ in range(3):
            last = await run(kernel, "hello")
    async with doomed(engine := successor(engine), store := store.successor()) as manager:
        again = await back(manager, kernel.id)
        assert again.cells.execution_count == 3
        assert again.cells.last == {"execution_id": last.id, "status": "ok", "ended": last.end}
        assert (await run(again, "hello")).number == 4
        await again.restart()
    async with managed(successor(engine), store=store.successor()) as manager:
        again = await back(manager, kernel.id)
        assert again.cells.execution_count == 0
        assert (await run(again, "hello")).number == 5


async def test_what_is_known_of_the_last_cell_outlives_two_gateways(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        last = await run(kernel, "hello")
    async with managed(successor(engine), store=store.successor()) as manager:
        await back(manager, kernel.id)
        await manager.delete(kernel.id)
        with pytest.raises(KernelGone) as gone:
            manager.get(kernel.id)
        assert gone.value.members["last_execution"] == {"execution_id": last.id, "status": "ok", "ended": last.end}


# asked of a kernel whose sandbox has not called yet


async def test_a_delete_does_not_wait_for_the_sandbox(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        box_of(engine, kernel).supervisor.redials = False
    settings = load(**{**QUICK, "link": {**QUICK["link"], "lost_timeout": 3600.0}})
    async with managed(successor(engine), settings, store.successor()) as manager:
        assert manager.get(kernel.id).state is KernelState.RECOVERING
        with anyio.fail_after(PATIENCE):
            await manager.delete(kernel.id)
        assert engine.boxes == {}


async def test_a_cell_is_cancelled_and_no_question_answered_before_the_sandbox_calls(
    engine: FakeEngine, store: LastingStore
) -> None:
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("asks", allow_stdin=True))
        await until(lambda: "input_request" in types(execution))
        supervisor = box_of(engine, kernel).supervisor
        supervisor.redials = False
    async with managed(successor(engine), store=store.successor()) as manager:
        again = manager.get(kernel.id)
        after = live(again, execution.id)
        with pytest.raises(KernelUnavailable):
            await again.answer(after, "Ada")
        with pytest.raises(KernelUnavailable):
            await again.interrupt()
        await again.cancel(after)
        supervisor.redials = True
        supervisor.dial()
        await ended(after)
        assert after.status == "cancelled"


# keys


async def test_keys_are_known_afterwards(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernel, _ = await manager.create(CreateRequest(), "create", "body")
        gone, _ = await manager.create(CreateRequest(), "create gone", "body")
        done, _ = await kernel.submit(cell("hello"), "done", "body")
        running, _ = await kernel.submit(cell("sleeps"), "running", "body")
        await running.stored()
        await manager.delete(gone.id)
        await manager.journal.flush()
    async with managed(successor(engine), store=store.successor()) as manager:
        again, replayed = await manager.create(CreateRequest(), "create", "body")
        assert (again.id, replayed) == (kernel.id, True)
        with pytest.raises(IdempotencyConflict):
            await manager.create(CreateRequest(), "create", "another body")
        with pytest.raises(KernelGone) as error:
            await manager.create(CreateRequest(), "create gone", "body")
        assert error.value.members["kernel_id"] == gone.id
        with pytest.raises(IdempotencyConflict):
            await manager.create(CreateRequest(), "create gone", "another body")
        await back(manager, kernel.id)
        for key, before in (("done", done), ("running", running)):
            found, replayed = await again.submit(cell("hello"), key, "body")
            assert (found.id, replayed) == (before.id, True)
            with pytest.raises(IdempotencyConflict):
                await again.submit(cell("hello"), key, "another body")
        assert isinstance((await again.submit(cell("hello"), "done", "body"))[0], ArchivedExecution)
        _, replayed = await again.submit(cell("hello"), "new", "body")
        assert not replayed
        assert engine.created == 2
        assert process_of(engine, again).codes == ["hello", "sleeps"]


async def test_a_key_whose_create_failed_is_free_and_leads_to_the_kernel_that_it_made_later(
    engine: FakeEngine, store: LastingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.kernels.journal._RETRY", 0.005)
    async with doomed(engine, store) as manager:
        kept, _ = await manager.create(CreateRequest(), "other", "body")
        store.failing = True
        with pytest.raises(GatewayError):
            await manager.create(CreateRequest(), "key", "body")
        assert set(engine.boxes) == {kept.id}
        store.failing = False
        await until(lambda: manager.journal.failure is None)
        kernel, replayed = await manager.create(CreateRequest(), "key", "body")
        assert not replayed
        await manager.journal.flush()
    async with managed(successor(engine), store=store.successor()) as manager:
        again, replayed = await manager.create(CreateRequest(), "key", "body")
        assert (again.id, replayed) == (kernel.id, True)


# records


async def test_an_unreadable_record_is_buried_and_the_others_live(engine: FakeEngine, store: LastingStore) -> None:
    async with doomed(engine, store) as manager:
        kernels = [await created(manager, CreateRequest()) for _ in range(3)]
        await manager.journal.flush()
    rows = {row.id: row for row in await store.kernels()}
    document = orjson.loads(rows[kernels[0].id].document)
    damaged = [b"nonsense", b"null", b"[]", b"7", b"{}"]
    damaged += [orjson.dumps({name: value for name, value in document.items() if name != left_out}) for left_out in document]
    damaged += [
        orjson.dumps({**document, name: wrong}) for name in ("spec", "limits", "usage", "process") for wrong in (7, [1], "x")
    ]
    store = store.successor()
    for number, broken in enumerate(damaged):
        await store.commit([PutKernel(KernelRow(f"broken{number}", float(number), broken, f"key{number}", "print", 0, 0))])
    engine = successor(engine)
    async with managed(engine, store=store) as manager:
        assert {kernel.id for kernel in manager.list()} == {kernel.id for kernel in kernels}
        for number in range(len(damaged)):
            with pytest.raises(KernelGone) as gone:
                manager.get(f"broken{number}")
            assert gone.value.members["cause"]["code"] == "internal_error"
            with pytest.raises(KernelGone):
                await manager.create(CreateRequest(), f"key{number}", "print")
        for kernel in kernels:
            assert (await run(await back(manager, kernel.id), "hello")).status == "ok"


# death at every moment


@dataclass
class Client:
    """What somebody was told, and so may rely on."""

    kernel_id: str | None = None
    executions: dict[str, str] = field(default_factory=dict)
    """Ids by key: these are known to be stored."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    restarted = deleting = deleted = done = unanswered = False

    async def play(self, manager: KernelManager) -> None:
        """A create, three cells, a restart, a cell, a delete; each with its key, so it can be played again from the start."""
        kernel, _ = await manager.create(CreateRequest(), "create", "f")
        self.kernel_id = kernel.id
        for key in ("a", "b", "c"):
            await self.ask(kernel, key)
        await self.collect(manager)
        if not self.restarted:
            await kernel.restart()
            self.restarted = True
        await self.ask(kernel, "d")
        await self.collect(manager)
        self.deleting = True
        await manager.delete(kernel.id)
        # Of a gateway that has died meanwhile no answer comes.
        self.deleted = self.done = not self.unanswered

    async def ask(self, kernel: Kernel, key: str) -> None:
        execution, _ = await kernel.submit(cell(key, stop_on_error=False), key, "f")
        await execution.stored()
        assert self.executions.setdefault(key, execution.id) == execution.id

    async def collect(self, manager: KernelManager) -> None:
        for key, execution_id in self.executions.items():
            found = await manager.execution(str(self.kernel_id), execution_id)
            if isinstance(found, Execution):
                await found.done.wait()
            result = await found.document()
            before = self.results.setdefault(key, result)
            assert {**before, "duration": 0} == {**result, "duration": 0}


def scripted(ran: list[str]) -> FakeEngine:
    def steps_of(code: str) -> Any:
        ran.append(code)
        return [printed(f"{code}1 "), Sleep(0.001), printed(f"{code}2 ")]

    return FakeEngine(KernelScript(cells=steps_of))


async def dying(number: int, when: str) -> bool:
    """Plays until the gateway dies at this commit, then goes on with the next gateway; False when the script ended before."""
    ran: list[str] = []
    engine, store, client = scripted(ran), LastingStore(), Client()
    died = anyio.Event()

    def die(commit: int) -> None:
        if commit == number:
            kill(engine, store)
            client.unanswered = True
            died.set()

    setattr(store, when, die)
    async with doomed(engine, store, PATIENT) as manager, anyio.create_task_group() as tasks:

        async def play() -> None:
            # Its requests hang or fail when the gateway is dead.
            try:
                await client.play(manager)
            except GatewayError:
                assert died.is_set()
                return
            tasks.cancel_scope.cancel()

        tasks.start_soon(play)
        await died.wait()
        tasks.cancel_scope.cancel()
    client.unanswered = False
    async with managed(successor(engine), PATIENT, store.successor()) as manager:
        await settled(manager)
        await check(manager, engine, client, ran)
    return died.is_set()


PATIENT = quick(specs={"python3": {"start_timeout": 10.0}}, reconcile_interval=0.01)


async def settled(manager: KernelManager) -> None:
    waiting = (KernelState.RECOVERING, KernelState.RESTARTING, KernelState.STOPPING)
    await until(lambda: all(kernel.state not in waiting for kernel in manager.list()), "the kernels")


async def check(manager: KernelManager, engine: FakeEngine, client: Client, ran: list[str]) -> None:
    """Nothing that was told is lost, nothing is there that nobody knows, nothing runs twice."""
    await until(lambda: {kernel.id for kernel in manager.list()} == set(engine.boxes), "a box for each kernel, and no other,")
    assert all(kernel.state is KernelState.IDLE or kernel.cells.current for kernel in manager.list())
    if client.kernel_id is not None and not client.deleting:
        manager.get(client.kernel_id)
    if client.deleted:
        with pytest.raises(KernelGone):
            manager.get(str(client.kernel_id))
    await client.collect(manager)
    restarting = client.restarted or len(client.results) > 3
    try:
        await client.play(manager)
    except KernelGone:
        assert client.deleting
    else:
        assert client.done
    assert engine.boxes == {}
    # What was asked again with its key has run once all the same; a restart may have come between.
    assert len(set(ran)) == len(ran)
    for key, result in client.results.items():
        assert result["status"] in ("ok", "died", "aborted")
        if result["status"] == "ok":
            assert result["outputs"] == [{"output_type": "stream", "name": "stdout", "text": f"{key}1 {key}2 "}]
            assert key in ran
        else:
            assert restarting or key == "d"
            assert result["cause"]["code"] in ("kernel_restarted", "kernel_deleted")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_death_at_every_commit(when: str) -> None:
    number = 1
    while await dying(number, when):
        number += 1
    assert number > 9


# let go


async def test_letting_go_does_not_hurry_who_is_on_the_ladder(engine: FakeEngine, store: LastingStore) -> None:
    """Whoever waits for the cell is released; whoever makes it stop is not told that its grace is over."""
    settings = quick(interrupt_grace=600.0)
    async with anyio.create_task_group() as tasks:
        manager = KernelManager(settings, engine, store=store)
        await tasks.start(manager.run)
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("deaf"))
        await kernel.interrupt()
        await until(lambda: steps(execution) == ["interrupt"])
        process = process_of(engine, kernel)
        await manager.detach_all()
        await execution.log.settled.wait()
        assert not execution.done.is_set()
        assert steps(execution) == ["interrupt"]
        tasks.cancel_scope.cancel()
    async with managed(successor(engine), settings, store.successor()) as again:
        assert process_of(engine, await back(again, kernel.id)) is process


async def test_a_box_that_the_first_look_misses_is_told_of_too(
    engine: FakeEngine, store: LastingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds out first that the box is gone: that output may be missing is said."""
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
        execution = kernel.execute(cell("sleeps"))
        await until(lambda: "started" in types(execution))
    engine.boxes[kernel.id].vanish()

    async def never(*_: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(Box, "reach", never)
    async with managed(successor(engine), store=store.successor()) as manager:
        after = live(manager.get(kernel.id), execution.id)
        await ended(after)
        assert [warning["code"] for warning in after.result()["warnings"]] == ["output_may_be_missing"]
