"""The one who keeps the kernels: admission, creation, look-up, culling, removal, and what is remembered of the ended.

Admission is decided without an await, so that parallel requests can't slip past a limit together. Starting is CPU-bound and
runs under a limiter; everything else on a kernel goes to the kernel itself.
"""

from collections.abc import Sequence

import anyio
import anyio.abc
import structlog

from gateway.errors import GatewayError, KernelNotFound, NoCapacity, ShuttingDown, TooManyKernels
from gateway.kernels import causes, culler, wishes
from gateway.kernels.execution import Cause
from gateway.kernels.kernel import Kernel
from gateway.kernels.log import timestamp
from gateway.kernels.tombstones import Tombstone, Tombstones
from gateway.kernels.wishes import CreateRequest
from gateway.sandboxes.base import SandboxEngine
from gateway.settings import MIB, KernelSpecSettings, Settings

log = structlog.get_logger()

_KEPT_DEAD = 256
"""Dead kernels that are still listed; past it the oldest leave only a tombstone."""


class KernelManager:
    """`memory`: bytes that the engine's machine has, 0 when unknown."""

    def __init__(self, settings: Settings, engine: SandboxEngine, memory: int = 0) -> None:
        self._settings = settings
        self._engine = engine
        self._memory = int(memory * settings.kernels.memory_overcommit)
        self._kernels: dict[str, Kernel] = {}
        self._tombstones = Tombstones(settings.culling.max_tombstones, settings.culling.keep_tombstones)
        self._starts = anyio.CapacityLimiter(settings.kernels.max_parallel_starts)
        self._tasks: anyio.abc.TaskGroup | None = None
        self.stopping = False
        """No new work is taken."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Holds the culler's and all kernels' tasks until cancelled, after `stop_all`."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(culler.run, self._candidates, self._carry_out, self._settings.culling)
            task_status.started()
            await anyio.sleep_forever()

    def specs(self) -> dict[str, KernelSpecSettings]:
        return self._settings.kernels.specs

    @property
    def default_spec(self) -> str:
        return self._settings.kernels.default_spec

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

    async def create(self, request: CreateRequest) -> Kernel:
        """A kernel that has answered; raises what `Kernel.start` and `wishes.grant` raise, `TooManyKernels`, `NoCapacity`."""
        kernel = Kernel(wishes.grant(request, self._settings), self._settings, self._engine)
        self._admit(kernel.request.limits.memory)
        self._kernels[kernel.id] = kernel
        assert self._tasks is not None
        try:
            await self._tasks.start(kernel.run)
            async with self._starts:
                await kernel.start()
        except BaseException as error:
            cause = error.detail if isinstance(error, GatewayError) else "The start was cancelled."
            with anyio.CancelScope(shield=True):
                await kernel.stop(causes.plain("start_failed", cause))
            self._kernels.pop(kernel.id, None)
            raise
        log.info("kernel_started", kernel_id=kernel.id, spec=kernel.request.spec_name)
        return kernel

    async def delete(self, kernel_id: str) -> None:
        await self._end(self.get(kernel_id), causes.DELETED)

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
                tasks.start_soon(kernel.stop, causes.GATEWAY_STOPPED)

    async def _end(self, kernel: Kernel, cause: Cause) -> None:
        await kernel.stop(cause)
        if self._kernels.pop(kernel.id, None) is not None:
            self._bury(kernel)
            log.info("kernel_ended", kernel_id=kernel.id, cause=(kernel.cause or cause)["code"])

    def _bury(self, kernel: Kernel) -> None:
        last = kernel.cells.last
        stone = Tombstone(
            kernel_id=kernel.id,
            label=kernel.request.label,
            cause=kernel.cause or causes.DELETED,
            ended_at=timestamp(),
            last_execution={"execution_id": last.id, "status": last.status, "ended": last.end} if last else None,
            usage=kernel.usage(),
        )
        self._tombstones.add(stone)

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
        """Raises `ShuttingDown`, `TooManyKernels` (the caller has enough), `NoCapacity` (the machine has)."""
        if self.stopping:
            raise ShuttingDown("The gateway is stopping and starts no kernel any more.")
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
            self._bury(kernel)
            kernel.forget()
