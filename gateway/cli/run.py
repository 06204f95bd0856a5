"""`cellgate run`: a notebook from top to bottom in a kernel of its own, and what it made as files."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    reconnect_note,
)

if TYPE_CHECKING:
    from nbformat import NotebookNode
    from rich.console import Console

    from gateway.client import Client, Kernel
    from gateway.console.progress import RunView
    from gateway.notebook.execution import NotebookRun, Outcome
    from gateway.notebook.figures import Figures


def run(
    notebook: Annotated[Path, typer.Argument(help="The notebook.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Executed notebook.",
            show_default="NAME.executed.ipynb",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also as one self-contained HTML file.")] = None,
    figures: FiguresOption = None,
    param: Annotated[
        list[str] | None, typer.Option("-p", "--param", metavar="NAME=VALUE", help="Set a parameter. Repeatable.")
    ] = None,
    upload: UploadOption = None,
    download: DownloadOption = None,
    timeout: TimeoutOption = None,
    allow_errors: Annotated[bool, typer.Option("--allow-errors", help="Go on after a cell that raises.")] = False,
    spec: SpecOption = None,
    memory: MemoryOption = "",
    cpus: CpusOption = None,
    url: UrlOption = "",
    token: TokenOption = "",
    config: ConfigOption = None,
) -> None:
    """Run a notebook and write it with its outputs. Exit code 1 when a cell fails; what came until then is written.

    Without --url or CELLGATE_URL a private gateway is started for the time of the run.
    """
    from rich.console import Console
    from rich.text import Text

    from gateway.notebook import document, parameters
    from gateway.notebook import html as page
    from gateway.notebook.execution import NotebookRun

    leave_on_signals()
    console = Console(highlight=False)
    loaded = document.read(notebook)
    if param:
        for note in parameters.inject(loaded, parameters.parse(param)):
            console.print(Text(note, "yellow"), soft_wrap=True)
    for path in upload or []:
        if not path.exists():
            raise document.NotebookError(f"There is nothing to upload at {path}.")
    if html:
        page.require()
    files = OutputFiles(output or notebook.with_name(f"{notebook.stem}.executed.ipynb"), html, notebook.stem, figures)
    wanted = {"spec": spec, "limits": limits(memory, cpus), "label": notebook.name}
    with any_gateway(url, token, config) as client, _started(client, loaded, wanted, console) as kernel, cleaned_up():
        for path in upload or []:
            kernel.files.upload(path)
        code = _follow(NotebookRun(loaded, timeout=timeout, allow_errors=allow_errors), client, kernel, files, console)
        for name in download or []:
            kernel.files.download(name, Path.cwd())
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """Where the results of a run go."""

    notebook: Path
    html: Path | None
    stem: str
    figures: Path | None


def _started(client: "Client", notebook: "NotebookNode", wanted: dict[str, Any], console: "Console") -> "Kernel":
    """A kernel of the wanted spec, of the notebook's own when the gateway has it, else of the default one."""
    from gateway.notebook import document

    name = document.spec_name(notebook)
    if not wanted["spec"] and name in {found.get("name") for found in client.kernelspecs()["kernelspecs"]}:
        wanted = wanted | {"spec": name}
    with console.status("Starting a kernel"):
        return client.kernels.create(**wanted)


def _follow(run: "NotebookRun", client: "Client", kernel: "Kernel", files: OutputFiles, console: "Console") -> int:
    """Run, show and write; returns the exit code. Whatever ends the run, what came until then is written."""
    from rich.text import Text

    from gateway.cli.failures import report
    from gateway.client import ClientError
    from gateway.console.progress import RunView
    from gateway.notebook.figures import Figures

    figures = Figures(files.stem, files.figures)
    started = time.monotonic()
    code, message = 1, ""
    try:
        view = RunView(console, figures)
        with _told_by(view, client), view, Interrupts(kernel, lambda: _interrupt(run, view)):
            outcome = run.execute(kernel, view)
        code, message = _verdict(outcome, time.monotonic() - started)
    except ClientError as error:
        report(error)
    except KeyboardInterrupt:
        code, message = 130, "Interrupted."
    finally:
        _write(run, files, figures)
    console.print(Text(message, "green" if code == 0 else "red"), soft_wrap=True)
    written = [str(path) for path in (files.notebook, files.html) if path]
    if figures.paths:
        count = len(figures.paths)
        written.append(f"{count} figure{'s' if count > 1 else ''} in {files.figures}")
    console.print(Text(f"Written: {', '.join(written)}"), soft_wrap=True)
    return code


@contextmanager
def _told_by(view: "RunView", client: "Client") -> Iterator[None]:
    """A lost connection is told among the outputs, where it does not disturb the live display."""
    before = client.contact.on_reconnect
    client.contact.on_reconnect = lambda error: view.note(reconnect_note(error))
    try:
        yield
    finally:
        client.contact.on_reconnect = before


def _interrupt(run: "NotebookRun", view: "RunView") -> None:
    run.interrupted = True
    view.note("Interrupting the cell; Ctrl-C again gives up at once.")


def _verdict(outcome: "Outcome", seconds: float) -> tuple[int, str]:
    """Exit code and closing line. The message may be an exception's own text: hostile, and of any length."""
    from gateway.notebook.terminal import clean

    if outcome.status == "ok":
        return 0, f"{outcome.total} cells in {seconds:.1f} s."
    place = f"cell {outcome.number} of {outcome.total}"
    if outcome.status == "interrupted":
        return 130, f"Interrupted in {place}."
    message = clean(outcome.message).strip().partition("\n")[0]
    return 1, f"Stopped at {place}: {message[:500]}"


def _write(run: "NotebookRun", files: OutputFiles, figures: "Figures") -> None:
    """The notebook first: the rest is made from it and can be made again."""
    from gateway.notebook import document
    from gateway.notebook import html as page

    document.write(run.notebook, files.notebook)
    for cell_run in run.runs:
        figures.update(cell_run.number, cell_run.collector.finish())
    if files.html:
        files.html.parent.mkdir(parents=True, exist_ok=True)
        files.html.write_text(page.export(run.notebook, files.stem), encoding="utf-8")
