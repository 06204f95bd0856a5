"""One kernel over its life, in scripted sandboxes: each way to start, to fail, to be stopped, to be lost and to come back.

Everything above the engine is real: link, frames, signed messages, queue, ladder, task groups. What the box does is a script.
"""

import asyncio
import math
from functools import partial
from typing import Any

import anyio
import pytest

from gateway.errors import (
    EngineUnavailable,
    GatewayError,
    ImageMissing,
    KernelDead,
    KernelGone,
    KernelUnavailable,
    StartFailed,
    StartTimeout,
)
from gateway.kernels.state import KernelState
from gateway.kernels.wishes import CreateRequest
from gateway.sandboxes.base import SandboxExit
from gateway.settings import load
from gateway.supervisor import frames
from gateway.supervisor.frames import Kind
from gateway.testing import (
    Ask,
    Die,
    Emit,
    FakeEngine,
    FakeSandbox,
    KernelScript,
    Oversize,
    Raise,
    Sleep,
    Step,
    Steps,
    display,
    printed,
    result,
)
from tests.unit.kernels import (
    QUICK,
    box_of,
    cell,
    created,
    ended,
    managed,
    process_of,
    quick,
    run,
    started,
    states,
    steps,
    text,
    types,
)
from tests.unit.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


def deaf(times: float = math.inf) -> Any:
    """A cell that catches so many interrupts and goes on."""

    def steps() -> Steps:
        heard = 0
        while True:
            try:
                yield Sleep(math.inf)
            except KeyboardInterrupt:
                heard += 1
                if heard > times:
                    raise

    return steps


def counting(count: int, pause: float = 0.0) -> list[Step]:
    return [step for number in range(count) for step in (printed(f"{number} "), Sleep(pause))]


