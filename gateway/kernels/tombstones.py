"""What is remembered of kernels that have ended, so that who asks for one learns why it is gone and not just that it is."""

import time
from collections import OrderedDict
from typing import Any

import orjson

from gateway.errors import KernelGone
from gateway.store.base import Tombstone


class Tombstones:
    """Bounded by number and by age (seconds). The store keeps the same, for the next gateway."""

    def __init__(self, maximum: int, keep: float) -> None:
        self._maximum, self._keep = maximum, keep
        self._stones: OrderedDict[str, Tombstone] = OrderedDict()

    def add(self, stone: Tombstone) -> None:
        self._stones[stone.kernel_id] = stone
        self._expire()

    def __contains__(self, kernel_id: str) -> bool:
        self._expire()
        return kernel_id in self._stones

    def check(self, kernel_id: str) -> None:
        """Raises `KernelGone` with what is remembered of this kernel; returns when nothing is."""
        if kernel_id not in self:
            return
        stone: dict[str, Any] = orjson.loads(self._stones[kernel_id].document)
        raise KernelGone(
            f"{stone['cause']['message']} It ended at {stone['ended_at']}. Create a new one with POST /v1/kernels.",
            kernel_id=kernel_id,
            label=stone["label"],
            cause=stone["cause"],
            ended_at=stone["ended_at"],
            last_execution=stone["last_execution"],
            usage=stone["usage"],
        )

    def _expire(self) -> None:
        oldest = time.time() - self._keep
        while self._stones and (len(self._stones) > self._maximum or next(iter(self._stones.values())).ended_at < oldest):
            self._stones.popitem(last=False)
