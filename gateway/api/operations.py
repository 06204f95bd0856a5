"""What clients may say over the native WebSocket, in types. Vocabulary: docs/native-api.md."""

from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gateway.api.schemas import CellBody, Key, Text
from gateway.api.streams import Large

RequestId = str | int | None
After = Annotated[int, Field(ge=0, lt=2**63)]


class _Operation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    request_id: Text | Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(default=None, union_mode="left_to_right")


class Execute(_Operation, CellBody):
    op: Literal["execute"]
    idempotency_key: Key | None = None


class Follow(_Operation):
    op: Literal["follow"]
    execution_id: str
    after: After = 0
    large: Large = "inline"


class Input(_Operation):
    op: Literal["input"]
    execution_id: str
    value: Text = Field(max_length=1_000_000)


class Cancel(_Operation):
    op: Literal["cancel"]
    execution_id: str


class Simple(_Operation):
    op: Literal["interrupt", "restart", "ping"]


Operation = Execute | Follow | Input | Cancel | Simple
OPERATIONS: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="op")])
AFTER: TypeAdapter[int] = TypeAdapter(After)


def request_id_of(frame: str | bytes) -> RequestId:
    """The request_id of a frame that is otherwise wrong, so that its sender can tell which one was refused."""
    try:
        value = orjson.loads(frame)
    except orjson.JSONDecodeError:
        return None
    found = value.get("request_id") if isinstance(value, dict) else None
    return found if isinstance(found, str | int) else None
