"""Is a sandbox lost when its link is? Not by itself: the supervisor may dial again. It is when the engine says so, or time is up.

The verdict counts rounds of looking, not seconds on a clock, so a gateway that was held up for a while does not take its kernels
for dead when it goes on.
"""

import anyio
import structlog

from gateway.errors import EngineUnavailable
from gateway.kernels import causes
from gateway.kernels.execution import Cause
from gateway.sandboxes.base import Sandbox

log = structlog.get_logger()

_INTERVAL = 0.25
_ROUNDS_WITHOUT_ENGINE = 12
"""A supervisor that lives dials again within a second; when the engine can't be asked either, so many rounds are enough."""


async def judge(sandbox: Sandbox, patience: float, killed_before: bool = False, needs_engine: bool = False) -> Cause | None:
    """Waits about `patience` seconds: None once the link is back, else why the sandbox counts as ended.

    `killed_before`: something in the sandbox was ended for want of memory earlier, and the sandbox lived on. `needs_engine`: the
    sandbox may be frozen, so its silence says nothing until the engine has answered.
    """
    unanswered = 0
    engine_was_away = False
    rounds = max(1, int(patience / _INTERVAL))
    while rounds > 0:
        rounds -= 1
        try:
            if end := await sandbox.exit():
                return causes.from_sandbox(end, killed_before, engine_was_away)
            unanswered = 0
        except EngineUnavailable as error:
            log.warning("engine_unavailable", reason=error.detail)
            unanswered += 1
            engine_was_away = True
            if needs_engine:
                # Frozen, maybe: only the engine knows, and only it can thaw.
                rounds, unanswered = max(1, int(patience / _INTERVAL)), 0
        if unanswered >= _ROUNDS_WITHOUT_ENGINE:
            return causes.ENGINE_GONE
        with anyio.move_on_after(_INTERVAL):
            await sandbox.link.connected.wait()
            return None
    return causes.UNREACHABLE
