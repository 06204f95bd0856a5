"""The queue of one kernel and the routing of what comes back, with a client that goes nowhere and remembers what was sent."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from gateway.errors import ExecutionNotFound, NotWaitingForInput, QueueFull
from gateway.kernels import cells as cells_module
from gateway.kernels.cells import Cells
from gateway.kernels.client import KernelClient
from gateway.kernels.execution import CellRequest, Execution
from gateway.kernels.journal import Journal
from gateway.kernels.log import EventLog
from gateway.kernels.reporter import Reporter
from gateway.protocol.events import Payload
from gateway.protocol.messages import RawMessage
from gateway.settings import KernelSettings
from gateway.supervisor.frames import Channel
from tests.unit.recorders import RecordingLink, raw
from tests.unit.stores import LastingStore


class Bench:
    """Cells with a recording client; what they have told their owner."""

    def __init__(self, journal: Journal | None = None, **settings: Any) -> None:
        self.changes: list[Execution | None] = []
        self.background: list[tuple[Payload, str, int]] = []
        self.link = RecordingLink()
        self.client = KernelClient(self.link)
        self.cells = Cells(
            "k",
            KernelSettings(**settings),
            lambda: self.changes.append(self.cells.current),
            lambda payload, execution_id, size: self.background.append((payload, execution_id, size)),
            journal,
        )
        self.cells.attach(self.client)

    def submit(self, code: str = "1", **options: Any) -> Execution:
        return self.cells.submit(CellRequest(code, 60.0, **options))

    @property
    def codes(self) -> list[str]:
        """What was handed to the kernel, in order."""
        return [
            content["code"] for channel, header, _, content in self.link.messages if header["msg_type"] == "execute_request"
        ]

    def say(self, execution: Execution, channel: str, msg_type: str, content: Any, **header: Any) -> RawMessage:
        assert execution.msg_id is not None
        return raw(channel, msg_type, content, execution.msg_id, **header)

    def output(self, execution: Execution, text: str) -> RawMessage:
        return self.say(execution, "iopub", "stream", {"name": "stdout", "text": text})

    def idle(self, execution: Execution) -> RawMessage:
        return self.say(execution, "iopub", "status", {"execution_state": "idle"})

    def reply(self, execution: Execution, status: str = "ok", **content: Any) -> RawMessage:
        return self.say(execution, "shell", "execute_reply", {"status": status, "execution_count": 1, **content})

    def finish(self, execution: Execution, status: str = "ok", **content: Any) -> None:
        self.cells.take([self.reply(execution, status, **content), self.idle(execution)])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def types(execution: Execution) -> list[str]:
    return [event.type for event in execution.log.since(0)]


def positions(execution: Execution) -> list[int]:
    return [event.members["position"] for event in execution.log.since(0) if event.type == "queued"]


def text(execution: Execution) -> str:
    return "".join(output["text"] for output in execution.result()["outputs"])


# the queue


def test_a_cell_goes_to_an_idle_kernel_at_once(bench: Bench) -> None:
    execution = bench.submit("1 + 1", silent=True, stop_on_error=False, allow_stdin=True)
    channel, header, _, content = bench.link.messages[0]
    assert (channel, header["msg_type"]) == (Channel.SHELL, "execute_request")
    assert content["code"] == "1 + 1"
    assert (content["silent"], content["store_history"], content["allow_stdin"]) == (True, False, True)
    assert bench.cells.current is execution
    assert bench.changes == [execution]
    assert positions(execution) == [0]


def test_cells_run_one_at_a_time_and_in_order(bench: Bench) -> None:
    executions = [bench.submit(str(number)) for number in range(5)]
    for number, execution in enumerate(executions):
        assert bench.codes == [str(n) for n in range(number + 1)]
        assert bench.cells.current is execution
        assert bench.cells.queue_length == 4 - number
        bench.finish(execution)
    assert [execution.status for execution in executions] == ["ok"] * 5
    assert bench.cells.current is None
    assert bench.changes[-1] is None
    assert bench.cells.ended_count == 5


def test_positions_are_told_as_they_change(bench: Bench) -> None:
    executions = [bench.submit(str(number)) for number in range(4)]
    assert [positions(execution) for execution in executions] == [[0], [1], [2], [3]]
    bench.finish(executions[0])
    assert [positions(execution) for execution in executions] == [[0], [1], [2, 1], [3, 2]]
    bench.finish(executions[1])
    assert [positions(execution) for execution in executions] == [[0], [1], [2, 1], [3, 2, 1]]


def test_the_queue_is_bounded(bench: Bench) -> None:
    bench = Bench(max_queue=3)
    executions = [bench.submit(str(number)) for number in range(4)]
    with pytest.raises(QueueFull) as refused:
        bench.submit("one too many")
    assert refused.value.members["limit"] == 3
    bench.finish(executions[0])
    bench.submit("now there is room")
    with pytest.raises(QueueFull):
        bench.submit("and now there is none")
    assert bench.cells.queue_length == 3


def test_nothing_is_handed_on_while_held_or_without_a_kernel(bench: Bench) -> None:
    bench.cells.held = True
    execution = bench.submit()
    assert bench.codes == []
    bench.cells.held = False
    bench.cells.pump()
    assert bench.codes == ["1"]
    bench.finish(execution)
    bench.cells.attach(None)
    bench.submit("waits")
    assert bench.codes == ["1"]
    bench.cells.attach(bench.client)
    assert bench.codes == ["1", "waits"]


def test_a_notice_comes_before_everything(bench: Bench) -> None:
    execution = bench.cells.submit(CellRequest("1", 60.0), Payload("warning", {"code": "c", "message": "m"}))
    assert types(execution) == ["warning", "queued"]


# completion


@pytest.mark.parametrize("order", ["reply first", "idle first", "apart", "apart, idle first"])
def test_a_cell_ends_when_both_reply_and_idle_were_seen(bench: Bench, order: str) -> None:
    execution, following = bench.submit("1"), bench.submit("2")
    reply, idle, output = bench.reply(execution), bench.idle(execution), bench.output(execution, "last")
    batches = {
        "reply first": [[reply, output, idle]],
        "idle first": [[output, idle, reply]],
        "apart": [[reply], [output], [idle]],
        "apart, idle first": [[output], [idle], [reply]],
    }[order]
    for batch in batches[:-1]:
        bench.cells.take(batch)
        assert not execution.ended
        assert bench.codes == ["1"]
    bench.cells.take(batches[-1])
    assert execution.status == "ok"
    assert types(execution)[-2:] == ["stream", "ended"]
    assert text(execution) == "last"
    assert bench.cells.current is following


def test_busy_and_other_states_end_nothing(bench: Bench) -> None:
    execution = bench.submit()
    bench.cells.take([bench.reply(execution)])
    for state in ("busy", "starting", "IDLE", "", None, 7, ["idle"]):
        bench.cells.take([bench.say(execution, "iopub", "status", {"execution_state": state})])
    assert not execution.ended
    bench.cells.take([bench.idle(execution)])
    assert execution.ended


def test_the_first_reply_counts(bench: Bench) -> None:
    execution = bench.submit()
    bench.cells.take(
        [bench.reply(execution, "error", ename="E", evalue="v"), bench.reply(execution, "ok"), bench.idle(execution)]
    )
    assert execution.status == "error"


def test_other_replies_and_channels_end_nothing(bench: Bench) -> None:
    execution = bench.submit()
    ok = {"status": "ok", "execution_count": 1}
    bench.cells.take(
        [
            bench.say(execution, "control", "execute_reply", ok),
            bench.say(execution, "iopub", "execute_reply", ok),
            bench.say(execution, "stdin", "execute_reply", ok),
            bench.say(execution, "shell", "kernel_info_reply", ok),
            bench.say(execution, "shell", "status", {"execution_state": "idle"}),
            bench.idle(execution),
        ]
    )
    assert not execution.ended


@pytest.mark.parametrize("count", [None, "7", 1.5, [1], -1, 0, 7])
def test_the_execution_count_is_what_the_kernel_says_if_it_is_a_number(bench: Bench, count: object) -> None:
    execution = bench.submit()
    bench.cells.take([bench.say(execution, "iopub", "execute_input", {"code": "1", "execution_count": count})])
    bench.finish(execution, execution_count=count)
    expected = count if isinstance(count, int) else None
    assert execution.result()["execution_count"] == expected
    assert bench.cells.execution_count == (expected or 0)


def test_the_start_is_told_when_the_kernel_takes_the_cell_up(bench: Bench) -> None:
    execution = bench.submit()
    assert types(execution) == ["queued"]
    bench.cells.take([bench.say(execution, "iopub", "execute_input", {"code": "1", "execution_count": 4})])
    assert types(execution) == ["queued", "started"]
    assert execution.log.since(0)[-1].members == {"execution_count": 4}


# what does not belong


def test_messages_of_unknown_parents_are_counted_and_dropped(bench: Bench) -> None:
    execution = bench.submit()
    foreign = [
        raw(channel, kind, content, parent)
        for channel, kind, content in (
            ("iopub", "stream", {"text": "x"}),
            ("iopub", "status", {"execution_state": "idle"}),
            ("shell", "execute_reply", {"status": "ok"}),
            ("stdin", "input_request", {"prompt": ""}),
        )
        for parent in (None, "somebody", "", 7, {"a": 1}, execution.id)
    ]
    bench.cells.take(foreign)
    assert bench.cells.dropped == len(foreign)
    assert types(execution) == ["queued"]
    assert bench.background == []


def test_output_of_an_earlier_cell_goes_to_the_background(bench: Bench) -> None:
    first = bench.submit("1")
    bench.finish(first)
    late = bench.output(first, "late")
    bench.cells.take([late])
    second = bench.submit("2")
    bench.cells.take([bench.output(first, "later"), bench.output(second, "own"), bench.idle(first), bench.reply(first)])
    assert [(payload.members["text"], execution_id) for payload, execution_id, _ in bench.background] == [
        ("late", first.id),
        ("later", first.id),
    ]
    assert bench.background[0][2] == len(late.signed[3])
    assert text(first) == ""
    assert text(second) == "own"
    assert not second.ended
    assert types(first)[-1] == "ended"


def test_a_late_input_of_an_earlier_cell_changes_nothing(bench: Bench) -> None:
    first = bench.submit("1")
    bench.finish(first)
    before = first.result()
    bench.cells.take([bench.say(first, "iopub", "execute_input", {"code": "1", "execution_count": 99})])
    assert first.result() == before


def test_output_after_a_restart_belongs_to_nobody(bench: Bench) -> None:
    first = bench.submit("1")
    late = bench.output(first, "late")
    bench.cells.end_all("died", {"code": "c"}, "restarting")
    bench.cells.attach(bench.client)
    bench.cells.take([late])
    assert bench.background == []
    assert bench.cells.dropped == 1


@pytest.mark.parametrize(
    "bad",
    [
        ("stream", {"text": 7}),
        ("stream", b"not json"),
        ("stream", b"[]"),
        ("display_data", {"data": []}),
        ("error", {}),
        ("status", b"\xff"),
        ("execute_input", b"null"),
        ("stream", b"[" * 100_000),
    ],
    ids=lambda bad: repr(bad)[:40],
)
def test_a_bad_message_is_counted_and_costs_its_neighbours_nothing(bench: Bench, bad: tuple[str, Any]) -> None:
    execution = bench.submit()
    bench.cells.take(
        [
            bench.output(execution, "before "),
            bench.say(execution, "iopub", *bad),
            bench.output(execution, "after"),
            bench.reply(execution),
            bench.idle(execution),
        ]
    )
    assert text(execution) == "before after"
    assert execution.status == "ok"
    assert bench.client.bad_messages == 1
    # Was it an output, the end of the cell tells that one is missing.
    assert (execution.result()["truncated"] is not None) is (bad[0] not in ("status", "execute_input"))


def test_a_bad_output_of_an_earlier_cell_is_missing_nowhere(bench: Bench) -> None:
    first = bench.submit()
    bench.finish(first)
    second = bench.submit()
    bench.cells.take([bench.say(first, "iopub", "stream", {"text": 7})])
    bench.finish(second)
    assert (first.result()["truncated"], second.result()["truncated"]) == (None, None)
    assert bench.client.bad_messages == 1


def test_outputs_of_many_small_values_are_counted_as_what_they_cost() -> None:
    """24 bytes of memory for each of their own: by the bytes of their text they would fill the gateway's memory."""
    bench = Bench(max_output=1_000_000)
    execution = bench.submit()
    figure = bench.say(execution, "iopub", "display_data", {"data": {"application/json": [[]] * 1000}, "metadata": {}})
    for _ in range(100):
        bench.cells.take([figure])
    bench.finish(execution)
    kept = len([output for output in execution.result()["outputs"] if output["output_type"] == "display_data"])
    assert 5 <= kept <= 10
    assert execution.result()["truncated"]["events"] == 100 - kept


