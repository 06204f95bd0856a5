"""The lock-down as one pure function: a sandbox's spec in, the Engine API's container body out.

There is no parameter for a mount, a device, a capability, a user, a network or a command, so no request can ask for one. Each
line below is explained in kernel-image/README.md; tests/hostile looks at all of it from inside.
Format: https://docs.docker.com/reference/api/engine/version/v1.41/#tag/Container/operation/ContainerCreate
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.sandboxes.base import FoundSandbox, SandboxSpec

UID = 10001
LINK_DIRECTORY = "/run/cellgate"
LINK_SOCKET = "link.sock"
LABEL = "org.cellgate."
OPEN_FILES = 1024

_LAST_MOMENT = 253_402_300_799.0
"""The last second that RFC 3339 can name."""

_MASKED = (
    # The engine's own list, which ours replaces,
    *("/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list"),
    *("/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"),
    # and what else tells a cell about the host.
    *("/proc/interrupts", "/proc/kallsyms", "/proc/config.gz", "/proc/modules", "/sys/kernel/notes"),
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


def container_body(
    spec: SandboxSpec,
    *,
    gateway_id: str,
    runtime: str,
    seccomp: str,
    link_directory: Path | None,
    extra_security: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The body of POST /containers/create. `link_directory` None means that the link is the container's stdio."""
    stdio = link_directory is None
    return {
        "Image": spec.image,
        "Cmd": ["--stdio"] if stdio else ["--link", f"{LINK_DIRECTORY}/{LINK_SOCKET}"],
        "User": f"{UID}:{UID}",
        "WorkingDir": "/work",
        "Hostname": "kernel",
        "Env": [f"CELLGATE_CPUS={spec.limits.cpus:g}"],
        "Labels": _labels(spec, gateway_id),
        "OpenStdin": stdio,
        "StdinOnce": stdio,
        "AttachStdin": stdio,
        "AttachStdout": stdio,
        "AttachStderr": False,
        "Tty": False,
        "NetworkDisabled": True,
        "StopTimeout": 2,
        "HostConfig": _host_config(spec, runtime, seccomp, link_directory, extra_security),
    }


def found(kernel_id: str, running: bool, labels: Mapping[str, str], frozen: bool = False) -> FoundSandbox:
    """What a container's labels say of it. They may be those of an older version, or anybody's: what makes no sense is left out."""
    epoch = labels.get(f"{LABEL}epoch", "")
    return FoundSandbox(
        kernel_id,
        running,
        frozen,
        epoch=int(epoch) if re.fullmatch(r"[0-9]{1,18}", epoch) else 0,
        owner=labels.get(f"{LABEL}owner", ""),
        expires_at=_moment(labels.get(f"{LABEL}expires", "")),
    )


def _labels(spec: SandboxSpec, gateway_id: str) -> dict[str, str]:
    """Whose it is: enough for any gateway of this identity to know what to do with it, and for an operator to see."""
    expires = ""
    if spec.expires_at > 0:
        moment = datetime.fromtimestamp(min(spec.expires_at, _LAST_MOMENT), UTC)
        expires = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {
        f"{LABEL}gateway": gateway_id,
        f"{LABEL}kernel": spec.kernel_id,
        f"{LABEL}epoch": str(spec.epoch),
        f"{LABEL}owner": spec.owner,
        f"{LABEL}expires": expires,
    }


def _moment(text: str) -> float:
    """RFC 3339 in UTC -> seconds since the epoch; 0 for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp() if text.endswith("Z") else 0.0
    except (ValueError, OverflowError):
        return 0.0


def _host_config(
    spec: SandboxSpec, runtime: str, seccomp: str, link_directory: Path | None, extra_security: tuple[str, ...]
) -> dict[str, Any]:
    limits = spec.limits
    return {
        "Runtime": runtime,
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "CapAdd": [],
        "Privileged": False,
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={seccomp}", *extra_security],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Memory": limits.memory,
        "MemorySwap": limits.memory,
        "NanoCpus": int(limits.cpus * 1e9),
        "CpuShares": 512,
        "PidsLimit": limits.pids,
        "OomScoreAdj": 500,
        "Ulimits": [
            {"Name": "nofile", "Soft": OPEN_FILES, "Hard": OPEN_FILES},
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": spec.work_size, "Hard": spec.work_size},
            {"Name": "memlock", "Soft": 65536, "Hard": 65536},
        ],
        "Tmpfs": {
            "/work": f"rw,nosuid,nodev,noexec,size={spec.work_size},nr_inodes=20000,mode=0700,uid={UID},gid={UID}",
            "/tmp": f"rw,nosuid,nodev,noexec,size={spec.tmp_size},nr_inodes=20000,mode=1777",  # noqa: S108
            "/dev/shm": f"rw,nosuid,nodev,noexec,size={spec.shm_size},nr_inodes=4000,mode=1777",  # noqa: S108
        },
        "Mounts": [] if link_directory is None else [_link_mount(link_directory)],
        "MaskedPaths": list(_MASKED),
        "ReadonlyPaths": list(_READ_ONLY),
        "LogConfig": {"Type": "none", "Config": {}},
        "Init": True,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "PublishAllPorts": False,
    }


def _link_mount(directory: Path) -> dict[str, Any]:
    """Read-only: a process may still connect to a socket there, but can neither write beside it nor replace it."""
    return {
        "Type": "bind",
        "Source": str(directory),
        "Target": LINK_DIRECTORY,
        "ReadOnly": True,
        "BindOptions": {"Propagation": "rprivate"},
    }
