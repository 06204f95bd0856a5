"""What a stop of the gateway does when it is to take its kernels with it (`on_shutdown` "stop"): no new work, running cells get their
time, and whoever waits is told how it ended. What it does by default, when they live on, is in tests/faults/test_detach.py."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2

from gateway.bench.subject import Subject
from tests.support import engine, eventually


def left(subject: Subject) -> int:
    gateway_id = (subject.settings.state_dir / "gateway-id").read_text()
    api = engine()
    try:
        return len(api.containers(all=True, filters={"label": f"org.cellgate.gateway={gateway_id}"}))
    finally:
        api.close()


def post(subject: Subject, kernel_id: str, code: str) -> httpx2.Response:
    with httpx2.Client(base_url=subject.url, headers=subject.headers, timeout=60) as client:
        return client.post(f"/v1/kernels/{kernel_id}/execute", json={"code": code})


def busy(subject: Subject, kernel_id: str) -> bool:
    state: str = subject.http.get(f"/v1/kernels/{kernel_id}").json()["state"]
    return state == "busy"


def stopping(subject: Subject) -> bool:
    status: str = subject.http.get("/healthz").json()["status"]
    return status == "stopping"


def test_a_cell_that_ends_in_time_is_waited_for_and_new_work_refused() -> None:
    with Subject(server={"on_shutdown": "stop", "drain_timeout": 20}) as subject, ThreadPoolExecutor(1) as pool:
        kernel_id, _ = subject.create()
        running = pool.submit(post, subject, kernel_id, "import time; time.sleep(3); print('done')")
        eventually(lambda: busy(subject, kernel_id), "busy")
        os.kill(subject.pid, signal.SIGTERM)
        eventually(lambda: stopping(subject), "draining")
        assert post(subject, kernel_id, "1").json()["code"] == "shutting_down"
        created = subject.http.post("/v1/kernels", json={})
        assert (created.status_code, created.json()["code"]) == (503, "shutting_down")
        assert int(created.headers["retry-after"]) > 0
        result = running.result().json()
        assert (result["status"], result["outputs"][0]["text"]) == ("ok", "done\n")
        subject.wait()
        assert left(subject) == 0


def test_a_cell_that_takes_too_long_ends_with_the_cause() -> None:
    with Subject(server={"on_shutdown": "stop", "drain_timeout": 1}) as subject, ThreadPoolExecutor(1) as pool:
        kernel_id, _ = subject.create()
        running = pool.submit(post, subject, kernel_id, "import time; time.sleep(600)")
        eventually(lambda: busy(subject, kernel_id), "busy")
        os.kill(subject.pid, signal.SIGTERM)
        result = running.result().json()
        assert (result["status"], result["cause"]["code"]) == ("died", "gateway_stopped")
        subject.wait()
        assert left(subject) == 0


def test_by_default_kernels_live_on() -> None:
    with Subject(server={"on_shutdown": "detach", "drain_timeout": 1}) as subject:
        kernel_id, _ = subject.create()
        assert post(subject, kernel_id, "treasure = 42").json()["status"] == "ok"
        subject.terminate()
        assert left(subject) == 1
        subject.start()
        assert post(subject, kernel_id, "treasure").json()["outputs"][0]["data"]["text/plain"] == "42"
        subject.delete(kernel_id)
        assert left(subject) == 0


def test_a_second_signal_waits_for_nobody() -> None:
    with Subject(server={"on_shutdown": "stop", "drain_timeout": 600}) as subject, ThreadPoolExecutor(1) as pool:
        kernel_id, _ = subject.create()
        running = pool.submit(post, subject, kernel_id, "import time; time.sleep(600)")
        eventually(lambda: busy(subject, kernel_id), "busy")
        os.kill(subject.pid, signal.SIGTERM)
        eventually(lambda: stopping(subject), "draining")
        os.kill(subject.pid, signal.SIGTERM)
        assert running.exception(30) is not None or running.result().json()["cause"]["code"] == "gateway_stopped"
        subject.wait()
        assert left(subject) == 0
