"""One cell's record: it ends once, its end is the last word, and what it keeps is bounded at exactly its limit."""

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.kernels.budget import OutputBudget
from gateway.kernels.execution import CellRequest, Execution
from gateway.kernels.journal import Journal
from gateway.kernels.records import from_chunk
from gateway.protocol.events import EndStatus, Event, Payload
from tests.unit.stores import LastingStore

Output = tuple[Payload, int]


def made(max_bytes: int = 1000, max_events: int = 100) -> Execution:
    return Execution("k", CellRequest("1", 60.0), OutputBudget(max_bytes, max_events))


def text(size: int, name: str = "stdout", char: str = "x") -> Output:
    return Payload("stream", {"name": name, "text": char * size}), size


def shown(number: int, size: int) -> Output:
    return Payload("display", {"data": {"n": number}, "metadata": {}, "display_id": None}), size


def types(execution: Execution) -> list[str]:
    return [event.type for event in execution.log.since(0)]


def last(execution: Execution) -> Event:
    return execution.log.since(0)[-1]


@pytest.mark.parametrize("status", ["ok", "error", "aborted", "timeout", "died", "cancelled"])
def test_the_end_is_told_once_and_last(status: EndStatus) -> None:
    execution = made()
    execution.sent("m")
    execution.announce_start(3)
    cause = None if status == "ok" else {"code": "c", "message": "m"}
    execution.finish(status, cause, "idle", "kept")
    execution.finish("ok", None, "dead", "lost")
    assert types(execution) == ["started", "ended"]
    assert execution.done.is_set()
    assert execution.log.closed
    members = last(execution).members
    assert (members["status"], members["cause"], members["execution_count"]) == (status, cause, 3)
    assert (members["kernel_state"], members["variables"]) == ("idle", "kept")
    assert members["duration"] >= 0
    assert execution.result()["status"] == status


def test_nothing_is_told_after_the_end() -> None:
    execution = made()
    execution.sent("m")
    execution.finish("ok", None, "idle", "kept")
    before = execution.result()
    execution.produce([text(5)])
    execution.tell(Payload("warning", {"code": "c", "message": "m"}))
    execution.announce_start(9)
    execution.finish("error", {"code": "x"}, "dead", "lost")
    assert types(execution) == ["ended"]
    assert execution.result() == before


def test_a_question_ends_with_the_cell() -> None:
    execution = made()
    execution.input_request = {"msg_id": "q"}
    execution.finish("ok", None, "idle", "kept")
    assert execution.input_request is None


def test_a_cell_that_never_ran_took_no_time() -> None:
    execution = made()
    assert execution.result()["status"] == "queued"
    assert not execution.running
    execution.finish("cancelled", {"code": "cancelled"}, "idle", "kept")
    assert last(execution).members["duration"] == 0.0


def test_a_cell_under_way() -> None:
    execution = made()
    execution.sent("m")
    execution.produce([text(3)])
    assert execution.running
    found = execution.result()
    assert (found["status"], found["cause"], found["duration"]) == ("running", None, None)
    assert found["outputs"] == [{"output_type": "stream", "name": "stdout", "text": "xxx"}]


def test_the_start_is_told_once_and_before_the_first_output() -> None:
    execution = made()
    execution.sent("m")
    execution.produce([text(1)])
    execution.announce_start(4)
    execution.announce_start(5)
    assert types(execution) == ["started", "stream"]
    assert execution.log.since(0)[0].members == {"execution_count": None}
    assert execution.execution_count == 5


def test_a_burst_of_text_is_one_event() -> None:
    execution = made()
    execution.produce([text(1, char=char) for char in "abc"])
    assert [event.members.get("text") for event in execution.log.since(0)] == [None, "abc"]


# the budget


def kept(execution: Execution) -> str:
    return "".join(output["text"] for output in execution.result()["outputs"] if output["output_type"] == "stream")


def fed(sizes: list[int], max_bytes: int = 1000, max_events: int = 100) -> Execution:
    execution = made(max_bytes, max_events)
    for number, size in enumerate(sizes):
        execution.produce([shown(number, size)])
    execution.finish("ok", None, "idle", "kept")
    return execution


def numbers(execution: Execution) -> list[int]:
    return [output["data"]["n"] for output in execution.result()["outputs"]]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9, 10])
