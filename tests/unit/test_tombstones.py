"""What is remembered of ended kernels: told to who asks, bounded by number and age."""

import time

import orjson
import pytest

from gateway.errors import KernelGone
from gateway.kernels.tombstones import Tombstones
from gateway.store.base import Tombstone


def stone(kernel_id: str, ended_at: float | None = None) -> Tombstone:
    document = {
        "label": "a label",
        "cause": {"code": "idle_timeout", "message": "The kernel was culled."},
        "ended_at": "2026-01-01T00:00:00.000000Z",
        "last_execution": {"execution_id": "e"},
        "usage": {"cpu_seconds": 1.0},
    }
    return Tombstone(kernel_id, time.time() if ended_at is None else ended_at, orjson.dumps(document))


def test_who_asks_is_told_why_when_and_what_was_last() -> None:
    stones = Tombstones(10, 60)
    stones.add(stone("k"))
    with pytest.raises(KernelGone) as caught:
        stones.check("k")
    assert caught.value.members["label"] == "a label"
    assert "culled" in caught.value.detail
    assert "2026-01-01" in caught.value.detail
    assert caught.value.members["cause"]["code"] == "idle_timeout"
    assert caught.value.members["last_execution"] == {"execution_id": "e"}
    assert caught.value.members["usage"] == {"cpu_seconds": 1.0}


def test_an_unknown_kernel_is_no_business_of_theirs() -> None:
    Tombstones(10, 60).check("never was")


@pytest.mark.parametrize(("count", "first_is_known"), [(2, True), (3, True), (4, False)])
def test_the_oldest_goes_first_beyond_the_maximum(count: int, first_is_known: bool) -> None:
    stones = Tombstones(3, 60)
    for number in range(count):
        stones.add(stone(f"k{number}"))
    if first_is_known:
        with pytest.raises(KernelGone):
            stones.check("k0")
    else:
        stones.check("k0")
    with pytest.raises(KernelGone):
        stones.check(f"k{count - 1}")


def test_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("gateway.kernels.tombstones.time.time", lambda: now)
    stones = Tombstones(10, 60)
    stones.add(stone("k", now))
    now = 1060.0
    assert "k" in stones
    with pytest.raises(KernelGone):
        stones.check("k")
    now = 1060.1
    assert "k" not in stones
    stones.check("k")


def test_those_of_an_earlier_gateway_keep_their_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of the gateway does not make them younger."""
    now = 2000.0
    monkeypatch.setattr("gateway.kernels.tombstones.time.time", lambda: now)
    stones = Tombstones(10, 60)
    for kernel_id, ended_at in (("old", 1930.0), ("young", 1950.0)):
        stones.add(stone(kernel_id, ended_at))
    assert "old" not in stones
    assert "young" in stones
    now = 2010.1
    assert "young" not in stones
