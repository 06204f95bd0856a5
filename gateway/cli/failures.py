"""Failures that a user can do something about are told in a line or two, never as a traceback."""

from rich.console import Console
from rich.text import Text

from gateway.client.errors import ApiError, ClientError
from gateway.errors import GatewayError
from gateway.notebook.document import NotebookError
from gateway.notebook.html import HTMLError
from gateway.notebook.terminal import clean


def expected() -> tuple[type[Exception], ...]:
    return (GatewayError, ClientError, NotebookError, HTMLError, OSError)


def report(error: Exception) -> None:
    """Red text on stderr, with the code that docs/errors.md explains."""
    console = Console(stderr=True)
    console.print(Text(f"error: {text(error)}", "red"), soft_wrap=True)
    if isinstance(error, ApiError) and isinstance(log := error.members.get("log"), list | str):
        lines = log.splitlines() if isinstance(log, str) else [str(line) for line in log]
        for line in lines[-20:]:
            console.print(Text(f"  {clean(line)}", "dim"), soft_wrap=True)


def text(error: Exception) -> str:
    if isinstance(error, GatewayError):
        return clean(f"{error.detail} [{error.code}]")
    return clean(str(error) or type(error).__name__)
