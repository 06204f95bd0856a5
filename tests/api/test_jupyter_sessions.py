"""Sessions: one kernel a path, whoever asks and however often; they end with their kernel and outlive the gateway with it."""

import asyncio
import json
import math
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from gateway.kernels.sessions import Sessions
from gateway.settings import load
from gateway.testing import Sleep
from tests.api.jupyter import MODEL, NOBODY, clear, env_of, refused, start
from tests.api.scripted import ScriptedGateway, scripted
from tests.support import Kernel, eventually

SPECS = {"python3": {}, "other": {}, "ghost": {"image": "ghost"}}


@pytest.fixture(scope="module")
def shared() -> Iterator[ScriptedGateway]:
    with scripted(kernels={"max_kernels": 4, "specs": SPECS}) as started:
        yield started


@pytest.fixture
def gateway(shared: ScriptedGateway) -> Iterator[ScriptedGateway]:
    yield shared
    clear(shared)


def post(gateway: ScriptedGateway, path: str = "a.ipynb", **body: Any) -> httpx2.Response:
    return gateway.http.post("/api/sessions", json={"path": path, "type": "notebook", "name": "a", **body})


def opened(gateway: ScriptedGateway, path: str = "a.ipynb", **body: Any) -> dict[str, Any]:
    answer = post(gateway, path, **body)
    assert answer.status_code == 201, answer.text
    model: dict[str, Any] = answer.json()
    return model


def kernels(gateway: ScriptedGateway) -> list[str]:
    return [model["id"] for model in gateway.http.get("/api/kernels").json()]


def change(gateway: ScriptedGateway, session: dict[str, Any], **body: Any) -> httpx2.Response:
    return gateway.http.patch(f"/api/sessions/{session['id']}", json=body)


# opening


def test_a_model(gateway: ScriptedGateway) -> None:
    answer = post(gateway, "folder/a.ipynb", kernel={"name": "other"})
    model = answer.json()
    assert answer.headers["location"] == f"/api/sessions/{model['id']}"
    assert {name: model[name] for name in ("path", "name", "type")} == {
        "path": "folder/a.ipynb",
        "name": "a",
        "type": "notebook",
    }
    assert model["notebook"] == {"path": "folder/a.ipynb", "name": "a"}
    assert set(model["kernel"]) == MODEL
    assert model["kernel"]["name"] == "other"
    assert gateway.http.get(answer.headers["location"]).json() == model
    assert gateway.http.get("/api/sessions").json() == [model]
    assert kernels(gateway) == [model["kernel"]["id"]]


def test_a_console_has_no_notebook(gateway: ScriptedGateway) -> None:
    model = opened(gateway, "console-1", type="console")
    assert "notebook" not in model
    assert model["type"] == "console"


def test_the_kernel_knows_its_notebook(gateway: ScriptedGateway) -> None:
    model = opened(gateway, "folder/a.ipynb")
    assert env_of(gateway, model["kernel"]["id"])["JPY_SESSION_NAME"] == "folder/a.ipynb"
    assert model["kernel"]["cellgate"]["label"] == "folder/a.ipynb"


def test_the_same_path_is_the_same_session(gateway: ScriptedGateway) -> None:
    first = opened(gateway)
    assert opened(gateway) == first
    assert opened(gateway, kernel={"name": "other"}) == first
    assert opened(gateway, "b.ipynb")["id"] != first["id"]
    assert len(kernels(gateway)) == 2


def test_the_same_path_many_times_at_once_is_one_kernel(gateway: ScriptedGateway) -> None:
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: opened(gateway), range(8)))
    assert len({model["id"] for model in models}) == 1
    assert len(kernels(gateway)) == 1


def test_a_kernel_that_runs_already(gateway: ScriptedGateway) -> None:
    kernel = start(gateway, name="other")
    first = opened(gateway, kernel={"id": kernel["id"], "name": "python3"})
    second = opened(gateway, "b.ipynb", kernel={"id": kernel["id"]})
    assert first["kernel"] == second["kernel"] == kernel
    assert kernels(gateway) == [kernel["id"]]


def test_a_kernel_id_that_is_free(gateway: ScriptedGateway) -> None:
    wanted = str(uuid4())
    assert opened(gateway, kernel={"id": wanted, "name": "other"})["kernel"]["id"] == wanted


def test_a_kernel_id_that_has_ended(gateway: ScriptedGateway) -> None:
    kernel = start(gateway)["id"]
    gateway.http.delete(f"/api/kernels/{kernel}")
    refused(post(gateway, kernel={"id": kernel}), 409, "has ended")
    assert gateway.http.get("/api/sessions").json() == []


