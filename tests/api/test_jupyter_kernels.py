"""Kernels as Jupyter's clients start, watch and end them: every body that one of them sends, every status it expects."""

import json
import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from gateway.api.jupyter_models import EXECUTION_STATES
from gateway.kernels.state import KernelState
from gateway.testing import Die, Sleep, printed, result
from gateway.testing.kernel import Cell
from tests.api.jupyter import MODEL, NOBODY, clear, env_of, refused, start
from tests.api.scripted import ScriptedGateway, scripted
from tests.support import DEADLINE, Kernel, eventually

CELLS: dict[str, Cell] = {
    "1": [result("1")],
    "forever": [printed("begun\n"), Sleep(math.inf)],
    "die": [Die(signal="SIGKILL")],
}
SPECS = {"python3": {}, "ghost": {"image": "ghost"}, "slow": {"start_timeout": 30.0}}
MAX_KERNELS = 6


@pytest.fixture(scope="module")
def shared() -> Iterator[ScriptedGateway]:
    with scripted(
        CELLS, kernels={"max_kernels": MAX_KERNELS, "specs": SPECS}, jupyter={"client_envs": ("STAGE", "LD_PRELOAD")}
    ) as started:
        yield started


@pytest.fixture
def gateway(shared: ScriptedGateway) -> Iterator[ScriptedGateway]:
    yield shared
    clear(shared)


# starting


def test_a_model_is_what_clients_parse(gateway: ScriptedGateway) -> None:
    answer = gateway.http.post("/api/kernels", json={"name": "python3"})
    model = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/api/kernels/{model['id']}"
    assert set(model) == MODEL
    assert (model["name"], model["execution_state"], model["connections"]) == ("python3", "idle", 0)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", model["last_activity"])
    assert gateway.http.get(answer.headers["location"]).json() == model
    assert gateway.http.get("/api/kernels").json() == [model]


@pytest.mark.parametrize(
    "media", [None, "", "application/json", "text/plain;charset=UTF-8", "application/octet-stream", "nonsense"]
)
@pytest.mark.parametrize(
    "body",
    [b"", b" \n", b"{}", b'{"name": null}', b'{"name": "python3", "path": null}', b'{"name": "python3", "unknown": [1]}'],
)
def test_any_media_type_and_no_body(gateway: ScriptedGateway, media: str | None, body: bytes) -> None:
    headers = {} if media is None else {"Content-Type": media}
    answer = gateway.http.post("/api/kernels", content=body, headers=headers)
    assert answer.status_code == 201, answer.text
    assert answer.json()["name"] == "python3"


