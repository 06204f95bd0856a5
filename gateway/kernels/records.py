"""Events as a store keeps them: lines of JSON in chunks, with what is large beside them. Pure.

A large value leaves `null` at its place, and the line's own `references` name it: `{"image/png": {"size": 123456}}`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from gateway.protocol.events import Event
from gateway.protocol.large import LIMIT
from gateway.store.base import AddEvents, Chunk, LargeValue

_CHUNK = 1024 * 1024
"""Bytes of lines after which another chunk begins."""


def to_changes(log: str, events: Sequence[Event]) -> list[AddEvents]:
    """The changes that add these events, which are consecutive."""
    changes: list[AddEvents] = []
    lines: list[bytes] = []
    large: list[LargeValue] = []
    first, size = 0, 0
    for event in events:
        line = event.json
        if len(line) > LIMIT:
            line, values = _set_apart(event)
            large += values
        lines.append(line)
        first = first or event.seq
        size += len(line)
        if size > _CHUNK:
            changes.append(_change(log, first, event.seq, lines, large))
            lines, large, first, size = [], [], 0, 0
    if lines:
        changes.append(_change(log, first, events[-1].seq, lines, large))
    return changes


def _change(log: str, first: int, last: int, lines: list[bytes], large: list[LargeValue]) -> AddEvents:
    return AddEvents(log, Chunk(first, last, b"\n".join([*lines, b""])), tuple(large))


def _set_apart(event: Event) -> tuple[bytes, list[LargeValue]]:
    data = event.members.get("data")
    if not isinstance(data, dict):
        return event.json, []
    values = {media: orjson.dumps(value) for media, value in data.items()}
    large = {media: value for media, value in values.items() if len(value) > LIMIT}
    if not large:
        return event.json, []
    kept = {media: None if media in large else value for media, value in data.items()}
    references = {media: {"size": len(value)} for media, value in large.items()}
    document = {**event.to_dict(), "data": kept, "references": references}
    return orjson.dumps(document), [LargeValue(event.seq, media, value) for media, value in large.items()]


def from_chunk(chunk: Chunk, large: Iterable[LargeValue], after: int = 0) -> Iterator[Event]:
    """The events of a chunk numbered above `after`, whole again."""
    values: dict[int, dict[str, bytes]] = {}
    for value in large:
        values.setdefault(value.seq, {})[value.media] = value.data
    for line in chunk.lines.split(b"\n")[:-1]:
        event = Event.from_json(line)
        if event.seq <= after:
            continue
        if event.seq in values:
            _put_back(event.members, values[event.seq])
        yield event


def _put_back(members: dict[str, Any], values: dict[str, bytes]) -> None:
    members.pop("references", None)
    for media, value in values.items():
        members["data"][media] = orjson.loads(value)
