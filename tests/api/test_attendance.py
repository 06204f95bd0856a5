"""Whoever asked for a cell need not stay for it: detached from the start, gone on the way, or left alone by the gateway."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from websockets.exceptions import ConnectionClosed

from gateway.testing import Ask, Sleep, printed, result
from gateway.testing.kernel import Cell
from tests.api.scripted import RawRequest, ScriptedGateway, latest, result_of, scripted, wait_for_status
from tests.support import Kernel, eventually, problem, sse_events, stdout

CELLS: dict[str, Cell] = {
    "quick": [printed("quick\n"), result("1")],
    "forever": [printed("begun\n"), Sleep(math.inf)],
    "ask": [Ask("? "), printed("answered\n")],
}
FORMS = ["application/json", "application/x-ndjson", "text/event-stream"]
WAYS = [*FORMS, "websocket"]


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    with scripted(CELLS) as started:
        yield started


@pytest.fixture
def kernel(gateway: ScriptedGateway) -> Iterator[Kernel]:
    with gateway.kernel() as started:
        yield started


# detached


@pytest.mark.parametrize("accept", FORMS)
@pytest.mark.parametrize("way", ["body", "prefer", "both"])
def test_a_detached_cell_is_answered_at_once_and_read_later(kernel: Kernel, way: str, accept: str) -> None:
    body = {"code": "ask", "allow_stdin": True, **({} if way == "prefer" else {"detach": True})}
    headers = {"Accept": accept, **({} if way == "body" else {"Prefer": "wait=5, respond-async"})}
    answer = kernel.http.post(f"{kernel.path}/execute", json=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (202, "application/json")
    assert answer.headers.get("preference-applied") == (None if way == "body" else "respond-async")
    so_far = answer.json()
    assert so_far["status"] in ("queued", "running")
    assert so_far["last_seq"] >= 1
    path = f"{kernel.path}/executions/{so_far['execution_id']}"
    assert answer.headers["location"] == path
    eventually(lambda: kernel.http.post(f"{path}/input", json={"value": "x"}).status_code == 204, "the question")
    events = kernel.http.get(f"{path}/events", headers={"Accept": "application/x-ndjson"})
    assert [json.loads(line)["seq"] for line in events.iter_lines()] == list(range(1, events.text.count("\n") + 1))
    assert stdout(kernel.http.get(path).json()) == "answered\n"


def test_a_detached_cell_goes_on_whatever_was_said_of_the_connection(kernel: Kernel) -> None:
    answer = kernel.http.post(
        f"{kernel.path}/execute", json={"code": "ask", "allow_stdin": True, "detach": True, "on_disconnect": "interrupt"}
    )
    path = answer.headers["location"]
    kernel.http.get(kernel.path)
    eventually(lambda: kernel.http.post(f"{path}/input", json={"value": "x"}).status_code == 204, "the question")
    eventually(lambda: kernel.http.get(path).json()["status"] == "ok", "the end")


def test_what_is_refused_is_refused_before_it_is_detached(kernel: Kernel) -> None:
    problem(
        kernel.http.post(f"{kernel.path}/execute", json={"code": "1", "detach": True, "timeout": 1e9}), 422, "limit_exceeded"
    )
    problem(kernel.http.post(f"{kernel.path}/execute", json={"code": "1", "detach": "perhaps"}), 422, "invalid_request")
    problem(kernel.http.post(f"{kernel.path}/execute", json={"code": "1", "on_disconnect": "cry"}), 422, "invalid_request")


def test_the_websocket_knows_no_detaching(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        socket.send("execute", code="quick", detach=True, request_id="d")
        assert socket.until_type("refused", "d")["problem"]["code"] == "invalid_request"


# the client leaves


def begin(gateway: ScriptedGateway, kernel: Kernel, way: str, code: str, on_disconnect: str | None) -> RawRequest | None:
    """Asks for a cell and leaves as soon as it runs; by HTTP or by a WebSocket."""
    fields = {"code": code, "allow_stdin": True, **({"on_disconnect": on_disconnect} if on_disconnect else {})}
    if way == "websocket":
        with kernel.socket() as socket:
            socket.send("execute", **fields)
            socket.until_type("accepted")
            wait_for_status(kernel, "running")
        return None
    request = RawRequest(gateway, f"{kernel.path}/execute", fields, way)
    wait_for_status(kernel, "running")
    request.leave()
    return request


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_takes_its_cell_with_it_if_it_said_so(gateway: ScriptedGateway, kernel: Kernel, way: str) -> None:
    begin(gateway, kernel, way, "forever", "interrupt")
    execution = wait_for_status(kernel, "cancelled")
    assert result_of(kernel, execution)["cause"]["code"] == "cancelled"
    assert kernel.execute("quick")["status"] == "ok"


@pytest.mark.parametrize("on_disconnect", ["continue", None])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_leaves_its_cell(
    gateway: ScriptedGateway, kernel: Kernel, way: str, on_disconnect: str | None
) -> None:
    begin(gateway, kernel, way, "ask", on_disconnect)
    execution: str = latest(kernel)["execution_id"]
    # Once the gateway has seen the second client leave, it has seen the first one too.
    with gateway.kernel() as other:
        begin(gateway, other, way, "forever", "interrupt")
        wait_for_status(other, "cancelled")
    path = f"{kernel.path}/executions/{execution}"
    eventually(lambda: kernel.http.post(f"{path}/input", json={"value": "x"}).status_code == 204, "the question")
    wait_for_status(kernel, "ok")
    assert stdout(result_of(kernel, execution)) == "answered\n"


@pytest.mark.parametrize("way", FORMS)
def test_a_queued_cell_whose_client_leaves_never_runs(gateway: ScriptedGateway, kernel: Kernel, way: str) -> None:
    with kernel.submitted("ask") as first:
        request = RawRequest(gateway, f"{kernel.path}/execute", {"code": "quick", "on_disconnect": "interrupt"}, way)
        wait_for_status(kernel, "queued")
        request.leave()
        wait_for_status(kernel, "cancelled")
        first.answer("")
        assert first.end()["status"] == "ok"
    assert gateway.codes(kernel) == ["ask"]


def test_all_cells_of_a_websocket_go_with_it_and_others_stay(gateway: ScriptedGateway, kernel: Kernel) -> None:
    with kernel.submitted("ask") as stays:
        with kernel.socket() as socket:
            for number in range(3):
                socket.send("execute", code="forever", on_disconnect="interrupt", request_id=number)
                socket.until_type("accepted")
            socket.send("execute", code="quick", request_id="stays")
            accepted = socket.until_type("accepted")
        goes_on = accepted["execution_id"]
        eventually(lambda: kernel.document()["queue_length"] == 1, "the others gone")
        stays.answer("")
        assert stays.end()["status"] == "ok"
    eventually(lambda: result_of(kernel, goes_on)["status"] == "ok", "the end")
    assert gateway.codes(kernel) == ["ask", "quick"]


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_has_read_the_end_cancels_nothing(gateway: ScriptedGateway, kernel: Kernel, way: str) -> None:
    if way == "websocket":
        with kernel.socket() as socket:
            assert socket.execute("quick", on_disconnect="interrupt")[-1]["status"] == "ok"
    else:
        assert kernel.post("quick", way, on_disconnect="interrupt").status_code == 200
    assert latest(kernel)["status"] == "ok"


# the gateway leaves


def test_a_gateway_that_lets_go_tells_those_who_wait() -> None:
    with scripted(CELLS, server={"drain_timeout": 0, "shutdown_grace": 5}) as gateway, ThreadPoolExecutor(8) as pool:
        kernels = {way: gateway.new_kernel() for way in WAYS}
        requests = {
            way: RawRequest(gateway, f"{kernels[way].path}/execute", {"code": "forever", "on_disconnect": "interrupt"}, way)
            for way in FORMS
        }
        with kernels["websocket"].socket() as socket:
            socket.send("execute", code="forever", on_disconnect="interrupt")
            accepted = socket.until_type("accepted")
            executions = {way: wait_for_status(kernel, "running") for way, kernel in kernels.items()}
            assert executions["websocket"] == accepted["execution_id"]
            for way in WAYS:
                eventually(lambda way=way: stdout(result_of(kernels[way], executions[way])) == "begun\n", "its output")  # type: ignore[misc]
            answers = {way: pool.submit(requests[way].read) for way in FORMS}
            gateway.stop()
            status, body = answers["application/json"].result()
            document = json.loads(body)
            with pytest.raises(ConnectionClosed) as closed:
                socket.until(lambda _: False)
        assert (status, document["code"], document["retryable"]) == (503, "shutting_down", True)
        kernel, execution = kernels["application/json"], executions["application/json"]
        path = f"{kernel.path}/executions/{execution}"
        assert (document["execution_id"], document["kernel_id"], document["execution"]) == (execution, kernel.id, path)
        assert path in document["detail"]
        for way in FORMS[1:]:
            status, body = answers[way].result()
            assert status == 200
            assert b'"begun\\n"' in body
            assert b'"ended"' not in body
            # The end of a chunked answer: it was not cut off.
            assert body.endswith(b"0\r\n\r\n")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        # Nobody's leaving was taken for a wish to interrupt.
        assert [gateway.engine.boxes[kernel.id].supervisor.kernel.interrupts for kernel in kernels.values()] == [0, 0, 0, 0]  # type: ignore[union-attr]


def test_the_health_of_a_gateway_is_one_word(gateway: ScriptedGateway) -> None:
    assert gateway.http.get("/healthz").json() == {"status": "ok"}
    gateway.engine.available = False
    try:
        eventually(lambda: gateway.http.get("/healthz").json() == {"status": "degraded"}, "degraded")
    finally:
        gateway.engine.available = True
    eventually(lambda: gateway.http.get("/healthz").json() == {"status": "ok"}, "ok again")


def test_server_sent_events_of_an_execute_are_what_they_were(kernel: Kernel) -> None:
    events = sse_events(kernel.post("quick", "text/event-stream").text)
    assert [event["type"] for event in events] == ["queued", "started", "stream", "result", "ended"]
