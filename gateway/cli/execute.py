"""`cellgate exec`: one piece of code in a kernel, its outputs in this terminal."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.connect import (
    ConfigOption,
    CpusOption,
    Interrupts,
    MemoryOption,
    SpecOption,
    TokenOption,
    UrlOption,
    any_gateway,
    cleaned_up,
    leave_on_signals,
    limits,
    running_gateway,
)

if TYPE_CHECKING:
    from gateway.client import Event, Kernel


def execute(
    code: Annotated[str, typer.Argument(help="The code; - reads it from standard input.", show_default=False)] = "",
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the code from a file.")] = None,
    kernel_id: Annotated[
        str,
        typer.Option("--kernel", metavar="ID", help="Use this kernel and keep it; else a new one is made and deleted."),
    ] = "",
    upload: Annotated[list[Path] | None, typer.Option(metavar="PATH", help="Copy a file into the work directory.")] = None,
    download: Annotated[list[str] | None, typer.Option(metavar="PATH", help="Copy a file from there at the end.")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Save figures there.")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long the code may run.")] = None,
    spec: SpecOption = None,
    memory: MemoryOption = "",
    cpus: CpusOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Result as JSON.")] = False,
    url: UrlOption = "",
    token: TokenOption = "",
    config: ConfigOption = None,
) -> None:
    """Run code and print what it puts out. Exit code 1 when it fails.

    Without --url or CELLGATE_URL a private gateway is started for the time of the call.
    """
    leave_on_signals()
    source = _source(code, file)
    wanted = {"spec": spec, "limits": limits(memory, cpus), "label": "cellgate exec"}
    with _kernel(kernel_id, wanted, url, token, config) as kernel, cleaned_up():
        for path in upload or []:
            kernel.files.upload(path)
        with Interrupts(kernel) as interrupts:
            if as_json:
                result = kernel.execute(source, timeout=timeout)
                typer.echo(json.dumps(asdict(result), indent=2, default=list))
                status = result.status
            else:
                status = _print_stream(kernel, interrupts, source, timeout, figures)
        for name in download or []:
            kernel.files.download(name, Path.cwd())
    if interrupts.happened:
        raise typer.Exit(130)
    if status != "ok":
        raise typer.Exit(1)


def _source(code: str, file: Path | None) -> str:
    if bool(code) == bool(file):
        raise typer.BadParameter("Give the code as an argument, as - for standard input, or as --file FILE.")
    if file:
        return file.read_text(encoding="utf-8")
    return sys.stdin.read() if code == "-" else code


@contextmanager
def _kernel(kernel_id: str, wanted: dict[str, Any], url: str, token: str, config: Path | None) -> "Iterator[Kernel]":
    """The named kernel of a running gateway, which stays; or a new one, which goes."""
    if kernel_id:
        with running_gateway(url, token) as client:
            yield client.kernels.get(kernel_id)
        return
    with any_gateway(url, token, config) as client, client.kernels.create(**wanted) as kernel:
        yield kernel


def _print_stream(kernel: "Kernel", interrupts: Interrupts, source: str, timeout: float | None, directory: Path | None) -> str:
    """Prints the outputs as they come; returns the status of the end."""
    from rich.console import Console
    from rich.text import Text

    from gateway.console.outputs import OutputPrinter
    from gateway.notebook.execution import END_NAMES, end_message
    from gateway.notebook.figures import Figures
    from gateway.notebook.terminal import clean
    from gateway.protocol.outputs import OutputCollector

    err = Console(stderr=True)
    printer, collector, figures = OutputPrinter(Console(), err), OutputCollector(), Figures("exec", directory)
    asks = sys.stdin.isatty()
    status = ""
    for event in kernel.stream(source, timeout=timeout, allow_stdin=asks or None):
        collector.add(event)
        if event.type == "input_request":
            printer.flush()
            value = interrupts.ask(partial(_ask, event))
            if value is not None and event.execution_id:
                kernel.answer(event.execution_id, value)
        elif event.type == "ended":
            printer.flush()
            status = event.members["status"]
            if status in END_NAMES:
                err.print(Text(clean(end_message(event)), "red"), soft_wrap=True)
        else:
            printer.show(event, figures.save(1, collector.outputs, event))
    return status


def _ask(event: "Event") -> str:
    """Ask the user what the cell's `input()` or `getpass()` asks."""
    import getpass

    from gateway.notebook.terminal import clean

    prompt = clean(event.members.get("prompt", ""))
    return getpass.getpass(prompt) if event.members.get("password") else input(prompt)
