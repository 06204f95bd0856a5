"""Nobody enters without the token, from a foreign web page, or under a foreign name: on any route, HTTP or WebSocket.

The routes are found by walking the application, so that one which is added later can't be forgotten here.
"""

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
import pytest
from websockets.exceptions import InvalidStatus

from tests.api.conftest import HOST, ORIGIN
from tests.api.routes import APP, HTTP_ROUTES, SOCKETS, Route
from tests.support import Gateway, Kernel, problem, running


def title(route: Route) -> str:
    return f"{route.method or 'WS'} {route.path}"


@pytest.fixture(scope="module")
def stranger(strict: Gateway) -> Iterator[httpx2.Client]:
    """A client without a token."""
    with httpx2.Client(base_url=strict.url, timeout=60) as client:
        yield client


def credentials(token: str) -> dict[str, dict[str, str]]:
    return {
        "absent": {},
        "empty": {"Authorization": ""},
        "empty bearer": {"Authorization": "Bearer"},
        "no scheme": {"Authorization": token},
        "wrong": {"Authorization": "Bearer " + "x" * len(token)},
        "shorter": {"Authorization": f"Bearer {token[:-1]}"},
        "longer": {"Authorization": f"Bearer {token}x"},
        "another case": {"Authorization": f"Bearer {token.swapcase()}"},
        "basic": {"Authorization": f"Basic {token}"},
        "token scheme": {"Authorization": f"token {token}"},
        "twice": {"Authorization": f"Bearer {token} {token}"},
        "other header": {"X-Api-Key": token, "X-Auth-Token": token},
        "cookie": {"Cookie": f"token={token}; Authorization=Bearer {token}"},
        "long": {"Authorization": "Bearer " + "x" * 8000},
    }


KINDS = list(credentials(""))


def test_the_walk_finds_every_route() -> None:
    documented = {(method.upper(), path) for path, methods in APP.openapi()["paths"].items() for method in methods}
    native = {(route.method, route.path.replace(":path", "")) for route in HTTP_ROUTES if not route.jupyter}
    assert native == documented | {("GET", "/openapi.json"), ("GET", "/metrics")}
    assert len(native) > 15
    assert len(HTTP_ROUTES) - len(native) > 15
    assert "/v1/kernels/{kernel_id}/ws" in [route.path for route in SOCKETS]


@pytest.mark.parametrize("route", HTTP_ROUTES, ids=title)
def test_no_route_answers_without_the_token(stranger: httpx2.Client, strict: Gateway, route: Route) -> None:
    assert route.method
    if route.open:
        assert stranger.get(route.path).status_code == 200
        return
    for kind, headers in credentials(strict.token).items():
        if route.jupyter and kind == "token scheme":
            continue
        answer = stranger.request(route.method, route.url, headers=headers, json={})
        if route.jupyter:
            assert (answer.status_code, answer.json()["cellgate"]["code"]) == (401, "unauthorized")
        else:
            assert problem(answer, 401, "unauthorized")["retryable"] is False
        assert answer.headers["www-authenticate"].startswith("Bearer")
    # With it the same request gets as far as its own merits; there is no such kernel.
    body: Any = {"code": "1"} if "execute" in route.path else {"name": "none"} if route.jupyter else {"value": "1"}
    assert strict.http.request(route.method, route.url, json=body).status_code in (200, 400, 404, 422)


