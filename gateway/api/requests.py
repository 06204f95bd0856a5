"""From a face's request to what the kernels are asked: limits, idempotency and preferences are the same for every face."""

import hashlib
import json
import re
from typing import Annotated

from fastapi import Header
from pydantic import BaseModel

from gateway.api.schemas import CellBody, Key
from gateway.api.views import ExecutionView
from gateway.errors import BodyTooLarge, LimitExceeded, NotWaitingForInput
from gateway.kernels.execution import CellRequest, Execution
from gateway.kernels.kernel import Kernel

IdempotencyKey = Annotated[
    Key | None, Header(alias="Idempotency-Key", description="The same key gives the same answer: the request is safe to repeat")
]
REPLAYED = {"Idempotency-Replayed": "true"}
_HOW_IT_IS_READ = {"detach", "on_disconnect", "op", "request_id", "idempotency_key"}
_PREFERENCE = re.compile(r'(?:[^,"]|"(?:\\.|[^"\\])*"?)+')


def fingerprint(body: BaseModel) -> str:
    """SHA-256 of what a body asks for, in hexadecimal: alike whether a default was said or left out, and however a value was spelt."""
    # Left out rather than filled in: a member that a later version adds does not change it.
    content = body.model_dump(mode="json", exclude_defaults=True, exclude=_HOW_IT_IS_READ)
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def prefers_async(headers: list[str]) -> bool:
    """Whether the Prefer headers of a request ask for `respond-async` (RFC 7240 section 4.1)."""
    preferences = (item for header in headers for item in _PREFERENCE.findall(header))
    return any(item.partition(";")[0].partition("=")[0].strip().lower() == "respond-async" for item in preferences)


async def submit(kernel: Kernel, body: CellBody, key: str | None, *, may_ask: bool) -> tuple[ExecutionView, bool]:
    """Checks a request against the kernel's limits and queues it; the execution, and whether it was there already under this key.

    Raises `LimitExceeded`, `BodyTooLarge` and what `Kernel.submit` raises.
    """
    spec = kernel.request.spec
    timeout = spec.cell_timeout if body.timeout is None else body.timeout
    if timeout > spec.cell_timeout_maximum:
        raise LimitExceeded(
            f"timeout {timeout:g} s is above the maximum of {spec.cell_timeout_maximum:g} s.",
            limit="timeout",
            maximum=spec.cell_timeout_maximum,
        )
    max_code = kernel.settings.kernels.max_code
    if len(body.code.encode("utf-8", "replace")) > max_code:
        raise BodyTooLarge(
            f"The cell is longer than {max_code} bytes. Upload data as a file and read it from the cell.",
            limit=max_code,
        )
    request = CellRequest(
        code=body.code,
        timeout=timeout,
        silent=body.silent,
        store_history=body.store_history,
        stop_on_error=body.stop_on_error,
        allow_stdin=may_ask if body.allow_stdin is None else body.allow_stdin,
    )
    return await kernel.submit(request, key, None if key is None else fingerprint(body))


async def answer(kernel: Kernel, execution: ExecutionView, value: str) -> None:
    """Answers an execution's question; raises `NotWaitingForInput`, `StoreUnavailable`."""
    if not isinstance(execution, Execution):
        raise NotWaitingForInput("This execution has ended.", kernel_id=kernel.id)
    await kernel.answer(execution, value)


async def cancel(kernel: Kernel, execution: ExecutionView) -> None:
    """Cancels an execution; one that has ended stays as it is."""
    if isinstance(execution, Execution):
        await kernel.cancel(execution)
