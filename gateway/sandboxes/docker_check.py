"""What a Docker daemon says about itself, judged: pure functions from its answers to findings with a remedy each."""

import re
from typing import Any

from gateway.sandboxes.base import EngineReport, Finding
from gateway.sandboxes.image import CONTENT_HASH, ROOT, content_hash
from gateway.settings import MIB, Settings

MINIMUM_API = (1, 40)
"""The first Engine API with private cgroup namespaces and all fields of the lock-down (Engine 19.03/20.10)."""


def report(
    settings: Settings, url: str, version: dict[str, Any], info: dict[str, Any], images: dict[str, dict[str, Any] | None]
) -> EngineReport:
    findings = [
        _version(version),
        _runtime(settings.docker.runtime, info),
        _seccomp(info),
        *(_image(name, found) for name, found in images.items()),
        _memory(settings, info),
        _live_restore(info),
    ]
    return EngineReport(
        engine="docker",
        url=url,
        version=str(version.get("Version", "unknown")),
        api_version=str(version.get("ApiVersion", "unknown")),
        runtime=settings.docker.runtime,
        memory=int(info.get("MemTotal") or 0),
        findings=tuple(findings),
    )


def _version(version: dict[str, Any]) -> Finding:
    api = str(version.get("ApiVersion", "0"))
    numbers = tuple(int(n) for n in re.findall(r"\d+", api)[:2])
    text = f"Docker {version.get('Version', 'unknown')}, API {api}"
    if numbers < MINIMUM_API:
        return Finding("problem", "engine", text, "Update Docker to 20.10 or newer.")
    return Finding("ok", "engine", text)


def _runtime(name: str, info: dict[str, Any]) -> Finding:
    known = sorted(info.get("Runtimes") or {})
    if name in known:
        return Finding("ok", "runtime", name)
    return Finding(
        "problem",
        "runtime",
        f"The daemon has no runtime named {name!r}; it knows {', '.join(known) or 'none'}.",
        "Install it and name it in the daemon's configuration, or set docker.runtime to one that is there.",
    )


def _seccomp(info: dict[str, Any]) -> Finding:
    if any("seccomp" in option for option in info.get("SecurityOptions") or []):
        return Finding("ok", "seccomp", "The engine filters system calls; sandboxes use the gateway's own profile.")
    return Finding("problem", "seccomp", "The engine has no seccomp support.", "Use a kernel and a Docker built with seccomp.")


def _image(name: str, found: dict[str, Any] | None) -> Finding:
    if found is None:
        return Finding("problem", f"image {name}", "It is not on the engine.", "Run scripts/image to build it.")
    built = ((found.get("Config") or {}).get("Labels") or {}).get(CONTENT_HASH)
    size = f"{found.get('Size', 0) / MIB:.0f} MiB"
    if built is None:
        return Finding("ok", f"image {name}", f"{size}, not built by scripts/image")
    if built != content_hash(ROOT):
        return Finding(
            "warning",
            f"image {name}",
            f"{size}, built from other sources than this gateway's.",
            "Run scripts/image to rebuild it.",
        )
    return Finding("ok", f"image {name}", f"{size}, current")


def _memory(settings: Settings, info: dict[str, Any]) -> Finding:
    total = int(info.get("MemTotal") or 0)
    kernels = settings.kernels
    each = kernels.specs[kernels.default_spec].limits.memory
    room = int(total * kernels.memory_overcommit) // each
    text = f"{total / MIB:.0f} MiB: room for {min(room, kernels.max_kernels)} kernels of {each / MIB:.0f} MiB (max_kernels is {kernels.max_kernels})."
    if total and room < 1:
        return Finding("problem", "memory", text, "Lower the spec's limits.memory; this machine can't hold one kernel.")
    return Finding("ok", "memory", text)


def _live_restore(info: dict[str, Any]) -> Finding:
    if info.get("LiveRestoreEnabled"):
        return Finding(
            "ok",
            "live-restore",
            "On: while the Docker daemon is down or restarts, kernels and their running cells go on; only new kernels can't start.",
        )
    return Finding(
        "warning",
        "live-restore",
        "Off: stopping the Docker daemon ends every kernel at once; after a crash of it they end when it comes back.",
        'Put {"live-restore": true} into the daemon\'s configuration: kernels and their running cells then go on meanwhile.',
    )


def shares_paths(url: str, info: dict[str, Any]) -> bool:
    """Whether a socket of this host can be mounted into a container: a local Linux daemon, not one inside a virtual machine."""
    return url.startswith("unix://") and "Docker Desktop" not in str(info.get("OperatingSystem"))


def security_options(info: dict[str, Any]) -> tuple[str, ...]:
    """AppArmor's default profile by name where the host has it, so that a daemon which would drop it refuses instead."""
    has_apparmor = any("apparmor" in option for option in info.get("SecurityOptions") or [])
    return ("apparmor=docker-default",) if has_apparmor else ()
