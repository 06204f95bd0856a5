"""The gateway's end of the link against a scripted peer: what a good supervisor is given, and what a bad one can't do.

Each test runs on asyncio's own loop and on uvloop, which the server uses. An exception that leaves a callback of either loop fails
the test, since AnyIO's runner collects what the loop's exception handler is told.
"""

import contextlib
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import orjson
import pytest

from gateway.errors import LinkClosed, SandboxTimeout
from gateway.sandboxes.link import CommandFailed, Link, LinkNews
from gateway.settings import LinkSettings
from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Frame, FrameError, Kind
from tests.unit.peers import PATIENCE, Gone, Listener, Peer, event, listening, message
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
def taken() -> list[Frame]:
    """The numbered frames that the link has handed on."""
    return []


@pytest.fixture
async def listener(taken: list[Frame]) -> AsyncIterator[Listener]:
    async with listening(taken.extend) as found:
        yield found


async def settle(listener: Listener, peer: Peer) -> None:
    """Waits until the gateway has read all that the peer has sent so far."""
    pending = listener.link.post("sync")
    command = await peer.command()
    await peer.reply(command["id"], result={})
    await listener.link.reply(*pending, "sync")


async def refused(listener: Listener, *data: bytes, greet: bool = True) -> None:
    """Sends what no supervisor sends; the connection must end, be counted, and leave the link free."""
    before = listener.link.bad_frames
    async with listener.dialled() as peer:
        secret = ""
        if greet:
            secret = (await peer.greet())["secret"]
        await peer.send(*data)
        await peer.gone()
    assert listener.link.bad_frames == before + 1
    async with listener.greeted(secret) as peer:
        await settle(listener, peer)


# the greeting


async def test_a_greeting_is_answered_with_a_secret_and_the_limits(listener: Listener) -> None:
    assert not listener.link.connected.is_set()
    async with listener.dialled() as peer:
        welcome = await peer.greet()
        assert listener.link.connected.is_set()
        assert len(welcome.pop("secret")) >= 32
        assert welcome == {
            "version": 2,
            "received": 0,
            "epoch": 0,
            "overflow": "wait",
            "max_frame": LinkSettings().max_frame,
            "max_unacknowledged": LinkSettings().max_unacknowledged,
            "lifetime": 600.0,
            "silence": 60.0,
        }


@pytest.mark.parametrize("version", [0, -1, "1", None, True, 1.0, [1], {"a": 1}])
async def test_a_version_that_nobody_speaks_is_refused(listener: Listener, version: object) -> None:
    hello = {"version": version, "secret": "", "received": 0, "kernel": None}
    await refused(listener, frames.pack_json(Kind.HELLO, hello), greet=False)


async def test_a_supervisor_that_speaks_only_later_versions_is_refused(listener: Listener) -> None:
    hello = {"version": frames.VERSION + 3, "minimum": frames.VERSION + 1, "secret": "", "received": 0, "kernel": None}
    await refused(listener, frames.pack_json(Kind.HELLO, hello), greet=False)


@pytest.mark.parametrize(
    ("highest", "lowest", "spoken"),
    [(1, None, 1), (2, None, 2), (2, 1, 2), (2, 2, 2), (7, 1, 2), (7, 2, 2), (2, 0, 2), (1, 0, 1)],
)
async def test_the_highest_version_that_both_speak_is_spoken(
    listener: Listener, highest: int, lowest: int | None, spoken: int
) -> None:
    hello: dict[str, object] = {"version": highest, "secret": "", "received": 0, "kernel": None}
    if lowest is not None:
        hello["minimum"] = lowest
    async with listener.dialled() as peer:
        await peer.send(frames.pack_json(Kind.HELLO, hello))
        assert frames.unpack_json((await peer.expect(Kind.WELCOME)).payload)["version"] == spoken


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.HELLO])
async def test_nothing_but_a_greeting_may_come_first(listener: Listener, taken: list[Frame], kind: Kind) -> None:
    await refused(listener, frames.pack(kind, b'{"version": 1, "secret": ""}', 1), greet=False)
    assert taken == []


async def test_frames_right_behind_the_greeting_are_taken(listener: Listener, taken: list[Frame]) -> None:
    hello = frames.pack_json(Kind.HELLO, {"version": 1, "secret": "", "received": 0, "kernel": None})
    async with listener.dialled() as peer:
        await peer.send(hello, event(1, event="first"), event(2, event="second"))
        await peer.expect(Kind.WELCOME)
        assert (await peer.expect(Kind.ACK)).seq == 2
    assert [frame.seq for frame in taken] == [1, 2]


