"""What the kernel's cgroup says about memory: the one place that can tell an out-of-memory kill from any other SIGKILL.

Reads cgroup v2 or v1 as mounted in the sandbox (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files).
Where neither can be read, all values are None: unknown is not zero.
"""

_ROOT = "/sys/fs/cgroup/"
_FILES = {
    "memory_used": ("memory.current", "memory/memory.usage_in_bytes"),
    "memory_peak": ("memory.peak", "memory/memory.max_usage_in_bytes"),
    "memory_limit": ("memory.max", "memory/memory.limit_in_bytes"),
}
_COUNTERS = ("memory.events", "memory/memory.oom_control")


def memory() -> dict[str, int | None]:
    """Bytes used, peak and limit, and the number of processes that the out-of-memory killer has ended (`oom_kills`)."""
    values = {name: _first_number(paths) for name, paths in _FILES.items()}
    return {**values, "oom_kills": _oom_kills()}


def _first_number(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        try:
            with open(_ROOT + path) as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return None


def _oom_kills() -> int | None:
    for path in _COUNTERS:
        try:
            with open(_ROOT + path) as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return None
