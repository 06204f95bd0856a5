"""The link over a container's attached stdin and stdout, for engines that can't share a path of this host.

Docker multiplexes output as ``stream:u8 0 0 0 size:u32 payload``
(https://docs.docker.com/reference/api/engine/version/v1.41/#tag/Container/operation/ContainerAttach); what we write goes in as it is.
"""

import asyncio
import struct

from gateway.sandboxes.link import Connection, Link

_HEADER = struct.Struct("!BxxxI")
_STDOUT = 1
_START_PATIENCE = 600.0


class StdioConnection(asyncio.Protocol):
    """Takes the multiplexing off and hands stdout to an ordinary `Connection`. Keeps no more than one header."""

    def __init__(self, link: Link) -> None:
        # Attached before the box is started, and only the box is at the other end: the start's own deadline is enough.
        self._inner = Connection(link, patience=_START_PATIENCE)
        self._header = b""
        self._left = 0
        self._stream = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        while data:
            if self._left == 0:
                missing = _HEADER.size - len(self._header)
                self._header, data = self._header + data[:missing], data[missing:]
                if len(self._header) < _HEADER.size:
                    return
                self._stream, self._left = _HEADER.unpack(self._header)
                self._header = b""
                continue
            piece, data = data[: self._left], data[self._left :]
            self._left -= len(piece)
            if self._stream == _STDOUT:
                self._inner.data_received(piece)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)
