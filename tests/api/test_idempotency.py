"""One key, one effect: however often, however parallel and by whichever way a request is sent."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from gateway.testing import Sleep, printed, result
from gateway.testing.kernel import Cell
from tests.api.scripted import RawRequest, ScriptedGateway, scripted, wait_for_status
from tests.support import Kernel, problem, sse_events

CELLS: dict[str, Cell] = {
    **{f"cell {number}": [printed(f"{number}\n"), result(str(number))] for number in range(100)},
    "forever": [printed("begun\n"), Sleep(math.inf)],
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    # Little is kept in memory, so that much is found in the store.
    with scripted(
        CELLS, kernels={"max_kept_output": 1, "max_kernels": 4, "specs": {"python3": {}, "ghost": {"image": "ghost"}}}
    ) as started:
        yield started


@pytest.fixture
def kernel(gateway: ScriptedGateway) -> Iterator[Kernel]:
    with gateway.kernel() as started:
        yield started


def post(kernel: Kernel, key: str, code: str = "cell 1", accept: str = "application/json", **fields: Any) -> httpx2.Response:
    headers = {"Idempotency-Key": key, "Accept": accept}
    return kernel.http.post(f"{kernel.path}/execute", json={"code": code, **fields}, headers=headers)


def test_the_same_key_gives_the_same_result(gateway: ScriptedGateway, kernel: Kernel) -> None:
    first = post(kernel, "k")
    assert "idempotency-replayed" not in first.headers
    for _ in range(3):
        again = post(kernel, "k")
        assert (again.status_code, again.headers["idempotency-replayed"]) == (200, "true")
        assert again.json() == first.json()
    other = post(kernel, "another")
    assert other.json()["execution_id"] != first.json()["execution_id"]
    assert kernel.execute("cell 1")["execution_id"] != first.json()["execution_id"]
    assert gateway.codes(kernel) == ["cell 1"] * 3


def test_a_key_is_known_after_its_execution_has_left_the_memory(gateway: ScriptedGateway, kernel: Kernel) -> None:
    first = post(kernel, "old").json()
    for number in range(70):
        kernel.execute(f"cell {number}")
    again = post(kernel, "old")
    assert (again.json(), again.headers["idempotency-replayed"]) == (first, "true")
    problem(post(kernel, "old", "cell 2"), 409, "idempotency_conflict")
    assert len(gateway.codes(kernel)) == 71


def test_every_way_of_reading_gets_the_same_execution(gateway: ScriptedGateway, kernel: Kernel) -> None:
    execution = post(kernel, "k").json()["execution_id"]
    lines = post(kernel, "k", accept="application/x-ndjson")
    events = [json.loads(line) for line in lines.iter_lines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert {event["execution_id"] for event in events} == {execution}
    streamed = post(kernel, "k", accept="text/event-stream")
    assert sse_events(streamed.text) == events
    detached = post(kernel, "k", detach=True)
    assert (detached.status_code, detached.json()["status"]) == (202, "ok")
    assert all(answer.headers["idempotency-replayed"] == "true" for answer in (lines, streamed, detached))
    with kernel.socket() as socket:
        socket.send("execute", code="cell 1", idempotency_key="k", request_id="r")
        accepted = socket.until_type("accepted", "r")
        assert (accepted["execution_id"], accepted["replayed"]) == (execution, True)
        socket.until_type("ended", "r")
        assert [
            {k: v for k, v in event.items() if k != "request_id"} for event in socket.seen if event.get("request_id") == "r"
        ][1:] == events
        socket.send("execute", code="cell 1", idempotency_key="new", request_id="n")
        assert "replayed" not in socket.until_type("accepted", "n")
        socket.send("execute", code="cell 2", idempotency_key="k", request_id="c")
        assert socket.until_type("refused", "c")["problem"]["code"] == "idempotency_conflict"
    assert post(kernel, "new").headers["idempotency-replayed"] == "true"
    assert gateway.codes(kernel) == ["cell 1", "cell 1"]


@pytest.mark.parametrize(
    "fields",
    [{"code": "cell 2"}, {"timeout": 5}, {"silent": True}, {"store_history": False}, {"stop_on_error": False}],
    ids=str,
)
def test_another_body_under_the_same_key_is_a_conflict(
    gateway: ScriptedGateway, kernel: Kernel, fields: dict[str, Any]
) -> None:
    execution = post(kernel, "k").json()["execution_id"]
    document = problem(post(kernel, "k", **fields), 409, "idempotency_conflict")
    assert document["retryable"] is False
    assert document["kernel_id"] == kernel.id
    assert gateway.codes(kernel) == ["cell 1"]
    assert post(kernel, "k").json()["execution_id"] == execution


def test_how_an_answer_is_read_is_no_part_of_what_is_asked(kernel: Kernel) -> None:
    execution = post(kernel, "k", on_disconnect="interrupt").json()["execution_id"]
    for fields in ({"detach": True}, {"on_disconnect": "continue"}, {"silent": False}, {"timeout": None}):
        assert post(kernel, "k", **fields).json()["execution_id"] == execution


def test_many_at_once_are_one(gateway: ScriptedGateway, kernel: Kernel) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: post(kernel, "k"), range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert sorted("idempotency-replayed" in answer.headers for answer in answers) == [False] + [True] * 19
    assert gateway.codes(kernel) == ["cell 1"]


def test_many_keys_at_once_are_as_many_cells(gateway: ScriptedGateway, kernel: Kernel) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda number: post(kernel, str(number % 10), f"cell {number % 10}"), range(60)))
    assert len({answer.json()["execution_id"] for answer in answers}) == 10
    assert sorted(gateway.codes(kernel)) == sorted(f"cell {number}" for number in range(10))


def test_a_cell_that_runs_is_joined(gateway: ScriptedGateway, kernel: Kernel) -> None:
    gone = RawRequest(gateway, f"{kernel.path}/execute", {"code": "forever"}, Idempotency_Key="k")
    execution = wait_for_status(kernel, "running")
    gone.leave()
    detached = post(kernel, "k", "forever", detach=True)
    assert (detached.json()["execution_id"], detached.json()["status"]) == (execution, "running")
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(post, kernel, "k", "forever")
        kernel.http.delete(f"{kernel.path}/executions/{execution}")
        assert joined.result().json()["status"] == "cancelled"
    assert gateway.codes(kernel) == ["forever"]


def test_what_was_refused_has_no_key(kernel: Kernel) -> None:
    problem(post(kernel, "k", timeout=1e9), 422, "limit_exceeded")
    problem(post(kernel, "k", silent="perhaps"), 422, "invalid_request")
    assert "idempotency-replayed" not in post(kernel, "k").headers


def test_keys_of_one_kernel_are_none_of_another(gateway: ScriptedGateway, kernel: Kernel) -> None:
    first = post(kernel, "k")
    with gateway.kernel() as other:
        second = post(other, "k", "cell 2")
        assert "idempotency-replayed" not in second.headers
        assert second.json()["kernel_id"] != first.json()["kernel_id"]


KEYS = ["k", "x" * 255, "a b", '"quoted"', "{}:;,=~!", "0"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_any_printable_text(kernel: Kernel, key: str) -> None:
    assert post(kernel, key).status_code == 200
    assert post(kernel, key).headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "é", "✓"])
def test_a_key_that_is_none_is_refused(gateway: ScriptedGateway, kernel: Kernel, key: str) -> None:
    headers = [(b"Idempotency-Key", key.encode())]
    problem(kernel.http.post(f"{kernel.path}/execute", json={"code": "cell 1"}, headers=headers), 422, "invalid_request")
    problem(gateway.http.post("/v1/kernels", json={}, headers=headers), 422, "invalid_request")
    with kernel.socket() as socket:
        socket.send("execute", code="cell 1", idempotency_key=key, request_id="r")
        assert socket.until_type("refused", "r")["problem"]["code"] == "invalid_request"
    assert gateway.codes(kernel) == []


# creates


def create(gateway: ScriptedGateway, key: str, **body: Any) -> httpx2.Response:
    return gateway.http.post("/v1/kernels", json=body, headers={"Idempotency-Key": key})


def test_a_create_is_repeated_safely(gateway: ScriptedGateway) -> None:
    before = gateway.engine.created
    first = create(gateway, "c", label="a", limits={"memory": "1g"})
    kernel = Kernel(gateway, first.json()["id"])
    try:
        assert (first.status_code, "idempotency-replayed" in first.headers) == (201, False)
        for memory in ("1g", 1024**3, "1024m"):
            again = create(gateway, "c", label="a", limits={"memory": memory})
            assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
            assert again.json()["id"] == kernel.id
            assert again.headers["location"] == kernel.path
        problem(create(gateway, "c", label="b", limits={"memory": "1g"}), 409, "idempotency_conflict")
        assert gateway.engine.created == before + 1
    finally:
        kernel.delete()
    # It is remembered as long as the kernel is.
    problem(create(gateway, "c", label="a", limits={"memory": "1g"}), 410, "kernel_gone")


def test_many_creates_at_once_are_one_kernel(gateway: ScriptedGateway) -> None:
    before = gateway.engine.created
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: create(gateway, "many"), range(20)))
    assert {answer.status_code for answer in answers} == {201}
    kernels = {answer.json()["id"] for answer in answers}
    assert len(kernels) == 1
    assert gateway.engine.created == before + 1
    assert sorted("idempotency-replayed" in answer.headers for answer in answers) == [False] + [True] * 19
    Kernel(gateway, kernels.pop()).delete()


def test_a_create_without_a_body_has_a_key_too(gateway: ScriptedGateway) -> None:
    first = gateway.http.post("/v1/kernels", headers={"Idempotency-Key": "bare"})
    again = create(gateway, "bare")
    assert (again.json()["id"], again.headers["idempotency-replayed"]) == (first.json()["id"], "true")
    Kernel(gateway, first.json()["id"]).delete()


def test_a_create_that_failed_gives_its_key_back(gateway: ScriptedGateway) -> None:
    with_ghost = create(gateway, "f", spec="ghost")
    problem(with_ghost, 503, "image_missing")
    problem(create(gateway, "f", limits={"memory": "64g"}), 422, "limit_exceeded")
    more = [gateway.new_kernel() for _ in range(4)]
    problem(create(gateway, "f"), 429, "too_many_kernels")
    for kernel in more:
        kernel.delete()
    gateway.engine.script.refuses_start = "no such program"
    try:
        problem(create(gateway, "f"), 502, "start_failed")
    finally:
        gateway.engine.script.refuses_start = ""
    answer = create(gateway, "f")
    assert (answer.status_code, "idempotency-replayed" in answer.headers) == (201, False)
    Kernel(gateway, answer.json()["id"]).delete()
