"""The events of one cell as they come, in this terminal: for `exec` and `follow`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.client import Event


def print_events(events: "Iterator[Event]", directory: Path | None, answer: "Callable[[Event], None] | None" = None) -> str:
    """Prints the outputs as they come; returns the status of the end. `answer` sees to what the cell asks of its user.

    Without it a question is shown like an output: somebody else may answer it.
    """
    from rich.console import Console
    from rich.text import Text

    from gateway.console.outputs import OutputPrinter
    from gateway.notebook.execution import END_NAMES, end_message
    from gateway.notebook.figures import Figures
    from gateway.notebook.terminal import clean
    from gateway.protocol.outputs import OutputCollector

    err = Console(stderr=True)
    printer, collector, figures = OutputPrinter(Console(), err), OutputCollector(), Figures("exec", directory)
    status = ""
    for event in events:
        collector.add(event)
        if event.type == "input_request":
            printer.flush()
            if answer:
                answer(event)
            else:
                err.print(Text(clean(f"[asks for input: {event.members.get('prompt', '')}]"), "yellow"), soft_wrap=True)
        elif event.type == "ended":
            printer.flush()
            status = event.members["status"]
            if status in END_NAMES:
                err.print(Text(clean(end_message(event)), "red"), soft_wrap=True)
        else:
            printer.show(event, figures.save(1, collector.outputs, event))
    return status
