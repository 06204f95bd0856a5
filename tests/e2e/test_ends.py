"""However a kernel ends, its cell ends with it, with the cause and with what survived; and a dead kernel never looks idle."""

import contextlib
from collections.abc import Callable, Iterator

import docker
import pytest

from tests.support import Gateway, Kernel, engine, problem, running, stdout


@pytest.fixture
def api() -> Iterator[docker.APIClient]:
    with contextlib.closing(engine()) as client:
        yield client


def test_a_kernel_that_exits_is_dead_with_its_exit_code(new_kernel: Callable[..., Kernel]) -> None:
    kernel = new_kernel(on_death="stay")
    kernel.run("kept = 1\nopen('file', 'w').write('kept')")
    result = kernel.execute("print('last words', flush=True)\nimport os\nos._exit(3)")
    assert (result["status"], result["variables"], result["kernel_state"]) == ("died", "lost", "dead")
    assert (result["cause"]["code"], result["cause"]["exit_code"], result["cause"]["signal"]) == ("exit", 3, None)
    assert stdout(result) == "last words\n"
    document = kernel.document()
    assert (document["state"], document["cause"]) == ("dead", result["cause"])
    refused = problem(kernel.post("1"), 409, "kernel_dead")
    assert (refused["kernel_id"], refused["cause"]["code"]) == (kernel.id, "exit")
    problem(kernel.http.post(f"{kernel.path}/interrupt"), 409, "kernel_dead")
    restarted = kernel.restart()
    assert (restarted["id"], restarted["state"], restarted["cause"], restarted["execution_count"]) == (
        kernel.id,
        "idle",
        None,
        0,
    )
    assert kernel.value("'kept' in globals(), open('file').read()") == "(False, 'kept')"


def test_the_next_cell_brings_a_dead_kernel_back_and_says_so(kernel: Kernel) -> None:
    kernel.run("kept = 1\nopen('file', 'w').write('kept')")
    kernel.execute("import os\nos._exit(3)")
    events = kernel.events("'kept' in globals(), open('file').read()")
    assert events[0]["type"] == "warning"
    assert (events[0]["code"], events[0]["cause"]["exit_code"]) == ("kernel_restarted", 3)
    assert next(event["data"]["text/plain"] for event in events if event["type"] == "result") == "(False, 'kept')"
    assert (events[-1]["status"], kernel.document()["state"], kernel.document()["cause"]) == ("ok", "idle", None)


def test_a_kernel_that_dies_again_and_again_is_left_dead() -> None:
    with running(kernels={"max_restarts": 2}) as gateway, gateway.kernel() as kernel:
        for _ in range(3):
            assert kernel.execute("import os\nos._exit(3)")["status"] == "died"
        problem(kernel.post("1"), 409, "kernel_dead")
        assert kernel.restart()["state"] == "idle"
        assert kernel.value("1") == "1"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_kernel_that_a_signal_ends_says_which(kernel: Kernel, name: str) -> None:
    result = kernel.execute(f"import os, signal\nos.kill(os.getpid(), signal.{name})")
    assert (result["status"], result["cause"]["code"], result["cause"]["signal"]) == ("died", "signal", name)
    assert kernel.document()["state"] == "dead"
    assert kernel.restart()["state"] == "idle"
    assert kernel.value("6 * 7") == "42"


def test_a_crash_in_native_code_leaves_its_traceback_in_the_cause(kernel: Kernel) -> None:
    result = kernel.execute("import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()")
    assert (result["status"], result["cause"]["signal"]) == ("died", "SIGSEGV")
    assert "in crash" in result["cause"]["log"]


def test_a_dying_kernel_is_told_to_every_reader_and_to_the_queue(kernel: Kernel) -> None:
    with kernel.socket() as socket, kernel.socket() as watching:
        socket.send("execute", code="input()\nimport os\nos._exit(7)", request_id="dies")
        socket.send("execute", code="1", request_id="behind")
        asked = socket.until_type("input_request")
        socket.send("input", execution_id=asked["execution_id"], value="")
        assert socket.until_type("ended", "dies")["cause"]["exit_code"] == 7
        behind = socket.until_type("ended", "behind")
        assert (behind["status"], behind["cause"]["exit_code"], behind["variables"]) == ("aborted", 7, "lost")
        state = watching.until_type("state")
        assert (state["state"], state["cause"]["exit_code"], state["execution_id"]) == ("dead", 7, None)


