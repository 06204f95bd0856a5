"""Every output arrives: whole, once, in order, in the form that Jupyter's clients know, however much there is of it.

The large ones are the cases in which ZMQ's defaults and ipykernel's own streams lose output without a word.
"""

import base64
import itertools
import json
import struct
import time

from tests.support import Event, Kernel, printed, stdout, streamed


def bundle_of(kernel: Kernel, code: str) -> dict[str, str]:
    result = kernel.execute(code)
    assert result["status"] == "ok", result
    data: dict[str, str] = result["outputs"][-1]["data"]
    return data


def test_a_matplotlib_plot_is_a_png(shared: Kernel) -> None:
    result = shared.execute("import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.title('squares')\nplt.show()")
    assert [output["output_type"] for output in result["outputs"]] == ["display_data"]
    image = base64.b64decode(result["outputs"][0]["data"]["image/png"])
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert width > 200
    assert height > 200
    assert result["outputs"][0]["data"]["text/plain"].startswith("<Figure size")


def test_a_dataframe_is_html_and_text(shared: Kernel) -> None:
    data = bundle_of(shared, "import pandas as pd\npd.DataFrame({'region': ['north', 'süd'], 'sum': [1.5, 2.5]})")
    assert set(data) == {"text/html", "text/plain"}
    assert "<table" in data["text/html"]
    assert "<td>süd</td>" in data["text/html"]
    assert data["text/plain"].split() == ["region", "sum", "0", "north", "1.5", "1", "süd", "2.5"]


def test_a_formula_is_latex(shared: Kernel) -> None:
    data = bundle_of(shared, "import sympy\nx = sympy.Symbol('x')\nsympy.Integral(sympy.exp(-x**2), x)")
    assert data["text/latex"] == r"$\displaystyle \int e^{- x^{2}}\, dx$"
    assert (
        r"\frac{a}{b}" in bundle_of(shared, r"from IPython.display import Math" + "\n" + r"Math(r'\frac{a}{b}')")["text/latex"]
    )


def test_metadata_and_any_mime_type_pass_unchanged(shared: Kernel) -> None:
    code = "from IPython.display import display\ndisplay({'application/vnd.x+json': {'deep': [1, {'ä': None}]}}, metadata={'width': 3}, raw=True)"
    output = shared.execute(code)["outputs"][0]
    assert output["data"] == {"application/vnd.x+json": {"deep": [1, {"ä": None}]}}
    assert output["metadata"] == {"width": 3}


def test_five_megabytes_of_text_arrive_whole(shared: Kernel) -> None:
    result = shared.execute("print('0123456789' * 500_000, end='')")
    assert result["truncated"] is None
    assert stdout(result) == "0123456789" * 500_000


def test_twenty_thousand_flushed_prints_reach_a_client_that_stalls(shared: Kernel) -> None:
    code = "for line in range(20_000): print(f'line {line}', flush=True)"
    with shared.socket() as socket:
        socket.send("execute", code=code, request_id="flood")
        socket.until_type("started", "flood")
        time.sleep(3)  # the client does not read: not a wait for anything
        ended = socket.until_type("ended", "flood")
        events = [event for event in socket.seen if event.get("request_id") == "flood" and "seq" in event]
    assert ended["status"] == "ok"
    assert printed(events) == "".join(f"line {line}\n" for line in range(20_000))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))


def test_a_stalled_reader_slows_nobody_else(shared: Kernel) -> None:
    with shared.socket(max_queue=1) as stalled, shared.socket() as other:
        stalled.send("execute", code="for line in range(20_000): print('x' * 200, flush=True)", request_id="flood")
        execution = stalled.until_type("accepted", "flood")["execution_id"]
        # From here on `stalled` reads nothing, and yet the cell ends and the next one runs.
        assert other.execute("print('hello')")[-1]["status"] == "ok"
        assert shared.http.get(f"{shared.path}/executions/{execution}").json()["status"] == "ok"
        stalled.until_type("ended", "flood")
        assert printed(stalled.seen).count("x") == 20_000 * 200


