"""Runs the fault matrix; with CELLGATE_FAULT_MATRIX=PATH the page is written there when all of it has been run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import cells, outside
from tests.faults.matrix import Canary, Fault, Row, write
from tests.support import Gateway, running

FAULTS = [*cells.FAULTS, *outside.FAULTS]


@pytest.fixture(scope="module")
def faulty() -> Iterator[Gateway]:
    """A gateway whose ladder has short steps and whose output limit can be met."""
    limits = {"interrupt_grace": 1.0, "max_output": 20_000_000}
    with running(kernels=limits) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def canary(faulty: Gateway) -> Iterator[Canary]:
    with faulty.kernel() as kernel:
        kernel.value("1+1")
        yield Canary(kernel)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    found: list[Row] = []
    yield found
    path = os.environ.get("CELLGATE_FAULT_MATRIX")
    if path and len(found) == len(FAULTS):
        write(found, Path(path))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.id} {fault.title}")
def test_fault(fault: Fault, faulty: Gateway, canary: Canary, rows: list[Row]) -> None:
    song = Canary(canary.kernel)
    with song.singing():
        outcome = fault.do(faulty)
    assert song.misses == []
    rows.append(Row(fault, outcome, len(song.times), song.p99))


def test_ids_are_unique() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
