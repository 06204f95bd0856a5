"""A request that is sent again does its work once: counted by a real kernel, on all ways at once."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2

from tests.api.scripted import RawRequest, wait_for_status
from tests.support import DEADLINE, Gateway, Kernel, problem, running, stdout

COUNT = "count = globals().get('count', 0) + 1\nprint(count)"


def post(kernel: Kernel, key: str, code: str = COUNT, accept: str = "application/json") -> httpx2.Response:
    headers = {**kernel.gateway.headers, "Idempotency-Key": key, "Accept": accept}
    url = f"{kernel.gateway.url}{kernel.path}/execute"
    return httpx2.post(url, json={"code": code}, headers=headers, timeout=4 * DEADLINE)


def test_twenty_at_once_are_one_execution(kernel: Kernel) -> None:
    accepts = ["application/json", "application/x-ndjson", "text/event-stream", "application/json"] * 5
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda accept: post(kernel, "twenty", accept=accept), accepts))
    assert {answer.status_code for answer in answers} == {200}
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 19
    documents = {answer.text for answer, accept in zip(answers, accepts, strict=True) if accept == "application/json"}
    assert len(documents) == 1
    execution = json.loads(documents.pop())
    assert stdout(execution) == "1\n"
    streams = {answer.text for answer, accept in zip(answers, accepts, strict=True) if accept == "application/x-ndjson"}
    assert len(streams) == 1
    assert {json.loads(line)["execution_id"] for line in streams.pop().splitlines()} == {execution["execution_id"]}
    assert kernel.value("count") == "1"


def test_a_client_that_was_cut_off_asks_again(gateway: Gateway, kernel: Kernel) -> None:
    code = f"{COUNT}\nimport os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    lost = RawRequest(gateway, f"{kernel.path}/execute", {"code": code}, Idempotency_Key="cut")
    execution = wait_for_status(kernel, "running")
    lost.leave()
    with ThreadPoolExecutor(3) as pool:
        again = [pool.submit(post, kernel, "cut", code) for _ in range(3)]
        assert kernel.http.put(kernel.file("go"), content=b"").status_code == 201
        results = [answer.result().json() for answer in again]
    assert {result["execution_id"] for result in results} == {execution}
    assert {stdout(result) for result in results} == {"1\n"}
    assert kernel.value("count") == "1"


def test_a_key_outlasts_the_memory_and_a_restart_of_the_kernel() -> None:
    with running(kernels={"max_kept_output": 1}) as gateway, gateway.kernel() as kernel:
        first = post(kernel, "old").json()
        for number in range(70):
            kernel.execute(str(number))
        kernel.restart()
        again = post(kernel, "old")
        assert (again.json(), again.headers["idempotency-replayed"]) == (first, "true")
        problem(post(kernel, "old", "other"), 409, "idempotency_conflict")
        assert stdout(post(kernel, "new").json()) == "1\n"


def test_a_create_is_one_kernel_however_often_it_is_sent(gateway: Gateway) -> None:
    def create(label: str) -> httpx2.Response:
        headers = {**gateway.headers, "Idempotency-Key": "one kernel"}
        return httpx2.post(f"{gateway.url}/v1/kernels", json={"label": label}, headers=headers, timeout=4 * DEADLINE)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(create, ["same"] * 8))
    assert {answer.status_code for answer in answers} == {201}
    kernel = Kernel(gateway, answers[0].json()["id"])
    try:
        assert {answer.json()["id"] for answer in answers} == {kernel.id}
        assert [entry["id"] for entry in gateway.http.get("/v1/kernels").json()["kernels"] if entry["label"] == "same"] == [
            kernel.id
        ]
        problem(create("other"), 409, "idempotency_conflict")
        assert kernel.value("6 * 7") == "42"
    finally:
        kernel.delete()