@pytest.mark.parametrize(
    "body",
    [
        b"nonsense",
        b"{",
        b"[]",
        b'"python3"',
        b"1",
        b"null",
        b"\xff",
        b'{"name": "\\ud800"}',
        b'{"name": 1}',
        b'{"name": ["python3"]}',
        b'{"path": {}}',
        b'{"path": "a\\u0000"}',
        b'{"env": []}',
        b'{"env": "KERNEL_A=1"}',
        b'{"env": {"KERNEL_A": 1}}',
        b'{"env": {"KERNEL_A": "a\\u0000"}}',
        b'{"env": {"KERNEL_ID": "mine"}}',
        b'{"kernel_id": "mine"}',
        b'{"kernel_id": "../../v1"}',
        b"[" * 5000,
        json.dumps({"name": "x" * 5000}).encode(),
        json.dumps({"env": {"KERNEL_A": "x" * 9000}}).encode(),
        json.dumps({"env": {f"KERNEL_{n}": "x" for n in range(65)}}).encode(),
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
def test_a_body_that_can_not_be_understood(gateway: ScriptedGateway, body: bytes) -> None:
    refused(gateway.http.post("/api/kernels", content=body), 400)
    assert gateway.http.get("/api/kernels").json() == []


def test_an_unknown_spec(gateway: ScriptedGateway) -> None:
    document = refused(gateway.http.post("/api/kernels", json={"name": "julia"}), 404, "julia")
    assert document["cellgate"]["code"] == "spec_not_found"


def test_a_kernel_that_does_not_start_says_why(gateway: ScriptedGateway) -> None:
    assert (
        refused(gateway.http.post("/api/kernels", json={"name": "ghost"}), 503, "ghost")["cellgate"]["code"] == "image_missing"
    )
    gateway.engine.script.start = Die(code=7, log="no module named x")
    try:
        document = refused(gateway.http.post("/api/kernels"), 502, "exit code 7")
    finally:
        gateway.engine.script.start = None
    assert document["cellgate"]["log"] == "no module named x"
    assert gateway.http.get("/api/kernels").json() == []


@pytest.mark.parametrize("spec", ["python3", "slow"])
def test_a_launch_timeout_bounds_the_answer(gateway: ScriptedGateway, spec: str) -> None:
    gateway.engine.script.answers_info = False
    try:
        body = {"name": spec, "env": {"KERNEL_LAUNCH_TIMEOUT": "0.2"}}
        refused(gateway.http.post("/api/kernels", json=body), 504, "0.2 s")
    finally:
        gateway.engine.script.answers_info = True
    assert gateway.http.get("/api/kernels").json() == []
    eventually(lambda: not gateway.engine.boxes, "the box is gone")


@pytest.mark.parametrize("value", ["", "soon", "-1", "0", "nan", "inf", "1e300", "40"])
def test_any_launch_timeout_is_taken(gateway: ScriptedGateway, value: str) -> None:
    assert start(gateway, env={"KERNEL_LAUNCH_TIMEOUT": value})


def test_a_start_in_the_queue_counts_toward_the_launch_timeout() -> None:
    with scripted(kernels={"max_parallel_starts": 1}) as gateway:
        gateway.engine.script.answers_info = False
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(gateway.http.post, "/api/kernels")
            eventually(lambda: gateway.engine.created, "the first has begun")
            second = gateway.http.post("/api/kernels", json={"env": {"KERNEL_LAUNCH_TIMEOUT": "0.1"}})
            refused(second, 504, "launch timeout")
            for kernel in gateway.http.get("/api/kernels").json():
                gateway.http.delete(f"/api/kernels/{kernel['id']}")
            refused(first.result(DEADLINE), 502)
        assert gateway.engine.created == 1


# ids


def test_a_kernel_id_of_the_clients_choice(gateway: ScriptedGateway) -> None:
    wanted = str(uuid4())
    first = gateway.http.post("/api/kernels", json={"kernel_id": wanted})
    again = gateway.http.post("/api/kernels", json={"kernel_id": wanted.upper(), "name": "slow"})
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["id"] == again.json()["id"] == wanted
    assert again.json()["name"] == "python3"
    assert start(gateway, env={"KERNEL_ID": wanted})["id"] == wanted
    assert len(gateway.http.get("/api/kernels").json()) == 1


def test_one_id_asked_for_many_times_at_once_is_one_kernel(gateway: ScriptedGateway) -> None:
    wanted, created = str(uuid4()), gateway.engine.created
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: start(gateway, kernel_id=wanted), range(8)))
    assert {model["id"] for model in models} == {wanted}
    assert gateway.engine.created == created + 1


def test_the_id_of_a_kernel_that_has_ended_is_not_given_again(gateway: ScriptedGateway) -> None:
    model = start(gateway)
    Kernel(gateway, model["id"]).execute("1")
    gateway.http.delete(f"/api/kernels/{model['id']}")
    refused(gateway.http.post("/api/kernels", json={"kernel_id": model["id"]}), 409, "has ended")


