"""One cell and all that it produces: a log of events that ends with exactly one `ended`.

An Execution does no I/O. The kernel feeds it and ends it; faces read its log. What it keeps is bounded by `max_output`: past it
outputs are counted, not kept, and a `truncated` event before the end says how much is missing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import anyio

from gateway.kernels.log import EventLog
from gateway.protocol.events import OUTPUT_TYPES, EndStatus, Payload, merge_streams
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


class Execution:
    """`queued`, then in the kernel, then ended. `done` is set after the last event is in the log."""

    def __init__(self, kernel_id: str, request: CellRequest, max_output: int) -> None:
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
        self.last_step: str | None = None
        self.idle_seen = False
        self.reply: dict[str, Any] | None = None
        self.output_size = 0
        self._max_output = max_output
        self._left_out_events = 0
        self._left_out_bytes = 0
        self._announced = False
        self._queued_at = time.monotonic()
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
        if execution_count is not None:
            self.execution_count = execution_count
        if not self._announced and not self.ended:
            self._announced = True
            self.log.append([Payload("started", {"execution_count": execution_count})])

    def tell(self, payload: Payload) -> None:
        """An event that is no output: queue positions, steps of an interrupt, warnings."""
        if not self.ended:
            self.log.append([payload])

    def produce(self, payloads: Sequence[tuple[Payload, int]]) -> None:
        """Outputs with their size in bytes, as they came in one read; neighbouring stream texts become one event."""
        if self.ended:
            return
        self.announce_start(None)
        kept: list[Payload] = []
        for payload, size in payloads:
            if payload.type in OUTPUT_TYPES and self.output_size + size > self._max_output:
                self._left_out_events += 1
                self._left_out_bytes += size
                continue
            self.output_size += size
            kept.append(payload)
        if kept:
            self.log.append(merge_streams(kept))

    def leave_out(self, size: int) -> None:
        """An output that did not cross the link because it was too large."""
        self._left_out_events += 1
        self._left_out_bytes += size

    def finish(self, status: EndStatus, cause: Cause | None, kernel_state: str, variables: str) -> None:
        """The end, told once; later calls change nothing."""
        if self.ended:
            return
        if self._left_out_events:
            members = {"bytes": self._left_out_bytes, "events": self._left_out_events, "limit": self._max_output}
            self.log.append([Payload("truncated", members)])
        self.status = status
        self.input_request = None
        begun = self._started_at if self._started_at is not None else self._queued_at
        self.end = {
            "status": status,
            "cause": cause,
            "execution_count": self.execution_count,
            "kernel_state": kernel_state,
            "variables": variables,
            "duration": round(time.monotonic() - begun, 6) if self._started_at is not None else 0.0,
        }
        self.log.append([Payload("ended", self.end)])
        self.log.close()
        self.done.set()

    def result(self) -> dict[str, Any]:
        """The whole as one document: `Result` of docs/native-api.md."""
        collector = OutputCollector()
        for event in self.log.since(0):
            collector.add(event)
        return {
            "execution_id": self.id,
            "kernel_id": self.kernel_id,
            "status": self.status or ("running" if self.running else "queued"),
            "cause": self.end.get("cause"),
            "execution_count": self.execution_count,
            "outputs": collector.finish(),
            "truncated": self._truncated(),
            "kernel_state": self.end.get("kernel_state"),
            "variables": self.end.get("variables"),
            "duration": self.end.get("duration"),
        }

    def _truncated(self) -> dict[str, int] | None:
        if not self._left_out_events:
            return None
        return {"bytes": self._left_out_bytes, "events": self._left_out_events, "limit": self._max_output}
