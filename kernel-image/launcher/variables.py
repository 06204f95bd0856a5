"""Names the largest variables on the control channel, while a cell runs: for a warning before memory is used up.

None of the user's code is run for it: sizes are taken only of types whose `__sizeof__` and attributes are known to be Python's,
NumPy's, pandas', polars' or Arrow's own. What can't be measured that way is left out.
"""

import sys
from collections.abc import Iterable
from itertools import islice
from types import ModuleType
from typing import Any

REQUEST, REPLY = "cellgate_variables_request", "cellgate_variables_reply"

_SAMPLE = 50
_CONTAINERS = (list, tuple, set, frozenset)
_PLAIN = (bytes, bytearray, str, int, float, complex, bool, type(None))
_IGNORED = {"In", "Out", "exit", "quit", "get_ipython"}


def largest(namespace: dict[str, Any], most: int) -> list[dict[str, Any]]:
    """`name`, `type` and `size` (bytes, estimated for containers) of the largest variables."""
    rows = []
    # A copy in one step: the cell goes on while this runs.
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in _IGNORED or isinstance(value, ModuleType):
            continue
        size = _size(value)
        if size:
            rows.append({"name": name, "type": type(value).__name__, "size": size})
    rows.sort(key=lambda row: -row["size"])
    return rows[:most]


def _size(value: Any) -> int:
    kind = type(value)
    if kind in _PLAIN:
        return sys.getsizeof(value)
    if kind in _CONTAINERS:
        return sys.getsizeof(value) + _sampled(value, len(value))
    if kind is dict:
        return sys.getsizeof(value) + _sampled(list(islice(value.values(), _SAMPLE)), len(value))
    measure = _MEASURES.get((kind.__module__.partition(".")[0], kind.__name__))
    try:
        return int(measure(value)) if measure else 0
    except Exception:  # noqa: BLE001 - A value that is being changed by the cell at this moment.
        return 0


def _sampled(values: Iterable[Any], count: int) -> int:
    """What the elements of a container take, judged by some of them; nested containers count with their own size alone."""
    try:
        sample = list(islice(values, _SAMPLE))
    except RuntimeError:  # The cell has changed it meanwhile.
        return 0
    known = [sys.getsizeof(item) for item in sample if type(item) in (*_PLAIN, *_CONTAINERS, dict)]
    return sum(known) * count // len(sample) if sample else 0


_MEASURES = {
    ("numpy", "ndarray"): lambda array: array.nbytes,
    ("pandas", "DataFrame"): lambda frame: frame.memory_usage(index=True, deep=False).sum(),
    ("pandas", "Series"): lambda series: series.memory_usage(index=True, deep=False),
    ("polars", "DataFrame"): lambda frame: frame.estimated_size(),
    ("polars", "Series"): lambda series: series.estimated_size(),
    ("pyarrow", "Table"): lambda table: table.nbytes,
}


def install(kernel: Any) -> None:
    """Answers `REQUEST` on the kernel's control channel, which has a thread of its own."""

    async def answer(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        most = parent["content"].get("most", 5)
        content = {"status": "ok", "variables": largest(kernel.shell.user_ns, most)}
        kernel.session.send(stream, REPLY, content, parent, ident=ident)

    kernel.control_handlers[REQUEST] = answer
