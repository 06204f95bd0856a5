"""HTTP at its lowest: a request's head has a bound, and a time in which it must come.

The server's parser keeps a head until it is complete, whatever its size; anybody may send one, since the token is in it.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 1024
"""Bytes of request line and headers."""
HEAD_TIMEOUT = 15.0
"""Seconds from the first byte of a head to its last."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol; a head that is too large or too slow is answered with 400 and the connection closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = 0
        self._in_head = True
        self._head_deadline: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
            if self._head_deadline is None:
                self._head_deadline = self.loop.call_later(HEAD_TIMEOUT, self._refuse)
        super().data_received(data)
        # Checked after the parser has seen it: what is left then is head alone, not the body behind it.
        if self._in_head and self._head > MAX_HEAD:
            self._refuse()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head = False, 0
        self._cancel_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def _cancel_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _refuse(self) -> None:
        self._cancel_deadline()
        if not self.transport.is_closing():
            self.send_400_response("The head of the request is too large or too slow.")
