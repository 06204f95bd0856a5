"""A gateway in the smallest, for tests of the supervisor: a listening socket, frames in and frames out, nothing remembered."""

import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Decoder, Frame, Kind

PATIENCE = 20.0
"""Seconds after which something that should have come has not; never a measure of speed."""
TERMS = {"lifetime": 600.0, "silence": 60.0, "max_frame": 1 << 20, "max_unacknowledged": 1 << 20}


class Host:
    """One stream at a time. `received` is the number up to which numbered frames were taken, in order."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(PATIENCE)
        self.stream: socket.socket | None = None
        self.decoder = Decoder(1 << 26)
        self.waiting: deque[Frame] = deque()
        self.kept: list[Frame] = []
        """Numbered frames, each once."""
        self.received = 0
        self.sent = 0
        self._commands = 0

    def accept(self) -> None:
        self.hang_up()
        self.stream, _ = self.listener.accept()
        self.stream.settimeout(PATIENCE)
        self.decoder = Decoder(1 << 26)
        self.waiting.clear()

    def hang_up(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def close(self) -> None:
        self.hang_up()
        self.listener.close()

    def send(self, data: bytes) -> None:
        assert self.stream is not None
        self.stream.sendall(data)

    def read(self, size: int = 1 << 20) -> list[Frame]:
        """What is there now."""
        assert self.stream is not None
        self.stream.setblocking(False)
        try:
            while data := self.stream.recv(size):
                self.waiting.extend(self.decoder.feed(data))
        except BlockingIOError:
            pass
        finally:
            self.stream.settimeout(PATIENCE)
        found = list(self.waiting)
        self.waiting.clear()
        return found

    def frame(self) -> Frame:
        """The next frame; raises TimeoutError when none comes, EOFError at the end of the stream."""
        assert self.stream is not None
        while not self.waiting:
            data = self.stream.recv(1 << 18)
            if not data:
                raise EOFError
            self.waiting.extend(self.decoder.feed(data))
        return self.waiting.popleft()

    # a conversation with a whole supervisor

    def greet(self, **terms: Any) -> dict[str, Any]:
        """Takes a call and welcomes; what HELLO said."""
        self.accept()
        hello = self.frame()
        assert hello.kind is Kind.HELLO
        self.send(frames.pack_json(Kind.WELCOME, {"secret": "s", "received": self.received, **TERMS, **terms}))
        return frames.unpack_json(hello.payload)

    def take(self, acknowledge: bool = True) -> Frame:
        """The next frame; a numbered one must be the next one and is kept."""
        frame = self.frame()
        if frame.kind in frames.NUMBERED:
            assert frame.seq == self.received + 1, (frame.seq, self.received)
            self.received = frame.seq
            self.kept.append(frame)
            if acknowledge:
                self.send(frames.pack(Kind.ACK, seq=frame.seq))
        return frame

    def until(self, kind: Kind, acknowledge: bool = True) -> Frame:
        """The next frame of this kind; what comes before is kept as `take` keeps it."""
        deadline = time.monotonic() + PATIENCE
        while (frame := self.take(acknowledge)).kind is not kind:
            assert time.monotonic() < deadline, f"no {kind.name}"
        return frame

    def command(self, op: Any, **arguments: Any) -> dict[str, Any]:
        """Asks and waits for the reply."""
        self._commands += 1
        self.send(frames.pack_json(Kind.COMMAND, {"id": self._commands, "op": op, **arguments}))
        reply = frames.unpack_json(self.until(Kind.REPLY).payload)
        assert reply.pop("id") == self._commands
        return reply

    def request(self, order: bytes, channel: Channel = Channel.SHELL) -> None:
        """A message to the kernel."""
        self.sent += 1
        self.send(frames.pack_message(channel, [b"<IDS|MSG>", b"", b"{}", b"{}", b"{}", order], self.sent))

    def messages(self, channel: Channel) -> list[list[bytes]]:
        """The messages taken so far from one channel."""
        unpacked = [frames.unpack_message(frame.payload, 1 << 12) for frame in self.kept if frame.kind is Kind.MESSAGE]
        return [parts for found, parts in unpacked if found is channel]

    def events(self, name: str) -> list[dict[str, Any]]:
        values = [frames.unpack_json(frame.payload) for frame in self.kept if frame.kind is Kind.EVENT]
        return [value for value in values if value.get("event") == name]