def test_as_a_client_of_notebook_4_asks(gateway: ScriptedGateway) -> None:
    answer = gateway.http.post(
        "/api/sessions", content=b'{"notebook": {"path": "old.ipynb"}, "kernel": {"name": null, "id": null}}'
    )
    assert answer.status_code == 201, answer.text
    model = answer.json()
    assert (model["path"], model["type"], model["name"]) == ("old.ipynb", "notebook", "")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "No JSON data"),
        (b"{}", "path"),
        (b'{"path": "a"}', "type"),
        (b'{"type": "notebook"}', "path"),
        (b'{"path": null, "type": "notebook"}', "path"),
        (b'{"path": 1, "type": "notebook"}', "path"),
        (b'{"path": "a", "type": ["notebook"]}', "type"),
        (b'{"path": "a", "type": "notebook", "name": {}}', "name"),
        (b'{"path": "a", "type": "notebook", "kernel": "python3"}', "kernel"),
        (b'{"path": "a", "type": "notebook", "kernel": {"id": 5}}', "id"),
        (b'{"path": "a", "type": "notebook", "kernel": {"id": "mine"}}', "UUID"),
        (b'{"path": "a", "type": "notebook", "kernel": {"name": 5}}', "name"),
        (b'{"notebook": "a"}', "notebook"),
        (b"[]", "object"),
        (b"nonsense", "JSON"),
    ],
)
def test_a_body_that_can_not_be_understood(gateway: ScriptedGateway, body: bytes, words: str) -> None:
    refused(gateway.http.post("/api/sessions", content=body), 400, words)
    assert kernels(gateway) == []


def test_a_kernel_that_can_not_be_started(gateway: ScriptedGateway) -> None:
    document = refused(post(gateway, kernel={"name": "julia"}), 501, "julia")
    assert document["short_message"] == "julia not found"
    refused(post(gateway, kernel={"name": "ghost"}), 501, "ghost")
    assert gateway.http.get("/api/sessions").json() == []
    # The path is as free as before.
    assert opened(gateway)["kernel"]["name"] == "python3"


def test_limits_are_those_of_kernels(gateway: ScriptedGateway) -> None:
    for number in range(4):
        opened(gateway, f"{number}.ipynb")
    refused(post(gateway, "one-too-many.ipynb"), 403, "4 kernels run")
    assert opened(gateway, "0.ipynb")["path"] == "0.ipynb"


# changing


def test_change_of_path_name_and_type(gateway: ScriptedGateway) -> None:
    session = opened(gateway)
    answer = change(gateway, session, path="b.ipynb", name="b")
    assert (answer.status_code, answer.json()) == (
        200,
        {**session, "path": "b.ipynb", "name": "b", "notebook": {"path": "b.ipynb", "name": "b"}},
    )
    assert change(gateway, session, type="console").json()["type"] == "console"
    assert change(gateway, session, notebook={"path": "c.ipynb"}, type="notebook").json()["path"] == "c.ipynb"
    assert change(gateway, session).json()["kernel"] == session["kernel"]
    # The path that it had is another's now.
    assert opened(gateway)["id"] != session["id"]


def test_another_kernel_takes_the_place_of_the_one_before(gateway: ScriptedGateway) -> None:
    session, kernel = opened(gateway), start(gateway, name="other")
    assert change(gateway, session, kernel={"id": kernel["id"]}).json()["kernel"] == kernel
    assert kernels(gateway) == [kernel["id"]]
    # The same again changes nothing.
    assert change(gateway, session, kernel={"id": kernel["id"]}).json()["kernel"] == kernel
    fresh = change(gateway, session, kernel={"name": "python3"}).json()["kernel"]
    assert fresh["name"] == "python3"
    assert kernels(gateway) == [fresh["id"]]


def test_a_change_that_fails_changes_nothing(gateway: ScriptedGateway) -> None:
    session = opened(gateway)
    refused(change(gateway, session, kernel={"id": NOBODY}, path="b"), 400, f"No such kernel: {NOBODY}")
    refused(change(gateway, session, kernel={"name": "julia"}, path="b"), 501, "julia")
    refused(change(gateway, session, kernel={"name": "ghost"}, path="b"), 501, "ghost")
    refused(change(gateway, session, kernel=5), 400)
    refused(change(gateway, session, path=5), 400)
    refused(gateway.http.patch(f"/api/sessions/{session['id']}"), 400, "No JSON data")
    assert gateway.http.get(f"/api/sessions/{session['id']}").json() == session


