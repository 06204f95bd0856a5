"""A gateway that could not do its work, or would do it for anybody, does not start, and says why and what to do."""

import gc
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
import structlog.testing

from gateway.app import create_app, guarded, serving
from gateway.errors import ConfigurationError, EngineUnavailable, GatewayError
from gateway.settings import load
from gateway.testing import FakeEngine
from tests.support import problem, running


@pytest.fixture
def state() -> Iterator[Path]:
    """A directory with a short path, as that of a socket in it has to be."""
    with tempfile.TemporaryDirectory(prefix="cg-", dir="/tmp") as directory:
        yield Path(directory)


def refusal(state: Path, error: type[GatewayError] = ConfigurationError, **settings: Any) -> str:
    """The words with which a gateway of these settings refuses to start."""
    with pytest.raises(error) as raised, serving(load(**{"state_dir": state / "s", "server": {"port": 0}, **settings})):
        pass
    assert "Traceback" not in raised.value.detail
    return raised.value.detail


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example", ""])
def test_without_a_token_it_listens_to_this_machine_alone(state: Path, host: str) -> None:
    assert "loopback" in refusal(state, auth="none", server={"host": host, "port": 0})


@pytest.mark.parametrize("token", ["short", "x" * 15, " " * 20 + "x", "ä" * 32])
def test_a_token_that_could_be_guessed_is_refused(state: Path, token: str) -> None:
    words = refusal(state, token=token)
    assert "token" in words
    assert token not in words


def test_a_token_file_without_a_token_is_refused(state: Path) -> None:
    (state / "s").mkdir()
    (state / "s" / "token").write_text("\n")
    assert "token" in refusal(state)


def test_the_token_is_made_once(state: Path) -> None:
    tokens = []
    for _ in range(2):
        with serving(load(state_dir=state / "s", server={"port": 0})):
            tokens.append((state / "s" / "token").read_text())
    assert tokens[0] == tokens[1]


def test_a_missing_image_is_named(state: Path) -> None:
    words = refusal(state, kernels={"specs": {"python3": {"image": "cellgate-no-such-image:none"}}})
    assert "cellgate-no-such-image:none" in words
    assert "scripts/image" in words


def test_an_unknown_runtime_is_named(state: Path) -> None:
    words = refusal(state, docker={"runtime": "nonesuch"})
    assert "nonesuch" in words
    assert "runc" in words


# The Docker SDK leaves the socket of a failed attempt to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("url", ["unix:///tmp/no-such-engine.sock", "tcp://127.0.0.1:1"])
def test_no_engine_is_named(state: Path, url: str) -> None:
    assert url in refusal(state, EngineUnavailable, docker={"url": url})
    gc.collect()


def test_a_port_that_is_taken_is_named(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refusal(state, server={"port": port})


def test_a_state_directory_that_is_none_is_named(state: Path) -> None:
    (state / "s").write_text("a file")
    assert str(state / "s") in refusal(state)


def test_a_state_directory_with_too_long_a_path_is_refused_at_the_start(state: Path) -> None:
    assert "state_dir" in refusal(state, state_dir=state / ("x" * 100))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"server": {"port": 70000}}, "server.port"),
        ({"server": {"prot": 1}}, "server.prot"),
        ({"nonsense": 1}, "nonsense"),
        ({"auth": "maybe"}, "auth"),
        ({"docker": {"link": "pigeon"}}, "docker.link"),
        ({"kernels": {"default_spec": "cobol"}}, "cobol"),
        ({"kernels": {"specs": {"python3": {"limits": {"memory": "64g"}}}}}, "limits"),
        ({"kernels": {"specs": {"python3": {"work_size": "large"}}}}, "size"),
        ({"kernels": {"max_kernels": 0}}, "max_kernels"),
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(**settings)
    assert named in raised.value.detail


def test_two_gateways_may_run_side_by_side() -> None:
    with running() as first, running() as second, first.kernel() as kernel:
        assert second.http.get("/v1/kernels").json() == {"kernels": []}
        # The token of one opens nothing of the other.
        answer = httpx2.get(f"{second.url}/v1/kernels", headers=first.headers)
        assert answer.status_code == 401
        assert kernel.value("1") == "1"


class _Broken(FakeEngine):
    """An engine with a fault that nobody has thought of."""

    async def create(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("secret words at /secret/place.py")


def test_a_fault_of_our_own_is_told_without_its_words(state: Path) -> None:
    settings = load(state_dir=state, auth="none")
    app = create_app(settings, engine=_Broken())

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(guarded(app, settings), raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            return await client.post("/v1/kernels", json={})

    with structlog.testing.capture_logs() as logs:
        answer = anyio.run(ask)
    document = problem(answer, 500, "internal_error")
    assert "secret" not in answer.text
    assert "log" in document["detail"]
    assert ["secret words" in str(line["exc_info"]) for line in logs if line["event"] == "unexpected_error"] == [True]
