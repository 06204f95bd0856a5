"""Waiting for what nobody announces, with a deadline that is never a measure of speed."""

from collections.abc import Callable

import anyio

PATIENCE = 10.0


async def until(condition: Callable[[], object], what: str = "it") -> None:
    """Returns once `condition` is true; looked at often, since what it asks for mostly takes no time."""
    with anyio.move_on_after(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.002)
        return
    raise AssertionError(f"{what} did not come")
