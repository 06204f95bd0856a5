"""A numbered log of events that any number of readers follow, each at its own pace.

Appending never waits: a reader that stalls holds a position in the log, not a queue. An event can be read once it is safe: with
`on_append` the owner of the log sees to it that it is stored, and says so by `publish`; so no reader ever holds a number that a
gateway started anew would give to something else. Bounds on what is kept are set by whoever appends.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime

import anyio

from gateway.protocol.events import Event, Payload

_OVERHEAD = 500
"""Bytes that an event costs besides its payload."""


def timestamp() -> str:
    """Now, RFC 3339 in UTC with six digits and Z: what Jupyter's clients parse."""
    return rfc3339(time.time())


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch in the same form."""
    # isoformat costs a tenth of strftime, and there are several to a cell.
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


class EventLog:
    """Events from number 1 on. With `keep_bytes`, only the last events of about that size are held; a reader that is behind
    them is told by a `gap`."""

    def __init__(
        self, execution_id: str | None, keep_bytes: int | None = None, on_append: Callable[[float], None] | None = None
    ) -> None:
        self.finished = anyio.Event()
        """Set once the log is closed and its last event can be read."""
        self.settled = anyio.Event()
        """Set then, or when the gateway lets go of what goes on: nobody is to wait here any longer."""
        self._execution_id = execution_id
        self._keep_bytes = keep_bytes
        self._on_append = on_append
        self._events: list[Event] = []
        self._sizes: list[int] = []
        self._kept = 0
        self._last = self._taken = self._published = 0
        self._closed = False
        self._changed: anyio.Event | None = None

    @property
    def last_seq(self) -> int:
        """Number of the last event that can be read."""
        return self._published

    @property
    def closed(self) -> bool:
        """Nothing more will come after `last_seq`."""
        return self._closed and self._published == self._last

    def restore(self, events: Sequence[Event], last: int, sizes: Sequence[int] = ()) -> None:
        """Takes up a log that was stored: the events that are held, and the number of the last."""
        self._events, self._sizes = list(events), list(sizes)
        self._kept = sum(sizes)
        self._last = self._taken = self._published = last

    def append(self, payloads: Iterable[Payload], within: float = 0.0) -> None:
        """`within`: seconds that it may take until they can be read."""
        now = timestamp()
        for payload in payloads:
            self._last += 1
            self._events.append(Event(self._last, payload.type, now, self._execution_id, payload.members))
        self._announce(within)

    def append_bounded(self, payload: Payload, size: int) -> None:
        """Appends one event of about `size` bytes, and forgets the oldest readable ones beyond `keep_bytes`."""
        self._sizes.append(size + _OVERHEAD)
        self._kept += size + _OVERHEAD
        self.append([payload])
        while self._keep_bytes is not None and self._kept > self._keep_bytes and len(self._sizes) > 1:
            if self._events[0].seq > self._published:
                break
            self._kept -= self._sizes.pop(0)
            del self._events[0]

    def close(self) -> None:
        """Nothing more will be appended; readers end after the last event."""
        self._closed = True
        self._announce()
        self._wake()

    def release(self) -> None:
        """The gateway lets go of what goes on."""
        self.settled.set()

    # storing

    def take(self) -> list[Event]:
        """The events that were appended since this was asked last, to be stored."""
        fresh = self._last - self._taken
        self._taken = self._last
        return self._events[max(0, len(self._events) - fresh) :] if fresh else []

    @property
    def last_taken(self) -> int:
        return self._taken

    @property
    def first_kept(self) -> int:
        return self._events[0].seq if self._events else self._last + 1

    def guard(self, on_append: Callable[[float], None], fresh: bool = True) -> None:
        """From now on events can be read when they are stored. `fresh`: those there are have not been stored yet."""
        self._on_append = on_append
        if fresh and self._events:
            self._taken = self._events[0].seq - 1

    def publish(self, last: int) -> None:
        """The events up to this number are safe and may be read."""
        self._published = max(self._published, last)
        self._wake()

    def _announce(self, within: float = 0.0) -> None:
        if self._on_append is None:
            self._taken = self._last
            self.publish(self._last)
        else:
            self._on_append(within)

    # reading

    def since(self, after: int) -> list[Event]:
        """The events numbered above `after`, as far as they are kept."""
        end = len(self._events) - (self._last - self._published)
        missing = self._published - after
        return self._events[max(0, end - missing) : end] if missing > 0 else []

    def read(self, after: int) -> list[Event]:
        """As `since`, with a `gap` first where events above `after` are kept no more."""
        events = self.since(after)
        missing = events[0].seq - max(after, 0) - 1 if events else 0
        if missing > 0:
            gap = {"events": missing, "bytes": None}
            events.insert(0, Event(events[0].seq - 1, "gap", events[0].time, self._execution_id, gap))
        return events

    async def page(self, after: int, limit: int) -> list[Event]:
        return self.read(after)[:limit]

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

    async def until(self, seq: int) -> None:
        """Waits until the event of this number can be read, or the log is closed."""
        while self._published < seq and not self.closed:
            await self.changed()

    async def changed(self) -> None:
        """Waits for the next event that can be read, or the end."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self.closed:
            self.finished.set()
            self.settled.set()
        if self._changed is not None:
            self._changed.set()
            self._changed = None
