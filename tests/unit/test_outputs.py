"""From messages to events and from events to notebook outputs, on tables of recorded messages and against a plain model."""

from typing import Any

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.events import OUTPUT_TYPES, Event, Payload
from gateway.protocol.messages import BadMessage
from gateway.protocol.outputs import OutputCollector, is_output, to_payload, weight

PNG = "iVBORw0KGgo="

# Recorded from ipykernel 7: type and content of the message, type and members of the event.
RECORDED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("stream", {"name": "stdout", "text": "a\n"}, "stream", {"name": "stdout", "text": "a\n"}),
    ("stream", {"name": "stderr", "text": "w"}, "stream", {"name": "stderr", "text": "w"}),
    (
        "display_data",
        {"data": {"text/plain": "<Figure>", "image/png": PNG}, "metadata": {"image/png": {"width": 5}}, "transient": {}},
        "display",
        {"data": {"text/plain": "<Figure>", "image/png": PNG}, "metadata": {"image/png": {"width": 5}}, "display_id": None},
    ),
    (
        "display_data",
        {"data": {"text/html": "<b>"}, "metadata": {}, "transient": {"display_id": "d1"}},
        "display",
        {"data": {"text/html": "<b>"}, "metadata": {}, "display_id": "d1"},
    ),
    (
        "update_display_data",
        {"data": {"text/html": "<i>"}, "metadata": {}, "transient": {"display_id": "d1"}},
        "update_display",
        {"data": {"text/html": "<i>"}, "metadata": {}, "display_id": "d1"},
    ),
    (
        "execute_result",
        {"data": {"text/plain": "2"}, "metadata": {}, "execution_count": 4},
        "result",
        {"data": {"text/plain": "2"}, "metadata": {}, "execution_count": 4},
    ),
    (
        "error",
        {"ename": "ZeroDivisionError", "evalue": "division by zero", "traceback": ["\x1b[31m---", "line 1"]},
        "error",
        {"ename": "ZeroDivisionError", "evalue": "division by zero", "traceback": ["\x1b[31m---", "line 1"]},
    ),
    ("clear_output", {"wait": True}, "clear_output", {"wait": True}),
    ("clear_output", {"wait": False}, "clear_output", {"wait": False}),
    ("input_request", {"prompt": "name? ", "password": False}, "input_request", {"prompt": "name? ", "password": False}),
    ("input_request", {"prompt": "", "password": True}, "input_request", {"prompt": "", "password": True}),
]
# Not quite as the protocol has it, and yet there is no doubt what is meant.
TOLERATED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("stream", {"text": "x"}, "stream", {"name": "stdout", "text": "x"}),
    ("stream", {"name": "log", "text": "x"}, "stream", {"name": "stdout", "text": "x"}),
    ("stream", {"name": "stdout"}, "stream", {"name": "stdout", "text": ""}),
    ("display_data", {"data": {}}, "display", {"data": {}, "metadata": {}, "display_id": None}),
    ("display_data", {}, "display", {"data": {}, "metadata": {}, "display_id": None}),
    (
        "display_data",
        {"data": None, "metadata": None, "transient": None},
        "display",
        {"data": {}, "metadata": {}, "display_id": None},
    ),
    ("display_data", {"transient": {"display_id": None}}, "display", {"data": {}, "metadata": {}, "display_id": None}),
    ("display_data", {"transient": {"display_id": 7}}, "display", {"data": {}, "metadata": {}, "display_id": None}),
    ("execute_result", {"data": {"a": 1}}, "result", {"data": {"a": 1}, "metadata": {}, "execution_count": None}),
    ("execute_result", {"execution_count": "4"}, "result", {"data": {}, "metadata": {}, "execution_count": None}),
    ("execute_result", {"execution_count": True}, "result", {"data": {}, "metadata": {}, "execution_count": None}),
    ("error", {"traceback": []}, "error", {"ename": "", "evalue": "", "traceback": []}),
    ("error", {"traceback": ["a", 1, None, "b"]}, "error", {"ename": "", "evalue": "", "traceback": ["a", "b"]}),
    ("clear_output", {}, "clear_output", {"wait": False}),
    ("clear_output", {"wait": 1}, "clear_output", {"wait": False}),
    ("input_request", {}, "input_request", {"prompt": "", "password": False}),
]


