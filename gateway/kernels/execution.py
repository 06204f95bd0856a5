"""One cell and all that it produces: a log of events that ends with exactly one `ended`.

An Execution does no I/O. The kernel feeds it and ends it; faces read its log. What it keeps is bounded by an `OutputBudget`. With a
journal it is recorded: what it was asked, how it stands, its events, and the outputs that wait for its end.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any
from uuid import uuid4

import anyio
import orjson

from gateway.kernels import records
from gateway.kernels.budget import OutputBudget
from gateway.kernels.journal import Journal
from gateway.kernels.log import EventLog, rfc3339
from gateway.protocol.events import EndStatus, Event, Payload, coalesce
from gateway.protocol.outputs import OutputCollector
from gateway.store.base import Change, ExecutionRow, PutExecution, UpdateExecution

Cause = dict[str, Any]
SOON = 0.005
"""Seconds within which outputs and a start are stored and told; the end of a cell, questions and warnings are at once. In a short cell
all of it goes into one commit, which takes CPU that the cell is using."""

_MOST_REPORTS = 1000


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
    """`queued`, then in the kernel, then ended. `done` is set once its last event can be read."""

    def __init__(
        self,
        kernel_id: str,
        request: CellRequest,
        budget: OutputBudget,
        *,
        number: int = 0,
        key: str | None = None,
        fingerprint: str | None = None,
        journal: Journal | None = None,
        execution_id: str | None = None,
    ) -> None:
        self.id = execution_id or str(uuid4())
        self.kernel_id = kernel_id
        self.request = request
        self.number = number
        """Order within the kernel, from 1."""
        self.key, self.fingerprint = key, fingerprint
        """Idempotency key of the request, and what tells its body from others."""
        self.live = True
        self.log = EventLog(self.id, on_append=self.changed if journal else None)
        self.created_at = time.time()
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
        self.ladder: tuple[Any, Any] | None = None
        """Why and how far a client has asked it to be interrupted, until that is done."""
        self.last_step: str | None = None
        self.idle_seen = False
        self.reply: dict[str, Any] | None = None
        """Of the execute_reply: `status`, `execution_count`, `ename`, `evalue`."""
        self.budget = budget
        self.usage: dict[str, Any] = {}
        """What it has used, as far as the sandbox tells: `cpu_seconds`, `memory_peak`."""
        self.gap: dict[str, int] | None = None
        """Sums over its `gap` events: `events`, `bytes`."""
        self._journal = journal
        self._recorded = False
        self._announced = False
        self._reports = 0
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._begun = 0.0
        """On the monotonic clock, for durations."""

    @property
    def done(self) -> anyio.Event:
        return self.log.finished

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def running(self) -> bool:
        return self._started_at is not None and not self.ended

    @property
    def elapsed(self) -> float:
        """Seconds since it was handed to the kernel."""
        return time.monotonic() - self._begun if self._started_at is not None else 0.0

    def sent(self, msg_id: str) -> None:
        """The request is on its way to the kernel."""
        self.msg_id = msg_id
        self._started_at, self._begun = time.time(), time.monotonic()
        self.changed()

    def replied(self, content: dict[str, Any]) -> None:
        """The execute_reply has come; of it, what is needed is kept."""
        count = content.get("execution_count")
        self.reply = {
            "status": str(content.get("status"))[:20],
            "execution_count": count if isinstance(count, int) else None,
            "ename": str(content.get("ename", ""))[:1000],
            "evalue": str(content.get("evalue", ""))[:1000],
        }
        self.changed(SOON)

    def announce_start(self, execution_count: int | None) -> None:
        """The kernel has taken the cell up; told once."""
        if self.ended:
            return
        if execution_count is not None:
            self.execution_count = execution_count
            self.changed(SOON)
        if not self._announced:
            self._announced = True
            self.log.append([Payload("started", {"execution_count": execution_count})], within=SOON)

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
            self.log.append(coalesce(kept), within=SOON)
        if self.budget.exceeded and not before:
            text = "The output has passed half of its limit. What follows is told when the cell ends: the last part of it, and how much is missing."
            self.log.append([Payload("warning", {"code": "output_limit", "message": text, "limit": self.budget.limit})])
        self.changed(SOON)

    def leave_out(self, size: int) -> None:
        """An output of so many bytes could not be told."""
        if not self.ended:
            self.budget.leave_out(size)
            self.changed()

    def report(self) -> bool:
        """Whether another report of the sandbox (a gap, a warning) may become an event. It sends them as it likes; the sums go on."""
        self._reports += 1
        return self._reports <= _MOST_REPORTS

    def leave_gap(self, events: int, size: int) -> None:
        """So many outputs were left out before they reached the gateway."""
        if self.ended:
            return
        self.gap = _more(self.gap, events, size)
        if self.report():
            self.log.append([Payload("gap", {"events": events, "bytes": size})])
        else:
            self.changed(SOON)

    def finish(self, status: EndStatus, cause: Cause | None, kernel_state: str, variables: str) -> None:
        """The end, told once; later calls change nothing."""
        if self.ended:
            return
        self.log.append(self.budget.rest())
        self.status = status
        self.input_request = None
        self._ended_at = time.time()
        duration = round(self.elapsed, 6)
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

    # reading

    async def stored(self) -> None:
        """Waits until its first event can be read: from then on it outlives the gateway."""
        await self.log.until(1)

    async def document(self) -> dict[str, Any]:
        return self.result()

    def result(self) -> dict[str, Any]:
        """The whole as far as it can be read, as one document: `Result` of docs/native-api.md."""
        return result_of(self.record(), self.log.since(0))

    # storing

    def changed(self, within: float = 0.0) -> None:
        """Something that its record holds is new; it is stored `within` so many seconds."""
        if self._journal is not None:
            self._journal.changed(self, within)

    def take_changes(self) -> tuple[Sequence[Change], Callable[[], None]]:
        """`Recorded`: its row, the events and held outputs that are new."""
        events = self.log.take()
        document = orjson.dumps({**self.record(), **self._inner_state()})
        changes: list[Change] = []
        if self._recorded:
            changes.append(UpdateExecution(self.id, document, self.msg_id, self._ended_at, self.budget.size))
        else:
            self._recorded = True
            changes.append(PutExecution(self._row(document)))
        changes += records.to_changes(self.id, events)
        changes += self.budget.take_changes(self.id)
        last = events[-1].seq if events else 0
        return changes, lambda: self.log.publish(last)

    def _row(self, document: bytes) -> ExecutionRow:
        return ExecutionRow(
            id=self.id,
            kernel_id=self.kernel_id,
            number=self.number,
            created_at=self.created_at,
            document=document,
            key=self.key,
            fingerprint=self.fingerprint,
            msg_id=self.msg_id,
            ended_at=self._ended_at,
            size=self.budget.size,
            request=orjson.dumps(self.request),
        )

    def record(self) -> dict[str, Any]:
        """What a reader is told besides the events; of its end only once that can be read."""
        ended = self.log.closed
        return {
            "execution_id": self.id,
            "kernel_id": self.kernel_id,
            "number": self.number,
            "status": self.status if ended and self.status else ("running" if self._started_at is not None else "queued"),
            "end": self.end if ended else {},
            "execution_count": self.execution_count,
            "truncated": self.budget.truncated,
            "gap": self.gap,
            "created_at": self.created_at,
            "started_at": self._started_at,
            "ended_at": self._ended_at if ended else None,
            "code": self.request.code[:200],
            "output_bytes": self.budget.size,
            "last_seq": self.log.last_seq,
        }

    def _inner_state(self) -> dict[str, Any]:
        return {
            "status": self.status or ("running" if self._started_at is not None else "queued"),
            "end": self.end,
            "ended_at": self._ended_at,
            "last_seq": self.log.last_taken,
            "inner": {
                "input_request": self.input_request,
                "timed_out": self.timed_out,
                "cancelled": self.cancelled,
                "interrupted": self.interrupted,
                "last_step": self.last_step,
                "ladder": self.ladder,
                "idle_seen": self.idle_seen,
                "reply": self.reply,
                "usage": self.usage,
                "announced": self._announced,
                "budget": self.budget.state(),
            },
        }

    @classmethod
    def restored(
        cls, row: ExecutionRow, budget: OutputBudget, events: Sequence[Event], held: Sequence[bytes], journal: Journal
    ) -> "Execution":
        """One that had not ended when its gateway did."""
        asked = orjson.loads(row.request)
        request = CellRequest(**{field.name: asked[field.name] for field in fields(CellRequest) if field.name in asked})
        self = cls(
            row.kernel_id,
            request,
            budget,
            number=row.number,
            key=row.key,
            fingerprint=row.fingerprint,
            journal=journal,
            execution_id=row.id,
        )
        document = orjson.loads(row.document)
        inner = document["inner"]
        for name in ("input_request", "timed_out", "cancelled", "interrupted", "last_step", "idle_seen", "reply", "usage"):
            setattr(self, name, inner[name])
        self.ladder = tuple(inner["ladder"]) if inner["ladder"] else None
        self.execution_count, self.gap = document["execution_count"], document["gap"]
        self.created_at, self._started_at = document["created_at"], document["started_at"]
        if self._started_at is not None:
            self._begun = time.monotonic() - max(0.0, time.time() - self._started_at)
        self.msg_id = row.msg_id
        self._announced, self._recorded = inner["announced"], True
        budget.restore(inner["budget"], held)
        self.log.restore(events, document["last_seq"])
        return self


def _more(gap: dict[str, int] | None, events: int, size: int) -> dict[str, int]:
    before = gap or {"events": 0, "bytes": 0}
    return {"events": before["events"] + events, "bytes": before["bytes"] + size}


def result_of(record: dict[str, Any], events: Sequence[Event]) -> dict[str, Any]:
    """`Result` of docs/native-api.md, from what is recorded of an execution and its events."""
    collector = OutputCollector()
    for event in events:
        collector.add(event)
    end = record["end"]
    return {
        "execution_id": record["execution_id"],
        "kernel_id": record["kernel_id"],
        "status": record["status"],
        "cause": end.get("cause"),
        "execution_count": record["execution_count"],
        "outputs": collector.finish(),
        "truncated": record["truncated"],
        "gap": record["gap"],
        "warnings": [event.members for event in events if event.type == "warning"],
        "kernel_state": end.get("kernel_state"),
        "variables": end.get("variables"),
        "duration": end.get("duration"),
        "usage": end.get("usage"),
        "last_seq": events[-1].seq if events else 0,
    }


def summary_of(record: dict[str, Any]) -> dict[str, Any]:
    """`Summary` of docs/native-api.md, from what is recorded of an execution."""
    plain = ("execution_id", "number", "status", "execution_count", "code", "last_seq", "output_bytes")
    stamps = ((name, record[name]) for name in ("created_at", "started_at", "ended_at"))
    times = {name: None if seconds is None else rfc3339(seconds) for name, seconds in stamps}
    return {**{name: record[name] for name in plain}, **times, "cause": record["end"].get("cause")}
