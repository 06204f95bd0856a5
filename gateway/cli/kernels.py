"""`cellgate kernels`: see what runs in a gateway, and stop it."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from gateway.cli.connect import StateOption, TokenOption, UrlOption, running_gateway

app = typer.Typer(help="List and stop the kernels of a running gateway.", no_args_is_help=True)

WIDE = 240
"""Columns when the table goes into a file or a pipe, which has no width of its own."""


@app.command("list")
def list_(
    url: UrlOption = "",
    token: TokenOption = "",
    state_dir: StateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documents of the API.")] = False,
) -> None:
    """List the kernels."""
    with running_gateway(url, token, state_dir) as client:
        found = [kernel.document for kernel in client.kernels.list()]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif not found:
        typer.echo("No kernel runs.")
    else:
        _print_table(found)


@app.command()
def stop(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Kernels to stop.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all of them.")] = False,
    url: UrlOption = "",
    token: TokenOption = "",
    state_dir: StateOption = None,
) -> None:
    """Stop kernels. Their variables and files are gone then."""
    from gateway.cli.failures import report
    from gateway.client import ClientError

    if every == bool(ids):
        raise typer.BadParameter("Name the kernels to stop, or give --all.")
    failed = False
    with running_gateway(url, token, state_dir) as client:
        kernels = client.kernels.list() if every else None
        for kernel_id in [kernel.id for kernel in kernels] if kernels is not None else ids or []:
            try:
                client.kernels.get(kernel_id).delete()
                typer.echo(f"stopped {kernel_id}")
            except ClientError as error:
                report(error)
                failed = True
    if failed:
        raise typer.Exit(1)


def _print_table(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gateway.notebook.terminal import clean

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "state", "cells", "queue", "memory", "active", "label"):
        table.add_column(name, no_wrap=name != "label", justify="right" if name in ("cells", "queue", "memory") else "left")
    for kernel in found:
        limits = kernel.get("limits") or {}
        row = (
            kernel.get("id"),
            kernel.get("state"),
            kernel.get("execution_count"),
            kernel.get("queue_length"),
            _size(limits.get("memory")),
            _age(kernel.get("last_activity")),
            kernel.get("label"),
        )
        table.add_row(*(Text("" if value is None else clean(str(value))) for value in row))
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def _size(value: Any) -> str:
    return f"{value / 2**30:.1f} GiB" if isinstance(value, int | float) else str(value or "")


def _age(value: Any) -> str:
    """How long ago an RFC 3339 time was."""
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(str(value))).total_seconds())
    except ValueError:
        return ""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{max(seconds, 0)} s ago"
