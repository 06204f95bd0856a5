"""Fixtures of the unit tests of client and command line."""

from collections.abc import Iterator

import pytest
import structlog

from tests.unit.scripted import ScriptedGateway


@pytest.fixture(autouse=True)
def own_logging() -> None:
    """A gateway that another test has started in this process has set up logging for all of it."""
    structlog.reset_defaults()


@pytest.fixture
def scripted() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
def url(scripted: ScriptedGateway) -> Iterator[str]:
    with scripted.serving() as address:
        yield address


@pytest.fixture
def anyio_backend() -> str:
    """Tests of coroutines run on asyncio, as the gateway does."""
    return "asyncio"