def test_a_bad_reply_ends_nothing_and_a_good_one_still_may(bench: Bench) -> None:
    execution = bench.submit()
    bench.cells.take([bench.say(execution, "shell", "execute_reply", b"[]"), bench.idle(execution)])
    assert not execution.ended
    bench.cells.take([bench.reply(execution)])
    assert execution.status == "ok"


# how a cell ends


@pytest.mark.parametrize(
    ("reply", "flags", "status", "code"),
    [
        ({"status": "ok"}, (), "ok", None),
        ({"status": "error", "ename": "ValueError", "evalue": "v"}, (), "error", "exception"),
        ({"status": "error", "ename": "KeyboardInterrupt", "evalue": ""}, ("interrupted",), "error", "interrupted"),
        (
            {"status": "error", "ename": "KeyboardInterrupt", "evalue": ""},
            ("cancelled", "interrupted"),
            "cancelled",
            "cancelled",
        ),
        (
            {"status": "error", "ename": "KeyboardInterrupt", "evalue": ""},
            ("timed_out", "interrupted"),
            "timeout",
            "cell_timeout",
        ),
        ({"status": "ok"}, ("cancelled",), "ok", None),
        ({"status": "ok"}, ("timed_out",), "timeout", "cell_timeout"),
        ({"status": "aborted"}, (), "aborted", "aborted_by_kernel"),
        ({"status": "abort"}, (), "error", "exception"),
        ({}, (), "error", "exception"),
        ({"status": 7, "ename": ["x"], "evalue": {"a": 1}}, (), "error", "exception"),
    ],
)
def test_what_a_reply_means(bench: Bench, reply: dict[str, Any], flags: tuple[str, ...], status: str, code: str | None) -> None:
    execution = bench.submit()
    for flag in flags:
        setattr(execution, flag, True)
    bench.cells.take([bench.say(execution, "shell", "execute_reply", reply), bench.idle(execution)])
    assert execution.status == status
    assert (execution.end["cause"] or {}).get("code") == code
    assert (execution.end["kernel_state"], execution.end["variables"]) == ("idle", "kept")


