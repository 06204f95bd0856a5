"""A log of events as a response: a page of JSON, JSON Lines or Server-Sent Events, and which of them a client has asked for.

Formats: https://jsonlines.org and https://html.spec.whatwg.org/multipage/server-sent-events.html. Every event was encoded once,
when the first reader came; here its bytes are only framed.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, cast

import anyio
import structlog
from fastapi import Response
from fastapi.sse import format_sse_event
from starlette.types import Receive, Scope, Send

from gateway.api.attendance import attend
from gateway.api.views import EventSource
from gateway.errors import GatewayError
from gateway.protocol import large
from gateway.protocol.events import Event

log = structlog.get_logger()

Form = Literal["json", "jsonl", "sse"]
Large = Literal["inline", "reference"]
Encode = Callable[[Event], bytes]
"""An event as JSON."""
_MEDIA: dict[str, Form] = {
    "application/json": "json",
    "application/x-ndjson": "jsonl",
    "application/jsonl": "jsonl",
    "application/x-jsonlines": "jsonl",
    "text/event-stream": "sse",
}
_KEEP_ALIVE = 10.0
"""After one to two times so many seconds of silence an SSE comment keeps proxies from closing the stream."""
_PIECE = 256 * 1024
"""Bytes that are written at once, more or less: a reader that is far behind needs no second copy of all that it has missed."""
_EVENT_SCHEMA = {"$ref": "#/components/schemas/EventDocument"}
EVENT_CONTENT: dict[str, Any] = {
    "application/x-ndjson": {"schema": _EVENT_SCHEMA},
    "text/event-stream": {"schema": {"type": "string"}},
}
PAGE_CONTENT: dict[str, Any] = {"application/json": {"schema": {"$ref": "#/components/schemas/EventPage"}}, **EVENT_CONTENT}


def chosen(accept: str | None) -> Form:
    """The first media type of an Accept header (RFC 9110 section 12.5.1, by order) that is known here; JSON if none is."""
    for item in (accept or "").split(","):
        media = item.partition(";")[0].strip().lower()
        if media in _MEDIA:
            return _MEDIA[media]
    return "json"


def encoder(choice: Large, events_path: str) -> Encode:
    """`events_path` is where the log's events are read."""
    return plain if choice == "inline" else partial(large.referenced, prefix=events_path)


def plain(event: Event) -> bytes:
    return event.json


class EventStream(Response):
    """The events numbered above `after`, then those that come, until the log is closed or the gateway leaves.

    `on_left` is awaited when the client goes away before the last of them.
    """

    def __init__(
        self,
        events: EventSource,
        form: Form,
        leaving: anyio.Event,
        after: int = 0,
        encode: Encode = plain,
        headers: dict[str, str] | None = None,
        on_left: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        # Without a body, which is what the base class would take the length of.
        self.status_code = 200
        self.media_type = "text/event-stream" if form == "sse" else "application/x-ndjson"
        self.background = None
        self.init_headers({"X-Accel-Buffering": "no", **(headers or {})})
        self._events, self._form, self._leaving, self._after, self._encode = events, form, leaving, after, encode
        self._on_left = on_left
        self._spoke = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            outcome = await attend(partial(self._tell, send), self._leaving, receive)
        except GatewayError as error:
            # Too late for a problem: the answer is cut, so that nobody takes it for the whole.
            log.warning("stream_cut", code=error.code, reason=error.detail)
            return
        if outcome != "client_left":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif self._on_left is not None:
            await self._on_left()

    async def _tell(self, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            if self._form == "sse":
                tasks.start_soon(self._break_silence, send)
            batches = cast(AsyncGenerator[list[Event], None], self._events.follow(self._after))
            async with aclosing(batches):
                async for batch in batches:
                    for piece in self._pieces(batch):
                        self._spoke = True
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
            tasks.cancel_scope.cancel()

    async def _break_silence(self, send: Send) -> None:
        while True:
            await anyio.sleep(_KEEP_ALIVE)
            if not self._spoke:
                await send({"type": "http.response.body", "body": b": still here\n\n", "more_body": True})
            self._spoke = False

    def _pieces(self, events: Sequence[Event]) -> Iterator[bytes]:
        frames: list[bytes] = []
        size = 0
        for event in events:
            frames.append(self._frame(event))
            size += len(frames[-1])
            if size > _PIECE:
                yield b"".join(frames)
                frames, size = [], 0
        if frames:
            yield b"".join(frames)

    def _frame(self, event: Event) -> bytes:
        encoded = self._encode(event)
        if self._form == "jsonl":
            return encoded + b"\n"
        return format_sse_event(data_str=encoded.decode(), event=event.type, id=str(event.seq))


async def page(events: EventSource, after: int, limit: int, encode: Encode = plain) -> Response:
    """What is there, as `EventPage`."""
    found = await events.page(after, limit)
    last = found[-1].seq if found else after
    complete = events.closed and last >= events.last_seq
    tail = b'],"last_seq":%d,"complete":%s}' % (events.last_seq, b"true" if complete else b"false")
    body = b'{"events":[' + b",".join(encode(event) for event in found) + tail
    return Response(body, media_type="application/json")
