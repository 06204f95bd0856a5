"""What a cell can rely on: its variables stay, its neighbours in the queue are treated as asked, its kernel is its own.

These are the promises of the product as a client sees them, each tried on a real kernel in a real container.
"""

from collections.abc import Callable

import pytest

from tests.support import Gateway, Kernel, eventually, printed, problem, stdout


def test_forty_cells_of_one_kernel_share_their_variables(kernel: Kernel) -> None:
    assert kernel.run("import math\ntotal = 0\nseen = []") == ""
    for step in range(2, 40):
        result = kernel.execute(f"total += {step}; seen.append(total); print(math.sqrt(total ** 2))")
        assert result["status"] == "ok"
        assert result["execution_count"] == step
        assert stdout(result) == f"{float(sum(range(2, step + 1)))}\n"
    assert kernel.value("len(seen), total, In[2] == 'total += 2; seen.append(total); print(math.sqrt(total ** 2))'") == (
        f"(38, {sum(range(2, 40))}, True)"
    )
    assert kernel.document()["execution_count"] == 40


def test_definitions_classes_and_the_last_result_are_kept(kernel: Kernel) -> None:
    kernel.run("class Point:\n    def __init__(self, x): self.x = x\n    def __repr__(self): return f'Point({self.x})'")
    kernel.run("def double(p): return Point(p.x * 2)")
    assert kernel.value("double(Point(21))") == "Point(42)"
    assert kernel.value("_") == "Point(42)"


