"""How a client reads a log of events: from where, in which form, and one value of it alone."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request, Response

from gateway.api import streams
from gateway.api.streams import EventStream, Form, Large
from gateway.api.views import EventSource
from gateway.errors import DataNotFound
from gateway.kernels.manager import KernelManager
from gateway.protocol import large

EventNumber = Annotated[int, Path(ge=1, lt=2**63)]
_ATTACHMENT = {
    "Content-Disposition": "attachment",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
}
"""What a kernel has made is never shown as a page of ours."""
DATA_CONTENT: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@dataclass(frozen=True)
class Reading:
    form: Form
    after: int
    limit: int
    large: Large

    async def of(self, events: EventSource, path: str, manager: KernelManager) -> Response:
        """`path` is where the events are read."""
        encode = streams.encoder(self.large, path)
        if self.form == "json":
            return await streams.page(events, self.after, self.limit, encode)
        return EventStream(events, self.form, manager.leaving, self.after, encode)


async def _reading(
    request: Request,
    after: Annotated[int, Query(ge=0, lt=2**63, description="Number of the last event that is known already")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Events on a page of JSON")] = 1000,
    large: Annotated[Large, Query(description="`reference`: values above 64 KiB are named instead of sent")] = "inline",
    last_event_id: Annotated[
        int | None, Header(alias="Last-Event-ID", ge=0, lt=2**63, description="Counts more than `after`; of SSE alone")
    ] = None,
) -> Reading:
    form = streams.chosen(request.headers.get("accept"))
    resumed = form == "sse" and last_event_id is not None
    return Reading(form, last_event_id if resumed and last_event_id is not None else after, limit, large)


HowToRead = Annotated[Reading, Depends(_reading)]


async def data_of(events: EventSource, seq: int, mime: str) -> Response:
    """One value of an event's MIME bundle; raises `DataNotFound`."""
    found = await events.page(seq - 1, 1)
    data = found[0].members.get("data") if found and found[0].seq == seq else None
    if not isinstance(data, dict) or mime not in data:
        raise DataNotFound("This event has no value of this type. Its `data` and `references` name those that it has.")
    body, media = large.content(mime, data[mime])
    return Response(body, media_type=media, headers=_ATTACHMENT)