def test_a_kernel_out_of_memory_says_how_much_it_had(new_kernel: Callable[..., Kernel]) -> None:
    limit = 256 * 1024**2
    kernel = new_kernel(limits={"memory": limit})
    kernel.run("open('file', 'w').write('kept')")
    result = kernel.execute("print('in', flush=True)\nhog = []\nwhile True: hog.append(bytearray(10_000_000))")
    cause = result["cause"]
    assert (result["status"], result["variables"], cause["code"], cause["signal"]) == (
        "died",
        "lost",
        "out_of_memory",
        "SIGKILL",
    )
    assert cause["memory_limit"] == limit
    assert 0.9 * limit < cause["memory_peak"] <= limit
    assert "256 MiB" in cause["message"]
    assert stdout(result) == "in\n"
    kernel.restart()
    assert kernel.value("open('file').read()") == "'kept'"


def test_a_child_process_out_of_memory_does_not_end_the_kernel(new_kernel: Callable[..., Kernel]) -> None:
    kernel = new_kernel(limits={"memory": "256m"})
    hog = "hog = []\nwhile True: hog.append(bytearray(10_000_000))"
    assert kernel.run(f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {hog!r}]).returncode)") == "-9\n"
    assert kernel.document()["state"] == "idle"
    # And what ends the kernel later is told as what it is.
    result = kernel.execute("import os, signal\nos._exit(4)")
    assert (result["cause"]["code"], result["cause"]["exit_code"]) == ("exit", 4)


def test_a_container_removed_from_outside_ends_its_cell(kernel: Kernel, api: docker.APIClient) -> None:
    with kernel.submitted("print('in', flush=True)\nwhile True: pass") as cell:
        cell.wait_for("stream")
        api.remove_container(kernel.container, force=True)
        ended = cell.end()
    assert (ended["status"], ended["variables"], ended["kernel_state"]) == ("died", "lost", "dead")
    # The engine may still know the container while it is being removed; both are true.
    assert ended["cause"]["code"] in ("sandbox_removed", "sandbox_ended")
    check_gone(kernel, "sandbox_removed", "sandbox_ended")


def test_a_container_removed_while_idle_is_noticed(kernel: Kernel, api: docker.APIClient) -> None:
    with kernel.socket() as socket:
        api.remove_container(kernel.container, force=True)
        assert socket.until_type("state")["state"] == "dead"
    check_gone(kernel, "sandbox_removed", "sandbox_ended")


def check_gone(kernel: Kernel, *causes: str) -> None:
    """With its box a kernel is gone for good: whatever needs the box says so, and why. It may still be listed, as dead."""
    answers = [kernel.post("1"), kernel.http.post(f"{kernel.path}/restart"), kernel.http.get(f"{kernel.path}/files")]
    for answer in answers:
        status, code = (410, "kernel_gone") if answer.status_code == 410 else (409, "kernel_dead")
        assert problem(answer, status, code)["cause"]["code"] in causes
    look = kernel.http.get(kernel.path)
    assert look.status_code == 410 or look.json()["state"] == "dead"
    assert look.json()["cause"]["code"] in causes


def test_an_earlier_out_of_memory_is_not_blamed_for_a_later_end(
    new_kernel: Callable[..., Kernel], api: docker.APIClient
) -> None:
    kernel = new_kernel(limits={"memory": "256m"})
    assert kernel.execute("hog = []\nwhile True: hog.append(bytearray(10_000_000))")["cause"]["code"] == "out_of_memory"
    kernel.restart()
    with kernel.socket() as socket:
        api.kill(kernel.container)
        state = socket.until(lambda event: event["type"] == "state" and event["state"] == "dead")
    assert state["cause"]["code"] == "sandbox_ended"


