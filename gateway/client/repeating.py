"""When a request is sent again, and where a stream that broke off goes on. No network here: both clients ask it.

A gateway may be stopped, upgraded or killed while kernels live on. A request that it did not answer is repeated until the
next gateway answers, with the key that makes the repetition harmless; a stream is followed from its last event. What may not
be repeated (an interrupt, a restart, an answer to `input()`, an upload) is left to the caller.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import anyio
import httpx2

from gateway.client import calls
from gateway.client.answers import EventLines
from gateway.client.calls import Call
from gateway.client.errors import ApiError, ClientError, ConnectionLost, GatewayUnreachable, is_gone
from gateway.protocol.events import Event

RECONNECT = 60.0
"""Seconds that a client goes on trying after a connection was lost."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between attempts: the first, and what doubling it leads to. Less by chance, so that clients do not come all at once."""
STEADY = 5.0
"""Seconds after which a connection counts as one that worked, though nothing came over it: a cell may be silent for long."""

OnReconnect = Callable[[ClientError | None], None]
"""Called with what broke a connection when attempts to get it back begin, and with None once a gateway answers again."""

pause: Callable[[float], None] = time.sleep
async_pause = anyio.sleep
clock: Callable[[], float] = time.monotonic

PROXY_CODES = frozenset({"http_502", "http_503", "http_504"})
"""What a proxy answers while the gateway behind it is away."""


class Contact:
    """What a client knows of its gateway. `limit` is how many seconds it goes on trying, 0: not at all."""

    def __init__(self, url: str, limit: float, on_reconnect: OnReconnect | None) -> None:
        self.url = url
        self.limit = limit
        self.on_reconnect = on_reconnect
        self.reached = False
        """Whether a gateway has answered there. Where none ever did, or not for too long, nobody waits for one."""

    def tell(self, error: ClientError | None) -> None:
        if self.on_reconnect:
            self.on_reconnect(error)


class Attempts:
    """The attempts at one request."""

    def __init__(self, contact: Contact, call: Call[Any]) -> None:
        self.call = call
        self.execution_id: str | None = None
        self._contact = contact
        self._since: float | None = None
        """When the outage began that these attempts try to outlast."""
        self._began = clock()
        """When the present attempt began."""
        self._pause = FIRST_PAUSE
        self._told = False
        self._broke_off = False
        """An attempt may have arrived although its answer did not."""

    def accepts(self, response: httpx2.Response) -> bool:
        """A success; or the second answer to a deletion that has already worked."""
        gone = self._broke_off and self.call.method == "DELETE" and response.status_code in (404, 410)
        return response.is_success or gone

    def answered(self) -> None:
        """A gateway has answered."""
        self._contact.reached = True
        if self._told:
            self._told = False
            self._contact.tell(None)

    def wait_after(self, error: ClientError) -> float:
        """Seconds to wait before the next attempt; raises the error, or what it means by now, when there is to be none."""
        now = clock()
        if isinstance(error, ConnectionLost):
            self._broke_off = True
            if now - self._began >= STEADY:
                self.renew()
        if not self._passes(error):
            if isinstance(error, ApiError):
                self.answered()
            raise self._meaning(error)
        self._since = now if self._since is None else self._since
        left = self._since + self._contact.limit - now
        if left <= 0:
            self._contact.reached = False
            raise self._meaning(error)
        if not self._told:
            self._told = True
            self._contact.tell(error)
        wait = min(self._pause * random.uniform(0.5, 1.0), left)  # noqa: S311 (no secret)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._began = now + wait
        return wait

    def renew(self) -> None:
        """There was progress: another break is a new outage."""
        self._since, self._pause = None, FIRST_PAUSE

    def _passes(self, error: ClientError) -> bool:
        """Whether it looks like a gateway that goes away or is on its way back, and the request may be repeated."""
        if not self.call.repeatable:
            return False
        cause = error.__cause__
        if isinstance(error, ApiError):
            return error.code == "shutting_down" or (self._since is not None and error.code in PROXY_CODES)
        if isinstance(error, GatewayUnreachable):
            known = self._contact.reached or self._since is not None
            return known and isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout)
        # A timeout is no break: that gateway is there and hangs. Nor is a request that can't be sent.
        broken = isinstance(cause, httpx2.NetworkError | httpx2.RemoteProtocolError)
        return isinstance(error, ConnectionLost) and (broken or cause is None)

    def _meaning(self, error: ClientError) -> ClientError:
        """What the last error says once a connection broke off: the request may have been done, which only this one tells."""
        if not self._broke_off:
            return error
        url, execution_id = self._contact.url, self.execution_id
        meaning = error
        if execution_id and is_gone(error):
            meaning = ConnectionLost(url, str(error), execution_id, forgotten=True)
        elif isinstance(error, GatewayUnreachable):
            meaning = ConnectionLost(url, f"no gateway has answered since: {error.reason}", execution_id)
        elif isinstance(error, ConnectionLost) and execution_id:
            meaning = ConnectionLost(url, error.reason, execution_id)
        elif isinstance(error, ApiError) and error.code in PROXY_CODES | {"shutting_down"}:
            meaning = ConnectionLost(url, f"no gateway has taken it since: {error}", execution_id)
        if meaning is not error:
            meaning.__cause__ = error
        return meaning


class Following(Attempts):
    """The events of one execution, each once and in order, over as many connections as it takes.

    `call` starts it: an execute, which is repeated as long as the execution has no known id, or a `calls.follow`.
    """

    def __init__(
        self, contact: Contact, call: Call[Any], kernel_id: str, execution_id: str | None = None, after: int = 0
    ) -> None:
        super().__init__(contact, call)
        self.execution_id = execution_id
        self.ended = False
        self._kernel_id = kernel_id
        self._last = after
        self._lines = EventLines()

    def next_call(self) -> Call[Any]:
        """What to send at the next attempt."""
        self._lines = EventLines()  # half a line of the last attempt comes again as a whole
        if self.execution_id is not None:
            self.call = calls.follow(self._kernel_id, self.execution_id, self._last)
        return self.call

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that this piece of the answer completes and that were not seen before."""
        new: list[Event] = []
        for event in self._lines.feed(chunk):
            if self.ended or event.seq <= self._last:
                continue
            self._last = event.seq
            self.execution_id = event.execution_id or self.execution_id
            self.ended = event.type == "ended"
            new.append(event)
        if new:
            self.renew()
        return new

    def check_end(self) -> None:
        """The answer is over: raises unless the execution is."""
        if not self.ended:
            raise ConnectionLost(self._contact.url, "no `ended` event came", self.execution_id)
