"""Is a sandbox lost when its link is? Not by itself: the supervisor may dial again. It is when the engine says so, or time is up."""

import anyio
import structlog

from gateway.errors import EngineUnavailable
from gateway.kernels import causes
from gateway.kernels.execution import Cause
from gateway.sandboxes.base import Sandbox

log = structlog.get_logger()

_INTERVAL = 0.25


async def judge(sandbox: Sandbox, patience: float) -> Cause | None:
    """Waits at most `patience` seconds: None once the link is back, else why the sandbox counts as ended."""
    deadline = anyio.current_time() + patience
    while anyio.current_time() < deadline:
        try:
            if end := await sandbox.exit():
                return causes.from_sandbox(end)
        except EngineUnavailable as error:
            log.warning("engine_unavailable", reason=error.detail)
        with anyio.move_on_after(_INTERVAL):
            await sandbox.link.connected.wait()
            return None
    return causes.UNREACHABLE
