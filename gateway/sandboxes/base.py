"""The seam between kernels and the boxes they run in: two small Protocols and the data that crosses them.

An engine knows how to make, inspect and remove a box of its kind; it knows nothing of Jupyter. What goes on inside is the
business of the link. No field here takes a value from a request except the limits, which the caller has already bounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.sandboxes.link import Link


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use: bytes of memory (no swap), cores, processes and threads."""

    memory: int
    cpus: float
    pids: int


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """All that an engine is told about a box to make. Sizes in bytes."""

    kernel_id: str
    image: str
    limits: Limits
    work_size: int
    tmp_size: int
    shm_size: int


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """How a box ended: exit code of its first process if known, and whether the engine saw an out-of-memory kill."""

    code: int | None
    oom_killed: bool
    removed: bool = False
    """True when the engine knows no such box any more: somebody else removed it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has seen, and what to do about it."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    engine: str
    url: str
    version: str
    api_version: str
    runtime: str
    findings: tuple[Finding, ...]
    memory: int = 0
    """Bytes that the engine's machine has; 0 when it does not say."""

    @property
    def problems(self) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.level == "problem"]


class Sandbox(Protocol):
    """One box. `link` is the way to its supervisor."""

    @property
    def link(self) -> Link: ...

    async def exit(self) -> SandboxExit | None:
        """How it ended, None while it runs; raises `EngineUnavailable`."""

    async def freeze(self) -> None:
        """Takes the CPU from everything in it, keeping all state; raises `EngineUnavailable`."""

    async def thaw(self) -> None:
        """Gives it back; no error when it is not frozen."""

    async def remove(self) -> None:
        """Ends and removes it with all that belongs to it; no error when it is gone already."""


class SandboxEngine(Protocol):
    async def check(self) -> EngineReport:
        """What is here, and what would keep a sandbox from starting; raises `EngineUnavailable`."""

    async def create(self, spec: SandboxSpec, make_link: Callable[[], Link]) -> Sandbox:
        """Makes and starts a box whose supervisor will speak on the link; raises `EngineUnavailable`, `ImageMissing`,
        `StartFailed`, and leaves nothing behind when it does."""

    async def sweep(self) -> int:
        """Removes what an earlier gateway of the same identity has left; the number of boxes removed."""

    async def aclose(self) -> None: ...
