"""One cell, four readings: JSON, JSON Lines, Server-Sent Events and WebSocket tell the same story."""

import json
from typing import Any

import pytest

from gateway.protocol.outputs import OutputCollector
from tests.support import Event, Kernel

CELL = """
import sys
from IPython.display import HTML, clear_output, display
print('gone')
clear_output(wait=True)
print('one')
print('two', file=sys.stderr)
shown = display(HTML('<b>first</b>'), display_id='spot')
display({'application/json': {'n': [1, 2.5, None]}, 'text/plain': 'json'}, raw=True)
shown.update(HTML('<b>second</b>'))
print('three ✓')
"""
CELLS = {
    "result": CELL + "{'a': 1}",
    "error": CELL + "raise ValueError('at the end')",
    "nothing": "pass",
}
FORMS = ("application/json", "application/x-ndjson", "text/event-stream", "websocket")


def read(kernel: Kernel, code: str, form: str) -> list[Event]:
    if form != "websocket":
        return kernel.events(code, form)
    with kernel.socket() as socket:
        return socket.execute(code, allow_stdin=False)


def outputs_of(events: list[Event]) -> list[dict[str, Any]]:
    collector = OutputCollector()
    for event in events:
        collector.add_members(event["type"], event)
    fields = ("output_type", "name", "text", "data", "metadata", "ename", "evalue", "traceback", "execution_count")
    return [{key: output[key] for key in fields if key in output} for output in collector.finish()]


SAME = ("status", "cause", "execution_count", "kernel_state", "variables")


@pytest.mark.parametrize("name", CELLS)
def test_all_four_readings_agree(shared: Kernel, name: str) -> None:
    found = []
    for form in FORMS:
        # The count is part of the answer (and of a traceback): each reading starts from the same one.
        shared.run("get_ipython().execution_count = 100", store_history=False)
        if form == "application/json":
            result = shared.execute(CELLS[name])
        else:
            events = read(shared, CELLS[name], form)
            assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
            assert len({event["execution_id"] for event in events}) == 1
            assert [event["type"] for event in events].count("ended") == 1
            assert [event["type"] for event in events][:2] == ["queued", "started"]
            ended = events[-1]
            result = shared.http.get(f"{shared.path}/executions/{ended['execution_id']}").json()
            assert outputs_of(events) == result["outputs"]
            assert {key: ended[key] for key in (*SAME, "duration")} == {key: result[key] for key in (*SAME, "duration")}
        found.append({key: result[key] for key in (*SAME, "outputs", "truncated")})
    assert found[0]["status"] == ("error" if name == "error" else "ok")
    assert all(result == found[0] for result in found), json.dumps(found, indent=1)


def test_the_accept_header_chooses(shared: Kernel) -> None:
    media = {
        "application/json": "application/json",
        "*/*": "application/json",
        "application/x-ndjson": "application/x-ndjson",
        "application/jsonl": "application/x-ndjson",
        "text/event-stream": "text/event-stream",
        "text/html, text/event-stream;q=0.9": "text/event-stream",
    }
    for accept, expected in media.items():
        assert shared.post("1", accept).headers["content-type"].partition(";")[0] == expected


def test_events_stream_as_they_come_over_http(kernel: Kernel) -> None:
    code = "import os, time\nprint('first', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('second')"
    for accept in ("application/x-ndjson", "text/event-stream"):
        with kernel.http.stream("POST", f"{kernel.path}/execute", json={"code": code}, headers={"Accept": accept}) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if '"first' in line)
            # The cell waits for this file, so the line above was read while it ran.
            assert kernel.http.put(kernel.file("go"), content=b"").status_code == 201
            assert next(line for line in lines if '"second' in line)
            assert next(line for line in lines if '"ended"' in line)
        assert kernel.http.delete(kernel.file("go")).status_code == 204


def test_requests_of_one_websocket_are_told_apart(shared: Kernel) -> None:
    with shared.socket() as socket:
        for request_id in ("text", 7):
            socket.send("execute", code=f"print({request_id!r})", request_id=request_id)
        socket.send("execute", code="print('none')")
        socket.send("ping", request_id="p")
        ends = [socket.until_type("ended") for _ in range(3)]
        assert [end.get("request_id") for end in ends] == ["text", 7, None]
        by_id = {event.get("request_id"): event["text"] for event in socket.seen if event["type"] == "stream"}
        assert by_id == {"text": "text\n", 7: "7\n", None: "none\n"}
        assert [event["request_id"] for event in socket.seen if event["type"] == "pong"] == ["p"]
        first = [event["type"] for event in socket.seen if event.get("request_id") == "text"]
        assert first[0] == "accepted"
