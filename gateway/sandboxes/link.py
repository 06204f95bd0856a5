"""The gateway's end of a link: bounded reading of what a sandbox sends, numbered frames, commands with replies.

A `Link` belongs to one sandbox and outlives its connections: when the stream breaks, the supervisor dials again, says what it
has received, and both ends send again what the other lacks. The first greeting is answered with a secret, so that a cell, which
runs only later, can't pose as the supervisor. A recorded link outlives its gateway too: what came is acknowledged, and what is to go
out is sent, once it is stored (`guard`, `take_news`, `stored`).

Frames are handed on in the read callback itself: between the socket and the log of an execution there is no queue and no task
switch. Whatever breaks the protocol ends the connection, never the gateway.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import anyio
import structlog

from gateway.errors import LinkClosed, SandboxTimeout
from gateway.protocol.messages import BadMessage, decode_object
from gateway.settings import LinkSettings
from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Decoder, Frame, FrameError, Kind

log = structlog.get_logger()

_MAX_WAITING = 8
_ACK_BYTES = 256 * 1024
_RATE_SLACK = 0.5
"""Seconds of the rate that may come in one burst."""
_ACK_DELAY = 0.05
"""What has arrived is acknowledged after so many bytes, or so many seconds."""

OnFrames = Callable[[list[Frame]], None]


@dataclass(frozen=True, slots=True)
class LinkNews:
    """How far a link has come, and the frames that were made since somebody looked."""

    received: int
    sent: int
    made: list[tuple[int, bytes]]
    acknowledged: int
    """Number of the last frame that the supervisor is known to have."""
    acknowledged_size: int
    """Bytes of all that it is known to have."""


class CommandFailed(Exception):
    """The supervisor refused a command: its `code` and text, both from the sandbox and so not to be trusted."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def unpack_object(payload: bytes) -> dict[str, Any]:
    """JSON of a frame, without what could not be told to a client again (see `decode_json`); raises `FrameError`."""
    try:
        return decode_object(payload)
    except BadMessage as error:
        raise FrameError(str(error)) from None