def test_what_is_open_says_little(stranger: httpx2.Client) -> None:
    assert stranger.get("/healthz").json() == {"status": "ok"}
    assert set(stranger.get("/api").json()) == {"version", "cellgate_version"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", SOCKETS, ids=title)
def test_no_websocket_opens_without_the_token(strict: Gateway, kernel: Kernel, route: Route, kind: str) -> None:
    if route.jupyter and kind == "token scheme":
        return
    for path in (route.url, route.path.replace("{kernel_id}", kernel.id)):
        answer = refused(strict, path, credentials(strict.token)[kind])
        assert answer.status_code == 401
        assert answer.headers["content-type"] == ("application/json" if route.jupyter else "application/problem+json")
        assert b'"code":"unauthorized"' in answer.body


def refused(gateway: Gateway, path: str, headers: dict[str, str]) -> Any:
    """The answer to a WebSocket handshake that is refused: before it is accepted, and so as HTTP."""
    with pytest.raises(InvalidStatus) as error, gateway.connect(path, headers):
        pass
    return error.value.response


def test_a_token_in_the_query_is_no_token_to_the_native_api(stranger: httpx2.Client, strict: Gateway, kernel: Kernel) -> None:
    for name in ("token", "access_token", "Authorization"):
        problem(stranger.get("/v1/kernels", params={name: strict.token}), 401, "unauthorized")
        problem(stranger.get("/metrics", params={name: strict.token}), 401, "unauthorized")
        assert refused(strict, f"{kernel.path}/ws?{name}={strict.token}", {}).status_code == 401


def test_an_unknown_route_is_not_told_from_a_known_one(stranger: httpx2.Client) -> None:
    for path in (
        "/v2/kernels",
        "/docs",
        "/redoc",
        "/metrics",
        "/",
        "/v1",
        "/openapi.json",
        "/healthz/",
        "//healthz",
        "/healthz/../v1/kernels",
    ):
        problem(stranger.get(path), 401, "unauthorized")
    for path in ("/api/contents", "/api/kernels/x/y", "/kernelspecs", "/api//"):
        assert stranger.get(path).status_code == (200 if path == "/api//" else 401)


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "TRACE", "PATCH", "HEAD"])
def test_other_methods_need_the_token_too(stranger: httpx2.Client, method: str) -> None:
    assert stranger.request(method, "/v1/kernels").status_code == 401


# origin


def evil_origins(gateway: Gateway) -> dict[str, str]:
    own = gateway.url
    return {
        "foreign": "https://evil.example",
        "null": "null",
        "empty": "",
        "suffix": f"{ORIGIN}.evil.example",
        "prefix": f"https://evil{ORIGIN.removeprefix('https://')}",
        "other scheme": ORIGIN.replace("https", "http"),
        "other port": f"{ORIGIN}:8443",
        "with a path": f"{ORIGIN}/",
        "upper case": ORIGIN.upper(),
        "own host, other port": f"{own.rpartition(':')[0]}:1",
        "own host as user": f"{own}@evil.example",
        "own host as suffix": f"http://evil.example#{own.removeprefix('http://')}",
        "localhost": "http://localhost",
        "file": "file://",
        "two": f"{ORIGIN} {ORIGIN}",
    }


@pytest.mark.parametrize(
    "kind",
    [
        "foreign",
        "null",
        "empty",
        "suffix",
        "prefix",
        "other scheme",
        "other port",
        "with a path",
        "upper case",
        "own host, other port",
        "own host as user",
        "own host as suffix",
        "localhost",
        "file",
        "two",
    ],
)
def test_a_foreign_page_may_not_call(strict: Gateway, kernel: Kernel, kind: str) -> None:
    origin = evil_origins(strict)[kind]
    headers = {"Origin": origin}
    problem(strict.http.get("/v1/kernels", headers=headers), 403, "forbidden_origin")
    problem(strict.http.post(f"{kernel.path}/execute", json={"code": "1"}, headers=headers), 403, "forbidden_origin")
    problem(strict.http.get("/healthz", headers=headers), 403, "forbidden_origin")
    answer = refused(strict, f"{kernel.path}/ws", strict.headers | headers)
    assert (answer.status_code, b"forbidden_origin" in answer.body) == (403, True)


def test_the_same_origin_and_an_allowed_one_may_call(strict: Gateway, kernel: Kernel) -> None:
    for origin in (ORIGIN, strict.url):
        headers = {"Origin": origin}
        assert strict.http.get("/v1/kernels", headers=headers).status_code == 200
        with strict.connect(f"{kernel.path}/ws", strict.headers | headers) as connection:
            connection.send('{"op": "ping"}')
            assert "pong" in str(connection.recv(timeout=60))
        # But not without the token.
        assert refused(strict, f"{kernel.path}/ws", headers).status_code == 401


