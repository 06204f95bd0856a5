"""Which outputs of a cell are kept: its beginning and its end, and an exact count of what lies between.

What is held for the end counts as received, so it is stored like the events: `take_changes` gives what is new of it.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import orjson

from gateway.protocol.events import Payload, coalesce
from gateway.store.base import AddHeld, Change, DropHeld

Held = tuple[Payload, int]
"""An output and its size in bytes."""


class OutputBudget:
    """Which outputs are kept: the first half of the limit at once, then a ring that holds the last half until the end."""

    def __init__(self, max_bytes: int, max_events: int) -> None:
        self.limit = max_bytes
        self.size = 0
        """Bytes of all output, kept or not."""
        self.left_out_bytes = 0
        self.left_out_events = 0
        self.exceeded = False
        """The head is full: from here on outputs wait in the ring."""
        self._head_bytes, self._head_events = max_bytes // 2, max_events // 2
        self._tail_bytes, self._tail_events = max_bytes - self._head_bytes, max_events - self._head_events
        self._question_bytes, self._question_events = self._tail_bytes, self._tail_events
        self._piece = max(1024, min(65_536, max_bytes // 32))
        self._tail: deque[Held] = deque()
        self._tail_size = 0
        self._next = self._taken = self._dropped = 0
        """Of the outputs that were held: number of the next, how many were stored, how many were forgotten in the store."""

    def cut(self, payload: Payload, size: int) -> Iterable[Held]:
        """A long text in pieces, since of a text a part can be left out; anything else as it is."""
        if payload.type != "stream" or size <= self._piece:
            return ((payload, size),)
        name, text = payload.members["name"], payload.members["text"]
        step = max(1, len(text) * self._piece // size)
        starts = range(0, len(text), step)
        return ((Payload("stream", {"name": name, "text": text[i : i + step]}), size // len(starts)) for i in starts)

    def admit(self, payload: Payload, size: int) -> bool:
        """True when the output is to be told now; else it is in the ring, or counted as left out."""
        self.size += size
        if not self.exceeded and size <= self._head_bytes and self._head_events > 0:
            self._head_bytes -= size
            self._head_events -= 1
            return True
        self.exceeded = True
        self._tail.append((payload, size))
        self._tail_size += size
        self._next += 1
        while self._tail and (self._tail_size > self._tail_bytes or len(self._tail) > self._tail_events):
            pushed_out = self._tail.popleft()[1]
            self._tail_size -= pushed_out
            self.leave_out(pushed_out)
        return False

    def admit_question(self, size: int) -> bool:
        """Questions can't wait in the ring: they have as much as the ring of their own, and past it are left out."""
        self.size += size
        self._question_bytes -= size
        self._question_events -= 1
        if self._question_bytes >= 0 and self._question_events >= 0:
            return True
        self.leave_out(size)
        return False

    def leave_out(self, size: int) -> None:
        """Counts an output that is not told."""
        self.left_out_bytes += size
        self.left_out_events += 1

    @property
    def truncated(self) -> dict[str, int] | None:
        """Members of the `truncated` event; None when nothing is missing."""
        if not self.left_out_events:
            return None
        return {"bytes": self.left_out_bytes, "events": self.left_out_events, "limit": self.limit}

    def rest(self) -> list[Payload]:
        """What the end of the cell adds: `truncated` if anything is missing, then the outputs of the ring."""
        tail = [payload for payload, _ in self._tail]
        self._tail.clear()
        self._tail_size = 0
        missing = self.truncated
        return [*([Payload("truncated", dict(missing))] if missing else []), *coalesce(tail)]

    # storing

    @property
    def _first(self) -> int:
        return self._next - len(self._tail)

    def take_changes(self, execution_id: str) -> list[Change]:
        """What has come into the ring and what has left it since this was asked last."""
        changes: list[Change] = []
        first = max(self._taken, self._first)
        if first < self._next:
            fresh = [self._tail[number - self._first] for number in range(first, self._next)]
            lines = orjson.dumps([[payload.type, payload.members, size] for payload, size in fresh])
            changes.append(AddHeld(execution_id, first, self._next - 1, lines))
        if self._first > self._dropped:
            changes.append(DropHeld(execution_id, self._first))
        self._taken, self._dropped = self._next, self._first
        return changes

    def state(self) -> dict[str, Any]:
        """What `restore` needs besides the held outputs."""
        head, question = (self._head_bytes, self._head_events), (self._question_bytes, self._question_events)
        left_out = (self.left_out_bytes, self.left_out_events)
        return {
            "size": self.size,
            "exceeded": self.exceeded,
            "head": head,
            "question": question,
            "left_out": left_out,
            "next": self._next,
            "held": len(self._tail),
        }

    def restore(self, state: dict[str, Any], held: Iterable[bytes]) -> None:
        self.size, self.exceeded = state["size"], state["exceeded"]
        self._head_bytes, self._head_events = state["head"]
        self._question_bytes, self._question_events = state["question"]
        self.left_out_bytes, self.left_out_events = state["left_out"]
        self._next = self._taken = state["next"]
        items = [item for lines in held for item in orjson.loads(lines)]
        # The store forgets whole chunks: of the first, a part may have left the ring already.
        for kind, members, size in items[len(items) - state["held"] :]:
            self._tail.append((Payload(kind, members), size))
            self._tail_size += size
        self._dropped = self._first
