"""Executions are read as often, from where and in which form anybody likes; also when their kernel is gone."""

import base64
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from websockets.exceptions import InvalidStatus

from gateway.testing import Ask, Sleep, display, printed, result
from tests.api.routes import NOBODY
from tests.api.scripted import ScriptedGateway, result_of, scripted, wait_for_status
from tests.support import Event, Kernel, eventually, problem, sse_events, stdout

PICTURE = bytes(range(256)) * 400
ENCODED = base64.b64encode(PICTURE).decode()
TABLE = {"rows": [[number, "é"] for number in range(10_000)]}
HOSTILE = [
    "text/html\r\nSet-Cookie: stolen=1\r\n\r\n<script>",
    "text/html; charset=utf-7",
    "../../../etc/passwd",
    '"><script>alert(1)</script>',
    "x" * 3000,
    "é/ü",
    "",
    "a/b?type=text/plain&x=#",
]
CELLS: dict[str, Any] = {
    "many": [printed(f"line {number}\n", "stderr" if number % 2 else "stdout") for number in range(200)],
    "large": [
        printed("before\n"),
        display({"text/plain": "a picture", "image/png": ENCODED, "application/json": TABLE, "image/svg+xml": "<svg>é</svg>"}),
        result("x" * 70_000),
    ],
    "hostile": [display(dict.fromkeys(HOSTILE, "x" * 70000))],
    "odd": [
        display({"text/plain": ["no", "text"], "image/png": "not base64", "application/json": "text", "text/html": "<b>&</b>"})
    ],
    "ask": [printed("before\n"), Ask("? "), printed("after\n")],
    "forever": [printed("begun\n"), Sleep(math.inf)],
    **{f"cell {number}": [printed(f"{number}\n")] for number in range(100)},
}
JSONL, SSE = "application/x-ndjson", "text/event-stream"


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    # So little is kept in memory that all but the last execution is read from the store.
    with scripted(CELLS, kernels={"max_kept_output": 1}) as started:
        yield started


@pytest.fixture
def kernel(gateway: ScriptedGateway) -> Iterator[Kernel]:
    with gateway.kernel() as started:
        yield started


def events_path(kernel: Kernel, execution_id: str) -> str:
    return f"{kernel.path}/executions/{execution_id}/events"


def read(kernel: Kernel, execution_id: str, accept: str, **headers: str) -> list[Event]:
    answer = kernel.http.get(events_path(kernel, execution_id), headers={"Accept": accept, **headers})
    assert answer.status_code == 200, answer.text
    if accept == SSE:
        return sse_events(answer.text)
    return [json.loads(line) for line in answer.iter_lines()] if accept == JSONL else answer.json()["events"]


def after(kernel: Kernel, execution_id: str, seq: Any, accept: str = JSONL, **query: Any) -> httpx2.Response:
    return kernel.http.get(events_path(kernel, execution_id), params={"after": seq, **query}, headers={"Accept": accept})


def forget(kernel: Kernel) -> None:
    """Pushes everything before out of the memory."""
    kernel.execute("cell 0")
    kernel.execute("cell 1")


# the list


def test_executions_are_listed_newest_first(kernel: Kernel) -> None:
    found = [kernel.execute(f"cell {number}") for number in range(5)]
    listed = kernel.http.get(f"{kernel.path}/executions").json()
    assert listed["next"] is None
    assert [entry["execution_id"] for entry in listed["executions"]] == [one["execution_id"] for one in reversed(found)]
    assert [entry["number"] for entry in listed["executions"]] == [5, 4, 3, 2, 1]
    last = listed["executions"][0]
    assert (last["code"], last["status"], last["cause"], last["execution_count"]) == ("cell 4", "ok", None, 5)
    assert last["created_at"] <= last["started_at"] <= last["ended_at"]
    assert last["output_bytes"] > 0
    for entry, one in zip(listed["executions"], reversed(found), strict=True):
        assert entry["last_seq"] == one["last_seq"]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 500])
