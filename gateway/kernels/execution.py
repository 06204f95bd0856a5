"""One cell and all that it produces: a log of events that ends with exactly one `ended`.

An Execution does no I/O. The kernel feeds it and ends it; faces read its log. What it keeps is bounded by an `OutputBudget`: the
beginning and the end of the output stay, what lies between is counted and told by a `truncated` event.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import anyio

from gateway.kernels.log import EventLog
from gateway.protocol.events import EndStatus, Payload, coalesce
from gateway.protocol.outputs import OutputCollector

Cause = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CellRequest:
    """What a client asks to run. `timeout` in seconds from the moment the cell is handed to the kernel."""

    code: str
    timeout: float
    silent: bool = False
    store_history: bool = True
    stop_on_error: bool = True
    allow_stdin: bool = False


class OutputBudget:
    """Which outputs are kept: the first half of the limit at once, then a ring that holds the last half until the end."""

    def __init__(self, max_bytes: int, max_events: int) -> None:
        self.limit = max_bytes
        self.size = 0
        """Bytes of all output, kept or not."""
        self.left_out_bytes = 0
        self.left_out_events = 0
        self.exceeded = False
        """The head is full: from here on outputs wait in the ring."""
        self._head_bytes, self._head_events = max_bytes // 2, max_events // 2
        self._tail_bytes, self._tail_events = max_bytes - self._head_bytes, max_events - self._head_events
        self._question_bytes, self._question_events = self._tail_bytes, self._tail_events
        self._piece = max(1024, min(65_536, max_bytes // 32))
        self._tail: deque[tuple[Payload, int]] = deque()
        self._tail_size = 0

    def cut(self, payload: Payload, size: int) -> Iterable[tuple[Payload, int]]:
        """A long text in pieces, since of a text a part can be left out; anything else as it is."""
        if payload.type != "stream" or size <= self._piece:
            return ((payload, size),)
        name, text = payload.members["name"], payload.members["text"]
        step = max(1, len(text) * self._piece // size)
        starts = range(0, len(text), step)
        return ((Payload("stream", {"name": name, "text": text[i : i + step]}), size // len(starts)) for i in starts)

    def admit(self, payload: Payload, size: int) -> bool:
        """True when the output is to be told now; else it is in the ring, or counted as left out."""
        self.size += size
        if not self.exceeded and size <= self._head_bytes and self._head_events > 0:
            self._head_bytes -= size
            self._head_events -= 1
            return True
        self.exceeded = True
        self._tail.append((payload, size))
        self._tail_size += size
        while self._tail and (self._tail_size > self._tail_bytes or len(self._tail) > self._tail_events):
            pushed_out = self._tail.popleft()[1]
            self._tail_size -= pushed_out
            self.leave_out(pushed_out)
        return False

    def admit_question(self, size: int) -> bool:
        """Questions can't wait in the ring: they have as much as the ring of their own, and past it are left out."""
        self.size += size
        self._question_bytes -= size
        self._question_events -= 1
        if self._question_bytes >= 0 and self._question_events >= 0:
            return True
        self.leave_out(size)
        return False

    def leave_out(self, size: int) -> None:
        """Counts an output that is not told."""
        self.left_out_bytes += size
        self.left_out_events += 1

    @property
    def truncated(self) -> dict[str, int] | None:
        """Members of the `truncated` event; None when nothing is missing."""
        if not self.left_out_events:
            return None
        return {"bytes": self.left_out_bytes, "events": self.left_out_events, "limit": self.limit}

    def rest(self) -> list[Payload]:
        """What the end of the cell adds: `truncated` if anything is missing, then the outputs of the ring."""
        tail = [payload for payload, _ in self._tail]
        self._tail.clear()
        missing = self.truncated
        return [*([Payload("truncated", dict(missing))] if missing else []), *coalesce(tail)]