def test_the_id_of_a_start_that_failed_is_free(gateway: ScriptedGateway) -> None:
    wanted = str(uuid4())
    refused(gateway.http.post("/api/kernels", json={"kernel_id": wanted, "name": "ghost"}), 503)
    assert start(gateway, kernel_id=wanted)["id"] == wanted


# variables


def test_which_variables_reach_the_kernel(gateway: ScriptedGateway) -> None:
    given = {
        "KERNEL_USERNAME": "bob",
        "KERNEL_EXTRA": "x; rm -rf /",
        "KERNEL_GATEWAY": "0",
        "KERNEL_WORKING_DIR": "project/data",
        "STAGE": "demo",
        "LD_PRELOAD": "/tmp/x.so",
        "PATH": "/tmp",
        "SECRET": "s",
        "NOT A NAME": "x",
        "kernel_lower": "x",
        "NUMBER": 1,
    }
    model = start(gateway, env=given)
    assert env_of(gateway, model["id"]) == {
        "KERNEL_USERNAME": "bob",
        "KERNEL_EXTRA": "x; rm -rf /",
        "KERNEL_GATEWAY": "1",
        "KERNEL_ID": model["id"],
        "KERNEL_WORKING_DIR": "project/data",
        "STAGE": "demo",
    }
    assert model["cellgate"]["username"] == "bob"


@pytest.mark.parametrize("directory", ["/home/bob", "/work", "..", "a/../../b", "/", 5])
def test_a_working_directory_of_the_clients_machine_is_left_out(gateway: ScriptedGateway, directory: Any) -> None:
    model = start(gateway, env={"KERNEL_WORKING_DIR": directory})
    assert "KERNEL_WORKING_DIR" not in env_of(gateway, model["id"])


def test_any_variable_where_the_operator_says_so() -> None:
    with scripted(jupyter={"client_envs": ("*",)}) as gateway:
        model = start(gateway, env={"STAGE": "demo", "PYTHONPATH": "/tmp", "LD_PRELOAD": "x"})
        assert set(env_of(gateway, model["id"])) == {"STAGE", "KERNEL_GATEWAY", "KERNEL_ID"}


def test_parallel_starts_never_see_each_others_variables() -> None:
    with scripted(kernels={"max_kernels": 40, "max_parallel_starts": 8}) as gateway:
        ready = threading.Barrier(16)

        def begin(number: int) -> tuple[int, str]:
            secret = {"KERNEL_SECRET": f"secret-{number}", f"KERNEL_OWN_{number}": "x", "KERNEL_USERNAME": f"user-{number}"}
            ready.wait(DEADLINE)
            return number, start(gateway, **({"env": secret} if number % 2 else {}))["id"]

        with ThreadPoolExecutor(16) as pool:
            started = list(pool.map(begin, range(16)))
        lone = start(gateway)["id"]
        own = {"KERNEL_GATEWAY": "1"}
        assert env_of(gateway, lone) == own | {"KERNEL_ID": lone}
        for number, kernel_id in started:
            secret = {"KERNEL_SECRET": f"secret-{number}", f"KERNEL_OWN_{number}": "x", "KERNEL_USERNAME": f"user-{number}"}
            assert env_of(gateway, kernel_id) == own | {"KERNEL_ID": kernel_id} | (secret if number % 2 else {})


def test_the_limit_is_exact_however_many_start_at_once(gateway: ScriptedGateway) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: gateway.http.post("/api/kernels"), range(16)))
    assert sum(answer.status_code == 201 for answer in answers) == MAX_KERNELS
    for answer in answers:
        if answer.status_code != 201:
            assert refused(answer, 403, f"{MAX_KERNELS} kernels run")["cellgate"]["code"] == "too_many_kernels"
    assert len(gateway.http.get("/api/kernels").json()) == MAX_KERNELS
    # Who has a kernel already is not refused.
    found = gateway.http.get("/api/kernels").json()[0]["id"]
    assert start(gateway, kernel_id=found)["id"] == found


# what becomes of them


