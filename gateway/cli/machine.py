"""What `doctor` looks at on this machine itself, against what the configuration promises to sandboxes."""

import os
import platform
import shutil
import socket
import sys
from importlib.metadata import version
from pathlib import Path

from gateway.sandboxes.base import Finding
from gateway.settings import MIB, KernelSpecSettings, Settings
from gateway.store import lock

LITTLE_DISK = 1024 * MIB


def findings(settings: Settings) -> list[Finding]:
    specs = settings.kernels.specs
    return [
        _versions(),
        *(_cpus(name, spec, os.cpu_count() or 1) for name, spec in specs.items()),
        *(_memory(name, spec, total_memory()) for name, spec in specs.items()),
        _state_dir(settings.state_dir),
        _store(settings),
        _port(settings.server.host, settings.server.port),
    ]


def _versions() -> Finding:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding("ok", "versions", f"cellgate {version('cellgate')}, Python {platform.python_version()}, {system}")


def _cpus(name: str, spec: KernelSpecSettings, cores: int) -> Finding:
    text = f"{cores} cores; a {name} kernel gets {spec.limits.cpus:g}, at most {spec.maximum.cpus:g}"
    if spec.maximum.cpus > cores:
        return Finding("warning", "cpus", text, f"Set kernels.specs.{name}.maximum.cpus to {cores} or less.")
    return Finding("ok", "cpus", text)


def _memory(name: str, spec: KernelSpecSettings, total: int | None) -> Finding:
    """`total` in bytes."""
    if total is None:
        return Finding("warning", "memory", "This system doesn't tell how much memory it has.")
    limit = spec.limits.memory
    text = f"{_gib(total)} here; a {name} kernel gets {_gib(limit)}, at most {_gib(spec.maximum.memory)}"
    if limit > total:
        return Finding("problem", "memory", text, f"Set kernels.specs.{name}.limits.memory below what is there.")
    if spec.maximum.memory > total:
        return Finding("warning", "memory", text, f"Set kernels.specs.{name}.maximum.memory below what is there.")
    return Finding("ok", "memory", text)


def _state_dir(path: Path) -> Finding:
    """Whether the directory, or the nearest one above it that exists, can be written to; and how much room is there."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    text = f"{path}, {_gib(free)} free"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("problem", "state directory", f"{there} can't be written to.", "Name another with --state-dir.")
    if free < LITTLE_DISK:
        return Finding("warning", "state directory", text, "Make room, or name another with --state-dir.")
    return Finding("ok", "state directory", text)


def _store(settings: Settings) -> Finding:
    """What is remembered where, and whether a gateway is at it."""
    if settings.store.kind == "memory":
        text = "In memory: kernels and results end with the gateway."
        return Finding("warning", "store", text, 'Set store.kind to "sqlite" to keep them.')
    path = settings.store.path or settings.state_dir / "store.sqlite3"
    size = f"{path.stat().st_size / MIB:.1f} MiB" if path.exists() else "not there yet"
    user = lock.holder(settings.state_dir)
    return Finding("ok", "store", f"{path}, {size}; {'used by process ' + user if user else 'no gateway uses it'}")


def _port(host: str, port: int) -> Finding:
    if port == 0:
        return Finding("ok", "port", "The system chooses one.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            text = f"{host}:{port} can't be listened on: {error.strerror or error}."
            return Finding("warning", "port", text, "A gateway may run there already; else name another with --port.")
    return Finding("ok", "port", f"{host}:{port} is free")


def total_memory() -> int | None:
    """Bytes of physical memory."""
    if sys.platform == "win32":
        return None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _gib(size: int) -> str:
    return f"{size / (1024 * MIB):.1f} GiB"
