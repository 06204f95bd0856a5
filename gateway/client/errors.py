"""What a client may meet: the gateway said no, the gateway can't be reached, or it broke off.

These are not in the tree of `gateway.errors`: that tree is what the gateway may say, this one is what a program that
talks to it has to handle. An exception of a cell is in neither; it is a `Result`.
"""

from typing import Any


class ClientError(Exception):
    """Root of all that the client raises."""


class ApiError(ClientError):
    """The gateway refused or failed a request; the fields are those of its problem document."""

    def __init__(self, *, code: str, status: int, title: str, detail: str, retryable: bool, members: dict[str, Any]) -> None:
        super().__init__(f"{detail or title} [{code}]")
        self.code = code
        self.status = status
        self.title = title
        self.detail = detail
        self.retryable = retryable
        self.members = members


class GatewayUnreachable(ClientError):
    """No gateway answers at this URL."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"No answer from {url} ({reason}). Is a gateway running there? `cellgate serve` starts one; "
            "give another address with --url, CELLGATE_URL or Client(url=...)."
        )
        self.url = url
        self.reason = reason


class ConnectionLost(ClientError):
    """The connection ended before the answer did, and could not be taken up again.

    What was asked for may have been done: the cell may still run, and its Result can be asked for. `forgotten`: the gateway
    that answers by now can't tell of the execution.
    """

    def __init__(self, url: str, reason: str, execution_id: str | None = None, *, forgotten: bool = False) -> None:
        text = f"The connection to {url} ended before the answer was complete"
        if forgotten:
            text += f", and the gateway that answers now can't tell of execution {execution_id!r}: {reason}"
        else:
            text += f" ({reason})."
            text += f" `kernel.result({execution_id!r})` tells how it went on." if execution_id else ""
        super().__init__(text)
        self.url = url
        self.reason = reason
        self.execution_id = execution_id
        self.forgotten = forgotten


class NotAGateway(ClientError):
    """Something answers at this URL, but not with what a gateway says."""

    def __init__(self, url: str, what: str) -> None:
        super().__init__(f"{url} answers, but not as a gateway does ({what}). Check the address and any proxy before it.")
        self.url = url


def is_gone(error: ClientError) -> bool:
    """Whether what was to be deleted is not there any more, as after a cull: that is no failure."""
    return isinstance(error, ApiError) and error.status in (404, 410)
