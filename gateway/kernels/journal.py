"""From what has changed in memory to what is stored: one task that commits in rounds, off the way of the cells.

Whoever has something to remember says so (`changed`) as often as it likes. In the next round it is asked for its changes; all that
a round has gathered goes into one commit, and then everybody is told that it is safe. Changes of a round are gathered without a
pause, so each commit shows one moment: the effects of link frames and the number of the last of them always belong together.

While the store can't write, the round is kept and tried again. Nothing of it is told to readers or acknowledged to supervisors
meanwhile, so nothing that was told is ever lost; new work is refused by `require`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import structlog

from gateway.errors import StoreFenced, StoreUnavailable
from gateway.store.base import Change, Store

log = structlog.get_logger()

_RETRY = 1.0
"""Seconds between attempts while the store can't write."""

Safe = Callable[[], None]


class Recorded(Protocol):
    """Something with a record. `take_changes` gives what is new since it was asked last, and whom to tell once it is safe."""

    def take_changes(self) -> tuple[Sequence[Change], Safe]: ...


class _Once:
    """Changes of something that is gone itself."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes

    def take_changes(self) -> tuple[Sequence[Change], Safe]:
        return self._changes, lambda: None


class Journal:
    """`on_fenced` is called once when another gateway has taken the store over: nothing can be recorded any more."""

    def __init__(self, store: Store, on_fenced: Callable[[], None] = lambda: None) -> None:
        self.store = store
        self.failure: StoreUnavailable | None = None
        """Why nothing can be recorded at the moment."""
        self._on_fenced = on_fenced
        self._dirty: dict[Recorded, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake = anyio.Event()
        self._begun = self._done = 0
        self._round_done = anyio.Event()

    def changed(self, thing: Recorded, within: float = 0.0) -> None:
        """It will be asked for its changes in the next round, which begins at once or `within` so many seconds: a commit takes CPU
        from the cell that is running, so what nobody waits for goes with what somebody does."""
        self._dirty[thing] = None
        if not within:
            self._wake.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(within, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._wake.set()

    def write(self, *changes: Change) -> None:
        """Changes as they are, after all that was announced before."""
        self.changed(_Once(changes))

    def require(self) -> None:
        """Raises `StoreUnavailable` while new work could not be recorded."""
        if self.failure is not None:
            raise StoreUnavailable(self.failure.detail)

    async def flush(self, patience: float | None = None) -> None:
        """Waits until all that was announced so far is stored; raises `StoreUnavailable` after `patience` seconds."""
        target = self._begun + (1 if self._dirty else 0)
        self._wake.set()
        with anyio.move_on_after(patience):
            while self._done < target:
                await self._round_done.wait()
        if self._done < target:
            raise StoreUnavailable(self.failure.detail if self.failure else "The store is too slow at the moment; try again.")

    async def run(self) -> None:
        """Until cancelled; `flush` first, or what was announced is not stored."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            await self._round()

    async def _round(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        things, self._dirty = self._dirty, {}
        if not things:
            return
        self._begun += 1
        changes: list[Change] = []
        safe: list[Safe] = []
        for thing in things:
            taken, tell = thing.take_changes()
            changes += taken
            safe.append(tell)
        if changes:
            await self._commit(changes)
        for tell in safe:
            tell()
        self._done = self._begun
        self._round_done.set()
        self._round_done = anyio.Event()

    async def _commit(self, changes: list[Change]) -> None:
        while True:
            try:
                if self.failure is not None:
                    # With room for this round and no more the next one would fail again.
                    await self.store.check()
                await self.store.commit(changes)
            except StoreUnavailable as error:
                if self.failure is None:
                    log.error("store_unavailable", reason=error.detail)
                self.failure = error
                await anyio.sleep(_RETRY)
            except StoreFenced as error:
                log.critical("store_fenced", reason=error.detail)
                self.failure = StoreUnavailable(error.detail)
                self._on_fenced()
                await anyio.sleep_forever()
            else:
                if self.failure is not None:
                    log.info("store_back")
                self.failure = None
                return