CELLS: dict[str, Any] = {
    "hello": [printed("hello\n"), result("2")],
    "fails": [printed("before"), Raise("ValueError", "no")],
    "sleeps": [printed("asleep"), Sleep(math.inf)],
    "naps": [Sleep(0.05)],
    "counts": counting(100, 0.002),
    "deaf once": deaf(1),
    "deaf": deaf(),
    "dies": [printed("last words"), Die(signal="SIGSEGV", log="core dumped")],
    "exits": [Die(code=3)],
    "eats memory": [Die(signal="SIGKILL", facts={"oom_kills": 1, "memory_peak": 100 << 20, "memory_limit": 128 << 20})],
    "too large": [printed("small"), Oversize(200_000_000), printed(" after")],
    "shows": [display({"text/plain": "a"}, "d"), display({"text/plain": "b"}, "d", update=True)],
    "confused": [Emit("stream", {"text": 7}), printed("fine")],
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(KernelScript(cells=CELLS))


# the start


async def test_a_kernel_starts_and_runs_a_cell(engine: FakeEngine) -> None:
    async with started(engine, env={"A": "b"}, memory=256 << 20, cpus=2.0, label="mine") as kernel:
        assert kernel.state is KernelState.IDLE
        assert states(kernel) == ["starting", "idle"]
        box = box_of(engine, kernel)
        assert (box.spec.limits.memory, box.spec.limits.cpus) == (256 << 20, 2.0)
        assert box.supervisor.env == {"A": "b"}
        execution = await run(kernel, "hello")
        assert types(execution) == ["queued", "started", "stream", "result", "ended"]
        assert execution.result()["outputs"][1]["data"] == {"text/plain": "2"}
        assert (execution.status, execution.execution_count) == ("ok", 1)
        assert execution.end["kernel_state"] == "idle"
        assert kernel.state is KernelState.IDLE
    assert states(kernel) == ["starting", "idle", "stopping", "dead"]
    assert kernel.cause is not None
    assert kernel.cause["code"] == "gateway_stopped"


@pytest.mark.parametrize("idle_first", [False, True])
async def test_reply_and_idle_in_either_order(engine: FakeEngine, idle_first: bool) -> None:
    engine.script.idle_first = idle_first
    async with started(engine) as kernel:
        for number in range(1, 30):
            execution = await run(kernel, "hello")
            assert (execution.status, text(execution), execution.execution_count) == ("ok", "hello\n", number)


async def fails_to_start(engine: FakeEngine, expected: type[GatewayError], start_timeout: float = 0.5) -> GatewayError:
    """A start that must fail so, leave nothing, and stand in the way of no other."""
    async with managed(engine, quick(specs={"python3": {"start_timeout": start_timeout}})) as manager:
        with pytest.raises(expected) as failure, anyio.fail_after(PATIENCE):
            await created(manager, CreateRequest())
        assert manager.list() == []
        engine.available = True
        assert engine.boxes == {}
        engine.dials, engine.before_create, engine.images = True, None, ("cellgate-kernel:latest",)
        engine.script = KernelScript(cells=CELLS)
        assert (await run(await created(manager, CreateRequest()), "hello")).status == "ok"
    return failure.value


async def test_the_engine_does_not_answer(engine: FakeEngine) -> None:
    engine.available = False
    await fails_to_start(engine, EngineUnavailable)


async def test_there_is_no_such_image(engine: FakeEngine) -> None:
    engine.images = ()
    await fails_to_start(engine, ImageMissing)


async def test_the_engine_fails_in_a_way_nobody_has_thought_of(engine: FakeEngine) -> None:
    async def explode() -> None:
        raise ZeroDivisionError

    engine.before_create = explode
    async with managed(engine) as manager:
        with pytest.raises(ZeroDivisionError):
            await created(manager, CreateRequest())
        assert manager.list() == []


async def test_the_supervisor_never_calls(engine: FakeEngine) -> None:
    engine.dials = False
    await fails_to_start(engine, StartTimeout)


async def test_the_box_ends_before_its_supervisor_calls(engine: FakeEngine) -> None:
    engine.dials = False
    end_next_box(engine, code=127)
    failure = await fails_to_start(engine, StartFailed, start_timeout=60.0)
    assert "exit code 127" in failure.detail


def end_next_box(engine: FakeEngine, code: int) -> None:
    """The next box that is made ends at once."""

    async def before() -> None:
        engine.before_create = None
        loop.call_later(0.01, end_all)

    def end_all() -> None:
        for box in list(engine.boxes.values()):
            box.end(code)

    loop = asyncio.get_running_loop()
    engine.before_create = before


async def test_the_process_cannot_be_started(engine: FakeEngine) -> None:
    engine.script.refuses_start = "the image has no kernelspec named 'python3'"
    failure = await fails_to_start(engine, StartFailed)
    assert "no kernelspec named 'python3'" in failure.detail


async def test_the_process_dies_at_its_start(engine: FakeEngine) -> None:
    engine.script.start = Die(code=1, log="ModuleNotFoundError: No module named 'ipykernel'\n")
    failure = await fails_to_start(engine, StartFailed)
    assert "exit code 1" in failure.detail
    assert "No module named" in failure.members["log"]


async def test_the_process_lives_and_never_answers(engine: FakeEngine) -> None:
    engine.script.answers_info = False
    engine.script.log = "still importing\n"
    failure = await fails_to_start(engine, StartTimeout)
    assert failure.members["log"] == "still importing\n"


async def test_the_box_ends_while_the_process_starts(engine: FakeEngine) -> None:
    """It need not be waited for until the start's own deadline."""
    engine.script.answers_info = False
    end_next_box(engine, code=4)
    settings = quick(specs={"python3": {"start_timeout": 60.0}})
    async with managed(engine, settings) as manager:
        with pytest.raises(StartFailed, match="no gateway had spoken"), anyio.fail_after(5):
            await created(manager, CreateRequest())
        assert engine.boxes == {}


async def test_a_link_that_breaks_during_the_start_is_made_anew(engine: FakeEngine) -> None:
    engine.script.info_delay = 0.2
    async with managed(engine) as manager, anyio.create_task_group() as tasks:
        tasks.start_soon(manager.create, CreateRequest())
        await until(lambda: [box for box in engine.boxes.values() if box.supervisor.kernel])
        (box,) = engine.boxes.values()
        for greetings in (2, 3):
            box.supervisor.drop()
            await until(lambda greetings=greetings: box.supervisor.greetings == greetings)  # type: ignore[misc]
        (kernel,) = manager.list()
        await until(lambda: kernel.state is KernelState.IDLE)
        assert (await run(kernel, "hello")).status == "ok"


async def test_a_process_that_answers_and_dies_in_one_breath_is_not_idle(engine: FakeEngine) -> None:
    """Answer and death come in one read: the kernel must be dead, or the start must fail."""
    engine.script.cells = CELLS
    async with managed(engine) as manager:
        engine.script.dies_after_info = Die(signal="SIGSEGV")
        try:
            kernel = await created(manager, CreateRequest())
        except StartFailed:
            return
        await until(lambda: kernel.state is KernelState.DEAD)


# cells


async def test_a_failing_cell_is_a_result(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        execution = await run(kernel, "fails")
        assert execution.status == "error"
        assert execution.end["cause"] == {"code": "exception", "message": "ValueError: no"}
        assert [output["output_type"] for output in execution.result()["outputs"]] == ["stream", "error"]
        assert kernel.state is KernelState.IDLE


async def test_cells_queue_up_and_a_failure_aborts_those_behind(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        first, failing, last = (kernel.execute(cell(code)) for code in ("naps", "fails", "hello"))
        assert kernel.state == "busy"
        await ended(last)
        assert [execution.status for execution in (first, failing, last)] == ["ok", "error", "aborted"]
        assert process_of(engine, kernel).codes == ["naps", "fails"]
        assert kernel.state is KernelState.IDLE


async def test_many_cells_of_many_clients_are_run_in_order(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        executions = [kernel.execute(cell("hello")) for _ in range(60)]
        for number, execution in enumerate(executions, start=1):
            await ended(execution)
            assert execution.execution_count == number
        assert [text(execution) for execution in executions] == ["hello\n"] * 60


async def test_a_question_and_its_answer(engine: FakeEngine) -> None:
    def asks() -> Steps:
        name = yield Ask("name? ")
        yield printed(f"hello {name}")

    engine.script.cells = {"asks": asks}
    async with started(engine) as kernel:
        execution = kernel.execute(cell("asks", allow_stdin=True))
        await until(lambda: execution.input_request)
        kernel.cells.answer(execution, "Ada")
        await ended(execution)
        assert text(execution) == "hello Ada"
        assert types(execution) == ["queued", "started", "input_request", "stream", "ended"]


async def test_an_output_too_large_for_the_link(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        execution = await run(kernel, "too large")
        assert text(execution) == "small after"
        assert execution.result()["truncated"]["bytes"] == 200_000_000


async def test_confused_messages_are_counted_and_dropped(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        assert text(await run(kernel, "confused")) == "fine"


async def test_late_output_goes_to_the_kernels_own_log(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        first = await run(kernel, "hello")
        process = process_of(engine, kernel)
        process.publish("stream", {"name": "stdout", "text": "late"}, process.requests[0])
        await until(lambda: [event for event in kernel.log.since(0) if event.type == "stream"])
        (late,) = [event for event in kernel.log.since(0) if event.type == "stream"]
        assert late.members == {"name": "stdout", "text": "late", "from_execution": first.id}
        assert text(first) == "hello\n"


# interrupt and ladder


async def test_an_interrupt_ends_the_running_cell(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        execution = kernel.execute(cell("sleeps"))
        await until(lambda: "stream" in types(execution))
        assert await kernel.interrupt() is execution
        await ended(execution)
        assert (execution.status, execution.end["cause"]["code"]) == ("error", "interrupted")
        assert steps(execution) == ["interrupt"]
        assert kernel.state is KernelState.IDLE
        assert (await run(kernel, "hello")).status == "ok"


async def test_there_is_nothing_to_interrupt(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        assert await kernel.interrupt() is None
        execution = await run(kernel, "hello")
        assert await kernel.interrupt(execution) is None
        assert process_of(engine, kernel).interrupts == 0


async def test_interrupts_by_message(engine: FakeEngine) -> None:
    engine.script.interrupt_mode = "message"
    async with started(engine) as kernel:
        execution = kernel.execute(cell("sleeps"))
        await until(lambda: "stream" in types(execution))
        await kernel.interrupt()
        assert (await ended(execution))["status"] == "error"
        assert process_of(engine, kernel).interrupts == 1


async def test_an_interrupt_never_hits_the_next_cell(engine: FakeEngine) -> None:
    """It races with the end of its cell: whichever comes first, the next cell runs to its end."""
    engine.script.cells = {"short": [Sleep(0.003)], "next": [Sleep(0.02), printed("whole")]}
    async with started(engine) as kernel:
        for number in range(40):
            short, following = kernel.execute(cell("short", stop_on_error=False)), kernel.execute(cell("next"))
            await anyio.sleep(0.0002 * number)
            if kernel.cells.current is short:
                await kernel.interrupt(short)
            await ended(following)
            assert (following.status, text(following)) == ("ok", "whole")
            assert short.status in ("ok", "error")


async def test_many_interrupts_at_once(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        execution = kernel.execute(cell("sleeps"))
        await until(lambda: "stream" in types(execution))
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(kernel.interrupt)
        await ended(execution)
        assert execution.status == "error"
        assert (await run(kernel, "hello")).status == "ok"


async def test_a_cancelled_cell_in_the_queue_never_runs(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        first, second, third = (kernel.execute(cell(code)) for code in ("naps", "hello", "shows"))
        await kernel.cancel(second)
        await ended(third)
        assert (first.status, second.status, third.status) == ("ok", "cancelled", "ok")
        assert process_of(engine, kernel).codes == ["naps", "shows"]


async def test_a_cancelled_cell_that_runs_is_interrupted(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        execution = kernel.execute(cell("sleeps"))
        await until(lambda: "stream" in types(execution))
        await kernel.cancel(execution)
        assert (await ended(execution))["status"] == "cancelled"
        await kernel.cancel(execution)
        assert kernel.state is KernelState.IDLE


@pytest.mark.parametrize(
    ("code", "taken", "state", "after"),
    [
        ("sleeps", ["interrupt"], "idle", None),
        ("deaf once", ["interrupt", "interrupt_again"], "idle", None),
        ("deaf", ["interrupt", "interrupt_again", "kill_kernel"], "dead", "signal"),
    ],
)
async def test_a_cell_past_its_time_climbs_the_ladder(
    engine: FakeEngine, code: str, taken: list[str], state: str, after: str | None
) -> None:
    async with started(engine, on_death="stay") as kernel:
        execution = kernel.execute(cell(code, timeout=0.02))
        end = await ended(execution)
        assert (end["status"], end["cause"]["code"]) == ("timeout", "cell_timeout")
        assert steps(execution) == taken
        assert end["cause"]["step"] == taken[-1]
        assert (end["cause"].get("after") or {}).get("code") == after
        assert (end["kernel_state"], end["variables"]) == (state, "lost" if after else "kept")
        assert kernel.state == state
        assert not kernel.gone


async def test_a_process_that_does_not_die_costs_its_box(engine: FakeEngine) -> None:
    engine.script.obeys_kill = False
    async with started(engine) as kernel:
        execution = kernel.execute(cell("deaf", timeout=0.02))
        end = await ended(execution)
        assert steps(execution) == ["interrupt", "interrupt_again", "kill_kernel", "kill_sandbox"]
        assert (end["status"], end["cause"]["after"]["code"]) == ("timeout", "sandbox_killed")
        await until(lambda: kernel.gone)
        assert engine.boxes == {}


async def test_a_supervisor_that_does_not_answer_does_not_stop_the_ladder(engine: FakeEngine) -> None:
    settings = quick()
    async with started(engine, settings) as kernel:
        execution = kernel.execute(cell("sleeps", timeout=0.02))
        box_of(engine, kernel).supervisor.freeze()
        end = await ended(execution)
        assert (end["status"], end["kernel_state"]) == ("timeout", "dead")
        await until(lambda: kernel.gone)
        assert engine.boxes == {}


async def test_a_cell_that_ends_within_its_time_is_left_alone(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        execution = await run(kernel, "naps", timeout=0.2)
        following = kernel.execute(cell("sleeps", timeout=60))
        await anyio.sleep(0.3)
        assert execution.status == "ok"
        assert not following.ended
        assert steps(following) == []


# death


@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        ("dies", "signal", "SIGSEGV"),
        ("exits", "exit", "exit code 3"),
        ("eats memory", "out_of_memory", "peak 100 MiB, limit 128 MiB"),
    ],
)
async def test_a_death_is_told_to_the_cell_and_to_those_behind_it(
    engine: FakeEngine, code: str, cause: str, words: str
) -> None:
    async with started(engine, on_death="stay") as kernel:
        executions = [kernel.execute(cell(name)) for name in (code, "hello", "hello")]
        for execution in executions:
            await ended(execution)
        assert [execution.status for execution in executions] == ["died", "aborted", "aborted"]
        for execution in executions:
            assert execution.end["cause"]["code"] == cause
            assert words in execution.end["cause"]["message"]
            assert (execution.end["kernel_state"], execution.end["variables"]) == ("dead", "lost")
        assert kernel.state is KernelState.DEAD
        assert kernel.cause == executions[0].end["cause"]
        assert not kernel.gone
        with pytest.raises(KernelDead, match=words):
            kernel.execute(cell("hello"))


async def test_what_was_put_out_before_the_death_is_kept(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        execution = await run(kernel, "dies")
        assert text(execution) == "last words"
        assert execution.end["cause"]["log"] == "core dumped"


async def test_the_next_cell_brings_a_dead_kernel_back(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        await run(kernel, "dies")
        execution = await run(kernel, "hello")
        assert (execution.status, text(execution), execution.execution_count) == ("ok", "hello\n", 1)
        assert types(execution)[0] == "warning"
        assert execution.result()["warnings"][0]["code"] == "kernel_restarted"
        assert kernel.state is KernelState.IDLE
        assert kernel.cause is None


async def test_a_kernel_that_dies_again_and_again_stays_dead(engine: FakeEngine) -> None:
    async with started(engine, quick(max_restarts=2)) as kernel:
        for _ in range(3):
            assert (await run(kernel, "dies")).status == "died"
        with pytest.raises(KernelDead):
            kernel.execute(cell("hello"))
        await kernel.restart()
        assert (await run(kernel, "hello")).status == "ok"


# restart


async def test_a_restart_is_a_new_process_in_the_same_box(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        await run(kernel, "hello")
        box, before = box_of(engine, kernel), process_of(engine, kernel)
        await kernel.restart()
        assert box_of(engine, kernel) is box
        assert process_of(engine, kernel) is not before
        execution = await run(kernel, "hello")
        assert (execution.status, execution.execution_count) == ("ok", 1)
        assert states(kernel)[-2:] == ["restarting", "idle"]


async def test_a_restart_ends_what_runs_and_what_waits(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        running, waiting = kernel.execute(cell("sleeps")), kernel.execute(cell("hello"))
        await until(lambda: "stream" in types(running))
        await kernel.restart()
        assert (running.status, waiting.status) == ("died", "aborted")
        assert running.end["cause"]["code"] == waiting.end["cause"]["code"] == "kernel_restarted"
        assert running.end["variables"] == "lost"


async def test_one_restart_at_a_time(engine: FakeEngine) -> None:
    async with started(engine, quick(specs={"python3": {"start_timeout": 0.5}})) as kernel:
        engine.script.answers_info = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_failure, kernel.restart, StartTimeout)
            await until(lambda: kernel.state is KernelState.RESTARTING)
            with pytest.raises(KernelUnavailable):
                await kernel.restart()
            with pytest.raises(KernelUnavailable):
                kernel.execute(cell("hello"))


async def expect_failure(call: Any, expected: type[Exception]) -> None:
    with pytest.raises(expected):
        await call()


async def test_a_restart_that_fails_leaves_a_dead_kernel_that_can_be_restarted(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        engine.script.start = Die(code=1)
        with pytest.raises(StartFailed):
            await kernel.restart()
        assert kernel.state is KernelState.DEAD
        assert kernel.cause is not None
        assert kernel.cause["code"] == "restart_failed"
        engine.script.start = None
        await kernel.restart()
        assert kernel.cause is None
        assert (await run(kernel, "hello")).status == "ok"


async def test_a_death_that_crosses_a_restart_is_not_taken_for_the_new_process(engine: FakeEngine) -> None:
    """The old process ends just as the restart is asked for; its exit event arrives after the order to start anew."""
    async with started(engine) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        supervisor.freeze()
        supervisor.die(Die(signal="SIGSEGV"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kernel.restart)
            await until(lambda: kernel.state is KernelState.RESTARTING)
            supervisor.thaw()
        assert kernel.state is KernelState.IDLE
        assert (await run(kernel, "hello")).status == "ok"


# the link


async def test_a_link_that_breaks_during_a_cell_loses_nothing(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        execution = kernel.execute(cell("counts"))
        for breaks in range(1, 6):
            await until(lambda breaks=breaks: len(text(execution)) > 20 * breaks or execution.ended)  # type: ignore[misc]
            supervisor.drop()
            await until(lambda breaks=breaks: supervisor.greetings > breaks)  # type: ignore[misc]
        await ended(execution)
        assert text(execution) == "".join(f"{number} " for number in range(100))
        assert execution.status == "ok"
        assert types(execution).count("started") == 1


async def test_a_request_sent_while_the_link_is_away_arrives(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        supervisor.redials = False
        supervisor.drop()
        await until(lambda: not box_of(engine, kernel).link.connected.is_set())
        execution = kernel.execute(cell("hello"))
        await anyio.sleep(0.05)
        assert process_of(engine, kernel).codes == []
        supervisor.dial()
        assert (await ended(execution))["status"] == "ok"
        assert process_of(engine, kernel).codes == ["hello"]


async def test_garbage_on_the_link_costs_the_stream_and_nothing_else(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        execution = kernel.execute(cell("counts"))
        await until(lambda: text(execution))
        supervisor.send_raw(b"\xde\xad\xbe\xef" * 10)
        await ended(execution)
        assert text(execution) == "".join(f"{number} " for number in range(100))
        assert supervisor.greetings == 2


async def test_a_link_that_stays_away_is_a_death(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        running, waiting = kernel.execute(cell("sleeps")), kernel.execute(cell("hello"))
        await until(lambda: "stream" in types(running))
        supervisor.redials = False
        supervisor.drop()
        assert (await ended(running))["cause"]["code"] == "sandbox_unreachable"
        assert (running.status, waiting.status) == ("died", "aborted")
        await until(lambda: kernel.gone)
        assert engine.boxes == {}
        with pytest.raises(KernelDead):
            await kernel.restart()
        with pytest.raises(KernelDead):
            kernel.execute(cell("hello"))


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (SandboxExit(3, oom_killed=False), "lifetime"),
        (SandboxExit(4, oom_killed=False), "silence"),
        (SandboxExit(137, oom_killed=True), "out_of_memory"),
        (SandboxExit(137, oom_killed=False), "sandbox_ended"),
        (SandboxExit(None, oom_killed=False, removed=True), "sandbox_removed"),
    ],
)
async def test_the_end_of_the_box_is_told_as_the_engine_tells_it(engine: FakeEngine, end: SandboxExit, code: str) -> None:
    async with started(engine) as kernel:
        execution = kernel.execute(cell("sleeps"))
        await until(lambda: "stream" in types(execution))
        box = box_of(engine, kernel)
        if end.removed:
            box.vanish()
        else:
            box.end(end.code, end.oom_killed)
        assert (await ended(execution))["cause"]["code"] == code
        assert (execution.status, kernel.state) == ("died", "dead")
        await until(lambda: kernel.gone)
        assert engine.boxes == {}


async def test_a_silent_supervisor_is_given_up(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        box_of(engine, kernel).supervisor.freeze()
        await until(lambda: kernel.state is KernelState.DEAD)
        assert kernel.cause is not None
        assert kernel.cause["code"] == "sandbox_unreachable"
        await until(lambda: kernel.gone)


async def test_an_engine_that_is_away_for_a_moment_costs_nothing(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        engine.available = False
        supervisor.drop()
        await until(lambda: supervisor.greetings == 2)
        engine.available = True
        assert (await run(kernel, "hello")).status == "ok"


async def test_a_link_and_an_engine_that_are_both_away_are_a_death_sooner(engine: FakeEngine) -> None:
    """Nobody can be asked, and a supervisor that lived would have called again."""
    async with started(engine, load(**{**QUICK, "link": {"lost_timeout": 600.0}})) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        supervisor.redials = False
        engine.available = False
        supervisor.drop()
        await until(lambda: kernel.gone)
        assert kernel.cause is not None
        assert kernel.cause["code"] == "engine_unavailable"


async def test_files_are_reached_over_the_link_while_there_is_one(engine: FakeEngine) -> None:
    async with started(engine, on_death="stay") as kernel:
        before = kernel.last_activity
        link = await kernel.link()
        assert link is box_of(engine, kernel).link
        assert kernel.last_activity > before
        # A dead process has files; a box that is away has none at the moment, one that is gone none any more.
        await run(kernel, "dies")
        assert await kernel.link() is link
        supervisor = box_of(engine, kernel).supervisor
        supervisor.redials = False
        supervisor.drop()
        await until(lambda: not link.connected.is_set())
        with pytest.raises(KernelUnavailable):
            await kernel.link()
        box_of(engine, kernel).vanish()
        await until(lambda: kernel.gone)
        with pytest.raises(KernelDead):
            await kernel.link()


async def test_a_lifetime_ends_a_kernel_unless_it_is_extended(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        short, long = [await created(manager, CreateRequest(lifetime=1.0)) for _ in range(2)]
        expires = long.expires_at
        await long.extend(None)
        assert long.expires_at == expires
        await long.extend(600.0)
        assert (long.expires_at - expires).total_seconds() > 590
        await until(lambda: short.gone)
        assert short.cause is not None
        assert short.cause["code"] == "lifetime"
        assert (await run(long, "hello")).status == "ok"


async def test_a_box_that_cannot_be_removed_is_no_kernel_any_more(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        supervisor.redials = False
        engine.available = False
        supervisor.drop()
        await until(lambda: kernel.gone)
        with pytest.raises(KernelDead):
            kernel.execute(cell("hello"))


# delete


async def test_a_delete_while_a_cell_runs(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernel = await created(manager, CreateRequest())
        running, waiting = kernel.execute(cell("sleeps")), kernel.execute(cell("hello"))
        await manager.delete(kernel.id)
        assert (running.status, waiting.status) == ("died", "aborted")
        assert running.end["cause"]["code"] == "kernel_deleted"
        assert engine.boxes == {}
        with anyio.fail_after(PATIENCE):
            await kernel.log.finished.wait()
        with pytest.raises(KernelGone):
            manager.get(kernel.id)


async def start_slowly(engine: FakeEngine) -> anyio.Event:
    """Creates wait until the event is set."""
    go = anyio.Event()
    engine.before_create = go.wait
    return go


@pytest.mark.parametrize("when", ["in the engine", "before the call", "in the process"])
async def test_a_delete_while_it_starts(engine: FakeEngine, when: str) -> None:
    settings = quick(specs={"python3": {"start_timeout": 60.0}})
    if when == "in the engine":
        await start_slowly(engine)
    elif when == "before the call":
        engine.dials = False
    else:
        engine.script.answers_info = False
    async with managed(engine, settings) as manager, anyio.create_task_group() as tasks:
        failures: list[GatewayError] = []

        async def create() -> None:
            try:
                await created(manager, CreateRequest())
            except GatewayError as error:
                failures.append(error)

        tasks.start_soon(create)
        await until(manager.list)
        if when != "in the engine":
            await until(lambda: engine.boxes)
            await anyio.sleep(0.03)
        (kernel,) = manager.list()
        with anyio.fail_after(5):
            await manager.delete(kernel.id)
        await until(lambda: failures)
        assert isinstance(failures[0], StartFailed)
        assert "deleted" in failures[0].detail
        assert engine.boxes == {}
        assert manager.list() == []


async def test_a_delete_while_it_restarts(engine: FakeEngine) -> None:
    settings = quick(specs={"python3": {"start_timeout": 60.0}})
    async with managed(engine, settings) as manager, anyio.create_task_group() as tasks:
        kernel = await created(manager, CreateRequest())
        engine.script.answers_info = False
        tasks.start_soon(expect_failure, kernel.restart, StartFailed)
        await until(lambda: kernel.state is KernelState.RESTARTING)
        with anyio.fail_after(5):
            await manager.delete(kernel.id)
        assert engine.boxes == {}


async def test_a_client_that_gives_up_leaves_no_box(engine: FakeEngine) -> None:
    """The task that creates is cancelled, wherever it is."""
    async with managed(engine) as manager:
        for number in range(25):
            engine.before_create = (lambda: anyio.sleep(0.002)) if number % 2 else None
            with anyio.move_on_after(0.0007 * number) as patience:
                await created(manager, CreateRequest())
            if not patience.cancelled_caught:
                await manager.delete(manager.list()[0].id)
            assert manager.list() == []
            assert engine.boxes == {}
        engine.before_create = None
        assert (await run(await created(manager, CreateRequest()), "hello")).status == "ok"


# faults


async def test_a_fault_in_one_kernels_task_leaves_the_others_alone(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_self: FakeSandbox) -> SandboxExit | None:
        raise ZeroDivisionError("a fault of the gateway's own")

    async with managed(engine) as manager:
        victim, other = await created(manager, CreateRequest()), await created(manager, CreateRequest())
        running, waiting = victim.execute(cell("sleeps")), victim.execute(cell("hello"))
        elsewhere = other.execute(cell("counts"))
        await until(lambda: "stream" in types(running))
        box = box_of(engine, victim)
        monkeypatch.setattr(box, "exit", broken.__get__(box))
        box.supervisor.drop()
        assert (await ended(running))["cause"]["code"] == "internal_error"
        assert (running.status, waiting.status) == ("died", "aborted")
        await until(lambda: victim.gone)
        assert list(engine.boxes) == [other.id]
        await ended(elsewhere)
        assert (elsewhere.status, text(elsewhere)) == ("ok", "".join(f"{number} " for number in range(100)))
        assert (await run(await created(manager, CreateRequest()), "hello")).status == "ok"
        await manager.delete(victim.id)


# hostile boxes

NONSENSE: dict[str, Any] = {
    "an exit of another shape": {"event": "kernel_exit", "code": [1], "signal": {"a": 1}, "log": 7, "oom_kills": "many"},
    "an exit with a lone surrogate": {"event": "kernel_exit", "code": 1, "log": "caf\ud800"},
    "an exit with a huge number": {"event": "kernel_exit", "code": 10**40, "signal": None},
    "an exit without anything": {"event": "kernel_exit"},
    "usage of another shape": {"event": "usage", "cpu_seconds": "many", "memory_used": None, "memory_peak": [1]},
    "usage below zero": {"event": "usage", "cpu_seconds": -5, "memory_used": -1, "memory_peak": -1},
    "a warning without numbers": {"event": "memory_high"},
    "an unknown event": {"event": "something new", "a": 1},
    "no event": {},
    "an event that is a list": {"event": ["kernel_exit"]},
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_events_of_any_shape_are_survived_and_can_be_told(engine: FakeEngine, name: str) -> None:
    async with started(engine, on_death="stay") as kernel:
        execution = kernel.execute(cell("counts"))
        supervisor = box_of(engine, kernel).supervisor
        await until(lambda: text(execution))
        supervisor.event(NONSENSE[name])
        await ended(execution)
        assert all(event.json for event in [*execution.log.since(0), *kernel.log.since(0)])
        assert execution.status == ("died" if name.startswith("an exit") else "ok")


@pytest.mark.parametrize(
    "value", [{}, {"size": -5, "parent": "{}"}, {"size": "x", "parent": 7}, {"size": 10**30, "parent": "[" * 500}]
)
async def test_reports_of_oversize_of_any_shape_are_survived(engine: FakeEngine, value: dict[str, Any]) -> None:
    async with started(engine) as kernel:
        supervisor = box_of(engine, kernel).supervisor
        supervisor._number(lambda seq: frames.pack_json(Kind.OVERSIZE, value, seq))
        assert (await run(kernel, "hello")).status == "ok"
        assert supervisor.greetings == 1


async def test_a_frozen_kernel_is_thawed_by_its_next_cell(engine: FakeEngine) -> None:
    async with started(engine) as kernel:
        await kernel.freeze()
        assert kernel.frozen
        assert box_of(engine, kernel).frozen
        await anyio.sleep(0.8)
        assert kernel.state is KernelState.IDLE
        execution = await run(kernel, "hello")
        assert (execution.status, text(execution)) == ("ok", "hello\n")
        assert not kernel.frozen


async def test_a_frozen_kernel_can_be_deleted(engine: FakeEngine) -> None:
    async with managed(engine) as manager:
        kernel = await created(manager, CreateRequest())
        await kernel.freeze()
        await manager.delete(kernel.id)
        assert engine.boxes == {}


# two who want the cell to stop


async def test_a_deadline_makes_who_is_on_the_ladder_go_further(engine: FakeEngine) -> None:
    """A client has asked for one soft step, and the cell's time is over before that has had its grace."""
    engine.script.cells = {**CELLS, "deaf": deaf()}
    async with started(engine, quick(interrupt_grace=0.5)) as kernel:
        execution = kernel.execute(cell("deaf", timeout=0.3))
        await kernel.interrupt(up_to="interrupt")
        end = await ended(execution)
        assert end["status"] == "timeout"
        assert steps(execution)[:3] == ["interrupt", "interrupt_again", "kill_kernel"]


async def test_a_kernel_that_is_being_started_is_not_restarted(engine: FakeEngine) -> None:
    engine.script.answers_info = False
    async with managed(engine) as manager, anyio.create_task_group() as tasks:
        tasks.start_soon(expect_failure, partial(manager.create, CreateRequest()), GatewayError)
        await until(lambda: [kernel for kernel in manager.list() if kernel.state == "starting"])
        with pytest.raises(KernelUnavailable):
            await manager.list()[0].restart()
        await manager.delete(manager.list()[0].id)
