"""`cellgate kernels`: see what runs in a gateway, and stop it."""

import json
from typing import Annotated, Any

import typer

from gateway.cli.connect import StateOption, TokenOption, UrlOption, running_gateway
from gateway.cli.tables import age, print_table

app = typer.Typer(help="List and stop the kernels of a running gateway.", no_args_is_help=True)


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
    columns = ("id", "state", "cells", "queue", "memory", "active", "label")
    print_table(columns, map(_row, found), right=("cells", "queue", "memory"), wrapped="label")


def _row(kernel: dict[str, Any]) -> tuple[Any, ...]:
    limits = kernel.get("limits") or {}
    return (
        kernel.get("id"),
        kernel.get("state"),
        kernel.get("execution_count"),
        kernel.get("queue_length"),
        _size(limits.get("memory")),
        age(kernel.get("last_activity")),
        kernel.get("label"),
    )


def _size(value: Any) -> str:
    return f"{value / 2**30:.1f} GiB" if isinstance(value, int | float) else str(value or "")
