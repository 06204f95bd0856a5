"""`cellgate exec`: one piece of code in a kernel, its outputs in this terminal."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.connect import (
    ConfigOption,
    CpusOption,
    DownloadOption,
    FiguresOption,
    Interrupts,
    MemoryOption,
    SpecOption,
    TimeoutOption,
    TokenOption,
    UploadOption,
    UrlOption,
    any_gateway,
    cleaned_up,
    leave_on_signals,
    limits,
    running_gateway,
)
from gateway.cli.printing import print_events

if TYPE_CHECKING:
    from gateway.client import Event, Kernel


def execute(
    code: Annotated[str, typer.Argument(help="The code; - reads it from standard input.", show_default=False)] = "",
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the code from a file.")] = None,
    kernel_id: Annotated[
        str,
        typer.Option("--kernel", metavar="ID", help="Use this kernel and keep it; else a new one is made and deleted."),
    ] = "",
    detach: Annotated[
        bool, typer.Option("--detach", help="Wait for nothing: print the id of the execution; a new kernel is kept.")
    ] = False,
    upload: UploadOption = None,
    download: DownloadOption = None,
    figures: FiguresOption = None,
    timeout: TimeoutOption = None,
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

    With --kernel or --detach it is the running one that this machine's configuration describes.
    """
    leave_on_signals()
    source = _source(code, file)
    wanted = {"spec": spec, "limits": limits(memory, cpus), "label": "cellgate exec"}
    if detach:
        if download or figures:
            raise typer.BadParameter("--detach does not wait for anything to --download or for --figures.")
        with _kept_kernel(kernel_id, wanted, url, token) as kernel:
            _submit(kernel, source, timeout, upload or [], as_json)
        return
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


@contextmanager
def _kept_kernel(kernel_id: str, wanted: dict[str, Any], url: str, token: str) -> "Iterator[Kernel]":
    """A kernel of a running gateway that stays; a new one goes only when what it was made for fails."""
    with running_gateway(url, token) as client, ExitStack() as stack:
        if kernel_id:
            yield client.kernels.get(kernel_id)
            return
        yield stack.enter_context(client.kernels.create(**wanted))
        stack.pop_all()


def _submit(kernel: "Kernel", source: str, timeout: float | None, upload: list[Path], as_json: bool) -> None:
    """The id goes to stdout, for scripts; how to go on from there to stderr."""
    for path in upload:
        kernel.files.upload(path)
    execution_id = kernel.submit(source, timeout=timeout)
    if as_json:
        typer.echo(json.dumps({"kernel_id": kernel.id, "execution_id": execution_id}))
        return
    typer.echo(execution_id)
    typer.echo(f"Follow it: cellgate follow {shlex.quote(kernel.id)} {shlex.quote(execution_id)}", err=True)


def _print_stream(kernel: "Kernel", interrupts: Interrupts, source: str, timeout: float | None, directory: Path | None) -> str:
    """Runs the code and prints what it puts out; returns the status of the end."""

    def answer(event: "Event") -> None:
        value = interrupts.ask(partial(_ask, event))
        if value is not None and event.execution_id:
            kernel.answer(event.execution_id, value)

    asks = sys.stdin.isatty()
    return print_events(kernel.stream(source, timeout=timeout, allow_stdin=asks or None), directory, answer)


def _ask(event: "Event") -> str:
    """Ask the user what the cell's `input()` or `getpass()` asks."""
    import getpass

    from gateway.notebook.terminal import clean

    prompt = clean(event.members.get("prompt", ""))
    return getpass.getpass(prompt) if event.members.get("password") else input(prompt)
