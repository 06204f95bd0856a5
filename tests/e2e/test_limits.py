"""Time limits, tombstones, warnings and figures of use, as a client meets them; each against a real kernel."""

from collections.abc import Iterator

import pytest

from tests.support import Event, Gateway, Kernel, eventually, problem, running


@pytest.fixture(scope="module")
def quick() -> Iterator[Gateway]:
    """A gateway whose culler looks often."""
    with running(culling={"cull_interval": 0.1}, kernels={"interrupt_grace": 1.0}) as gateway:
        yield gateway


def codes(events: list[Event], kind: str) -> list[str]:
    return [event["code"] for event in events if event["type"] == kind]


def test_an_idle_kernel_is_culled_and_leaves_a_tombstone(quick: Gateway) -> None:
    with quick.kernel(idle_timeout=1, label="forgotten") as kernel:
        result = kernel.execute("print('last words')")
        eventually(lambda: quick.http.get(kernel.path).status_code == 410, "culled")
        document = problem(quick.http.get(kernel.path), 410, "kernel_gone")
        assert document["cause"]["code"] == "idle_timeout"
        assert document["label"] == "forgotten"
        assert document["last_execution"]["execution_id"] == result["execution_id"]
        assert document["last_execution"]["ended"]["status"] == "ok"
        assert document["usage"]["executions"] == 1
        assert document["ended_at"] in document["detail"]
        for answer in (kernel.post("1"), quick.http.get(f"{kernel.path}/files"), quick.http.post(f"{kernel.path}/restart")):
            problem(answer, 410, "kernel_gone")
        assert kernel.id not in [found["id"] for found in quick.http.get("/v1/kernels").json()["kernels"]]


def test_requests_keep_a_kernel_from_being_idle(quick: Gateway) -> None:
    with quick.kernel(idle_timeout=1.5) as kernel:
        for _ in range(4):
            kernel.run("import time; time.sleep(0.3)")
            assert quick.http.post(f"{kernel.path}/keepalive").status_code == 200
            kernel.run("time.sleep(0.3)")
        assert kernel.document()["state"] == "idle"


def test_a_running_cell_is_not_idle(quick: Gateway) -> None:
    with quick.kernel(idle_timeout=1) as kernel:
        assert kernel.execute("import time; time.sleep(2.5)")["status"] == "ok"


def test_a_busy_kernel_has_a_limit_of_its_own() -> None:
    spec = {"python3": {"busy_timeout": 1}}
    with running(culling={"cull_interval": 0.1}, kernels={"specs": spec}) as gateway, gateway.kernel() as kernel:
        result = kernel.execute("import time; time.sleep(600)")
        assert (result["status"], result["cause"]["code"]) == ("died", "busy_timeout")
        problem(kernel.post("1"), 410, "kernel_gone")


def test_a_keep_alive_extends_the_lifetime(quick: Gateway) -> None:
    with quick.kernel(lifetime=2) as kernel:
        first = kernel.document()["expires_at"]
        answer = quick.http.post(f"{kernel.path}/keepalive", json={"lifetime": 600})
        assert answer.json()["expires_at"] > first
        kernel.run("import time; time.sleep(2.5)")
        assert kernel.document()["state"] == "idle"
        problem(quick.http.post(f"{kernel.path}/keepalive", json={"lifetime": 1e9}), 422, "limit_exceeded")


def test_the_box_ends_itself_at_its_lifetime_even_if_nobody_culls() -> None:
    with running(culling={"cull_interval": 3600}) as gateway, gateway.kernel(lifetime=3) as kernel:
        result = kernel.execute("import time; time.sleep(600)")
        assert (result["status"], result["cause"]["code"], result["variables"]) == ("died", "lifetime", "lost")


def test_memory_warnings_come_once_per_level_and_name_the_largest(quick: Gateway) -> None:
    with quick.kernel() as kernel:
        code = "import time\nfirst = bytearray(860 << 20)\ntime.sleep(1.5)\nsecond = bytearray(110 << 20)\ntime.sleep(1.5)"
        events = kernel.events(code)
        assert codes(events, "warning") == ["memory_80", "memory_95"]
        warning = next(event for event in events if event["type"] == "warning")
        assert warning["largest_variables"][0]["name"] == "first"
        assert warning["largest_variables"][0]["size"] >= 860 << 20
        assert "first" in warning["message"]
        assert kernel.execute("1")["warnings"] == []


