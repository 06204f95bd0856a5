"""Runs the code cells of a notebook in one kernel, in order, as nbclient would, and tells a listener what happens.

The notebook is filled in as the run goes. However the run ends (a failing cell, a dead kernel, an interrupt, a lost
connection), what came until then is in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nbformat import NotebookNode

from gateway.notebook.document import RAISES_TAG, cells_to_run, clear, tags, to_nodes
from gateway.protocol.events import Event
from gateway.protocol.outputs import OutputCollector

Status = Literal["ok", "error", "timeout", "died", "aborted", "cancelled", "interrupted"]

END_NAMES = {"died": "KernelDied", "timeout": "CellTimeout", "cancelled": "CellCancelled", "aborted": "CellAborted"}
"""Ends that raise nothing inside the kernel, or nothing that tells: the notebook gets an error output of this name."""


class StreamingKernel(Protocol):
    """What a run needs of `gateway.client.Kernel`."""

    def stream(self, code: str, *, timeout: float | None = None, **options: Any) -> Iterator[Event]: ...


@dataclass(frozen=True, slots=True)
class CellRun:
    """One cell of a run. `number` counts from 1 among the `total` cells to be executed."""

    number: int
    total: int
    cell: NotebookNode
    collector: OutputCollector

    @property
    def title(self) -> str:
        """The first line of the source that says something."""
        return next((line.strip() for line in self.cell.source.splitlines() if line.strip()), "")


class Listener(Protocol):
    """Whoever shows a run."""

    def cell_started(self, run: CellRun) -> None: ...
    def cell_event(self, run: CellRun, event: Event) -> None: ...
    def cell_ended(self, run: CellRun, ended: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `number` is the cell that decided it, `message` what to say of it; `executed` counts cells."""

    status: Status
    executed: int
    total: int
    number: int = 0
    message: str = ""


class NotebookRun:
    """One run of one notebook."""

    def __init__(self, notebook: NotebookNode, *, timeout: float | None = None, allow_errors: bool = False) -> None:
        self.notebook = notebook
        self.timeout = timeout
        self.allow_errors = allow_errors
        self.interrupted = False
        """Set by whoever interrupts the kernel: the run then ends with the cell that it is in."""
        self.runs: list[CellRun] = []

    def execute(self, kernel: StreamingKernel, listener: Listener) -> Outcome:
        """Run all cells, or up to the first that fails; raises `gateway.client.ClientError`."""
        clear(self.notebook)
        cells = cells_to_run(self.notebook)
        displays: dict[str, list[dict[str, Any]]] = {}
        try:
            for number, cell in enumerate(cells, 1):
                run = CellRun(number, len(cells), cell, OutputCollector(displays))
                self.runs.append(run)
                ended = self._execute_cell(kernel, run, listener)
                if outcome := self._stops(run, ended):
                    return outcome
            return Outcome("ok", len(cells), len(cells))
        finally:
            self._fill()

    def _execute_cell(self, kernel: StreamingKernel, run: CellRun, listener: Listener) -> Event:
        listener.cell_started(run)
        run.cell.metadata["execution"] = {}
        timing: dict[str, str] = run.cell.metadata["execution"]  # the notebook's own copy of that dict
        for event in kernel.stream(run.cell.source, timeout=self.timeout, stop_on_error=not self._may_raise(run)):
            run.collector.add(event)
            _note(run, timing, event)
            if event.type == "ended":
                ended = event  # read on all the same: only an answer read to its end leaves a connection to reuse
            else:
                listener.cell_event(run, event)
        listener.cell_ended(run, ended)
        return ended

    def _may_raise(self, run: CellRun) -> bool:
        return self.allow_errors or RAISES_TAG in tags(run.cell)

    def _stops(self, run: CellRun, ended: Event) -> Outcome | None:
        status = ended.members["status"]
        if self.interrupted:
            return Outcome("interrupted", run.number, run.total, run.number, "interrupted")
        if status == "ok" or (status == "error" and self._may_raise(run)):
            return None
        return Outcome(status, run.number, run.total, run.number, _failure(run) or end_message(ended))

    def _fill(self) -> None:
        """Outputs go into the cells at the end: a later cell may still have changed what an earlier one displayed."""
        for run in self.runs:
            run.cell.outputs = to_nodes(run.collector.finish())


def _note(run: CellRun, timing: dict[str, str], event: Event) -> None:
    """Count, times (nbclient's names) and what is worth an output of its own."""
    members = event.members
    if event.type == "started":
        timing.setdefault("iopub.status.busy", event.time)
        timing["iopub.execute_input"] = event.time
    elif event.type == "truncated":
        text = f"[{members.get('bytes', 0)} bytes of output left out: past the limit of {members.get('limit')}]\n"
        run.collector.add_members("stream", {"name": "stderr", "text": text})
    elif event.type == "gap":
        text = f"[{members.get('events')} outputs are missing here]\n"
        run.collector.add_members("stream", {"name": "stderr", "text": text})
    elif event.type == "ended":
        timing["iopub.status.idle"] = timing["shell.execute_reply"] = event.time
        if name := END_NAMES.get(members["status"]):
            message = end_message(event)
            error = {"ename": name, "evalue": message, "traceback": [f"{name}: {message}"]}
            run.collector.add_members("error", error)
    if members.get("execution_count") is not None:
        run.cell.execution_count = members["execution_count"]


def _failure(run: CellRun) -> str:
    """The exception or end that the cell's last error output tells of."""
    for output in reversed(run.collector.outputs):
        if output["output_type"] == "error":
            return f"{output['ename']}: {output['evalue']}"
    return ""


def end_message(ended: Event) -> str:
    """One sentence on the end of a cell: its cause, else its status."""
    cause = ended.members.get("cause")
    message = cause.get("message") if isinstance(cause, dict) else None
    return str(message or f"the cell ended as {ended.members['status']}")