class Execution:
    """`queued`, then in the kernel, then ended. `done` is set after the last event is in the log."""

    def __init__(self, kernel_id: str, request: CellRequest, budget: OutputBudget) -> None:
        self.id = str(uuid4())
        self.kernel_id = kernel_id
        self.request = request
        self.log = EventLog(self.id)
        self.done = anyio.Event()
        self.msg_id: str | None = None
        self.execution_count: int | None = None
        self.status: EndStatus | None = None
        self.end: dict[str, Any] = {}
        self.input_request: dict[str, Any] | None = None
        """Header of the pending input_request, to which the answer is a reply."""
        self.timed_out = False
        self.cancelled = False
        self.interrupted = False
        self.climbing = False
        self.last_step: str | None = None
        self.idle_seen = False
        self.reply: dict[str, Any] | None = None
        self.budget = budget
        self.usage: dict[str, Any] = {}
        """What it has used, as far as the sandbox tells: `cpu_seconds`, `memory_peak`."""
        self._announced = False
        self._started_at: float | None = None

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def running(self) -> bool:
        return self._started_at is not None and not self.ended

    def sent(self, msg_id: str) -> None:
        """The request is on its way to the kernel."""
        self.msg_id = msg_id
        self._started_at = time.monotonic()

    def announce_start(self, execution_count: int | None) -> None:
        """The kernel has taken the cell up; told once."""
        if self.ended:
            return
        if execution_count is not None:
            self.execution_count = execution_count
        if not self._announced:
            self._announced = True
            self.log.append([Payload("started", {"execution_count": execution_count})])

    def tell(self, payload: Payload) -> None:
        """An event that is no output: queue positions, steps of an interrupt, warnings."""
        if not self.ended:
            self.log.append([payload])

    def produce(self, payloads: Sequence[tuple[Payload, int]]) -> None:
        """Outputs with their size in bytes, as they came in one read."""
        if self.ended:
            return
        self.announce_start(None)
        before = self.budget.exceeded
        pieces = (piece for payload, size in payloads for piece in self.budget.cut(payload, size))
        kept = [payload for payload, size in pieces if self.budget.admit(payload, size)]
        if kept:
            self.log.append(coalesce(kept))
        if self.budget.exceeded and not before:
            text = "The output has passed half of its limit. What follows is told when the cell ends: the last part of it, and how much is missing."
            self.log.append([Payload("warning", {"code": "output_limit", "message": text, "limit": self.budget.limit})])

    def finish(self, status: EndStatus, cause: Cause | None, kernel_state: str, variables: str) -> None:
        """The end, told once; later calls change nothing."""
        if self.ended:
            return
        self.log.append(self.budget.rest())
        self.status = status
        self.input_request = None
        duration = round(time.monotonic() - self._started_at, 6) if self._started_at is not None else 0.0
        self.end = {
            "status": status,
            "cause": cause,
            "execution_count": self.execution_count,
            "kernel_state": kernel_state,
            "variables": variables,
            "duration": duration,
            "usage": {"wall_seconds": duration, "output_bytes": self.budget.size, **self.usage},
        }
        self.log.append([Payload("ended", self.end)])
        self.log.close()
        self.done.set()

    def result(self) -> dict[str, Any]:
        """The whole as one document: `Result` of docs/native-api.md."""
        collector = OutputCollector()
        warnings = []
        for event in self.log.since(0):
            collector.add(event)
            if event.type == "warning":
                warnings.append(event.members)
        return {
            "execution_id": self.id,
            "kernel_id": self.kernel_id,
            "status": self.status or ("running" if self.running else "queued"),
            "cause": self.end.get("cause"),
            "execution_count": self.execution_count,
            "outputs": collector.finish(),
            "truncated": self.budget.truncated,
            "warnings": warnings,
            "kernel_state": self.end.get("kernel_state"),
            "variables": self.end.get("variables"),
            "duration": self.end.get("duration"),
            "usage": self.end.get("usage"),
        }