def test_pages_of_the_list_hold_each_execution_once(kernel: Kernel, limit: int) -> None:
    found = [kernel.execute(f"cell {number}")["execution_id"] for number in range(7)]
    listed: list[str] = []
    query: dict[str, Any] = {"limit": limit}
    pages = 0
    while query.get("before", 0) is not None:
        page = kernel.http.get(f"{kernel.path}/executions", params=query).json()
        listed += [entry["execution_id"] for entry in page["executions"]]
        query["before"] = page["next"]
        pages += 1
    assert listed == found[::-1]
    assert pages == math.ceil(7 / limit)


def test_a_kernel_without_executions_has_an_empty_list(kernel: Kernel) -> None:
    assert kernel.http.get(f"{kernel.path}/executions").json() == {"executions": [], "next": None}


def test_the_list_shows_what_runs_and_waits(kernel: Kernel) -> None:
    with kernel.submitted("ask") as first:
        kernel.http.post(f"{kernel.path}/execute", json={"code": "#" * 300, "detach": True})
        waiting, running = kernel.http.get(f"{kernel.path}/executions").json()["executions"]
        assert (running["status"], running["ended_at"], running["execution_id"]) == ("running", None, first.execution_id)
        assert (waiting["status"], waiting["started_at"], waiting["code"]) == ("queued", None, "#" * 200)
        first.answer("")
        first.end()


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "limit=-1", "before=0", "before=x", "before=" + "9" * 30])
def test_a_wrong_page_of_the_list_is_refused(kernel: Kernel, query: str) -> None:
    problem(kernel.http.get(f"{kernel.path}/executions?{query}"), 422, "invalid_request")


# events


@pytest.mark.parametrize("where", ["memory", "store"])
@pytest.mark.parametrize("accept", ["application/json", JSONL, SSE])
def test_readers_at_any_place_get_the_rest(kernel: Kernel, where: str, accept: str) -> None:
    execution = kernel.execute("many")["execution_id"]
    if where == "store":
        forget(kernel)
    whole = read(kernel, execution, JSONL)
    assert [event["seq"] for event in whole] == list(range(1, len(whole) + 1))
    assert whole[-1]["type"] == "ended"
    for seq in {0, 1, 2, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 5}:
        answer = after(kernel, execution, seq, accept)
        if accept == "application/json":
            found = answer.json()["events"]
            assert (answer.json()["complete"], answer.json()["last_seq"]) == (True, len(whole))
        else:
            found = sse_events(answer.text) if accept == SSE else [json.loads(line) for line in answer.iter_lines()]
        assert found == whole[seq:]


@pytest.mark.parametrize("where", ["memory", "store"])
def test_pages_of_events_hold_each_event_once(kernel: Kernel, where: str) -> None:
    execution = kernel.execute("many")["execution_id"]
    if where == "store":
        forget(kernel)
    found: list[Event] = []
    complete = False
    while not complete:
        page = after(kernel, execution, len(found), "application/json", limit=7).json()
        assert 1 <= len(page["events"]) <= 7
        found += page["events"]
        complete = page["complete"]
    assert found == read(kernel, execution, JSONL)


