"""Stores that can be held up, made to fail, and taken over: what the tests of durability run against."""

from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel

from gateway.errors import StoreFenced, StoreUnavailable
from gateway.store.base import Change
from gateway.store.memory import MemoryStore


class LastingStore(MemoryStore):
    """Tables that outlive a gateway of the test. Each gateway has a view of its own: `successor` makes the next one, and what the
    one before still tries to write then comes to nothing, as in a process that is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.durable = True
        self.commits: list[list[Change]] = []
        """What was stored through this view, commit by commit."""
        self.attempts = 0
        self.failing = False
        """True: every commit raises `StoreUnavailable`."""
        self.fenced = False
        """True: every commit raises `StoreFenced`."""
        self.dead = False
        """True: no commit ever comes back, and none is done."""
        self.before: Callable[[int], None] | None = None
        """Called before each commit with its number, from 1; may set `dead`."""
        self.after: Callable[[int], None] | None = None
        """The same, when it is stored and nobody knows yet."""
        self._open = anyio.Event()
        self._open.set()

    def hold(self) -> None:
        """Commits wait until `release`."""
        if self._open.is_set():
            self._open = anyio.Event()

    def release(self) -> None:
        self._open.set()

    def successor(self) -> "LastingStore":
        self.dead = True
        found = LastingStore()
        found._tables, found.epoch = self._tables, self.epoch + 1
        return found

    async def commit(self, changes: Sequence[Change]) -> None:
        self.attempts += 1
        number = len(self.commits) + 1
        await anyio.lowlevel.checkpoint()
        await self._open.wait()
        if self.failing:
            raise StoreUnavailable("The disk is full.")
        if self.fenced:
            raise StoreFenced("Another gateway has the store.")
        if self.before is not None and not self.dead:
            self.before(number)
        await self._live()
        await super().commit(changes)
        self.commits.append([*changes])
        if self.after is not None:
            self.after(number)
        await self._live()
        await anyio.lowlevel.checkpoint()

    async def _live(self) -> None:
        if self.dead:
            await anyio.sleep_forever()
