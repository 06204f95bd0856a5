"""Shows a notebook run: its cells with their outputs, and below them a progress bar where a terminal can hold one."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gateway.console.outputs import OutputPrinter
from gateway.notebook.execution import CellRun
from gateway.notebook.figures import Figures
from gateway.notebook.terminal import clean
from gateway.protocol.events import Event

REFRESH = 8
"""Redraws a second."""


class RunView:
    """The listener of a `NotebookRun`. A context manager: the live display lives inside it."""

    def __init__(self, console: Console, figures: Figures) -> None:
        self._console = console
        self._figures = figures
        self._printer = OutputPrinter(console)
        self._spinner = Spinner("dots", style="cyan")
        self._run: CellRun | None = None
        self._started = self._cell_started = time.monotonic()
        self._done = 0
        animated = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(self, console=console, refresh_per_second=REFRESH, transient=True) if animated else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._printer.flush()
        if self._live:
            self._live.stop()

    def cell_started(self, run: CellRun) -> None:
        self._run, self._cell_started = run, time.monotonic()
        self._printer.reset()
        self._console.print(Text(f"[{run.number}/{run.total}] {clean(run.title)}", "bold"), soft_wrap=True)

    def cell_event(self, run: CellRun, event: Event) -> None:
        self._printer.show(event, self._figures.save(run.number, run.collector.outputs, event))

    def cell_ended(self, run: CellRun, ended: Event) -> None:
        self._printer.flush()
        self._figures.update(run.number, run.collector.finish())
        self._done = run.number

    def note(self, text: str) -> None:
        """A word of the program itself among the outputs."""
        self._console.print(Text(text, "yellow"), soft_wrap=True)

    def __rich__(self) -> RenderableType:
        lines = [Text.from_ansi(line[-500:], overflow="ellipsis", no_wrap=True) for line in self._printer.pending]
        if self._run is None:
            return Group(*lines)
        now = time.monotonic()
        row = Table.grid(padding=(0, 1))
        row.add_row(
            self._spinner,
            Text(f"cell {self._run.number}/{self._run.total}"),
            ProgressBar(total=self._run.total, completed=self._done, width=24),
            Text(f"{_clock(now - self._started)}"),
            Text(
                f"({_clock(now - self._cell_started)}) {clean(self._run.title)}",
                "dim",
                overflow="ellipsis",
                no_wrap=True,
            ),
        )
        return Group(*lines[-5:], row)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