async def test_a_silent_peer_is_dropped_at_the_handshake_deadline() -> None:
    async with listening(handshake_timeout=0.05) as listener, listener.dialled() as peer:
        await peer.gone()
        async with listener.greeted() as good:
            await settle(listener, good)


async def test_half_a_greeting_is_dropped_at_the_handshake_deadline() -> None:
    async with listening(handshake_timeout=0.05) as listener, listener.dialled() as peer:
        await peer.send(frames.pack_json(Kind.HELLO, {"version": 1})[:-1])
        await peer.gone()


async def test_a_greeted_peer_has_no_deadline() -> None:
    async with listening(handshake_timeout=0.05) as listener, listener.greeted() as peer:
        await anyio.sleep(0.15)
        await settle(listener, peer)


async def test_a_second_peer_is_refused_while_one_is_connected(listener: Listener) -> None:
    async with listener.dialled() as first:
        secret = (await first.greet())["secret"]
        for attempt in ("", secret):
            async with listener.dialled() as second:
                with pytest.raises(Gone):
                    await second.greet(attempt)
        await settle(listener, first)
    # They were not even listened to.
    assert listener.link.bad_frames == 0


@pytest.mark.parametrize("secret", ["", "guess", 7, None, ["x"], {"a": "b"}, "é", "\ud800", "x" * 100_000])
async def test_an_impostor_is_refused_after_the_supervisor_was_there(listener: Listener, secret: object) -> None:
    async with listener.dialled() as peer:
        real = (await peer.greet())["secret"]
    async with listener.dialled() as impostor:
        with pytest.raises(Gone):
            await impostor.greet(secret)
    assert not listener.link.connected.is_set()
    async with listener.greeted(real) as peer:
        await settle(listener, peer)


@pytest.mark.parametrize("received", [None, "3", -5, 2**80, True, [1], 1.5])
async def test_a_greeting_with_a_strange_count_is_survived(listener: Listener, received: object) -> None:
    async with listener.greeted(received=received) as peer:
        await settle(listener, peer)


async def test_a_closed_link_greets_nobody(listener: Listener) -> None:
    listener.link.close()
    async with listener.dialled() as peer:
        with pytest.raises(Gone):
            await peer.greet()
    assert not listener.link.connected.is_set()


# numbered frames


async def test_numbered_frames_are_handed_on_in_order_and_acknowledged(listener: Listener, taken: list[Frame]) -> None:
    async with listener.greeted() as peer:
        await peer.send(message(1), event(2), frames.pack_json(Kind.OVERSIZE, {"size": 1}, 3))
        assert (await peer.expect(Kind.ACK)).seq == 3
    assert [(frame.kind, frame.seq) for frame in taken] == [(Kind.MESSAGE, 1), (Kind.EVENT, 2), (Kind.OVERSIZE, 3)]


async def test_what_comes_twice_is_handed_on_once(listener: Listener, taken: list[Frame]) -> None:
    async with listener.dialled() as peer:
        secret = (await peer.greet())["secret"]
        await peer.send(message(1), message(2))
        assert (await peer.expect(Kind.ACK)).seq == 2
    async with listener.dialled() as peer:
        assert (await peer.greet(secret))["received"] == 2
        await peer.send(message(1), message(2), message(3))
        assert (await peer.expect(Kind.ACK)).seq == 3
    assert [frame.seq for frame in taken] == [1, 2, 3]


async def test_a_gap_ends_the_connection_and_loses_nothing(listener: Listener, taken: list[Frame]) -> None:
    async with listener.dialled() as peer:
        secret = (await peer.greet())["secret"]
        await peer.send(message(1) + message(2) + message(4))
        await peer.gone()
    async with listener.dialled() as peer:
        assert (await peer.greet(secret))["received"] == 2
        await peer.send(message(3) + message(4))
        assert (await peer.expect(Kind.ACK)).seq == 4
    assert [frame.seq for frame in taken] == [1, 2, 3, 4]


@pytest.mark.parametrize("bad", [frames.pack(Kind.COMMAND), frames.pack(Kind.REPLY, b"nonsense")])
async def test_what_came_before_a_bad_frame_is_not_lost(listener: Listener, taken: list[Frame], bad: bytes) -> None:
    """It counts as received, so it would never come again."""
    async with listener.dialled() as peer:
        secret = (await peer.greet())["secret"]
        await peer.send(event(1, event="kernel_exit") + bad)
        await peer.gone()
    async with listener.dialled() as peer:
        received = (await peer.greet(secret))["received"]
    assert [frame.seq for frame in taken] == list(range(1, received + 1))


