"""Tables for a terminal or a pipe: what other clients have written in them is made harmless."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

WIDE = 240
"""Columns when the table goes into a file or a pipe, which has no width of its own."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[str] = (), wrapped: str = "") -> None:
    """`right` names the columns of numbers, `wrapped` the one whose text may take several lines. None is an empty place."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gateway.notebook.terminal import clean

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=name != wrapped, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*(Text("" if value is None else clean(str(value))) for value in row))
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def age(value: Any) -> str:
    """How long ago an RFC 3339 time was."""
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(str(value))).total_seconds())
    except ValueError:
        return ""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{max(seconds, 0)} s ago"
