"""Who is culled or frozen, and why: a table over plain data, each limit below, at and above its value."""

from dataclasses import replace

import pytest

from gateway.kernels.culler import Candidate, select
from gateway.settings import CullingSettings

NOW = 10_000.0
IDLE = Candidate(
    id="k",
    born=NOW - 100,
    idle_since=NOW - 50,
    busy_since=None,
    connections=0,
    frozen=False,
    freezable=True,
    idle_timeout=0,
    lifetime=0,
    busy_timeout=0,
)
BUSY = replace(IDLE, busy_since=NOW - 40, freezable=False)
OFF = CullingSettings(cull_idle_timeout=0)


def codes(kernel: Candidate, settings: CullingSettings = OFF) -> list[str]:
    return [verdict.cause["code"] if verdict.cause else verdict.action for verdict in select([kernel], NOW, settings)]


@pytest.mark.parametrize(
    ("kernel", "settings", "expected"),
    [
        (IDLE, OFF, []),
        (replace(IDLE, lifetime=100.1), OFF, []),
        (replace(IDLE, lifetime=100), OFF, ["lifetime"]),
        (replace(IDLE, lifetime=99.9), OFF, ["lifetime"]),
        (replace(IDLE, idle_timeout=50.1), OFF, []),
        (replace(IDLE, idle_timeout=50), OFF, ["idle_timeout"]),
        (replace(IDLE, idle_timeout=49.9), OFF, ["idle_timeout"]),
        (replace(IDLE, idle_timeout=10, connections=1), CullingSettings(cull_connected=True), ["idle_timeout"]),
        (replace(IDLE, idle_timeout=10, connections=1), CullingSettings(cull_connected=False), []),
        (replace(IDLE, idle_timeout=10, connections=0), CullingSettings(cull_connected=False), ["idle_timeout"]),
        (replace(BUSY, idle_timeout=10), OFF, []),
        (replace(BUSY, idle_timeout=10), CullingSettings(cull_busy=True), ["idle_timeout"]),
        (replace(BUSY, busy_timeout=40.1), OFF, []),
        (replace(BUSY, busy_timeout=40), OFF, ["busy_timeout"]),
        (replace(BUSY, busy_timeout=39.9), OFF, ["busy_timeout"]),
        (replace(BUSY, lifetime=100), OFF, ["lifetime"]),
        (replace(IDLE, busy_timeout=1), OFF, []),
        (IDLE, CullingSettings(freeze_after=50.1), []),
        (IDLE, CullingSettings(freeze_after=50), ["freeze"]),
        (replace(IDLE, frozen=True), CullingSettings(freeze_after=50), []),
        (replace(IDLE, freezable=False), CullingSettings(freeze_after=50), []),
        (BUSY, CullingSettings(freeze_after=1), []),
        (replace(IDLE, idle_timeout=50), CullingSettings(freeze_after=10), ["idle_timeout"]),
        (replace(IDLE, idle_timeout=50, frozen=True), CullingSettings(freeze_after=10), ["idle_timeout"]),
        (replace(IDLE, lifetime=100, idle_timeout=50), OFF, ["lifetime"]),
    ],
)
def test_select(kernel: Candidate, settings: CullingSettings, expected: list[str]) -> None:
    assert codes(kernel, settings) == expected


def test_each_kernel_is_judged_by_itself() -> None:
    kernels = [replace(IDLE, id="a", idle_timeout=1), replace(IDLE, id="b"), replace(IDLE, id="c", lifetime=1)]
    assert [(verdict.id, verdict.action) for verdict in select(kernels, NOW, OFF)] == [("a", "cull"), ("c", "cull")]