@pytest.mark.parametrize("seq", [0, 2, 7, 2**64 - 1])
async def test_a_first_frame_with_another_number_is_no_first_frame(listener: Listener, taken: list[Frame], seq: int) -> None:
    async with listener.greeted() as peer:
        await peer.send(message(seq))
        if seq:
            await peer.gone()
        else:
            await settle(listener, peer)
    assert taken == []


async def test_messages_of_the_gateway_are_kept_until_acknowledged(listener: Listener) -> None:
    link = listener.link
    async with listener.dialled() as peer:
        secret = (await peer.greet())["secret"]
        for number in range(4):
            link.send_message(Channel.SHELL, [b"request %d" % number])
        for number in range(4):
            frame = await peer.expect(Kind.MESSAGE)
            assert frame.seq == number + 1
            assert frames.unpack_message(frame.payload, 8) == (Channel.SHELL, [b"request %d" % number])
        await peer.send(frames.pack(Kind.ACK, seq=1))
        await settle(listener, peer)
    link.send_message(Channel.SHELL, [b"request 4"])
    async with listener.dialled() as peer:
        # It says that it has 2: neither 1, which it acknowledged, nor 2 is sent again.
        await peer.greet(secret, received=2)
        assert [(await peer.expect(Kind.MESSAGE)).seq for _ in range(3)] == [3, 4, 5]
    async with listener.dialled() as peer:
        await peer.greet(secret, received=0)
        assert [(await peer.expect(Kind.MESSAGE)).seq for _ in range(3)] == [3, 4, 5]


async def test_messages_sent_before_the_first_greeting_wait_for_it(listener: Listener) -> None:
    listener.link.send_message(Channel.CONTROL, [b"early"])
    async with listener.greeted() as peer:
        assert (await peer.expect(Kind.MESSAGE)).seq == 1


# commands


async def test_a_command_gets_its_reply(listener: Listener) -> None:
    async with listener.greeted() as peer, anyio.create_task_group() as tasks:
        answers: dict[str, Any] = {}

        async def ask(op: str) -> None:
            answers[op] = await listener.link.command(op, path="x")

        tasks.start_soon(ask, "stat")
        first = await peer.command()
        tasks.start_soon(ask, "list")
        second = await peer.command()
        assert (first["op"], first["path"], second["op"]) == ("stat", "x", "list")
        # In another order than they were asked.
        await peer.reply(second["id"], result={"entries": []})
        await peer.reply(first["id"], result={"size": 1})
    assert answers == {"stat": {"size": 1}, "list": {"entries": []}}


