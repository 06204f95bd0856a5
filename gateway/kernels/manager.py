"""The one who keeps the kernels: admission, creation, look-up, culling, removal, and what is remembered of the ended.

Admission is decided without an await, so that parallel requests can't slip past a limit together. Starting is CPU-bound and
runs under a limiter; everything else on a kernel goes to the kernel itself. What an earlier gateway on the same store has left is
taken up by `recovery` before anything else.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.abc
import structlog

from gateway.errors import (
    EngineUnavailable,
    ExecutionNotFound,
    GatewayError,
    KernelIdTaken,
    KernelNotFound,
    NoCapacity,
    ShuttingDown,
    StoreFenced,
    StoreUnavailable,
    TooManyKernels,
)
from gateway.kernels import archive, causes, culler, reconcile, recovery, wishes
from gateway.kernels.archive import ArchivedExecution
from gateway.kernels.creates import Creates
from gateway.kernels.execution import Cause, Execution, summary_of
from gateway.kernels.journal import Journal
from gateway.kernels.kernel import Kernel
from gateway.kernels.tombstones import Tombstones
from gateway.kernels.wishes import CreateRequest
from gateway.sandboxes.base import SandboxEngine
from gateway.settings import MIB, KernelSpecSettings, Settings
from gateway.store.base import Retention, Store
from gateway.store.memory import MemoryStore

log = structlog.get_logger()

_KEPT_DEAD = 256
"""Dead kernels that are still listed; past it the oldest leave only a tombstone."""
_PURGE_INTERVAL = 10.0
_FINAL_FLUSH = 5.0
"""Seconds that a gateway that stops waits for its store."""


class KernelManager:
    """`memory`: bytes that the engine's machine has, 0 when unknown. `store` None keeps everything in memory."""

    def __init__(self, settings: Settings, engine: SandboxEngine, memory: int = 0, store: Store | None = None) -> None:
        self.over = anyio.Event()
        """It can't go on, and its process has to end without touching a box."""
        self.fenced = False
        """That is because another gateway has taken over the store."""
        self.running = False
        self.leaving = anyio.Event()
        """The kernels have been let go: whoever waits for a cell can read it at the next gateway."""
        self.stopping = False
        """No new work is taken."""
        self._settings = settings
        self._engine = engine
        self._store = store or MemoryStore()
        self.journal = Journal(self._store, self._fence)
        self._memory = int(memory * settings.kernels.memory_overcommit)
        self._kernels: dict[str, Kernel] = {}
        self._creates = Creates()
        self._by_id = Creates()
        """The creates of kernels whose id the client has chosen, while they are under way."""
        self._tombstones = Tombstones(settings.culling.max_tombstones, settings.culling.keep_tombstones)
        self._starts = anyio.CapacityLimiter(settings.kernels.max_parallel_starts)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._engine_away = False

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Takes up what an earlier gateway has left, then holds all tasks until cancelled, after `stop_all` or `detach_all`."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self.journal.run)
            for stone in await self._store.tombstones():
                self._tombstones.add(stone)
            restored = await recovery.restore(
                self._store, self._settings, self._engine, self.journal, self._creates, self._tombstones.add
            )
            for kernel, _ in restored:
                self._kernels[kernel.id] = kernel
                await tasks.start(kernel.run)
            async with anyio.create_task_group() as listening:
                for kernel, stored in restored:
                    listening.start_soon(recovery.take_over, kernel, stored, self._engine, tasks, self._end)
            await self._look()
            tasks.start_soon(culler.run, self._candidates, self._carry_out, self._settings.culling)
            tasks.start_soon(self._reconcile)
            tasks.start_soon(self._purge)
            self.running = True
            task_status.started()
            await anyio.sleep_forever()

    def _fence(self) -> None:
        self.fenced = True
        self.over.set()

    def specs(self) -> dict[str, KernelSpecSettings]:
        return self._settings.kernels.specs

    @property
    def default_spec(self) -> str:
        return self._settings.kernels.default_spec

    @property
    def degraded(self) -> str | None:
        """Why new work is refused at the moment, as an error's code; None when it is not."""
        if self.journal.failure is not None:
            return StoreUnavailable.code
        return EngineUnavailable.code if self._engine_away else None

    def list(self) -> list[Kernel]:
        return [*self._kernels.values()]

    def get(self, kernel_id: str) -> Kernel:
        """Raises `KernelGone` for one that has ended and is remembered, `KernelNotFound` for any other."""
        if kernel := self._kernels.get(kernel_id):
            return kernel
        self._tombstones.check(kernel_id)
        raise KernelNotFound(
            f"No kernel has the id '{kernel_id[:64]}'. GET /v1/kernels lists those that run.", kernel_id=kernel_id[:64]
        )

    # executions, also of kernels that are gone

    async def execution(self, kernel_id: str, execution_id: str) -> Execution | ArchivedExecution:
        """Raises `KernelNotFound`, `ExecutionNotFound`, `StoreUnavailable`."""
        kernel = self._kernels.get(kernel_id)
        found: Execution | ArchivedExecution | None = kernel.cells.find(execution_id) if kernel else None
        found = found or await archive.find(self._store, kernel_id, execution_id)
        if found is not None:
            return found
        self._require_known(kernel_id)
        text = f"This kernel has no execution '{execution_id[:64]}', or it is kept no more."
        raise ExecutionNotFound(text, kernel_id=kernel_id)

    async def executions(self, kernel_id: str, before: int | None, limit: int) -> Sequence[dict[str, Any]]:
        """Summaries, newest first; those numbered below `before`. Raises `KernelNotFound`, `StoreUnavailable`."""
        stored = await archive.summaries(self._store, kernel_id, before, limit)
        if not stored:
            self._require_known(kernel_id)
        kernel = self._kernels.get(kernel_id)
        live = {execution.id: execution.record() for execution in kernel.cells.recent()} if kernel else {}
        return [summary_of(live.get(record["execution_id"], record)) for record in stored]

    def _require_known(self, kernel_id: str) -> None:
        if kernel_id not in self._kernels and kernel_id not in self._tombstones:
            self.get(kernel_id)

    # creating and ending

    async def create(
        self, request: CreateRequest, key: str | None = None, fingerprint: str | None = None
    ) -> tuple[Kernel, bool]:
        """A kernel that has answered, and whether an earlier create with this key has made it. Raises what `Kernel.start` and
        `wishes.grant` raise, `TooManyKernels`, `NoCapacity`, `StoreUnavailable`, `IdempotencyConflict`, `KernelIdTaken`."""
        if request.kernel_id is not None:
            return await self._create_at(request.kernel_id, request)
        if key is None:
            return await self._create(request), False

        async def make() -> str:
            return (await self._create(request, key, fingerprint)).id

        kernel_id, replayed = await self._creates.once(key, fingerprint, make)
        return self.get(kernel_id), replayed

    async def _create_at(self, kernel_id: str, request: CreateRequest) -> tuple[Kernel, bool]:
        """The kernel of this id, which there may be already or is being made; an id is never given to a second one."""
        found = False

        async def make() -> str:
            nonlocal found
            found = kernel_id in self._kernels
            if not found:
                if kernel_id in self._tombstones or await archive.summaries(self._store, kernel_id, None, 1):
                    raise KernelIdTaken(
                        f"A kernel with the id '{kernel_id}' has ended. Choose another id.", kernel_id=kernel_id
                    )
                await self._create(request)
            return kernel_id

        _, waited = await self._by_id.once(kernel_id, None, make)
        if not waited:
            self._by_id.forget(kernel_id)
        return self.get(kernel_id), found or waited

    async def _create(self, request: CreateRequest, key: str | None = None, fingerprint: str | None = None) -> Kernel:
        wish = wishes.grant(request, self._settings)
        kernel = Kernel(
            wish, self._settings, self._engine, self.journal, kernel_id=request.kernel_id, key=key, fingerprint=fingerprint
        )
        self._admit(kernel.request.limits.memory)
        self._kernels[kernel.id] = kernel
        assert self._tasks is not None
        try:
            await self._tasks.start(kernel.run)
            async with self._starts:
                await kernel.start()
            await kernel.record.begin()
        except BaseException as error:
            cause = error.detail if isinstance(error, GatewayError) else "The start was cancelled."
            # It gives its key back, also in what is stored of its end.
            kernel.key = None
            with anyio.CancelScope(shield=True):
                await self._end(kernel, causes.plain("start_failed", cause), remember=False)
            raise
        log.info("kernel_started", kernel_id=kernel.id, spec=kernel.request.spec_name)
        return kernel

    async def delete(self, kernel_id: str) -> None:
        await self._end(self.get(kernel_id), causes.DELETED)

    async def _end(self, kernel: Kernel, cause: Cause, remember: bool = True) -> None:
        await kernel.stop(cause)
        if self._kernels.pop(kernel.id, None) is not None:
            stone = kernel.record.bury(cause)
            if remember:
                self._tombstones.add(stone)
                log.info("kernel_ended", kernel_id=kernel.id, cause=(kernel.cause or cause)["code"])

    # the end of the gateway

    async def drain(self, timeout: float) -> None:
        """Takes no new work, and gives the cells that run or wait `timeout` seconds to end."""
        self.stopping = True
        with anyio.move_on_after(timeout):
            for kernel in self.list():
                kernel.draining = True
            for kernel in self.list():
                await kernel.cells.all_done()

    async def stop_all(self) -> None:
        """Ends every kernel; used when the gateway stops."""
        self.stopping = True
        async with anyio.create_task_group() as tasks:
            for kernel in self.list():
                tasks.start_soon(self._end, kernel, causes.GATEWAY_STOPPED)
        await self._last_flush()

    async def detach_all(self) -> None:
        """Lets go of every kernel that can be taken up again; the others end."""
        if not (self._store.durable and self._engine.adopts):
            await self.stop_all()
            return
        self.stopping = True
        self.leaving.set()
        for kernel in self.list():
            kernel.cells.release()
        async with anyio.create_task_group() as tasks:
            for kernel in self.list():
                if kernel.record.begun:
                    tasks.start_soon(kernel.detach)
                else:
                    tasks.start_soon(self._end, kernel, causes.GATEWAY_STOPPED)
        await self._last_flush()

    async def _last_flush(self) -> None:
        with contextlib.suppress(StoreUnavailable), anyio.CancelScope(shield=True):
            await self.journal.flush(_FINAL_FLUSH)

    # boxes and records, now and then

    async def _reconcile(self) -> None:
        while True:
            await anyio.sleep(self._settings.kernels.reconcile_interval)
            await self._look()

    async def _look(self) -> None:
        try:
            if self._engine_away:
                # It was away at the start, maybe: what its machine has is known from here on.
                self._memory = int((await self._engine.check()).memory * self._settings.kernels.memory_overcommit)
            removed = await reconcile.look(self._engine, self._known, self._inhabited)
        except EngineUnavailable as error:
            if not self._engine_away:
                log.warning("engine_unavailable", reason=error.detail)
            self._engine_away = True
            return
        if self._engine_away:
            self._engine_away = False
            log.info("engine_back")
        if removed:
            log.info("sandboxes_removed", removed=removed)

    def _known(self) -> set[str]:
        """Whose boxes are to stay: not those of kernels that are given up, whose removal has failed."""
        return {kernel.id for kernel in self._kernels.values() if not kernel.gone}

    def _inhabited(self) -> Sequence[Kernel]:
        return [kernel for kernel in self._kernels.values() if (kernel.started or kernel.phase == "ready") and kernel.has_box]

    async def _purge(self) -> None:
        """Forgets what is too old or too much, piece by piece."""
        culling, options = self._settings.culling, self._settings.store
        retention = Retention(options.keep, options.max_size, culling.keep_tombstones, culling.max_tombstones)
        while True:
            await anyio.sleep(_PURGE_INTERVAL)
            with contextlib.suppress(StoreUnavailable, StoreFenced):
                while await self._store.purge(retention, time.time()):
                    pass
            self._creates.keep_only(lambda kernel_id: kernel_id in self._kernels or kernel_id in self._tombstones)

    # culling

    def _candidates(self) -> Sequence[culler.Candidate]:
        return [kernel.candidate() for kernel in self._kernels.values() if kernel.started]

    async def _carry_out(self, verdict: culler.Verdict) -> None:
        kernel = self._kernels.get(verdict.id)
        if kernel is None:
            return
        if verdict.action == "freeze":
            await kernel.freeze()
        elif verdict.cause is not None:
            await self._end(kernel, verdict.cause)

    # admission

    def _admit(self, memory: int) -> None:
        """Raises `ShuttingDown`, `StoreUnavailable`, `TooManyKernels` (the caller has enough), `NoCapacity` (the machine has)."""
        if self.stopping:
            raise ShuttingDown("The gateway is stopping and starts no kernel any more.")
        self.journal.require()
        limit = self._settings.kernels.max_kernels
        boxes = [kernel for kernel in self._kernels.values() if not kernel.gone]
        if len(boxes) >= limit:
            raise TooManyKernels(
                f"{limit} kernels run, which is the limit. Delete one (DELETE /v1/kernels/ID) or wait until one ends.",
                limit=limit,
            )
        promised = sum(kernel.request.limits.memory for kernel in boxes)
        if self._memory and promised + memory > self._memory:
            raise NoCapacity(
                f"{promised / MIB:.0f} of {self._memory / MIB:.0f} MiB are promised to kernels, too much for another {memory / MIB:.0f} MiB. "
                "Ask for less memory, or try again when a kernel has ended.",
                promised=promised,
                capacity=self._memory,
            )
        gone = [kernel for kernel in self._kernels.values() if kernel.gone]
        for kernel in gone[: max(0, len(gone) - _KEPT_DEAD)]:
            self._kernels.pop(kernel.id)
            self._tombstones.add(kernel.record.bury(causes.DELETED))
            kernel.forget()
