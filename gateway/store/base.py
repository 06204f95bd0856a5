"""The seam between the kernels and whatever keeps their records: plain rows, a list of changes, and one small Protocol.

A store knows nothing of kernels: documents are JSON bytes whose meaning is the writer's. All changes of one `commit` take effect
together or not at all, and commits take effect in the order in which they were begun; that is what lets a gateway that was killed
go on exactly where its last commit was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel that has a record. Times are seconds since the epoch."""

    id: str
    created_at: float
    document: bytes
    key: str | None = None
    """The idempotency key of its create; unique among the kernels of one owner."""
    fingerprint: str | None = None
    """Of the create's body: another one under the same key is a conflict."""
    received: int = 0
    """Number of the last link frame whose effects are all stored."""
    sent: int = 0
    """Number of the last link frame that was given out."""


@dataclass(frozen=True, slots=True)
class ExecutionRow:
    id: str
    kernel_id: str
    number: int
    """Order within the kernel, from 1."""
    created_at: float
    document: bytes
    key: str | None = None
    """Idempotency key; unique within the kernel."""
    fingerprint: str | None = None
    msg_id: str | None = None
    ended_at: float | None = None
    size: int = 0
    """Bytes of output, for the retention by size."""
    request: bytes = b""
    """What was asked for; never changes."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Events `first` to `last` of one log, one JSON document a line, each line ended by a newline."""

    first: int
    last: int
    lines: bytes


@dataclass(frozen=True, slots=True)
class LargeValue:
    """A value of a MIME bundle that is kept beside its event: `seq` and `media` say where it belongs."""

    seq: int
    media: str
    data: bytes
    """JSON of the value, as it would stand in the event."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    kernel_id: str
    ended_at: float
    document: bytes


# changes


@dataclass(frozen=True, slots=True)
class PutKernel:
    """Inserts or replaces the kernel's row."""

    row: KernelRow


@dataclass(frozen=True, slots=True)
class PutPosition:
    """How far a kernel's link has come."""

    kernel_id: str
    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class AddFrame:
    """A frame that the kernel's supervisor must get."""

    kernel_id: str
    seq: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class DropFrames:
    """The supervisor has the frames up to and with `seq`."""

    kernel_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class PutExecution:
    """Inserts or replaces the execution's row. Its kernel, number and key stay what they were."""

    row: ExecutionRow


@dataclass(frozen=True, slots=True)
class UpdateExecution:
    """Replaces what changes of an execution that has a row already."""

    id: str
    document: bytes
    msg_id: str | None
    ended_at: float | None
    size: int


@dataclass(frozen=True, slots=True)
class AddEvents:
    """`log` is the id of an execution, or of a kernel for its own events."""

    log: str
    chunk: Chunk
    large: tuple[LargeValue, ...] = ()


@dataclass(frozen=True, slots=True)
class DropEvents:
    """Forgets whole chunks of `log` that end before event `before`, and their large values."""

    log: str
    before: int


@dataclass(frozen=True, slots=True)
class AddHeld:
    """Outputs numbered `first` to `last` that wait for the end of their execution; `lines` is the writer's own."""

    execution_id: str
    first: int
    last: int
    lines: bytes


@dataclass(frozen=True, slots=True)
class DropHeld:
    """Forgets held chunks that end before number `before`."""

    execution_id: str
    before: int


@dataclass(frozen=True, slots=True)
class EndKernel:
    """Deletes the kernel's row, its frames and its own events, and puts its tombstone; its executions stay until they are
    purged."""

    stone: Tombstone


Change = (
    PutKernel
    | PutPosition
    | AddFrame
    | DropFrames
    | PutExecution
    | UpdateExecution
    | AddEvents
    | DropEvents
    | AddHeld
    | DropHeld
    | EndKernel
)


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept of ended executions and of tombstones: seconds, bytes of everything, and number of tombstones."""

    keep: float
    max_size: int
    keep_tombstones: float
    max_tombstones: int


class Store(Protocol):
    """Raises `StoreUnavailable` from every method when it can't do its work at the moment (disk full, read-only, damaged), and
    `StoreFenced` from `commit` once another gateway has opened it."""

    durable: bool
    """Whether anything is left of it after the process."""
    epoch: int
    """Counts how often it was opened by a gateway, from 1; set by `open`."""

    async def open(self) -> None:
        """Makes or migrates what is needed and begins a new epoch; raises `ConfigurationError` when that can't be done."""

    async def commit(self, changes: Sequence[Change]) -> None:
        """All of them or none. Once it returns they survive the death of this process. ValueError for a change that contradicts
        what is stored: a number, key or chunk that is taken."""

    async def kernels(self) -> list[KernelRow]: ...

    async def frames(self, kernel_id: str) -> list[tuple[int, bytes]]:
        """Frames not known to have arrived, by number."""

    async def unfinished(self, kernel_id: str) -> list[ExecutionRow]:
        """Executions that have not ended, by number."""

    async def executions(self, kernel_id: str, before: int | None, limit: int) -> list[ExecutionRow]:
        """Newest first; with `before`, those whose number is below it."""

    async def execution(self, kernel_id: str, execution_id: str) -> ExecutionRow | None: ...
    async def execution_of_key(self, kernel_id: str, key: str) -> ExecutionRow | None: ...

    async def messages(self, kernel_id: str, limit: int) -> list[tuple[str, str]]:
        """`(msg_id, execution id)` of the newest executions that have a msg_id, oldest first."""

    async def last_event(self, log: str) -> int:
        """Number of the last event of a log; 0 when it has none."""

    async def events(self, log: str, after: int, max_bytes: int) -> list[Chunk]:
        """The chunks that hold the events above `after`, in order; at least one if there are any, then as many as fit."""

    async def large_values(self, log: str, first: int, last: int) -> list[LargeValue]: ...
    async def held(self, execution_id: str) -> list[bytes]:
        """The `lines` of the held chunks, in order."""

    async def tombstones(self) -> list[Tombstone]:
        """Oldest first."""

    async def purge(self, retention: Retention, now: float) -> int:
        """Forgets ended executions with all that is theirs, and tombstones, that are too old or too much; oldest first. Does a
        bounded piece of work a call; the number of executions and tombstones removed (0: nothing to do)."""

    async def size(self) -> int:
        """Bytes that it takes, with its write-ahead log."""

    async def check(self) -> None:
        """Writes something, to find out whether it works again; raises `StoreUnavailable`."""

    async def aclose(self) -> None: ...
