"""What a cell is warned of, with the cgroup's numbers as a test says them."""

from typing import Any

import pytest

from gateway.supervisor import cgroup
from gateway.supervisor.watch import Watch


class Box:
    """A cgroup, and the gateway that is told of it."""

    def __init__(self) -> None:
        self.used: int | None = 0
        self.limit: int | None = 1000
        self.kills: int | None = 0
        self.refused: int | None = 0
        self.told: list[dict[str, Any]] = []
        self.acknowledged = 0
        self.connected = True
        """Whatever is told is acknowledged before the next sample."""

    def tell(self, event: dict[str, Any]) -> int:
        self.told.append(event)
        return len(self.told)

    def is_safe(self, seq: int) -> bool:
        return self.connected or seq <= self.acknowledged

    def news(self) -> list[dict[str, Any]]:
        found, self.told = self.told, []
        return found


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Box:
    box = Box()
    monkeypatch.setattr(cgroup, "memory", lambda: {"memory_limit": box.limit, "oom_kills": box.kills})
    monkeypatch.setattr(cgroup, "memory_in_use", lambda: box.used)
    monkeypatch.setattr(cgroup, "refused_processes", lambda: box.refused)
    monkeypatch.setattr(cgroup, "cpu_seconds", lambda: 1.5)
    return box


@pytest.fixture
def watch(box: Box) -> Watch:
    return Watch(box.tell, box.is_safe)


def high(level: float, used: int) -> dict[str, Any]:
    return {"event": "memory_high", "level": level, "used": used, "limit": 1000}


def test_each_level_is_told_once_until_use_has_fallen(box: Box, watch: Watch) -> None:
    for used, expected in (
        (799, []),
        (800, [high(0.8, 800)]),
        (949, []),
        (950, [high(0.95, 950)]),
        (849, []),
        (951, [high(0.95, 951)]),
    ):
        box.used = used
        watch.sample()
        assert box.news() == expected


def test_a_killed_child_is_told_one_sample_late(box: Box, watch: Watch) -> None:
    box.kills = 2
    watch.sample()
    assert box.news() == []
    watch.sample()
    assert box.news() == [{"event": "out_of_memory_kill", "kills": 2}]
    watch.sample()
    assert box.news() == []


def test_refused_processes_are_told(box: Box, watch: Watch) -> None:
    box.refused = 3
    watch.sample()
    assert box.news() == [{"event": "process_limit", "refused": 3}]


def test_an_unknown_number_is_no_event(box: Box, watch: Watch) -> None:
    box.used = box.limit = box.kills = box.refused = None
    watch.sample()
    box.kills = box.refused = 5
    watch.sample()
    watch.sample()
    assert box.news() == []
    assert watch.usage() == {"cpu_seconds": 1.5, "memory_used": 0, "memory_peak": 0}


def test_the_peak_begins_anew_with_each_figure(box: Box, watch: Watch) -> None:
    for used in (500, 700, 100):
        box.used = used
        watch.sample()
    assert watch.usage() == {"cpu_seconds": 1.5, "memory_used": 100, "memory_peak": 700}
    assert watch.usage()["memory_peak"] == 100


def test_without_a_gateway_one_event_of_each_kind_goes_out_and_the_rest_become_one(box: Box, watch: Watch) -> None:
    """A cell that runs for days: what is kept for the gateway must not grow with it."""
    box.connected = False
    for _ in range(5000):
        box.kills, box.refused = (box.kills or 0) + 1, (box.refused or 0) + 2
        box.used = 990 if box.used == 100 else 100
        watch.sample()
    assert len(box.told) == 3
    assert watch.pending
    first = box.news()
    box.connected = True
    box.used = 850
    watch.sample()
    second = box.news()
    assert not watch.pending
    watch.sample()
    third = box.news()
    assert {event["event"] for event in first} == {event["event"] for event in second}
    total = [event for event in first + second + third if event["event"] == "process_limit"]
    assert sum(event["refused"] for event in total) == 10_000
    kills = [event for event in first + second + third if event["event"] == "out_of_memory_kill"]
    assert sum(event["kills"] for event in kills) == 5000
    # Of several levels the highest is told.
    assert high(0.95, 990) in second


def test_what_waits_is_told_at_the_end_of_the_kernel(box: Box, watch: Watch) -> None:
    box.connected = False
    for refused in (1, 5, 6):
        box.refused = refused
        watch.sample()
    watch.flush()
    assert [event["refused"] for event in box.news()] == [1, 5]
    assert not watch.pending
    watch.flush()
    assert box.news() == []
