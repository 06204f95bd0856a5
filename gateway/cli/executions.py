"""`cellgate executions` and `cellgate follow`: what has run in a kernel, and what one of it puts out or has put out."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.connect import FiguresOption, StateOption, TokenOption, UrlOption, leave_on_signals, running_gateway
from gateway.cli.printing import print_events
from gateway.cli.tables import age, print_table

if TYPE_CHECKING:
    from gateway.client import Client, Kernel

KernelArgument = Annotated[str, typer.Argument(metavar="KERNEL", help="Id of the kernel.", show_default=False)]


def follow(
    kernel_id: KernelArgument,
    execution_id: Annotated[str, typer.Argument(metavar="EXECUTION", help="Id of the execution.", show_default=False)],
    after: Annotated[int, typer.Option(metavar="SEQ", min=0, help="Begin after the event of this number.")] = 0,
    figures: FiguresOption = None,
    url: UrlOption = "",
    token: TokenOption = "",
    state_dir: StateOption = None,
) -> None:
    """Print what an execution puts out, from its beginning and up to its end. Exit code 1 when it fails.

    Ctrl-C ends the following and leaves the cell alone.
    """
    leave_on_signals()
    with running_gateway(url, token, state_dir) as client:
        try:
            status = print_events(_kernel(client, kernel_id).events(execution_id, after), figures)
        except KeyboardInterrupt:
            typer.echo("Not followed any more; the cell itself is left as it is.", err=True)
            raise typer.Exit(130) from None
    if status != "ok":
        raise typer.Exit(1)


def executions(
    kernel_id: KernelArgument,
    limit: Annotated[int, typer.Option(metavar="COUNT", min=1, help="How many.")] = 50,
    before: Annotated[int | None, typer.Option(metavar="NUMBER", help="Only those before this number.")] = None,
    url: UrlOption = "",
    token: TokenOption = "",
    state_dir: StateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documents of the API.")] = False,
) -> None:
    """List what was executed in a kernel, newest first."""
    with running_gateway(url, token, state_dir) as client:
        found = _kernel(client, kernel_id).executions(limit, before)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif not found:
        typer.echo("Nothing was executed.")
    else:
        columns = ("number", "id", "status", "cell", "asked for", "events", "code")
        print_table(columns, map(_row, found), right=("number", "cell", "events"))


def _kernel(client: "Client", kernel_id: str) -> "Kernel":
    """Without asking for it: executions can be read for longer than a kernel lives."""
    from gateway.client import Kernel

    return Kernel(client, {"id": kernel_id})


def _row(summary: dict[str, Any]) -> tuple[Any, ...]:
    cause = summary.get("cause")
    code = cause.get("code") if isinstance(cause, dict) else None
    status = summary.get("status")
    return (
        summary.get("number"),
        summary.get("execution_id"),
        f"{status} ({code})" if code and code != status else status,
        summary.get("execution_count"),
        age(summary.get("created_at")),
        summary.get("last_seq"),
        next((line.strip() for line in str(summary.get("code") or "").splitlines() if line.strip()), ""),
    )
