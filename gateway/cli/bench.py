"""`cellgate bench`: what a cell and a start cost over the floor, measured on this machine in one run."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gateway.bench.measures import Series


def bench(
    cells: Annotated[int, typer.Option(min=10, max=5000, help="Cells for the round trips.")] = 300,
    starts: Annotated[int, typer.Option(min=2, max=100, help="Cold starts of each kind.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure against direct ZMQ and the bare engine, interleaved. Needs Docker and the kernel image; a minute by default."""
    from rich.console import Console

    from gateway.bench import measures

    console = Console(stderr=True)
    with console.status("starting") as status:
        groups = {
            "Round trip of 1+1": measures.round_trips(cells, status.update),
            "Create until the kernel has answered": measures.cold_starts(starts, status.update),
        }
    if as_json:
        print(json.dumps({name: [series.summary() for series in group] for name, group in groups.items()}, indent=2))
        return
    for name, group in groups.items():
        _show(name, group)


def _show(title: str, group: "list[Series]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title} (milliseconds; the first row is the floor)", title_justify="left")
    for column in ("", "n", "p50", "p95", "p99", "min", "p50 - floor", "p50 / floor"):
        table.add_column(column, justify="left" if column == "" else "right")
    floor = group[0].median
    for series in group:
        row = series.summary()
        figures = [f"{row[key]:.2f}" for key in ("p50_ms", "p95_ms", "p99_ms", "min_ms")]
        over = (f"{(series.median - floor) * 1000:+.2f}", f"{series.median / floor:.2f}")
        table.add_row(series.name, str(row["n"]), *figures, *(over if series is not group[0] else ("", "")))
    Console().print(table)
