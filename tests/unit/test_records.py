"""Events as a store keeps them: whatever an event holds, it comes back as it was."""

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.kernels import records
from gateway.protocol.events import Event
from gateway.protocol.large import LIMIT
from gateway.store.base import AddEvents, Chunk

TIME = "2026-11-30T16:00:00.000000Z"
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
own = {"seq", "type", "time", "execution_id", "data", "references"}
members = st.dictionaries(st.text(max_size=12).filter(lambda name: name not in own), json_values, max_size=5)
bundles = st.dictionaries(st.text(min_size=1, max_size=20), json_values, max_size=6)


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Consecutive events, of which some have bundles and some of these large values."""
    found = []
    first = draw(st.integers(1, 1000))
    for seq in range(first, first + draw(st.integers(1, 6))):
        content: dict[str, Any] = dict(draw(members))
        if draw(st.booleans()):
            data: dict[str, Any] = dict(draw(bundles))
            for media in draw(st.lists(st.sampled_from(sorted(data) or ["text/plain"]), max_size=2)):
                data[media] = draw(st.sampled_from(["x" * 70_000, 'é\n"' * 30_000, [1.5] * 30_000, {"a": ["b" * 80_000]}]))
            content["data"] = data
        found.append(Event(seq, "display", TIME, draw(st.none() | st.just("e")), content))
    return found


def back(changes: list[AddEvents], after: int = 0) -> list[Event]:
    return [event for change in changes for event in records.from_chunk(change.chunk, change.large, after)]


def shown(seq: int, data: dict[str, Any]) -> Event:
    return Event(seq, "display", TIME, "e", {"data": data, "metadata": {}, "display_id": None})


@given(logs())
def test_events_come_back_as_they_were(events: list[Event]) -> None:
    changes = records.to_changes("log", events)
    assert [change.log for change in changes] == ["log"] * len(changes)
    found = back(changes)
    assert found == events
    # Byte by byte: also the order of members and of MIME types, which is the kernel's order of preference.
    assert [event.json for event in found] == [event.json for event in events]


@given(logs(), st.data())
def test_events_above_any_number(events: list[Event], data: st.DataObject) -> None:
    after = data.draw(st.integers(events[0].seq - 1, events[-1].seq))
    assert back(records.to_changes("log", events), after) == [event for event in events if event.seq > after]


def test_no_events_are_no_changes() -> None:
    assert records.to_changes("log", []) == []


@pytest.mark.parametrize("value", ["x" * 100_000, {"a": "x" * 100_000}, ["é"] * 50_000], ids=["text", "object", "list"])
def test_a_large_value_is_kept_beside_its_line(value: Any) -> None:
    event = shown(7, {"text/plain": "small", "large": value, "text/html": "also small"})
    (change,) = records.to_changes("log", [event])
    (large,) = change.large
    assert (large.seq, large.media, orjson.loads(large.data)) == (7, "large", value)
    line = orjson.loads(change.chunk.lines)
    assert len(change.chunk.lines) < 1000
    assert line["data"] == {"text/plain": "small", "large": None, "text/html": "also small"}
    assert line["references"] == {"large": {"size": len(orjson.dumps(value))}}
    (found,) = back([change])
    assert list(found.members["data"].items()) == list(event.members["data"].items())
    assert "references" not in found.members


@pytest.mark.parametrize(("length", "beside"), [(LIMIT - 2, 0), (LIMIT - 1, 1)])
def test_how_large_is_large(length: int, beside: int) -> None:
    """A text of so many characters and its two quotes."""
    (change,) = records.to_changes("log", [shown(1, {"text/plain": "x" * length})])
    assert len(change.large) == beside


def test_many_middling_values_stay_in_their_line() -> None:
    event = shown(1, {f"type/{number}": "x" * 30_000 for number in range(5)})
    (change,) = records.to_changes("log", [event])
    assert change.large == ()
    assert back([change]) == [event]


def test_what_is_no_bundle_stays_in_its_line() -> None:
    event = Event(1, "stream", TIME, "e", {"name": "stdout", "text": "x" * 200_000})
    (change,) = records.to_changes("log", [event])
    assert change.large == ()
    assert back([change]) == [event]


def test_chunks_are_cut_at_whole_lines() -> None:
    events = [Event(seq, "stream", TIME, "e", {"name": "stdout", "text": "x" * 100_000}) for seq in range(5, 40)]
    changes = records.to_changes("log", events)
    assert len(changes) > 3
    numbers = [(change.chunk.first, change.chunk.last) for change in changes]
    assert numbers[0][0] == 5
    assert numbers[-1][1] == 39
    assert all(before[1] + 1 == after[0] for before, after in pairwise(numbers))
    for change in changes:
        assert len(change.chunk.lines) < 1_300_000
        assert change.chunk.lines.count(b"\n") == change.chunk.last - change.chunk.first + 1
    assert back(changes) == events


def test_large_values_go_with_the_chunk_of_their_event() -> None:
    events = [shown(seq, {"a": "x" * 80_000, "b": ["y" * 500] * 100}) for seq in range(1, 30)]
    for change in records.to_changes("log", events):
        assert all(change.chunk.first <= value.seq <= change.chunk.last for value in change.large)
    assert back(records.to_changes("log", events)) == events


def test_a_line_that_is_none_raises() -> None:
    for lines in (b"{}\n", b"nonsense\n", b'{"seq": 1}\n'):
        with pytest.raises((ValueError, LookupError)):
            list(records.from_chunk(Chunk(1, 1, lines), ()))
