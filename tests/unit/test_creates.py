"""Idempotency keys of creates, and creates that a dead gateway has left half made."""

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from gateway.errors import GatewayError, IdempotencyConflict, StartFailed
from gateway.kernels.creates import Creates
from gateway.kernels.kernel import Kernel
from gateway.kernels.wishes import CreateRequest
from gateway.testing import Die, FakeEngine, KernelScript, printed
from tests.unit.kernels import back, doomed, kill, managed, quick, run, successor
from tests.unit.stores import LastingStore
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio


def maker(*ids: str | Exception) -> tuple[Callable[[], Awaitable[str]], list[int]]:
    """Makes these, one after the other, each after a while."""
    calls: list[int] = []

    async def make() -> str:
        calls.append(1)
        made = ids[len(calls) - 1]
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        if isinstance(made, Exception):
            raise made
        return made

    return make, calls


async def test_one_key_makes_one_kernel_however_often_and_soon_it_is_sent() -> None:
    creates = Creates()
    make, calls = maker("k")
    found: list[tuple[str, bool]] = []

    async def ask() -> None:
        found.append(await creates.once("key", "f", make))

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(ask)
    assert sorted(found) == [("k", False), *[("k", True)] * 9]
    assert await creates.once("key", "f", make) == ("k", True)
    assert len(calls) == 1


async def test_keys_do_not_know_each_other() -> None:
    creates = Creates()
    make, _ = maker("k1", "k2")
    assert [await creates.once(key, "f", make) for key in ("a", "b", "a")] == [("k1", False), ("k2", False), ("k1", True)]


@pytest.mark.parametrize("under_way", [False, True])
async def test_another_body_under_the_same_key_is_a_conflict(under_way: bool) -> None:
    creates = Creates()
    make, calls = maker("k")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(creates.once, "key", "one", make)
        if under_way:
            await anyio.lowlevel.checkpoint()
        else:
            await until(lambda: calls)
        with pytest.raises(IdempotencyConflict):
            await creates.once("key", "another", make)
    with pytest.raises(IdempotencyConflict):
        await creates.once("key", None, make)
    assert len(calls) == 1


async def test_a_create_that_failed_gives_its_key_back_to_who_waits() -> None:
    creates = Creates()
    make, calls = maker(StartFailed("no"), "k")
    outcomes: list[object] = []

    async def ask() -> None:
        try:
            outcomes.append(await creates.once("key", "f", make))
        except StartFailed:
            outcomes.append("failed")

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
    # The first has failed; of those that waited one has tried again, and the other got what that has made.
    assert outcomes == ["failed", ("k", False), ("k", True)]
    assert len(calls) == 2


async def test_a_create_that_was_cancelled_gives_its_key_back() -> None:
    creates = Creates()
    begun = anyio.Event()

    async def hang() -> str:
        begun.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(creates.once, "key", "f", hang)
        await begun.wait()
        tasks.cancel_scope.cancel()
    make, _ = maker("k")
    assert await creates.once("key", "another", make) == ("k", False)


async def test_keys_of_kernels_that_nobody_knows_are_forgotten() -> None:
    creates = Creates()
    creates.remember("old", "f", "gone")
    creates.remember("new", "f", "there")
    creates.remember(None, None, "without a key")
    begun, going = anyio.Event(), anyio.Event()

    async def make() -> str:
        begun.set()
        await going.wait()
        return "k"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(creates.once, "under way", "f", make)
        await begun.wait()
        creates.keep_only(lambda kernel_id: kernel_id == "there")
        going.set()
    never, _ = maker()
    assert await creates.once("new", "f", never) == ("there", True)
    assert await creates.once("under way", "f", never) == ("k", True)
    again, _ = maker("k2")
    assert await creates.once("old", "f", again) == ("k2", False)


# half made

MOMENTS = ["before the box", "the box is there", "the supervisor has called", "the process was started", "it has answered"]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_of_a_create_that_its_gateway_did_not_survive_nothing_is_left(moment: str) -> None:
    engine, store = FakeEngine(KernelScript(cells={"hello": [printed("hello")]})), LastingStore()
    reached = anyio.Event()

    async def stop_here() -> None:
        reached.set()
        await anyio.sleep_forever()

    if moment == "before the box":
        engine.before_create = stop_here
    elif moment == "the box is there":
        engine.after_create = stop_here
    elif moment == "the supervisor has called":
        engine.dials = False
    elif moment == "the process was started":
        engine.script.answers_info = False
    else:
        store.hold()
    patient = quick(specs={"python3": {"start_timeout": 60.0}})
    async with doomed(engine, store, patient) as manager, anyio.create_task_group() as tasks:
        tasks.start_soon(manager.create, CreateRequest(), "key", "body")
        if moment in MOMENTS[:2]:
            await reached.wait()
        else:
            await until(lambda: engine.boxes)
        if moment == "the process was started":
            await until(lambda: next(iter(engine.boxes.values())).supervisor.kernel)
        elif moment == "it has answered":
            await until(lambda: store.attempts)
        kill(engine, store)
        tasks.cancel_scope.cancel()
    assert len(engine.boxes) == (0 if moment == "before the box" else 1)
    engine.script.answers_info = True
    async with managed(successor(engine), store=store.successor()) as manager:
        # The first look has removed what nobody knows.
        assert (manager.list(), engine.boxes) == ([], {})
        kernel, replayed = await manager.create(CreateRequest(), "key", "another body")
        assert not replayed
        assert (await run(kernel, "hello")).status == "ok"


async def test_a_create_whose_answer_was_lost_gives_the_same_kernel() -> None:
    """It was stored, and the gateway died before it could say so."""
    engine, store = FakeEngine(), LastingStore()
    store.after = lambda _number: kill(engine, store)
    async with doomed(engine, store) as manager, anyio.create_task_group() as tasks:
        tasks.start_soon(manager.create, CreateRequest(label="mine"), "key", "body")
        await until(lambda: store.dead)
        tasks.cancel_scope.cancel()
    (box,) = engine.boxes.values()
    async with managed(successor(engine), store=store.successor()) as manager:
        kernel, replayed = await manager.create(CreateRequest(label="mine"), "key", "body")
        assert (kernel.id, kernel.request.label, replayed) == (box.spec.kernel_id, "mine", True)
        assert (await run(await back(manager, kernel.id), "anything")).status == "ok"
        assert len(engine.boxes) == 1


async def test_a_create_that_fails_leaves_its_key_free_and_no_tombstone() -> None:
    engine, store = FakeEngine(), LastingStore()
    engine.script.start = Die(code=1)
    async with managed(engine, store=store) as manager:
        with pytest.raises(StartFailed):
            await manager.create(CreateRequest(), "key", "body")
        engine.script.start = None
        made: list[tuple[Kernel, bool]] = []

        async def ask() -> None:
            made.append(await manager.create(CreateRequest(), "key", "body"))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
        assert {kernel.id for kernel, _ in made} == set(engine.boxes)
        assert sorted(replayed for _, replayed in made) == [False, True, True, True]
        assert await store.tombstones() == []


async def test_a_create_that_cannot_be_recorded_fails_and_leaves_no_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.kernels.journal._RETRY", 0.005)
    engine, store = FakeEngine(), LastingStore()
    async with managed(engine, store=store) as manager:
        store.failing = True
        with pytest.raises(GatewayError, match="disk is full"):
            await manager.create(CreateRequest())
        assert (engine.boxes, manager.list()) == ({}, [])
        store.failing = False
        await manager.journal.flush()
        assert await store.kernels() == []
