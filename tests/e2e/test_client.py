"""Both Python clients against a real gateway: what only real kernels can show."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from gateway.client import ApiError, AsyncClient, Client, Kernel
from tests.support import Gateway


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.url, gateway.token) as client:
        yield client


@pytest.fixture(scope="module")
def own(client: Client) -> Iterator[Kernel]:
    with client.kernels.create(limits={"memory": "512m"}, env={"STAGE": "demo"}, label="client") as kernel:
        yield kernel


def test_a_kernel_is_made_as_asked(client: Client, own: Kernel) -> None:
    assert own.id in {kernel.id for kernel in client.kernels.list()}
    info = client.kernels.get(own.id).info()
    assert (info["limits"]["memory"], info["label"], info["state"]) == (512 * 2**20, "client", "idle")
    assert own.execute("import os; print(os.environ['STAGE'])").text == "demo\n"
    assert client.kernelspecs()["default"] in {spec["name"] for spec in client.kernelspecs()["kernelspecs"]}


def test_state_lasts_from_cell_to_cell_and_errors_are_results(own: Kernel) -> None:
    assert own.execute("x = 40").ok
    assert own.execute("x + 2").text == "42\n"
    failed = own.execute("x / 0")
    assert failed.error is not None
    assert failed.error.ename == "ZeroDivisionError"
    assert own.result(failed.execution_id).outputs == failed.outputs


def test_an_image_comes_as_bytes(own: Kernel) -> None:
    code = "from PIL import Image; from IPython.display import display; display(Image.new('RGB', (3, 2)))"
    found = own.execute(code).images
    assert [data[:8] for image in found for mime, data in image.items() if mime == "image/png"] == [b"\x89PNG\r\n\x1a\n"]


def test_questions_are_answered_while_streaming(own: Kernel) -> None:
    types = []
    for event in own.stream("name = input('name? '); print('hello', name)", allow_stdin=True):
        types.append(event.type)
        if event.type == "input_request":
            assert event.execution_id is not None
            own.answer(event.execution_id, "Ada")
    assert types == ["queued", "started", "input_request", "stream", "ended"]


def test_leaving_a_stream_leaves_the_cell_running(own: Kernel) -> None:
    stream = own.stream("import time\nfor i in range(3): print(i, flush=True); time.sleep(0.2)\ndone = True")
    left = next(event for event in stream if event.type == "stream")
    stream.close()  # type: ignore[attr-defined]
    assert left.execution_id is not None
    assert own.execute("done").text == "True\n"
    assert own.result(left.execution_id).text == "0\n1\n2\n"


def test_files_go_in_and_out_whole(own: Kernel, tmp_path: Path) -> None:
    data = os.urandom(20 * 2**20 + 1)
    assert own.files.write("deep/a b #1?%.bin", io.BytesIO(data)) == len(data)
    assert own.files.download("deep/a b #1?%.bin", tmp_path).read_bytes() == data
    assert [entry["name"] for entry in own.files.list("deep")] == ["a b #1?%.bin"]
    assert own.files.read("deep/a b #1?%.bin") == data
    with pytest.raises(ApiError, match="not_a_file"):
        own.files.read("deep")
    with pytest.raises(ApiError, match="invalid_path"):
        own.files.write("../out", b"")
    own.files.delete("deep")
    assert own.files.list() == []


def test_a_dead_kernel_says_so_and_comes_back(own: Kernel) -> None:
    own.files.write("kept.txt", "still here")
    died = own.execute("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (died.status, died.variables) == ("died", "lost")
    assert died.cause is not None
    assert own.info()["state"] == "dead"
    own.restart()
    assert own.document["state"] == "idle"
    assert own.execute("print(open('kept.txt').read())").text == "still here\n"
    own.files.delete("kept.txt")


def test_many_tasks_share_one_asynchronous_client(gateway: Gateway) -> None:
    async def all_at_once() -> dict[int, str]:
        found: dict[int, str] = {}
        async with AsyncClient(gateway.url, gateway.token) as client, await client.kernels.create() as kernel:

            async def one(number: int) -> None:
                events = [event async for event in kernel.stream(f"print({number} ** 2)")]
                found[number] = "".join(event.members["text"] for event in events if event.type == "stream")

            async with anyio.create_task_group() as tasks:
                for number in range(40):
                    tasks.start_soon(one, number)
            assert await kernel.interrupt() is None
        return found

    assert anyio.run(all_at_once) == {number: f"{number**2}\n" for number in range(40)}


def test_a_cell_is_submitted_and_read_later_from_anywhere(own: Kernel) -> None:
    execution_id = own.submit("import time\nfor i in range(3): print(i, flush=True); time.sleep(0.1)\n'end'")
    result = own.wait(execution_id)
    assert (result.status, result.text, result.gap) == ("ok", "0\n1\n2\n'end'\n", None)
    events = list(own.events(execution_id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert (events[-1].type, events[-1].seq) == ("ended", result.last_seq)
    assert list(own.events(execution_id, after=2)) == events[2:]
    newest, *_ = own.executions(limit=2)
    assert (newest["execution_id"], newest["status"]) == (execution_id, "ok")
    assert own.executions(before=newest["number"])[0]["execution_id"] != execution_id
    with pytest.raises(ApiError, match="execution_not_found"):
        next(iter(own.events("nowhere")))


def test_the_same_key_is_the_same_execution(own: Kernel) -> None:
    own.execute("times = 0")
    first = own.execute("times += 1; times", idempotency_key="once")
    assert own.execute("times += 1; times", idempotency_key="once") == first
    events = list(own.stream("times += 1; times", idempotency_key="once"))
    assert (events[0].seq, events[-1].type) == (1, "ended")
    assert own.execute("times").text == "1\n"
    with pytest.raises(ApiError, match="idempotency_conflict"):
        own.execute("other", idempotency_key="once")


def test_the_same_key_is_the_same_kernel(client: Client) -> None:
    with client.kernels.create(label="one", idempotency_key="kernel") as kernel:
        assert client.kernels.create(label="one", idempotency_key="kernel").id == kernel.id


def test_a_value_of_an_event_is_read_as_bytes(own: Kernel) -> None:
    code = "from PIL import Image; from IPython.display import display; display(Image.new('RGB', (3, 2)))"
    shown = next(event for event in own.stream(code) if event.type == "display")
    assert shown.execution_id is not None
    assert own.data(shown.execution_id, shown.seq, "image/png")[:8] == b"\x89PNG\r\n\x1a\n"
