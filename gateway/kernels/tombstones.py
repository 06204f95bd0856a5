"""What is remembered of kernels that have ended, so that who asks for one learns why it is gone and not just that it is."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from gateway.errors import KernelGone
from gateway.kernels.execution import Cause


@dataclass(frozen=True, slots=True)
class Tombstone:
    kernel_id: str
    label: str
    cause: Cause
    ended_at: str
    last_execution: dict[str, Any] | None
    """`execution_id`, `status` and `ended` (its last event) of the last cell that was run."""
    usage: dict[str, Any]


class Tombstones:
    """Bounded by number and by age (seconds)."""

    def __init__(self, maximum: int, keep: float) -> None:
        self._maximum, self._keep = maximum, keep
        self._stones: OrderedDict[str, tuple[float, Tombstone]] = OrderedDict()

    def add(self, stone: Tombstone) -> None:
        self._stones[stone.kernel_id] = (time.monotonic(), stone)
        self._expire()

    def check(self, kernel_id: str) -> None:
        """Raises `KernelGone` with what is remembered of this kernel; returns when nothing is."""
        self._expire()
        found = self._stones.get(kernel_id)
        if found is None:
            return
        stone = found[1]
        raise KernelGone(
            f"{stone.cause['message']} It ended at {stone.ended_at}. Create a new one with POST /v1/kernels.",
            kernel_id=kernel_id,
            label=stone.label,
            cause=stone.cause,
            ended_at=stone.ended_at,
            last_execution=stone.last_execution,
            usage=stone.usage,
        )

    def _expire(self) -> None:
        oldest = time.monotonic() - self._keep
        while self._stones and (len(self._stones) > self._maximum or next(iter(self._stones.values()))[0] < oldest):
            self._stones.popitem(last=False)
