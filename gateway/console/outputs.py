"""Prints the events of cells as they come: text, tables, tracebacks in colour, one line for each figure.

Nothing that a cell emits is read as rich markup or reaches the terminal with control sequences. A line that is still
being written (a progress bar) is kept back in `pending`, for a live display to show, and printed once it is settled.
"""

from typing import Any

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

from gateway.notebook.figures import Figure, figures_of
from gateway.notebook.terminal import LineBuffer, clean
from gateway.protocol.events import Event

BARE = "<IPython.core.display."
"""The text form of objects that have no text form."""


class OutputPrinter:
    """Prints to `out`; what a cell writes to stderr goes to `err` when given."""

    def __init__(self, out: Console, err: Console | None = None) -> None:
        self._consoles = {"stdout": out, "stderr": err or out}
        self._out = out
        self._buffers = {name: LineBuffer() for name in self._consoles}
        self._decoders = {name: AnsiDecoder() for name in self._consoles}
        self._updated: dict[str, str] = {}

    @property
    def pending(self) -> list[str]:
        """Lines not printed yet: unfinished ones, and the present text of displays that are being updated."""
        return [line for line in [*self._updated.values(), *(b.pending for b in self._buffers.values())] if line]

    def show(self, event: Event, figures: list[Figure] | None = None) -> None:
        """Print one event. `figures` are those of a display or result, where they have been saved already."""
        members = event.members
        if event.type == "stream":
            self._stream(members["name"], members["text"])
        elif event.type in ("display", "result"):
            self.flush()
            self._bundle(members["data"], figures)
        elif event.type == "update_display":
            self._updated[members["display_id"] or ""] = bundle_text(members["data"])
        elif event.type == "error":
            self.flush()
            self._print_lines("stdout", clean("\n".join(members["traceback"])).split("\n"))
        elif note := note_text(event):
            self.flush()
            self._out.print(Text(clean(note), "yellow"), soft_wrap=True)

    def flush(self) -> None:
        """Print what is pending: other output follows, or the cell has ended."""
        for name, buffer in self._buffers.items():
            self._print_lines(name, buffer.flush())
        for text in self._updated.values():
            self._print_lines("stdout", text.split("\n"))
        self._updated.clear()

    def reset(self) -> None:
        """A new cell begins: colours left open by the last one end."""
        self.flush()
        for name in self._decoders:
            self._decoders[name] = AnsiDecoder()

    def _stream(self, name: str, text: str) -> None:
        name = name if name in self._consoles else "stdout"
        other = "stderr" if name == "stdout" else "stdout"
        self._print_lines(other, self._buffers[other].flush())
        self._print_lines(name, self._buffers[name].feed(text))

    def _bundle(self, data: dict[str, Any], figures: list[Figure] | None) -> None:
        found = figures if figures is not None else figures_of(data)
        for figure in found:
            self._out.print(Text(figure_text(figure), "cyan"), soft_wrap=True)
        if not found and (text := bundle_text(data)):
            self._print_lines("stdout", text.split("\n"))

    def _print_lines(self, name: str, lines: list[str]) -> None:
        """Many lines in one call: a live display is redrawn at each."""
        if lines:
            decoder = self._decoders[name]
            text = Text("\n").join(decoder.decode_line(line) for line in lines)
            self._consoles[name].print(text, soft_wrap=True, highlight=False)


def figure_text(figure: Figure) -> str:
    kind = figure.mime.partition("/")[2].partition("+")[0].upper()
    pixels = f"{figure.size[0]}×{figure.size[1]}" if figure.size else kind
    if figure.path is None:
        return f"[figure: {pixels} {kind}]" if figure.size else f"[figure: {kind}]"
    return f"[figure: saved as {figure.path}, {pixels}]"


def bundle_text(data: dict[str, Any]) -> str:
    """The most readable text of a MIME bundle, without control sequences other than colours."""
    if figures := figures_of(data):
        return "\n".join(map(figure_text, figures))
    plain = data.get("text/plain")
    if not isinstance(plain, str) or plain.startswith(BARE):
        sources = (data.get(mime) for mime in ("text/latex", "text/markdown"))
        plain = next((text for text in sources if isinstance(text, str)), plain)
    if isinstance(plain, str):
        return clean(plain).rstrip("\n")
    kinds = ", ".join(clean(mime).replace("\n", " ") for mime in list(data)[:5])
    return f"[{kinds}]" if kinds else ""


def note_text(event: Event) -> str:
    """What the gateway itself has to say in the middle of a cell; empty for events that need no word."""
    members = event.members
    if event.type == "truncated":
        return f"[{members.get('bytes', 0):,} bytes of output left out: past the limit of {members.get('limit')}]"
    if event.type == "gap":
        return f"[{members.get('events')} outputs are missing here]"
    if event.type == "warning":
        return f"[{members.get('code')}: {members.get('message')}]"
    if event.type == "interrupt":
        return f"[{str(members.get('step')).replace('_', ' ')}: {members.get('reason')}]"
    return ""
