"""The codec of the link, used by both of its ends: length-prefixed frames with a kind and a number.

A frame is ``length:u32 kind:u8 seq:u64 payload`` in network byte order; `length` counts the payload alone. `seq` numbers the
frames that must not be lost (MESSAGE, OVERSIZE, EVENT), from 1, each direction on its own; in an ACK it is the last number
received; elsewhere it is 0. A peer may be hostile: `Decoder` checks every length before it keeps a byte for it.

A kernel may outlive its gateway, so the two ends may be of different versions. HELLO tells the range that the supervisor speaks,
WELCOME the highest version that both speak, which holds until the stream ends. What each version brought:

1. All of the above.
2. Survival. `minimum` in HELLO (version 1: there is none, and it speaks 1 alone). `epoch` in both: how often the gateway's store
   was opened; a supervisor breaks the link to a gateway with a lower one than it has seen, since another has taken over (0, or
   absent: unknown). A MESSAGE with `seq` 0 from the gateway is passed on whenever it comes and is not counted: for requests that
   need not outlive the stream. `overflow` in WELCOME says what becomes of output past `max_unacknowledged`: ``wait`` (also when
   absent), the kernel is held up; ``drop``, outputs are left out, and the EVENT `gap` tells how many in their place.
"""

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

VERSION = 2
"""The newest version of this codec and of the commands; HELLO and WELCOME agree on one that both ends speak."""
MINIMUM_VERSION = 1
"""The oldest version that is spoken still."""

HEADER = struct.Struct("!IBQ")
_STREAM = struct.Struct("!I")
_CREDIT = struct.Struct("!II")
_MESSAGE = struct.Struct("!BH")


class Kind(IntEnum):
    HELLO = 1
    """supervisor → gateway, first: JSON version, minimum, epoch, secret, received, kernel."""
    WELCOME = 2
    """gateway → supervisor, the answer: JSON version, epoch, secret, received, lifetime, silence, max_frame, max_unacknowledged,
    overflow."""
    MESSAGE = 3
    """One ZMQ message: channel, parts."""
    OVERSIZE = 4
    """JSON: a message was larger than max_frame and is left out: channel, size, header, parent."""
    EVENT = 5
    """JSON: something about the kernel process or its box. `event` says what: usage, memory_high, out_of_memory_kill,
    process_limit, gap (parent, messages, bytes), kernel_exit."""
    ACK = 6
    """`seq` and all before it are safe."""
    COMMAND = 7
    """gateway → supervisor, JSON: id, op, arguments."""
    REPLY = 8
    """supervisor → gateway, JSON: id, and result or error."""
    DATA = 9
    """A piece of a file stream: stream number, bytes."""
    DATA_END = 10
    """The end of a file stream: stream number, JSON with an `error` when it broke off."""
    CREDIT = 11
    """The reader of a file stream can take so many bytes more."""
    PING = 12
    PONG = 13


class Channel(IntEnum):
    SHELL = 1
    CONTROL = 2
    STDIN = 3
    IOPUB = 4


NUMBERED = frozenset({Kind.MESSAGE, Kind.OVERSIZE, Kind.EVENT})
CHUNK = 256 * 1024
"""Bytes of one DATA frame at most: small enough that messages get through between two of them."""
WINDOW = 4 * CHUNK
"""Bytes of a file stream that may be under way before its reader grants more."""


class FrameError(ValueError):
    """The peer broke the protocol; the link has to be closed."""


class Frame(NamedTuple):
    kind: Kind
    seq: int
    payload: bytes


def pack(kind: Kind, payload: bytes = b"", seq: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, seq) + payload


def pack_json(kind: Kind, value: dict[str, Any], seq: int = 0) -> bytes:
    return pack(kind, json.dumps(value, separators=(",", ":")).encode(), seq)


def pack_message(channel: int, parts: Sequence[bytes], seq: int) -> bytes:
    """A MESSAGE frame in one piece, made with a single copy of the parts."""
    table = struct.pack(f"!{len(parts)}I", *map(len, parts))
    body = _MESSAGE.pack(channel, len(parts)) + table
    size = len(body) + sum(map(len, parts))
    return b"".join((HEADER.pack(size, Kind.MESSAGE, seq), body, *parts))


def message_size(parts: Sequence[bytes]) -> int:
    """Bytes of payload that `pack_message` will make of these parts."""
    return _MESSAGE.size + 4 * len(parts) + sum(map(len, parts))


def unpack_message(payload: bytes, max_parts: int) -> tuple[Channel, list[bytes]]:
    """Payload of a MESSAGE -> channel and parts; raises `FrameError` when lengths, count or channel are wrong."""
    if len(payload) < _MESSAGE.size:
        raise FrameError("message frame too short")
    channel, count = _MESSAGE.unpack_from(payload)
    if not 1 <= channel <= 4:
        raise FrameError(f"unknown channel {channel}")
    position = _MESSAGE.size + 4 * count
    if count > max_parts or position > len(payload):
        raise FrameError(f"{count} parts announced")
    parts: list[bytes] = []
    for length in struct.unpack_from(f"!{count}I", payload, _MESSAGE.size):
        parts.append(payload[position : position + length])
        position += length
    if position != len(payload):
        raise FrameError("parts do not fill their frame")
    return Channel(channel), parts


def pack_data(stream: int, chunk: bytes) -> bytes:
    return pack(Kind.DATA, _STREAM.pack(stream) + chunk)


def pack_data_end(stream: int, value: dict[str, Any]) -> bytes:
    return pack(Kind.DATA_END, _STREAM.pack(stream) + json.dumps(value).encode())


def pack_credit(stream: int, size: int) -> bytes:
    return pack(Kind.CREDIT, _CREDIT.pack(stream, size))


def unpack_data(payload: bytes) -> tuple[int, bytes]:
    if len(payload) < _STREAM.size:
        raise FrameError("data frame too short")
    return _STREAM.unpack_from(payload)[0], payload[_STREAM.size :]


def unpack_credit(payload: bytes) -> tuple[int, int]:
    if len(payload) != _CREDIT.size:
        raise FrameError("credit frame has a wrong size")
    stream, size = _CREDIT.unpack(payload)
    return stream, size


def unpack_json(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        raise FrameError("not JSON") from None
    if not isinstance(value, dict):
        raise FrameError("not a JSON object")
    return value


class Decoder:
    """Bytes in, frames out. Keeps at most one incomplete frame, of at most `max_frame` bytes."""

    def __init__(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """All frames that `data` completes; raises `FrameError` as soon as a header is wrong."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        position = 0
        while len(buffer) - position >= HEADER.size:
            length, kind, seq = HEADER.unpack_from(buffer, position)
            if length > self.max_frame:
                raise FrameError(f"frame of {length} bytes, {self.max_frame} allowed")
            if not 1 <= kind <= 13:
                raise FrameError(f"unknown frame kind {kind}")
            start = position + HEADER.size
            if len(buffer) - start < length:
                break
            position = start + length
            frames.append(Frame(Kind(kind), seq, bytes(buffer[start:position])))
        del buffer[:position]
        return frames
