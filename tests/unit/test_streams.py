"""A log of events as a response: which form a client has asked for, and that every form tells the same."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import orjson
import pytest
from starlette.types import Message

from gateway.api import streams
from gateway.api.views import EventSource
from gateway.errors import StoreUnavailable
from gateway.kernels.log import EventLog
from gateway.protocol.events import Event, Payload
from tests.unit.waiting import until

pytestmark = pytest.mark.anyio


def filled(count: int, keep_bytes: int | None = None) -> EventLog:
    log = EventLog("e", keep_bytes)
    for number in range(1, count + 1):
        log.append_bounded(Payload("stream", {"name": "stdout", "text": f"{number}\n: é"}), 100)
    return log


class Visit:
    """One client of a stream: what it was sent, and whether it stays."""

    def __init__(self, log: EventSource, form: streams.Form, after: int = 0, **options: Any) -> None:
        self.sent: list[Message] = []
        self.leaving = anyio.Event()
        self.gone = anyio.Event()
        self.stalled: anyio.Event | None = None
        self.cancelled = 0
        self._response = streams.EventStream(log, form, self.leaving, after, on_left=self._left, **options)

    async def run(self) -> "Visit":
        await self._response({"type": "http"}, self._receive, self._send)
        return self

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def whole(self) -> bool:
        """The answer has its proper end."""
        return self.sent[-1].get("more_body") is False

    async def _left(self) -> None:
        self.cancelled += 1

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.stalled is not None:
            await self.stalled.wait()
        self.sent.append(message)


async def body(log: EventSource, form: streams.Form, after: int = 0, **options: Any) -> bytes:
    visit = await Visit(log, form, after, **options).run()
    assert visit.whole
    assert visit.cancelled == 0
    return visit.body


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


async def test_a_long_log_is_told_in_pieces() -> None:
    log = EventLog("e")
    log.append(Payload("stream", {"name": "stdout", "text": "x" * 100_000}) for _ in range(20))
    log.close()
    visit = await Visit(log, "jsonl").run()
    assert len(lines(visit.body)) == 20
    assert max(len(message.get("body", b"")) for message in visit.sent) < 500_000


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


async def test_a_silent_stream_is_kept_open_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_KEEP_ALIVE", 0.002)
    log = EventLog("e")
    visit = Visit(log, "sse")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run)
        for number in range(20):
            before = visit.body.count(b": still here\n\n")
            await until(lambda before=before: visit.body.count(b": still here\n\n") > before)  # type: ignore[misc]
            log.append([Payload("stream", {"name": "stdout", "text": str(number)})])
        log.close()
    assert [event["text"] for event in server_sent(visit.body)] == [str(number) for number in range(20)]


async def test_only_server_sent_events_have_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_KEEP_ALIVE", 0.001)
    log = EventLog("e")
    visit = Visit(log, "jsonl")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run)
        await anyio.sleep(0.02)
        log.close()
    assert visit.body == b""


# the ends of a stream


@pytest.mark.parametrize("form", ["jsonl", "sse"])
async def test_a_client_that_leaves_ends_the_stream(form: streams.Form) -> None:
    visit = Visit(filled(3), form)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run)
        await until(lambda: visit.body)
        visit.gone.set()
    assert visit.cancelled == 1


async def test_a_client_that_leaves_while_nothing_can_be_written() -> None:
    visit = Visit(filled(3), "jsonl")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run)
        await until(lambda: visit.sent)
        visit.stalled = anyio.Event()
        await anyio.sleep(0.005)
        visit.gone.set()
    assert visit.cancelled == 1


@pytest.mark.parametrize("form", ["jsonl", "sse"])
async def test_a_gateway_that_leaves_ends_the_stream_without_an_end(form: streams.Form) -> None:
    visit = Visit(filled(3), form)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run)
        await until(lambda: visit.body)
        visit.leaving.set()
    assert visit.whole
    assert visit.cancelled == 0


class Failing:
    """A log whose store fails after the first event."""

    last_seq = 2
    closed = True

    async def follow(self, after: int = 0) -> AsyncIterator[list[Event]]:
        yield filled(1).since(after)
        raise StoreUnavailable("The disk is full.")

    async def page(self, after: int, limit: int) -> list[Event]:
        raise StoreUnavailable("The disk is full.")


async def test_a_stream_whose_store_fails_is_cut_and_not_ended() -> None:
    visit = await Visit(Failing(), "jsonl").run()
    assert len(lines(visit.body)) == 1
    assert not visit.whole
    assert visit.cancelled == 0


# pages


async def page(log: EventSource, after: int = 0, limit: int = 1000) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads((await streams.page(log, after, limit)).body)
    return document


async def test_pages_lead_to_the_end() -> None:
    log = filled(10)
    log.close()
    after, found = 0, []
    complete = False
    while not complete:
        answer = await page(log, after, 3)
        assert answer["last_seq"] == 10
        found += [event["seq"] for event in answer["events"]]
        after, complete = found[-1], answer["complete"]
    assert found == list(range(1, 11))


@pytest.mark.parametrize("after", [10, 11, 2**62])
async def test_a_page_behind_the_end_is_empty_and_complete(after: int) -> None:
    log = filled(10)
    assert await page(log, after) == {"events": [], "last_seq": 10, "complete": False}
    log.close()
    assert await page(log, after) == {"events": [], "last_seq": 10, "complete": True}


async def test_a_page_of_what_goes_on_is_not_complete() -> None:
    answer = await page(filled(2))
    assert ([event["seq"] for event in answer["events"]], answer["complete"]) == ([1, 2], False)


# what was asked for


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
async def test_the_form_is_the_first_that_is_known(accept: str | None, form: str) -> None:
    assert streams.chosen(accept) == form


async def test_large_values_are_named_if_that_was_asked_for() -> None:
    log = EventLog("e")
    log.append([Payload("display", {"data": {"text/plain": "x" * 70_000}, "metadata": {}, "display_id": None})])
    log.close()
    encode = streams.encoder("reference", "/v1/kernels/k/executions/e/events")
    for form in ("jsonl", "sse"):
        content = await body(log, form, encode=encode)
        event = (lines if form == "jsonl" else server_sent)(content)[0]
        assert event["data"] == {}
        assert event["references"]["text/plain"]["url"] == "/v1/kernels/k/executions/e/events/1/data?type=text%2Fplain"
    assert lines(await body(log, "jsonl", encode=streams.encoder("inline", "")))[0]["data"]["text/plain"] == "x" * 70_000