def test_restart_keeps_the_files_and_loses_the_variables(kernel: Kernel) -> None:
    kernel.run("kept = 1\nimport os\nos.makedirs('deep/er')\nopen('deep/er/file', 'w').write('kept')")
    before = kernel.document()
    after = kernel.restart()
    assert (after["id"], after["state"], after["execution_count"]) == (before["id"], "idle", 0)
    assert kernel.value("'kept' in globals(), open('deep/er/file').read()") == "(False, 'kept')"
    assert kernel.http.get(kernel.file("deep/er/file")).content == b"kept"


def test_restart_ends_what_runs_and_what_waits(kernel: Kernel) -> None:
    with kernel.submitted("print('in', flush=True)\nwhile True: pass") as cell, kernel.socket() as socket:
        cell.wait_for("stream")
        socket.send("execute", code="1", request_id="behind")
        socket.until_type("accepted")
        kernel.restart()
        ended, behind = cell.end(), socket.until_type("ended", "behind")
    assert (ended["status"], ended["cause"]["code"], ended["variables"]) == ("died", "kernel_restarted", "lost")
    assert (behind["status"], behind["cause"]["code"]) == ("aborted", "kernel_restarted")
    assert kernel.value("1") == "1"


def test_restart_ends_what_cells_have_left_running(kernel: Kernel) -> None:
    kernel.run("import subprocess\nsubprocess.Popen(['sleep', '3600'], start_new_session=True)")
    count = "import os\nprint(sum('sleep' in open(f'/proc/{pid}/comm').read() for pid in os.listdir('/proc') if pid.isdigit()))"
    assert kernel.run(count) == "1\n"
    kernel.restart()
    assert kernel.run(count) == "0\n"


def test_restart_over_the_websocket(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        socket.execute("kept = 1")
        socket.send("restart", request_id="again")
        done = socket.until_type("done", "again")
        assert (done["op"], done["request_id"]) == ("restart", "again")
        assert printed_value(socket.execute("'kept' in globals()")) == "False"


def printed_value(events: list[dict[str, object]]) -> object:
    data = next(event["data"] for event in events if event["type"] == "result")
    assert isinstance(data, dict)
    return data["text/plain"]


def test_deleting_a_kernel_ends_its_cell_and_its_readers(kernel: Kernel, api: docker.APIClient) -> None:
    with kernel.submitted("print('in', flush=True)\nwhile True: pass") as cell:
        cell.wait_for("stream")
        assert kernel.http.delete(kernel.path).status_code == 204
        ended = cell.end()
    assert (ended["status"], ended["cause"]["code"]) == ("died", "kernel_deleted")
    assert api.containers(all=True, filters={"name": kernel.container}) == []
    for answer in (kernel.http.get(kernel.path), kernel.http.delete(kernel.path), kernel.post("1")):
        assert problem(answer, 410, "kernel_gone")["cause"]["code"] == "kernel_deleted"
    assert kernel.id not in [listed["id"] for listed in kernel.http.get("/v1/kernels").json()["kernels"]]


def test_a_gateway_that_stops_ends_its_cells_and_leaves_nothing(api: docker.APIClient) -> None:
    with running() as gateway:
        kernel = gateway.new_kernel()
        assert [found["Names"] for found in containers_of(api, gateway)] == [[f"/{kernel.container}"]]
        assert kernel.value("1") == "1"
    assert containers_of(api, gateway) == []
    assert not (gateway.settings.state_dir / "links" / kernel.id).exists()


def containers_of(api: docker.APIClient, gateway: Gateway) -> list[dict[str, object]]:
    found: list[dict[str, object]] = api.containers(all=True, filters={"label": f"org.cellgate.gateway={gateway.id}"})
    return found


def test_the_lifetime_of_a_sandbox_ends_it_with_that_cause() -> None:
    spec = {"lifetime": 3.0}
    with running(kernels={"specs": {"python3": spec}}) as gateway, gateway.kernel() as kernel, kernel.socket() as socket:
        state = socket.until(lambda event: event["type"] == "state" and event["state"] == "dead")
    assert state["cause"]["code"] == "lifetime"
