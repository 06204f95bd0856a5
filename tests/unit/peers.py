"""The other side of a link, played by a test: a raw Unix socket that says what a supervisor would, or what it never should.

Tests of `Link`, `Connection` and of transfers use it against the real code over a real socket.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import anyio
import anyio.abc
import anyio.lowlevel

from gateway.sandboxes.link import Connection, Link
from gateway.settings import LinkSettings
from gateway.supervisor import frames
from gateway.supervisor.frames import Decoder, Frame, Kind

PATIENCE = 10.0
"""Seconds after which something that should have come has not; never a measure of speed."""


class Gone(Exception):
    """The gateway has closed the connection."""


class Peer:
    """One connection to a link, from the outside."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self.stream = stream
        self.decoder = Decoder(1 << 28)
        self.waiting: deque[Frame] = deque()

    async def send(self, *data: bytes) -> None:
        with anyio.fail_after(PATIENCE):
            await self.stream.send(b"".join(data))

    async def frame(self) -> Frame:
        """The next frame of the gateway; raises `Gone` at the end of the stream."""
        with anyio.fail_after(PATIENCE):
            while not self.waiting:
                try:
                    data = await self.stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    raise Gone from None
                self.waiting.extend(self.decoder.feed(data))
        return self.waiting.popleft()

    async def expect(self, kind: Kind) -> Frame:
        found = await self.frame()
        assert found.kind is kind, found
        return found

    async def greet(
        self, secret: object = "", received: object = 0, version: object = frames.VERSION, **more: object
    ) -> dict[str, Any]:
        """HELLO, and the WELCOME that answers it."""
        hello = {"version": version, "secret": secret, "received": received, "kernel": None, **more}
        await self.send(frames.pack_json(Kind.HELLO, hello))
        return frames.unpack_json((await self.expect(Kind.WELCOME)).payload)

    async def command(self) -> dict[str, Any]:
        """The next command of the gateway."""
        return frames.unpack_json((await self.expect(Kind.COMMAND)).payload)

    async def reply(self, number: int, **answer: Any) -> None:
        await self.send(frames.pack_json(Kind.REPLY, {"id": number, **answer}))

    async def gone(self) -> None:
        """Waits until the gateway has closed the connection, whatever it says before."""
        with contextlib.suppress(Gone):
            while True:
                await self.frame()


class Listener:
    """A link that listens, as an engine makes it listen."""

    def __init__(self, link: Link, address: str) -> None:
        self.link, self.address = link, address
        self.connections: list[Connection] = []

    @contextlib.asynccontextmanager
    async def dialled(self) -> AsyncIterator[Peer]:
        async with await anyio.connect_unix(self.address) as stream:
            yield Peer(stream)

    @contextlib.asynccontextmanager
    async def greeted(self, secret: object = "", received: object = 0) -> AsyncIterator[Peer]:
        async with self.dialled() as peer:
            await peer.greet(secret, received)
            yield peer


@contextlib.asynccontextmanager
async def listening(
    on_frames: Callable[[list[Frame]], None] = lambda _batch: None,
    rate: int = 0,
    restored: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Listener]:
    """A link behind a listening socket, a fresh one or one that is `restored`; closed with it at the end."""
    link = Link(LinkSettings(**settings), on_frames, lifetime=600.0, silence=60.0, rate=rate, **(restored or {}))
    listener = Listener(link, f"\0cellgate-test-{uuid4().hex}")

    def connect() -> Connection:
        listener.connections.append(Connection(link))
        return listener.connections[-1]

    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(listener.address)
    server = await asyncio.get_running_loop().create_unix_server(connect, sock=bound)
    try:
        yield listener
    finally:
        link.close()
        server.close()
        await anyio.lowlevel.checkpoint()


def message(seq: int, content: bytes = b"{}", channel: int = 4) -> bytes:
    """A MESSAGE frame whose parts are a message in shape, without a signature."""
    return frames.pack_message(channel, [b"<IDS|MSG>", b"", b"{}", b"{}", b"{}", content], seq)


def event(seq: int, **value: Any) -> bytes:
    return frames.pack_json(Kind.EVENT, value, seq)
