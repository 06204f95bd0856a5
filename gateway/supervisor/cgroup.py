"""What the sandbox's own cgroup says: memory, CPU, processes, and what the kernel of the host had to refuse or kill.

The one place that can tell an out-of-memory kill from any other SIGKILL. Reads cgroup v2 or v1 as mounted in the sandbox
(https://docs.kernel.org/admin-guide/cgroup-v2.html). Where neither can be read a value is None: unknown is not zero.
"""

_ROOT = "/sys/fs/cgroup/"
_MEMORY_FILES = {
    "memory_used": ("memory.current", "memory/memory.usage_in_bytes"),
    "memory_peak": ("memory.peak", "memory/memory.max_usage_in_bytes"),
    "memory_limit": ("memory.max", "memory/memory.limit_in_bytes"),
}


def memory() -> dict[str, int | None]:
    """Bytes used, peak and limit, and the number of processes that the out-of-memory killer has ended (`oom_kills`)."""
    values = {name: _number(paths) for name, paths in _MEMORY_FILES.items()}
    kills = _fields(("memory.events", "memory/memory.oom_control")).get("oom_kill")
    return {**values, "oom_kills": kills}


def memory_in_use() -> int | None:
    """Bytes that can't be given back: anonymous memory and what lies in tmpfs, without the page cache of the image."""
    found = _fields(("memory.stat", "memory/memory.stat"))
    parts = [found.get("anon", found.get("total_rss")), found.get("shmem", found.get("total_shmem"))]
    return None if None in parts else sum(part for part in parts if part is not None)


def cpu_seconds() -> float | None:
    """CPU time of all processes that the sandbox has ever had."""
    microseconds = _fields(("cpu.stat",)).get("usage_usec")
    if microseconds is not None:
        return microseconds / 1e6
    nanoseconds = _number(("cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage"))
    return None if nanoseconds is None else nanoseconds / 1e9


def refused_processes() -> int | None:
    """How often a process or thread could not be started because of the pids limit."""
    return _fields(("pids.events", "pids/pids.events")).get("max")


def _read(paths: tuple[str, ...]) -> str:
    for path in paths:
        try:
            with open(_ROOT + path) as file:
                return file.read()
        except OSError:
            continue
    return ""


def _number(paths: tuple[str, ...]) -> int | None:
    text = _read(paths).strip()
    return int(text) if text.isdigit() else None


def _fields(paths: tuple[str, ...]) -> dict[str, int]:
    """A flat-keyed file, one ``name number`` a line."""
    pairs = (line.split(" ") for line in _read(paths).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