def test_cells_wait_for_their_turn_and_run_in_order(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        for number in range(8):
            socket.send("execute", code=f"print({number})", request_id=number)
        for number in range(8):
            assert socket.until(lambda event: event["type"] == "ended")["request_id"] == number
        texts = [event["text"] for event in socket.seen if event["type"] == "stream"]
    assert texts == [f"{number}\n" for number in range(8)]


def test_a_queued_cell_is_told_its_position(kernel: Kernel) -> None:
    with kernel.submitted("input()") as first, kernel.socket() as socket:
        socket.send("execute", code="1", request_id="b")
        socket.send("execute", code="2", request_id="c")
        positions = [socket.until_type("queued", name)["position"] for name in ("b", "c")]
        assert positions == [1, 2]
        assert kernel.document()["queue_length"] == 2
        assert kernel.document()["state"] == "busy"
        first.answer("")
        assert first.end()["status"] == "ok"
        assert socket.until(lambda event: event["type"] == "queued")["position"] in (0, 1)
        assert socket.until_type("ended", "c")["status"] == "ok"
    assert kernel.document()["state"] == "idle"


@pytest.mark.parametrize("stop", [True, False])
def test_stop_on_error_decides_about_the_cells_behind_a_failing_one(kernel: Kernel, stop: bool) -> None:
    with kernel.socket() as socket:
        socket.send("execute", code="input(); 1 / 0", request_id="fails", stop_on_error=stop)
        socket.send("execute", code="ran = 'ran'\nran", request_id="behind")
        asked = socket.until_type("input_request")
        socket.send("input", execution_id=asked["execution_id"], value="")
        first, second = socket.until_type("ended", "fails"), socket.until_type("ended", "behind")
    assert (first["status"], first["cause"]["code"]) == ("error", "exception")
    assert first["cause"]["message"] == "ZeroDivisionError: division by zero"
    if stop:
        assert (second["status"], second["cause"]["code"]) == ("aborted", "previous_cell_failed")
        assert second["cause"]["execution_id"] == first["execution_id"]
        assert kernel.value("'ran' in globals()") == "False"
    else:
        assert (second["status"], second["cause"]) == ("ok", None)
        assert kernel.value("ran") == "'ran'"


def test_a_silent_cell_counts_for_nothing_and_shows_no_result(kernel: Kernel) -> None:
    before = kernel.execute("1")["execution_count"]
    silent = kernel.execute("hidden = 5\nhidden", silent=True)
    assert (silent["status"], silent["outputs"]) == ("ok", [])
    after = kernel.execute("hidden")
    assert after["execution_count"] == before + 1
    assert after["outputs"][0]["data"]["text/plain"] == "5"


def test_a_cell_without_history_does_not_count(kernel: Kernel) -> None:
    before = kernel.execute("1")["execution_count"]
    assert kernel.value("6 * 7") == "42"
    unstored = kernel.execute("'unstored'", store_history=False)
    assert unstored["outputs"][0]["data"]["text/plain"] == "'unstored'"
    assert kernel.execute("2")["execution_count"] == before + 2
    assert kernel.value("any('unstored' in cell for cell in In[:-1])") == "False"


def test_an_exception_is_a_result_with_its_traceback(kernel: Kernel) -> None:
    kernel.run("def inner(rows):\n    return rows['missing']\n\ndef outer():\n    return inner({})")
    result = kernel.execute("print('before')\nouter()")
    assert (result["status"], result["cause"]["code"]) == ("error", "exception")
    assert stdout(result) == "before\n"
    error = result["outputs"][-1]
    assert (error["output_type"], error["ename"], error["evalue"]) == ("error", "KeyError", "'missing'")
    text = "\n".join(error["traceback"])
    assert "\x1b[" in text
    assert all(name in text for name in ("outer", "inner", "KeyError"))
    assert kernel.value("1") == "1"


def test_a_syntax_error_is_a_result_too(shared: Kernel) -> None:
    result = shared.execute("for broken in")
    assert (result["status"], result["outputs"][0]["ename"]) == ("error", "SyntaxError")


def test_await_works_at_the_top_of_a_cell(shared: Kernel) -> None:
    code = "import asyncio\nasync def slow(n):\n    await asyncio.sleep(0)\n    return n\nsum(await asyncio.gather(*map(slow, range(5))))"
    assert shared.value(code) == "10"


def test_an_execution_can_be_read_again_after_it_has_ended(shared: Kernel) -> None:
    result = shared.execute("print('once')\n'twice'")
    again = shared.http.get(f"{shared.path}/executions/{result['execution_id']}")
    assert again.json() == result


def test_a_queued_cell_that_is_cancelled_never_runs(kernel: Kernel) -> None:
    with kernel.submitted("input()") as first, kernel.socket() as socket:
        socket.send("execute", code="ran = True", request_id="b")
        queued = socket.until_type("accepted", "b")["execution_id"]
        answer = kernel.http.delete(f"{kernel.path}/executions/{queued}")
        assert answer.status_code == 202
        ended = socket.until_type("ended", "b")
        assert (ended["status"], ended["duration"]) == ("cancelled", 0.0)
        assert answer.json()["status"] == "cancelled"
        first.answer("")
        first.end()
    assert kernel.value("'ran' in globals()") == "False"


def test_a_running_cell_that_is_cancelled_is_interrupted(kernel: Kernel) -> None:
    kernel.run("kept = 'kept'")
    with kernel.submitted("print('in')\nwhile True: pass") as cell:
        cell.wait_for("stream")
        assert kernel.http.delete(f"{kernel.path}/executions/{cell.execution_id}").status_code == 202
        ended = cell.end()
    assert (ended["status"], ended["variables"], ended["cause"]["step"]) == ("cancelled", "kept", "interrupt")
    assert kernel.value("kept") == "'kept'"


def test_cancelling_what_has_ended_changes_nothing(shared: Kernel) -> None:
    result = shared.execute("'done'")
    answer = shared.http.delete(f"{shared.path}/executions/{result['execution_id']}")
    assert (answer.status_code, answer.json()) == (202, result)


def test_an_interrupt_ends_the_cell_and_keeps_the_variables(kernel: Kernel) -> None:
    kernel.run("kept = [1, 2, 3]")
    with kernel.submitted("import time\nprint('in')\ntime.sleep(3600)") as cell:
        cell.wait_for("stream")
        assert kernel.interrupt() == {"execution_id": cell.execution_id}
        ended = cell.end()
        steps = [(event["step"], event["reason"]) for event in cell.events if event["type"] == "interrupt"]
    assert (ended["status"], ended["cause"]["code"], ended["variables"]) == ("error", "interrupted", "kept")
    assert steps == [("interrupt", "client")]
    assert [event["ename"] for event in cell.events if event["type"] == "error"] == ["KeyboardInterrupt"]
    assert kernel.value("kept") == "[1, 2, 3]"
    assert kernel.document()["state"] == "idle"


def test_an_interrupt_reaches_a_child_process(kernel: Kernel) -> None:
    with kernel.submitted("import subprocess\nprint('in')\nsubprocess.run(['sleep', '3600'])") as cell:
        cell.wait_for("stream")
        kernel.interrupt()
        assert cell.end()["cause"]["code"] == "interrupted"
    assert kernel.run("print(subprocess.run(['ps'], capture_output=True) if False else 'on')") == "on\n"


def test_an_interrupt_over_the_websocket_is_answered(kernel: Kernel) -> None:
    with kernel.submitted("print('in')\nwhile True: pass") as cell:
        cell.wait_for("stream")
        cell.socket.send("interrupt", request_id="stop")
        assert cell.end()["cause"]["code"] == "interrupted"
        if not any(event["type"] == "done" for event in cell.socket.seen):
            cell.socket.until_type("done", "stop")
        done = next(event for event in cell.socket.seen if event["type"] == "done")
    assert (done["op"], done["request_id"]) == ("interrupt", "stop")


def test_an_interrupt_without_a_cell_harms_nothing(shared: Kernel) -> None:
    assert shared.interrupt() == {"execution_id": None}
    assert shared.value("2 + 2") == "4"


def test_a_client_that_leaves_does_not_stop_its_cell(kernel: Kernel) -> None:
    with kernel.submitted("input()\nfinished = True") as cell:
        execution = cell.execution_id
    assert kernel.document()["state"] == "busy"
    url = f"{kernel.path}/executions/{execution}"
    eventually(lambda: kernel.http.post(f"{url}/input", json={"value": ""}).status_code == 204, "the question was answered")
    assert eventually(lambda: kernel.http.get(url).json()["status"] == "ok", "the cell ended")
    assert kernel.value("finished") == "True"


def test_kernels_do_not_see_each_other(new_kernel: Callable[..., Kernel]) -> None:
    first, second = new_kernel(label="first"), new_kernel(label="second")
    first.run("""
import socket
secret = 'of the first'
for directory in ('/work', '/tmp', '/dev/shm'): open(directory + '/file', 'w').write(secret)
listening = socket.create_server(('127.0.0.1', 4567))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind('\\0abstract')
abstract.listen()
""")
    code = """
import os, socket
print('secret' in globals(), [os.path.exists(d + '/file') for d in ('/work', '/tmp', '/dev/shm')])
for family, address in ((socket.AF_INET, ('127.0.0.1', 4567)), (socket.AF_UNIX, '\\0abstract')):
    try:
        socket.socket(family).connect(address)
        print('connected')
    except ConnectionRefusedError:
        print('refused')
"""
    assert second.run(code) == "False [False, False, False]\nrefused\nrefused\n"
    assert first.run(code) == "True [True, True, True]\nconnected\nconnected\n"


def test_kernels_run_at_the_same_time(new_kernel: Callable[..., Kernel]) -> None:
    first, second = new_kernel(), new_kernel()
    with first.submitted("print(input())") as waiting:
        # The second kernel answers while the first one's cell is under way, and its answer is what ends that.
        waiting.answer(second.value("'from the second'"))
        waiting.end()
        assert printed(waiting.events) == "'from the second'\n"


def test_a_kernel_tells_what_it_is(gateway: Gateway, new_kernel: Callable[..., Kernel]) -> None:
    kernel = new_kernel(label="sales: ä ✓", limits={"memory": "512m", "cpus": 0.5, "pids": 64}, env={"STAGE": "demo"})
    document = kernel.document()
    assert (document["label"], document["spec"], document["state"], document["cause"]) == (
        "sales: ä ✓",
        "python3",
        "idle",
        None,
    )
    assert document["limits"] == {"memory": 512 * 1024**2, "cpus": 0.5, "pids": 64}
    assert kernel.run("import os\nprint(os.environ['STAGE'], os.getcwd())") == f"demo {document['work_dir']}\n"
    listed = gateway.http.get("/v1/kernels").json()["kernels"]
    assert kernel.id in [entry["id"] for entry in listed]
    kernel.delete()
    assert problem(gateway.http.get(kernel.path), 410, "kernel_gone")["cause"]["code"] == "kernel_deleted"
    assert kernel.id not in [entry["id"] for entry in gateway.http.get("/v1/kernels").json()["kernels"]]


def test_work_counts_as_activity_and_looking_does_not(shared: Kernel) -> None:
    before = shared.document()["last_activity"]
    assert shared.document()["last_activity"] == before
    shared.run("pass")
    assert shared.document()["last_activity"] > before