@pytest.mark.parametrize(("msg_type", "content", "kind", "members"), RECORDED + TOLERATED)
def test_a_message_becomes_an_event(msg_type: str, content: dict[str, Any], kind: str, members: dict[str, Any]) -> None:
    payload = to_payload(msg_type, content)
    assert payload is not None
    assert (payload.type, payload.members) == (kind, members)


@pytest.mark.parametrize(
    "msg_type",
    ["", "status", "execute_input", "comm_open", "comm_msg", "comm_close", "debug_event", "iopub_welcome", "Stream", "unknown"],
)
def test_other_messages_are_no_outputs(msg_type: str) -> None:
    assert to_payload(msg_type, {"data": 1, "text": 2}) is None


WRONG = [None, 1, 1.5, True, [], ["x"], {}, {"a": 1}]


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize(("msg_type", "key"), [("stream", "text"), ("stream", "name"), ("input_request", "prompt")])
def test_text_that_is_none_is_a_bad_message(msg_type: str, key: str, value: object) -> None:
    with pytest.raises(BadMessage, match=f"{key} is not text"):
        to_payload(msg_type, {key: value})


@pytest.mark.parametrize("value", [1, 1.5, True, "text", [], ["x"]])
@pytest.mark.parametrize("key", ["data", "metadata", "transient"])
@pytest.mark.parametrize("msg_type", ["display_data", "update_display_data"])
def test_bundles_that_are_none_are_bad_messages(msg_type: str, key: str, value: object) -> None:
    with pytest.raises(BadMessage, match=f"{key} is not an object"):
        to_payload(msg_type, {key: value})


@pytest.mark.parametrize("content", [{}, {"traceback": None}, {"traceback": "text"}, {"traceback": [], "ename": 1}])
def test_errors_of_another_shape_are_bad_messages(content: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        to_payload("error", content)


@pytest.mark.parametrize(
    ("payload", "values"),
    [
        (Payload("stream", {"name": "stdout", "text": "a,b,c"}), 0),
        (Payload("display", {"data": {"text/csv": "a,b,c", "image/png": PNG}, "metadata": {}, "display_id": None}), 0),
        (Payload("display", {"data": {}, "metadata": {}, "display_id": None}), 0),
        (Payload("display", {"data": {"application/json": [1, 2]}, "metadata": {}, "display_id": None}), 6),
        (Payload("result", {"data": {"text/plain": "x"}, "metadata": {"image/png": {"width": 5}}, "execution_count": 1}), 6),
        (Payload("error", {"ename": "", "evalue": "", "traceback": ["a"]}), 6),
        (Payload("clear_output", {"wait": True}), 0),
    ],
)
def test_an_output_weighs_what_it_costs(payload: Payload, values: int) -> None:
    """Text its length; other values, counted by the marks between them, what objects take."""
    raw = b'{"any": [1, 2, {"b": "c,d"}]}'
    assert weight(payload, raw) == len(raw) + 64 * values


def test_what_is_an_output() -> None:
    assert all(is_output(entry[0]) for entry in RECORDED)
    assert not any(is_output(kind) for kind in ("status", "execute_input", "execute_reply", "comm_msg", ""))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["name", "text", "data", "metadata", "transient", "wait", "traceback", "ename", "execution_count", "prompt"]
)


