"""The fault matrix: each fault done for real to a kernel of its own, beside a canary that must notice nothing.

A case does the harm and hands back what a client saw; it asserts the truth of it itself. The canary is another kernel of the same
gateway that runs `1+1` every half second; its misses fail the case, its times are only written down.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import Event, Gateway, Kernel

INTERVAL = 0.5


@dataclass(frozen=True)
class Outcome:
    """What a client saw: the events of the cell (or a word for what was answered) and what survived."""

    events: str
    variables: str
    files: str


@dataclass(frozen=True)
class Fault:
    id: str
    title: str
    do: Callable[[Gateway], Outcome]


@dataclass
class Row:
    fault: Fault
    outcome: Outcome
    canary_cells: int
    canary_p99: float


@dataclass
class Canary:
    """Seconds that each of its cells took, and what went wrong."""

    kernel: Kernel
    times: list[float] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def singing(self) -> Iterator["Canary"]:
        stop = threading.Event()
        thread = threading.Thread(target=self._sing, args=(stop,), name="canary")
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()

    def _sing(self, stop: threading.Event) -> None:
        while True:
            begun = time.perf_counter()
            try:
                if self.kernel.value("1+1") != "2":
                    self.misses.append("wrong answer")
            except (AssertionError, OSError) as error:
                self.misses.append(str(error)[:200])
            self.times.append(time.perf_counter() - begun)
            if stop.wait(INTERVAL):
                return

    @property
    def p99(self) -> float:
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def words(events: list[Event]) -> str:
    """Events of a cell in short, repeated ones once: `started, interrupt(interrupt), ended(timeout: cell_timeout)`."""
    said: list[str] = []
    for event in events:
        word = _word(event)
        if word and (not said or said[-1] != word):
            said.append(word)
    return shorten(", ".join(said))


def shorten(said: str) -> str:
    """Two words that go on taking turns are said twice, and how often they did: `a, b, a, b, … (40 times)`."""
    turns = re.compile(r"(\w+, \w+)((?:, \1){2,})")
    return turns.sub(lambda found: f"{found[1]}, {found[1]}, … ({found[0].count(found[1])} times)", said)


def _word(event: dict[str, Any]) -> str:
    kind = event["type"]
    if kind in ("queued", "accepted"):
        return ""
    if kind == "interrupt":
        return f"interrupt({event['step']})"
    if kind == "warning":
        return f"warning({event['code']})"
    if kind == "error":
        return f"error({event['ename']})"
    if kind == "ended":
        cause = event["cause"]
        return f"ended({event['status']}{': ' + cause['code'] if cause else ''})"
    return str(kind)


_HEAD = """# Fault matrix

Written by `scripts/faults`, which runs `tests/faults` against Docker. Each fault is done for real to one kernel of a gateway while a canary
kernel of the same gateway runs `1+1` every 0.5 s. A case fails when the end is not told as it was, when a pending cell is left without
its `ended`, or when the canary misses a beat.

| fault | what is done | what the client sees | variables | files | canary p99 (ms) | misses |
| --- | --- | --- | --- | --- | --- | --- |
"""


_TAIL = """
## The gateway, its store, its engine

Not in the table, since they end or restart what the canary lives on; each is a test of `tests/faults`.

| fault | what is done | what holds | test |
| --- | --- | --- | --- |
| F04 | SIGKILL in the middle of a cell, an `input()`, a flood; box or process ends while no gateway is there | output once and in order, \
variables kept; else a truthful end | `test_gateway_death.py`, `scripts/chaos` |
| F05 | SIGKILL at each step of a create, of a delete | nothing is left over; the key is free, or gives the one kernel \
| `test_gateway_death.py` |
| F06 | a second gateway on the same state directory | refused, or waits; a gateway that lost its right stops by itself | `test_second_gateway.py` |
| F07, F08 | dockerd stopped, killed, hung, with live-restore on and off | cells go on where the engine lets them live; creates 503; \
ends are truthful | `test_engine_faults.py`, `scripts/engine-restarts` |
| F11 | the store's disk full, read-only, damaged | new work 503, kernels live, nothing acknowledged is lost | `test_store_faults.py` |
| F13, F14 | half-open connections; readers that come back | resumed by cursor, each event once | `test_detach.py`, `tests/e2e/test_executions.py` |
| F15 | the client leaves | the cell goes on, or is cancelled where it asked for that | `tests/api/test_attendance.py` |
| F20 | SIGTERM with running cells | drain, then detach or stop | `test_detach.py`, `tests/e2e/test_drain.py` |
| F26 | the next gateway has other settings, or speaks another version | kernels are taken up; versions are agreed on \
| `test_gateway_death.py`, `tests/unit/test_link.py` |
"""


def page(rows: list[Row]) -> str:
    """docs/fault-matrix.md"""
    lines = [
        f"| {row.fault.id} | {row.fault.title} | {row.outcome.events} | {row.outcome.variables} | {row.outcome.files} "
        f"| {row.canary_p99 * 1000:.0f} ({row.canary_cells} cells) | 0 |"
        for row in sorted(rows, key=lambda row: row.fault.id)
    ]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def write(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(rows))
