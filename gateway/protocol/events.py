"""The events of an execution, and the numbered log that keeps them.

An `Event` is what happened, as plain data; its number and time are given by the `EventLog` that it is appended to, and it
is encoded as JSON at most once however many clients read it. docs/native-api.md lists the types and their members.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import orjson

EventType = Literal[
    "queued",
    "started",
    "stream",
    "display",
    "update_display",
    "clear_output",
    "result",
    "error",
    "input_request",
    "interrupt",
    "truncated",
    "gap",
    "warning",
    "state",
    "ended",
]
EndStatus = Literal["ok", "error", "aborted", "timeout", "died", "cancelled"]

OUTPUT_TYPES = frozenset({"stream", "display", "update_display", "clear_output", "result", "error"})
"""The types that come from what the code emits; the output budget counts these alone."""


@dataclass(frozen=True, slots=True)
class Payload:
    """An event before it has a place in a log: its type and the members of that type, JSON values all."""

    type: EventType
    members: dict[str, Any]


@dataclass(frozen=True)
class Event:
    """One numbered event. `seq` counts from 1 within its log; `time` is RFC 3339 with six digits and Z."""

    seq: int
    type: EventType
    time: str
    execution_id: str | None
    members: dict[str, Any] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "type": self.type,
            "time": self.time,
            "execution_id": self.execution_id,
            **self.members,
        }

    @classmethod
    def from_json(cls, line: bytes) -> "Event":
        """The event that `json` has given; raises ValueError or LookupError for anything else."""
        members = orjson.loads(line)
        return cls(members.pop("seq"), members.pop("type"), members.pop("time"), members.pop("execution_id"), members)

    @cached_property
    def json(self) -> bytes:
        """The event as one line of JSON, without a newline."""
        return orjson.dumps(self.to_dict())


def coalesce(payloads: list[Payload]) -> list[Payload]:
    """The outputs of one read without what nobody could have seen: a burst becomes a few events, order is kept.

    Outputs that a later `clear_output` of the same burst erases are dropped, of several updates of one display the last stays,
    and neighbouring stream texts of one name become one.
    """
    return merge_streams(_last_updates(_after_last_clear(payloads)))


_VISIBLE = frozenset({"stream", "display", "result", "error"})


def _after_last_clear(payloads: list[Payload]) -> list[Payload]:
    shown_later = False
    for index in range(len(payloads) - 1, -1, -1):
        payload = payloads[index]
        # With `wait` the erasing happens at the next output: only if that is in the same burst is the rest unseen.
        if payload.type == "clear_output" and (shown_later or not payload.members["wait"]):
            # Updates stay: they may concern what another cell has displayed.
            return [earlier for earlier in payloads[:index] if earlier.type == "update_display"] + payloads[index:]
        shown_later = shown_later or payload.type in _VISIBLE
    return payloads


def _last_updates(payloads: list[Payload]) -> list[Payload]:
    if sum(payload.type == "update_display" for payload in payloads) < 2:
        return payloads
    seen: set[str] = set()
    kept: list[Payload] = []
    for payload in reversed(payloads):
        if payload.type == "update_display":
            display_id = payload.members["display_id"] or ""
            if display_id in seen:
                continue
            seen.add(display_id)
        elif payload.type in ("display", "clear_output"):
            # An update before a new display of the same id, or before a clear, concerns other outputs.
            seen.clear()
        kept.append(payload)
    kept.reverse()
    return kept


def merge_streams(payloads: list[Payload]) -> list[Payload]:
    """Join neighbouring stream payloads of the same name, keeping order: a burst of prints becomes one event."""
    merged: list[Payload] = []
    texts: list[str] = []
    name = ""

    def flush() -> None:
        if texts:
            merged.append(Payload("stream", {"name": name, "text": "".join(texts)}))
            texts.clear()

    for payload in payloads:
        if payload.type != "stream":
            flush()
            merged.append(payload)
            continue
        if payload.members["name"] != name:
            flush()
            name = payload.members["name"]
        texts.append(payload.members["text"])
    flush()
    return merged
