"""A log of events as a response: JSON Lines or Server-Sent Events, and which of them a client has asked for.

Formats: https://jsonlines.org and https://html.spec.whatwg.org/multipage/server-sent-events.html. Every event was encoded once,
when the first reader came; here its bytes are only framed.
"""

from collections.abc import AsyncIterator
from typing import Any, Literal

import anyio
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event

from gateway.kernels.log import EventLog
from gateway.protocol.events import Event

Form = Literal["json", "jsonl", "sse"]
_MEDIA: dict[str, Form] = {
    "application/json": "json",
    "application/x-ndjson": "jsonl",
    "application/jsonl": "jsonl",
    "application/x-jsonlines": "jsonl",
    "text/event-stream": "sse",
}
_KEEP_ALIVE = 15.0
"""Seconds of silence after which an SSE comment keeps proxies from closing the stream."""
_EVENT_SCHEMA = {"$ref": "#/components/schemas/EventDocument"}
EVENT_CONTENT: dict[str, Any] = {
    "application/x-ndjson": {"schema": _EVENT_SCHEMA},
    "text/event-stream": {"schema": {"type": "string"}},
}


def chosen(accept: str | None, default: Form = "json") -> Form:
    """The first media type of an Accept header (RFC 9110 section 12.5.1, by order) that is known here."""
    for item in (accept or "").split(","):
        media = item.partition(";")[0].strip().lower()
        if media in _MEDIA:
            return _MEDIA[media]
    return default


def respond(log: EventLog, form: Form, after: int = 0) -> StreamingResponse:
    """The events numbered above `after`, then those that come, until the log closes. A client that leaves ends only this."""
    headers = {"X-Accel-Buffering": "no"}
    if form == "sse":
        return StreamingResponse(_sse(log, after), media_type="text/event-stream", headers=headers)
    return StreamingResponse(_lines(log, after), media_type="application/x-ndjson", headers=headers)


async def _lines(log: EventLog, after: int) -> AsyncIterator[bytes]:
    async for events in log.follow(after):
        yield b"".join(event.json + b"\n" for event in events)


async def _sse(log: EventLog, after: int) -> AsyncIterator[bytes]:
    while True:
        events = log.read(after)
        if events:
            after = events[-1].seq
            yield b"".join(_sse_event(event) for event in events)
        elif log.closed:
            return
        else:
            with anyio.move_on_after(_KEEP_ALIVE) as silence:
                await log.changed()
            if silence.cancelled_caught:
                yield b": still here\n\n"


def _sse_event(event: Event) -> bytes:
    return format_sse_event(data_str=event.json.decode(), event=event.type, id=str(event.seq))
