"""What a gateway does with the kernels of the one before it: each is listed at once, listened for, and taken up when it calls.

A kernel that can't be taken up ends with the reason, never silently.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import anyio.abc
import structlog

from gateway.errors import GatewayError
from gateway.kernels import archive, causes, kernel_record
from gateway.kernels.archive import StoredKernel
from gateway.kernels.creates import Creates
from gateway.kernels.execution import Cause
from gateway.kernels.journal import Journal
from gateway.kernels.kernel import Kernel
from gateway.sandboxes.base import SandboxEngine
from gateway.settings import Settings
from gateway.store.base import EndKernel, Store, Tombstone

log = structlog.get_logger()

End = Callable[[Kernel, Cause], Coroutine[Any, Any, None]]


async def restore(
    store: Store,
    settings: Settings,
    engine: SandboxEngine,
    journal: Journal,
    creates: Creates,
    bury: Callable[[Tombstone], None],
) -> list[tuple[Kernel, StoredKernel]]:
    """The kernels that the store knows, as they were."""
    for stone in await store.tombstones():
        # Before the kernels: whoever lives counts more than who has ended under the same key.
        creates.remember(*kernel_record.key_of(stone), stone.kernel_id)
    kernels = []
    for row in await store.kernels():
        try:
            stored = await archive.load_kernel(store, row, journal, settings.kernels)
            kernel_record.check(stored.document)
            request = kernel_record.request_of(stored.document)
            kernel = Kernel(
                request,
                settings,
                engine,
                journal,
                kernel_id=row.id,
                created_at=row.created_at,
                key=row.key,
                fingerprint=row.fingerprint,
            )
            kernel.restore(stored)
        except (ValueError, LookupError, TypeError, AttributeError):
            # One record that can't be read must not cost the others; its box, known to nobody, will be removed.
            log.exception("kernel_record_unreadable", kernel_id=row.id)
            stone = kernel_record.stone_of_unknown(row, causes.INTERNAL)
            journal.write(EndKernel(stone))
            bury(stone)
        else:
            kernels.append((kernel, stored))
        creates.remember(row.key, row.fingerprint, row.id)
    return kernels


async def take_over(kernel: Kernel, stored: StoredKernel, engine: SandboxEngine, tasks: anyio.abc.TaskGroup, end: End) -> None:
    """Listens for the kernel's sandbox, then waits for it in the background."""
    if kernel.phase == "stopping":
        # It was being deleted: that is finished now.
        kernel.record.resume(None)
        tasks.start_soon(end, kernel, kernel.cause or causes.DELETED)
    elif stored.document["gone"]:
        kernel.record.resume(None)
    elif not engine.adopts:
        kernel.record.resume(None)
        await kernel.on_lost(causes.GATEWAY_RESTARTED)
    else:
        try:
            await kernel.listen_again(stored)
        except (GatewayError, OSError) as error:
            log.error("kernel_not_taken_over", kernel_id=kernel.id, reason=str(error))
            kernel.record.resume(None)
            await kernel.on_lost(causes.NEVER_CALLED)
        else:
            tasks.start_soon(kernel.recover)
