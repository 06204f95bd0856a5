"""The one who keeps the kernels: admission, creation, look-up, removal.

Admission is decided without an await, so that parallel requests can't slip past a limit together. Starting is CPU-bound and
runs under a limiter; everything else on a kernel goes to the kernel itself.
"""

from dataclasses import dataclass, field

import anyio
import anyio.abc
import structlog

from gateway.errors import GatewayError, KernelNotFound, LimitExceeded, ShuttingDown, SpecNotFound, TooManyKernels
from gateway.kernels import causes
from gateway.kernels.kernel import Kernel, KernelRequest
from gateway.sandboxes.base import Limits, SandboxEngine
from gateway.settings import MIB, KernelSpecSettings, Settings

log = structlog.get_logger()

_MINIMUM_MEMORY = 128 * MIB
"""Below this not even an idle kernel with its supervisor fits."""
_KEPT_DEAD = 256
"""Dead kernels that are still listed with their cause; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a client asks for; None means the spec's default. Memory in bytes, cpus in cores."""

    spec: str | None = None
    memory: int | None = None
    cpus: float | None = None
    pids: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    label: str = ""


class KernelManager:
    def __init__(self, settings: Settings, engine: SandboxEngine) -> None:
        self._settings = settings
        self._engine = engine
        self._kernels: dict[str, Kernel] = {}
        self._starts = anyio.CapacityLimiter(settings.kernels.max_parallel_starts)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._stopping = False

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Holds all kernels' tasks until `stop_all` has been called."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            task_status.started()
            await anyio.sleep_forever()

    def specs(self) -> dict[str, KernelSpecSettings]:
        return self._settings.kernels.specs

    @property
    def default_spec(self) -> str:
        return self._settings.kernels.default_spec

    def list(self) -> list[Kernel]:
        return list(self._kernels.values())

    def get(self, kernel_id: str) -> Kernel:
        try:
            return self._kernels[kernel_id]
        except KeyError:
            raise KernelNotFound(
                f"No kernel has the id '{kernel_id[:64]}'. GET /v1/kernels lists those that run.", kernel_id=kernel_id[:64]
            ) from None

    async def create(self, request: CreateRequest) -> Kernel:
        """A kernel that has answered; raises what `Kernel.start` raises, `SpecNotFound`, `LimitExceeded`, `TooManyKernels`."""
        kernel = Kernel(self._resolve(request), self._settings, self._engine)
        self._admit()
        self._kernels[kernel.id] = kernel
        assert self._tasks is not None
        await self._tasks.start(kernel.run)
        try:
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
        kernel = self.get(kernel_id)
        await kernel.stop(causes.DELETED)
        self._kernels.pop(kernel_id, None)
        log.info("kernel_deleted", kernel_id=kernel_id)

    async def stop_all(self) -> None:
        """Ends every kernel; used when the gateway stops."""
        self._stopping = True
        async with anyio.create_task_group() as tasks:
            for kernel in self.list():
                tasks.start_soon(kernel.stop, causes.GATEWAY_STOPPED)

    def _admit(self) -> None:
        if self._stopping:
            raise ShuttingDown("The gateway is stopping and starts no kernel any more.")
        limit = self._settings.kernels.max_kernels
        boxes = [kernel for kernel in self._kernels.values() if not kernel.gone]
        if len(boxes) >= limit:
            raise TooManyKernels(
                f"{limit} kernels run, which is the limit. Delete one (DELETE /v1/kernels/{{id}}) or wait until one ends.",
                limit=limit,
            )
        gone = [kernel for kernel in self._kernels.values() if kernel.gone]
        for kernel in gone[: max(0, len(gone) - _KEPT_DEAD)]:
            self._kernels.pop(kernel.id)
            kernel.forget()

    def _resolve(self, request: CreateRequest) -> KernelRequest:
        name = request.spec or self._settings.kernels.default_spec
        spec = self.specs().get(name)
        if spec is None:
            raise SpecNotFound(
                f"There is no kernel spec '{name[:64]}'; there are: {', '.join(self.specs())}.", specs=[*self.specs()]
            )
        high = spec.maximum
        memory = _within("memory", request.memory, spec.limits.memory, _MINIMUM_MEMORY, high.memory)
        cpus = _within("cpus", request.cpus, spec.limits.cpus, 0.1, high.cpus)
        pids = _within("pids", request.pids, spec.limits.pids, 32, high.pids)
        limits = Limits(memory=int(memory), cpus=cpus, pids=int(pids))
        return KernelRequest(spec_name=name, spec=spec, limits=limits, env=dict(request.env), label=request.label)


def _within(name: str, wanted: float | None, default: float, low: float, high: float) -> float:
    if wanted is None:
        return default
    if not low <= wanted <= high:
        raise LimitExceeded(f"{name} {wanted:g} is not between {low:g} and {high:g}.", limit=name, minimum=low, maximum=high)
    return wanted
