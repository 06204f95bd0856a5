"""What a request asks for, told from how it is spelt and how its answer is read."""

import hashlib
from typing import Any

import pytest

from gateway.api.operations import OPERATIONS, Execute
from gateway.api.requests import fingerprint, prefers_async
from gateway.api.schemas import ExecuteRequest, KernelCreate

SAME_CELLS: list[dict[str, Any]] = [
    {"code": "1"},
    {"code": "1", "silent": False},
    {"code": "1", "timeout": None, "store_history": True},
    {"code": "1", "detach": True},
    {"code": "1", "on_disconnect": "interrupt"},
    {"allow_stdin": None, "code": "1"},
]
OTHER_CELLS: list[dict[str, Any]] = [
    {"code": "2"},
    {"code": "1 "},
    {"code": "1", "timeout": 60},
    {"code": "1", "silent": True},
    {"code": "1", "store_history": False},
    {"code": "1", "stop_on_error": False},
    {"code": "1", "allow_stdin": True},
    {"code": "1", "allow_stdin": False},
]
SAME_KERNELS: list[dict[str, Any]] = [
    {},
    {"limits": {}},
    {"spec": None, "env": {}, "label": ""},
    {"limits": {"memory": None}, "on_death": "restart"},
]
OTHER_KERNELS: list[dict[str, Any]] = [
    {"label": "a"},
    {"env": {"A": "1"}},
    {"env": {"A": "2"}},
    {"spec": "python3"},
    {"limits": {"memory": "1g"}},
    {"limits": {"cpus": 1}},
    {"lifetime": 60},
    {"idle_timeout": 60},
    {"on_death": "stay"},
]


@pytest.mark.parametrize(
    ("model", "same", "other"), [(ExecuteRequest, SAME_CELLS, OTHER_CELLS), (KernelCreate, SAME_KERNELS, OTHER_KERNELS)]
)
def test_what_is_asked_for_decides(model: type[Any], same: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len({fingerprint(model(**body)) for body in same}) == 1
    assert len({fingerprint(model(**body)) for body in [same[0], *other]}) == len(other) + 1


def test_a_size_is_the_same_however_it_is_spelt() -> None:
    spelt = [{"limits": {"memory": size}} for size in ("1g", 1024**3, "1024m", "1GiB")]
    assert len({fingerprint(KernelCreate(**body)) for body in spelt}) == 1
    assert fingerprint(ExecuteRequest(code="1", timeout=60)) == fingerprint(ExecuteRequest(code="1", timeout=60.0))
    assert fingerprint(KernelCreate(env={"A": "1", "B": "2"})) == fingerprint(KernelCreate(env={"B": "2", "A": "1"}))


def test_the_websocket_asks_for_the_same_as_http() -> None:
    operation = OPERATIONS.validate_json('{"op": "execute", "code": "1", "request_id": "r", "idempotency_key": "k"}')
    assert isinstance(operation, Execute)
    assert fingerprint(operation) == fingerprint(ExecuteRequest(code="1"))


def test_a_fingerprint_is_a_hash_and_stays_what_it_is() -> None:
    """They are stored: another version has to find the same one."""
    assert fingerprint(ExecuteRequest(code="1", detach=True)) == hashlib.sha256(b'{"code":"1"}').hexdigest()
    assert fingerprint(KernelCreate()) == hashlib.sha256(b"{}").hexdigest()
    assert fingerprint(KernelCreate(limits={"memory": 2**200})) != fingerprint(KernelCreate())


@pytest.mark.parametrize(
    "headers",
    [
        ["respond-async"],
        ["Respond-Async"],
        ["respond-async, wait=10"],
        ["wait=10, respond-async"],
        ['foo="a, b", respond-async'],
        ["handling=lenient", "respond-async; x=y"],
        [" , ,respond-async,"],
        ['respond-async=""'],
        ['a="\\"", respond-async'],
    ],
)
def test_it_prefers_an_answer_at_once(headers: list[str]) -> None:
    assert prefers_async(headers)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        ["wait=10"],
        ["respond-asynchronously"],
        ["x-respond-async"],
        ['foo="respond-async"'],
        ['foo="a, respond-async, b"'],
        ['foo="a, respond-async'],
        ["foo; respond-async"],
        ['"respond-async"'],
        ["\\" * 5000],
        ['"' * 5001],
    ],
)
def test_it_does_not_prefer_an_answer_at_once(headers: list[str]) -> None:
    assert not prefers_async(headers)
