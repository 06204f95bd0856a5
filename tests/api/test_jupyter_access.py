"""Who may use Jupyter's API: the three spellings of the token, pages of other origins, a base URL; and that no token is ever logged."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import structlog.testing
from websockets.exceptions import InvalidStatus

from gateway.app import create_app, guarded
from gateway.errors import ConfigurationError
from gateway.settings import load
from gateway.testing import FakeEngine
from tests.api.jupyter import refused, start
from tests.api.scripted import ScriptedGateway, scripted
from tests.support import problem

ORIGIN = "https://lab.example"


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    with scripted(server={"allowed_origins": (ORIGIN,)}) as started:
        yield started


@pytest.fixture(scope="module")
def stranger(gateway: ScriptedGateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """All that is logged, whatever an earlier gateway of this process has set."""
    before = structlog.get_config()
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as entries:
        yield entries
    structlog.configure(**before)


PATHS = ["/api/kernels", "/api/sessions", "/api/status", "/api/me", "/api/kernelspecs", "/kernelspecs/python3/logo-svg.svg"]


@pytest.mark.parametrize("path", PATHS)
def test_three_spellings_of_the_token(gateway: ScriptedGateway, stranger: httpx2.Client, path: str) -> None:
    token = gateway.token
    for scheme in ("token", "Token", "TOKEN", "bearer", "Bearer", "BEARER"):
        assert stranger.get(path, headers={"Authorization": f"{scheme} {token}"}).status_code == 200
    assert stranger.get(path, params={"token": token}).status_code == 200
    assert stranger.get(path, params={"1796042491327": "", "token": token}).status_code == 200
    # One that is right is enough: a client may send both.
    assert stranger.get(path, params={"token": token}, headers={"Authorization": "token x"}).status_code == 200
    assert stranger.get(path, params={"token": "x"}, headers={"Authorization": f"token {token}"}).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_anything_else_is_none(gateway: ScriptedGateway, stranger: httpx2.Client, path: str) -> None:
    token = gateway.token
    for headers in (
        {},
        {"Authorization": ""},
        {"Authorization": "token"},
        {"Authorization": token},
        {"Cookie": f"token={token}"},
    ):
        refused(stranger.get(path, headers=headers), 401, "token")
    for query in ("", "token=", "token", f"Token={token}", f"token={token}x", f"token={token[:-1]}", f"token=Bearer+{token}"):
        answer = stranger.get(f"{path}?{query}")
        refused(answer, 401)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert "set-cookie" not in answer.headers


def test_a_token_in_the_query_is_for_jupyters_paths_alone(gateway: ScriptedGateway, stranger: httpx2.Client) -> None:
    query = {"token": gateway.token}
    for path in ("/v1/kernels", "/metrics", "/openapi.json", "/nowhere", "/apis", "/kernelspecsx"):
        problem(stranger.get(path, params=query), 401, "unauthorized")
    for path in ("/api/../v1/kernels", "/api/%2e%2e/v1/kernels", "/kernelspecs/..%2Fv1/kernels"):
        assert stranger.get(path, params=query).status_code in (401, 404)
    problem(stranger.get("/v1/kernels", headers={"Authorization": f"token {gateway.token}"}), 401, "unauthorized")


def test_a_websocket_is_refused_in_jupyters_words(gateway: ScriptedGateway) -> None:
    with pytest.raises(InvalidStatus) as error, gateway.connect("/api/kernels/x/channels?token=wrong", {}):
        pass
    assert error.value.response.status_code == 401
    assert set(json.loads(error.value.response.body)) == {"message", "reason", "cellgate"}


def test_no_token_is_logged(logs: list[Any]) -> None:
    with scripted(log_level="debug") as gateway:
        token = gateway.token
        with httpx2.Client(base_url=gateway.url) as client:
            for name in ("token", "%74oken", "to%6ben"):
                assert client.get(f"/api/kernels?a=1&{name}={token}&b=2").status_code == 200
                assert client.post(f"/api/kernels?{name}={token}", content=b"{").status_code == 400
                client.get(f"/v1/kernels?{name}={token}")
                client.get(f"/api/contents?{name}={token}")
            gateway.engine.before_create = _break_down
            assert client.post(f"/api/kernels?token={token}").status_code == 500
    assert [entry for entry in logs if entry["event"] == "request"]
    assert [entry for entry in logs if entry["event"] == "unexpected_error"]
    assert token not in str(logs)
    assert "token=" not in str([entry for entry in logs if "exc_info" not in entry])


async def _break_down() -> None:
    raise RuntimeError("broken")


# none at all


def test_without_a_token_all_clients_come_in_and_that_is_said_loudly(logs: list[Any]) -> None:
    with (
        scripted(auth="none", token="unused-but-long-enough") as gateway,
        httpx2.Client(base_url=gateway.url) as client,
    ):
        assert client.post("/api/kernels").status_code == 201
        assert client.get("/api/kernels", headers={"Authorization": "token whatever"}).status_code == 200
        refused(client.get("/api/kernels", headers={"Origin": "https://evil.example"}), 403)
        refused(client.post("/api/kernels", headers={"Origin": "null", "Content-Type": "text/plain"}), 403)
        refused(client.get("/api/kernels", headers={"Host": "evil.example"}), 403)
    assert [(entry["event"], entry["log_level"]) for entry in logs if entry["event"] == "no_token_needed"] == [
        ("no_token_needed", "warning")
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"auth": "none", "server": {"host": "0.0.0.0"}},
        {"auth": "none", "server": {"allowed_origins": ("*",)}},
        {"server": {"allowed_origins": ("*",), "cors_credentials": True}},
    ],
    ids=str,
)
def test_what_would_let_anybody_in_is_refused(settings: dict[str, Any]) -> None:
    chosen = load(token="long-enough-for-a-token", **settings)
    with pytest.raises(ConfigurationError):
        guarded(create_app(chosen, FakeEngine()), chosen)


# other origins


def preflight(client: httpx2.Client, path: str, origin: str = ORIGIN, method: str = "POST") -> httpx2.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return client.options(path, headers=headers)


@pytest.mark.parametrize(
    "path",
    ["/api", "/api/status", "/api/kernels", "/api/sessions", "/api/sessions/x", "/api/nowhere", "/v1/kernels", "/v1/nowhere"],
)
def test_a_preflight_of_an_allowed_page_needs_no_token(stranger: httpx2.Client, path: str) -> None:
    answer = preflight(stranger, path)
    assert (answer.status_code, answer.content) == (200, b"")
    found = answer.headers
    assert found["access-control-allow-origin"] == ORIGIN
    assert {"authorization", "content-type"} <= {
        name.strip().lower() for name in found["access-control-allow-headers"].split(",")
    }
    assert {"GET", "POST", "PUT", "PATCH", "DELETE"} <= {
        name.strip() for name in found["access-control-allow-methods"].split(",")
    }
    assert int(found["access-control-max-age"]) > 0
    assert "origin" in found["vary"].lower()
    assert "access-control-allow-credentials" not in found


def test_a_preflight_of_any_other_page_is_refused(gateway: ScriptedGateway, stranger: httpx2.Client) -> None:
    for path in ("/api/kernels", "/v1/kernels"):
        for origin in ("https://evil.example", "null", f"{ORIGIN}:444", ORIGIN.upper()):
            answer = preflight(stranger, path, origin)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
    # Of itself it needs none.
    assert preflight(stranger, "/api/kernels", gateway.url).status_code == 200


def test_options_that_are_no_preflight(stranger: httpx2.Client) -> None:
    """As a Jupyter server answers them; what it says depends on nothing."""
    first, second = stranger.options("/api/kernels"), stranger.options("/api/nowhere")
    assert (first.status_code, first.content) == (second.status_code, second.content) == (200, b"")
    assert stranger.options("/v1/kernels").status_code == 401


def test_answers_to_an_allowed_page_can_be_read_by_it(gateway: ScriptedGateway, stranger: httpx2.Client) -> None:
    headers = {"Origin": ORIGIN}
    for answer in (
        gateway.http.get("/api/kernels", headers=headers),
        gateway.http.get("/v1/kernels", headers=headers),
        gateway.http.get("/api/contents", headers=headers),
        stranger.get("/api/kernels", headers=headers),
        stranger.get("/api", headers=headers),
    ):
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "Location" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    for origin in (None, gateway.url):
        answer = gateway.http.get("/api/kernels", headers={} if origin is None else {"Origin": origin})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
    answer = gateway.http.get("/api/kernels", headers={"Origin": "https://evil.example"})
    refused(answer, 403)
    assert "access-control-allow-origin" not in answer.headers


def test_what_browsers_are_told_can_be_set() -> None:
    server = {
        "allowed_origins": (ORIGIN, "http://localhost:8000"),
        "cors_headers": ("X-One",),
        "cors_methods": ("GET",),
        "cors_expose_headers": ("X-Two",),
        "cors_credentials": True,
        "cors_max_age": 5,
    }
    with scripted(server=server) as gateway, httpx2.Client(base_url=gateway.url) as client:
        found = preflight(client, "/api/kernels", "http://localhost:8000").headers
        assert found["access-control-allow-origin"] == "http://localhost:8000"
        assert found["access-control-allow-headers"] == "X-One"
        assert found["access-control-allow-methods"] == "GET"
        assert found["access-control-max-age"] == "5"
        assert found["access-control-allow-credentials"] == "true"
        answer = gateway.http.get("/api/kernels", headers={"Origin": ORIGIN})
        assert (answer.headers["access-control-expose-headers"], answer.headers["access-control-allow-credentials"]) == (
            "X-Two",
            "true",
        )


def test_any_page_where_the_operator_says_so() -> None:
    with scripted(server={"allowed_origins": ("*",)}) as gateway, httpx2.Client(base_url=gateway.url) as client:
        for origin in ("https://any.example", "null"):
            assert preflight(client, "/api/kernels", origin).headers["access-control-allow-origin"] == "*"
            assert gateway.http.get("/api/kernels", headers={"Origin": origin}).headers["access-control-allow-origin"] == "*"
            # But not without the token.
            refused(client.get("/api/kernels", headers={"Origin": origin}), 401)


# a base URL


@pytest.fixture(scope="module")
def based() -> Iterator[ScriptedGateway]:
    with scripted(server={"base_url": "user/x"}) as started:
        yield started


def test_everything_is_below_the_base_url(based: ScriptedGateway) -> None:
    assert based.url.endswith("/user/x")
    root = based.url.removesuffix("/user/x")
    with httpx2.Client(base_url=root, headers=based.headers) as client:
        for path in ("/api", "/healthz", "/api/kernels", "/v1/kernels", "/metrics", "/openapi.json"):
            assert client.get(f"/user/x{path}").status_code == 200
        for path in ("/", "/api", "/healthz", "/api/kernels", "/v1/kernels", "/user", "/user/xy/api", "/user/x"):
            problem(client.get(path), 404, "not_found")
            problem(httpx2.get(f"{root}{path}"), 401, "unauthorized")
    assert based.http.get("/openapi.json").json()["servers"] == [{"url": "/user/x"}]


def test_links_have_the_base_url(based: ScriptedGateway) -> None:
    answer = based.http.post("/api/kernels")
    kernel_id = answer.json()["id"]
    assert answer.headers["location"] == f"/user/x/api/kernels/{kernel_id}"
    native = based.http.post("/v1/kernels", json={})
    assert native.headers["location"] == f"/user/x/v1/kernels/{native.json()['id']}"
    session = based.http.post("/api/sessions", json={"path": "a", "type": "file", "kernel": {"id": kernel_id}})
    assert session.headers["location"] == f"/user/x/api/sessions/{session.json()['id']}"
    for path in based.http.get("/api/kernelspecs/python3").json()["resources"].values():
        assert path.startswith("/user/x/kernelspecs/")
        assert httpx2.get(f"{based.url.removesuffix('/user/x')}{path}", headers=based.headers).status_code == 200
    # What the framework makes of a slash too many.
    redirect = based.http.get("/v1/kernels/", follow_redirects=False)
    assert redirect.headers["location"].endswith("/user/x/v1/kernels")


def test_a_websocket_below_the_base_url(based: ScriptedGateway) -> None:
    with based.connect(f"/v1/kernels/{start(based)['id']}/ws") as connection:
        connection.send('{"op": "ping"}')
        assert "pong" in str(connection.recv(timeout=60))


def test_errors_below_the_base_url_are_those_of_their_face(based: ScriptedGateway) -> None:
    refused(based.http.get("/api/nowhere"), 404)
    refused(httpx2.get(f"{based.url}/api/kernels"), 401)
    assert httpx2.get(f"{based.url}/api/kernels", params={"token": based.token}).status_code == 200
    problem(httpx2.get(f"{based.url}/v1/kernels", params={"token": based.token}), 401, "unauthorized")