def test_server_sent_events_resume_where_they_were_cut(kernel: Kernel) -> None:
    execution = kernel.execute("many")["execution_id"]
    whole = read(kernel, execution, SSE)
    for seq in (0, 1, len(whole) - 1, len(whole)):
        assert read(kernel, execution, SSE, **{"Last-Event-ID": str(seq)}) == whole[seq:]
    answer = kernel.http.get(events_path(kernel, execution), params={"after": 1}, headers={"Accept": SSE, "Last-Event-ID": "3"})
    assert sse_events(answer.text) == whole[3:]
    # The header is SSE's own.
    assert read(kernel, execution, JSONL, **{"Last-Event-ID": "3"}) == whole


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9" * 30, "1,2", "0x1"])
def test_a_wrong_last_event_id_is_refused(kernel: Kernel, value: str) -> None:
    execution = kernel.execute("cell 1")["execution_id"]
    answer = kernel.http.get(events_path(kernel, execution), headers={"Accept": SSE, "Last-Event-ID": value})
    problem(answer, 422, "invalid_request")
    problem(kernel.http.get(f"{kernel.path}/events", headers={"Accept": SSE, "Last-Event-ID": value}), 422, "invalid_request")


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "after=" + "9" * 30, "limit=0", "limit=1001", "limit=x", "large=maybe"]
)
def test_a_wrong_query_for_events_is_refused(kernel: Kernel, query: str) -> None:
    execution = kernel.execute("cell 1")["execution_id"]
    problem(kernel.http.get(f"{events_path(kernel, execution)}?{query}"), 422, "invalid_request")
    problem(kernel.http.get(f"{kernel.path}/events?{query}"), 422, "invalid_request")


@pytest.mark.parametrize("accept", [JSONL, SSE])
def test_readers_join_while_it_runs_and_all_read_the_same(kernel: Kernel, accept: str) -> None:
    with kernel.submitted("ask") as cell, ThreadPoolExecutor(8) as pool:
        early = [pool.submit(read, kernel, cell.execution_id, accept) for _ in range(4)]
        cell.wait_for("input_request")
        page = after(kernel, cell.execution_id, 0, "application/json").json()
        assert (page["complete"], page["events"][-1]["type"]) == (False, "input_request")
        late = [pool.submit(read, kernel, cell.execution_id, accept) for _ in range(4)]
        cell.answer("")
        cell.end()
        whole = [{k: v for k, v in event.items() if k != "request_id"} for event in cell.events]
        assert all(reader.result() == whole for reader in [*early, *late])


