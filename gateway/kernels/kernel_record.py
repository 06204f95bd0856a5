"""What is stored of a kernel besides its executions: enough for the next gateway to take it up.

The document holds the link's secret and the signing key, so whoever may read the store may speak as the gateway: the store's file is
for the gateway's user alone.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import orjson

from gateway.kernels import records
from gateway.kernels.execution import Cause
from gateway.kernels.journal import Journal
from gateway.kernels.log import timestamp
from gateway.kernels.state import KernelState
from gateway.kernels.wishes import KernelRequest
from gateway.sandboxes.base import Limits
from gateway.sandboxes.link import Link, LinkNews
from gateway.settings import KernelSpecSettings
from gateway.store.base import (
    AddFrame,
    Change,
    DropEvents,
    DropFrames,
    EndKernel,
    KernelRow,
    PutKernel,
    PutPosition,
    Tombstone,
)

if TYPE_CHECKING:
    from gateway.kernels.archive import StoredKernel
    from gateway.kernels.kernel import Kernel

_FIGURES_AGE = 1.0
"""Seconds that stored figures (usage, counts, last activity) may be behind."""
_FRAMES_AT_ONCE, _FRAME_BYTES = 64, 1024 * 1024
"""Frames that the supervisor has, and their bytes, that may still be stored."""

Phase = Literal["ready", "launching", "dead", "stopping"]
_PHASES: dict[KernelState, Phase] = {
    KernelState.IDLE: "ready",
    KernelState.BUSY: "ready",
    KernelState.INTERRUPTING: "ready",
    KernelState.RESTARTING: "launching",
    KernelState.DEAD: "dead",
    KernelState.STOPPING: "stopping",
}


class KernelRecord:
    """The record of one kernel, from the moment it has answered for the first time until it is buried. It also keeps what goes over
    the link: frames that came count as received, and frames that are made go out, when they are stored."""

    def __init__(self, kernel: "Kernel", journal: Journal) -> None:
        self.begun = False
        """It outlives its gateway."""
        self._kernel, self._journal = kernel, journal
        self._buried = False
        self._incomplete = False
        """The kernel was restored and does not know all yet that its record holds."""
        self._wish = _wish(kernel.request)
        self._core = b""
        """The part of the stored document that must be right; the figures beside it may be a moment old."""
        self._written_at = -math.inf
        self._received = 0
        self._dropped = self._dropped_size = 0
        self._kept_from = 0

    async def begin(self) -> None:
        """From here on it outlives its gateway; raises `StoreUnavailable`."""
        kernel = self._kernel
        self.begun = True
        if kernel.own_link is not None:
            kernel.own_link.guard(self.changed)
        kernel.log.guard(self.changed)
        await self.written()

    def changed(self, within: float = 0.0) -> None:
        self._journal.changed(self, within)

    async def written(self) -> None:
        """Waits until all of it is stored; raises `StoreUnavailable`."""
        if self.begun:
            self.changed()
            await self._journal.flush(self._kernel.settings.link.command_timeout)

    def restore(self, stored: "StoredKernel") -> None:
        """Takes up what is stored; nothing is written before `resume`."""
        self.begun = self._incomplete = True
        self._received = stored.row.received
        log = self._kernel.log
        log.restore(stored.events, stored.last_event, [len(event.json) for event in stored.events])
        log.guard(self.changed, fresh=False)

    def resume(self, link: Link | None) -> None:
        """The kernel is whole again; without a link when its box is gone."""
        self._incomplete = False
        if link is not None:
            link.guard(self.changed)
        self.changed()

    def take_changes(self) -> tuple[Sequence[Change], Callable[[], None]]:
        """`Recorded`: its row, how far its link has come, its own events."""
        if self._incomplete:
            return (), lambda: None
        kernel = self._kernel
        events = kernel.log.take()
        last = events[-1].seq if events else 0
        if not self.begun or self._buried:
            return (), lambda: kernel.log.publish(last)
        link = kernel.own_link
        news = link.take_news() if link else LinkNews(0, 0, [], 0, 0)
        changes: list[Change] = [AddFrame(kernel.id, seq, frame) for seq, frame in news.made]
        changes += self._position(news)
        changes += self._forget_frames(news)
        changes += records.to_changes(kernel.id, events)
        if kernel.log.first_kept > self._kept_from:
            self._kept_from = kernel.log.first_kept
            changes.append(DropEvents(kernel.id, self._kept_from))

        def stored() -> None:
            kernel.log.publish(last)
            if link is not None:
                link.stored(news)

        return changes, stored

    def _position(self, news: LinkNews) -> list[Change]:
        """How far the link has come. With the whole row when something in it has changed that must be right, and now and then for
        its figures: a commit costs by what it changes, and there are two to a cell. What was sent, the frames tell."""
        kernel, now = self._kernel, time.monotonic()
        core = _core(kernel)
        if core != self._core or now - self._written_at > _FIGURES_AGE:
            self._core, self._written_at = core, now
            # One JSON object of three.
            document = b",".join((self._wish[:-1], core[1:-1], _figures(kernel)[1:]))
            row = KernelRow(kernel.id, kernel.created, document, kernel.key, kernel.fingerprint, news.received, news.sent)
            self._received = news.received
            return [PutKernel(row)]
        if news.received == self._received:
            return []
        self._received = news.received
        return [PutPosition(kernel.id, news.received, news.sent)]

    def _forget_frames(self, news: LinkNews) -> list[Change]:
        """Many at once, and never the last: its number is what the next gateway goes on from."""
        count, size = news.acknowledged - self._dropped, news.acknowledged_size - self._dropped_size
        if count < _FRAMES_AT_ONCE and size < _FRAME_BYTES:
            return []
        self._dropped, self._dropped_size = news.acknowledged, news.acknowledged_size
        return [DropFrames(self._kernel.id, min(news.acknowledged, news.sent - 1))]

    def part(self) -> None:
        """The kernel is let go: what is new up to here is written, and nothing that comes later."""
        self._written_at = -math.inf
        changes, _ = self.take_changes()
        self._journal.write(*changes)
        self._incomplete = True

    def bury(self, cause: Cause) -> Tombstone:
        """The record becomes a tombstone."""
        kernel = self._kernel
        stone = Tombstone(kernel.id, time.time(), stone_of(kernel, kernel.cause or cause, timestamp()))
        if self.begun and not self._buried:
            self._journal.write(EndKernel(stone))
        self._buried = True
        return stone


def phase_of(state: KernelState, before: Phase) -> Phase:
    """What a gateway that begins here has to do; a kernel that is being recovered stays what it was."""
    return _PHASES.get(state, before)


def _wish(request: KernelRequest) -> bytes:
    """The part of the document that never changes."""
    document = {
        "spec_name": request.spec_name,
        "spec": request.spec.model_dump(mode="json"),
        "limits": asdict(request.limits),
        "env": request.env,
        "label": request.label,
        "idle_timeout": request.idle_timeout,
        "on_death": request.on_death,
    }
    return orjson.dumps(document)


def _core(kernel: "Kernel") -> bytes:
    """The part that a gateway needs to go on."""
    link = kernel.own_link
    document = {
        "lifetime": kernel.lifetime,
        "phase": kernel.phase,
        "gone": kernel.gone,
        "cause": kernel.cause,
        "secret": link.secret if link else "",
        "process": kernel.process,
    }
    return orjson.dumps(document)


def _figures(kernel: "Kernel") -> bytes:
    """The part that a gateway tells of it."""
    document = {
        "last_activity": kernel.last_activity,
        "usage": kernel.usage(),
        "execution_count": kernel.cells.execution_count,
        "asked_count": kernel.cells.asked_count,
        "as_of": time.time(),
    }
    return orjson.dumps(document)


def check(document: dict[str, Any]) -> None:
    """Raises LookupError or TypeError unless it has what is read of it only after the kernel is restored."""
    kinds = {"secret": str, "gone": bool, "process": dict | None}
    if wrong := [name for name, kind in kinds.items() if not isinstance(document[name], kind)]:
        raise TypeError(f"not as a kernel's record has it: {', '.join(wrong)}")


def request_of(document: dict[str, Any]) -> KernelRequest:
    return KernelRequest(
        spec_name=document["spec_name"],
        # What another version of the gateway has written besides is none of ours.
        spec=KernelSpecSettings.model_validate(document["spec"], extra="ignore"),
        limits=Limits(**document["limits"]),
        env=document["env"],
        label=document["label"],
        idle_timeout=document["idle_timeout"],
        lifetime=document["lifetime"],
        on_death=document["on_death"],
    )


def stone_of(kernel: "Kernel", cause: Cause, ended_at: str) -> bytes:
    """What its tombstone says."""
    document = {
        "label": kernel.request.label,
        "cause": cause,
        "ended_at": ended_at,
        "last_execution": kernel.cells.last,
        "usage": kernel.usage(),
        "key": kernel.key,
        "fingerprint": kernel.fingerprint,
    }
    return orjson.dumps(document)


def stone_of_unknown(row: KernelRow, cause: Cause) -> Tombstone:
    """Of a kernel whose record can't be read."""
    document = {
        "label": "",
        "cause": cause,
        "ended_at": timestamp(),
        "last_execution": None,
        "usage": {},
        "key": row.key,
        "fingerprint": row.fingerprint,
    }
    return Tombstone(row.id, time.time(), orjson.dumps(document))


def key_of(stone: Tombstone) -> tuple[str | None, str | None]:
    """Idempotency key and fingerprint of the create whose kernel has ended."""
    document = orjson.loads(stone.document)
    return document["key"], document["fingerprint"]
