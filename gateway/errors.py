"""The one tree of errors that may reach a client.

Each class carries what every face needs to report it: a stable ``code``, an HTTP ``status``, a WebSocket ``ws_close`` code
and whether the same request may succeed later (``retryable``). The class docstring is the title. The message says what
happened, why, and what to do. Faces turn an error into their own format (`gateway.api.problems`); nothing else is ever shown.
"""

from typing import Any, ClassVar


class GatewayError(Exception):
    """Something went wrong in the gateway"""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    ws_close: ClassVar[int] = 1011
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, **members: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.members = members

    @property
    def title(self) -> str:
        return (type(self).__doc__ or "").strip().splitlines()[0]


class Unauthorized(GatewayError):
    """A valid token is needed"""

    code, status, ws_close = "unauthorized", 401, 4401


class ForbiddenOrigin(GatewayError):
    """This Host or Origin may not speak to the gateway"""

    code, status, ws_close = "forbidden_origin", 403, 4403


class InvalidRequest(GatewayError):
    """The request can't be understood"""

    code, status, ws_close = "invalid_request", 422, 4400


class MalformedBody(GatewayError):
    """The body is not what its Content-Type says"""

    code, status, ws_close = "malformed_body", 400, 4400


class UnsupportedMediaType(GatewayError):
    """The body has a Content-Type that this route does not take"""

    code, status, ws_close = "unsupported_media_type", 415, 4400


class BodyTooLarge(GatewayError):
    """The body is larger than the limit"""

    code, status, ws_close = "body_too_large", 413, 1009


class LimitExceeded(GatewayError):
    """A value is above what the operator allows"""

    code, status, ws_close = "limit_exceeded", 422, 4400


class NotFound(GatewayError):
    """No such route"""

    code, status, ws_close = "not_found", 404, 4404


class MethodNotAllowed(GatewayError):
    """This route does not take this method"""

    code, status, ws_close = "method_not_allowed", 405, 4400


class SpecNotFound(NotFound):
    """No such kernel spec"""

    code = "spec_not_found"


class KernelNotFound(NotFound):
    """No such kernel"""

    code = "kernel_not_found"


class KernelGone(GatewayError):
    """The kernel has ended"""

    code, status, ws_close = "kernel_gone", 410, 4410


class KernelIdTaken(GatewayError):
    """The id belongs to a kernel that has ended"""

    code, status, ws_close = "kernel_id_taken", 409, 4409


class SessionNotFound(NotFound):
    """No such session"""

    code = "session_not_found"


class ExecutionNotFound(NotFound):
    """No such execution"""

    code = "execution_not_found"


class DataNotFound(NotFound):
    """The event has no such value"""

    code = "data_not_found"


class FileMissing(NotFound):
    """No such file in the kernel's work directory"""

    code = "file_not_found"


class InvalidPath(InvalidRequest):
    """The path is not a plain path inside the work directory"""

    code = "invalid_path"


class NotAFile(GatewayError):
    """The path names something that can't be read or written as a file"""

    code, status, ws_close = "not_a_file", 409, 4409


class SandboxDiskFull(GatewayError):
    """The sandbox has no room left"""

    code, status, ws_close = "sandbox_disk_full", 507, 4507


class KernelDead(GatewayError):
    """The kernel is dead"""

    code, status, ws_close = "kernel_dead", 409, 4409


class KernelUnavailable(GatewayError):
    """The kernel can't take requests in its present state"""

    code, status, ws_close, retryable = "kernel_unavailable", 409, 4409, True


class NotWaitingForInput(GatewayError):
    """The execution is not waiting for input"""

    code, status, ws_close = "not_waiting_for_input", 409, 4409


class QueueFull(GatewayError):
    """The kernel's queue is full"""

    code, status, ws_close, retryable = "queue_full", 429, 4429, True


class TooManyKernels(GatewayError):
    """The gateway runs as many kernels as it may"""

    code, status, ws_close, retryable = "too_many_kernels", 429, 4429, True


class NoCapacity(GatewayError):
    """The machine has no room for another kernel"""

    code, status, ws_close, retryable = "no_capacity", 503, 4503, True


class StartFailed(GatewayError):
    """The kernel did not start"""

    code, status, ws_close, retryable = "start_failed", 502, 4502, True


class StartTimeout(GatewayError):
    """The kernel did not answer in time"""

    code, status, ws_close, retryable = "start_timeout", 504, 4504, True


class SandboxTimeout(GatewayError):
    """The sandbox did not answer in time"""

    code, status, ws_close, retryable = "sandbox_timeout", 504, 4504, True


class LinkClosed(GatewayError):
    """The sandbox is gone"""

    code, status, ws_close = "sandbox_gone", 409, 4409


class EngineUnavailable(GatewayError):
    """The sandbox engine does not answer"""

    code, status, ws_close, retryable = "engine_unavailable", 503, 4503, True


class ImageMissing(GatewayError):
    """The image of this kernel spec is not on the engine"""

    code, status, ws_close = "image_missing", 503, 4503


class ShuttingDown(GatewayError):
    """The gateway is stopping"""

    code, status, ws_close, retryable = "shutting_down", 503, 1001, True


class StoreUnavailable(GatewayError):
    """What happens can't be recorded at the moment"""

    code, status, ws_close, retryable = "store_unavailable", 503, 4503, True


class StoreFenced(GatewayError):
    """Another gateway has taken over this state directory"""

    code, status, ws_close, retryable = "store_fenced", 503, 1012, True


class IdempotencyConflict(GatewayError):
    """The idempotency key was used for another request"""

    code, status, ws_close = "idempotency_conflict", 409, 4409


class ConfigurationError(GatewayError):
    """The gateway can't start with this configuration"""

    code = "configuration_error"


def all_errors() -> list[type[GatewayError]]:
    """Every class of the tree, root first: the docs page and the tests are made from it."""
    found: list[type[GatewayError]] = []
    pending: list[type[GatewayError]] = [GatewayError]
    while pending:
        current = pending.pop(0)
        found.append(current)
        pending.extend(current.__subclasses__())
    return found
