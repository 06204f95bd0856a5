"""What a client asks for against what the operator allows: each limit below, at and above."""

from typing import Any

import pytest

from gateway.errors import LimitExceeded, SpecNotFound
from gateway.kernels.wishes import MINIMUM_MEMORY, CreateRequest, grant, lifetime_left
from gateway.settings import MIB, KernelSpecSettings, Settings, load

SPEC = {
    "maximum": {"memory": "2g", "cpus": 2, "pids": 256},
    "lifetime_maximum": 1000,
    "lifetime": 100,
    "idle_timeout_maximum": 60,
}


@pytest.fixture
def settings() -> Settings:
    return load(kernels={"specs": {"python3": SPEC, "other": {"idle_timeout": 7}}}, culling={"cull_idle_timeout": 30})


def test_nothing_asked_is_the_spec(settings: Settings) -> None:
    granted = grant(CreateRequest(), settings)
    assert granted.spec_name == "python3"
    assert (granted.limits.memory, granted.limits.cpus, granted.limits.pids) == (1024 * MIB, 1.0, 128)
    assert (granted.lifetime, granted.idle_timeout, granted.on_death) == (100, 30, "restart")


def test_a_spec_has_its_own_idle_timeout(settings: Settings) -> None:
    assert grant(CreateRequest(spec="other"), settings).idle_timeout == 7


def test_an_unknown_spec_names_those_that_are_there(settings: Settings) -> None:
    with pytest.raises(SpecNotFound, match="python3, other") as caught:
        grant(CreateRequest(spec="julia"), settings)
    assert caught.value.members["specs"] == ["python3", "other"]


@pytest.mark.parametrize(
    ("field", "low", "high", "below", "above"),
    [
        ("memory", MINIMUM_MEMORY, 2048 * MIB, MINIMUM_MEMORY - 1, 2048 * MIB + 1),
        ("cpus", 0.1, 2.0, 0.09, 2.01),
        ("pids", 32, 256, 31, 257),
        ("lifetime", 1, 1000, 0.9, 1000.1),
        ("idle_timeout", 1, 60, 0.9, 60.1),
    ],
)
def test_limits_at_and_beyond(settings: Settings, field: str, low: float, high: float, below: float, above: float) -> None:
    for value in (low, high):
        granted = grant(CreateRequest(**{field: value}), settings)  # type: ignore[arg-type]
        found: Any = granted.limits if field in ("memory", "cpus", "pids") else granted
        assert getattr(found, field) == value
    for value in (below, above, float("nan")):
        with pytest.raises(LimitExceeded) as caught:
            grant(CreateRequest(**{field: value}), settings)  # type: ignore[arg-type]
        assert caught.value.members["limit"] == field


def test_without_a_maximum_a_kernel_may_stay_for_ever() -> None:
    settings = load(kernels={"specs": {"python3": {"idle_timeout_maximum": 0}}})
    assert grant(CreateRequest(idle_timeout=0), settings).idle_timeout == 0


@pytest.mark.parametrize(("wanted", "granted"), [(None, None), (1, 1), (600, 600)])
def test_a_keep_alive_up_to_the_maximum(wanted: float | None, granted: float | None) -> None:
    assert lifetime_left(wanted, 400, KernelSpecSettings(lifetime=100, lifetime_maximum=1000)) == granted


def test_a_keep_alive_past_the_maximum() -> None:
    with pytest.raises(LimitExceeded):
        lifetime_left(600.1, 400, KernelSpecSettings(lifetime=100, lifetime_maximum=1000))
