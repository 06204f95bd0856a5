"""Why a kernel ended, in words for people and a code for programs: pure functions from what was observed.

A cause is a dict with `code`, `message` (what happened, what survived, what to do) and facts. It stands in the kernel's document
and in the `ended` event of every execution that the end has cut off.
"""

from typing import Any

from gateway.sandboxes.base import SandboxExit
from gateway.settings import MIB

RESTART_ADVICE = "Its files are still there: restart the kernel to go on with them; variables are lost."
_NEW = "Its variables and files are lost: create a new kernel."
_EXIT_OUTPUT = 70
"""Our Python launcher's exit code when its output thread has ended (EX_SOFTWARE of sysexits(3))."""
_SANDBOX_CODES = {
    3: ("lifetime", "The sandbox reached its lifetime."),
    4: ("silence", "The sandbox ended itself because no gateway had spoken to it."),
    5: ("link_lost", "The sandbox ended itself because its link to the gateway broke."),
}

_STOPPED_FROM_OUTSIDE = (0, 137, 143, 255)
"""0: the supervisor has obeyed a SIGTERM; 128 and the number of SIGKILL or SIGTERM (signal(7)); 255: an engine could not learn it."""


def from_process(exit_info: dict[str, Any]) -> dict[str, Any]:
    """A `kernel_exit` event of the supervisor -> cause. The numbers come from the sandbox: facts only as far as it is honest."""
    code, signal, kills = exit_info.get("code"), exit_info.get("signal"), exit_info.get("oom_kills")
    facts = {"exit_code": code, "signal": signal, "log": str(exit_info.get("log") or "")[-4000:]}
    if signal == "SIGKILL" and isinstance(kills, int) and kills > 0:
        peak, limit = exit_info.get("memory_peak"), exit_info.get("memory_limit")
        text = "The kernel was killed because its memory was used up"
        if isinstance(peak, int) and isinstance(limit, int):
            text += f" (peak {peak / MIB:.0f} MiB, limit {limit / MIB:.0f} MiB)"
        text += f". {RESTART_ADVICE} Load less at once, or ask for more memory when creating the kernel."
        return {"code": "out_of_memory", "message": text, "memory_peak": peak, "memory_limit": limit, **facts}
    if code == _EXIT_OUTPUT:
        text = "The kernel process could not send outputs any more and ended; mostly a cell has opened all the files it may."
        return {"code": "output_lost", "message": f"{text} {RESTART_ADVICE}", **facts}
    if signal:
        return {"code": "signal", "message": f"The kernel process was ended by {signal}. {RESTART_ADVICE}", **facts}
    return {"code": "exit", "message": f"The kernel process ended by itself with exit code {code}. {RESTART_ADVICE}", **facts}


def from_sandbox(end: SandboxExit, killed_before: bool = False, engine_was_away: bool = False) -> dict[str, Any]:
    """The end of the whole box -> cause. `killed_before`: the engine's word of an out-of-memory kill is about an earlier one.
    `engine_was_away`: it did not answer when the box was lost."""
    if end.removed:
        return {"code": "sandbox_removed", "message": f"The sandbox was removed from outside the gateway. {_NEW}"}
    if end.oom_killed and not killed_before:
        return {"code": "out_of_memory", "message": f"The sandbox was ended because its memory was used up. {_NEW}"}
    if end.code in _SANDBOX_CODES:
        code, text = _SANDBOX_CODES[end.code]
        return {"code": code, "message": f"{text} {_NEW}"}
    text = f"The sandbox ended with exit code {end.code}."
    if end.code in _STOPPED_FROM_OUTSIDE:
        if engine_was_away:
            text = f"The sandbox engine was restarted and ended the sandbox. {_NEW}"
            return {"code": "engine_restarted", "message": text, "exit_code": end.code}
        text = (
            f"The sandbox was stopped from outside the gateway (exit code {end.code}), by a user or by a restart of its engine."
        )
    return {"code": "sandbox_ended", "message": f"{text} {_NEW}", "exit_code": end.code}


def from_reply(name: str, value: str, interrupted: bool) -> dict[str, Any]:
    """A Python exception -> cause; limits of the sandbox are named where the exception is how they show."""
    text = f"{name}: {value}" if value else name
    if interrupted and name == "KeyboardInterrupt":
        return {"code": "interrupted", "message": "The cell was interrupted."}
    if "Errno 28" in value or "No space left on device" in value:
        return {"code": "disk_full", "message": f"{text}. The sandbox's disk is full: delete files, or write less."}
    if "can't start new thread" in value or ("Errno 11" in value and name in ("BlockingIOError", "OSError")):
        return {"code": "process_limit", "message": f"{text}. The sandbox may start no more processes or threads."}
    if name == "MemoryError" or name.endswith("MemoryError"):
        return {"code": "memory_error", "message": f"{text}. The sandbox has no memory for this; variables are kept."}
    return {"code": "exception", "message": text}


def idle(timeout: float) -> dict[str, Any]:
    text = f"The kernel was culled: nobody had asked anything of it for {timeout:g} s (its idle timeout)."
    return {"code": "idle_timeout", "message": text, "timeout": timeout}


def lifetime(seconds: float) -> dict[str, Any]:
    return {"code": "lifetime", "message": f"The kernel reached its lifetime of {seconds:g} s.", "timeout": seconds}


def busy(timeout: float) -> dict[str, Any]:
    text = f"The kernel was culled: it had been busy for {timeout:g} s without a pause (its busy timeout)."
    return {"code": "busy_timeout", "message": text, "timeout": timeout}


def plain(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message}


UNREACHABLE = plain("sandbox_unreachable", f"The sandbox stopped answering and was ended. {_NEW}")
KILLED = plain("sandbox_killed", f"The kernel did not let itself be stopped, so its sandbox was killed. {_NEW}")
DELETED = plain("kernel_deleted", "The kernel was deleted.")
RESTARTED = plain("kernel_restarted", "The kernel was restarted; its variables are lost, its files are kept.")
GATEWAY_STOPPED = plain("gateway_stopped", "The gateway was stopped.")
GATEWAY_RESTARTED = plain("gateway_restarted", f"The gateway was restarted, and this kind of sandbox can't outlive it. {_NEW}")
NEVER_CALLED = plain("sandbox_unreachable", f"The sandbox did not call the gateway after its restart and was ended. {_NEW}")
ENGINE_GONE = plain("engine_unavailable", f"The sandbox's link broke and its engine does not answer. {_NEW}")
INTERNAL = plain("internal_error", f"The gateway lost control of this kernel by a fault of its own. {_NEW}")