def test_ten_thousand_displays_arrive_in_order(shared: Kernel) -> None:
    code = "from IPython.display import display\nfor n in range(10_000): display({'text/plain': str(n)}, raw=True)"
    events = shared.events(code)
    shown = [event["data"]["text/plain"] for event in events if event["type"] == "display"]
    assert shown == [str(number) for number in range(10_000)]


def test_stdout_and_stderr_keep_their_names_and_their_order(shared: Kernel) -> None:
    code = "import sys\nfor n in range(3):\n    print('out', n, flush=True)\n    print('err', n, file=sys.stderr, flush=True)"
    outputs = shared.execute(code)["outputs"]
    assert [(output["name"], output["text"]) for output in outputs] == list(
        itertools.chain.from_iterable((("stdout", f"out {n}\n"), ("stderr", f"err {n}\n")) for n in range(3))
    )


def test_a_progress_bar_keeps_its_carriage_returns(shared: Kernel) -> None:
    code = "for percent in range(0, 101, 25): print(f'\\r{percent:3} %', end='', flush=True)\nprint()"
    assert stdout(shared.execute(code)) == "\r  0 %\r 25 %\r 50 %\r 75 %\r100 %\n"


def test_the_output_of_a_child_process_arrives(shared: Kernel) -> None:
    code = (
        "import subprocess\nprint('before')\nsubprocess.run(['sh', '-c', 'echo out; echo err >&2'], check=True)\nprint('after')"
    )
    outputs = shared.execute(code)["outputs"]
    assert streamed(outputs, "stdout") == "before\nout\nafter\n"
    assert streamed(outputs, "stderr") == "err\n"


def test_a_large_output_of_a_child_process_arrives_whole(shared: Kernel) -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', \"for n in range(100_000): print(n)\"], check=True);"
    assert stdout(shared.execute(code)) == "".join(f"{n}\n" for n in range(100_000))


def test_clear_output_acts_at_the_next_output(shared: Kernel) -> None:
    code = "from IPython.display import clear_output\nfor n in range(3):\n    clear_output(wait=True)\n    print('step', n)"
    # Steps that come in one burst are told as the last of them.
    assert {event["wait"] for event in shared.events(code) if event["type"] == "clear_output"} == {True}
    assert [output["text"] for output in shared.execute(code)["outputs"]] == ["step 2\n"]
    # A clear with nothing behind it clears nothing.
    assert (
        stdout(shared.execute("from IPython.display import clear_output\nprint('stays')\nclear_output(wait=True)")) == "stays\n"
    )
    assert shared.execute("from IPython.display import clear_output\nprint('goes')\nclear_output()")["outputs"] == []


def test_update_display_changes_what_was_shown(shared: Kernel) -> None:
    code = "from IPython.display import display\nhandle = display('first', display_id='spot')\ndisplay('other')\nhandle.update('second');"
    events = shared.events(code)
    shown = [(event["type"], event["display_id"], event["data"]["text/plain"]) for event in events if "display_id" in event]
    assert shown == [("display", "spot", "'first'"), ("display", None, "'other'"), ("update_display", "spot", "'second'")]
    texts = [output["data"]["text/plain"] for output in shared.execute(code)["outputs"]]
    assert texts == ["'second'", "'other'"]


def test_a_later_cell_may_update_an_earlier_display(shared: Kernel) -> None:
    shared.run("from IPython.display import display, update_display\ndisplay('first', display_id='across')")
    events = shared.events("update_display('second', display_id='across')")
    assert [event["display_id"] for event in events if event["type"] == "update_display"] == ["across"]


BACKGROUND = """
import os, threading, time
def wait():
    while not os.path.exists('/work/go'): time.sleep(0.01)
    print('late words')
threading.Thread(target=wait).start()
print('the cell is over')
"""


def check_background(event: Event, execution_id: str) -> None:
    assert (event["type"], event["name"], event["text"].strip()) == ("stream", "stdout", "late words")
    assert (event["execution_id"], event["from_execution"]) == (None, execution_id)