def test_delete(gateway: ScriptedGateway) -> None:
    model = start(gateway)
    path = f"/api/kernels/{model['id']}"
    first = gateway.http.delete(path)
    assert (first.status_code, first.content) == (204, b"")
    for call in (gateway.http.delete, gateway.http.get):
        refused(call(path), 404, f"Kernel does not exist: {model['id']}")
    for action in ("interrupt", "restart"):
        refused(gateway.http.post(f"{path}/{action}"), 404, "Kernel does not exist")
    assert gateway.http.get("/api/kernels").json() == []


def test_delete_of_a_busy_kernel(gateway: ScriptedGateway) -> None:
    kernel = Kernel(gateway, start(gateway)["id"])
    with kernel.submitted("forever") as running:
        assert gateway.http.get(f"/api/kernels/{kernel.id}").json()["execution_state"] == "busy"
        assert gateway.http.delete(f"/api/kernels/{kernel.id}").status_code == 204
        assert running.end()["status"] == "died"


@pytest.mark.parametrize("body", [None, b"", b"{}", b"nonsense"])
def test_interrupt_needs_no_body(gateway: ScriptedGateway, body: bytes | None) -> None:
    kernel = Kernel(gateway, start(gateway)["id"])
    # Nothing runs: there is nothing to do, and no error.
    assert gateway.http.post(f"/api/kernels/{kernel.id}/interrupt", content=body).status_code == 204
    with kernel.submitted("forever") as running:
        answer = gateway.http.post(f"/api/kernels/{kernel.id}/interrupt", content=body)
        assert (answer.status_code, answer.content) == (204, b"")
        assert running.end()["status"] == "error"
    assert gateway.http.get(f"/api/kernels/{kernel.id}").json()["execution_state"] == "idle"


def deaf() -> Any:
    while True:
        try:
            yield Sleep(math.inf)
        except KeyboardInterrupt:
            yield printed("caught\n")


def test_the_deadline_of_a_cell_stands_whoever_interrupts_it() -> None:
    with scripted({"deaf": deaf}, kernels={"interrupt_grace": 0.05}) as gateway:
        kernel = Kernel(gateway, start(gateway)["id"])
        with kernel.submitted("deaf", timeout=0.5) as running:
            gateway.http.post(f"/api/kernels/{kernel.id}/interrupt")
            assert running.end()["status"] == "timeout"


def test_an_interrupt_never_kills() -> None:
    """As Jupyter's, it is one signal; a cell that goes on goes on."""
    with scripted({"deaf": deaf}, kernels={"interrupt_grace": 0.05}) as gateway:
        kernel = Kernel(gateway, start(gateway)["id"])
        with kernel.submitted("deaf") as running:
            gateway.http.post(f"/api/kernels/{kernel.id}/interrupt")
            running.wait_for("stream")
            gateway.http.post(f"/api/kernels/{kernel.id}/interrupt")
            running.wait_for("stream")
            assert gateway.http.get(f"/api/kernels/{kernel.id}").json()["execution_state"] == "busy"
            kernel.delete()
        assert not [event for event in running.events if event.get("step") not in (None, "interrupt")]


def test_restart(gateway: ScriptedGateway) -> None:
    kernel = Kernel(gateway, start(gateway)["id"])
    process = gateway.engine.boxes[kernel.id].inside.supervisor.kernel
    for body in (None, b"{}", b"nonsense"):
        answer = gateway.http.post(f"/api/kernels/{kernel.id}/restart", content=body)
        assert (answer.status_code, set(answer.json())) == (200, MODEL)
        assert (answer.json()["id"], answer.json()["execution_state"]) == (kernel.id, "idle")
    assert gateway.engine.boxes[kernel.id].inside.supervisor.kernel is not process


