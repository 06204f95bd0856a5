"""What a cell has put out is read by anybody, at any time, from any place: real kernels, real clients that come and go."""

import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.api.scripted import RawRequest, result_of, wait_for_status
from tests.support import DEADLINE, Event, Gateway, Kernel, eventually, printed, problem, running, sse_events, stdout

JSONL, SSE = "application/x-ndjson", "text/event-stream"
FORMS = ["application/json", JSONL, SSE]
GATED = """
import os, time
for number in range(300):
    print('line', number, flush=True)
    if number % 100 == 50:
        while not os.path.exists(f'go{number}'): time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Gateway]:
    """A gateway that keeps next to nothing in memory: what has ended is read from the store."""
    with running(kernels={"max_kept_output": 1}) as gateway:
        yield gateway


def open_gate(kernel: Kernel, number: int) -> None:
    assert kernel.http.put(kernel.file(f"go{number}"), content=b"").status_code == 201


def detach(kernel: Kernel, code: str, **fields: object) -> str:
    answer = kernel.http.post(f"{kernel.path}/execute", json={"code": code, "detach": True, **fields})
    assert answer.status_code == 202, answer.text
    execution: str = answer.json()["execution_id"]
    return execution


def events_url(kernel: Kernel, execution_id: str) -> str:
    return f"{kernel.gateway.url}{kernel.path}/executions/{execution_id}/events"


def follow(kernel: Kernel, execution_id: str, accept: str, after: int = 0) -> list[Event]:
    """All events behind `after`, on a connection of its own, until the end."""
    headers = {**kernel.gateway.headers, "Accept": accept}
    answer = httpx2.get(events_url(kernel, execution_id), params={"after": after}, headers=headers, timeout=4 * DEADLINE)
    assert answer.status_code == 200, answer.text
    return sse_events(answer.text) if accept == SSE else [json.loads(line) for line in answer.iter_lines()]


def follow_by_socket(kernel: Kernel, execution_id: str, after: int = 0) -> list[Event]:
    with kernel.socket() as socket:
        socket.send("follow", execution_id=execution_id, after=after, request_id="f")
        socket.until_type("ended", "f")
        return [
            {name: value for name, value in event.items() if name != "request_id"}
            for event in socket.seen
            if event.get("request_id") == "f" and "seq" in event
        ]


def in_pages(kernel: Kernel, execution_id: str) -> list[Event]:
    """What a client gets that asks for small pages again and again."""
    found: list[Event] = []
    headers = kernel.gateway.headers

    def ask() -> bool:
        query = {"after": found[-1]["seq"] if found else 0, "limit": 17}
        page = httpx2.get(events_url(kernel, execution_id), params=query, headers=headers, timeout=DEADLINE).json()
        found.extend(page["events"])
        return bool(page["complete"])

    eventually(ask, "the last page")
    return found


def in_lines(kernel: Kernel, execution_id: str) -> list[Event]:
    return follow(kernel, execution_id, JSONL)


WAYS: tuple[Callable[[Kernel, str], list[Event]], ...] = (in_lines, follow_by_socket, in_pages)


def test_any_number_of_readers_read_the_same(kernel: Kernel) -> None:
    execution = detach(kernel, GATED)
    with ThreadPoolExecutor(24) as pool:
        readers = [pool.submit(follow, kernel, execution, accept) for accept in (JSONL, SSE) * 4]
        readers += [pool.submit(follow_by_socket, kernel, execution) for _ in range(4)]
        readers += [pool.submit(in_pages, kernel, execution) for _ in range(2)]
        cursors = []
        for number in (50, 150):
            eventually(lambda number=number: f"line {number}\n" in stdout(result_of(kernel, execution)), "half of it")  # type: ignore[misc]
            place = int(result_of(kernel, execution)["last_seq"]) - 1
            cursors.append((place, pool.submit(follow, kernel, execution, JSONL, place)))
            cursors.append((place, pool.submit(follow_by_socket, kernel, execution, place)))
            open_gate(kernel, number)
        eventually(lambda: "line 250\n" in stdout(result_of(kernel, execution)), "most of it")
        open_gate(kernel, 250)
        whole = follow(kernel, execution, JSONL)
        assert [event["seq"] for event in whole] == list(range(1, len(whole) + 1))
        assert (whole[-1]["type"], whole[-1]["status"]) == ("ended", "ok")
        assert printed(whole) == "".join(f"line {number}\n" for number in range(300))
        for reader in readers:
            assert reader.result() == whole
        for place, reader in cursors:
            assert reader.result() == whole[place:]
    # And so do those who come when it is over.
    for accept in (JSONL, SSE):
        assert follow(kernel, execution, accept) == whole
    assert follow_by_socket(kernel, execution) == in_pages(kernel, execution) == whole


def test_a_reader_that_is_cut_off_again_and_again_misses_nothing(kernel: Kernel) -> None:
    execution = detach(kernel, "import time\nfor n in range(120):\n    print(n, flush=True)\n    time.sleep(0.005)")
    found: list[Event] = []
    while not found or found[-1]["type"] != "ended":
        headers = {"Accept": SSE, "Last-Event-ID": str(found[-1]["seq"])} if found else {"Accept": SSE}
        with kernel.http.stream("GET", events_url(kernel, execution), headers=headers) as answer:
            lines = answer.iter_lines()
            for _ in range(7):
                data = next((line for line in lines if line.startswith("data: ")), None)
                if data is None:
                    break
                found.append(json.loads(data.removeprefix("data: ")))
    assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
    assert printed(found) == "".join(f"{n}\n" for n in range(120))


def test_what_has_left_the_memory_is_read_as_before(forgetful: Gateway) -> None:
    code = "from IPython.display import display\nprint('é ✓')\ndisplay({'application/json': [1, None]}, raw=True)\n1 / 0"
    with forgetful.kernel() as kernel:
        fresh = kernel.execute(code)
        execution = fresh["execution_id"]
        before = [way(kernel, execution) for way in WAYS]
        for number in range(70):
            kernel.execute(f"print({number})")
        assert [way(kernel, execution) for way in WAYS] == before
        assert follow(kernel, execution, SSE) == before[0]
        assert result_of(kernel, execution) == fresh
        for place in (1, len(before[0]) - 1, len(before[0])):
            assert follow(kernel, execution, JSONL, place) == before[0][place:]
        listed = kernel.http.get(f"{kernel.path}/executions", params={"limit": 100}).json()
        assert [entry["number"] for entry in listed["executions"]] == list(range(71, 0, -1))
        assert listed["executions"][-1]["cause"]["code"] == "exception"


def test_executions_are_read_after_their_kernel_is_gone(gateway: Gateway) -> None:
    kernel = gateway.new_kernel()
    done = kernel.execute("print('done')\n42")
    with kernel.submitted("import time; print('begun', flush=True); time.sleep(600)") as cell:
        cell.wait_for("stream")
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(follow, kernel, cell.execution_id, JSONL)
            kernel.delete()
            events = reader.result()
    assert (events[-1]["status"], events[-1]["cause"]["code"]) == ("died", "kernel_deleted")
    assert printed(events) == "begun\n"
    assert follow(kernel, cell.execution_id, SSE) == events
    assert result_of(kernel, done["execution_id"]) == done
    listed = gateway.http.get(f"{kernel.path}/executions").json()["executions"]
    assert [entry["status"] for entry in listed] == ["died", "ok"]
    problem(gateway.http.get(kernel.path), 410, "kernel_gone")


def test_a_detached_cell_is_found_again_by_its_location(shared: Kernel) -> None:
    answer = shared.http.post(f"{shared.path}/execute", json={"code": "print('later')"}, headers={"Prefer": "respond-async"})
    assert (answer.status_code, answer.headers["preference-applied"]) == (202, "respond-async")
    location = answer.headers["location"]
    eventually(lambda: shared.http.get(location).json()["status"] == "ok", "its end")
    assert stdout(shared.http.get(location).json()) == "later\n"


# clients that leave


def leave(gateway: Gateway, kernel: Kernel, way: str, code: str, on_disconnect: str) -> str:
    """Asks for a cell and goes away once it runs; its id."""
    fields = {"code": code, "on_disconnect": on_disconnect}
    if way == "websocket":
        with kernel.socket() as socket:
            socket.send("execute", **fields)
            socket.until_type("stream")
            return str(socket.seen[-1]["execution_id"])
    request = RawRequest(gateway, f"{kernel.path}/execute", fields, way)
    execution = wait_for_status(kernel, "running")
    eventually(lambda: stdout(result_of(kernel, execution)), "its output")
    request.leave()
    return execution


@pytest.mark.parametrize("way", [*FORMS, "websocket"])
def test_a_client_that_leaves_stops_its_cell_only_if_it_said_so(gateway: Gateway, kernel: Kernel, way: str) -> None:
    gate = "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('go0'): time.sleep(0.01)\nprint('end')"
    goes_on = leave(gateway, kernel, way, gate, "continue")
    with gateway.kernel() as other:
        stops = leave(gateway, other, way, "x = 1\n" + gate, "interrupt")
        wait_for_status(other, "cancelled")
        assert result_of(other, stops)["cause"]["code"] == "cancelled"
        # It was interrupted, not killed.
        assert other.value("x") == "1"
    assert result_of(kernel, goes_on)["status"] == "running"
    open_gate(kernel, 0)
    wait_for_status(kernel, "ok")
    assert stdout(result_of(kernel, goes_on)) == "begun\nend\n"


# values


def test_a_large_picture_is_named_and_fetched(shared: Kernel) -> None:
    code = """