# ending


def test_delete_ends_the_kernel(gateway: ScriptedGateway) -> None:
    session = opened(gateway)
    assert gateway.http.delete(f"/api/sessions/{session['id']}").status_code == 204
    assert kernels(gateway) == []
    refused(gateway.http.delete(f"/api/sessions/{session['id']}"), 404, "Session not found")


def test_a_session_ends_with_its_kernel(gateway: ScriptedGateway) -> None:
    first, second = opened(gateway), opened(gateway, "b.ipynb")
    for session in (first, second):
        gateway.http.delete(f"/api/kernels/{session['kernel']['id']}")
    refused(gateway.http.get(f"/api/sessions/{first['id']}"), 404, "Session not found")
    refused(change(gateway, first, path="x"), 404)
    refused(gateway.http.delete(f"/api/sessions/{first['id']}"), 410, "was deleted")
    refused(gateway.http.delete(f"/api/sessions/{first['id']}"), 404)
    assert gateway.http.get("/api/sessions").json() == []
    refused(gateway.http.delete(f"/api/sessions/{second['id']}"), 404)
    assert opened(gateway)["kernel"]["id"] != first["kernel"]["id"]


def test_a_kernel_that_has_lost_its_sandbox_gives_its_path_back() -> None:
    found: list[ScriptedGateway] = []

    def lose() -> Any:
        (box,) = found[0].engine.boxes.values()
        asyncio.get_running_loop().call_soon(box.inside.supervisor.end, 137)
        yield Sleep(math.inf)

    with scripted({"lose": lose}) as gateway:
        found.append(gateway)
        session = opened(gateway)
        assert Kernel(gateway, session["kernel"]["id"]).execute("lose")["status"] == "died"
        # It is told as it is, and refuses what needs it.
        path = f"/api/sessions/{session['id']}"
        eventually(lambda: gateway.http.get(path).json()["kernel"]["execution_state"] == "dead", "it is dead")
        refused(gateway.http.post(f"/api/kernels/{session['kernel']['id']}/restart"), 409, "sandbox")
        refused(gateway.http.post(f"/api/kernels/{session['kernel']['id']}/interrupt"), 409)
        fresh = opened(gateway)
        assert fresh["id"] != session["id"]
        assert fresh["kernel"]["execution_state"] == "idle"


def test_unknown_sessions(gateway: ScriptedGateway) -> None:
    for session_id in (NOBODY, "x", "é", "x" * 500):
        path = f"/api/sessions/{session_id}"
        refused(gateway.http.get(path), 404, "Session not found")
        refused(gateway.http.patch(path, json={}), 404)
        refused(gateway.http.delete(path), 404)
    refused(gateway.http.put(f"/api/sessions/{NOBODY}"), 405)
    refused(gateway.http.delete("/api/sessions"), 405)


# over the life of a gateway


def test_sessions_are_kept_in_a_file_for_the_gateways_user(gateway: ScriptedGateway) -> None:
    session = opened(gateway, "süd.ipynb")
    file = gateway.settings.state_dir / "sessions.json"
    stored = json.loads(file.read_text())
    assert {
        "id": session["id"],
        "path": "süd.ipynb",
        "name": "a",
        "type": "notebook",
        "kernel_id": session["kernel"]["id"],
    } in stored
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_next_gateway_knows_them(gateway: ScriptedGateway) -> None:
    session = opened(gateway)

    class Manager:
        def get(self, kernel_id: str) -> str:
            return kernel_id

    found = Sessions(Manager(), gateway.settings.state_dir / "sessions.json").get(session["id"])  # type: ignore[arg-type]
    assert (found[0].path, found[1]) == ("a.ipynb", session["kernel"]["id"])


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[1]", b'[{"id": "x"}]', b"\xff"])
def test_a_file_that_can_not_be_read_costs_the_sessions_and_no_more(content: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="cg-", dir="/tmp") as state:
        settings = load(state_dir=state)
        (settings.state_dir / "sessions.json").write_bytes(content)
        assert Sessions(None, Path(state) / "sessions.json").list() == []  # type: ignore[arg-type]


def test_nothing_is_written_where_nothing_is_kept() -> None:
    with scripted(store={"kind": "memory"}) as gateway:
        opened(gateway)
        assert not (gateway.settings.state_dir / "sessions.json").exists()
