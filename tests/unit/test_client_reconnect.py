"""The client and a gateway that goes away and comes back: what is sent again, where a stream goes on, what is told.

The wire is a script: each request is answered by the next step of a plan, whole or broken off somewhere. No test waits: the
clock goes on by what the client means to wait.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client import (
    ApiError,
    AsyncClient,
    AsyncKernel,
    Client,
    ClientError,
    ConnectionLost,
    Event,
    GatewayUnreachable,
    Kernel,
    NotAGateway,
    repeating,
)

URL = "http://gateway"
ENDED = {"status": "ok", "cause": None}


def event(seq: int, kind: str = "stream", **members: Any) -> dict[str, Any]:
    return {"seq": seq, "type": kind, "time": "", "execution_id": "e1", **members}


EVENTS = [
    event(1, "queued", position=0),
    event(2, "started", execution_count=1),
    event(3, name="stdout", text="a\u2028b\n"),
    event(4, name="stdout", text="é" * 20),
    event(5, "ended", **ENDED),
]


class Clock:
    """Time that passes only by waiting for it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    async def async_pause(self, seconds: float) -> None:
        self.pause(seconds)


def patched(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for name, value in (("clock", found), ("pause", found.pause), ("async_pause", found.async_pause)):
        monkeypatch.setattr(repeating, name, value)
    return found


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return patched(monkeypatch)


class Body(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The pieces of an answer, and how it breaks off."""

    def __init__(self, pieces: list[bytes], broken: Exception | None) -> None:
        self.pieces = pieces
        self.broken = broken

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces
        if self.broken:
            raise self.broken

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")


Step = Callable[[Seen], httpx2.Response]


@dataclass
class Wire(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """Answers each request by the next step; when there is none left, by `then`."""

    steps: list[Step] = field(default_factory=list)
    then: Step | None = None
    seen: list[Seen] = field(default_factory=list)

    def _answer(self, request: httpx2.Request, content: bytes) -> httpx2.Response:
        seen = Seen(request.method, request.url.raw_path.decode(), request.headers, content)
        self.seen.append(seen)
        step = self.steps.pop(0) if self.steps else self.then
        assert step, f"nobody expects {seen}"
        return step(seen)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return self._answer(request, request.read())

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return self._answer(request, await request.aread())

    @property
    def paths(self) -> list[str]:
        return [f"{seen.method} {seen.path.removeprefix('/v1/kernels/k1')}" for seen in self.seen]


def lines(events: list[dict[str, Any]], after: int = 0) -> bytes:
    return b"".join(orjson.dumps(found) + b"\n" for found in events if found["seq"] > after)


def after(seen: Seen) -> int:
    """What this request has seen already: an execute is replayed from the beginning."""
    return int(seen.path.rpartition("after=")[2]) if "after=" in seen.path else 0


def events_to(cut: int | None = None, broken: Exception | None = None, events: list[dict[str, Any]] | None = None) -> Step:
    """The events that are asked for, cut off after so many bytes."""
    return lambda seen: httpx2.Response(
        200, stream=Body([lines(EVENTS if events is None else events, after(seen))[:cut]], broken)
    )


def whole(document: Any, status: int = 200) -> Step:
    return lambda seen: httpx2.Response(status, json=document)


def problem(status: int, code: str) -> Step:
    return whole({"status": status, "code": code, "title": "No", "detail": f"It is {code}.", "retryable": True}, status)


def raising(error: Exception) -> Step:
    def fail(seen: Seen) -> httpx2.Response:
        raise error

    return fail


RESET = httpx2.ReadError("reset")
REFUSED = raising(httpx2.ConnectError("refused"))
LOST = raising(httpx2.RemoteProtocolError("Server disconnected without sending a response."))
STOPPING = problem(503, "shutting_down")
RESULT = {"execution_id": "e1", "kernel_id": "k1", "status": "ok", "outputs": [], "last_seq": 5}


def streamed(wire: Wire, **options: Any) -> list[Event]:
    """By the blocking client and by the other: both must do the same."""
    steps = list(wire.steps)
    with Client(URL, transport=wire, **options) as client:
        found = list(Kernel(client, {"id": "k1"}).stream("1", idempotency_key="mine"))
    other = Wire(steps, wire.then)

    async def collect() -> list[Event]:
        async with AsyncClient(URL, transport=other, **options) as client:
            return [event async for event in AsyncKernel(client, {"id": "k1"}).stream("1", idempotency_key="mine")]

    assert anyio.run(collect) == found
    assert other.paths == wire.paths
    return found


def numbers(events: list[Event]) -> list[int]:
    return [found.seq for found in events]


def kernel_of(wire: Wire, **options: Any) -> Kernel:
    return Kernel(Client(URL, transport=wire, **options), {"id": "k1"})


FIRST = len(lines(EVENTS[:1]))
SOME = len(lines(EVENTS[:3]))
ALL = len(lines(EVENTS))


@pytest.mark.parametrize(
    ("broken", "then"),
    [
        (LOST, "POST /execute"),
        (raising(httpx2.WriteError("broken pipe")), "POST /execute"),
        (STOPPING, "POST /execute"),
        (events_to(0, RESET), "POST /execute"),
        (events_to(0), "POST /execute"),
        (events_to(FIRST - 1, RESET), "POST /execute"),
        (events_to(FIRST, RESET), "GET /executions/e1/events?after=1"),
        (events_to(SOME, RESET), "GET /executions/e1/events?after=3"),
        (events_to(SOME), "GET /executions/e1/events?after=3"),
        (events_to(SOME + 10, RESET), "GET /executions/e1/events?after=3"),
        (events_to(ALL - 1), "GET /executions/e1/events?after=4"),
    ],
    ids=[
        "no answer",
        "not sent",
        "stopping",
        "headers",
        "empty",
        "half",
        "one",
        "events",
        "clean end",
        "half line",
        "last line",
    ],
)
def test_a_stream_goes_on_wherever_it_breaks(broken: Step, then: str) -> None:
    wire = Wire([broken, events_to()])
    assert numbers(streamed(wire)) == [1, 2, 3, 4, 5]
    assert wire.paths == ["POST /execute", then]
    assert {seen.key for seen in wire.seen if seen.method == "POST"} == {"mine"}
    assert {seen.headers["accept"] for seen in wire.seen} == {"application/x-ndjson"}


def test_a_restart_of_the_gateway_is_outlasted() -> None:
    wire = Wire([events_to(SOME, RESET), REFUSED, STOPPING, REFUSED, events_to(FIRST, RESET), LOST, events_to()])
    assert numbers(streamed(wire)) == [1, 2, 3, 4, 5]


def test_events_that_come_again_are_hidden() -> None:
    again = events_to(events=EVENTS)
    wire = Wire([events_to(SOME, RESET), lambda seen: again(Seen("POST", "", {}, b""))])
    assert numbers(streamed(wire)) == [1, 2, 3, 4, 5]
    double = [EVENTS[0], *EVENTS, EVENTS[-1]]
    assert numbers(streamed(Wire([events_to(events=double)]))) == [1, 2, 3, 4, 5]


def test_a_break_after_the_end_is_none() -> None:
    wire = Wire([events_to(None, RESET)])
    assert numbers(streamed(wire)) == [1, 2, 3, 4, 5]
    assert wire.paths == ["POST /execute"]


def failed(wire: Wire, **options: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        streamed(wire, **options)
    return caught.value


@pytest.mark.parametrize(("status", "code"), [(404, "execution_not_found"), (410, "kernel_gone")])
def test_an_execution_that_the_next_gateway_does_not_know_is_told(status: int, code: str) -> None:
    error = failed(Wire([events_to(SOME, RESET), REFUSED, problem(status, code)]))
    assert isinstance(error, ConnectionLost)
    assert (error.execution_id, error.forgotten) == ("e1", True)
    assert f"can't tell of execution 'e1': It is {code}." in str(error)
    assert "kernel.result" not in str(error)


def test_a_refusal_after_a_break_is_what_it_says() -> None:
    for wire in (Wire([LOST, problem(410, "kernel_gone")]), Wire([events_to(SOME, RESET), problem(401, "unauthorized")])):
        error = failed(wire)
        assert isinstance(error, ApiError)
        assert error.status in (401, 410)


def test_without_reconnect_a_break_is_told_at_once() -> None:
    wire = Wire([events_to(SOME, RESET)])
    error = failed(wire, reconnect=0)
    assert isinstance(error, ConnectionLost)
    assert error.execution_id == "e1"
    assert "(reset). `kernel.result('e1')` tells" in str(error)
    with pytest.raises(ConnectionLost):
        kernel_of(Wire([LOST]), reconnect=0).execute("1")
    with pytest.raises(ApiError):
        kernel_of(Wire([STOPPING]), reconnect=0).execute("1")


@pytest.mark.parametrize("away", [REFUSED, STOPPING, LOST, events_to(0, RESET), problem(502, "http_502")])
def test_a_gateway_that_stays_away_is_given_up_in_time(clock: Clock, away: Step) -> None:
    error = failed(Wire([events_to(SOME, RESET)], then=away), reconnect=30)
    assert isinstance(error, ConnectionLost)
    assert (error.execution_id, error.forgotten) == ("e1", False)
    assert "`kernel.result('e1')` tells" in str(error)
    assert sum(clock.waits) == pytest.approx(30)
    assert max(clock.waits) <= repeating.LONGEST_PAUSE


def test_each_outage_has_its_own_time(clock: Clock) -> None:
    away = [REFUSED] * 12
    wire = Wire([events_to(FIRST, RESET), *away, events_to(len(lines(EVENTS[1:3])), RESET), *away, events_to()])
    assert numbers(streamed(wire, reconnect=30)) == [1, 2, 3, 4, 5]
    assert sum(clock.waits) > 30


def test_a_connection_that_held_for_long_was_no_failure_though_nothing_came(clock: Clock) -> None:
    """A silent cell behind a proxy that cuts idle connections is followed for as long as it runs."""

    def idle(seen: Seen) -> httpx2.Response:
        def wait() -> bytes:
            clock.now += 60
            return b""

        class Silent(Body):
            def __iter__(self) -> Iterator[bytes]:
                yield wait()

        return httpx2.Response(200, stream=Silent([], None))

    assert numbers(streamed(Wire([events_to(SOME), *[idle] * 20, events_to()]))) == [1, 2, 3, 4, 5]


def test_a_gateway_that_accepts_and_breaks_off_is_given_up_too() -> None:
    assert isinstance(failed(Wire([events_to(SOME)], then=events_to(0))), ConnectionLost)


def test_the_pauses_grow_and_differ(clock: Clock) -> None:
    with pytest.raises(ConnectionLost):
        kernel_of(Wire(then=LOST), reconnect=20).execute("1")
    base = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert all(wait / 2 <= found <= wait for found, wait in zip(clock.waits, base, strict=False))
    assert len(clock.waits) > len(base)


def test_who_waits_is_told_once_and_when_it_is_over() -> None:
    told: list[str] = []
    wire = Wire([events_to(SOME, RESET), REFUSED, STOPPING, events_to(), LOST, whole({"kernels": []})])
    with Client(URL, transport=wire, on_reconnect=lambda error: told.append(type(error).__name__)) as client:
        list(Kernel(client, {"id": "k1"}).stream("1"))
        assert told == ["ConnectionLost", "NoneType"]
        client.kernels.list()
    assert told == ["ConnectionLost", "NoneType"] * 2


# Calls with one answer


def test_an_execute_is_repeated_with_its_key_and_its_body() -> None:
    truncated = httpx2.RemoteProtocolError("peer closed connection without sending complete message body")
    wire = Wire(
        [LOST, STOPPING, REFUSED, lambda seen: httpx2.Response(200, stream=Body([b'{"exec'], truncated)), whole(RESULT)]
    )
    result = kernel_of(wire).execute("1", on_disconnect="continue")
    assert (result.status, result.last_seq) == ("ok", 5)
    assert len({(seen.path, seen.key, seen.content) for seen in wire.seen}) == 1
    assert orjson.loads(wire.seen[0].content) == {"code": "1", "on_disconnect": "continue"}


def test_an_execute_whose_cell_runs_for_long_outlasts_any_number_of_outages(clock: Clock) -> None:
    def hour_later(seen: Seen) -> httpx2.Response:
        clock.now += 3600
        raise httpx2.ReadError("reset")

    wire = Wire([LOST, hour_later, REFUSED, hour_later, STOPPING, whole(RESULT)])
    assert kernel_of(wire).execute("1").ok


def test_each_request_has_a_key_of_its_own_unless_one_is_given() -> None:
    wire = Wire(then=whole(RESULT | {"id": "k1"}))
    client = Client(URL, transport=wire)
    kernel = client.kernels.create()
    client.kernels.create(idempotency_key="k")
    kernel.execute("1")
    kernel.execute("1", idempotency_key="x y")
    kernel.submit("1")
    keys = [seen.key or "" for seen in wire.seen]
    assert (keys[1], keys[3], len(set(keys)), min(map(len, keys))) == ("k", "x y", 5, 1)
    for wrong in ("", "x" * 256, "é", "a\nb"):
        with pytest.raises(ValueError, match="printable ASCII"):
            kernel.execute("1", idempotency_key=wrong)
    assert len(wire.seen) == 5


def test_a_create_is_repeated_and_a_failed_start_is_not() -> None:
    wire = Wire([LOST, whole({"id": "k2"}, 201), problem(502, "start_failed")])
    client = Client(URL, transport=wire)
    assert client.kernels.create(label="x").id == "k2"
    assert wire.seen[0].key == wire.seen[1].key
    with pytest.raises(ApiError):
        client.kernels.create()


@pytest.mark.parametrize("status", [204, 404, 410])
def test_a_deletion_that_has_worked_by_its_second_answer_is_done(status: int) -> None:
    wire = Wire([LOST, whole({"code": "kernel_gone"}, status)])
    kernel_of(wire).delete()
    assert wire.paths == ["DELETE ", "DELETE "]
    wire = Wire([LOST, whole({}, status)])
    kernel_of(wire).cancel("e1")


def test_a_deletion_of_what_never_was_is_told() -> None:
    for steps in ([problem(404, "kernel_not_found")], [STOPPING, problem(404, "kernel_not_found")]):
        with pytest.raises(ApiError):
            kernel_of(Wire(steps)).delete()


@pytest.mark.parametrize("broken", [LOST, STOPPING, REFUSED])
@pytest.mark.parametrize(
    "call",
    [
        Kernel.interrupt,
        Kernel.restart,
        lambda kernel: kernel.answer("e1", "x"),
        lambda kernel: kernel.files.write("a", b"data"),
    ],
    ids=["interrupt", "restart", "answer", "upload"],
)
def test_what_may_not_be_done_twice_is_sent_once(call: Callable[[Kernel], Any], broken: Step) -> None:
    wire = Wire([whole({"id": "k1"}), broken])
    kernel = kernel_of(wire)
    kernel.info()
    with pytest.raises(ClientError):
        call(kernel)
    assert len(wire.seen) == 2


def test_reads_are_repeated() -> None:
    wire = Wire([LOST, whole({"id": "k1"}), REFUSED, whole(RESULT)])
    kernel = kernel_of(wire)
    assert kernel.info() == {"id": "k1"}
    assert kernel.result("e1").ok


def test_a_download_begins_anew(tmp_path: Path) -> None:
    attachment = {"content-disposition": "attachment"}
    half = Body([b"ha"], RESET)
    wire = Wire(
        [
            lambda seen: httpx2.Response(200, stream=half, headers=attachment),
            lambda seen: httpx2.Response(200, content=b"half", headers=attachment),
        ]
    )
    kernel_of(wire).files.download("a.csv", tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.csv", b"half")]


def test_where_no_gateway_ever_was_nobody_waits(clock: Clock) -> None:
    wire = Wire(then=REFUSED)
    for _ in range(2):
        with pytest.raises(GatewayUnreachable):
            kernel_of(wire).execute("1")
    assert clock.waits == []


def test_a_gateway_that_was_given_up_is_not_waited_for_again(clock: Clock) -> None:
    """The deletion at the end of a block does not take another minute."""
    wire = Wire([whole({"id": "k1"}), LOST], then=REFUSED)
    with Client(URL, transport=wire) as client:

        def work() -> None:
            with client.kernels.create() as kernel:
                kernel.execute("1")

        with pytest.raises(ConnectionLost, match="no gateway has answered since"):
            work()
    assert sum(clock.waits) == pytest.approx(repeating.RECONNECT)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (raising(httpx2.ReadTimeout("timed out")), ConnectionLost),
        (raising(httpx2.LocalProtocolError("illegal header")), ConnectionLost),
        (problem(503, "store_unavailable"), ApiError),
        (problem(502, "http_502"), ApiError),
        (problem(409, "idempotency_conflict"), ApiError),
        (whole([]), NotAGateway),
    ],
)
def test_what_is_no_restart_is_not_waited_for(clock: Clock, step: Step, error: type[ClientError]) -> None:
    with pytest.raises(error):
        kernel_of(Wire([step])).execute("1")
    assert clock.waits == []


# Executions


def test_a_cell_is_submitted_and_followed_later() -> None:
    queued = {"execution_id": "e1", "status": "queued", "last_seq": 1}
    wire = Wire([whole(queued, 202), whole(queued), events_to(len(lines(EVENTS[1:3])), RESET), events_to(), whole(RESULT)])
    kernel = kernel_of(wire)
    assert kernel.submit("1", timeout=5) == "e1"
    assert orjson.loads(wire.seen[0].content) == {"code": "1", "timeout": 5, "detach": True}
    assert kernel.wait("e1").ok
    assert wire.paths == [
        "POST /execute",
        "GET /executions/e1",
        "GET /executions/e1/events?after=1",
        "GET /executions/e1/events?after=3",
        "GET /executions/e1",
    ]


def test_waiting_for_what_has_ended_asks_once() -> None:
    assert kernel_of(Wire([whole(RESULT)])).wait("e1").ok


def test_events_are_replayed_from_anywhere() -> None:
    wire = Wire([REFUSED, events_to(len(lines(EVENTS[2:3])), RESET), events_to()])
    kernel = kernel_of(wire)
    kernel._client.contact.reached = True
    assert numbers(list(kernel.events("e1", after=2))) == [3, 4, 5]
    assert wire.paths[-1] == "GET /executions/e1/events?after=3"
    with pytest.raises(ApiError, match="execution_not_found"):
        list(kernel_of(Wire([problem(404, "execution_not_found")])).events("e1"))


def test_executions_are_listed_in_pages_and_data_is_read_as_bytes() -> None:
    summary = {"execution_id": "e1", "number": 7}
    wire = Wire([whole({"executions": [summary], "next": None})] * 3 + [lambda seen: httpx2.Response(200, content=b"\x89PNG")])
    kernel = kernel_of(wire)
    assert kernel.executions() == kernel.executions(limit=5) == kernel.executions(5, before=8) == [summary]
    assert kernel.data("e1", 3, "image/svg+xml") == b"\x89PNG"
    assert wire.paths == [
        "GET /executions",
        "GET /executions?limit=5",
        "GET /executions?limit=5&before=8",
        "GET /executions/e1/events/3/data?type=image%2Fsvg%2Bxml",
    ]


def test_a_result_tells_what_is_missing() -> None:
    gap = {"events": 3, "bytes": None}
    warning = {"code": "memory_80", "message": "much"}
    found = kernel_of(Wire([whole(RESULT | {"gap": gap, "truncated": {"bytes": 9}, "warnings": [warning]})])).result("e1")
    assert (found.gap, found.truncated, found.warnings, found.ended) == (gap, {"bytes": 9}, [warning], True)
    old = kernel_of(Wire([whole({"execution_id": "e1", "status": "running"})])).result("e1")
    assert (old.gap, old.truncated, old.warnings, old.last_seq, old.ended) == (None, None, [], None, False)


@pytest.mark.anyio
async def test_the_asynchronous_client_offers_the_same() -> None:
    queued = {"execution_id": "e1", "status": "queued"}
    steps = [LOST, whole(queued, 202), whole(queued), events_to(SOME, RESET), REFUSED, events_to(), whole(RESULT)]
    more = [whole({"executions": []}), lambda seen: httpx2.Response(200, content=b"x"), LOST, whole({}, 410)]
    wire = Wire([*steps, *more])
    async with AsyncClient(URL, transport=wire) as client:
        kernel = AsyncKernel(client, {"id": "k1"})
        assert await kernel.submit("1") == "e1"
        assert (await kernel.wait("e1")).ok
        assert await kernel.executions() == []
        assert await kernel.data("e1", 1, "image/png") == b"x"
        await kernel.delete()
    assert wire.seen[0].key == wire.seen[1].key


@pytest.mark.anyio
async def test_the_asynchronous_download_begins_anew(tmp_path: Path) -> None:
    attachment = {"content-disposition": "attachment"}
    half = Body([b"ha"], RESET)
    answers = [httpx2.Response(200, stream=half, headers=attachment), httpx2.Response(200, content=b"half", headers=attachment)]
    async with AsyncClient(URL, transport=Wire([lambda seen, answer=answer: answer for answer in answers])) as client:  # type: ignore[misc]
        await AsyncKernel(client, {"id": "k1"}).files.download("a.csv", tmp_path)
    assert (tmp_path / "a.csv").read_bytes() == b"half"


# Exactly once


@st.composite
def outages(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Step]]:
    """An execution of any length, and a wire that breaks at any byte, in any way, any number of times."""
    texts = draw(st.lists(st.text(max_size=8), max_size=8))
    events = [event(seq, name="stdout", text=text) for seq, text in enumerate(texts, 1)]
    events.append(event(len(texts) + 1, "ended", **ENDED))
    size = len(lines(events))
    errors = st.sampled_from([None, RESET, httpx2.RemoteProtocolError("incomplete chunked read")])
    piece = st.integers(1, 40)

    def broken(cut: int, error: Exception | None, length: int, replayed: int) -> Step:
        def answer(seen: Seen) -> httpx2.Response:
            data = lines(events, max(0, after(seen) - replayed))[:cut]
            pieces = [data[start : start + length] for start in range(0, len(data), length)]
            return httpx2.Response(200, stream=Body(pieces, error))

        return answer

    breaks = st.builds(broken, st.integers(0, size), errors, piece, st.integers(0, 3))
    steps = draw(st.lists(st.one_of(breaks, st.sampled_from([LOST, STOPPING])), max_size=6))
    return events, [*steps, broken(size, None, draw(piece), draw(st.integers(0, 3)))]


@given(outages())
def test_each_event_comes_exactly_once_and_in_order(plan: tuple[list[dict[str, Any]], list[Step]]) -> None:
    events, steps = plan
    with pytest.MonkeyPatch.context() as monkeypatch:
        patched(monkeypatch)
        found = streamed(Wire(steps))
    assert [one.to_dict() for one in found] == events
