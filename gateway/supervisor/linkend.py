"""The supervisor's end of the link: dials out, greets, keeps what is not acknowledged and sends it again after a loss.

Either a Unix socket on which the gateway listens (dialled again whenever it breaks), or the container's own stdin and stdout
(which can't break without ending the box). Nothing here blocks: `relay` polls the descriptor.
"""

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable

from . import frames
from .frames import Decoder, Frame, Kind

READ_SIZE = 256 * 1024
_COMMAND_FRAME = 64 * 1024 * 1024
"""Largest frame taken from the gateway; requests with code and widget buffers pass, nonsense does not."""


class LinkLost(Exception):
    """The stream to the gateway is gone."""


class LinkEnd:
    """One stream at a time, and the numbered frames that outlive it."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.secret = ""
        self.received = 0
        """Number of the last MESSAGE taken from the gateway."""
        self.max_unacknowledged = 1 << 20
        self.max_frame = 1 << 20
        self.version = frames.MINIMUM_VERSION
        """What is spoken with the gateway that is connected."""
        self.epoch = 0
        """The highest of the gateways that were welcomed: one with a lower is a gateway that another has replaced."""
        self.overflowing = False
        """Outputs are to be left out now: from the bound on until half of it is free, since every gap has to be told."""
        self.welcomed = False
        self.ack_due = False
        self._in = -1
        self._out = -1
        self._socket: socket.socket | None = None
        self._decoder = Decoder(_COMMAND_FRAME)
        self._pending: deque[bytes] = deque()
        self._offset = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_size = 0
        self._drops = False
        self._seq = 0

    @property
    def connected(self) -> bool:
        return self._in >= 0

    @property
    def in_fd(self) -> int:
        return self._in

    @property
    def out_fd(self) -> int:
        return self._out

    @property
    def wants_to_write(self) -> bool:
        return bool(self._pending)

    @property
    def congested(self) -> bool:
        """So much is unacknowledged that the kernel should wait, or outputs be left out."""
        return self._kept_size > self.max_unacknowledged

    @property
    def full(self) -> bool:
        """Nothing is taken from the kernel any more: where outputs are left out, the rest has as much room again."""
        return self._kept_size > self.max_unacknowledged * (2 if self._drops else 1)

    @property
    def backlog(self) -> bool:
        """File streams should wait: messages come first."""
        return len(self._pending) > 4

    def dial(self, kernel: Callable[[], dict[str, object] | None]) -> bool:
        """Connects and greets; False when nobody listens. `kernel` makes what the greeting says of the kernel process."""
        if self.path is None:
            self._in, self._out = 0, 1
            os.set_blocking(0, False)
            os.set_blocking(1, False)
        else:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # First of all: connecting to a gateway that accepts no more (stopped, and its backlog full) would wait for ever.
            stream.setblocking(False)
            try:
                stream.connect(self.path)
            except OSError:
                stream.close()
                return False
            self._socket = stream
            self._in = self._out = stream.fileno()
        hello = {
            "version": frames.VERSION,
            "minimum": frames.MINIMUM_VERSION,
            "epoch": self.epoch,
            "secret": self.secret,
            "received": self.received,
            "kernel": kernel(),
        }
        self._pending.append(frames.pack_json(Kind.HELLO, hello))
        return True

    def welcome(self, message: dict[str, object]) -> None:
        """Takes the gateway's answer: from here on numbered frames flow, those it lacks first. Raises `LinkLost`, and takes
        nothing of it, when it is a version that is not spoken here or a gateway that another has replaced."""
        names = ("max_frame", "max_unacknowledged", "received")
        max_frame, max_unacknowledged, received = (int(str(message[name])) for name in names)
        version, epoch = int(str(message.get("version", frames.MINIMUM_VERSION))), int(str(message.get("epoch", 0)))
        if not frames.MINIMUM_VERSION <= version <= frames.VERSION or epoch < self.epoch:
            raise LinkLost
        if not self.secret:
            self.secret = str(message["secret"])
        self.version, self.epoch = version, epoch
        self.max_frame, self.max_unacknowledged = max_frame, max_unacknowledged
        self._drops = message.get("overflow") == "drop"
        self.overflowing = self.overflowing and self._drops
        self.acknowledge(received)
        self.welcomed = True
        self._pending.extend(frame for _, frame in self._kept)

    def close(self) -> None:
        """Forgets the stream, not the frames: they go out again on the next one."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._in = self._out = -1
        self.welcomed = False
        self._decoder = Decoder(_COMMAND_FRAME)
        self._pending.clear()
        self._offset = 0

    def acknowledge(self, seq: int) -> None:
        while self._kept and self._kept[0][0] <= seq:
            self._kept_size -= len(self._kept.popleft()[1])
        self._weigh()

    def is_safe(self, seq: int) -> bool:
        """The gateway has acknowledged the frame of this number."""
        return not self._kept or self._kept[0][0] > seq

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def send_numbered(self, seq: int, frame: bytes) -> None:
        """Keeps the frame until it is acknowledged, and sends it when there is a gateway."""
        self._kept.append((seq, frame))
        self._kept_size += len(frame)
        self._weigh()
        if self.welcomed:
            self._pending.append(frame)

    def _weigh(self) -> None:
        if self.congested:
            self.overflowing = self._drops
        elif self._kept_size <= self.max_unacknowledged // 2:
            self.overflowing = False

    def send(self, frame: bytes) -> None:
        """Sends a frame that may be lost with the stream."""
        if self.connected:
            self._pending.append(frame)

    def flush(self) -> None:
        """Writes what the stream takes now; raises `LinkLost`."""
        try:
            while self._pending:
                first = self._pending[0]
                self._offset += os.write(self._out, memoryview(first)[self._offset :])
                if self._offset == len(first):
                    self._pending.popleft()
                    self._offset = 0
        except BlockingIOError:
            pass
        except OSError:
            raise LinkLost from None

    def read(self) -> list[Frame]:
        """The frames that have arrived; raises `LinkLost` at the end of the stream or at nonsense."""
        try:
            data = os.read(self._in, READ_SIZE)
        except BlockingIOError:
            return []
        except OSError:
            raise LinkLost from None
        if not data:
            raise LinkLost
        try:
            return self._decoder.feed(data)
        except frames.FrameError:
            raise LinkLost from None

    def drain(self, deadline: float) -> None:
        """Last words: blocks for at most `deadline` seconds until everything is written."""
        if not self.connected:
            return
        with contextlib.suppress(OSError, LinkLost):
            if self._socket is not None:
                self._socket.settimeout(deadline)
                rest = b"".join(self._pending)[self._offset :]
                self._socket.sendall(rest)
                self._pending.clear()
            self.flush()
