"""The client: what it sends, how it reads answers, and what it makes of a gateway that misbehaves."""

import base64
import inspect
import io
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from gateway.client import (
    ApiError,
    AsyncClient,
    AsyncFiles,
    AsyncKernel,
    Client,
    ConnectionLost,
    Files,
    GatewayUnreachable,
    Kernel,
    NotAGateway,
    connection,
)
from gateway.client.answers import EventLines, to_result
from gateway.protocol.events import Event
from tests.unit.scripted import CUT, OK, TOKEN, UNTIL_INTERRUPT, ScriptedGateway, ended, printed, raised

PNG = b"\x89PNG\r\n\x1a\n pixels"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, TOKEN) as client:
        yield client


@pytest.fixture
def kernel(client: Client) -> Kernel:
    return client.kernels.create()


def test_executes_a_cell_and_returns_its_result(scripted: ScriptedGateway, kernel: Kernel) -> None:
    shown = {"data": {"text/plain": "42"}, "metadata": {}, "execution_count": 1}
    scripted.cells["6 * 7"] = [printed("six "), printed("oops", "stderr"), ("result", shown), *OK]
    result = kernel.execute("6 * 7", timeout=3, silent=False)
    assert (result.status, result.execution_count, result.kernel_state, result.variables) == ("ok", 1, "idle", "kept")
    assert result.text == "six 42\n"
    assert result.error is None
    assert scripted.executed == [{"code": "6 * 7", "timeout": 3, "silent": False}]


def test_an_exception_in_a_cell_is_a_result(scripted: ScriptedGateway, kernel: Kernel) -> None:
    scripted.cells["1/0"] = raised("ZeroDivisionError", "division by zero")
    result = kernel.execute("1/0")
    assert not result.ok
    assert result.error is not None
    assert (result.error.ename, result.error.evalue) == ("ZeroDivisionError", "division by zero")
    assert "ZeroDivisionError" in result.error.traceback[-1]


def test_images_are_decoded_and_what_is_no_image_is_left_out() -> None:
    bundles: list[Any] = [
        {"image/png": base64.encodebytes(PNG).decode(), "image/svg+xml": "<svg/>", "text/plain": "<Figure>"},
        {"image/png": "no base64!"},
        {"image/png": 7},
        "no bundle",
    ]
    outputs = [{"output_type": "display_data", "data": data, "metadata": {}} for data in bundles]
    result = to_result({"status": "ok", "outputs": outputs})
    assert result.images == [{"image/png": PNG, "image/svg+xml": b"<svg/>"}]
    assert result.text == "<Figure>\n"


def test_streams_events_as_they_come(scripted: ScriptedGateway, kernel: Kernel) -> None:
    scripted.cells["ask()"] = [
        ("input_request", {"prompt": "name? ", "password": False}),
        UNTIL_INTERRUPT,
        printed("hi\n"),
        *OK,
    ]
    types = []
    for event in kernel.stream("ask()", allow_stdin=True):
        types.append(event.type)
        if event.type == "input_request":  # only a stream that comes piece by piece gets here before the answer
            assert event.execution_id is not None
            kernel.answer(event.execution_id, "Ada")
    assert types == ["queued", "started", "input_request", "stream", "ended"]
    assert scripted.answers == ["Ada"]


def test_cells_in_a_row_use_one_connection(scripted: ScriptedGateway, kernel: Kernel) -> None:
    for _ in range(3):
        list(kernel.stream("pass"))
        kernel.execute("pass")
    assert len(scripted.ports) == 7
    assert len(set(scripted.ports)) == 1


def test_a_slow_cell_is_waited_for_and_a_hanging_gateway_is_not(
    scripted: ScriptedGateway, client: Client, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "QUICK", httpx2.Timeout(5, read=0.05))
    scripted.delay = 0.2
    assert kernel.execute("slow()").ok
    assert [event.type for event in kernel.stream("slow()")][-1] == "ended"
    with pytest.raises(ConnectionLost, match="timed out"):
        kernel.info()


def test_a_problem_becomes_an_error_with_all_its_members(client: Client) -> None:
    with pytest.raises(ApiError, match=r"did not start.*\[start_failed\]") as caught:
        client.kernels.create(spec="broken")
    error = caught.value
    assert (error.code, error.status, error.retryable) == ("start_failed", 502, True)
    assert error.members == {"log": ["line one", "line two"]}


def test_a_refused_stream_raises_before_its_first_event(client: Client, kernel: Kernel) -> None:
    kernel.delete()
    with pytest.raises(ApiError) as caught:
        next(kernel.stream("1"))
    assert caught.value.code == "kernel_not_found"
    assert caught.value.members["kernel_id"] == kernel.id


def test_a_wrong_token_is_told_as_such(url: str) -> None:
    with Client(url, "wrong") as client, pytest.raises(ApiError) as caught:
        client.kernels.list()
    assert (caught.value.code, caught.value.status) == ("unauthorized", 401)


def test_an_answer_that_is_no_problem_document_still_says_what_it_is() -> None:
    page = httpx2.MockTransport(lambda request: httpx2.Response(502, html="<h1>Bad Gateway</h1>"))
    with Client("http://gateway", transport=page) as client, pytest.raises(ApiError, match="<h1>Bad Gateway") as caught:
        client.kernels.list()
    assert caught.value.code == "http_502"


