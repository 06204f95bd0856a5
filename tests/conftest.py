"""Fixtures for the tests that need a running gateway: one for the whole run, with kernels that go when their test ends.

Kernels are real and so is Docker; nothing here is replaced. A test that needs other settings starts a gateway of its own
with `tests.support.running`.
"""

import contextlib
from collections.abc import Callable, Iterator

import hypothesis
import pytest

from gateway.sandboxes.lockdown import LABEL
from tests.support import GATEWAY_IDS, Gateway, Kernel, engine, running

# How long an example takes says something of the machine, nothing of the code.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """At the end of the run, and after every gateway has stopped: no container of ours is left."""
    yield
    if GATEWAY_IDS:
        with contextlib.closing(engine()) as api:
            left = [
                container["Names"]
                for gateway_id in GATEWAY_IDS
                for container in api.containers(all=True, filters={"label": f"{LABEL}gateway={gateway_id}"})
            ]
        assert left == []


@pytest.fixture(scope="session")
def gateway(nothing_left_behind: None) -> Iterator[Gateway]:
    with running() as started:
        yield started


@pytest.fixture(scope="session")
def shared(gateway: Gateway) -> Iterator[Kernel]:
    """One kernel for all tests that leave no trace in it, or that only ask."""
    with gateway.kernel() as kernel:
        yield kernel


@pytest.fixture
def kernel(gateway: Gateway) -> Iterator[Kernel]:
    """A kernel of the test's own."""
    with gateway.kernel() as started:
        yield started


@pytest.fixture
def new_kernel(gateway: Gateway) -> Iterator[Callable[..., Kernel]]:
    """Makes kernels that are deleted at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **body: stack.enter_context(gateway.kernel(**body))
