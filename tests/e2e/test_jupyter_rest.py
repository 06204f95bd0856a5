"""Jupyter's REST API over real kernels: what a kernel sees of it, and that sessions outlive the gateway."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.faults.test_gateway_death import Mortal
from tests.support import Gateway, Kernel, Running, eventually, printed


@pytest.fixture
def kernel(gateway: Gateway) -> Iterator[Kernel]:
    answer = gateway.http.post(
        "/api/kernels", json={"name": "python3", "env": {"KERNEL_USERNAME": "bob", "KERNEL_WORDS": "a b"}}
    )
    assert answer.status_code == 201, answer.text
    started = Kernel(gateway, answer.json()["id"])
    yield started
    started.delete()


def environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name.startswith("KERNEL_")}


def model(kernel: Kernel) -> dict[str, Any]:
    found: dict[str, Any] = kernel.http.get(f"/api/kernels/{kernel.id}").json()
    return found


def test_the_variables_of_a_kernel(gateway: Gateway, kernel: Kernel) -> None:
    own = {"KERNEL_GATEWAY": "1", "KERNEL_ID": kernel.id}
    assert kernel.call(environment) == own | {"KERNEL_USERNAME": "bob", "KERNEL_WORDS": "a b"}
    plain = Kernel(gateway, gateway.http.post("/api/kernels").json()["id"])
    try:
        assert plain.call(environment) == {"KERNEL_GATEWAY": "1", "KERNEL_ID": plain.id}
    finally:
        plain.delete()


def test_interrupt_and_restart(gateway: Gateway, kernel: Kernel) -> None:
    kernel.run("x = 1")
    with kernel.submitted("while True: pass") as cell:
        eventually(lambda: model(kernel)["execution_state"] == "busy", "it is busy")
        assert gateway.http.post(f"/api/kernels/{kernel.id}/interrupt").status_code == 204
        assert cell.end()["status"] == "error"
    assert kernel.value("x") == "1"
    before = kernel.value("__import__('os').getpid()")
    answer = gateway.http.post(f"/api/kernels/{kernel.id}/restart", json={})
    assert (answer.status_code, answer.json()["execution_state"]) == (200, "idle")
    assert kernel.value("__import__('os').getpid()") != before
    assert kernel.call(environment)["KERNEL_USERNAME"] == "bob"
    assert kernel.execute("x")["status"] == "error"


def test_a_cell_that_catches_interrupts_gets_each(gateway: Gateway, kernel: Kernel) -> None:
    code = """
caught = 0
while caught < 3:
    try:
        print("waiting", flush=True)
        while True: pass
    except KeyboardInterrupt:
        caught += 1
print("caught", caught)
"""
    with kernel.submitted(code) as cell:
        for count in range(3):
            _wait_for(cell, count + 1)
            assert gateway.http.post(f"/api/kernels/{kernel.id}/interrupt").status_code == 204
        assert cell.end()["status"] == "ok"


def _wait_for(cell: Running, times: int) -> None:
    """Until the cell has printed `waiting` so often."""
    while printed(cell.events).count("waiting") < times:
        cell.wait_for("stream")


def test_a_session_and_its_notebook(gateway: Gateway) -> None:
    session = gateway.http.post("/api/sessions", json={"path": "folder/a.ipynb", "type": "notebook", "name": "a"}).json()
    kernel = Kernel(gateway, session["kernel"]["id"])
    try:
        assert kernel.value("__session__") == "'folder/a.ipynb'"
        assert gateway.http.delete(f"/api/sessions/{session['id']}").status_code == 204
        assert gateway.http.get(f"/api/kernels/{kernel.id}").status_code == 404
    finally:
        kernel.delete()


@pytest.mark.timeout(300)
def test_sessions_and_ids_outlive_the_gateway() -> None:
    with Mortal() as mortal:
        wanted = str(uuid4())
        body = {"path": "a.ipynb", "type": "notebook", "name": "a", "kernel": {"id": wanted}}
        gateway = mortal.gateway
        first = gateway.http.post("/api/sessions", json=body).json()
        Kernel(gateway, wanted).run("treasure = 42")
        mortal.kill()
        mortal.start()
        gateway = mortal.gateway
        again = gateway.http.post("/api/sessions", json=body)
        assert again.status_code == 201, again.text
        assert (again.json()["id"], again.json()["kernel"]["id"]) == (first["id"], wanted)
        assert gateway.http.post("/api/kernels", json={"kernel_id": wanted}).json()["id"] == wanted
        assert Kernel(gateway, wanted).value("treasure") == "42"
        assert model(Kernel(gateway, wanted))["execution_state"] == "idle"
        assert gateway.http.delete(f"/api/sessions/{first['id']}").status_code == 204
        # Also the next gateway does not give the id of an ended kernel to another.
        mortal.kill()
        mortal.start()
        assert mortal.gateway.http.post("/api/kernels", json={"kernel_id": wanted}).status_code == 409
        assert mortal.gateway.http.get("/api/sessions").json() == []