@pytest.mark.parametrize("body", ["<html>", "[]", "{}"])
def test_a_server_that_is_no_gateway_is_told_from_one(body: str) -> None:
    other = httpx2.MockTransport(lambda request: httpx2.Response(200, text=body))
    with Client("http://elsewhere", transport=other) as client, pytest.raises(NotAGateway, match="http://elsewhere"):
        client.kernels.list()


def test_a_stream_that_is_no_json_is_told_as_such() -> None:
    other = httpx2.MockTransport(lambda request: httpx2.Response(200, text="hello\n"))
    with Client("http://elsewhere", transport=other) as client, pytest.raises(NotAGateway):
        list(Kernel(client, {"id": "k"}).stream("1"))


def test_no_gateway_there_says_where_and_what_to_do() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else gets this port
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url) as client, pytest.raises(GatewayUnreachable, match=f"{url}.*cellgate serve"):
            client.kernels.list()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://[::1"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(GatewayUnreachable, match="URL"):
        Client(url)


@pytest.mark.parametrize(
    ("given", "meant"), [(None, "http://127.0.0.1:8890"), ("host:1", "http://host:1"), ("https://host/a/", "https://host/a")]
)
def test_addresses_are_completed(given: str | None, meant: str) -> None:
    with Client(given) as client:
        assert client.url == meant


def test_a_stream_that_breaks_off_for_good_names_the_execution(scripted: ScriptedGateway, kernel: Kernel) -> None:
    scripted.cells["long()"] = [printed("some"), CUT]
    seen: list[Event] = []
    with pytest.raises(ConnectionLost, match=r"can't tell of execution 'e1'") as caught:
        seen.extend(kernel.stream("long()"))
    assert caught.value.execution_id == "e1"


def test_a_kernel_block_deletes_its_kernel_and_keeps_the_error(scripted: ScriptedGateway, client: Client) -> None:
    def fail_inside() -> None:
        with client.kernels.create() as kernel:
            assert list(scripted.kernels) == [kernel.id]
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_inside()
    assert not scripted.kernels


def test_a_kernel_that_was_culled_meanwhile_is_no_error(scripted: ScriptedGateway, client: Client) -> None:
    with client.kernels.create():
        scripted.kernels.clear()


def test_a_failed_clean_up_does_not_hide_the_error_inside(client: Client) -> None:
    def fail_inside() -> None:
        with Client("http://127.0.0.1:1") as nobody, client.kernels.create() as kernel:
            kernel._client = nobody
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_inside()


def test_create_sends_what_is_given_and_nothing_else(scripted: ScriptedGateway, client: Client) -> None:
    client.kernels.create()
    client.kernels.create("python3", {"memory": "1g"}, {"STAGE": "demo"}, "report", lifetime=60)
    assert scripted.created == [
        {},
        {"spec": "python3", "limits": {"memory": "1g"}, "env": {"STAGE": "demo"}, "label": "report", "lifetime": 60},
    ]
    assert [found.document["label"] for found in client.kernels.list()] == [None, "report"]


@pytest.mark.parametrize("name", ["plain.csv", "a b/50%#1?.csv", "día/ü&=+.txt", "a/b/c"])
def test_files_keep_their_names(scripted: ScriptedGateway, kernel: Kernel, name: str) -> None:
    kernel.files.write(name, b"\x00data")
    assert scripted.files == {name: b"\x00data"}
    assert kernel.files.read(name) == b"\x00data"
    assert kernel.files.list()[0]["path"] == name
    kernel.files.delete(name)
    assert scripted.files == {}


def test_files_are_written_from_all_kinds_of_data(scripted: ScriptedGateway, kernel: Kernel, tmp_path: Path) -> None:
    local = tmp_path / "local.bin"
    local.write_bytes(b"from disk" * 50_000)
    assert kernel.files.write("path", local) == 450_000
    kernel.files.write("text", "é")
    kernel.files.write("open", io.BytesIO(b"open"))
    kernel.files.write("empty", b"")
    assert scripted.files == {"path": b"from disk" * 50_000, "text": "é".encode(), "open": b"open", "empty": b""}