def test_late_output_of_a_thread_comes_as_the_kernels_own_event(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        ended = socket.execute(BACKGROUND)[-1]
        assert ended["status"] == "ok"
        assert kernel.http.put(kernel.file("go"), content=b"").status_code == 201
        check_background(socket.until(lambda event: event["type"] == "stream"), ended["execution_id"])
    # Who comes later finds it in the kernel's own log, by JSON Lines
    with kernel.http.stream("GET", f"{kernel.path}/events", headers={"Accept": "application/x-ndjson"}) as answer:
        event = next(e for e in map(json.loads, answer.iter_lines()) if e["type"] == "stream")
        check_background(event, ended["execution_id"])
    # and by SSE, and may say how far it has read.
    headers = {"Accept": "text/event-stream"}
    with kernel.http.stream("GET", f"{kernel.path}/events?after={event['seq'] - 1}", headers=headers) as answer:
        data = next(line for line in answer.iter_lines() if line.startswith("data: "))
        assert json.loads(data.removeprefix("data: ")) == event
    # The cell's own result stays what it was when it ended.
    assert stdout(kernel.http.get(f"{kernel.path}/executions/{ended['execution_id']}").json()) == "the cell is over\n"


def test_the_kernels_own_events_tell_its_life(kernel: Kernel) -> None:
    kernel.restart()
    kernel.execute("import os\nos._exit(3)")
    kernel.restart()
    with kernel.http.stream("GET", f"{kernel.path}/events", headers={"Accept": "application/x-ndjson"}) as answer:
        kernel.delete()
        events = [json.loads(line) for line in answer.iter_lines()]
    states = [event["state"] for event in events if event["type"] == "state"]
    assert states == ["starting", "idle", "restarting", "idle", "dead", "restarting", "idle", "stopping", "dead"]
    assert events[states.index("dead")]["cause"]["code"] == "exit"
    assert events[-1]["cause"]["code"] == "kernel_deleted"


def test_text_that_is_hard_to_encode_arrives(shared: Kernel) -> None:
    code = r"print('ä ✓ 🎉 \u2028 \x00 \x1b[1m bold', end='')"
    assert stdout(shared.execute(code)) == "ä ✓ 🎉 \u2028 \x00 \x1b[1m bold"
    # A lone surrogate is no Unicode text; it is replaced, and the answer stays one.
    assert stdout(shared.execute(r"print('lone \ud800 half', end='')")) in ("lone � half", "lone ? half", "lone \\ud800 half")
    # So it is with a number that JSON does not have; ipykernel warns of it on stderr.
    outputs = shared.execute("display({'application/json': {'nan': float('nan')}}, raw=True)")["outputs"]
    assert outputs[0]["data"]["application/json"]["nan"] in (None, "nan")


def test_output_past_the_limit_is_counted_not_kept(kernel: Kernel) -> None:
    # 300 MB, where the default keeps 256 MiB of one execution.
    code = "block = 'x' * 999_999 + '\\n'\nfor n in range(300): print(block, end='')\nprint('the end')"
    answer = kernel.execute(code)
    kept, truncated = len(stdout(answer)), answer["truncated"]
    assert answer["status"] == "ok"
    assert truncated["limit"] == 256 * 1024**2
    assert kept < truncated["limit"]
    assert kept + truncated["bytes"] >= 300_000_000
    assert kernel.value("1 + 1") == "2"


def test_an_output_larger_than_a_frame_is_told_not_sent(kernel: Kernel) -> None:
    code = "from IPython.display import display\ndisplay({'text/plain': 'x' * 140_000_000}, raw=True)\nprint('after')"
    result = kernel.execute(code)
    assert (result["status"], stdout(result)) == ("ok", "after\n")
    assert result["truncated"]["events"] == 1
    assert result["truncated"]["bytes"] > 140_000_000


def test_a_thread_that_speaks_during_a_later_cell_is_heard_once(kernel: Kernel) -> None:
    # ipykernel counts such words among the later cell's; what matters is that they come, and once.
    with kernel.socket() as watching:
        kernel.run(BACKGROUND)
        with kernel.submitted("input()") as cell:
            kernel.http.put(kernel.file("go"), content=b"")
            cell.wait_for("stream")
            cell.answer("")
            cell.end()
            assert printed(cell.events) == "late words\n"
        watching.execute("'the end'")
        assert [event for event in watching.seen if event["type"] == "stream"] == []
