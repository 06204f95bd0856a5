"""Limits that many requests meet together: kernels, the queue of one kernel, starts that fail."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.api.conftest import MAX_KERNELS, MAX_QUEUE
from tests.support import Gateway, Kernel, engine, problem, running


def test_one_kernel_too_many_is_refused(strict: Gateway, kernel: Kernel) -> None:
    more = [strict.new_kernel() for _ in range(MAX_KERNELS - 1)]
    try:
        answer = strict.http.post("/v1/kernels", json={})
        document = problem(answer, 429, "too_many_kernels")
        assert (document["retryable"], document["limit"]) == (True, MAX_KERNELS)
        assert int(answer.headers["retry-after"]) > 0
        # One that has gone makes room at once.
        more.pop().delete()
        more.append(strict.new_kernel())
        assert kernel.value("1") == "1"
    finally:
        for one in more:
            one.delete()


def test_many_at_once_do_not_slip_past_the_limit(strict: Gateway, kernel: Kernel) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: strict.http.post("/v1/kernels", json={}), range(8)))
    started = [Kernel(strict, answer.json()["id"]) for answer in answers if answer.status_code == 201]
    try:
        assert len(started) == MAX_KERNELS - 1
        for answer in answers:
            if answer.status_code != 201:
                problem(answer, 429, "too_many_kernels")
    finally:
        for one in started:
            one.delete()


def test_a_full_queue_is_told_on_both_ways(strict: Gateway, kernel: Kernel) -> None:
    with kernel.submitted("input()") as first, kernel.socket() as socket:
        for number in range(MAX_QUEUE):
            socket.send("execute", code="1", request_id=number)
            socket.until_type("accepted")
        answer = kernel.post("1")
        document = problem(answer, 429, "queue_full")
        assert (document["retryable"], document["limit"]) == (True, MAX_QUEUE)
        assert int(answer.headers["retry-after"]) > 0
        socket.send("execute", code="1", request_id="one too many")
        refused = socket.until_type("refused", "one too many")
        assert (refused["problem"]["code"], refused["problem"]["status"]) == ("queue_full", 429)
        first.answer("")
        for number in range(MAX_QUEUE):
            assert socket.until_type("ended")["request_id"] == number
    assert kernel.value("1") == "1"


def test_a_kernelspec_that_the_image_has_not_is_a_start_that_failed() -> None:
    specs = {"python3": {}, "ghost": {"kernelspec": "nonesuch"}, "hasty": {"start_timeout": 0.01}}
    with running(kernels={"specs": specs}) as gateway:
        document = problem(gateway.http.post("/v1/kernels", json={"spec": "ghost"}), 502, "start_failed")
        assert "nonesuch" in document["detail"]
        document = problem(gateway.http.post("/v1/kernels", json={"spec": "hasty"}), 504, "start_timeout")
        assert document["retryable"] is True
        # What had been begun is gone, and the next start is not hindered.
        assert gateway.http.get("/v1/kernels").json() == {"kernels": []}
        api = engine()
        left = api.containers(all=True, filters={"label": f"org.cellgate.gateway={gateway.id}"})
        api.close()
        assert left == []
        with gateway.kernel() as kernel:
            assert kernel.value("1") == "1"


@pytest.mark.parametrize("pids", [32])
def test_the_smallest_kernel_starts(strict: Gateway, pids: int) -> None:
    with strict.kernel(limits={"memory": "128m", "cpus": 0.1, "pids": pids}) as kernel:
        assert kernel.value("6 * 7") == "42"
