"""The table of a kernel's states, edge by edge: what is allowed is allowed, and everything else raises."""

from itertools import product

import pytest

from gateway.kernels.state import ACCEPTS_CELLS, ALIVE, ALLOWED, IllegalTransition, KernelState, check

EDGES = {
    ("requested", "starting"),
    ("requested", "recovering"),
    ("requested", "stopping"),
    ("requested", "dead"),
    ("starting", "idle"),
    ("starting", "stopping"),
    ("starting", "dead"),
    ("recovering", "idle"),
    ("recovering", "busy"),
    ("recovering", "restarting"),
    ("recovering", "stopping"),
    ("recovering", "dead"),
    ("idle", "busy"),
    ("idle", "restarting"),
    ("idle", "stopping"),
    ("idle", "dead"),
    ("busy", "idle"),
    ("busy", "interrupting"),
    ("busy", "restarting"),
    ("busy", "stopping"),
    ("busy", "dead"),
    ("interrupting", "idle"),
    ("interrupting", "busy"),
    ("interrupting", "restarting"),
    ("interrupting", "stopping"),
    ("interrupting", "dead"),
    ("restarting", "idle"),
    ("restarting", "stopping"),
    ("restarting", "dead"),
    ("stopping", "dead"),
    ("dead", "restarting"),
    ("dead", "stopping"),
}
"""Written out a second time, so that an edge can't come or go by accident."""
PAIRS = list(product(KernelState, KernelState))


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair in EDGES], ids=str)
def test_an_edge_of_the_table_is_allowed(old: KernelState, new: KernelState) -> None:
    check(old, new)
    assert new in ALLOWED[old]


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair not in EDGES], ids=str)
def test_every_other_change_raises(old: KernelState, new: KernelState) -> None:
    with pytest.raises(IllegalTransition, match=f"{old} -> {new}"):
        check(old, new)


def test_every_state_has_its_row_and_is_reached() -> None:
    assert set(ALLOWED) == set(KernelState)
    assert set().union(*ALLOWED.values()) == set(KernelState) - {KernelState.REQUESTED}


def test_cells_are_taken_by_living_kernels_and_by_those_that_are_taken_up_again() -> None:
    assert set(ALIVE) == {KernelState.IDLE, KernelState.BUSY, KernelState.INTERRUPTING}
    assert ALIVE | {KernelState.RECOVERING} == ACCEPTS_CELLS


def test_from_every_state_a_kernel_can_be_stopped() -> None:
    for state in KernelState:
        assert state is KernelState.STOPPING or KernelState.STOPPING in ALLOWED[state]