def test_output_up_to_the_limit_is_whole(count: int) -> None:
    execution = fed([100] * count)
    assert numbers(execution) == list(range(count))
    assert execution.result()["truncated"] is None
    assert "truncated" not in types(execution)
    assert execution.end["usage"]["output_bytes"] == 100 * count


def test_output_above_the_limit_keeps_its_beginning_and_its_end() -> None:
    execution = fed([100] * 25)
    assert numbers(execution) == [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]
    missing = {"bytes": 1500, "events": 15, "limit": 1000}
    assert execution.result()["truncated"] == missing
    assert types(execution).count("truncated") == 1
    position = types(execution).index("truncated")
    assert types(execution)[position:] == ["truncated", *["display"] * 5, "ended"]
    assert execution.log.since(0)[position].members == missing
    assert execution.end["usage"]["output_bytes"] == 2500


def test_one_byte_above_the_limit() -> None:
    assert fed([500, 500]).result()["truncated"] is None
    execution = fed([500, 501])
    assert numbers(execution) == [0]
    assert execution.result()["truncated"] == {"bytes": 501, "events": 1, "limit": 1000}
    execution = fed([501, 500])
    assert numbers(execution) == [1]


def test_the_number_of_events_is_bounded_too() -> None:
    execution = fed([1] * 50, max_bytes=1_000_000, max_events=20)
    assert numbers(execution) == [*range(10), *range(40, 50)]
    assert execution.result()["truncated"] == {"bytes": 30, "events": 30, "limit": 1_000_000}


def test_a_warning_says_when_the_rest_has_to_wait() -> None:
    execution = fed([100] * 7)
    assert types(execution).count("warning") == 1
    (warning,) = execution.result()["warnings"]
    assert warning["code"] == "output_limit"


def test_of_a_long_text_the_beginning_and_the_end_are_kept() -> None:
    execution = made(max_bytes=100_000)
    content = "".join(f"{number:06}\n" for number in range(100_000))
    execution.produce([(Payload("stream", {"name": "stdout", "text": content}), len(content))])
    execution.finish("ok", None, "idle", "kept")
    found = kept(execution)
    assert found.startswith("000000\n")
    assert found.endswith("099999\n")
    assert 50_000 < len(found) <= 100_000
    missing = execution.result()["truncated"]
    assert abs(missing["bytes"] + len(found) - len(content)) < 1000


def test_what_did_not_cross_the_link_is_counted() -> None:
    execution = made()
    execution.produce([shown(0, 10)])
    execution.budget.leave_out(5000)
    execution.finish("ok", None, "idle", "kept")
    assert execution.result()["truncated"] == {"bytes": 5000, "events": 1, "limit": 1000}
    assert numbers(execution) == [0]


def test_what_did_not_cross_the_link_makes_no_room_for_more() -> None:
    """A cell that alternates outputs too large for the link with outputs that are not must not fill the gateway's memory."""
    execution = made()
    for number in range(200):
        execution.produce([shown(number, 300)])
        execution.budget.leave_out(10_000)
    execution.finish("ok", None, "idle", "kept")
    assert len(numbers(execution)) <= 3
    assert execution.result()["truncated"]["events"] == 200 + 200 - len(numbers(execution))


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["text", "shown"])), max_size=60),
    st.integers(2, 1500),
    st.integers(2, 40),
)
def test_the_books_are_balanced(outputs: list[tuple[int, str]], max_bytes: int, max_events: int) -> None:
    execution = made(max_bytes, max_events)
    for number, (size, kind) in enumerate(outputs):
        execution.produce([text(size) if kind == "text" else shown(number, size)])
    execution.finish("ok", None, "idle", "kept")
    sizes = {number: size for number, (size, kind) in enumerate(outputs) if kind == "shown"}
    told = len(kept(execution)) + sum(
        sizes[output["data"]["n"]] for output in execution.result()["outputs"] if output["output_type"] == "display_data"
    )
    missing: dict[str, Any] = execution.result()["truncated"] or {"bytes": 0, "events": 0}
    assert told <= max_bytes
    assert told + missing["bytes"] == sum(size for size, _ in outputs)
    assert types(execution)[-1] == "ended"
    assert types(execution).count("ended") == 1


# recorded, and taken up again