def test_usage_is_told_per_cell_and_per_kernel(quick: Gateway) -> None:
    with quick.kernel() as kernel:
        spin = kernel.execute(
            "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nprint('x' * 1000)"
        )
        rest = kernel.execute("time.sleep(0.5)")
        assert 0.4 < spin["usage"]["cpu_seconds"] < 5
        assert spin["usage"]["output_bytes"] > 1000
        assert rest["usage"]["cpu_seconds"] < spin["usage"]["cpu_seconds"]
        assert rest["usage"]["wall_seconds"] >= 0.5
        whole = kernel.document()["usage"]
        assert whole["executions"] == 2
        assert whole["cpu_seconds"] >= spin["usage"]["cpu_seconds"]
        assert whole["output_bytes"] >= spin["usage"]["output_bytes"]
        assert 0 < whole["memory_used"] <= whole["memory_peak"] <= kernel.document()["limits"]["memory"]


DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', flush=True)"


def test_a_client_chooses_how_far_an_interrupt_may_go(quick: Gateway) -> None:
    deaf = f"{DEAF}\nimport time\nend = time.time() + 5\nwhile time.time() < end: pass\n'alive'"
    with quick.kernel() as kernel, kernel.submitted(deaf) as cell:
        cell.wait_for("stream")
        answer = quick.http.post(f"{kernel.path}/interrupt", json={"up_to": "interrupt_again"})
        assert answer.json() == {"execution_id": cell.execution_id}
        assert cell.end()["status"] == "ok"
        assert [event["step"] for event in cell.events if event["type"] == "interrupt"] == ["interrupt", "interrupt_again"]


def test_an_interrupt_climbs_to_the_kill_by_default(quick: Gateway) -> None:
    with quick.kernel() as kernel, kernel.submitted(f"{DEAF}\nwhile True: pass") as cell:
        cell.wait_for("stream")
        kernel.interrupt()
        end = cell.end()
        assert (end["status"], end["cause"]["code"]) == ("died", "signal")
        steps = [event["step"] for event in cell.events if event["type"] == "interrupt"]
        assert steps == ["interrupt", "interrupt_again", "kill_kernel"]


def test_the_next_cell_revives_a_dead_kernel_and_says_so(quick: Gateway) -> None:
    with quick.kernel() as kernel:
        kernel.run("open('kept', 'w').write('yes'); lost = 1")
        assert kernel.execute("import os; os._exit(9)")["cause"]["code"] == "exit"
        assert kernel.document()["state"] == "dead"
        events = kernel.events("print(open('kept').read(), 'lost' in globals())")
        assert (events[0]["type"], events[0]["code"]) == ("warning", "kernel_restarted")
        assert events[0]["cause"]["exit_code"] == 9
        assert "yes False" in "".join(event.get("text", "") for event in events)


def test_a_kernel_may_stay_dead(quick: Gateway) -> None:
    with quick.kernel(on_death="stay") as kernel:
        kernel.execute("import os; os._exit(9)")
        assert problem(kernel.post("1"), 409, "kernel_dead")["cause"]["exit_code"] == 9
        kernel.restart()
        assert kernel.value("1") == "1"


def test_output_past_the_limit_keeps_head_and_tail() -> None:
    limits = {"max_output": 50_000}
    with running(kernels=limits) as gateway, gateway.kernel() as kernel:
        code = "for i in range(20_000): print(i)\n'the result'"
        events = kernel.events(code)
        truncated = [event for event in events if event["type"] == "truncated"]
        assert len(truncated) == 1
        assert truncated[0]["bytes"] > 0
        result = kernel.execute(code)
        text = "".join(output.get("text", "") for output in result["outputs"])
        assert text.startswith("0\n1\n")
        assert text.endswith("19999\n")
        assert result["outputs"][-1]["data"]["text/plain"] == "'the result'"
        assert result["truncated"]["limit"] == 50_000
        assert "output_limit" in [warning["code"] for warning in result["warnings"]]


def test_a_rate_slows_a_kernel_and_drops_nothing() -> None:
    with running(kernels={"output_rate": 500_000}) as gateway, gateway.kernel() as kernel:
        text = kernel.run("for i in range(40): print('x' * 49_999)")
        assert len(text) == 40 * 50_000
        assert kernel.value("1 + 1") == "2"


def test_a_frozen_kernel_thaws_for_a_cell_a_file_and_a_delete() -> None:
    with running(culling={"cull_interval": 0.1, "freeze_after": 0.2}) as gateway:
        kernel: Kernel = gateway.new_kernel()
        kernel.run("x = 5")
        eventually(lambda: kernel.document()["frozen"], "frozen")
        assert kernel.value("x") == "5"
        eventually(lambda: kernel.document()["frozen"], "frozen")
        assert gateway.http.get(f"{kernel.path}/files").status_code == 200
        eventually(lambda: kernel.document()["frozen"], "frozen")
        assert gateway.http.delete(kernel.path).status_code == 204