def test_a_failing_cell_aborts_those_behind_it(bench: Bench) -> None:
    failing, second, third = (bench.submit(str(number)) for number in range(3))
    bench.finish(failing, "error", ename="E", evalue="v")
    assert [execution.status for execution in (failing, second, third)] == ["error", "aborted", "aborted"]
    assert second.end["cause"]["code"] == "previous_cell_failed"
    assert second.end["cause"]["execution_id"] == failing.id
    assert second.end["variables"] == "kept"
    assert bench.codes == ["0"]
    assert bench.cells.current is None
    bench.submit("goes on")
    assert bench.codes == ["0", "goes on"]


def test_a_failing_cell_that_does_not_stop_aborts_nothing(bench: Bench) -> None:
    failing, second = bench.submit("0", stop_on_error=False), bench.submit("1")
    bench.finish(failing, "error", ename="E", evalue="v")
    assert (failing.status, second.status) == ("error", None)
    assert bench.codes == ["0", "1"]


def test_a_queued_cell_is_withdrawn_and_never_runs(bench: Bench) -> None:
    first, second, third = (bench.submit(str(number)) for number in range(3))
    assert bench.cells.withdraw(second)
    assert not bench.cells.withdraw(second)
    assert not bench.cells.withdraw(first)
    assert (second.status, second.end["cause"]["code"]) == ("cancelled", "cancelled")
    bench.finish(first)
    assert bench.codes == ["0", "2"]
    assert bench.cells.current is third