def journalled(store: LastingStore, max_bytes: int = 1000, max_events: int = 100) -> tuple[Execution, Journal]:
    journal = Journal(store)
    budget = OutputBudget(max_bytes, max_events)
    execution = Execution(
        "k", CellRequest("code" * 100, 60.0), budget, number=7, key="key", fingerprint="print", journal=journal
    )
    execution.tell(Payload("queued", {"position": 0}))
    return execution, journal


async def commit(execution: Execution, store: LastingStore) -> None:
    """One round of the journal."""
    changes, tell = execution.take_changes()
    await store.commit(changes)
    tell()


async def restored(store: LastingStore, max_bytes: int = 1000, max_events: int = 100) -> Execution:
    (row,) = await store.unfinished("k")
    budget = OutputBudget(max_bytes, max_events)
    chunks = await store.events(row.id, 0, 1 << 30)
    large = await store.large_values(row.id, 0, 1 << 30)
    events = [event for chunk in chunks for event in from_chunk(chunk, large)]
    return Execution.restored(row, budget, events, await store.held(row.id), Journal(store))


def test_what_is_not_stored_is_told_to_nobody() -> None:
    async def play() -> None:
        store = LastingStore()
        execution, _ = journalled(store)
        execution.sent("m")
        execution.produce([text(5)])
        assert types(execution) == []
        found = execution.result()
        assert (found["status"], found["outputs"], found["last_seq"]) == ("running", [], 0)
        await commit(execution, store)
        assert types(execution) == ["queued", "started", "stream"]
        execution.finish("ok", None, "idle", "kept")
        assert execution.ended
        assert not execution.done.is_set()
        # Of its end nothing is told before that is stored.
        assert execution.result()["status"] == "running"
        assert execution.record()["ended_at"] is None
        await commit(execution, store)
        assert execution.done.is_set()
        assert execution.result()["status"] == "ok"
        assert await store.unfinished("k") == []

    anyio.run(play)


def test_its_row_says_what_the_next_gateway_has_to_know() -> None:
    async def play() -> None:
        store = LastingStore()
        execution, _ = journalled(store)
        await commit(execution, store)
        (row,) = await store.unfinished("k")
        assert (row.id, row.kernel_id, row.number) == (execution.id, "k", 7)
        assert (row.key, row.fingerprint, row.msg_id) == ("key", "print", None)
        execution.sent("m")
        execution.climbing = True
        execution.timed_out = execution.interrupted = execution.cancelled = True
        execution.last_step, execution.usage = "interrupt", {"cpu_seconds": 1.5}
        execution.input_request = {"msg_id": "q"}
        execution.replied({"status": "error", "execution_count": 3, "ename": "E" * 2000, "evalue": "v", "traceback": ["x"]})
        execution.leave_gap(3, 400)
        execution.leave_gap(1, 50)
        await commit(execution, store)
        after = await restored(store)
        for name in (
            *("id", "kernel_id", "number", "key", "fingerprint", "request", "msg_id", "created_at", "timed_out", "interrupted"),
            *("cancelled", "last_step", "usage", "input_request", "reply", "gap", "execution_count"),
        ):
            assert getattr(after, name) == getattr(execution, name), name
        assert (after.gap, after.climbing, after.running) == ({"events": 4, "bytes": 450}, False, True)
        assert types(after) == types(execution)
        # Time went on meanwhile.
        assert execution.elapsed - 0.1 < after.elapsed
        assert after.log.last_seq == after.log.last_taken == execution.log.last_seq
        assert after.take_changes()[0] != []
        assert (await restored(store)).result() == execution.result()

    anyio.run(play)


steps = st.one_of(
    st.tuples(st.just("text"), st.integers(0, 300)),
    st.tuples(st.just("shown"), st.integers(0, 300)),
    st.tuples(st.just("large"), st.just(80_000)),
    st.tuples(st.just("question"), st.integers(0, 300)),
    st.tuples(st.just("left out"), st.integers(1, 300)),
    st.tuples(st.just("gap"), st.integers(1, 300)),
    st.tuples(st.just("start"), st.integers(1, 9)),
    st.tuples(st.just("warning"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["reply", "idle", "timed out", "interrupted", "usage"]), st.integers(0, 9)),
)
moments = st.sampled_from(["store", "store", "die", "die before it is told"]).map(lambda name: (name, 0))


