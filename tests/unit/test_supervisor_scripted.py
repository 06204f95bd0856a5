"""The scripted supervisor of `gateway.testing` keeps the real one's promises to gateways that come, vanish and come again."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import anyio
import pytest

from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Decoder, Frame, Kind
from gateway.testing import supervisor as scripted
from gateway.testing.kernel import KernelScript, ScriptedKernel, printed
from gateway.testing.supervisor import ScriptedSupervisor
from tests.unit.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

TERMS = {"secret": "s", "lifetime": 600.0, "silence": 60.0, "max_frame": 1 << 20, "max_unacknowledged": 1 << 20}


class Gate:
    """A gateway at an address that outlives it: `open`, `vanish`, and `open` again."""

    def __init__(self) -> None:
        # A name in Linux's abstract namespace (unix(7)): nothing on disk to be cleaned up.
        self.address = f"\0cellgate-test-{uuid4().hex}"
        self.received = 0
        self.sent = 0
        self.kept: list[Frame] = []
        self._listener: socket.socket | None = None
        self._stream: socket.socket | None = None
        self._decoder = Decoder(1 << 26)
        self._waiting: list[Frame] = []

    def open(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.address)
        self._listener.listen()

    def vanish(self) -> None:
        for end in (self._stream, self._listener):
            if end is not None:
                end.close()
        self._stream = self._listener = None

    async def hello(self) -> dict[str, Any]:
        """Takes the next call; what its greeting says."""
        assert self._listener is not None
        if self._stream is not None:
            self._stream.close()
        with anyio.fail_after(PATIENCE):
            self._stream, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        self._stream.setblocking(False)
        self._decoder, self._waiting = Decoder(1 << 26), []
        frame = await self.frame()
        assert frame.kind is Kind.HELLO
        return frames.unpack_json(frame.payload)

    async def send(self, data: bytes) -> None:
        assert self._stream is not None
        await asyncio.get_running_loop().sock_sendall(self._stream, data)

    async def welcome(self, **terms: Any) -> None:
        await self.send(frames.pack_json(Kind.WELCOME, {**TERMS, "version": 2, "received": self.received, **terms}))

    async def greet(self, **terms: Any) -> dict[str, Any]:
        hello = await self.hello()
        await self.welcome(**terms)
        return hello

    async def frame(self) -> Frame:
        """The next frame; raises `EOFError` at the end of the stream."""
        assert self._stream is not None
        while not self._waiting:
            with anyio.fail_after(PATIENCE):
                data = await asyncio.get_running_loop().sock_recv(self._stream, 1 << 16)
            if not data:
                raise EOFError
            self._waiting = self._decoder.feed(data)
        frame = self._waiting.pop(0)
        if frame.kind in frames.NUMBERED:
            assert frame.seq == self.received + 1
            self.received = frame.seq
            self.kept.append(frame)
        return frame

    async def until(self, kind: Kind) -> Frame:
        while (frame := await self.frame()).kind is not kind:
            pass
        return frame

    async def start(self) -> None:
        await self.send(frames.pack_json(Kind.COMMAND, {"id": 1, "op": "start", "kernelspec": "x", "key": "k", "env": {}}))
        await self.until(Kind.REPLY)

    async def execute(self, code: str, seq: int | None = None) -> None:
        """Sends a cell, under the next number unless told otherwise."""
        if seq is None:
            self.sent += 1
            seq = self.sent
        header = json.dumps({"msg_type": "execute_request", "msg_id": uuid4().hex}).encode()
        content = json.dumps({"code": code, "silent": False}).encode()
        parts = [b"<IDS|MSG>", b"", header, b"{}", b"{}", content]
        await self.send(frames.pack_message(Channel.SHELL, parts, seq))

    async def replies(self, count: int) -> None:
        """Until so many cells have been answered, since the beginning."""
        while sum(frame.kind is Kind.MESSAGE and frame.payload[0] == Channel.SHELL for frame in self.kept) < count:
            await self.frame()


@pytest.fixture
async def gate(anyio_backend: str) -> AsyncIterator[Gate]:
    gate = Gate()
    gate.open()
    yield gate
    gate.vanish()


@pytest.fixture
async def supervisor(gate: Gate) -> AsyncIterator[ScriptedSupervisor]:
    script = KernelScript(cells={"print": [printed("x")]})
    supervisor = ScriptedSupervisor(script, gate.address, lambda _code: None)
    yield supervisor
    supervisor.end(0)


def process(supervisor: ScriptedSupervisor) -> ScriptedKernel:
    assert supervisor.kernel is not None
    return supervisor.kernel


async def test_its_greeting_is_the_real_ones(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.dial()
    speaks = {"version": 2, "minimum": 1}
    assert await gate.greet(epoch=3) == {**speaks, "epoch": 0, "secret": "", "received": 0, "kernel": None}
    await gate.start()
    await gate.execute("print")
    await gate.replies(1)
    supervisor.drop()
    assert await gate.greet(epoch=3) == {**speaks, "epoch": 3, "secret": "s", "received": 1, "kernel": {"pid": 1}}


async def test_an_old_one_greets_as_the_first_release_did(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.version = 1
    supervisor.dial()
    assert await gate.greet(version=1) == {"version": 1, "secret": "", "received": 0, "kernel": None}
    await gate.start()
    await gate.execute("unnumbered", seq=0)
    await gate.execute("print")
    await gate.replies(1)
    assert process(supervisor).codes == ["print"]


async def test_an_old_one_refuses_a_newer_version(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.version = 1
    supervisor.dial()
    await gate.greet(version=2)
    await gate.greet(version=1)
    await gate.start()
    assert (supervisor.greetings, supervisor.refusals) == (1, 1)


async def test_it_refuses_a_gateway_that_another_has_replaced(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.dial()
    await gate.greet(epoch=5)
    await gate.start()
    supervisor.drop()
    await gate.greet(epoch=4)
    with pytest.raises((EOFError, ConnectionError)):
        await gate.frame()
    assert (await gate.greet(epoch=6))["epoch"] == 5
    await gate.execute("print")
    await gate.replies(1)
    assert (supervisor.epoch, supervisor.refusals) == (6, 1)


async def test_unnumbered_messages_are_passed_on_whenever_they_come(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.dial()
    await gate.greet()
    await gate.start()
    await gate.execute("print")
    await gate.execute("a", seq=0)
    await gate.execute("a", seq=0)
    await gate.execute("print", seq=1)
    await gate.execute("last")
    await gate.replies(4)
    assert process(supervisor).codes == ["print", "a", "a", "last"]


async def test_it_outlives_one_gateway_after_another(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.dial()
    await gate.greet()
    await gate.start()
    kernel = process(supervisor)
    for number in range(1, 5):
        await gate.execute("print")
        # Taken, perhaps stored, never acknowledged; then the gateway is killed.
        await gate.replies(number)
        gate.vanish()
        await until(lambda: supervisor._socket is None, "the loss")
        kernel.publish("stream", {"name": "stdout", "text": "meanwhile"}, kernel.requests[-1])
        await anyio.sleep(0.05)
        gate.open()
        hello = await gate.greet(epoch=number)
        assert (hello["secret"], hello["received"]) == ("s", number)
    await gate.execute("print")
    await gate.replies(5)
    assert process(supervisor) is kernel
    assert supervisor.greetings == 5
    assert sum(b"meanwhile" in frame.payload for frame in gate.kept) == 4


async def test_what_was_not_stored_comes_again_as_it_was(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.dial()
    await gate.greet()
    await gate.start()
    await gate.execute("print")
    await gate.replies(1)
    before = [*gate.kept]
    gate.vanish()
    gate.open()
    gate.received, gate.kept = 2, gate.kept[:2]
    await gate.greet()
    await gate.replies(1)
    assert gate.kept[: len(before)] == before


async def test_half_a_welcome_is_none(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.dial()
    await gate.hello()
    await gate.send(frames.pack_json(Kind.WELCOME, TERMS)[:30])
    gate.vanish()
    gate.open()
    assert (await gate.greet())["secret"] == ""
    await gate.start()
    assert supervisor.greetings == 1


async def test_it_calls_again_when_its_greeting_is_not_answered(
    gate: Gate, supervisor: ScriptedSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.dial()
    await gate.greet()
    await gate.start()
    monkeypatch.setattr(scripted, "_HANDSHAKE", 0.05)
    supervisor.drop()
    for _ in range(2):
        await gate.hello()
        with pytest.raises((EOFError, ConnectionError)):
            await gate.frame()
    await gate.greet()
    await anyio.sleep(0.15)
    await gate.execute("print")
    await gate.replies(1)
    assert supervisor.greetings == 2


async def test_nonsense_costs_the_stream_alone(gate: Gate, supervisor: ScriptedSupervisor) -> None:
    supervisor.dial()
    await gate.greet()
    await until(lambda: supervisor.greetings, "the welcome")
    await gate.send(b"\xff" * 30)
    await gate.greet()
    await gate.start()
    assert supervisor.greetings == 2
