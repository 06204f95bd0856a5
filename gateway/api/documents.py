"""What clients get, in types: docs/native-api.md."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.kernels.kernel import Kernel
from gateway.kernels.log import rfc3339
from gateway.protocol.events import EndStatus, EventType
from gateway.settings import KernelSpecSettings


class LimitsDocument(BaseModel):
    memory: int = Field(description="Bytes")
    cpus: float
    pids: int


class CellTimeout(BaseModel):
    default: float = Field(description="Seconds")
    maximum: float = Field(description="Seconds")


class UsageDocument(BaseModel):
    cpu_seconds: float = Field(description="Of all processes of the sandbox")
    memory_used: int = Field(description="Bytes at the end of the last cell")
    memory_peak: int
    output_bytes: int
    executions: int


class KernelDocument(BaseModel):
    id: str
    spec: str
    label: str
    state: Literal["requested", "starting", "recovering", "idle", "busy", "interrupting", "restarting", "stopping", "dead"]
    created_at: str
    last_activity: str
    expires_at: str
    execution_count: int
    queue_length: int
    limits: LimitsDocument
    cell_timeout: CellTimeout
    idle_timeout: float = Field(description="Seconds without a request after which it is culled; 0: never")
    connections: int = Field(description="Open WebSockets")
    frozen: bool = Field(description="It gets no CPU until the next request")
    usage: UsageDocument
    work_dir: str
    cause: dict[str, Any] | None = Field(description="Why it is dead: code, message and facts; null while it lives")

    @classmethod
    def of(cls, kernel: Kernel) -> "KernelDocument":
        spec, limits = kernel.request.spec, kernel.request.limits
        return cls(
            id=kernel.id,
            spec=kernel.request.spec_name,
            label=kernel.request.label,
            state=kernel.state.value,
            created_at=rfc3339(kernel.created),
            last_activity=kernel.last_activity,
            expires_at=rfc3339(kernel.expires_at.timestamp()),
            execution_count=kernel.cells.execution_count,
            queue_length=kernel.cells.queue_length,
            limits=LimitsDocument(memory=limits.memory, cpus=limits.cpus, pids=limits.pids),
            cell_timeout=CellTimeout(default=spec.cell_timeout, maximum=spec.cell_timeout_maximum),
            idle_timeout=kernel.request.idle_timeout,
            connections=kernel.connections,
            frozen=kernel.frozen,
            usage=UsageDocument(**kernel.usage()),
            work_dir="/work",
            cause=kernel.cause,
        )


class KernelList(BaseModel):
    kernels: list[KernelDocument]


class KernelSpecDocument(BaseModel):
    name: str
    display_name: str
    language: str
    limits: LimitsDocument
    maximum: LimitsDocument
    cell_timeout: CellTimeout
    lifetime: float = Field(description="Seconds")

    @classmethod
    def of(cls, name: str, spec: KernelSpecSettings) -> "KernelSpecDocument":
        return cls(
            name=name,
            display_name=spec.display_name,
            language=spec.language,
            limits=LimitsDocument(**spec.limits.model_dump()),
            maximum=LimitsDocument(**spec.maximum.model_dump()),
            cell_timeout=CellTimeout(default=spec.cell_timeout, maximum=spec.cell_timeout_maximum),
            lifetime=spec.lifetime,
        )


class KernelSpecList(BaseModel):
    default: str
    kernelspecs: list[KernelSpecDocument]


class Interrupted(BaseModel):
    execution_id: str | None = Field(description="The cell that was interrupted; null when none ran")


class EventDocument(BaseModel):
    """One event; further members depend on `type` (see docs/native-api.md)."""

    model_config = ConfigDict(extra="allow")
    seq: int = Field(ge=1)
    type: EventType
    time: str
    execution_id: str | None


class ResultDocument(BaseModel):
    execution_id: str
    kernel_id: str
    status: EndStatus | Literal["queued", "running"]
    cause: dict[str, Any] | None
    execution_count: int | None
    outputs: list[dict[str, Any]] = Field(description="nbformat 4 outputs")
    truncated: dict[str, int] | None = Field(description="Bytes and events left out past the output limit")
    warnings: list[dict[str, Any]] = Field(description="Members of the warning events: code, message and facts")
    kernel_state: str | None
    variables: Literal["kept", "lost"] | None
    duration: float | None = Field(description="Seconds in the kernel")
    usage: dict[str, Any] | None = Field(description="wall_seconds, cpu_seconds, memory_peak, output_bytes")
    gap: dict[str, Any] | None = Field(description="Sums of the gap events; null when nothing was left out")
    last_seq: int = Field(description="Number of the last event in it")


class SummaryDocument(BaseModel):
    execution_id: str
    number: int = Field(description="Order within the kernel, from 1")
    status: EndStatus | Literal["queued", "running"]
    cause: dict[str, Any] | None
    execution_count: int | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    code: str = Field(description="Its first 200 characters")
    last_seq: int = Field(description="Number of its last event")
    output_bytes: int


class SummaryPage(BaseModel):
    executions: list[SummaryDocument] = Field(description="Newest first")
    next: int | None = Field(description="The `before` of the next page; null on the last one")


class EventPage(BaseModel):
    events: list[EventDocument]
    last_seq: int = Field(description="Number of the last event there is")
    complete: bool = Field(description="Nothing will come after the last event of this page")


class FileEntry(BaseModel):
    path: str
    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    modified: float = Field(description="Seconds since the epoch")


class FileListing(BaseModel):
    path: str
    entries: list[FileEntry]
    complete: bool = Field(description="False when the directory holds more entries than are listed")


class FileWritten(BaseModel):
    path: str
    size: int | None = Field(description="Bytes; null for an unpacked archive")


class Problem(BaseModel):
    """RFC 9457 problem document."""

    model_config = ConfigDict(extra="allow")
    type: str
    title: str
    status: int
    code: str
    detail: str
    retryable: bool
