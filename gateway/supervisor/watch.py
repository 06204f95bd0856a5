"""What a cell should be told before it is too late, and what happened to its children: changes in the cgroup, as events.

Sampled only while a request is in the kernel, since an idle kernel changes nothing. Each level of memory is told once and again
only after use has fallen well below it. An event waits until the gateway has the one of its kind before, and meanwhile becomes one
with those that follow: so a cell that runs for days without a gateway fills no memory with them.
"""

from collections.abc import Callable
from typing import Any

from . import cgroup

INTERVAL = 0.25
_LEVELS = (0.95, 0.80)
_RELEASE = 0.10
"""A level may be told again once use has fallen so far below it (as a part of the limit)."""


class Watch:
    """`tell` gets an event for the gateway (`memory_high`, `out_of_memory_kill`, `process_limit`) and returns its number;
    `is_safe` says of a number whether the gateway has it."""

    def __init__(self, tell: Callable[[dict[str, Any]], int], is_safe: Callable[[int], bool]) -> None:
        self._tell, self._is_safe = tell, is_safe
        self._waiting: dict[str, dict[str, Any]] = {}
        self._last: dict[str, int] = {}
        self._told = 0.0
        self._kills = cgroup.memory()["oom_kills"]
        self._refused = cgroup.refused_processes()
        self._suspected = 0
        self._peak = 0

    @property
    def pending(self) -> bool:
        """An event waits to be told."""
        return bool(self._waiting)

    def usage(self) -> dict[str, Any]:
        """CPU seconds of the box so far, bytes in use now, and the most seen since the last call."""
        used = cgroup.memory_in_use() or 0
        peak, self._peak = max(self._peak, used), 0
        return {"cpu_seconds": cgroup.cpu_seconds(), "memory_used": used, "memory_peak": peak}

    def sample(self) -> None:
        self._memory()
        self._children()
        self._processes()
        for kind in list(self._waiting):
            if self._is_safe(self._last.get(kind, 0)):
                self._tell_of(kind)

    def flush(self) -> None:
        """Tells what waits: the kernel has come to its end."""
        for kind in list(self._waiting):
            self._tell_of(kind)

    def _tell_of(self, kind: str) -> None:
        self._last[kind] = self._tell({"event": kind, **self._waiting.pop(kind)})

    def _add(self, kind: str, count: str, number: int) -> None:
        """So many more of what is counted."""
        self._waiting[kind] = {count: self._waiting.get(kind, {}).get(count, 0) + number}

    def _memory(self) -> None:
        used, limit = cgroup.memory_in_use(), cgroup.memory()["memory_limit"]
        if used is None or not limit:
            return
        self._peak = max(self._peak, used)
        part = used / limit
        if part < self._told - _RELEASE:
            self._told = max((level for level in _LEVELS if level <= part), default=0.0)
        level = next((level for level in _LEVELS if part >= level), 0.0)
        if level > self._told:
            self._told = level
            if level >= self._waiting.get("memory_high", {}).get("level", 0.0):
                self._waiting["memory_high"] = {"level": level, "used": used, "limit": limit}

    def _children(self) -> None:
        """A process that a cell has started was killed. Told one sample late: were it the kernel, it would be reaped by then."""
        if self._suspected:
            self._add("out_of_memory_kill", "kills", self._suspected)
            self._suspected = 0
        kills = cgroup.memory()["oom_kills"]
        if kills is not None and self._kills is not None and kills > self._kills:
            self._suspected = kills - self._kills
        self._kills = kills

    def _processes(self) -> None:
        refused = cgroup.refused_processes()
        if refused is not None and self._refused is not None and refused > self._refused:
            self._add("process_limit", "refused", refused - self._refused)
        self._refused = refused