def test_the_end_of_the_kernel_ends_all(bench: Bench) -> None:
    running, *waiting = (bench.submit(str(number)) for number in range(3))
    bench.cells.take([bench.output(running, "partial")])
    bench.cells.end_all("died", {"code": "out_of_memory"}, "dead")
    assert running.status == "died"
    assert [execution.status for execution in waiting] == ["aborted", "aborted"]
    for execution in (running, *waiting):
        assert execution.end["cause"] == {"code": "out_of_memory"}
        assert (execution.end["kernel_state"], execution.end["variables"]) == ("dead", "lost")
        assert types(execution).count("ended") == 1
    assert text(running) == "partial"
    assert bench.cells.current is None
    bench.cells.end_all("died", {"code": "again"}, "dead")
    assert running.end["cause"] == {"code": "out_of_memory"}


def test_a_cell_past_its_time_timed_out_even_if_the_kernel_died_of_it(bench: Bench) -> None:
    execution, waiting = bench.submit(), bench.submit()
    execution.timed_out = True
    execution.last_step = "kill_kernel"
    bench.cells.end_all("died", {"code": "signal"}, "dead")
    assert execution.status == "timeout"
    assert execution.end["cause"]["code"] == "cell_timeout"
    assert execution.end["cause"]["step"] == "kill_kernel"
    assert execution.end["cause"]["after"] == {"code": "signal"}
    assert waiting.status == "aborted"


