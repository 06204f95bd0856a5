"""What clients may send and what they get: pydantic at the edge, plain data inside. docs/native-api.md in types."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from gateway.kernels.kernel import Kernel
from gateway.protocol.events import EndStatus, EventType
from gateway.settings import KernelSpecSettings, parse_size

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_ENV_REFUSED = re.compile(r"(LD_|DYLD_|PYTHON|CELLGATE_|JPY_|IPYTHON|GLIBC_|MALLOC_)|(PATH|HOME|IFS|ENV|BASH_ENV)$")
"""Names that change what runs before the kernel is there; the rest is the kernel's own business."""


def _checked_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name) or _ENV_REFUSED.match(name.upper()):
            raise ValueError(f"the variable {name[:40]!r} may not be set")
        if "\0" in value:
            raise ValueError(f"the value of {name} contains NUL")
    return env


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text and has no place in a message to a kernel."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has a lone surrogate") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LimitsRequest(_Request):
    """Each within the spec's maximum."""

    memory: Annotated[int, BeforeValidator(parse_size)] | None = Field(
        default=None,
        description="Bytes, or a number with k, m or g",
        examples=["1g", 536870912],
        json_schema_extra={"type": ["string", "integer"]},
    )
    cpus: float | None = Field(default=None, gt=0, description="Cores", examples=[1.0])
    pids: int | None = Field(default=None, ge=1, description="Processes and threads", examples=[128])


class KernelCreate(_Request):
    spec: str | None = Field(default=None, max_length=128, description="Name of a kernel spec; the default one if absent")
    limits: LimitsRequest = LimitsRequest()
    env: Annotated[dict[str, Annotated[Text, Field(max_length=8192)]], Field(max_length=64), AfterValidator(_checked_env)] = {}
    label: Text = Field(default="", max_length=200, description="For people; no meaning to the gateway")
    idle_timeout: float | None = Field(default=None, ge=0, description="Seconds without a request after which it is culled")
    lifetime: float | None = Field(default=None, gt=0, description="Seconds after which it ends in any case")
    on_death: Literal["restart", "stay"] = Field(
        default="restart", description="Whether the next cell brings a dead kernel back in a fresh process"
    )


class ExecuteRequest(_Request):
    code: Text = Field(description="The cell", examples=["import pandas as pd\npd.Series([1, 2, 3]).sum()"])
    timeout: float | None = Field(default=None, gt=0, description="Seconds the cell may run", examples=[60])
    silent: bool = False
    store_history: bool = True
    stop_on_error: bool = Field(default=True, description="Cells queued behind end as aborted when this one fails")
    allow_stdin: bool | None = Field(default=None, description="Whether input() may ask; default: only over the WebSocket")


class InterruptRequest(_Request):
    up_to: Literal["interrupt", "interrupt_again", "kill_kernel", "kill_sandbox"] = Field(
        default="kill_sandbox", description="The hardest step that may be taken when the cell does not stop"
    )


class KeepAlive(_Request):
    lifetime: float | None = Field(
        default=None, gt=0, description="Seconds from now that the kernel may live on", examples=[3600]
    )


class InputAnswer(_Request):
    value: Text = Field(max_length=1_000_000, description="The line that input() returns", examples=["yes"])


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
    state: Literal["requested", "starting", "idle", "busy", "interrupting", "restarting", "stopping", "dead"]
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
            created_at=_time(kernel.created_at),
            last_activity=kernel.last_activity,
            expires_at=_time(kernel.expires_at),
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


def _time(value: Any) -> str:
    text: str = value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return text
