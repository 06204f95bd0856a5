"""Events as data: what a burst is boiled down to must show the same as the burst itself."""

from itertools import pairwise
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.events import Event, Payload, coalesce, merge_streams
from gateway.protocol.outputs import OutputCollector

STREAMS = st.builds(
    lambda name, text: Payload("stream", {"name": name, "text": text}),
    st.sampled_from(["stdout", "stderr"]),
    st.text(max_size=3),
)
IDS = st.sampled_from([None, "x", "y"])
BUNDLES = st.builds(lambda text: {"text/plain": text}, st.text("abc", max_size=2))
DISPLAYS = st.builds(
    lambda kind, data, display_id: Payload(kind, {"data": data, "metadata": {}, "display_id": display_id}),
    st.sampled_from(["display", "update_display"]),
    BUNDLES,
    IDS,
)
OTHERS = st.sampled_from(
    [
        Payload("clear_output", {"wait": False}),
        Payload("clear_output", {"wait": True}),
        Payload("error", {"ename": "E", "evalue": "", "traceback": []}),
        Payload("result", {"data": {}, "metadata": {}, "execution_count": 1}),
    ]
)
BURSTS = st.lists(st.lists(STREAMS | DISPLAYS | OTHERS, max_size=12), max_size=4)


def shown(bursts: list[list[Payload]]) -> tuple[list[Any], list[Any]]:
    """What a notebook shows: in an earlier cell, whose displays may be updated, and in the cell of these bursts."""
    displays: dict[str, list[Any]] = {}
    earlier = OutputCollector(displays)
    for display_id in ("x", "y"):
        earlier.add_members("display", {"data": {"text/plain": "before"}, "metadata": {}, "display_id": display_id})
    collector = OutputCollector(displays)
    for burst in bursts:
        for payload in burst:
            collector.add_members(payload.type, payload.members)
    return earlier.finish(), collector.finish()


@given(BURSTS)
def test_a_coalesced_burst_shows_the_same(bursts: list[list[Payload]]) -> None:
    assert shown([coalesce(list(burst)) for burst in bursts]) == shown(bursts)


@given(st.lists(STREAMS | DISPLAYS | OTHERS, max_size=30))
def test_coalescing_takes_away_and_keeps_the_order(burst: list[Payload]) -> None:
    once = coalesce(list(burst))
    assert len(once) <= len(burst)
    assert coalesce(list(once)) == once
    position = -1
    for payload in once:
        if payload.type != "stream":
            position = next(index for index in range(position + 1, len(burst)) if burst[index] == payload)


@given(st.lists(STREAMS | DISPLAYS | OTHERS, max_size=30))
def test_merging_joins_neighbours_of_one_name_and_nothing_else(burst: list[Payload]) -> None:
    merged = merge_streams(burst)

    def texts(payloads: list[Payload]) -> list[tuple[str, str]]:
        return [
            (payload.members["name"], char)
            for payload in payloads
            if payload.type == "stream"
            for char in payload.members["text"]
        ]

    assert texts(merged) == texts(burst)
    assert [payload for payload in merged if payload.type != "stream"] == [p for p in burst if p.type != "stream"]
    for first, second in pairwise(merged):
        assert not (first.type == second.type == "stream" and first.members["name"] == second.members["name"])


def stream(text: str, name: str = "stdout") -> Payload:
    return Payload("stream", {"name": name, "text": text})


def test_merging_by_example() -> None:
    clear = Payload("clear_output", {"wait": False})
    burst = [stream("a"), stream("b"), stream("c", "stderr"), stream("d"), clear, stream("e"), stream("f")]
    assert merge_streams(burst) == [stream("ab"), stream("c", "stderr"), stream("d"), clear, stream("ef")]
    assert merge_streams([]) == []
    assert merge_streams([stream("")]) == [stream("")]


def test_a_burst_of_prints_is_one_event() -> None:
    assert coalesce([stream(f"{number}\n") for number in range(5000)]) == [stream("".join(f"{n}\n" for n in range(5000)))]


def test_a_progress_bar_is_its_last_state() -> None:
    bar = [Payload("update_display", {"data": {"n": number}, "metadata": {}, "display_id": "x"}) for number in range(100)]
    assert coalesce(bar) == bar[-1:]


def test_an_event_is_encoded_once() -> None:
    event = Event(3, "stream", "2026-11-30T16:00:00.000000Z", "e", {"name": "stdout", "text": "é"})
    assert event.json is event.json
    assert orjson.loads(event.json) == event.to_dict()
    assert event.to_dict() == {
        "seq": 3,
        "type": "stream",
        "time": "2026-11-30T16:00:00.000000Z",
        "execution_id": "e",
        "name": "stdout",
        "text": "é",
    }
    assert "é" not in repr(event)