def test_an_output_too_large_for_the_link_is_told_at_the_end(bench: Bench) -> None:
    execution = bench.submit()
    bench.cells.oversize(execution.msg_id, 500_000_000)
    bench.cells.oversize("somebody", 1)
    bench.cells.oversize(None, 1)
    bench.finish(execution)
    assert types(execution)[-2:] == ["truncated", "ended"]
    assert execution.result()["truncated"]["bytes"] == 500_000_000
    assert bench.cells.dropped == 2


# questions


def ask(bench: Bench, execution: Execution, prompt: str = "name? ") -> RawMessage:
    return bench.say(execution, "stdin", "input_request", {"prompt": prompt, "password": False}, session="s")


def test_a_question_is_told_after_the_output_before_it_and_answered_once(bench: Bench) -> None:
    execution = bench.submit(allow_stdin=True)
    question = ask(bench, execution)
    bench.cells.take([bench.output(execution, "first "), question])
    assert types(execution) == ["queued", "started", "stream", "input_request"]
    bench.cells.answer(execution, "Ada")
    channel, header, parent, content = bench.link.messages[-1]
    assert (channel, header["msg_type"]) == (Channel.STDIN, "input_reply")
    assert content["value"] == "Ada"
    assert parent["msg_id"] == question.header["msg_id"]
    with pytest.raises(NotWaitingForInput):
        bench.cells.answer(execution, "again")


def test_a_second_question_takes_the_place_of_the_first(bench: Bench) -> None:
    execution = bench.submit(allow_stdin=True)
    bench.cells.take([ask(bench, execution, "1"), second := ask(bench, execution, "2")])
    bench.cells.answer(execution, "x")
    assert bench.link.messages[-1][2]["msg_id"] == second.header["msg_id"]


def test_nobody_asked(bench: Bench) -> None:
    execution = bench.submit(allow_stdin=True)
    with pytest.raises(NotWaitingForInput):
        bench.cells.answer(execution, "x")
    bench.cells.take([ask(bench, execution)])
    bench.finish(execution)
    with pytest.raises(NotWaitingForInput):
        bench.cells.answer(execution, "too late")