# host


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        f"{HOST}.evil.example",
        f"evil-{HOST}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[",
        "[::1",
        "a b",
        "",
    ],
)
def test_a_foreign_host_is_not_served(strict: Gateway, kernel: Kernel, host: str) -> None:
    # What a web page gets who rebinds a name of its own to this address.
    problem(strict.http.get("/v1/kernels", headers={"Host": host}), 403, "forbidden_origin")
    problem(strict.http.get("/healthz", headers={"Host": host}), 403, "forbidden_origin")


def test_a_foreign_host_opens_no_websocket(strict: Gateway, kernel: Kernel) -> None:
    upgrade = (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    )
    for host, status in (("evil.example", b"403"), (HOST, b"101")):
        address = urlsplit(strict.url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            head = f"GET {kernel.path}/ws HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {strict.token}\r\n{upgrade}\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(65536).split(b" ", 2)[1] == status


@pytest.mark.parametrize(
    "host", [HOST, f"{HOST}:8890", HOST.upper(), "localhost", "localhost:1234", "127.0.0.1", "[::1]:80", "10.1.2.3:8890"]
)
def test_a_known_host_is_served(strict: Gateway, host: str) -> None:
    assert strict.http.get("/v1/kernels", headers={"Host": host}).status_code == 200


# headers of answers


def test_every_answer_carries_the_security_headers(strict: Gateway, stranger: httpx2.Client, kernel: Kernel) -> None:
    strict.http.put(kernel.file("page.html"), content=b"<script>alert(1)</script>")
    answers = [
        strict.http.get("/healthz"),
        strict.http.get("/v1/kernels"),
        strict.http.get("/openapi.json"),
        kernel.post("1"),
        kernel.post("1", "text/event-stream"),
        strict.http.get(kernel.file("page.html")),
        strict.http.get("/nothing"),
        strict.http.patch("/v1/kernels"),
        strict.http.post("/v1/kernels", content=b"{", headers={"Content-Type": "application/json"}),
        stranger.get("/v1/kernels"),
        strict.http.get("/v1/kernels", headers={"Origin": "https://evil.example"}),
        strict.http.get("/v1/kernels", headers={"Host": "evil.example"}),
    ]
    for answer in answers:
        assert answer.headers.get("x-content-type-options") == "nosniff", answer.url
        assert answer.headers.get("referrer-policy") == "no-referrer", answer.url
        assert answer.headers.get("cache-control") == "no-store", answer.url
        assert answer.headers.get("cross-origin-resource-policy") == "same-origin", answer.url
        assert "default-src 'none'" in answer.headers.get("content-security-policy", ""), answer.url
        assert "server" not in answer.headers
        assert "set-cookie" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers or answer.headers["access-control-allow-origin"] == ORIGIN


def test_a_file_of_a_sandbox_is_never_a_page(strict: Gateway, kernel: Kernel) -> None:
    for name in ("page.html", "picture.svg", 'quote";filename="x.html', "süd.html"):
        path = kernel.file(quote(name))
        assert strict.http.put(path, content=b"<script>alert(1)</script>").status_code == 201
        answer = strict.http.get(path)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
        assert '"' not in answer.headers["content-disposition"]


def test_without_a_token_only_this_machine_may_call() -> None:
    with running(auth="none", token="unused-but-long-enough") as gateway, httpx2.Client(base_url=gateway.url) as client:
        assert client.get("/v1/kernelspecs").status_code == 200
        problem(client.get("/v1/kernelspecs", headers={"Origin": "https://evil.example"}), 403, "forbidden_origin")
        problem(client.get("/v1/kernelspecs", headers={"Host": "evil.example"}), 403, "forbidden_origin")
