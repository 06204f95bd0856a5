"""What the gateway makes of a supervisor's `gap`: the cell that it belongs to is told, or the kernel's own log; nonsense is not."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.kernels.cells import Cells
from gateway.kernels.log import EventLog
from gateway.kernels.reporter import Reporter


class Cell:
    """The part of an Execution that a gap concerns."""

    def __init__(self, msg_id: str | None) -> None:
        self.msg_id = msg_id
        self.gaps: list[tuple[int, int]] = []

    def leave_gap(self, events: int, size: int) -> None:
        self.gaps.append((events, size))


def reporter(cell: Cell | None) -> tuple[Reporter, EventLog]:
    log = EventLog(None, keep_bytes=10_000)
    return Reporter(cast(Cells, SimpleNamespace(current=cell)), log), log


def members(log: EventLog) -> list[dict[str, Any]]:
    assert {event.type for event in log.since(0)} <= {"gap"}
    return [event.members for event in log.since(0)]


def test_the_cell_is_told_of_its_gap() -> None:
    cell = Cell("m1")
    told, log = reporter(cell)
    told.gap({"event": "gap", "parent": "m1", "messages": 3, "bytes": 700})
    assert cell.gaps == [(3, 700)]
    assert members(log) == []


@pytest.mark.parametrize("cell", [Cell("another"), Cell(None), None], ids=["another cell", "not sent yet", "none"])
@pytest.mark.parametrize("parent", ["m1", "", None, 7, ["m1"]])
def test_any_other_gap_goes_to_the_log_of_the_kernel(cell: Cell | None, parent: Any) -> None:
    told, log = reporter(cell)
    told.gap({"event": "gap", "parent": parent, "messages": 3, "bytes": 700})
    assert cell is None or cell.gaps == []
    assert members(log) == [{"events": 3, "bytes": 700}]


@pytest.mark.parametrize("messages", [None, "3", 3.5, True, 0, -1, 2**53, [3]])
def test_a_gap_without_a_possible_count_is_none(messages: Any) -> None:
    cell = Cell("m1")
    told, log = reporter(cell)
    told.gap({"event": "gap", "parent": "m1", "messages": messages, "bytes": 700})
    told.gap({"event": "gap", "parent": "m2", "messages": messages, "bytes": 700})
    told.gap({})
    assert cell.gaps == []
    assert members(log) == []


@pytest.mark.parametrize("size", [None, "700", 0.5, True, -1, 2**53])
def test_a_size_that_is_none_is_zero(size: Any) -> None:
    cell = Cell("m1")
    told, _ = reporter(cell)
    told.gap({"event": "gap", "parent": "m1", "messages": 1, "bytes": size})
    assert cell.gaps == [(1, 0)]


def test_many_gaps_push_the_oldest_out_of_the_log() -> None:
    told, log = reporter(None)
    for number in range(1, 1001):
        told.gap({"event": "gap", "parent": "", "messages": number, "bytes": 1})
    assert len(members(log)) < 20
    assert members(log)[-1] == {"events": 1000, "bytes": 1}