def test_questions_that_may_not_be_asked_are_dropped(bench: Bench) -> None:
    silent = bench.submit(allow_stdin=False)
    bench.cells.take([ask(bench, silent)])
    bench.finish(silent)
    later = bench.submit(allow_stdin=True)
    bench.cells.take([ask(bench, silent)])
    assert bench.cells.dropped == 2
    assert "input_request" not in types(silent) + types(later)


def test_a_question_on_iopub_is_none(bench: Bench) -> None:
    """It could not be answered, and would be an event that no budget counts."""
    execution = bench.submit(allow_stdin=True)
    bench.cells.take([bench.say(execution, "iopub", "input_request", {"prompt": "x"})])
    assert types(execution) == ["queued"]
    assert bench.cells.dropped == 1


def test_a_flood_of_questions_is_bounded() -> None:
    bench = Bench(max_output=100_000, max_output_events=100)
    execution = bench.submit(allow_stdin=True)
    for _ in range(300):
        bench.cells.take([ask(bench, execution, "x" * 1000)])
    bench.finish(execution)
    told = types(execution).count("input_request")
    assert told == 48
    assert execution.result()["truncated"]["events"] == 300 - told
    small = bench.submit(allow_stdin=True)
    for _ in range(300):
        bench.cells.take([ask(bench, small, "")])
    assert types(small).count("input_request") == 50


# what is remembered


def test_executions_are_found_until_they_are_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "_KEPT_EXECUTIONS", 3)
    executions = []
    for number in range(5):
        executions.append(bench.submit(str(number)))
        bench.finish(executions[-1])
    for execution in executions[:2]:
        with pytest.raises(ExecutionNotFound):
            bench.cells.get(execution.id)
    assert [bench.cells.get(execution.id) for execution in executions[2:]] == executions[2:]
    assert bench.cells.last == {"execution_id": executions[-1].id, "status": "ok", "ended": executions[-1].end}


def test_large_outputs_push_old_ones_out() -> None:
    bench = Bench(max_kept_output=10_000, max_output=10_000)
    executions = []
    for number in range(6):
        executions.append(execution := bench.submit(str(number)))
        bench.cells.take([bench.output(execution, "x" * 3000)])
        bench.finish(execution)
    known = [execution for execution in executions if execution.id in bench.cells._executions]
    assert known == executions[-3:]


def test_what_just_fits_is_kept() -> None:
    bench = Bench(max_kept_output=len('{"name": "stdout", "text": ""}') + 100)
    first, second = bench.submit("1"), bench.submit("2")
    bench.cells.take([bench.output(first, "x" * 100)])
    bench.finish(first)
    bench.finish(second)
    assert bench.cells.get(first.id) is first
    third = bench.submit("3")
    bench.cells.take([bench.output(third, "")])
    bench.finish(third)
    with pytest.raises(ExecutionNotFound):
        bench.cells.get(first.id)


def test_the_last_execution_stays_however_large() -> None:
    bench = Bench(max_kept_output=100)
    first = bench.submit("1")
    bench.cells.take([bench.output(first, "x" * 3000)])
    bench.finish(first)
    assert bench.cells.get(first.id) is first


def test_what_was_withdrawn_while_a_cell_runs_is_forgotten_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running cell is the oldest; those that came and went behind it must not pile up."""
    monkeypatch.setattr(cells_module, "_KEPT_EXECUTIONS", 10)
    running = bench.submit("long")
    for number in range(100):
        bench.cells.withdraw(bench.submit(str(number)))
    assert len(bench.cells._executions) <= 11
    assert bench.cells.get(running.id) is running


def test_late_output_of_a_forgotten_cell_still_names_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that memory has let go of can still have threads that print."""
    monkeypatch.setattr(cells_module, "_KEPT_EXECUTIONS", 1)
    first = bench.submit("1")
    bench.finish(first)
    bench.finish(bench.submit("2"))
    assert bench.cells.find(first.id) is None
    bench.cells.take([bench.output(first, "late")])
    ((payload, execution_id, _),) = bench.background
    assert (payload.members["text"], execution_id) == ("late", first.id)
    assert bench.cells.dropped == 0