class Link:
    """One sandbox's stream. `on_frames` gets the numbered frames (MESSAGE, OVERSIZE, EVENT), each once, in order.

    `secret`, `received`, `sent` and `frames_out` restore the link of an earlier gateway; `epoch` is this gateway's.
    """

    def __init__(
        self,
        settings: LinkSettings,
        on_frames: OnFrames,
        lifetime: float,
        silence: float,
        rate: int = 0,
        *,
        secret: str | None = None,
        received: int = 0,
        sent: int = 0,
        frames_out: Sequence[tuple[int, bytes]] = (),
        epoch: int = 0,
    ) -> None:
        self.settings = settings
        self.secret = secret or secrets.token_urlsafe(32)
        """What the supervisor proves itself with."""
        self.bad_frames = 0
        self.rate = rate
        """Bytes a second that the sandbox may send; 0: as it likes."""
        self.waiting = 0
        """Streams that have not greeted yet."""
        self.frozen = False
        """True while the sandbox gets no CPU: its silence means nothing then."""
        self.slowed = False
        """True while nothing is read, to keep to the rate: the same."""
        self.lost = anyio.Event()
        """Set when the stream broke; a new Event once it is back."""
        self.connected = anyio.Event()
        self._on_frames = on_frames
        self._limits = {"lifetime": lifetime, "silence": silence}
        self._epoch = epoch
        self._version = frames.VERSION
        """That the supervisor speaks."""
        self._known = secret is not None
        """The supervisor has been given the secret."""
        self._transport: asyncio.WriteTransport | None = None
        self._on_change: Callable[[float], None] | None = None
        self._received = self._safe = received
        """Number of the last frame that came, and of the last whose effects are stored."""
        self._sent = self._sendable = self._given = max(sent, *(seq for seq, _ in frames_out), 0)
        """Number of the last frame that was made, that may go out, and that went out on this stream."""
        self._taken = self._sent
        self._acknowledged = self._acknowledged_size = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque(frames_out)
        self._ids = count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._streams: dict[int, Callable[[Frame], None]] = {}
        self._writable = asyncio.Event()
        self._writable.set()
        self._held = self._closed = False
        self._heard = True
        self._owed = 0
        self._ack_timer: asyncio.TimerHandle | None = None

    # what a connection calls

    @property
    def taken(self) -> bool:
        """A supervisor is connected, or none is wanted: not yet, or not any more."""
        return self._transport is not None or self._held or self._closed

    def greet(self, transport: asyncio.WriteTransport, hello: dict[str, Any]) -> bool:
        """A peer has said HELLO: True when it is the supervisor and the link is free."""
        version = _common_version(hello)
        if self.taken or version is None:
            return False
        if self._known and not _same(hello.get("secret"), self.secret):
            log.warning("link_impostor")
            return False
        if _number(hello, "epoch") > self._epoch:
            # The box belongs to a gateway that came after this one.
            log.error("link_fenced")
            return False
        self._known, self._version = True, version
        self._transport = transport
        self._heard = True
        welcome = {
            "version": version,
            "secret": self.secret,
            "received": self._safe,
            "epoch": self._epoch,
            "overflow": self.settings.overflow,
            "max_frame": self.settings.max_frame,
            "max_unacknowledged": self.settings.max_unacknowledged,
            **self._limits,
        }
        transport.write(frames.pack_json(Kind.WELCOME, welcome))
        self._acknowledge(_number(hello, "received"))
        self._given = 0
        self._give()
        self.lost = anyio.Event()
        self.connected.set()
        return True

    def take(self, batch: list[Frame]) -> None:
        """Frames of one read; raises `FrameError` when they break the protocol."""
        self._heard = True
        numbered: list[Frame] = []
        try:
            for frame in batch:
                if frame.kind in frames.NUMBERED:
                    if frame.seq == self._received + 1:
                        self._received = frame.seq
                        numbered.append(frame)
                    elif frame.seq > self._received:
                        raise FrameError(f"frame {frame.seq} after {self._received}")
                else:
                    self._take_unnumbered(frame)
        finally:
            # What came before a bad frame counts as received and would never come again.
            self._hand_on(numbered)

    def _hand_on(self, numbered: list[Frame]) -> None:
        if numbered:
            self._on_frames(numbered)
            self._owed += sum(len(frame.payload) for frame in numbered)
            if self._on_change is not None:
                # Who has got something of it to tell says so himself; that it came can wait.
                self._on_change(_ACK_DELAY)
            else:
                self._mark_safe(self._received)

    def _mark_safe(self, received: int) -> None:
        """Frames up to this number need not come again. Told late and for many at once: an ACK wakes the supervisor, which shares
        its core with the cell."""
        if received == self._safe:
            return
        self._safe = received
        if self._owed > _ACK_BYTES:
            self._acknowledge_now()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(_ACK_DELAY, self._acknowledge_now)

    def _acknowledge_now(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        self._owed = 0
        self._write(frames.pack(Kind.ACK, seq=self._safe))

    def _take_unnumbered(self, frame: Frame) -> None:
        if frame.kind is Kind.ACK:
            self._acknowledge(frame.seq)
        elif frame.kind is Kind.REPLY:
            reply = unpack_object(frame.payload)
            number = reply.get("id")
            future = self._replies.get(number) if isinstance(number, int) else None
            if future is not None and not future.done():
                future.set_result(reply)
        elif frame.kind in (Kind.DATA, Kind.DATA_END, Kind.CREDIT):
            stream = int.from_bytes(frame.payload[:4], "big")
            if consumer := self._streams.get(stream):
                consumer(frame)
        elif frame.kind is not Kind.PONG:
            raise FrameError(f"unexpected frame {frame.kind.name}")

    def detach(self, transport: asyncio.WriteTransport) -> None:
        """The connection is gone. Commands under way fail; numbered frames wait for the next one."""
        if self._transport is not transport:
            return
        self._transport = None
        self.connected = anyio.Event()
        self.pause(False)
        self._fail_replies()
        self.lost.set()

    def pause(self, paused: bool) -> None:
        """Flow control of the transport; only file streams wait for it."""
        if paused:
            self._writable.clear()
        else:
            self._writable.set()

    # what the gateway calls

    def send_message(self, channel: Channel, parts: list[bytes]) -> None:
        """A signed Jupyter message to the kernel; kept until the supervisor has it."""
        self._sent += 1
        self._unacknowledged.append((self._sent, frames.pack_message(channel, parts, self._sent)))
        if self._on_change is not None:
            self._on_change(0.0)
        else:
            self._sendable = self._sent
            self._give()

    def send_now(self, channel: Channel, parts: list[bytes]) -> None:
        """A message that need not survive anything: it goes out at once or never (version 2; before, all are numbered)."""
        if self._version < 2:
            self.send_message(channel, parts)
        else:
            self._write(frames.pack_message(channel, parts, 0))

    def _give(self) -> None:
        for seq, frame in self._unacknowledged:
            if self._given < seq <= self._sendable:
                self._given = seq
                self._write(frame)

    # storing

    def hold(self) -> None:
        """Takes nobody before `guard`: frames that came earlier would be taken without being stored. A supervisor calls again."""
        self._held = True

    def guard(self, on_change: Callable[[float], None]) -> None:
        """From now on frames count as received, and are sent, when they are stored; `on_change` says that something is new, and
        within how many seconds it has to be stored."""
        self._on_change = on_change
        self._held = False

    def take_news(self) -> "LinkNews":
        """What is new since this was asked last."""
        made = [(seq, frame) for seq, frame in self._unacknowledged if seq > self._taken]
        self._taken = self._sent
        return LinkNews(self._received, self._sent, made, self._acknowledged, self._acknowledged_size)

    def stored(self, news: "LinkNews") -> None:
        """It is stored: what came counts as received, what was made goes out."""
        self._mark_safe(news.received)
        self._sendable = news.sent
        self._give()

    # commands

    async def command(self, op: str, deadline: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Asks the supervisor and waits at most `deadline` seconds; raises `CommandFailed`, `LinkClosed`, `SandboxTimeout`."""
        number, future = self.post(op, **arguments)
        return await self.reply(number, future, op, deadline)

    def post(self, op: str, **arguments: Any) -> tuple[int, "asyncio.Future[dict[str, Any]]"]:
        """Sends a command without waiting; for `reply`."""
        if self._transport is None:
            raise LinkClosed("The sandbox of this kernel can't be reached at the moment.")
        number = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        self._write(frames.pack_json(Kind.COMMAND, {"id": number, "op": op, **arguments}))
        return number, future

    async def reply(
        self, number: int, future: "asyncio.Future[dict[str, Any]]", op: str, deadline: float | None = None
    ) -> dict[str, Any]:
        try:
            with anyio.fail_after(self.settings.command_timeout if deadline is None else deadline):
                answer = await future
        except TimeoutError:
            raise SandboxTimeout(f"The sandbox did not answer '{op}' in time.") from None
        finally:
            self.forget(number)
        if "error" in answer:
            error = answer["error"] if isinstance(answer["error"], dict) else {}
            raise CommandFailed(str(error.get("code", "")), str(error.get("message", ""))[:2000])
        result = answer.get("result")
        return result if isinstance(result, dict) else {}

    def forget(self, number: int) -> None:
        """Nobody waits for the reply to this command any more."""
        self._replies.pop(number, None)

    def open_stream(self, consumer: Callable[[Frame], None]) -> int:
        """Registers who gets the frames of a new file stream; its number."""
        number = next(self._ids)
        self._streams[number] = consumer
        return number

    def close_stream(self, number: int) -> None:
        self._streams.pop(number, None)

    async def send_frame(self, frame: bytes) -> None:
        """A frame of a file stream; waits while the socket is full."""
        await self._writable.wait()
        if self._transport is None:
            raise LinkClosed("The sandbox of this kernel ended during a file transfer.")
        self._write(frame)

    def post_frame(self, frame: bytes) -> None:
        self._write(frame)

    def extend(self, lifetime: float) -> None:
        """What the supervisor will be told at its next greeting, in seconds from the start of the box."""
        self._limits["lifetime"] = lifetime

    async def wait_lost(self) -> None:
        """Waits until a stream that was there has broken."""
        await self.connected.wait()
        # `lost` is a new Event after each greeting, so it must be read only once there was one.
        await self.lost.wait()

    async def keep(self, on_silence: Callable[[], Awaitable[None]]) -> None:
        """Pings until the link is closed; calls `on_silence` when the supervisor has said nothing for `lost_timeout` seconds.

        Counts pings without a word rather than time on a clock: a gateway that stood still for a while has missed none.
        """
        missed = 0
        while True:
            await anyio.sleep(self.settings.ping_interval)
            if self._closed:
                return
            missed = 0 if self._heard or self.frozen or self.slowed else missed + 1
            self._heard = False
            if missed * self.settings.ping_interval >= self.settings.lost_timeout:
                await on_silence()
            self._write(frames.pack(Kind.PING))

    def close(self) -> None:
        """Ends the stream for good. What was made and not stored can still be asked for."""
        self._closed = True
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        self._fail_replies()
        self.pause(False)
        self.lost.set()

    def _fail_replies(self) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(LinkClosed("The sandbox of this kernel ended before it answered."))
                future.exception()
        for consumer in list(self._streams.values()):
            consumer(Frame(Kind.DATA_END, 0, b"\0\0\0\0" + b'{"error": {"code": "sandbox_gone"}}'))

    def _acknowledge(self, seq: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= seq:
            self._acknowledged, frame = self._unacknowledged.popleft()
            self._acknowledged_size += len(frame)

    def _write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)


def _common_version(hello: dict[str, Any]) -> int | None:
    """The highest version that both ends speak; None when there is none."""
    highest = _number(hello, "version")
    lowest = _number(hello, "minimum") or highest
    version = min(highest, frames.VERSION)
    return version if version >= max(lowest, frames.MINIMUM_VERSION) else None


def _number(hello: dict[str, Any], name: str) -> int:
    value = hello.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _same(given: object, secret: str) -> bool:
    return isinstance(given, str) and secrets.compare_digest(given.encode("utf-8", "replace"), secret.encode())


class Connection(asyncio.Protocol):
    """One stream from a sandbox, until it proves to be the supervisor of a `Link` or is dropped."""

    def __init__(self, link: Link, patience: float | None = None) -> None:
        """`patience`: seconds until the greeting must have come; None: as the link's settings say."""
        self._link = link
        self._patience = link.settings.handshake_timeout if patience is None else patience
        self._decoder = Decoder(link.settings.max_frame + 4096)
        self._greeted = False
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._free_at = 0.0
        self._counted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link.waiting += 1
        self._counted = True
        if self._link.taken or self._link.waiting > _MAX_WAITING:
            # Cells can dial too: what they open must not add up.
            transport.abort()  # type: ignore[attr-defined]
        # A cast, since uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._patience, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            # It has broken the protocol already; a multiplexed stream may still hold bytes of it.
            return
        try:
            batch = self._decoder.feed(data)
            if batch and not self._greeted:
                self._greet(batch.pop(0))
            if batch:
                self._link.take(batch)
            if self._link.rate:
                self._slow_down(len(data))
        except FrameError as error:
            self._link.bad_frames += 1
            log.warning("link_protocol_error", reason=str(error))
            self._transport.abort()

    def _greet(self, frame: Frame) -> None:
        assert self._transport is not None
        if frame.kind is not Kind.HELLO or not self._link.greet(self._transport, unpack_object(frame.payload)):
            raise FrameError("refused greeting")
        self._greeted = True
        self._uncount()
        if self._deadline is not None:
            self._deadline.cancel()

    def _slow_down(self, size: int) -> None:
        """Reads no further until the bytes read are within the rate: the supervisor's buffer fills, and the kernel waits."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + size / self._link.rate
        ahead = self._free_at - loop.time()
        if ahead > _RATE_SLACK and not self._transport.is_closing():
            self._transport.pause_reading()
            self._link.slowed = True
            loop.call_later(ahead - _RATE_SLACK, self._read_on)

    def _read_on(self) -> None:
        self._link.slowed = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._link.pause(True)

    def resume_writing(self) -> None:
        self._link.pause(False)

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self._link.waiting -= 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._uncount()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._link.detach(self._transport)
