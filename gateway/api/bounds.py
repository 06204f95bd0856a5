"""Bounds on a request's body: how large it may be, and how slow."""

import anyio
from starlette.types import Message, Receive

from gateway.errors import BodyTooLarge, MalformedBody


def bounded(receive: Receive, limit: int, patience: float) -> Receive:
    """A `receive` that refuses a body above `limit` bytes, or one that stops coming for `patience` seconds."""
    size = 0
    complete = False

    async def receive_on() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            with anyio.fail_after(patience):
                message = await receive()
        except TimeoutError:
            raise MalformedBody(f"The body stopped coming for {patience:g} s.") from None
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > limit:
            raise too_large(limit)
        return message

    return receive_on


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit} bytes, the limit of this route.", limit=limit)
