"""The rest of Jupyter's API: the server itself, its kernelspecs with their pictures, its metrics; and what is not there."""

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.jupyter import clear, refused, start
from tests.api.scripted import ScriptedGateway, scripted
from tests.support import Kernel, eventually

SPECS: dict[str, Any] = {
    "python3": {"env": {"OPERATOR_SECRET": "hidden"}},
    "julia": {"display_name": "Julia 1.11", "language": "julia", "kernelspec": "julia-1.11"},
}


@pytest.fixture(scope="module")
def shared() -> Iterator[ScriptedGateway]:
    with scripted(kernels={"specs": SPECS, "default_spec": "julia"}) as started:
        yield started


@pytest.fixture
def gateway(shared: ScriptedGateway) -> Iterator[ScriptedGateway]:
    yield shared
    clear(shared)


def test_the_version_is_told_to_all(gateway: ScriptedGateway) -> None:
    found = httpx2.get(f"{gateway.url}/api").json()
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["version"])
    assert found["cellgate_version"]


def test_status(gateway: ScriptedGateway) -> None:
    before = gateway.http.get("/api/status").json()
    assert (before["kernels"], before["connections"]) == (0, 0)
    model = start(gateway)
    with Kernel(gateway, model["id"]).socket():
        eventually(lambda: gateway.http.get("/api/status").json()["connections"] == 1, "the socket counts")
        assert gateway.http.get(f"/api/kernels/{model['id']}").json()["connections"] == 1
    after = gateway.http.get("/api/status").json()
    assert (after["kernels"], after["started"]) == (1, before["started"])
    assert after["last_activity"] >= model["last_activity"] > before["started"]
    for time in (after["started"], after["last_activity"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time)


def test_identity(gateway: ScriptedGateway) -> None:
    found = gateway.http.get("/api/me").json()
    assert set(found) == {"identity", "permissions"}
    assert {"username", "name", "display_name", "initials", "avatar_url", "color"} == set(found["identity"])
    asked = '{"kernels": ["read", "execute"], "contents": ["write"]}'
    answer = gateway.http.get("/api/me", params={"permissions": asked})
    assert answer.json()["permissions"] == {"kernels": ["read", "execute"], "contents": []}


@pytest.mark.parametrize("permissions", ["nonsense", "[]", "1", '{"kernels": 1}', '{"kernels": [1]}', '{"kernels": null}'])
def test_permissions_that_can_not_be_understood(gateway: ScriptedGateway, permissions: str) -> None:
    refused(gateway.http.get("/api/me", params={"permissions": permissions}), 400)


def test_kernelspecs(gateway: ScriptedGateway) -> None:
    found = gateway.http.get("/api/kernelspecs").json()
    assert found["default"] == "julia"
    assert set(found["kernelspecs"]) == {"python3", "julia"}
    for name, model in found["kernelspecs"].items():
        assert set(model) == {"name", "spec", "resources"}
        assert model["name"] == name
        assert set(model["spec"]) == {"argv", "env", "display_name", "language", "interrupt_mode", "metadata"}
        assert "{connection_file}" in model["spec"]["argv"]
        assert gateway.http.get(f"/api/kernelspecs/{name}").json() == model
    assert found["kernelspecs"]["julia"]["spec"]["display_name"] == "Julia 1.11"
    # What the operator gives to kernels is not for clients.
    assert "hidden" not in gateway.http.get("/api/kernelspecs").text
    assert gateway.http.get("/api/kernelspecs", params={"user": "bob"}).json() == found
    refused(gateway.http.get("/api/kernelspecs/cobol"), 404, "cobol")


def test_pictures(gateway: ScriptedGateway) -> None:
    resources = gateway.http.get("/api/kernelspecs/python3").json()["resources"]
    assert set(resources) == {"logo-32x32", "logo-64x64", "logo-svg"}
    for name, path in resources.items():
        assert path.startswith("/kernelspecs/python3/")
        answer = gateway.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == ("image/svg+xml" if name == "logo-svg" else "image/png")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.content.startswith(b"<svg" if name == "logo-svg" else b"\x89PNG")


@pytest.mark.parametrize(
    "path",
    [
        "/kernelspecs/python3/kernel.js",
        "/kernelspecs/cobol/logo-64x64.png",
        "/kernelspecs/python3/..%2F..%2Fapp.py",
        "/kernelspecs/python3",
        "/api/contents",
        "/api/contents/a.ipynb",
        "/api/terminals",
        "/api/events/subscribe",
        "/api/shutdown",
        "/api/config/notebook",
        "/api/nbconvert",
        "/api/x/y/z",
        "/api/kernels/x/y/z",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_there(gateway: ScriptedGateway, path: str, method: str) -> None:
    answer = gateway.http.request(method, path)
    assert answer.status_code in ((404,) if method == "GET" else (404, 405))
    refused(answer, answer.status_code)


def test_methods_of_the_server(gateway: ScriptedGateway) -> None:
    for path in ("/api", "/api/status", "/api/me", "/api/kernelspecs"):
        refused(gateway.http.delete(path), 405)


def test_a_body_that_is_too_large() -> None:
    with scripted(server={"max_body": 1000}) as gateway:
        refused(gateway.http.post("/api/kernels", content=b"x" * 1001), 413, "1000 bytes")
        refused(gateway.http.post("/api/kernels", content=iter([b"x" * 600, b"x" * 600])), 413, "1000 bytes")


def test_a_fault_of_our_own_is_told_without_its_words() -> None:
    with scripted() as gateway:

        async def break_down() -> None:
            raise RuntimeError("secret words at /secret/place.py")

        gateway.engine.before_create = break_down
        document = refused(gateway.http.post("/api/kernels"), 500)
        assert "secret" not in str(document)
        gateway.engine.before_create = None
        assert start(gateway)["execution_state"] == "idle"


# metrics


def samples(gateway: ScriptedGateway) -> list[Any]:
    answer = gateway.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]


def test_metrics_have_jupyters_names(gateway: ScriptedGateway) -> None:
    start(gateway, name="python3")
    start(gateway, name="python3")
    gateway.http.get("/api/nowhere")
    httpx2.get(f"{gateway.url}/api/kernels")
    found = samples(gateway)
    running = {sample.labels["type"]: sample.value for sample in found if sample.name == "kernel_currently_running_total"}
    assert running == {"python3": 2, "julia": 0}
    counts = [sample for sample in found if sample.name == "http_request_duration_seconds_count"]
    assert {"method", "handler", "status_code"} == set(counts[0].labels)
    seen = {(sample.labels["method"], sample.labels["handler"], sample.labels["status_code"]) for sample in counts}
    assert {("POST", "/api/kernels", "201"), ("GET", "", "404"), ("GET", "", "401")} <= seen
    times = {sample.name: sample.value for sample in found if sample.name.startswith("jupyter_server_")}
    started, latest = "jupyter_server_started_timestamp_seconds", "jupyter_server_last_activity_timestamp_seconds"
    assert times[latest] > times[started] > 1.7e9


def test_no_client_can_make_names_of_metrics(gateway: ScriptedGateway) -> None:
    for path in ("/api/kernels/secret-1", "/secret-2", "/v1/kernels/secret-3", "/kernelspecs/secret-4/x"):
        gateway.http.get(path)
    gateway.http.request("SECRET5", "/api/kernels")
    assert "secret" not in gateway.http.get("/metrics").text.lower()
