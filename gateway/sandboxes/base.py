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
    epoch: int = 0
    """Of the gateway that makes it: later ones have higher numbers."""
    owner: str = ""
    expires_at: float = 0.0
    """Seconds since the epoch at which it ends itself, as far as is known when it is made."""


@dataclass(frozen=True, slots=True)
class FoundSandbox:
    """A box of this gateway's identity, or what is left of one, as the engine tells it."""

    kernel_id: str
    running: bool
    """Frozen ones too."""
    frozen: bool = False
    epoch: int = 0
    owner: str = ""
    expires_at: float = 0.0


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

    async def detach(self) -> None:
        """Lets go of it without ending it: link and sockets of ours are closed, the box waits for the next gateway."""


class SandboxEngine(Protocol):
    async def check(self) -> EngineReport:
        """What is here, and what would keep a sandbox from starting; raises `EngineUnavailable`."""

    async def create(self, spec: SandboxSpec, make_link: Callable[[], Link]) -> Sandbox:
        """Makes and starts a box whose supervisor will speak on the link; raises `EngineUnavailable`, `ImageMissing`,
        `StartFailed`, and leaves nothing behind when it does."""

    @property
    def adopts(self) -> bool:
        """Whether a box outlives its gateway and can be taken over by the next one."""

    async def adopt(self, kernel_id: str, make_link: Callable[[], Link]) -> Sandbox:
        """Takes over the box that an earlier gateway has made for this kernel: its supervisor will dial in. A frozen box is thawed.
        Whether it is still there, `exit` of the sandbox tells. Raises `EngineUnavailable` when that prevents it."""

    async def list(self) -> Sequence[FoundSandbox]:
        """All boxes of this identity, and what is left of ended ones; raises `EngineUnavailable`."""

    async def discard(self, kernel_id: str) -> None:
        """Removes a box, or what is left of it, that no `Sandbox` of ours stands for; no error when there is none. Raises
        `EngineUnavailable`."""

    async def aclose(self) -> None: ...
