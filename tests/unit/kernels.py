"""A manager with scripted sandboxes and small times, and the check that nothing is left when it has stopped."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio

from gateway.kernels.execution import CellRequest, Execution
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager
from gateway.kernels.state import KernelState
from gateway.kernels.wishes import CreateRequest
from gateway.settings import Settings, load
from gateway.store.base import Store
from gateway.testing import FakeEngine, FakeSandbox, ScriptedKernel
from tests.unit.stores import LastingStore
from tests.unit.waiting import PATIENCE, until

QUICK: dict[str, Any] = {
    "state_dir": "/nowhere",
    "kernels": {"interrupt_grace": 0.05, "specs": {"python3": {"start_timeout": 10.0}}},
    "link": {"ping_interval": 0.05, "lost_timeout": 2.0, "command_timeout": 2.0},
}


def quick(**kernels: Any) -> Settings:
    """Settings whose times are short, with other values for `kernels`."""
    return load(**{**QUICK, "kernels": {**QUICK["kernels"], **kernels}})


@contextlib.asynccontextmanager
async def managed(
    engine: FakeEngine, settings: Settings | None = None, store: Store | None = None
) -> AsyncIterator[KernelManager]:
    """A manager that runs while the block does; afterwards there is no box and no task that was not there before."""
    before = asyncio.all_tasks()
    async with anyio.create_task_group() as tasks:
        manager = KernelManager(settings or quick(), engine, store=store)
        await tasks.start(manager.run)
        try:
            yield manager
        finally:
            with anyio.move_on_after(PATIENCE, shield=True):
                await manager.stop_all()
            tasks.cancel_scope.cancel()
    engine.available = True
    for kernel_id in [*engine.boxes]:
        await engine.discard(kernel_id)
    assert engine.boxes == {}
    assert asyncio.all_tasks() <= before


@contextlib.asynccontextmanager
async def doomed(engine: FakeEngine, store: LastingStore, settings: Settings | None = None) -> AsyncIterator[KernelManager]:
    """A manager whose gateway is killed at the end of the block: the boxes run on, and the store is as of its last commit."""
    async with anyio.create_task_group() as tasks:
        manager = KernelManager(settings or quick(), engine, store=store)
        await tasks.start(manager.run)
        yield manager
        kill(engine, store)
        tasks.cancel_scope.cancel()
    for kernel in manager.list():
        # Timers of the loop die with the process, too.
        kernel._closed.set()


def kill(engine: FakeEngine, store: LastingStore) -> None:
    """The gateway's process is dead: what is still running of it reaches neither a box nor the store."""
    store.dead = True
    engine.available = False
    for box in engine.boxes.values():
        box.abandon()


def successor(engine: FakeEngine) -> FakeEngine:
    """The engine as the next gateway has it."""
    return FakeEngine(engine.script, host=engine.host)


async def back(manager: KernelManager, kernel_id: str) -> Kernel:
    """A kernel of the gateway before, once it is known how it stands."""
    kernel = manager.get(kernel_id)
    waiting = (KernelState.RECOVERING, KernelState.RESTARTING)
    await until(lambda: kernel.state not in waiting, "the kernel")
    return kernel


@contextlib.asynccontextmanager
async def started(engine: FakeEngine, settings: Settings | None = None, **request: Any) -> AsyncIterator[Kernel]:
    async with managed(engine, settings) as manager:
        yield await created(manager, CreateRequest(**request))


async def created(manager: KernelManager, request: CreateRequest) -> Kernel:
    """A kernel that no key was given for."""
    return (await manager.create(request))[0]


def box_of(engine: FakeEngine, kernel: Kernel) -> FakeSandbox:
    return engine.boxes[kernel.id]


def process_of(engine: FakeEngine, kernel: Kernel) -> ScriptedKernel:
    process = box_of(engine, kernel).supervisor.kernel
    assert process is not None
    return process


def cell(code: str, timeout: float = 60.0, **options: Any) -> CellRequest:
    return CellRequest(code, timeout, **options)


async def ended(execution: Execution) -> dict[str, Any]:
    """The members of the last event, once it is there."""
    with anyio.fail_after(PATIENCE):
        await execution.done.wait()
    assert types(execution)[-1] == "ended"
    assert types(execution).count("ended") == 1
    return execution.end


async def run(kernel: Kernel, code: str, **options: Any) -> Execution:
    execution = kernel.execute(cell(code, **options))
    await ended(execution)
    return execution


def types(execution: Execution) -> list[str]:
    return [event.type for event in execution.log.since(0)]


def text(execution: Execution) -> str:
    return "".join(output["text"] for output in execution.result()["outputs"] if output["output_type"] == "stream")


def steps(execution: Execution) -> list[str]:
    """The steps of the ladder that were taken."""
    return [event.members["step"] for event in execution.log.since(0) if event.type == "interrupt"]


def states(kernel: Kernel) -> list[str]:
    """The states that the kernel's own log tells."""
    return [event.members["state"] for event in kernel.log.since(0) if event.type == "state"]