def test_upload_and_download(scripted: ScriptedGateway, kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.csv").write_text("a")
    (tmp_path / "in" / "sub" / "b.csv").write_text("b")
    assert kernel.files.upload(tmp_path / "in") == ["in/a.csv", "in/sub/b.csv"]
    assert kernel.files.upload(tmp_path / "in" / "a.csv", "other.csv") == ["other.csv"]
    assert scripted.files == {"in/a.csv": b"a", "in/sub/b.csv": b"b", "other.csv": b"a"}
    assert kernel.files.download("in/sub/b.csv", tmp_path) == tmp_path / "b.csv"
    assert (tmp_path / "b.csv").read_text() == "b"


def test_a_failed_download_leaves_no_file(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "kept.csv").write_text("old")
    with pytest.raises(ApiError, match="file_not_found"):
        kernel.files.download("missing.csv", tmp_path / "kept.csv")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept.csv", "old")]


def test_a_directory_is_not_taken_for_a_file(kernel: Kernel, tmp_path: Path) -> None:
    for attempt in (kernel.files.read, lambda path: kernel.files.download(path, tmp_path / "local")):
        with pytest.raises(ApiError, match="a/dir is a directory") as caught:
            attempt("a/dir")
        assert caught.value.code == "not_a_file"
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_leads_out_is_left_to_the_gateway_to_refuse(scripted: ScriptedGateway, kernel: Kernel) -> None:
    for path in ("../x", "a/../../x", "./x"):
        kernel.files.write(path, b"")
    assert list(scripted.files) == ["../x", "a/../../x", "./x"]


def test_event_lines_are_cut_at_newlines_only_wherever_the_pieces_end() -> None:
    text = "a\u2028b\x85c\u2029d"
    line = b'{"seq":1,"type":"stream","time":"","execution_id":"e","name":"stdout","text":"%s"}\n' % text.encode()
    whole = line + b"\n" + line.replace(b'"stream"', b'"ended"')
    for cut in range(len(whole)):
        lines = EventLines()
        events = lines.feed(whole[:cut]) + lines.feed(whole[cut:])
        assert [(event.type, event.members["text"]) for event in events] == [("stream", text), ("ended", text)]


def test_code_that_utf8_cannot_carry_is_sent_all_the_same(scripted: ScriptedGateway, kernel: Kernel) -> None:
    kernel.execute("print('\udc80')")
    assert scripted.executed[0]["code"] == "print('\udc80')"


@pytest.mark.parametrize(
    ("blocking", "asynchronous"), [(Client, AsyncClient), (Kernel, AsyncKernel), (Files, AsyncFiles)], ids=lambda c: c.__name__
)
def test_both_clients_offer_the_same(blocking: type, asynchronous: type) -> None:
    def methods(cls: type) -> dict[str, list[str]]:
        public = {name: method for name, method in inspect.getmembers(cls, callable) if not name.startswith("_")}
        return {name: list(inspect.signature(method).parameters) for name, method in public.items()}

    assert methods(blocking) == methods(asynchronous)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def async_kernel(scripted: ScriptedGateway) -> AsyncIterator[AsyncKernel]:
    wire = httpx2.ASGITransport(app=scripted.app)
    async with AsyncClient("http://gateway", TOKEN, transport=wire) as client, await client.kernels.create() as kernel:
        yield kernel


@pytest.mark.anyio
async def test_the_asynchronous_client_runs_cells(scripted: ScriptedGateway, async_kernel: AsyncKernel) -> None:
    scripted.cells["print(1)"] = [printed("1\n"), *OK]
    assert (await async_kernel.execute("print(1)")).text == "1\n"
    events = [event async for event in async_kernel.stream("print(1)")]
    assert [event.type for event in events] == ["queued", "started", "stream", "ended"]
    assert (await async_kernel.info())["id"] == async_kernel.id
    assert await async_kernel.interrupt() == "e1"
    await async_kernel.restart()


@pytest.mark.anyio
async def test_the_asynchronous_client_moves_files(
    scripted: ScriptedGateway, async_kernel: AsyncKernel, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"x" * 100_000)
    files = async_kernel.files
    assert await files.upload(local) == ["local"]
    await files.write("text", "é")
    await files.write("open", io.BytesIO(b"open"))
    assert scripted.files == {"local": b"x" * 100_000, "text": "é".encode(), "open": b"open"}
    assert await files.read("open") == b"open"
    await files.download("text", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == "é".encode()
    await files.delete("open")
    assert [entry["path"] for entry in await files.list()] == ["local", "text"]
    with pytest.raises(ApiError, match="file_not_found"):
        await files.read("open")


@pytest.mark.anyio
async def test_a_cancelled_task_deletes_its_kernel(scripted: ScriptedGateway) -> None:
    wire = httpx2.ASGITransport(app=scripted.app)
    async with AsyncClient("http://gateway", TOKEN, transport=wire) as client:
        with anyio.move_on_after(0.1) as scope:
            async with await client.kernels.create():
                assert scripted.kernels
                await anyio.sleep(30)
    assert scope.cancelled_caught
    assert not scripted.kernels


@pytest.mark.anyio
async def test_the_asynchronous_stream_tells_of_a_break(scripted: ScriptedGateway, async_kernel: AsyncKernel) -> None:
    scripted.cells["long()"] = [printed("some"), CUT]
    seen: list[str] = []

    async def follow() -> None:
        async for event in async_kernel.stream("long()"):
            seen.extend([event.type])  # as they come: a comprehension would keep nothing of a broken stream

    with pytest.raises(ConnectionLost):
        await follow()
    assert seen == ["queued", "started", "stream"]


def test_a_dead_kernel_is_told_in_the_result(scripted: ScriptedGateway, kernel: Kernel) -> None:
    scripted.cells["die()"] = ended("died", code="out_of_memory", message="It used more than 1 GiB.")
    assert kernel.execute("die()").cause == {"code": "out_of_memory", "message": "It used more than 1 GiB."}
