"""What is left out when there is no room: only what may be, each of it counted once, and told where it is missing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.supervisor import frames
from gateway.supervisor.frames import Channel
from gateway.supervisor.overflow import DROPPABLE, PARENTS, Overflow, envelope

KEPT = ("status", "execute_input", "comm_open", "comm_msg", "comm_close", "debug_event", "iopub_welcome", "of the future")


def message(kind: Any, parent: Any = "cell", content: bytes = b"{}", buffers: int = 0) -> list[bytes]:
    headers = [json.dumps(value).encode() for value in ({"msg_type": kind}, {"msg_id": parent}, {})]
    return [b"topic", b"<IDS|MSG>", b"signature", *headers, content, *[b"b"] * buffers]


def gap(parent: str, *left_out: list[bytes]) -> dict[str, Any]:
    sizes = [frames.message_size(parts) for parts in left_out]
    return {"event": "gap", "parent": parent, "messages": len(sizes), "bytes": sum(sizes)}


@pytest.fixture
def overflow() -> Overflow:
    return Overflow()


@pytest.mark.parametrize("kind", sorted(DROPPABLE))
def test_outputs_are_left_out(overflow: Overflow, kind: str) -> None:
    output = message(kind)
    assert overflow.take(Channel.IOPUB, output) is None
    assert overflow.pending
    assert overflow.flush() == [gap("cell", output)]
    assert not overflow.pending
    assert overflow.flush() == []


@pytest.mark.parametrize("kind", KEPT)
def test_all_else_is_kept(overflow: Overflow, kind: str) -> None:
    assert overflow.take(Channel.IOPUB, message(kind)) == []
    assert not overflow.pending


@pytest.mark.parametrize("channel", [Channel.SHELL, Channel.CONTROL, Channel.STDIN])
def test_whatever_comes_on_another_channel_is_kept(overflow: Overflow, channel: Channel) -> None:
    assert overflow.take(channel, message("stream")) == []
    assert overflow.take(channel, [b"garbage"]) == []


GARBAGE = {
    "nothing": [],
    "an empty part": [b""],
    "no delimiter": [b"x", b"y"],
    "the delimiter alone": [b"<IDS|MSG>"],
    "a signature alone": [b"<IDS|MSG>", b""],
    "no JSON": [b"<IDS|MSG>", b"", b"{", b"}", b"", b""],
    "no objects": [b"<IDS|MSG>", b"", b"[]", b"7", b"", b""],
    "deep": [b"<IDS|MSG>", b"", b"[" * 9_000, b"[" * 9_000, b"", b""],
    "a type that is none": message(["stream"], 7),
    "no UTF-8": [b"<IDS|MSG>", b"", b'{"msg_type": "\xff"}', b"\xff\xfe\x00", b"", b""],
    "a huge number": [b"<IDS|MSG>", b"", b"9" * 9_000, b"{}", b"", b""],
    "a huge header": [b"<IDS|MSG>", b"", b'{"msg_type": "status"' + b" " * 10_000 + b"}", b"{}", b"", b""],
}


@pytest.mark.parametrize("parts", GARBAGE.values(), ids=GARBAGE)
def test_what_no_client_could_read_is_left_out_and_counted(overflow: Overflow, parts: list[bytes]) -> None:
    assert overflow.take(Channel.IOPUB, parts) is None
    assert overflow.flush() == [gap("", parts)]


@pytest.mark.parametrize("parent", [7, None, ["x"], "x" * 257, "half a surrogate \udcff", "a\0b", "line\n"])
def test_a_parent_that_is_no_good_name_is_counted_under_none(overflow: Overflow, parent: Any) -> None:
    """What is told of it must be sayable as JSON again, and short."""
    output = message("stream", parent)
    assert overflow.take(Channel.IOPUB, output) is None
    assert overflow.flush() == [gap("", output)]


def test_a_gap_is_told_before_the_next_message_of_the_same_parent(overflow: Overflow) -> None:
    first, second, other = message("stream", "a"), message("error", "a", b"x" * 1000, 3), message("stream", "b")
    for output in (first, other, second):
        assert overflow.take(Channel.IOPUB, output) is None
    assert overflow.take(Channel.IOPUB, message("status", "c")) == []
    assert overflow.take(Channel.IOPUB, message("status", "a")) == [gap("a", first, second)]
    assert overflow.take(Channel.IOPUB, message("status", "a")) == []
    assert overflow.take(Channel.SHELL, message("execute_reply", "b")) == [gap("b", other)]
    assert not overflow.pending


def test_parents_beyond_the_bound_are_counted_together(overflow: Overflow) -> None:
    outputs = [message("stream", f"cell-{number}") for number in range(PARENTS + 1000)]
    for output in outputs + outputs:
        assert overflow.take(Channel.IOPUB, output) is None
    found = overflow.flush()
    assert found[:PARENTS] == [gap(f"cell-{number}", outputs[number], outputs[number]) for number in range(PARENTS)]
    assert found[PARENTS:] == [gap("", *outputs[PARENTS:], *outputs[PARENTS:])]


def test_where_a_parent_was_told_there_is_room_for_another(overflow: Overflow) -> None:
    for number in range(PARENTS):
        overflow.take(Channel.IOPUB, message("stream", f"cell-{number}"))
    assert overflow.take(Channel.IOPUB, message("status", "cell-5")) != []
    overflow.take(Channel.IOPUB, message("stream", "new"))
    assert overflow.flush()[-1] == gap("new", message("stream", "new"))


@given(st.lists(st.binary(max_size=40) | st.just(b"<IDS|MSG>"), max_size=8), st.sampled_from(Channel))
def test_no_parts_are_too_strange(parts: list[bytes], channel: Channel) -> None:
    overflow = Overflow()
    found = overflow.take(channel, parts)
    assert (found is None) is overflow.pending
    assert all(isinstance(part, bytes) for part in envelope(parts))
    frames.pack_json(frames.Kind.EVENT, {"gaps": overflow.flush()})


STEP = st.tuples(
    st.booleans(),
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from([*sorted(DROPPABLE), *KEPT]),
    st.integers(0, 50),
)


@given(st.lists(STEP, max_size=80))
def test_kept_and_counted_are_all_there_were_and_in_order(steps: list[tuple[bool, str, str, int]]) -> None:
    """As `relay` uses it: each step is a message, and whether there is room for it."""
    overflow = Overflow()
    told: list[dict[str, Any] | int] = []
    messages = [message(kind, parent, b"x" * size) for _, parent, kind, size in steps]
    for number, ((room, _, _, _), parts) in enumerate(zip(steps, messages, strict=True)):
        gaps = overflow.flush() if room else overflow.take(Channel.IOPUB, parts)
        if gaps is not None:
            told += [*gaps, number]
    told += overflow.flush()
    for name in ("a", "b", "c"):
        expected = [number for number, step in enumerate(steps) if step[1] == name]
        for item in told:
            if isinstance(item, int) and steps[item][1] == name:
                # Nothing is missing before it that was not told.
                assert expected.pop(0) == item
            elif isinstance(item, dict) and item["parent"] == name:
                missing, expected = expected[: item["messages"]], expected[item["messages"] :]
                assert all(steps[number][2] in DROPPABLE and not steps[number][0] for number in missing)
                assert item == gap(name, *(messages[number] for number in missing))
        assert expected == []
