"""From a face's execute request to an execution: the kernel's limits are applied here, for every face alike."""

from gateway.api.schemas import ExecuteRequest
from gateway.errors import BodyTooLarge, LimitExceeded
from gateway.kernels.execution import CellRequest, Execution
from gateway.kernels.kernel import Kernel


def submit(kernel: Kernel, body: ExecuteRequest, *, may_ask: bool) -> Execution:
    """Checks a request against the kernel's limits and queues it; raises `LimitExceeded` and what `Kernel.execute` raises."""
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
    return kernel.execute(
        CellRequest(
            code=body.code,
            timeout=timeout,
            silent=body.silent,
            store_history=body.store_history,
            stop_on_error=body.stop_on_error,
            allow_stdin=may_ask if body.allow_stdin is None else body.allow_stdin,
        )
    )