@given(st.sampled_from([*{entry[0] for entry in RECORDED}, "status"]), st.dictionaries(KEYS, JSON, max_size=6))
def test_any_content_is_an_event_or_a_bad_message(msg_type: str, content: dict[str, Any]) -> None:
    try:
        payload = to_payload(msg_type, content)
    except BadMessage:
        return
    if payload is not None and payload.type in OUTPUT_TYPES:
        collector = OutputCollector()
        collector.add_members(payload.type, payload.members)
        collector.finish()


# outputs of a cell


def stream(text: str, name: str = "stdout") -> tuple[str, dict[str, Any]]:
    return "stream", {"name": name, "text": text}


def show(text: str, display_id: str | None = None) -> tuple[str, dict[str, Any]]:
    return "display", {"data": {"text/plain": text}, "metadata": {}, "display_id": display_id}


def update(text: str, display_id: str | None) -> tuple[str, dict[str, Any]]:
    return "update_display", {"data": {"text/plain": text}, "metadata": {"new": True}, "display_id": display_id}


def clear(wait: bool = False) -> tuple[str, dict[str, Any]]:
    return "clear_output", {"wait": wait}


def out(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def shown(text: str, **metadata: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "data": {"text/plain": text}, "metadata": metadata}


RESULT = ("result", {"data": {"text/plain": "2"}, "metadata": {}, "execution_count": 1})
RESULT_OUTPUT = {"output_type": "execute_result", "data": {"text/plain": "2"}, "metadata": {}, "execution_count": 1}
ERROR = ("error", {"ename": "E", "evalue": "v", "traceback": ["t"]})
ERROR_OUTPUT = {"output_type": "error", "ename": "E", "evalue": "v", "traceback": ["t"]}

CELLS: dict[str, tuple[list[tuple[str, dict[str, Any]]], list[dict[str, Any]]]] = {
    "nothing": ([], []),
    "neighbouring texts join": ([stream("a"), stream("b")], [out("ab")]),
    "names do not": ([stream("a"), stream("b", "stderr"), stream("c")], [out("a"), out("b", "stderr"), out("c")]),
    "other outputs come between": ([stream("a"), show("x"), stream("b")], [out("a"), shown("x"), out("b")]),
    "events that are no outputs do not": (
        [stream("a"), ("warning", {}), ("interrupt", {}), ("input_request", {"prompt": ""}), stream("b")],
        [out("ab")],
    ),
    "result and error": ([stream("a"), RESULT, ERROR], [out("a"), RESULT_OUTPUT, ERROR_OUTPUT]),
    "clear": ([stream("a"), show("x"), clear(), stream("b")], [out("b")]),
    "clear and nothing after": ([stream("a"), clear()], []),
    "clear with wait acts at the next output": ([stream("a"), clear(True), stream("b")], [out("b")]),
    "clear with wait and nothing after": ([stream("a"), clear(True)], [out("a")]),
    "clear with wait twice": ([stream("a"), clear(True), clear(True), stream("b"), stream("c")], [out("bc")]),
    "a clear cancels one that waits": ([stream("a"), clear(True), clear(), stream("b")], [out("b")]),
    "an update is no output for a clear that waits": (
        [show("a", "x"), clear(True), update("b", "x")],
        [shown("b", new=True)],
    ),
    "an update changes what is shown": ([show("a", "x"), update("b", "x")], [shown("b", new=True)]),
    "an update changes all of its id": (
        [show("a", "x"), show("c", "y"), show("d", "x"), update("b", "x")],
        [shown("b", new=True), shown("c"), shown("b", new=True)],
    ),
    "an update of nothing": ([show("a", "x"), update("b", "y"), update("c", None)], [shown("a")]),
    "an update after a clear": ([show("a", "x"), clear(), update("b", "x"), show("c")], [shown("c")]),
    "without an id there is no update": ([show("a"), update("b", None)], [shown("a")]),
    "a text after a clear starts anew": ([stream("a"), clear(), stream("b"), clear(), stream("c")], [out("c")]),
    "a progress bar": ([e for n in range(5) for e in (clear(True), stream(f"{n}\r"))], [out("4\r")]),
}


@pytest.mark.parametrize("name", CELLS)
def test_the_outputs_of_a_cell(name: str) -> None:
    events, expected = CELLS[name]
    collector = OutputCollector()
    for number, (kind, members) in enumerate(events):
        collector.add(Event(number, kind, "", "e", members))  # type: ignore[arg-type]
    assert collector.finish() == expected
    assert collector.finish() == expected


def test_looking_in_between_changes_nothing() -> None:
    collector = OutputCollector()
    for text in "abc":
        collector.add_members(*stream(text))
        assert collector.finish()[-1]["text"][-1] == text
    assert collector.finish() == [out("abc")]


def test_a_cell_updates_what_an_earlier_one_has_displayed() -> None:
    displays: dict[str, list[dict[str, Any]]] = {}
    first, second = OutputCollector(displays), OutputCollector(displays)
    first.add_members(*show("a", "x"))
    second.add_members(*show("b", "x"))
    second.add_members(*update("c", "x"))
    assert first.finish() == [shown("c", new=True)]
    assert second.finish() == [shown("c", new=True)]
    second.add_members(*clear())
    second.add_members(*update("d", "x"))
    assert first.finish() == [shown("d", new=True)]
    assert second.finish() == []


def test_cells_that_share_nothing_do_not_disturb_each_other() -> None:
    first, second = OutputCollector(), OutputCollector()
    first.add_members(*show("a", "x"))
    second.add_members(*update("b", "x"))
    assert first.finish() == [shown("a")]


EVENTS = st.lists(
    st.builds(stream, st.text("ab\n", max_size=2), st.sampled_from(["stdout", "stderr"]))
    | st.builds(show, st.text("ab", max_size=2), st.sampled_from([None, "x", "y"]))
    | st.builds(update, st.text("ab", max_size=2), st.sampled_from([None, "x", "y"]))
    | st.builds(clear, st.booleans())
    | st.sampled_from([RESULT, ERROR]),
    max_size=30,
)


def model(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rules, in the plainest way: every text is joined at once, every output knows its display_id."""
    outputs: list[dict[str, Any]] = []
    waiting = False
    for kind, members in events:
        if kind == "clear_output":
            waiting = members["wait"]
            outputs = outputs if waiting else []
        elif kind == "update_display":
            for output in outputs:
                if members["display_id"] is not None and output.get("id") == members["display_id"]:
                    output.update(data=members["data"], metadata=members["metadata"])
        else:
            outputs, waiting = ([] if waiting else outputs), False
            last = outputs[-1] if outputs else {}
            if kind == "stream" and last.get("output_type") == "stream" and last.get("name") == members["name"]:
                last["text"] += members["text"]
            elif kind == "stream":
                outputs.append({"output_type": "stream", **members})
            elif kind == "display":
                outputs.append({"output_type": "display_data", "id": members["display_id"], **members})
            else:
                outputs.append({"output_type": "execute_result" if kind == "result" else "error", **members})
    return [{key: value for key, value in output.items() if key not in ("id", "display_id")} for output in outputs]


@given(EVENTS)
def test_the_collector_does_what_the_model_does(events: list[tuple[str, dict[str, Any]]]) -> None:
    collector = OutputCollector()
    for kind, members in events:
        collector.add_members(kind, members)
    assert collector.finish() == model(events)


@given(EVENTS)
def test_the_outputs_are_those_of_a_notebook(events: list[tuple[str, dict[str, Any]]]) -> None:
    collector = OutputCollector()
    for kind, members in events:
        collector.add_members(kind, members)
    cell: dict[str, Any] = {
        "cell_type": "code",
        "id": "a",
        "source": "",
        "metadata": {},
        "execution_count": None,
        "outputs": collector.finish(),
    }
    nbformat.validate({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]})