def test_many_restarts_at_once_are_one_or_a_few_and_none_fails(gateway: ScriptedGateway) -> None:
    kernel = Kernel(gateway, start(gateway)["id"])
    gateway.engine.script.info_delay = 0.2
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: gateway.http.post(f"/api/kernels/{kernel.id}/restart"), range(4)))
    finally:
        gateway.engine.script.info_delay = 0.0
    assert [(answer.status_code, answer.json()["execution_state"]) for answer in answers] == [(200, "idle")] * 4


def test_a_kernel_that_does_not_start_yet_is_shown_and_can_not_be_restarted(gateway: ScriptedGateway) -> None:
    gateway.engine.script.answers_info = False
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(gateway.http.post, "/api/kernels")
        try:
            model = eventually(lambda: gateway.http.get("/api/kernels").json(), "it is listed")[0]
            assert model["execution_state"] == "starting"
            refused(gateway.http.post(f"/api/kernels/{model['id']}/restart"), 409, "starting")
            assert gateway.http.delete(f"/api/kernels/{model['id']}").status_code == 204
        finally:
            gateway.engine.script.answers_info = True
        refused(starting.result(DEADLINE), 502, "broken off")


def test_dead_is_told_as_dead_with_its_cause(gateway: ScriptedGateway) -> None:
    kernel = Kernel(gateway, start(gateway)["id"])
    kernel.execute("die")
    model = gateway.http.get(f"/api/kernels/{kernel.id}").json()
    assert model["execution_state"] == "dead"
    assert model["cellgate"]["cause"]["code"] == "signal"
    assert gateway.http.post(f"/api/kernels/{kernel.id}/restart").json()["execution_state"] == "idle"


def test_every_state_has_a_name_that_clients_know() -> None:
    known = {"starting", "idle", "busy", "restarting", "dead", "terminating"}
    assert set(EXECUTION_STATES) == set(KernelState)
    assert set(EXECUTION_STATES.values()) == known


# elsewhere


def test_unknown_kernels(gateway: ScriptedGateway) -> None:
    for kernel_id in (NOBODY, "x", "a-b", "..%2F..", "%00", "é", "x" * 500):
        path = f"/api/kernels/{kernel_id}"
        refused(gateway.http.get(path), 404)
        refused(gateway.http.delete(path), 404)
        refused(gateway.http.post(f"{path}/interrupt"), 404)
        refused(gateway.http.post(f"{path}/restart"), 404)


def test_other_methods_and_actions(gateway: ScriptedGateway) -> None:
    model = start(gateway)
    path = f"/api/kernels/{model['id']}"
    for method, place in (
        ("PUT", path),
        ("PATCH", path),
        ("POST", path),
        ("DELETE", "/api/kernels"),
        ("GET", f"{path}/restart"),
    ):
        answer = gateway.http.request(method, place)
        refused(answer, 405)
        assert answer.headers["allow"]
    refused(gateway.http.post(f"{path}/explode"), 404)


def test_a_slash_too_many(gateway: ScriptedGateway) -> None:
    model = gateway.http.post("/api/kernels/", json={}).json()
    assert gateway.http.get(f"/api/kernels/{model['id']}/").json() == model
    assert gateway.http.get("/api/kernels//").json() == [model]


def test_cache_busters_of_jupyterlab_are_no_matter(gateway: ScriptedGateway) -> None:
    assert gateway.http.get("/api/kernels?1796042491327").json() == []
    assert gateway.http.post("/api/kernels?1796042491327", content=b"{}").status_code == 201


def test_both_faces_see_the_same_kernels(gateway: ScriptedGateway) -> None:
    jupyter, native = start(gateway, path="folder/report.ipynb")["id"], gateway.new_kernel().id
    assert {model["id"] for model in gateway.http.get("/api/kernels").json()} == {jupyter, native}
    document = Kernel(gateway, jupyter).document()
    assert (document["label"], document["state"]) == ("folder/report.ipynb", "idle")
    assert Kernel(gateway, jupyter).value("1") == "1"
