"""`cellgate serve`: the gateway in the foreground, with what a first user needs to call it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.connect import ConfigOption, StateOption

if TYPE_CHECKING:
    from rich.console import Console

    from gateway.api.auth import LoadedToken


STANDBY_WAIT = 10 * 365 * 86_400.0
"""Seconds that a gateway on standby waits for its turn: as long as it takes."""


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.", show_default="8890")] = None,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    spec_image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Image of the default kernel spec.")] = None,
    max_kernels: Annotated[int | None, typer.Option(help="Kernels that may run at once.", show_default="32")] = None,
    on_shutdown: Annotated[
        str | None,
        typer.Option(help="What becomes of kernels at the end: detach or stop.", show_default="detach"),
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait for the gateway on the same state directory to end, then take over.")
    ] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.", show_default="console")] = None,
) -> None:
    """Start the gateway; it runs until it is stopped with Ctrl-C or SIGTERM."""
    from rich.console import Console
    from rich.text import Text

    from gateway import app, settings
    from gateway.api.auth import load_token

    overrides = _overrides(
        state_dir=state_dir,
        log_level=log_level,
        log_format=log_format,
        server=_overrides(host=host, port=port, on_shutdown=on_shutdown),
        store=_overrides(lock_wait=STANDBY_WAIT if standby else None),
        kernels=_overrides(max_kernels=max_kernels),
    )
    if spec_image:
        name = settings.load(config, **overrides).kernels.default_spec
        overrides.setdefault("kernels", {})["specs"] = {name: {"image": spec_image}}
    found = settings.load(config, **overrides)
    token = load_token(found)
    console = Console(stderr=True, highlight=False)
    if standby:
        console.print(Text(f"On standby for {found.state_dir}."), soft_wrap=True)
    app.serve(found, on_ready=lambda url: welcome(console, url, token))


def _overrides(**given: Any) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value not in (None, {})}


def welcome(console: "Console", url: str, token: "LoadedToken") -> None:
    from rich.text import Text

    console.print(Text.assemble("Cellgate listens at ", (url, "bold")), soft_wrap=True)
    if token.path is None:
        console.print("The token is the configured one.")
    elif token.created:
        console.print(Text(f"A token was made, shown only now: {token.value}"), soft_wrap=True)
        console.print(Text(f"It is kept in {token.path}."), soft_wrap=True)
    else:
        console.print(Text(f"The token is in {token.path}."), soft_wrap=True)
    console.print("Try it from another terminal:")
    console.print(Text(f"\n{curl_line(url, token.path)}\n"), soft_wrap=True)


def curl_line(url: str, token_path: Path | None) -> str:
    """A line for a shell that starts a kernel and runs a cell in it; the token itself is not in it."""
    token = f'"$(cat {shlex.quote(str(token_path))})"' if token_path else '"$CELLGATE_TOKEN"'
    return (
        f'T={token}; K={url}/v1/kernels; ID=$(curl -sX POST -H "Authorization: Bearer $T" $K'
        """ | sed 's/.*"id": *"\\([^"]*\\)".*/\\1/'); """
        'curl -sN -H "Authorization: Bearer $T" -H "Accept: application/x-ndjson" -H "Content-Type: application/json" '
        """-d '{"code": "6 * 7"}' $K/$ID/execute"""
    )
