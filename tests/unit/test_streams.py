"""A log of events as a response: which form a client has asked for, and that every form tells the same."""

from collections.abc import AsyncIterator
from typing import Any, cast

import anyio
import orjson
import pytest

from gateway.api import streams
from gateway.kernels.log import EventLog
from gateway.protocol.events import Payload

pytestmark = pytest.mark.anyio


def filled(count: int, keep_bytes: int | None = None) -> EventLog:
    log = EventLog("e", keep_bytes)
    for number in range(1, count + 1):
        log.append_bounded(Payload("stream", {"name": "stdout", "text": f"{number}\n: é"}), 100)
    return log


async def body(log: EventLog, form: streams.Form, after: int = 0) -> bytes:
    response = streams.respond(log, form, after)
    return b"".join([cast(bytes, piece) async for piece in response.body_iterator])


def lines(content: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in content.split(b"\n") if line]


def server_sent(content: bytes) -> list[dict[str, Any]]:
    found = []
    for block in content.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            event = orjson.loads(fields["data"])
            assert (fields["event"], fields["id"]) == (event["type"], str(event["seq"]))
            found.append(event)
    return found


@pytest.mark.parametrize("after", [-5, 0, 3, 9, 10, 99])
async def test_both_forms_tell_the_same(after: int) -> None:
    log = filled(10)
    log.close()
    told = lines(await body(log, "jsonl", after))
    assert server_sent(await body(log, "sse", after)) == told
    assert [event["seq"] for event in told] == list(range(max(after, 0) + 1, 11))


async def test_both_forms_tell_of_a_gap() -> None:
    log = filled(10, keep_bytes=2000)
    log.close()
    told = lines(await body(log, "jsonl"))
    assert [event["type"] for event in told] == ["gap", "stream", "stream", "stream"]
    assert told[0]["events"] == 7
    assert server_sent(await body(log, "sse")) == told


async def test_a_stream_goes_on_until_the_log_is_closed() -> None:
    log = filled(1)
    found: dict[streams.Form, bytes] = {}

    async def read(form: streams.Form) -> None:
        found[form] = await body(log, form)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, "jsonl")
        tasks.start_soon(read, "sse")
        for _ in range(5):
            await anyio.sleep(0.005)
            log.append([Payload("clear_output", {"wait": False})])
        log.close()
    assert len(lines(found["jsonl"])) == 6
    assert server_sent(found["sse"]) == lines(found["jsonl"])


async def test_a_silent_stream_is_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_KEEP_ALIVE", 0.02)
    log = EventLog("e")
    pieces = cast(AsyncIterator[bytes], streams.respond(log, "sse").body_iterator)
    for _ in range(3):
        piece = await anext(pieces)
        assert piece.startswith(b":")
        assert piece.endswith(b"\n\n")
    log.close()
    assert [piece async for piece in pieces if not piece.startswith(b":")] == []


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, "json"),
        ("", "json"),
        ("*/*", "json"),
        ("text/html, */*", "json"),
        ("application/json", "json"),
        ("application/x-ndjson", "jsonl"),
        ("application/jsonl", "jsonl"),
        ("application/x-jsonlines;q=0.9", "jsonl"),
        ("Text/Event-Stream", "sse"),
        ("text/event-stream; charset=utf-8", "sse"),
        ("text/html, text/event-stream, application/json", "sse"),
        ("application/json, text/event-stream", "json"),
        (",;,=,", "json"),
    ],
)
def test_the_form_is_the_first_that_is_known(accept: str | None, form: str) -> None:
    assert streams.chosen(accept) == form


def test_the_default_is_the_routes_own() -> None:
    assert streams.chosen("*/*", default="jsonl") == "jsonl"
