"""A numbered log of events that any number of readers follow, each at its own pace.

Appending never waits: a reader that stalls holds a position in the log, not a queue. Bounds on what is kept are set by whoever
appends (the output budget of an execution, the ring of a kernel's own events).
"""

from collections import deque
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime

import anyio

from gateway.protocol.events import Event, Payload

_OVERHEAD = 500
"""Bytes that an event costs besides its payload."""


def timestamp() -> str:
    """Now, RFC 3339 in UTC with six digits and Z: what Jupyter's clients parse."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class EventLog:
    """Events from number 1 on. With `keep_bytes`, only the last events of about that size are held; a reader that is behind
    them is told by a `gap`."""

    def __init__(self, execution_id: str | None, keep_bytes: int | None = None) -> None:
        self.closed = False
        self._execution_id = execution_id
        self._events: deque[Event] = deque()
        self._sizes: deque[int] = deque()
        self._keep_bytes = keep_bytes
        self._kept = 0
        self._last = 0
        self._changed: anyio.Event | None = None

    @property
    def last_seq(self) -> int:
        return self._last

    def append(self, payloads: Iterable[Payload]) -> None:
        time = timestamp()
        for payload in payloads:
            self._last += 1
            self._events.append(Event(self._last, payload.type, time, self._execution_id, payload.members))
        self._wake()

    def append_bounded(self, payload: Payload, size: int) -> None:
        """Appends one event of about `size` bytes, and forgets the oldest beyond `keep_bytes`."""
        self.append([payload])
        self._sizes.append(size + _OVERHEAD)
        self._kept += size + _OVERHEAD
        while self._keep_bytes is not None and self._kept > self._keep_bytes and len(self._sizes) > 1:
            self._kept -= self._sizes.popleft()
            self._events.popleft()

    def close(self) -> None:
        """Nothing more will come; readers end after the last event."""
        self.closed = True
        self._wake()

    def since(self, after: int) -> list[Event]:
        """The events numbered above `after`, as far as they are kept."""
        missing = self._last - after
        if missing <= 0:
            return []
        if missing >= len(self._events):
            return list(self._events)
        return [self._events[i] for i in range(len(self._events) - missing, len(self._events))]

    def read(self, after: int) -> list[Event]:
        """As `since`, with a `gap` first where events above `after` are kept no more."""
        events = self.since(after)
        missing = events[0].seq - max(after, 0) - 1 if events else 0
        if missing > 0:
            events.insert(0, Event(events[0].seq - 1, "gap", events[0].time, self._execution_id, {"events": missing}))
        return events

    async def follow(self, after: int = 0) -> AsyncIterator[list[Event]]:
        """Batches of events, those there are and then those that come, until the log is closed."""
        while True:
            events = self.read(after)
            if events:
                after = events[-1].seq
                yield events
            elif self.closed:
                return
            else:
                await self.changed()

    async def changed(self) -> None:
        """Waits for the next append or close."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
