"""The one door, as plain ASGI: what reaches the application behind it, and how everything else is answered."""

from typing import Any

import anyio
import orjson
import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.api.guard import Guard
from gateway.errors import BodyTooLarge, MalformedBody
from gateway.settings import ServerSettings

pytestmark = pytest.mark.anyio

TOKEN = "Bearer let-me-in"
OWN = {"host": "127.0.0.1:8890", "authorization": TOKEN}


class Visit:
    """One request through a guard: what came in, and what was answered."""

    def __init__(self, messages: list[Message] | None = None, **settings: Any) -> None:
        self.entered: list[Scope] = []
        self.body = b""
        self.sent: list[Message] = []
        self.error: Exception | None = None
        self._messages = messages or [{"type": "http.request", "body": b"", "more_body": False}]
        self._guard = Guard(self._app, ServerSettings(**settings), lambda header: header == TOKEN)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entered.append(scope)
        if scope["type"] != "http":
            return
        try:
            more = True
            while more:
                message = await receive()
                self.body += message.get("body", b"")
                more = message.get("more_body", False)
        except (BodyTooLarge, MalformedBody) as error:
            self.error = error
        await send({"type": "http.response.start", "status": 200, "headers": [(b"referrer-policy", b"origin")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def go(self, headers: dict[str, str], method: str = "GET", path: str = "/v1/kernels", **scope: Any) -> "Visit":
        messages = iter(self._messages)

        async def receive() -> Message:
            try:
                return next(messages)
            except StopIteration:
                await anyio.sleep_forever()
                raise

        async def send(message: Message) -> None:
            self.sent.append(message)

        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        with anyio.fail_after(10):
            await self._guard({"type": "http", "method": method, "path": path, "headers": raw, **scope}, receive, send)
        return self

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def code(self) -> str:
        code: str = orjson.loads(self.sent[1]["body"])["code"]
        return code

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


async def test_who_has_the_token_comes_in() -> None:
    visit = await Visit().go(OWN)
    assert visit.status == 200
    assert len(visit.entered) == 1


@pytest.mark.parametrize("token", [None, "", "Bearer", "Bearer wrong", "let-me-in", f"{TOKEN} "])
async def test_who_has_not_does_not(token: str | None) -> None:
    headers = {"host": OWN["host"], **({} if token is None else {"authorization": token})}
    visit = await Visit().go(headers)
    assert (visit.status, visit.code) == (401, "unauthorized")
    assert "www-authenticate" in visit.headers
    assert visit.entered == []


@pytest.mark.parametrize(
    ("path", "open_"),
    [("/healthz", True), ("/healthz/", False), ("/v1/healthz", False), ("//healthz", False), ("/HEALTHZ", False)],
)
async def test_one_path_is_open(path: str, open_: bool) -> None:
    visit = await Visit().go({"host": OWN["host"]}, path=path)
    assert bool(visit.entered) is open_


HOSTS_IN = [
    "127.0.0.1",
    "127.0.0.1:8890",
    "localhost",
    "LOCALHOST:1",
    "[::1]",
    "[::1]:8890",
    "10.1.2.3:80",
    "lab.example",
    "Lab.Example:443",
]
HOSTS_OUT = [
    "",
    "evil.example",
    "localhost.evil.example",
    "evil.example:8890",
    "127.0.0.1.evil.example",
    "lab.example.evil",
    "[::1",
    "[",
    ":",
    "a b",
    "@",
    "user@",
]


@pytest.mark.parametrize("host", HOSTS_IN)
async def test_known_hosts(host: str) -> None:
    assert (await Visit(allowed_hosts=("lab.example",)).go({**OWN, "host": host})).status == 200


@pytest.mark.parametrize("path", ["/v1/kernels", "/healthz"])
@pytest.mark.parametrize("host", HOSTS_OUT)
async def test_foreign_hosts_are_refused_even_with_the_token(host: str, path: str) -> None:
    """DNS rebinding: a web page's own name that points here."""
    visit = await Visit(allowed_hosts=("lab.example",)).go({**OWN, "host": host}, path=path)
    assert (visit.status, visit.code) == (403, "forbidden_origin")
    assert visit.entered == []


async def test_no_host_at_all() -> None:
    assert (await Visit().go({"authorization": TOKEN})).status == 403


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:8890", True),
        ("https://127.0.0.1:8890", True),
        ("https://lab.example", True),
        ("null", False),
        ("", False),
        ("http://127.0.0.1", False),
        ("http://127.0.0.1:9999", False),
        ("http://localhost:8890", False),
        ("https://lab.example.evil", False),
        ("https://lab.example:444", False),
        ("http://lab.example", False),
        ("https://LAB.example", False),
        ("https://evil.example", False),
        ("file://127.0.0.1:8890", False),
        ("chrome-extension://127.0.0.1:8890", False),
        ("http://[::1", False),
        ("127.0.0.1:8890", False),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_origins(origin: str, allowed: bool, kind: str) -> None:
    visit = await Visit(allowed_origins=("https://lab.example",)).go({**OWN, "origin": origin}, type=kind)
    assert bool(visit.entered) is allowed
    if not allowed and kind == "http":
        assert (visit.status, visit.code) == (403, "forbidden_origin")


async def test_who_sends_no_origin_is_no_web_page() -> None:
    assert (await Visit().go(OWN)).status == 200


# WebSockets


async def test_a_websocket_passes_untouched() -> None:
    visit = await Visit().go(OWN, type="websocket")
    assert visit.entered[0]["type"] == "websocket"
    assert visit.sent == []


@pytest.mark.parametrize(
    ("headers", "status", "close"), [({"host": OWN["host"]}, 401, 4401), ({**OWN, "host": "evil.example"}, 403, 4403)]
)
async def test_a_refused_websocket(headers: dict[str, str], status: int, close: int) -> None:
    visit = await Visit().go(headers, type="websocket")
    assert [(message["type"], message["code"]) for message in visit.sent] == [("websocket.close", close)]
    visit = await Visit().go(headers, type="websocket", extensions={"websocket.http.response": {}})
    assert [message["type"] for message in visit.sent] == ["websocket.http.response.start", "websocket.http.response.body"]
    assert visit.status == status
    assert visit.entered == []


async def test_the_lifespan_passes() -> None:
    visit = Visit()
    await visit.go({}, type="lifespan")
    assert visit.entered[0]["type"] == "lifespan"


# Jupyter's paths


@pytest.mark.parametrize(
    "path", ["/api/kernels", "/api/kernels/x/channels", "/kernelspecs/python3/logo-svg.svg", "/api/contents"]
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_all_spellings_of_the_token_on_jupyters_paths(path: str, kind: str) -> None:
    for headers, query in (
        ({"authorization": "token let-me-in"}, b""),
        ({"authorization": "TOKEN let-me-in"}, b""),
        ({}, b"token=let-me-in"),
        ({}, b"a=1&token=let%2Dme-in&b"),
        ({"authorization": "token wrong"}, b"token=let-me-in"),
        ({"authorization": "token let-me-in"}, b"token=wrong"),
    ):
        visit = await Visit().go({"host": OWN["host"], **headers}, path=path, query_string=query, type=kind)
        assert len(visit.entered) == 1
    for query in (b"", b"token=", b"token=wrong", b"Token=let-me-in", b"token=let-me-in%00", b"\xff=%ff&token"):
        visit = await Visit().go({"host": OWN["host"]}, path=path, query_string=query, type=kind)
        assert visit.entered == []


@pytest.mark.parametrize("path", ["/v1/kernels", "/metrics", "/", "/apix", "/kernelspecsx", "//api/kernels", "/API/kernels"])
async def test_one_spelling_everywhere_else(path: str) -> None:
    visit = await Visit().go(
        {"host": OWN["host"], "authorization": "token let-me-in"}, path=path, query_string=b"token=let-me-in"
    )
    assert (visit.status, visit.code) == (401, "unauthorized")
    assert visit.entered == []


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("query", "left"),
    [
        (b"", b""),
        (b"token=let-me-in", b""),
        (b"session_id=x&token=let-me-in", b"session_id=x"),
        (b"%74oken=let-me-in&a=%20", b"a=%20"),
        (b"token=let-me-in&token=again&tokens=1", b"tokens=1"),
    ],
)
async def test_the_token_of_a_query_goes_no_further(kind: str, query: bytes, left: bytes) -> None:
    visit = await Visit().go(OWN, path="/api/kernels/x/channels", query_string=query, type=kind)
    assert visit.entered[0]["query_string"] == left


async def test_errors_are_told_in_jupyters_way() -> None:
    for headers, status in (({"host": OWN["host"]}, 401), ({**OWN, "origin": "https://evil.example"}, 403)):
        visit = await Visit().go(headers, path="/api/kernels")
        assert visit.status == status
        assert set(orjson.loads(visit.sent[1]["body"])) == {"message", "reason", "cellgate"}


@pytest.mark.parametrize(
    ("method", "path", "open_"),
    [
        ("GET", "/api", True),
        ("GET", "/api/", True),
        ("POST", "/api", False),
        ("HEAD", "/api", False),
        ("GET", "/api/status", False),
        ("GET", "/user/x/api", False),
    ],
)
async def test_the_version_is_open(method: str, path: str, open_: bool) -> None:
    visit = await Visit().go({"host": OWN["host"]}, method, path)
    assert bool(visit.entered) is open_


async def test_the_version_of_a_websocket_is_not() -> None:
    visit = await Visit().go({"host": OWN["host"]}, path="/api", type="websocket")
    assert visit.entered == []


# preflights


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({}, "/api/kernels", 200),
        ({}, "/v1/kernels", 401),
        ({"origin": "https://lab.example"}, "/v1/kernels", 401),
        ({"origin": "https://lab.example", "access-control-request-method": "POST"}, "/v1/kernels", 200),
        ({"origin": "https://evil.example", "access-control-request-method": "POST"}, "/v1/kernels", 403),
        ({"origin": "https://evil.example", "access-control-request-method": "POST"}, "/api/kernels", 403),
        ({"origin": "null", "access-control-request-method": "POST"}, "/api/kernels", 403),
    ],
)
async def test_preflights_are_answered_at_the_door(headers: dict[str, str], path: str, status: int) -> None:
    visit = await Visit(allowed_origins=("https://lab.example",)).go({"host": OWN["host"], **headers}, "OPTIONS", path)
    assert visit.status == status
    assert visit.entered == []
    assert ("access-control-allow-origin" in visit.headers) is ("lab.example" in headers.get("origin", ""))


# a base URL


@pytest.mark.parametrize(
    ("path", "status", "below"),
    [
        ("/user/x/v1/kernels", 200, "/v1/kernels"),
        ("/user/x/api/kernels/", 200, "/api/kernels"),
        ("/user/x/", 200, "/"),
        ("/user/x", 200, ""),
        ("/v1/kernels", 404, None),
        ("/api", 404, None),
        ("/healthz", 404, None),
        ("/user/xy/v1/kernels", 404, None),
        ("/user/x/../v1/kernels", 200, "/../v1/kernels"),
    ],
)
async def test_a_base_url(path: str, status: int, below: str | None) -> None:
    visit = await Visit(base_url="/user/x/").go(OWN, path=path)
    assert visit.status == status
    if below is not None:
        assert visit.entered[0]["root_path"] + below == visit.entered[0]["path"]
        assert visit.entered[0]["root_path"] == "/user/x"
    visit = await Visit(base_url="/user/x/").go({"host": OWN["host"]}, path=path)
    assert visit.status == 401


async def test_healthz_below_a_base_url_is_open() -> None:
    assert (await Visit(base_url="/user/x/").go({"host": OWN["host"]}, path="/user/x/healthz")).status == 200


# answers


@pytest.mark.parametrize("headers", [OWN, {"host": OWN["host"]}], ids=["let in", "refused"])
async def test_every_answer_has_the_security_headers(headers: dict[str, str]) -> None:
    found = (await Visit().go(headers)).headers
    assert found["x-content-type-options"] == "nosniff"
    assert found["cache-control"] == "no-store"
    assert found["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert found["cross-origin-resource-policy"] == "same-origin"


async def test_a_route_may_say_otherwise() -> None:
    assert (await Visit().go(OWN)).headers["referrer-policy"] == "origin"


# bodies


def pieces(*sizes: int) -> list[Message]:
    last = len(sizes) - 1
    return [{"type": "http.request", "body": bytes(size), "more_body": n < last} for n, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [(0,), (99,), (100,), (50, 50), (0, 100, 0), (1,) * 100])
async def test_a_body_up_to_the_limit(sizes: tuple[int, ...]) -> None:
    visit = await Visit(pieces(*sizes), max_body=100).go(OWN, "POST")
    assert (visit.error, len(visit.body)) == (None, sum(sizes))


@pytest.mark.parametrize("sizes", [(101,), (50, 51), (100, 1), (1,) * 101, (100, 0, 1)])
async def test_a_body_above_the_limit(sizes: tuple[int, ...]) -> None:
    visit = await Visit(pieces(*sizes), max_body=100).go(OWN, "POST")
    assert isinstance(visit.error, BodyTooLarge)
    assert len(visit.body) <= 100


@pytest.mark.parametrize(
    ("declared", "entered"), [("100", True), ("101", False), ("9" * 30, False), ("-1", True), ("x", True), ("", True)]
)
async def test_a_body_that_says_it_is_too_large_is_refused_unread(declared: str, entered: bool) -> None:
    visit = await Visit(pieces(5), max_body=100).go({**OWN, "content-length": declared}, "POST")
    assert bool(visit.entered) is entered
    if not entered:
        assert (visit.status, visit.code) == (413, "body_too_large")


async def test_uploads_have_a_limit_of_their_own() -> None:
    visit = await Visit(pieces(500), max_body=100, max_upload=500).go(OWN, "PUT")
    assert visit.error is None
    visit = await Visit(pieces(501), max_body=1000, max_upload=500).go(OWN, "PUT")
    assert isinstance(visit.error, BodyTooLarge)


async def test_a_body_that_stops_coming() -> None:
    visit = await Visit(pieces(5, 5)[:1], body_timeout=0.02).go(OWN, "POST")
    assert isinstance(visit.error, MalformedBody)
    assert visit.body == bytes(5)


async def test_a_client_that_leaves_is_no_slow_body() -> None:
    visit = await Visit([{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]).go(
        OWN, "POST"
    )
    assert visit.error is None


async def test_after_the_body_there_is_no_hurry() -> None:
    """A long answer waits on the same channel for the client to leave."""
    waited: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        with anyio.move_on_after(0.1) as patience:
            await receive()
        waited.append(patience.cancelled_caught)

    messages = iter(pieces(5))

    async def receive() -> Message:
        for message in messages:
            return message
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError(message)

    guard = Guard(app, ServerSettings(body_timeout=0.02), lambda _header: True)
    headers = [(b"host", b"localhost")]
    await guard({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send)
    assert waited == [True]