def test_of_too_many_cells_the_oldest_are_not_known_any_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of where output comes from is bounded too."""
    monkeypatch.setattr(cells_module, "_KNOWN_ORIGINS", 2)
    executions = []
    for number in range(3):
        executions.append(bench.submit(str(number)))
        bench.finish(executions[-1])
    bench.cells.take([bench.output(execution, "late") for execution in executions])
    assert [execution_id for _, execution_id, _ in bench.background] == [execution.id for execution in executions[1:]]
    assert bench.cells.dropped == 1


# idempotency keys


def test_a_key_finds_its_execution_as_long_as_it_is_in_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "_KEPT_EXECUTIONS", 2)
    first = bench.cells.submit(CellRequest("1", 60.0), None, "a", "f")
    assert bench.cells.of_key("a") is first
    assert bench.cells.of_key("b") is None
    assert bench.cells.complete
    bench.finish(first)
    for number in range(2):
        bench.finish(bench.submit(str(number)))
    assert bench.cells.of_key("a") is None
    assert not bench.cells.complete


def test_executions_are_numbered_from_one(bench: Bench) -> None:
    executions = [bench.submit(str(number)) for number in range(3)]
    assert [execution.number for execution in executions] == [1, 2, 3]
    assert bench.cells.asked_count == 3


# recorded


class Ledger(Journal):
    """What has announced that it changed."""

    def __init__(self) -> None:
        super().__init__(LastingStore())
        self.announced: set[Any] = set()

    def changed(self, thing: Any, within: float = 0.0) -> None:
        self.announced.add(thing)


def recorded(execution: Execution) -> Any:
    """All that the store is to hold of it, as it is now."""
    budget = execution.budget.state()
    return execution.record(), orjson.loads(orjson.dumps(execution._inner_state())), budget, execution.log._last


def test_whatever_changes_of_its_record_is_announced() -> None:
    """What has come over the link counts as stored with the next round: what is not announced would be lost then."""
    ledger = Ledger()
    bench = Bench(ledger, max_output=4000)
    execution = bench.submit(allow_stdin=True)
    reporter = Reporter(bench.cells, EventLog(None))
    say = bench.say
    happenings: list[Callable[[], object]] = [
        lambda: bench.cells.take([say(execution, "iopub", "execute_input", {"code": "1", "execution_count": None})]),
        lambda: bench.cells.take([say(execution, "iopub", "execute_input", {"code": "1", "execution_count": 4})]),
        lambda: bench.cells.take([bench.output(execution, "text")]),
        lambda: bench.cells.take([bench.output(execution, "x" * 3000)]),
        lambda: bench.cells.take([bench.output(execution, "y" * 3000)]),
        lambda: bench.cells.take([ask(bench, execution, "q")]),
        lambda: bench.cells.answer(execution, "a"),
        lambda: bench.cells.take([ask(bench, execution, "q" * 5000)]),
        lambda: bench.cells.take([say(execution, "iopub", "stream", b"[]")]),
        lambda: bench.cells.oversize(execution.msg_id, 77),
        lambda: reporter.used({"event": "usage", "cpu_seconds": 1.5, "memory_peak": 7}),
        lambda: reporter.gap({"event": "gap", "parent": execution.msg_id, "messages": 2, "bytes": 9}),
        lambda: bench.cells.take([bench.reply(execution)]),
        lambda: bench.cells.take([bench.idle(execution)]),
    ]
    seen = 0
    for happening in happenings:
        before = recorded(execution)
        ledger.announced.clear()
        happening()
        changed = recorded(execution) != before
        seen += changed
        assert execution in ledger.announced or not changed, happenings.index(happening)
    assert execution.status == "ok"
    assert seen >= len(happenings) - 1