async def test_a_refusal_is_raised_with_its_code(listener: Listener) -> None:
    async with listener.greeted() as peer:
        pending = listener.link.post("stat")
        await peer.reply((await peer.command())["id"], error={"code": "file_not_found", "message": "x: " + "long" * 1000})
        with pytest.raises(CommandFailed) as failure:
            await listener.link.reply(*pending, "stat")
    assert failure.value.code == "file_not_found"
    assert len(str(failure.value)) == 2000


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({}, {}),
        ({"result": None}, {}),
        ({"result": [1]}, {}),
        ({"result": "text"}, {}),
        ({"result": {"a": 1}, "more": 2}, {"a": 1}),
    ],
)
async def test_a_result_of_another_shape_is_an_empty_one(
    listener: Listener, answer: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with listener.greeted() as peer:
        pending = listener.link.post("stat")
        await peer.reply((await peer.command())["id"], **answer)
        assert await listener.link.reply(*pending, "stat") == expected


@pytest.mark.parametrize("error", [None, "text", [1], {}, {"code": 7, "message": ["x"]}, {"code": None}])
async def test_a_refusal_of_another_shape_is_still_a_refusal(listener: Listener, error: object) -> None:
    async with listener.greeted() as peer:
        pending = listener.link.post("stat")
        await peer.reply((await peer.command())["id"], error=error)
        with pytest.raises(CommandFailed):
            await listener.link.reply(*pending, "stat")


async def test_what_a_reply_says_can_be_said_again_as_json(listener: Listener) -> None:
    """Names of files need not be UTF-8, and a hostile peer may say anything; a client gets it in a JSON document."""
    async with listener.greeted() as peer:
        pending = listener.link.post("list")
        number = (await peer.command())["id"]
        payload = json.dumps({"id": number, "result": {"name": "caf\udce9", "size": float("nan"), "n": 10**30}})
        await peer.send(frames.pack(Kind.REPLY, payload.encode()))
        result = await listener.link.reply(*pending, "list")
        assert orjson.dumps(result)
        pending = listener.link.post("list")
        await peer.reply((await peer.command())["id"], error={"code": "x", "message": "caf\udce9"})
        with pytest.raises(CommandFailed) as failure:
            await listener.link.reply(*pending, "list")
        assert str(failure.value).encode()


async def test_replies_to_nothing_are_ignored(listener: Listener) -> None:
    async with listener.greeted() as peer:
        for number in (0, 99, "1", None, [1], {"a": 1}, 1.0, True):
            await peer.send(frames.pack_json(Kind.REPLY, {"id": number, "result": {}}))
        await peer.send(frames.pack_json(Kind.REPLY, {"result": {}}))
        await settle(listener, peer)


async def test_a_second_reply_to_one_command_is_ignored(listener: Listener) -> None:
    async with listener.greeted() as peer:
        pending = listener.link.post("stat")
        number = (await peer.command())["id"]
        await peer.reply(number, result={"n": 1})
        await peer.reply(number, result={"n": 2})
        await settle(listener, peer)
        assert await listener.link.reply(*pending, "stat") == {"n": 1}
        await peer.reply(number, result={"n": 3})
        await settle(listener, peer)


async def test_a_command_without_an_answer_times_out(listener: Listener) -> None:
    async with listener.greeted() as peer:
        with pytest.raises(SandboxTimeout, match="'stat'"):
            await listener.link.command("stat", deadline=0.02)
        late = (await peer.command())["id"]
        await peer.reply(late, result={})
        await settle(listener, peer)


async def test_without_a_stream_a_command_fails_at_once(listener: Listener) -> None:
    with pytest.raises(LinkClosed):
        await listener.link.command("stat")


@pytest.mark.parametrize("closed", [False, True], ids=["lost", "closed"])
async def test_the_end_of_the_stream_fails_commands_under_way(listener: Listener, closed: bool) -> None:
    link = listener.link
    async with listener.greeted() as peer:
        pending = [link.post("stat"), link.post("list")]
        await peer.command()
        if closed:
            link.close()
            await peer.gone()
    for number, future in pending:
        with pytest.raises(LinkClosed):
            await link.reply(number, future, "stat")
    assert link.lost.is_set()


async def test_lost_and_connected_follow_the_stream(listener: Listener) -> None:
    link = listener.link
    async with listener.dialled() as peer:
        secret = (await peer.greet())["secret"]
        lost = link.lost
        assert not lost.is_set()
    with anyio.fail_after(PATIENCE):
        await lost.wait()
    assert not link.connected.is_set()
    waiting = link.connected
    async with listener.greeted(secret):
        assert waiting.is_set()
        assert not link.lost.is_set()


async def test_a_refused_peer_does_not_disturb_the_one_that_is_there(listener: Listener) -> None:
    async with listener.greeted() as peer:
        async with listener.dialled() as second:
            await second.send(b"garbage that is long enough for a header")
            await second.gone()
        assert listener.link.connected.is_set()
        assert not listener.link.lost.is_set()
        await settle(listener, peer)


# flow control


async def test_file_frames_wait_for_a_peer_that_does_not_read(listener: Listener) -> None:
    link = listener.link
    chunk = frames.pack_data(1, bytes(frames.CHUNK))
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for _ in range(64):
            await link.send_frame(chunk)
            sent += 1

    async with listener.greeted() as peer, anyio.create_task_group() as tasks:
        tasks.start_soon(send_all)
        before = -1
        with anyio.fail_after(PATIENCE):
            while sent != before:
                before = sent
                await anyio.sleep(0.05)
        assert sent < 64
        received = [await peer.expect(Kind.DATA) for _ in range(64)]
    assert {len(frame.payload) for frame in received} == {frames.CHUNK + 4}


@pytest.mark.parametrize("closed", [False, True], ids=["lost", "closed"])
async def test_a_file_frame_that_waits_fails_when_the_stream_ends(listener: Listener, closed: bool) -> None:
    async with anyio.create_task_group() as tasks:
        failed = anyio.Event()

        async def send_until_lost() -> None:
            try:
                while True:
                    await listener.link.send_frame(frames.pack_data(1, bytes(frames.CHUNK)))
            except LinkClosed:
                failed.set()

        async with listener.greeted():
            tasks.start_soon(send_until_lost)
            await anyio.sleep(0.05)
            assert not failed.is_set()
            if closed:
                listener.link.close()
                with anyio.fail_after(PATIENCE):
                    await failed.wait()
        with anyio.fail_after(PATIENCE):
            await failed.wait()


# keeping it


async def test_keep_pings_and_a_pong_is_a_sign_of_life() -> None:
    """With three pings to miss, answering every second one is enough for ever."""
    async with (
        listening(ping_interval=0.05, lost_timeout=0.15) as listener,
        listener.greeted() as peer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.link.keep, _never)
        for number in range(12):
            await peer.expect(Kind.PING)
            if number % 2:
                await peer.send(frames.pack(Kind.PONG))
        tasks.cancel_scope.cancel()


async def _never() -> None:
    raise AssertionError("the peer was not silent")


async def test_keep_tells_of_silence_once() -> None:
    told: list[str] = []

    async with listening(ping_interval=0.01, lost_timeout=0.05) as listener, listener.greeted():

        async def on_silence() -> None:
            told.append("silent")
            listener.link.close()

        with anyio.move_on_after(0.3):
            await listener.link.keep(on_silence)
    assert told == ["silent"]


async def test_keep_says_nothing_of_a_link_that_was_closed() -> None:
    async with listening(ping_interval=0.01, lost_timeout=0.02) as listener, listener.greeted():
        listener.link.close()
        with anyio.move_on_after(0.2):
            await listener.link.keep(_never)


# a rate


async def test_a_peer_above_its_rate_is_read_no_faster(taken: list[Frame]) -> None:
    """Nothing is dropped: what is not read waits in the socket, and then in the kernel."""
    async with listening(taken.extend, rate=20_000) as listener, listener.greeted() as peer, anyio.create_task_group() as tasks:
        tasks.start_soon(peer.send, *(message(number, bytes(1000)) for number in range(1, 1001)))
        await until(lambda: taken)
        await anyio.sleep(0.3)
        # One read, which is 256 KiB at most, has used up the rate for a while.
        assert len(taken) < 300
        tasks.cancel_scope.cancel()


async def test_a_peer_that_is_slowed_down_is_not_silent() -> None:
    """Its pongs wait behind its outputs, since nothing is read."""
    async with listening(rate=1000, ping_interval=0.01, lost_timeout=0.05) as listener, listener.greeted() as peer:
        await peer.send(message(1, bytes(20_000)))
        await until(lambda: listener.link.slowed)
        with anyio.move_on_after(0.3):
            await listener.link.keep(_never)


async def test_a_peer_within_its_rate_is_not_slowed(listener: Listener, taken: list[Frame]) -> None:
    listener.link.rate = 10_000_000
    async with listener.greeted() as peer:
        await peer.send(*(message(number, bytes(1000)) for number in range(1, 101)))
        await until(lambda: len(taken) == 100)
        assert not listener.link.slowed


# hostile peers


HOSTILE = {
    "garbage": b"\xde\xad\xbe\xef" * 100,
    "zeros": bytes(1000),
    "a frame above the limit": frames.HEADER.pack(2**32 - 1, Kind.DATA, 0),
    "another greeting": frames.pack_json(Kind.HELLO, {"version": 1, "secret": "", "received": 0}),
    "a welcome": frames.pack(Kind.WELCOME, b"{}"),
    "a command": frames.pack(Kind.COMMAND, b"{}"),
    "a ping": frames.pack(Kind.PING),
    "an unknown kind": frames.HEADER.pack(0, 99, 0),
    "a reply that is no JSON": frames.pack(Kind.REPLY, b"{"),
    "a reply that is no object": frames.pack(Kind.REPLY, b"[1, 2]"),
    "a reply that is not UTF-8": frames.pack(Kind.REPLY, b'{"id": "\xff\xfe"'),
    "a reply of arrays": frames.pack(Kind.REPLY, b"[" * 1_000_000),
    "a reply of objects": frames.pack(Kind.REPLY, b'{"a":' * 300_000),
    "a number of a million digits": frames.pack(Kind.REPLY, b'{"id":' + b"9" * 1_000_000),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
async def test_what_breaks_the_protocol_ends_the_connection_alone(listener: Listener, data: bytes) -> None:
    await refused(listener, data)


@pytest.mark.parametrize(
    "data",
    [value for name, value in HOSTILE.items() if name != "another greeting"],
    ids=[name for name in HOSTILE if name != "another greeting"],
)
async def test_what_breaks_the_protocol_before_a_greeting_ends_the_connection_alone(listener: Listener, data: bytes) -> None:
    await refused(listener, data, greet=False)


@pytest.mark.parametrize("payload", [b"[]", b"null", b"{", b"[" * 100_000, b'"\xff'], ids=lambda payload: repr(payload[:8]))
async def test_a_greeting_that_is_no_object_is_refused(listener: Listener, payload: bytes) -> None:
    await refused(listener, frames.pack(Kind.HELLO, payload), greet=False)


async def test_nothing_is_taken_after_the_first_violation(listener: Listener, taken: list[Frame]) -> None:
    """Bytes that are already here may follow the violation; the peer has lost its word."""
    connection_made = listener.connections
    async with listener.greeted() as peer:
        connection = connection_made[-1]
        connection.data_received(frames.pack(Kind.COMMAND))
        connection.data_received(event(1, event="kernel_exit"))
        await peer.gone()
    assert taken == []
    async with listener.dialled() as peer:
        await peer.send(b"")
        await anyio.sleep(0.02)
        connection = connection_made[-1]
        connection.data_received(frames.pack(Kind.PING))
        connection.data_received(frames.pack_json(Kind.HELLO, {"version": 1, "secret": "", "received": 0}))
        assert not listener.link.connected.is_set()


async def test_a_consumer_that_is_sent_too_much_ends_the_connection(listener: Listener) -> None:
    def consume(frame: Frame) -> None:
        if frame.kind is Kind.DATA:
            raise FrameError("too much")

    async with listener.greeted() as peer:
        stream = listener.link.open_stream(consume)
        await peer.send(frames.pack_data(stream, b"x"))
        await peer.gone()
    assert listener.link.bad_frames == 1


async def test_data_for_unknown_streams_is_dropped(listener: Listener) -> None:
    async with listener.greeted() as peer:
        for stream in (0, 1, 77, 2**32 - 1):
            await peer.send(frames.pack_data(stream, b"x"), frames.pack_credit(stream, 5), frames.pack_data_end(stream, {}))
        for kind in (Kind.DATA, Kind.DATA_END, Kind.CREDIT):
            await peer.send(frames.pack(kind, b"\x01"))
        await settle(listener, peer)


async def test_a_hundred_thousand_tiny_frames_are_read_and_kept_nowhere(listener: Listener) -> None:
    flood = frames.pack(Kind.PONG) * 1000 + frames.pack(Kind.ACK, seq=2**63) * 1000
    async with listener.greeted() as peer:
        await peer.send(flood)
        await settle(listener, peer)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(50):
                await peer.send(flood)
            await settle(listener, peer)
            gc.collect()
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 1_000_000
    assert peak < 16_000_000


async def test_an_endless_frame_is_held_to_the_limit() -> None:
    limit = 1 << 20
    async with listening(max_frame=limit) as listener, listener.greeted() as peer:
        connection = listener.connections[-1]
        await peer.send(frames.HEADER.pack(limit, Kind.DATA, 0))
        for _ in range(15):
            await peer.send(bytes(65536))
            await anyio.lowlevel.checkpoint()
            assert connection._decoder.buffered <= limit + 8192
        await peer.send(bytes(3 * 65536))
        await peer.gone()
        assert listener.link.bad_frames == 1


async def test_a_flood_of_connections_leaves_the_link_to_its_supervisor(listener: Listener) -> None:
    async with listener.greeted() as peer:
        for _ in range(200):
            async with listener.dialled() as stranger:
                await stranger.send(frames.pack(Kind.PING))
        await settle(listener, peer)


async def test_strangers_that_say_nothing_do_not_add_up() -> None:
    """A cell can dial too. So many may wait to greet; the next is turned away, and each leaves at its deadline."""
    async with listening(handshake_timeout=0.3) as listener, contextlib.AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(listener.dialled()) for _ in range(30)]
        await until(lambda: len(listener.connections) == 30)
        assert listener.link.waiting <= 8
        for stranger in strangers:
            await stranger.gone()
        await until(lambda: listener.link.waiting == 0)
        async with listener.greeted() as peer:
            await settle(listener, peer)


async def test_a_link_that_was_never_connected_can_be_closed() -> None:
    link = Link(LinkSettings(), lambda _batch: None, 1.0, 1.0)
    link.close()
    link.close()
    assert link.lost.is_set()


# guarded: what came is acknowledged, and what is made goes out, when it is stored


class Guard:
    """Who stores what a link has to tell, when a test says so."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.calls = 0
        self.frames: dict[int, bytes] = {}
        """What was made and not acknowledged, as a store has it."""
        self.received = self.sent = 0
        link.guard(self.changed)

    def changed(self, _within: float) -> None:
        self.calls += 1

    def take(self) -> LinkNews:
        return self.link.take_news()

    def stored(self, news: LinkNews) -> None:
        """The commit is done."""
        assert self.frames.keys().isdisjoint(seq for seq, _ in news.made)
        self.frames.update(news.made)
        self.frames = {seq: frame for seq, frame in self.frames.items() if seq > news.acknowledged}
        self.received, self.sent = news.received, news.sent
        self.link.stored(news)

    def store(self) -> None:
        self.stored(self.take())

    def record(self) -> dict[str, Any]:
        """What another gateway's link is restored from."""
        frames_out = sorted(self.frames.items())
        return {"secret": self.link.secret, "received": self.received, "sent": self.sent, "frames_out": frames_out}


async def test_what_came_is_acknowledged_once_it_is_stored(listener: Listener, taken: list[Frame]) -> None:
    guard = Guard(listener.link)
    async with listener.greeted() as peer:
        await peer.send(event(1, event="a"), event(2, event="b"))
        await until(lambda: len(taken) == 2)
        news = guard.take()
        assert news.received == 2
        await peer.send(event(3, event="c"))
        await until(lambda: len(taken) == 3)
        guard.stored(news)
        # Not 3, which has come meanwhile.
        assert (await peer.expect(Kind.ACK)).seq == 2
        guard.store()
        assert (await peer.expect(Kind.ACK)).seq == 3
    assert guard.calls >= 2


async def test_before_it_is_stored_nothing_is_acknowledged(listener: Listener, taken: list[Frame]) -> None:
    guard = Guard(listener.link)
    async with listener.dialled() as peer:
        secret = (await peer.greet())["secret"]
        await peer.send(event(1, event="a", filler="x" * 300_000), event(2, event="b"))
        await until(lambda: len(taken) == 2)
        news = guard.take()
        # Enough for an ACK at once, and time enough for one that waits; what comes is the command of `settle` alone.
        await anyio.sleep(0.1)
        await settle(listener, peer)
    async with listener.dialled() as peer:
        # It was not told that they came, so it sends them again; they are not handed on a second time.
        assert (await peer.greet(secret))["received"] == 0
        await peer.send(event(1, event="a"), event(2, event="b"), event(3, event="c"))
        await until(lambda: len(taken) == 3)
        guard.stored(news)
        assert (await peer.expect(Kind.ACK)).seq == 2
    assert [frame.seq for frame in taken] == [1, 2, 3]
    async with listener.dialled() as peer:
        assert (await peer.greet(secret))["received"] == 2


async def test_what_is_made_goes_out_once_it_is_stored(listener: Listener) -> None:
    link, guard = listener.link, Guard(listener.link)
    async with listener.dialled() as peer:
        secret = (await peer.greet())["secret"]
        link.send_message(Channel.SHELL, [b"1"])
        link.send_message(Channel.SHELL, [b"2"])
        news = guard.take()
        link.send_message(Channel.SHELL, [b"3"])
        await settle(listener, peer)
        guard.stored(news)
        assert [(await peer.expect(Kind.MESSAGE)).seq for _ in range(2)] == [1, 2]
        await settle(listener, peer)
    async with listener.dialled() as peer:
        # Nor does a new stream give away what is not stored.
        await peer.greet(secret, received=1)
        assert (await peer.expect(Kind.MESSAGE)).seq == 2
        await settle(listener, peer)
        guard.store()
        assert (await peer.expect(Kind.MESSAGE)).seq == 3
        await peer.send(frames.pack(Kind.ACK, seq=3))
        await settle(listener, peer)
        assert guard.take().acknowledged == 3


async def test_what_was_made_before_the_guard_is_stored_too(listener: Listener) -> None:
    link = listener.link
    async with listener.greeted() as peer:
        link.send_message(Channel.SHELL, [b"1"])
        assert (await peer.expect(Kind.MESSAGE)).seq == 1
        guard = Guard(link)
        news = guard.take()
        assert ([seq for seq, _ in news.made], news.sent) == ([1], 1)
        assert guard.take().made == []


async def test_a_message_that_need_not_survive_is_not_numbered(listener: Listener) -> None:
    link, guard = listener.link, Guard(listener.link)
    link.send_now(Channel.CONTROL, [b"nobody is there"])
    async with listener.greeted() as peer:
        link.send_now(Channel.CONTROL, [b"now"])
        frame = await peer.expect(Kind.MESSAGE)
        assert (frame.seq, frames.unpack_message(frame.payload, 8)) == (0, (Channel.CONTROL, [b"now"]))
        link.send_message(Channel.SHELL, [b"1"])
        guard.store()
        assert (await peer.expect(Kind.MESSAGE)).seq == 1


async def test_a_supervisor_of_the_first_release_gets_every_message_numbered(listener: Listener) -> None:
    link, guard = listener.link, Guard(listener.link)
    async with listener.dialled() as peer:
        await peer.greet(version=1)
        link.send_now(Channel.CONTROL, [b"now"])
        guard.store()
        assert (await peer.expect(Kind.MESSAGE)).seq == 1


# restored


async def test_a_restored_link_takes_the_secret_and_nothing_else() -> None:
    async with listening(restored={"secret": "s3cret", "epoch": 3}) as listener:
        for secret in ("", "guess", None, 7):
            await refused_greeting(listener, secret)
        async with listener.dialled() as peer:
            welcome = await peer.greet("s3cret", epoch=2)
            assert (welcome["secret"], welcome["epoch"]) == ("s3cret", 3)


async def refused_greeting(listener: Listener, secret: object, **more: object) -> None:
    async with listener.dialled() as peer:
        with pytest.raises(Gone):
            await peer.greet(secret, **more)


@pytest.mark.parametrize(("seen", "welcome"), [(0, True), (2, True), (3, True), (4, False), (99, False)])
async def test_a_supervisor_that_a_later_gateway_has_is_let_be(seen: int, welcome: bool) -> None:
    async with listening(restored={"secret": "s", "epoch": 3}) as listener:
        if welcome:
            async with listener.dialled() as peer:
                await peer.greet("s", epoch=seen)
        else:
            await refused_greeting(listener, "s", epoch=seen)
            assert not listener.link.connected.is_set()


@pytest.mark.parametrize("there", range(5))
async def test_frames_of_the_gateway_before_are_sent_unless_they_are_there(there: int) -> None:
    frames_out = [(seq, frames.pack_message(Channel.SHELL, [b"%d" % seq], seq)) for seq in (2, 3, 4)]
    async with listening(restored={"secret": "s", "sent": 4, "frames_out": frames_out}) as listener:
        guard = Guard(listener.link)
        async with listener.dialled() as peer:
            await peer.greet("s", received=there)
            for seq in range(max(2, there + 1), 5):
                assert (await peer.expect(Kind.MESSAGE)).seq == seq
            # They are stored already, and those that are there need not be any more.
            news = guard.take()
            assert (news.made, news.sent, news.acknowledged) == ([], 4, there if there > 1 else 0)
            listener.link.send_message(Channel.SHELL, [b"next"])
            guard.stored(guard.take())
            assert (await peer.expect(Kind.MESSAGE)).seq == 5


async def test_numbers_go_on_where_they_were() -> None:
    taken: list[Frame] = []
    async with (
        listening(taken.extend, restored={"secret": "s", "received": 7, "sent": 9}) as listener,
        listener.dialled() as peer,
    ):
        assert (await peer.greet("s", received=9))["received"] == 7
        await peer.send(event(6, event="old"), event(7, event="old"), event(8, event="new"))
        await until(lambda: taken)
        listener.link.send_message(Channel.SHELL, [b"next"])
        assert (await peer.expect(Kind.MESSAGE)).seq == 10
    assert [frame.seq for frame in taken] == [8]


async def test_nothing_is_lost_or_doubled_from_one_gateway_to_the_next(listener: Listener, taken: list[Frame]) -> None:
    """The gateway dies with frames of both directions in every state: stored or not, sent or not, acknowledged or not."""
    link, guard = listener.link, Guard(listener.link)
    async with listener.dialled() as peer:
        secret = (await peer.greet())["secret"]
        for number in range(1, 4):
            link.send_message(Channel.SHELL, [b"%d" % number])
        await peer.send(event(1, event="a"), event(2, event="b"))
        await until(lambda: len(taken) == 2)
        guard.store()
        got = [(await peer.expect(Kind.MESSAGE)).seq for _ in range(3)]
        assert (await peer.expect(Kind.ACK)).seq == 2
        await peer.send(frames.pack(Kind.ACK, seq=1), event(3, event="c"))
        await until(lambda: len(taken) == 3)
        link.send_message(Channel.SHELL, [b"never stored"])
    assert got == [1, 2, 3]
    again: list[Frame] = []
    async with listening(again.extend, restored={**guard.record(), "epoch": 2}) as successor, successor.dialled() as peer:
        # It has 1 and 2; 3 was lost with the stream.
        assert (await peer.greet(secret, received=2, epoch=1))["received"] == 2
        assert (await peer.expect(Kind.MESSAGE)).seq == 3
        await peer.send(event(3, event="c"))
        await until(lambda: again)
        successor.link.send_message(Channel.SHELL, [b"4"])
        assert frames.unpack_message((await peer.expect(Kind.MESSAGE)).payload, 8)[1] == [b"4"]
    assert [frame.seq for frame in again] == [3]
