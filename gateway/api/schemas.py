"""What clients may send: pydantic at the edge, plain data inside. docs/native-api.md in types."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from gateway.settings import parse_size

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_ENV_REFUSED = re.compile(r"(LD_|DYLD_|PYTHON|CELLGATE_|JPY_|IPYTHON|GLIBC_|MALLOC_)|(PATH|HOME|IFS|ENV|BASH_ENV)$")
"""Names that change what runs before the kernel is there; the rest is the kernel's own business."""


def may_be_set(name: str) -> bool:
    """Whether a client may give this variable to its kernel."""
    return bool(_ENV_NAME.fullmatch(name)) and not _ENV_REFUSED.match(name.upper())


def _checked_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not may_be_set(name):
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
Key = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[ -~]+$")]
"""An idempotency key."""


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


class CellBody(_Request):
    """A cell, and what becomes of it."""

    code: Text = Field(description="The cell", examples=["import pandas as pd\npd.Series([1, 2, 3]).sum()"])
    timeout: float | None = Field(default=None, gt=0, description="Seconds the cell may run", examples=[60])
    silent: bool = False
    store_history: bool = True
    stop_on_error: bool = Field(default=True, description="Cells queued behind end as aborted when this one fails")
    allow_stdin: bool | None = Field(default=None, description="Whether input() may ask; default: only over the WebSocket")
    on_disconnect: Literal["continue", "interrupt"] = Field(
        default="continue", description="`interrupt`: the cell is cancelled when the connection that asked for it goes away"
    )


class ExecuteRequest(CellBody):
    detach: bool = Field(default=False, description="Answer 202 at once; the execution is read later")


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