def feed(execution: Execution, step: str, value: int, number: int) -> None:
    if step == "text":
        execution.produce([text(value, char=chr(ord("a") + number % 26))])
    elif step == "shown":
        execution.produce([shown(number, value)])
    elif step == "large":
        execution.produce(
            [(Payload("display", {"data": {"a": "x" * value, "n": number}, "metadata": {}, "display_id": None}), 10)]
        )
    elif step == "question":
        if execution.budget.admit_question(value):
            execution.input_request = {"msg_id": f"q{number}"}
            execution.tell(Payload("input_request", {"prompt": str(number), "password": False}))
    elif step == "left out":
        execution.budget.leave_out(value)
    elif step == "gap":
        execution.leave_gap(1, value)
    elif step == "start":
        execution.announce_start(value)
    elif step == "warning":
        execution.tell(Payload("warning", {"code": "c", "message": str(number)}))
    elif step == "reply":
        execution.replied({"status": "ok", "execution_count": value})
    elif step == "usage":
        execution.usage = {"cpu_seconds": value}
    else:
        setattr(execution, {"idle": "idle_seen"}.get(step, step.replace(" ", "_")), True)


def whole(execution: Execution) -> dict[str, Any]:
    """All that a reader can see, without what is a matter of time or of how reads were cut."""
    found = {name: value for name, value in execution.result().items() if name not in ("duration", "last_seq", "execution_id")}
    found["usage"] = {name: value for name, value in found["usage"].items() if name != "wall_seconds"}
    found["inner"] = {
        name: getattr(execution, name) for name in ("reply", "idle_seen", "timed_out", "interrupted", "usage", "input_request")
    }
    found["questions"] = [event.members for event in execution.log.since(0) if event.type == "input_request"]
    found["warned"] = types(execution).count("warning"), types(execution).count("started"), types(execution).count("gap")
    return found


@given(st.lists(st.one_of(steps, moments), max_size=50), st.integers(100, 3000), st.integers(4, 30))
def test_an_execution_that_was_taken_up_again_is_the_same(
    script: list[tuple[str, int]], max_bytes: int, max_events: int
) -> None:
    """Its gateway dies at any moment, once or more, before or after its word came back that all is stored. What was not stored
    comes again, as the supervisor sends it again."""

    async def play() -> None:
        store = LastingStore()
        uninterrupted = made(max_bytes, max_events)
        uninterrupted.tell(Payload("queued", {"position": 0}))
        uninterrupted.sent("m")
        execution, _ = journalled(store, max_bytes, max_events)
        execution.sent("m")
        await commit(execution, store)
        since: list[tuple[str, int, int]] = []
        told: list[Event] = []
        for number, (step, value) in enumerate(script):
            if step == "store":
                await commit(execution, store)
                since = []
            elif step.startswith("die"):
                told = execution.log.since(0)
                if step != "die":
                    await store.commit(execution.take_changes()[0])
                    since = []
                execution = await restored(store, max_bytes, max_events)
                # Who has read can go on with its cursor.
                assert execution.log.since(0)[: len(told)] == told
                for again in since:
                    feed(execution, *again)
            else:
                since.append((step, value, number))
                feed(execution, step, value, number)
                feed(uninterrupted, step, value, number)
        for one in (execution, uninterrupted):
            one.finish("ok", None, "idle", "kept")
        await commit(execution, store)
        assert whole(execution) == whole(uninterrupted)
        assert types(execution)[-1] == "ended"
        assert [event.seq for event in execution.log.since(0)] == [*range(1, execution.log.last_seq + 1)]
        # The store has the same, and nothing waits there any more.
        assert await store.held(execution.id) == []
        assert await store.last_event(execution.id) == execution.log.last_seq

    anyio.run(play)


def test_reports_of_a_sandbox_are_bounded_and_their_sums_go_on() -> None:
    """It may send as many as it likes; they are no output, so no output budget bounds them."""
    execution = Execution("k", CellRequest("1", 60.0), OutputBudget(1000, 100))
    for _ in range(5000):
        execution.leave_gap(1, 10)
    assert len(execution.log.since(0)) == 1000
    assert execution.gap == {"events": 5000, "bytes": 50_000}
