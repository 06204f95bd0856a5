"""A budget that is stored and restored at any moment keeps the same outputs as one that never was."""

import anyio
from hypothesis import given
from hypothesis import strategies as st

from gateway.kernels.budget import OutputBudget
from gateway.protocol.events import Payload
from gateway.store.base import AddHeld, DropHeld
from tests.unit.stores import LastingStore

Output = tuple[Payload, int]


def text(size: int, number: int) -> Output:
    return Payload("stream", {"name": ("stdout", "stderr")[number % 2], "text": f"{number}," + "x" * size}), size


def shown(size: int, number: int) -> Output:
    return Payload("display", {"data": {"n": number}, "metadata": {}, "display_id": None}), size


def feed(budget: OutputBudget, step: str, size: int, number: int) -> list[Payload]:
    """What is to be told at once."""
    if step == "question":
        budget.admit_question(size)
        return []
    if step == "left out":
        budget.leave_out(size)
        return []
    payload, weight = text(size, number) if step == "text" else shown(size, number)
    return [piece for piece, own in budget.cut(payload, weight) if budget.admit(piece, own)]


steps = st.sampled_from(["text", "shown", "question", "left out", "store", "store", "die"])


@given(st.lists(st.tuples(steps, st.integers(0, 400)), max_size=60), st.integers(2, 2000), st.integers(2, 30))
def test_restored_at_any_moment_it_is_the_same(script: list[tuple[str, int]], max_bytes: int, max_events: int) -> None:
    async def play() -> None:
        store = LastingStore()
        whole, cut = OutputBudget(max_bytes, max_events), OutputBudget(max_bytes, max_events)
        state = cut.state()
        since: list[tuple[str, int, int]] = []
        for number, (step, size) in enumerate(script):
            if step == "store":
                await store.commit(cut.take_changes("e"))
                state, since = cut.state(), []
            elif step == "die":
                cut = OutputBudget(max_bytes, max_events)
                cut.restore(state, await store.held("e"))
                # What had not been stored comes again.
                for again in since:
                    feed(cut, *again)
            else:
                since.append((step, size, number))
                assert feed(cut, step, size, number) == feed(whole, step, size, number)
        assert (cut.size, cut.exceeded, cut.truncated) == (whole.size, whole.exceeded, whole.truncated)
        assert cut.rest() == whole.rest()
        await store.commit(cut.take_changes("e"))
        assert await store.held("e") == []

    anyio.run(play)


def test_what_is_held_is_stored_once_and_forgotten_when_it_has_left() -> None:
    budget = OutputBudget(200, 100)
    assert budget.take_changes("e") == []
    for number in range(2):
        feed(budget, "shown", 60, number)
    (added,) = budget.take_changes("e")
    assert isinstance(added, AddHeld)
    assert (added.execution_id, added.first, added.last) == ("e", 0, 0)
    assert budget.take_changes("e") == []
    feed(budget, "shown", 60, 2)
    added, dropped = budget.take_changes("e")
    assert isinstance(added, AddHeld)
    assert isinstance(dropped, DropHeld)
    assert (added.first, added.last, dropped.before) == (1, 1, 1)
    budget.rest()
    assert budget.take_changes("e") == [DropHeld("e", 2)]


def test_what_came_and_went_between_two_rounds_is_never_stored() -> None:
    budget = OutputBudget(200, 100)
    for number in range(1000):
        feed(budget, "shown", 60, number)
    added, dropped = budget.take_changes("e")
    assert isinstance(added, AddHeld)
    assert (added.first, added.last) == (998, 998)
    assert dropped == DropHeld("e", 998)
