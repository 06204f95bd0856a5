"""The link over a container's standard streams: the multiplexing comes off whatever way the bytes are cut."""

import asyncio
import struct
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sandboxes.link import Link
from gateway.sandboxes.stdio import StdioConnection
from gateway.settings import LinkSettings
from gateway.supervisor import frames
from gateway.supervisor.frames import Frame, Kind
from tests.unit.peers import event, message

STDIN, STDOUT, STDERR = 0, 1, 2


class Pipe(asyncio.Transport):
    """Takes what is written and remembers whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def multiplexed(data: bytes, stream: int = STDOUT, size: int = 32 * 1024) -> bytes:
    """As the Docker daemon sends it: pieces with a header each."""
    pieces = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
    return b"".join(struct.pack("!BxxxI", stream, len(piece)) + piece for piece in pieces)


HELLO = frames.pack_json(Kind.HELLO, {"version": 1, "secret": "", "received": 0, "kernel": None})


def taken(pieces: list[bytes]) -> tuple[list[Frame], Link, Pipe]:
    """What a link has been handed when these pieces arrive."""
    found: list[Frame] = []

    async def receive() -> tuple[Link, Pipe]:
        link = Link(LinkSettings(max_frame=1 << 20), found.extend, 60.0, 60.0)
        connection, pipe = StdioConnection(link), Pipe()
        connection.connection_made(pipe)
        for piece in pieces:
            connection.data_received(piece)
        connection.connection_lost(None)
        link.close()
        return link, pipe

    link, pipe = anyio.run(receive)
    return found, link, pipe


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 400), st.data())
def test_any_cut_of_the_stream(contents: list[bytes], size: int, data: st.DataObject) -> None:
    sent = HELLO + b"".join(message(number, content) for number, content in enumerate(contents, start=1))
    noise = multiplexed(b"a warning of some library\n", STDERR)
    half = size % len(HELLO)
    stream = noise + multiplexed(sent[:half], size=size) + noise + multiplexed(sent[half:], size=size) + noise
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    found, link, pipe = taken([stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)])
    assert [frame.seq for frame in found] == list(range(1, len(contents) + 1))
    assert [frames.unpack_message(frame.payload, 8)[1][-1] for frame in found] == contents
    assert link.bad_frames == 0
    assert frames.Decoder(1 << 20).feed(pipe.written)[0].kind is Kind.WELCOME


def test_one_byte_at_a_time() -> None:
    stream = multiplexed(HELLO + event(1, a=1) + event(2, a=2), size=7)
    found, _, _ = taken([stream[position : position + 1] for position in range(len(stream))])
    assert [frame.seq for frame in found] == [1, 2]


def test_pieces_without_content_are_nothing() -> None:
    empty = multiplexed(b"")
    found, _, _ = taken([empty + multiplexed(HELLO) + empty * 3 + multiplexed(event(1, a=1)) + empty])
    assert [frame.seq for frame in found] == [1]


@pytest.mark.parametrize("stream", [STDIN, STDERR, 3, 255])
def test_only_standard_output_is_the_link(stream: int) -> None:
    found, link, pipe = taken([multiplexed(HELLO, stream) + multiplexed(event(1, a=1), stream)])
    assert (found, pipe.written, link.bad_frames) == ([], b"", 0)


def test_what_is_no_greeting_ends_the_stream() -> None:
    for stream in (multiplexed(b"Traceback (most recent call last):\n"), multiplexed(frames.pack(Kind.PING))):
        found, link, pipe = taken([stream])
        assert (found, link.bad_frames, pipe.closed) == ([], 1, True)


def test_nothing_is_taken_after_a_violation_in_one_read() -> None:
    """One read may hold several pieces; the first bad one is the last that counts."""
    bad = multiplexed(frames.pack(Kind.COMMAND))
    found, link, pipe = taken([multiplexed(HELLO) + multiplexed(event(1, a=1)) + bad + multiplexed(event(2, a=2))])
    assert [frame.seq for frame in found] == [1]
    assert (link.bad_frames, pipe.closed) == (1, True)


def test_a_box_that_takes_long_to_start_keeps_its_stream() -> None:
    """The stream is attached before the box is started; the deadline for strangers who dial is not for it."""

    async def wait() -> tuple[bool, bytes]:
        link = Link(LinkSettings(handshake_timeout=0.01), lambda _batch: None, 60.0, 60.0)
        connection, pipe = StdioConnection(link), Pipe()
        connection.connection_made(pipe)
        await anyio.sleep(0.05)
        connection.data_received(multiplexed(HELLO))
        connection.connection_lost(None)
        return pipe.closed, pipe.written

    closed, written = anyio.run(wait)
    assert not closed
    assert frames.Decoder(1 << 20).feed(written)[0].kind is Kind.WELCOME


def test_what_happens_to_the_stream_is_told_to_the_link() -> None:
    async def happen() -> list[bool]:
        link = Link(LinkSettings(), lambda _batch: None, 60.0, 60.0)
        connection = StdioConnection(link)
        connection.connection_made(Pipe())
        connection.data_received(multiplexed(HELLO))
        told = [link._writable.is_set()]
        connection.pause_writing()
        told.append(link._writable.is_set())
        connection.resume_writing()
        told += [link._writable.is_set(), link.lost.is_set()]
        connection.connection_lost(None)
        return [*told, link.lost.is_set()]

    assert anyio.run(happen) == [True, False, True, False, True]


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_bytes(pieces: list[bytes]) -> None:
    found, _, _ = taken(pieces)
    assert found == []


def test_a_header_that_promises_much_keeps_nothing() -> None:
    async def receive() -> int:
        link = Link(LinkSettings(), lambda _batch: None, 60.0, 60.0)
        connection, pipe = StdioConnection(link), Pipe()
        connection.connection_made(pipe)
        connection.data_received(struct.pack("!BxxxI", STDERR, 2**32 - 1))
        for _ in range(100):
            connection.data_received(bytes(65536))
        connection.connection_lost(None)
        return connection._inner._decoder.buffered

    assert anyio.run(receive) == 0
