"""What is left out while nobody takes the kernel's output: which messages may go, and exactly how many of each cell went.

Only where the gateway has asked for it (`overflow` in WELCOME); elsewhere the kernel waits. A message counts under the msg_id of
its parent, and the count is told by an event of its own before the next message of that parent: so a reader of the link sees a gap
where the outputs are missing. Pure: `relay` says when there is no room, and sends what comes out.
"""

import json
from typing import Any

from . import frames
from .frames import Channel

DROPPABLE = frozenset({"stream", "display_data", "update_display_data", "execute_result", "error", "clear_output"})
"""What a cell shows. States, replies, questions and the messages of widgets are never left out."""
PARENTS = 64
"""Cells that are counted one by one; what further ones lose is counted under no name."""
_DELIMITER = b"<IDS|MSG>"
_MAX_HEADER = 10_000
_MAX_ID = 256

Gap = dict[str, Any]


def envelope(parts: list[bytes]) -> tuple[bytes, bytes]:
    """Header and parent header of a message in Jupyter's wire format; empty where there is none."""
    start = parts.index(_DELIMITER) if _DELIMITER in parts else len(parts)
    header, parent, *_ = [*parts[start + 2 : start + 4], b"", b""]
    return header, parent


class Overflow:
    """Counts per parent, and the events that tell them: ``{"event": "gap", "parent", "messages", "bytes"}``."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}

    @property
    def pending(self) -> bool:
        """Something was left out and is not told yet."""
        return bool(self._counts)

    def take(self, channel: Channel, parts: list[bytes]) -> list[Gap] | None:
        """A message for which there is no room: None when it is left out, else what has to be told before it."""
        header, parent = envelope(parts)
        name = _text(parent, "msg_id")
        if len(name) > _MAX_ID or not name.isprintable():
            # Of no use as a name, and half a surrogate could not be told.
            name = ""
        if channel is Channel.IOPUB and _may_go(header):
            self._count(name, frames.message_size(parts))
            return None
        return [self._gap(name)] if name in self._counts else []

    def flush(self) -> list[Gap]:
        """All that is not told yet: there is room again, or the kernel has come to its end."""
        return [self._gap(name) for name in list(self._counts)]

    def _count(self, name: str, size: int) -> None:
        if name not in self._counts and len(self._counts) >= PARENTS:
            name = ""
        messages, total = self._counts.get(name, (0, 0))
        self._counts[name] = messages + 1, total + size

    def _gap(self, name: str) -> Gap:
        messages, size = self._counts.pop(name)
        return {"event": "gap", "parent": name, "messages": messages, "bytes": size}


def _may_go(header: bytes) -> bool:
    """What has no readable type is no message that anyone could miss."""
    kind = _text(header, "msg_type")
    return not kind or kind in DROPPABLE


def _text(part: bytes, key: str) -> str:
    """A text of a header; empty when it is not there, or the header is none."""
    if len(part) > _MAX_HEADER:
        return ""
    try:
        value = json.loads(part)[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
