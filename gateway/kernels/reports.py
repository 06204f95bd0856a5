"""What a supervisor reports about its box, as warnings for the cell that runs and as figures of what was used.

All of it comes from inside the sandbox: values are taken for what they are only after their type was checked.
"""

from typing import Any

from gateway.protocol.events import Payload
from gateway.settings import MIB


def warning(event: dict[str, Any], largest: list[dict[str, Any]] | None = None) -> Payload | None:
    """The warning that an event means for the running cell; None for events that mean none."""
    kind = event.get("event")
    if kind == "memory_high":
        return _memory(event, largest or [])
    if kind == "out_of_memory_kill":
        text = "A process that a cell started was killed because the sandbox's memory was used up. The kernel itself lives."
        return Payload("warning", {"code": "child_out_of_memory", "message": text, "kills": _number(event, "kills")})
    if kind == "process_limit":
        text = "A process or thread could not be started: the sandbox has as many as it may."
        return Payload("warning", {"code": "process_limit", "message": text, "refused": _number(event, "refused")})
    return None


def _memory(event: dict[str, Any], largest: list[dict[str, Any]]) -> Payload:
    used, limit = _number(event, "used"), _number(event, "limit")
    percent = round(100 * used / limit) if limit else 0
    text = f"{percent} % of the sandbox's memory is in use ({used / MIB:.0f} of {limit / MIB:.0f} MiB)."
    if largest:
        named = ", ".join(f"{item['name']} ({item['size'] / MIB:.0f} MiB)" for item in largest[:5])
        text += f" Largest variables: {named}."
    text += " Past the limit the kernel is killed and its variables are lost."
    code = "memory_95" if percent >= 95 else "memory_80"
    return Payload("warning", {"code": code, "message": text, "used": used, "limit": limit, "largest_variables": largest})


def _number(event: dict[str, Any], key: str) -> int:
    value = event.get(key)
    return value if isinstance(value, int) else 0


class Usage:
    """CPU seconds and memory of a kernel over its life, and what each execution had of it."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.memory_used = 0
        self.memory_peak = 0

    def take(self, event: dict[str, Any]) -> dict[str, Any]:
        """A `usage` event; what was used since the one before it."""
        cpu = event.get("cpu_seconds")
        before = self.cpu_seconds
        if isinstance(cpu, int | float) and cpu >= before:
            self.cpu_seconds = float(cpu)
        self.memory_used = _number(event, "memory_used")
        peak = _number(event, "memory_peak")
        self.memory_peak = max(self.memory_peak, peak)
        return {"cpu_seconds": round(self.cpu_seconds - before, 6), "memory_peak": peak}

    def restore(self, document: dict[str, Any]) -> None:
        """What `document` has given."""
        self.cpu_seconds = document["cpu_seconds"]
        self.memory_used, self.memory_peak = document["memory_used"], document["memory_peak"]

    def document(self, output_bytes: int, executions: int) -> dict[str, Any]:
        """Seconds and bytes; `memory_used` as of the end of the last cell."""
        return {
            "cpu_seconds": round(self.cpu_seconds, 3),
            "memory_used": self.memory_used,
            "memory_peak": self.memory_peak,
            "output_bytes": output_bytes,
            "executions": executions,
        }
