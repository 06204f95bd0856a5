"""Files over the link, the gateway's side, against a scripted supervisor: pace, refusals, and every way to break off half-way."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from gateway.errors import FileMissing, InvalidPath, LinkClosed, MalformedBody, NotAFile, SandboxDiskFull, SandboxTimeout
from gateway.sandboxes import transfer
from gateway.supervisor import frames
from gateway.supervisor.frames import Kind
from tests.unit.peers import Listener, Peer, listening

pytestmark = pytest.mark.anyio

Answer = Callable[[Peer, dict[str, Any]], Awaitable[None]]


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    async with listening() as found:
        yield found


@contextlib.asynccontextmanager
async def answering(listener: Listener, answer: Answer) -> AsyncIterator[Peer]:
    """A peer that does what `answer` says with the first command, while the block asks; both must come to their end."""
    async with listener.greeted() as peer, anyio.create_task_group() as tasks:

        async def play() -> None:
            await answer(peer, await peer.command())

        tasks.start_soon(play)
        yield peer


def nothing_is_left(listener: Listener) -> bool:
    return not listener.link._streams and not listener.link._replies


async def collect(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def sends(content: bytes, chunk: int = frames.CHUNK) -> Answer:
    """Sends a file as the real supervisor does: as far as the credit goes."""

    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        stream, credit, rest = command["stream"], frames.WINDOW, content
        await peer.reply(command["id"], result={"size": len(content)})
        while rest:
            while credit <= 0:
                credit += frames.unpack_credit((await peer.expect(Kind.CREDIT)).payload)[1]
            size = min(chunk, credit)
            await peer.send(frames.pack_data(stream, rest[:size]))
            credit, rest = credit - len(rest[:size]), rest[size:]
        await peer.send(frames.pack_data_end(stream, {}))

    return answer


def refuses(code: str, text: str = "no") -> Answer:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.reply(command["id"], error={"code": code, "message": text})
        while command["op"] == "write" and (await peer.frame()).kind is not Kind.DATA_END:
            """What was already granted still comes."""

    return answer


# reading


@pytest.mark.parametrize("size", [0, 1, frames.CHUNK, frames.WINDOW, frames.WINDOW + 1, 5 * frames.WINDOW + 17])
async def test_a_file_is_read_whole(listener: Listener, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with answering(listener, sends(content)):
        assert await collect(transfer.read(listener.link, "read", "x")) == content
    assert nothing_is_left(listener)


async def test_the_command_says_what_to_read(listener: Listener) -> None:
    seen: list[dict[str, Any]] = []

    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        seen.append(command)
        await sends(b"x")(peer, command)

    async with answering(listener, answer):
        await collect(transfer.read(listener.link, "pack", "some/where"))
    assert (seen[0]["op"], seen[0]["path"]) == ("pack", "some/where")


async def test_an_empty_piece_comes_once_the_file_is_open(listener: Listener) -> None:
    async with answering(listener, sends(b"abc")):
        found = transfer.read(listener.link, "read", "x")
        assert await anext(found) == b""
        assert await collect(found) == b"abc"


REFUSALS = [
    ("file_not_found", FileMissing),
    ("invalid_path", InvalidPath),
    ("not_a_file", NotAFile),
    ("sandbox_disk_full", SandboxDiskFull),
    ("malformed_archive", MalformedBody),
    ("sandbox_gone", LinkClosed),
    ("something else", NotAFile),
    ("", NotAFile),
]


@pytest.mark.parametrize(("code", "expected"), REFUSALS)
async def test_a_refusal_to_read_is_raised_before_the_first_piece(
    listener: Listener, code: str, expected: type[Exception]
) -> None:
    async with answering(listener, refuses(code, "x" * 5000)):
        with pytest.raises(expected) as error:
            await anext(transfer.read(listener.link, "read", "x"))
    assert len(str(error.value)) < 600
    assert nothing_is_left(listener)


@pytest.mark.parametrize(("code", "expected"), REFUSALS)
async def test_an_error_in_the_middle_of_a_file_is_raised_after_what_came(
    listener: Listener, code: str, expected: type[Exception]
) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.reply(command["id"], result={})
        await peer.send(frames.pack_data(command["stream"], b"half"))
        await peer.send(frames.pack_data_end(command["stream"], {"error": {"code": code, "message": "no"}}))

    found = b""
    async with answering(listener, answer):
        with pytest.raises(expected):  # noqa: PT012
            async for piece in transfer.read(listener.link, "read", "x"):
                found += piece
    assert found == b"half"
    assert nothing_is_left(listener)


@pytest.mark.parametrize(
    "end", [b"", b"{", b"[]", b"null", b'{"error": null}', b'{"error": "text"}', b"[" * 100_000], ids=lambda end: repr(end[:9])
)
async def test_an_end_of_another_shape_is_an_end(listener: Listener, end: bytes) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.reply(command["id"], result={})
        number = command["stream"].to_bytes(4, "big")
        await peer.send(frames.pack_data(command["stream"], b"all"), frames.pack(Kind.DATA_END, number + end))

    async with answering(listener, answer):
        assert await collect(transfer.read(listener.link, "read", "x")) == b"all"


async def test_a_slow_reader_is_sent_no_more_than_the_window(listener: Listener) -> None:
    sent = 0
    size = 4 * frames.WINDOW

    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        nonlocal sent
        await peer.reply(command["id"], result={})
        credit = frames.WINDOW
        while sent < size:
            if credit < frames.CHUNK:
                credit += frames.unpack_credit((await peer.expect(Kind.CREDIT)).payload)[1]
                continue
            await peer.send(frames.pack_data(command["stream"], bytes(frames.CHUNK)))
            sent, credit = sent + frames.CHUNK, credit - frames.CHUNK
        await peer.send(frames.pack_data_end(command["stream"], {}))

    async with answering(listener, answer):
        taken = 0
        async for piece in transfer.read(listener.link, "read", "x"):
            await anyio.sleep(0.002)
            # What was granted so far is one window and the pieces taken, this one among them.
            assert sent <= taken + len(piece) + frames.WINDOW
            taken += len(piece)
    assert taken == size


async def test_more_than_was_asked_for_ends_the_connection(listener: Listener) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.reply(command["id"], result={})
        await peer.send(*[frames.pack_data(command["stream"], bytes(frames.CHUNK))] * 5)
        await peer.gone()

    async with answering(listener, answer):
        found = transfer.read(listener.link, "read", "x")
        await anext(found)
        await anyio.sleep(0.05)
        with pytest.raises(LinkClosed):
            await collect(found)
    assert listener.link.bad_frames == 1
    assert nothing_is_left(listener)


async def test_a_reader_that_stops_early_says_so(listener: Listener) -> None:
    said: list[dict[str, Any]] = []

    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.reply(command["id"], result={})
        await peer.send(frames.pack_data(command["stream"], b"one"), frames.pack_data(command["stream"], b"two"))
        while (frame := await peer.frame()).kind is not Kind.DATA_END:
            assert frame.kind is Kind.CREDIT
        stream, value = frames.unpack_data(frame.payload)
        assert stream == command["stream"]
        said.append(frames.unpack_json(value))
        # What is still on its way finds nobody, and harms nobody.
        await peer.send(frames.pack_data(command["stream"], b"three"))

    async with answering(listener, answer):
        found = transfer.read(listener.link, "read", "x")
        assert isinstance(found, AsyncIterator)
        assert [await anext(found), await anext(found)] == [b"", b"one"]
        await found.aclose()  # type: ignore[attr-defined]
    assert said == [{"error": {"code": "cancelled"}}]
    assert nothing_is_left(listener)


async def test_a_cancelled_reader_says_so(listener: Listener) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.reply(command["id"], result={})
        await peer.expect(Kind.DATA_END)

    async with answering(listener, answer):
        with anyio.move_on_after(0.05) as scope:
            await collect(transfer.read(listener.link, "read", "x"))
        assert scope.cancelled_caught
    assert nothing_is_left(listener)


async def test_a_reader_of_a_lost_link_gets_what_came_and_then_the_error(listener: Listener) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.reply(command["id"], result={})
        await peer.send(frames.pack_data(command["stream"], b"half"))
        await peer.stream.aclose()

    found = b""
    async with answering(listener, answer):
        with pytest.raises(LinkClosed):  # noqa: PT012
            async for piece in transfer.read(listener.link, "read", "x"):
                found += piece
    assert found == b"half"
    assert nothing_is_left(listener)


async def test_reading_without_a_link_fails_at_once(listener: Listener) -> None:
    with pytest.raises(LinkClosed):
        await collect(transfer.read(listener.link, "read", "x"))
    assert nothing_is_left(listener)


async def test_a_supervisor_that_does_not_answer_a_read() -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.expect(Kind.DATA_END)

    async with listening(command_timeout=0.02) as listener, answering(listener, answer):
        with pytest.raises(SandboxTimeout):
            await collect(transfer.read(listener.link, "read", "x"))
    assert nothing_is_left(listener)


# writing


def receives(found: list[bytes], result: dict[str, Any] | None = None) -> Answer:
    """Takes a file as the real supervisor does: grants back what it has written, and answers at the end."""

    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        while (frame := await peer.frame()).kind is Kind.DATA:
            stream, chunk = frames.unpack_data(frame.payload)
            assert stream == command["stream"]
            found.append(chunk)
            await peer.send(frames.pack_credit(stream, len(chunk)))
        assert frame.kind is Kind.DATA_END
        assert frames.unpack_data(frame.payload) == (command["stream"], b"{}")
        await peer.reply(command["id"], result={"size": sum(map(len, found))} if result is None else result)

    return answer


@pytest.mark.parametrize("size", [0, 1, frames.CHUNK, frames.CHUNK + 1, 3 * frames.WINDOW + 5])
async def test_a_file_is_written_whole_in_frames_of_bounded_size(listener: Listener, size: int) -> None:
    found: list[bytes] = []
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with answering(listener, receives(found)):
        assert await transfer.write(listener.link, "write", "x", pieces(content)) == {"size": size}
    assert b"".join(found) == content
    assert max(map(len, found), default=0) <= frames.CHUNK
    assert nothing_is_left(listener)


async def test_many_small_pieces_keep_their_order(listener: Listener) -> None:
    found: list[bytes] = []
    content = [b"%d;" % number for number in range(2000)]
    async with answering(listener, receives(found)):
        await transfer.write(listener.link, "write", "x", pieces(*content, b"", b"end"))
    assert b"".join(found) == b"".join([*content, b"end"])


async def test_no_more_is_sent_than_was_granted(listener: Listener) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        received = 0
        while received < frames.WINDOW:
            received += len(frames.unpack_data((await peer.expect(Kind.DATA)).payload)[1])
        assert received == frames.WINDOW
        with anyio.move_on_after(0.1) as waited:
            await peer.stream.receive()
        assert waited.cancelled_caught
        await peer.send(frames.pack_credit(command["stream"], 10))
        assert len(frames.unpack_data((await peer.expect(Kind.DATA)).payload)[1]) == 10
        await peer.send(frames.pack_credit(command["stream"], 2**32 - 1))
        await peer.expect(Kind.DATA)
        await peer.expect(Kind.DATA_END)
        await peer.reply(command["id"], result={})

    async with answering(listener, answer):
        await transfer.write(listener.link, "write", "x", pieces(bytes(frames.WINDOW + 20)))


@pytest.mark.parametrize(("code", "expected"), REFUSALS)
async def test_a_refusal_to_write_is_raised(listener: Listener, code: str, expected: type[Exception]) -> None:
    async with answering(listener, refuses(code)):
        with pytest.raises(expected):
            await transfer.write(listener.link, "write", "x", pieces(bytes(10 * frames.WINDOW)))
    assert nothing_is_left(listener)


async def test_a_full_disk_in_the_middle_stops_the_source(listener: Listener) -> None:
    asked = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal asked
        for _ in range(1000):
            asked += 1
            yield bytes(frames.CHUNK)

    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        for _ in range(3):
            chunk = frames.unpack_data((await peer.expect(Kind.DATA)).payload)[1]
            await peer.send(frames.pack_credit(command["stream"], len(chunk)))
        await refuses("sandbox_disk_full", "x: No space left on device")(peer, command)

    async with answering(listener, answer):
        with pytest.raises(SandboxDiskFull, match="No space left"):
            await transfer.write(listener.link, "write", "x", source())
    assert asked < 20
    assert nothing_is_left(listener)


async def test_a_refusal_wakes_a_writer_that_waits_for_credit(listener: Listener) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        received = 0
        while received < frames.WINDOW:
            received += len(frames.unpack_data((await peer.expect(Kind.DATA)).payload)[1])
        await anyio.sleep(0.02)
        await refuses("sandbox_disk_full")(peer, command)

    async with answering(listener, answer):
        with pytest.raises(SandboxDiskFull), anyio.fail_after(5):
            await transfer.write(listener.link, "write", "x", pieces(bytes(3 * frames.WINDOW)))
    assert nothing_is_left(listener)


async def test_a_source_that_breaks_off_cancels_the_upload(listener: Listener) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"half"
        raise MalformedBody("The client has gone.")

    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.expect(Kind.DATA)
        end = await peer.expect(Kind.DATA_END)
        assert frames.unpack_json(end.payload[4:]) == {"error": {"code": "cancelled"}}

    async with answering(listener, answer):
        with pytest.raises(MalformedBody):
            await transfer.write(listener.link, "write", "x", source())
    assert nothing_is_left(listener)


async def test_a_cancelled_writer_cancels_the_upload(listener: Listener) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"half"
        await anyio.sleep_forever()

    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.expect(Kind.DATA)
        end = await peer.expect(Kind.DATA_END)
        assert frames.unpack_json(end.payload[4:]) == {"error": {"code": "cancelled"}}

    async with answering(listener, answer):
        with anyio.move_on_after(0.05) as scope:
            await transfer.write(listener.link, "write", "x", source())
        assert scope.cancelled_caught
    assert nothing_is_left(listener)


async def test_a_link_lost_while_the_writer_waits_for_credit(listener: Listener) -> None:
    async def answer(peer: Peer, _command: dict[str, Any]) -> None:
        received = 0
        while received < frames.WINDOW:
            received += len(frames.unpack_data((await peer.expect(Kind.DATA)).payload)[1])
        await anyio.sleep(0.02)
        await peer.stream.aclose()

    async with answering(listener, answer):
        with pytest.raises(LinkClosed):
            await transfer.write(listener.link, "write", "x", pieces(bytes(3 * frames.WINDOW)))
    assert nothing_is_left(listener)


async def test_a_link_lost_before_the_answer(listener: Listener) -> None:
    async def answer(peer: Peer, _command: dict[str, Any]) -> None:
        await peer.expect(Kind.DATA)
        await peer.expect(Kind.DATA_END)
        await peer.stream.aclose()

    async with answering(listener, answer):
        with pytest.raises(LinkClosed):
            await transfer.write(listener.link, "write", "x", pieces(b"all"))
    assert nothing_is_left(listener)


async def test_writing_without_a_link_fails_at_once(listener: Listener) -> None:
    with pytest.raises(LinkClosed):
        await transfer.write(listener.link, "write", "x", pieces(b"all"))
    assert nothing_is_left(listener)


async def test_credit_of_a_wrong_size_ends_the_connection(listener: Listener) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        await peer.send(frames.pack(Kind.CREDIT, command["stream"].to_bytes(4, "big")))
        await peer.gone()

    async with answering(listener, answer):
        with pytest.raises(LinkClosed):
            await transfer.write(listener.link, "write", "x", pieces(bytes(3 * frames.WINDOW)))
    assert listener.link.bad_frames == 1


# without a stream


async def test_ask_hands_on_the_result(listener: Listener) -> None:
    async def answer(peer: Peer, command: dict[str, Any]) -> None:
        assert (command["op"], command["path"]) == ("stat", "x")
        await peer.reply(command["id"], result={"type": "file", "size": 3})

    async with answering(listener, answer):
        assert await transfer.ask(listener.link, "stat", path="x") == {"type": "file", "size": 3}


@pytest.mark.parametrize(("code", "expected"), REFUSALS)
async def test_ask_translates_a_refusal(listener: Listener, code: str, expected: type[Exception]) -> None:
    async with answering(listener, refuses(code)):
        with pytest.raises(expected):
            await transfer.ask(listener.link, "delete", path="x")


async def test_transfers_and_messages_share_a_link(listener: Listener) -> None:
    """Two reads at once, each with its own stream and its own credit."""
    contents = {"a": b"A" * (2 * frames.WINDOW), "b": b"B" * 1000}
    results: dict[str, bytes] = {}

    async def ask(path: str) -> None:
        results[path] = await collect(transfer.read(listener.link, "read", path))

    async with listener.greeted() as peer, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "a")
        tasks.start_soon(ask, "b")
        commands = [await peer.command() for _ in range(2)]
        rest = {command["stream"]: contents[command["path"]] for command in commands}
        credit = dict.fromkeys(rest, frames.WINDOW)
        for command in commands:
            await peer.reply(command["id"], result={})
        while rest:
            for stream in list(rest):
                if not rest[stream]:
                    del rest[stream]
                    await peer.send(frames.pack_data_end(stream, {}))
                elif credit[stream] >= 1000:
                    await peer.send(frames.pack_data(stream, rest[stream][:1000]))
                    credit[stream] -= len(rest[stream][:1000])
                    rest[stream] = rest[stream][1000:]
                else:
                    number, size = frames.unpack_credit((await peer.expect(Kind.CREDIT)).payload)
                    credit[number] += size
    assert results == contents
