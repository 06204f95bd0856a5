"""Boxes held against kernels: nothing that is wanted is removed, nothing that is not stays, however it came about."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import EngineUnavailable
from gateway.kernels import reconcile
from gateway.kernels.wishes import CreateRequest
from gateway.sandboxes.base import FoundSandbox, Limits, SandboxSpec
from gateway.sandboxes.link import Link
from gateway.settings import LinkSettings
from gateway.testing import FakeEngine, FakeSandbox, KernelScript, Sleep, printed
from tests.unit.kernels import back, box_of, cell, created, doomed, ended, managed, quick, run, successor
from tests.unit.stores import LastingStore
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio

OFTEN = quick(reconcile_interval=0.01)
CELLS: dict[str, Any] = {"hello": [printed("hello")], "sleeps": [Sleep(600)]}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(KernelScript(cells=CELLS))


class Inhabitant:
    def __init__(self, id_: str, frozen: bool = False) -> None:
        self.id, self.frozen = id_, frozen
        self.checked = self.woken = 0

    async def check_box(self) -> None:
        self.checked += 1

    async def wake_box(self) -> None:
        self.woken += 1


ids = st.sampled_from([f"k{number}" for number in range(8)])


@given(st.dictionaries(ids, st.booleans()), st.sets(ids))
def test_what_is_one_too_many_and_what_is_missing(boxes: dict[str, bool], kernels: set[str]) -> None:
    found = [FoundSandbox(kernel_id, running) for kernel_id, running in boxes.items()]
    assert set(reconcile.orphans(found, kernels)) == set(boxes) - kernels
    inhabited = [Inhabitant(kernel_id) for kernel_id in kernels]
    missing = reconcile.ghosts(found, inhabited)
    assert {kernel.id for kernel in missing} == kernels - {kernel_id for kernel_id, running in boxes.items() if running}


async def stranger(engine: FakeEngine, kernel_id: str) -> FakeSandbox:
    """A box that no kernel stands for."""
    spec = SandboxSpec(kernel_id, "cellgate-kernel:latest", Limits(1, 1.0, 1), 0, 0, 0)
    box = await engine.create(spec, lambda: Link(LinkSettings(), lambda _batch: None, 60.0, 60.0))
    await until(lambda: box.link.connected.is_set() or box.inside.ended)
    return box


async def test_orphans_are_removed_and_what_belongs_to_others_is_not(engine: FakeEngine) -> None:
    other = FakeEngine(host=engine.host, gateway_id="another gateway")
    foreign = await stranger(other, "foreign")
    async with managed(engine, OFTEN) as manager:
        kernel = await created(manager, CreateRequest())
        await stranger(engine, "orphan")
        ended_box = await stranger(engine, "what is left of one")
        ended_box.end(0)
        await until(lambda: set(engine.boxes) == {kernel.id, "foreign"})
        assert (await run(kernel, "hello")).status == "ok"
        assert foreign.inside.ended is None
        await foreign.remove()


async def test_a_kernel_whose_box_is_gone_ends_with_the_cause(engine: FakeEngine) -> None:
    """Also where the stream did not break: nobody else would tell."""
    async with managed(engine, OFTEN) as manager:
        kernel, other = await created(manager, CreateRequest()), await created(manager, CreateRequest())
        execution = kernel.execute(cell("sleeps"))
        box = engine.boxes.pop(kernel.id)
        box.inside.ended = (await other_end(engine)).ended
        end = await ended(execution)
        assert (end["status"], end["cause"]["code"]) == ("died", "sandbox_removed")
        assert kernel.gone
        assert (await run(other, "hello")).status == "ok"
        box.supervisor.end(137)


async def other_end(engine: FakeEngine) -> Any:
    """How a box is that somebody has removed."""
    box = await stranger(engine, "removed")
    box.vanish()
    box.close()
    return box.inside


async def test_a_box_that_is_only_not_listed_is_no_end(engine: FakeEngine) -> None:
    """A list may be late; the box itself is asked before its kernel is ended."""
    async with managed(engine, OFTEN) as manager:
        kernel = await created(manager, CreateRequest())
        looks = 0
        listed = engine.list

        async def nothing() -> Sequence[FoundSandbox]:
            nonlocal looks
            looks += 1
            return []

        engine.list = nothing  # type: ignore[method-assign]
        await until(lambda: looks > 3)
        engine.list = listed  # type: ignore[method-assign]
        assert (await run(kernel, "hello")).status == "ok"


class Interleaved(FakeEngine):
    """Something happens while the engine makes its list, before or after it has looked."""

    before_list: Callable[[], Awaitable[object]] | None = None
    after_list: Callable[[], Awaitable[object]] | None = None
    looked = 0

    async def list(self) -> Sequence[FoundSandbox]:
        if self.before_list is not None:
            await self.before_list()
        found = await super().list()
        if self.after_list is not None:
            await self.after_list()
        self.looked += 1
        return found


@pytest.mark.parametrize("when", ["before_list", "after_list"])
async def test_what_is_made_or_removed_during_a_look_is_neither_orphan_nor_ghost(when: str) -> None:
    engine = Interleaved(KernelScript(cells=CELLS))
    async with managed(engine, quick(reconcile_interval=0.01, max_kernels=1000)) as manager:
        old = [await created(manager, CreateRequest()) for _ in range(3)]
        new = []

        async def happen() -> None:
            setattr(engine, when, None)
            new.append(await created(manager, CreateRequest()))
            await manager.delete(old.pop().id)

        for round_ in range(1, 4):
            looked = engine.looked
            setattr(engine, when, happen)
            await until(lambda round_=round_: len(new) == round_)  # type: ignore[misc]
            await until(lambda looked=looked: engine.looked > looked + 1)  # type: ignore[misc]
            assert set(engine.boxes) == {kernel.id for kernel in manager.list()} == {kernel.id for kernel in [*old, *new]}
        for kernel in new:
            assert (await run(kernel, "hello")).status == "ok"


async def test_a_box_that_is_being_made_is_nobodys_orphan(engine: FakeEngine) -> None:
    """It is there, and its kernel has not answered yet."""
    engine.script.answers_info = False
    async with managed(engine, quick(reconcile_interval=0.01, specs={"python3": {"start_timeout": 60.0}})) as manager:
        looks = 0
        listed = engine.list

        async def counting() -> Sequence[FoundSandbox]:
            nonlocal looks
            looks += 1
            return await listed()

        engine.list = counting  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.create, CreateRequest())
            await until(lambda: engine.boxes)
            seen = looks
            await until(lambda: looks > seen + 3)
            (box,) = engine.boxes.values()
            assert box.inside.ended is None
            tasks.cancel_scope.cancel()


async def test_while_the_engine_is_away_nothing_is_concluded(engine: FakeEngine) -> None:
    async with managed(engine, OFTEN) as manager:
        kernel = await created(manager, CreateRequest())
        assert manager.degraded is None
        engine.available = False
        await until(lambda: manager.degraded == "engine_unavailable")
        assert (await run(kernel, "hello")).status == "ok"
        with pytest.raises(EngineUnavailable):
            await created(manager, CreateRequest())
        engine.available = True
        await until(lambda: manager.degraded is None)
        assert (await run(await created(manager, CreateRequest()), "hello")).status == "ok"


async def test_a_box_whose_removal_failed_is_removed_by_the_next_look(engine: FakeEngine) -> None:
    """Of a kernel that was deleted, and of one that stays listed as dead."""
    async with managed(engine, OFTEN) as manager:
        deleted, dead = await created(manager, CreateRequest()), await created(manager, CreateRequest())
        engine.available = False
        await manager.delete(deleted.id)
        await dead.on_lost({"code": "sandbox_killed", "message": "m"})
        assert set(engine.boxes) == {deleted.id, dead.id}
        engine.available = True
        await until(lambda: engine.boxes == {})
        assert manager.list() == [dead]


async def test_one_orphan_that_cannot_be_removed_keeps_no_other(engine: FakeEngine) -> None:
    class Stuck(FakeEngine):
        async def discard(self, kernel_id: str) -> None:
            if kernel_id == "stuck":
                raise EngineUnavailable("it is stuck")
            await super().discard(kernel_id)

    stuck = Stuck(engine.script, host=engine.host)
    boxes = [await stranger(stuck, kernel_id) for kernel_id in ("a", "stuck", "b")]
    assert await reconcile.look(stuck, lambda: (), lambda: ()) == 2
    assert set(engine.boxes) == {"stuck"}
    await boxes[1].remove()
    for _ in range(5):
        # In these rounds of the loop the closed streams let go of their sockets.
        await anyio.lowlevel.checkpoint()


async def test_the_first_look_comes_before_anything_else(engine: FakeEngine) -> None:
    """What a dead gateway has left is gone when the next one takes requests, and what it has recorded is not."""
    store = LastingStore()
    async with doomed(engine, store) as manager:
        kernel = await created(manager, CreateRequest())
    await stranger(engine_of(engine), "orphan")
    async with managed(successor(engine), store=store.successor()) as manager:
        assert set(engine.boxes) == {kernel.id}
        again = await back(manager, kernel.id)
        assert box_of(engine, again).inside.ended is None
        assert (await run(again, "hello")).status == "ok"


def engine_of(engine: FakeEngine) -> FakeEngine:
    """One that answers, on the same host."""
    return FakeEngine(engine.script, host=engine.host)