import numpy, matplotlib.pyplot as plt
from IPython.display import display
fig, axes = plt.subplots(figsize=(8, 8))
axes.imshow(numpy.random.default_rng(1).random((600, 600)))
display(fig)
plt.close(fig)
"""
    execution = shared.execute(code)["execution_id"]
    url = f"{shared.path}/executions/{execution}/events"
    inline = next(event for event in shared.http.get(url).json()["events"] if event["type"] == "display")
    named = next(
        event for event in shared.http.get(url, params={"large": "reference"}).json()["events"] if event["type"] == "display"
    )
    picture = base64.b64decode(inline["data"]["image/png"])
    assert picture.startswith(b"\x89PNG")
    assert set(named["data"]) == {"text/plain"}
    reference = named["references"]["image/png"]
    answer = shared.http.get(reference["url"])
    assert (answer.content, answer.headers["content-type"]) == (picture, "image/png")
    assert (len(picture), answer.headers["content-disposition"]) == (reference["size"], "attachment")


def test_names_that_a_cell_makes_up_do_no_harm(shared: Kernel) -> None:
    names = ["text/html\r\nSet-Cookie: a=b\r\n\r\n<script>", "../../etc/passwd", "text/html;charset=utf-7", "é", ""]
    code = f"from IPython.display import display\ndisplay({{name: 'x' * 70_000 for name in {names!r}}}, raw=True)"
    execution = shared.execute(code)["execution_id"]
    page = shared.http.get(f"{shared.path}/executions/{execution}/events", params={"large": "reference"}).json()
    found = next(event for event in page["events"] if event["type"] == "display")["references"]
    assert set(found) == set(names)
    for reference in found.values():
        answer = shared.http.get(reference["url"])
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
        assert answer.content == b"x" * 70_000
        assert "set-cookie" not in answer.headers