def test_the_kernels_own_events_are_read_alike(kernel: Kernel) -> None:
    page = kernel.http.get(f"{kernel.path}/events").json()
    assert [event["state"] for event in page["events"]] == ["starting", "idle"]
    assert (page["last_seq"], page["complete"]) == (2, False)
    assert kernel.http.get(f"{kernel.path}/events", params={"after": 1, "limit": 1}).json()["events"] == page["events"][1:]
    with kernel.http.stream("GET", f"{kernel.path}/events", headers={"Accept": SSE, "Last-Event-ID": "1"}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: state"
        assert json.loads(next(line for line in lines if line.startswith("data: "))[6:]) == page["events"][1]
    problem(kernel.http.get(f"{kernel.path}/events/1/data", params={"type": "text/plain"}), 404, "data_not_found")


# gone


def test_executions_outlive_their_kernel(gateway: ScriptedGateway) -> None:
    kernel = gateway.new_kernel()
    first = kernel.execute("large")
    with kernel.submitted("forever") as running:
        kernel.delete()
        assert running.end()["status"] == "died"
    problem(gateway.http.get(kernel.path), 410, "kernel_gone")
    listed = gateway.http.get(f"{kernel.path}/executions").json()["executions"]
    assert [entry["status"] for entry in listed] == ["died", "ok"]
    assert listed[0]["cause"]["code"] == "kernel_deleted"
    assert result_of(kernel, first["execution_id"]) == first
    for accept in ("application/json", JSONL, SSE):
        assert [event["type"] for event in read(kernel, running.execution_id, accept)][-2:] == ["stream", "ended"]
    data = gateway.http.get(f"{events_path(kernel, first['execution_id'])}/4/data", params={"type": "image/png"})
    assert data.content == PICTURE
    # What would do something to it, can't.
    path = f"{kernel.path}/executions/{running.execution_id}"
    problem(gateway.http.delete(path), 410, "kernel_gone")
    problem(gateway.http.post(f"{path}/input", json={"value": ""}), 410, "kernel_gone")
    problem(gateway.http.post(f"{kernel.path}/execute", json={"code": "1"}), 410, "kernel_gone")


def test_an_execution_that_ended_long_ago_can_be_neither_cancelled_nor_answered(kernel: Kernel) -> None:
    first = kernel.execute("cell 5")
    forget(kernel)
    path = f"{kernel.path}/executions/{first['execution_id']}"
    cancelled = kernel.http.delete(path)
    assert (cancelled.status_code, cancelled.json()) == (202, first)
    problem(kernel.http.post(f"{path}/input", json={"value": ""}), 409, "not_waiting_for_input")
    with kernel.socket() as socket:
        socket.send("input", execution_id=first["execution_id"], value="", request_id="i")
        assert socket.until_type("refused", "i")["problem"]["code"] == "not_waiting_for_input"


def test_what_never_was_is_not_found(gateway: ScriptedGateway, kernel: Kernel) -> None:
    for suffix in ("", "/events", "/events/1/data?type=text/plain"):
        problem(gateway.http.get(f"{kernel.path}/executions/{NOBODY}{suffix}"), 404, "execution_not_found")
        problem(gateway.http.get(f"/v1/kernels/{NOBODY}/executions/{NOBODY}{suffix}"), 404, "kernel_not_found")
    problem(gateway.http.get(f"/v1/kernels/{NOBODY}/executions"), 404, "kernel_not_found")
    execution = kernel.execute("cell 1")["execution_id"]
    with gateway.kernel() as other:
        problem(gateway.http.get(f"{other.path}/executions/{execution}"), 404, "execution_not_found")
        forget(kernel)
        problem(gateway.http.get(f"{other.path}/executions/{execution}"), 404, "execution_not_found")


# large values


def references(kernel: Kernel, execution_id: str, accept: str = JSONL) -> dict[str, dict[str, Any]]:
    """All references of an execution, each followed: what it leads to."""
    answer = kernel.http.get(events_path(kernel, execution_id), params={"large": "reference"}, headers={"Accept": accept})
    if accept == SSE:
        events = sse_events(answer.text)
    else:
        events = answer.json()["events"] if accept == "application/json" else [json.loads(line) for line in answer.iter_lines()]
    return {mime: {**found, "data": event["data"]} for event in events for mime, found in event.get("references", {}).items()}


@pytest.mark.parametrize("where", ["memory", "store"])
@pytest.mark.parametrize("accept", ["application/json", JSONL, SSE])
def test_large_values_are_named_and_fetched(kernel: Kernel, where: str, accept: str) -> None:
    execution = kernel.execute("large")["execution_id"]
    if where == "store":
        forget(kernel)
    found = references(kernel, execution, accept)
    assert set(found) == {"image/png", "application/json", "text/plain"}
    assert found["image/png"]["data"] == {"text/plain": "a picture", "image/svg+xml": "<svg>é</svg>"}
    assert found["text/plain"]["data"] == {}
    contents = {"image/png": PICTURE, "text/plain": b"x" * 70_000}
    for mime, reference in found.items():
        answer = kernel.http.get(reference["url"])
        assert answer.status_code == 200
        assert len(answer.content) == reference["size"]
        assert answer.headers["content-type"].partition(";")[0] == mime
        if mime in contents:
            assert answer.content == contents[mime]
        else:
            assert answer.json() == TABLE
    # Without asking for references, everything is there.
    assert read(kernel, execution, accept)[3]["data"]["image/png"] == ENCODED


def test_a_websocket_can_have_large_values_named_too(kernel: Kernel) -> None:
    execution = kernel.execute("large")["execution_id"]
    with kernel.socket() as socket:
        socket.send("follow", execution_id=execution, large="reference", request_id="r")
        socket.until_type("ended", "r")
        shown = next(event for event in socket.seen if event["type"] == "display")
    assert set(shown["references"]) == {"image/png", "application/json"}
    assert shown["request_id"] == "r"


def data(kernel: Kernel, execution_id: str, mime: str, seq: int = 3) -> httpx2.Response:
    return kernel.http.get(f"{events_path(kernel, execution_id)}/{seq}/data", params={"type": mime})


def is_download(answer: httpx2.Response) -> None:
    assert answer.status_code == 200
    assert answer.headers["content-disposition"] == "attachment"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert "set-cookie" not in answer.headers


def test_a_value_is_a_download_of_its_type(kernel: Kernel) -> None:
    execution = kernel.execute("large")["execution_id"]
    for mime in ("image/png", "application/json", "image/svg+xml"):
        is_download(answer := data(kernel, execution, mime, 4))
        assert answer.headers["content-type"] == mime
    assert data(kernel, execution, "image/svg+xml", 4).text == "<svg>é</svg>"
    is_download(answer := data(kernel, execution, "text/plain", 4))
    assert (answer.text, answer.headers["content-type"]) == ("a picture", "text/plain; charset=utf-8")


def test_values_of_a_wrong_shape_are_given_as_they_are(kernel: Kernel) -> None:
    execution = kernel.execute("odd")["execution_id"]
    assert data(kernel, execution, "text/plain").json() == ["no", "text"]
    assert data(kernel, execution, "application/json").json() == "text"
    picture = data(kernel, execution, "image/png")
    assert (picture.content, picture.headers["content-type"]) == (b"not base64", "application/octet-stream")
    is_download(answer := data(kernel, execution, "text/html"))
    assert answer.text == "<b>&</b>"


@pytest.mark.parametrize("where", ["memory", "store"])
def test_a_name_that_a_hostile_kernel_chose_does_no_harm(kernel: Kernel, where: str) -> None:
    execution = kernel.execute("hostile")["execution_id"]
    if where == "store":
        forget(kernel)
    found = references(kernel, execution)
    assert set(found) == set(HOSTILE)
    for reference in found.values():
        is_download(answer := kernel.http.get(reference["url"]))
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.content == b"x" * 70_000


def test_a_value_that_is_not_there_is_told(kernel: Kernel) -> None:
    execution = kernel.execute("large")["execution_id"]
    for mime, seq in (("text/html", 4), ("image/png", 3), ("image/png", 1), ("image/png", 99), ("", 4), ("IMAGE/PNG", 4)):
        problem(data(kernel, execution, mime, seq), 404, "data_not_found")
    problem(kernel.http.get(f"{events_path(kernel, execution)}/4/data"), 422, "invalid_request")
    for nonsense in ("0", "-1", "x", "9" * 30):
        problem(kernel.http.get(f"{events_path(kernel, execution)}/{nonsense}/data?type=a/b"), 422, "invalid_request")


# the WebSocket


def seqs(events: list[Event], request_id: str) -> list[int]:
    return [event["seq"] for event in events if event.get("request_id") == request_id and "seq" in event]


@pytest.mark.parametrize("where", ["memory", "store"])
def test_a_websocket_follows_what_others_have_begun(kernel: Kernel, where: str) -> None:
    execution = kernel.execute("many")["execution_id"]
    if where == "store":
        forget(kernel)
    whole = read(kernel, execution, JSONL)
    with kernel.socket() as socket:
        for seq in (0, 3, len(whole) - 1):
            socket.send("follow", execution_id=execution, after=seq, request_id=f"r{seq}")
            assert socket.until_type("accepted", f"r{seq}")["execution_id"] == execution
            socket.until_type("ended", f"r{seq}")
            assert seqs(socket.seen, f"r{seq}") == [event["seq"] for event in whole[seq:]]
        socket.send("follow", execution_id=execution, after=len(whole), request_id="behind")
        socket.until_type("accepted", "behind")
        socket.send("ping", request_id="p")
        socket.until_type("pong", "p")
        assert seqs(socket.seen, "behind") == []


def test_a_websocket_joins_what_runs(kernel: Kernel) -> None:
    with kernel.submitted("ask") as cell, kernel.socket() as socket:
        socket.send("follow", execution_id=cell.execution_id, request_id="f")
        asked = socket.until_type("input_request", "f")
        socket.send("input", execution_id=asked["execution_id"], value="x")
        assert socket.until_type("ended", "f")["status"] == "ok"
        cell.end()
        assert seqs(socket.seen, "f") == [event["seq"] for event in cell.events]


def test_a_wrong_follow_is_refused(gateway: ScriptedGateway, kernel: Kernel) -> None:
    with gateway.kernel() as other:
        foreign = other.execute("cell 1")["execution_id"]
        with kernel.socket() as socket:
            wrong: list[tuple[dict[str, Any], str]] = [
                ({"execution_id": NOBODY}, "execution_not_found"),
                ({"execution_id": foreign}, "execution_not_found"),
                ({}, "invalid_request"),
                ({"execution_id": NOBODY, "after": -1}, "invalid_request"),
                ({"execution_id": NOBODY, "after": "x"}, "invalid_request"),
                ({"execution_id": NOBODY, "after": 2**70}, "invalid_request"),
                ({"execution_id": NOBODY, "large": "maybe"}, "invalid_request"),
            ]
            for number, (fields, code) in enumerate(wrong):
                socket.send("follow", request_id=number, **fields)
                refused = socket.until_type("refused")
                assert (refused["request_id"], refused["problem"]["code"]) == (number, code)


def test_a_websocket_follows_so_many_and_no_more(kernel: Kernel) -> None:
    with kernel.submitted("ask") as cell, kernel.socket() as socket:
        for number in range(256):
            socket.send("follow", execution_id=cell.execution_id, request_id=number)
            socket.until_type("accepted")
        socket.send("follow", execution_id=cell.execution_id, request_id="one too many")
        assert socket.until_type("refused", "one too many")["problem"]["code"] == "queue_full"
        cell.answer("")
        for _ in range(256):
            socket.until_type("ended")
        assert len(socket.execute("cell 1")) > 0


def test_a_websocket_tells_the_kernels_own_events_from_where_it_is_asked(kernel: Kernel) -> None:
    def states(query: str) -> list[str]:
        with kernel.gateway.connect(f"{kernel.path}/ws{query}") as connection:
            connection.send('{"op": "ping"}')
            found = []
            while (event := json.loads(connection.recv(timeout=60)))["type"] != "pong":
                found.append(event["state"])
            return found

    kernel.restart()
    eventually(lambda: kernel.http.get(f"{kernel.path}/events").json()["last_seq"] == 4, "the restart recorded")
    assert states("") == []
    # The events are sent by a task of their own: some may come behind the pong, none are left out.
    for query, expected in (("?after=0", ["starting", "idle", "restarting", "idle"]), ("?after=2", ["restarting", "idle"])):
        eventually(lambda query=query, expected=expected: states(query) == expected, "all states")  # type: ignore[misc]
    assert states("?after=99") == []


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "", "9" * 30])
def test_a_websocket_with_a_wrong_place_does_not_open(kernel: Kernel, value: str) -> None:
    with pytest.raises(InvalidStatus) as error, kernel.gateway.connect(f"{kernel.path}/ws?after={value}"):
        pass
    assert error.value.response.status_code == 422
    assert json.loads(error.value.response.body)["code"] == "invalid_request"


def test_results_tell_how_far_they_go(kernel: Kernel) -> None:
    with kernel.submitted("ask") as cell:
        cell.wait_for("input_request")
        so_far = result_of(kernel, cell.execution_id)
        assert (so_far["status"], so_far["last_seq"], stdout(so_far)) == ("running", len(cell.events), "before\n")
        cell.answer("")
        cell.end()
    wait_for_status(kernel, "ok")
    final = result_of(kernel, cell.execution_id)
    assert (final["last_seq"], final["gap"], stdout(final)) == (len(cell.events), None, "before\nafter\n")
