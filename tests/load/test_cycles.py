"""Create, run, delete, again and again: nothing may be left of any of it, and memory may not grow.

CI runs a few cycles; `scripts/cycles` runs a thousand. Counts are taken after a warm-up, so that what is allocated once does not
count: containers, link directories, file descriptors, tasks, threads; memory as the growth over the second half of the cycles.
"""

import asyncio
import gc
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import anyio

from gateway.kernels.execution import CellRequest
from gateway.kernels.manager import KernelManager
from gateway.kernels.wishes import CreateRequest
from gateway.sandboxes.docker import DockerEngine
from gateway.sandboxes.lockdown import LABEL
from gateway.settings import MIB, Settings, load

CYCLES = int(os.environ.get("CELLGATE_CYCLES", "24"))
PARALLEL = 2
MAX_GROWTH = 4 * MIB
"""Bytes that the second half may add: the allocator's noise, not one kernel's worth of anything."""


@dataclass(frozen=True)
class Count:
    containers: int
    link_directories: int
    descriptors: int
    tasks: int
    threads: int


async def count(engine: DockerEngine, gateway_id: str, links: str) -> Count:
    gc.collect()
    label = f"{LABEL}gateway={gateway_id}"
    containers = await engine.call(lambda api: api.containers(all=True, filters={"label": label}))
    return Count(
        containers=len(containers),
        link_directories=len(os.listdir(links)),
        descriptors=len(os.listdir("/proc/self/fd")),
        tasks=len(asyncio.all_tasks()),
        threads=threading.active_count(),
    )


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def cycle(manager: KernelManager, number: int) -> None:
    kernel, _ = await manager.create(CreateRequest())
    execution = kernel.execute(CellRequest(code=f"x = {number}; print(x); x", timeout=30))
    await execution.done.wait()
    assert execution.status == "ok", execution.end
    await manager.delete(kernel.id)


async def run_cycles(manager: KernelManager, cycles: int) -> None:
    async def worker(start: int) -> None:
        for number in range(start, cycles, PARALLEL):
            await cycle(manager, number)

    async with anyio.create_task_group() as tasks:
        for start in range(PARALLEL):
            tasks.start_soon(worker, start)


async def measure(settings: Settings) -> tuple[Count, Count, int]:
    """Counts before and after the cycles, and the growth of memory over their second half."""
    engine = DockerEngine(settings, "cycles")
    report = await engine.check()
    manager = KernelManager(settings, engine, report.memory)
    links = str(settings.state_dir / "links")
    async with anyio.create_task_group() as tasks:
        await tasks.start(manager.run)
        await run_cycles(manager, 2 * PARALLEL)
        before = await count(engine, "cycles", links)
        await run_cycles(manager, CYCLES // 2)
        half = resident()
        await run_cycles(manager, CYCLES - CYCLES // 2)
        after, growth = await count(engine, "cycles", links), resident() - half
        tasks.cancel_scope.cancel()
    await engine.aclose()
    return before, after, growth


def test_nothing_is_left() -> None:
    directory = Path(tempfile.mkdtemp(prefix="cg-", dir="/tmp"))
    try:
        settings = load(state_dir=directory, culling={"max_tombstones": 10})
        before, after, growth = anyio.run(measure, settings)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{CYCLES} cycles: {after}, memory grew by {growth / MIB:.2f} MiB over the second half")
    # The engine's connections and the threads of its calls are kept and reused, up to one for each parallel call; those that do
    # something and those that only ask count apart.
    kept = 2 * settings.docker.parallel_calls
    assert before.descriptors <= after.descriptors <= before.descriptors + kept
    assert before.threads <= after.threads <= before.threads + kept
    assert replace(after, descriptors=0, threads=0) == replace(before, descriptors=0, threads=0)
    assert (after.containers, after.link_directories) == (0, 0)
    assert growth < MAX_GROWTH
