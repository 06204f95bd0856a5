"""Files in and out of a sandbox over its link, in pieces, at the pace of the slower side.

The supervisor opens and names every file (`gateway.supervisor.files`); what arrives here are bytes and a few words, none of which
is ever used as a path on this host.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import anyio

from gateway.errors import FileMissing, GatewayError, InvalidPath, LinkClosed, MalformedBody, NotAFile, SandboxDiskFull
from gateway.sandboxes.link import CommandFailed, Link
from gateway.supervisor import frames
from gateway.supervisor.frames import Frame, FrameError, Kind

_ERRORS: dict[str, type[GatewayError]] = {
    "file_not_found": FileMissing,
    "invalid_path": InvalidPath,
    "not_a_file": NotAFile,
    "sandbox_disk_full": SandboxDiskFull,
    "malformed_archive": MalformedBody,
}


def _translate(code: str, text: str) -> GatewayError:
    if code == "sandbox_gone":
        return LinkClosed("The sandbox of this kernel ended during a file transfer.")
    return _ERRORS.get(code, NotAFile)(f"{text[:500]}.")


class _Stream:
    """The frames of one transfer, and the credit that the other side has granted."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.number = link.open_stream(self._take)
        self.credit = frames.WINDOW
        self.chunks: deque[bytes] = deque()
        self.ended = False
        self.error: GatewayError | None = None
        self._buffered = 0
        self._changed = anyio.Event()

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.DATA:
            chunk = frames.unpack_data(frame.payload)[1]
            self._buffered += len(chunk)
            if self._buffered > frames.WINDOW:
                raise FrameError("more file data than was asked for")
            self.chunks.append(chunk)
        elif frame.kind is Kind.CREDIT:
            self.credit += frames.unpack_credit(frame.payload)[1]
        else:
            self.ended = True
            value = _json(frame.payload[4:])
            if isinstance(error := value.get("error"), dict):
                self.error = _translate(str(error.get("code")), str(error.get("message", "")))
        self.wake()

    def next_chunk(self) -> bytes:
        """Takes a piece that has arrived and grants the room it leaves."""
        chunk = self.chunks.popleft()
        self._buffered -= len(chunk)
        self.link.post_frame(frames.pack_credit(self.number, len(chunk)))
        return chunk

    def wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def wait(self) -> None:
        await self._changed.wait()


def _json(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


async def ask(link: Link, op: str, **arguments: Any) -> dict[str, Any]:
    """A file command without a stream (list, stat, delete); its refusals become errors for clients."""
    try:
        return await link.command(op, **arguments)
    except CommandFailed as failure:
        raise _translate(failure.code, str(failure)) from None


async def read(link: Link, op: str, path: str) -> AsyncIterator[bytes]:
    """`read` a file or `pack` a directory: an empty piece once it is open, then its bytes; raises what `ask` raises."""
    stream = _Stream(link)
    try:
        await ask(link, op, path=path, stream=stream.number)
        yield b""
        while True:
            while stream.chunks:
                yield stream.next_chunk()
            if stream.ended:
                break
            await stream.wait()
        if stream.error is not None:
            raise stream.error
    finally:
        if not stream.ended:
            link.post_frame(frames.pack_data_end(stream.number, {"error": {"code": "cancelled"}}))
        link.close_stream(stream.number)


async def write(link: Link, op: str, path: str, source: AsyncIterator[bytes]) -> dict[str, Any]:
    """`write` a file or `unpack` a tar from `source`; the supervisor's answer once all of it is in place."""
    stream = _Stream(link)
    try:
        return await _write(stream, op, path, source)
    except CommandFailed as failure:
        raise _translate(failure.code, str(failure)) from None
    finally:
        link.close_stream(stream.number)


async def _write(stream: _Stream, op: str, path: str, source: AsyncIterator[bytes]) -> dict[str, Any]:
    link = stream.link
    number, future = link.post(op, path=path, stream=stream.number)
    future.add_done_callback(lambda _: stream.wake())
    complete = False
    try:
        async for data in source:
            await _send(stream, data, future)
            if future.done():
                break
        await link.send_frame(frames.pack_data_end(stream.number, {}))
        complete = True
        return await link.reply(number, future, op, deadline=60.0)
    finally:
        if not complete:
            link.post_frame(frames.pack_data_end(stream.number, {"error": {"code": "cancelled"}}))
        link.forget(number)


async def _send(stream: _Stream, data: bytes, answered: "asyncio.Future[dict[str, Any]]") -> None:
    """One piece from the source, cut to frames; stops early when the supervisor has already answered (it refused)."""
    view = memoryview(data)
    while view and not answered.done():
        if stream.credit <= 0:
            await stream.wait()
            continue
        size = min(len(view), frames.CHUNK, stream.credit)
        stream.credit -= size
        await stream.link.send_frame(frames.pack_data(stream.number, bytes(view[:size])))
        view = view[size:]
