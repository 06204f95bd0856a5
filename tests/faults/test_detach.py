"""F20, F13: a gateway that is told to stop, and connections that end without a word. The cells go on, and nobody loses anything."""

import contextlib
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed

from tests.faults.test_gateway_death import Mortal, read_on, state, submit, until, whole
from tests.support import Event, Gateway, Kernel, eventually, printed, problem, sse_events, stdout

pytestmark = pytest.mark.timeout(300)

_COUNTS = "import time\nfor number in range({most}): print(number, flush=True); time.sleep(0.05)\ntreasure = 42"


def counted(most: int) -> str:
    return "".join(f"{number}\n" for number in range(most))


def term(mortal: Mortal) -> None:
    os.kill(mortal.pid, signal.SIGTERM)


def post(kernel: Kernel, code: str) -> httpx2.Response:
    """On a connection of its own."""
    with httpx2.Client(base_url=kernel.gateway.url, headers=kernel.gateway.headers, timeout=240) as client:
        return client.post(f"{kernel.path}/execute", json={"code": code})


def streamed(kernel: Kernel, execution_id: str, accept: str) -> list[Event]:
    """The events of a stream to the end of the answer, which must be a whole one."""
    path = f"{kernel.path}/executions/{execution_id}/events"
    with httpx2.Client(base_url=kernel.gateway.url, headers=kernel.gateway.headers, timeout=240) as client:
        text = client.get(path, headers={"Accept": accept}).text
    return sse_events(text) if accept == "text/event-stream" else [json.loads(line) for line in text.splitlines()]


def closed(kernel: Kernel, opened: threading.Event) -> int:
    """The code with which the gateway closes a WebSocket."""

    def read_on() -> None:
        while True:
            conversation.connection.recv(timeout=240)

    with kernel.socket() as conversation:
        opened.set()
        with pytest.raises(ConnectionClosed) as caught:
            read_on()
    assert caught.value.rcvd is not None
    return int(caught.value.rcvd.code)


def test_kernels_and_cells_outlive_a_gateway_that_is_told_to_stop() -> None:
    with Mortal(server={"drain_timeout": 1.0}) as mortal, ThreadPoolExecutor(8) as pool:
        kernel, idle = mortal.kernel(), mortal.kernel()
        idle.run("treasure = 43")
        opened = threading.Event()
        waiter = pool.submit(post, kernel, _COUNTS.format(most=150))
        state(kernel, "busy")
        running: str = kernel.http.get(f"{kernel.path}/executions").json()["executions"][0]["execution_id"]
        waiting = submit(kernel, "print('behind', treasure)")
        lines = pool.submit(streamed, kernel, running, "application/x-ndjson")
        sse = pool.submit(streamed, kernel, running, "text/event-stream")
        web = pool.submit(closed, kernel, opened)
        assert opened.wait(60)
        until(kernel, running, "stream")
        mortal.terminate()
        told = problem(waiter.result(), 503, "shutting_down")
        assert (told["execution_id"], told["retryable"]) == (running, True)
        assert int(waiter.result().headers["retry-after"]) > 0
        assert web.result() == 1012
        assert mortal.containers() == sorted([kernel.id, idle.id])
        mortal.start()
        kernel, idle = mortal.kernel(kernel), mortal.kernel(idle)
        for begun in (lines.result(), sse.result()):
            assert "ended" not in [event["type"] for event in begun]
            events = whole(begun + read_on(kernel, running, begun[-1]["seq"]))
            assert printed(events) == counted(150)
        result = kernel.http.get(told["execution"]).json()
        assert (result["status"], stdout(result)) == ("ok", counted(150))
        assert printed(whole(read_on(kernel, waiting))) == "behind 42\n"
        assert (kernel.value("treasure"), idle.value("treasure")) == ("42", "43")


def test_a_cell_that_ends_in_time_is_waited_for() -> None:
    with Mortal(server={"drain_timeout": 60.0}) as mortal, ThreadPoolExecutor(1) as pool:
        kernel = mortal.kernel()
        waiter = pool.submit(post, kernel, _COUNTS.format(most=60))
        state(kernel, "busy")
        term(mortal)
        eventually(lambda: mortal.gateway.http.get("/healthz").json()["status"] == "stopping", "stopping")
        problem(kernel.post("1"), 503, "shutting_down")
        problem(mortal.gateway.http.post("/v1/kernels", json={}), 503, "shutting_down")
        assert stdout(waiter.result().json()) == counted(60)
        mortal.wait()
        mortal.start()
        assert mortal.kernel(kernel).value("treasure") == "42"


_FLOOD = "for number in range(100_000): print(number, 'x' * 50)\ntreasure = 42"


def test_let_go_in_the_middle_of_a_flood() -> None:
    """At that moment something is always on its way to the store, of output as of requests."""
    with Mortal(server={"drain_timeout": 0.3}) as mortal:
        kernels = [mortal.kernel() for _ in range(3)]
        cells = {kernel: [submit(kernel, _FLOOD), submit(kernel, "1"), submit(kernel, _FLOOD)] for kernel in kernels}
        until(kernels[-1], cells[kernels[-1]][0], "stream")
        for _ in range(5):
            mortal.terminate()
            mortal.start()
        for old, ids in cells.items():
            kernel = mortal.kernel(old)
            first, between, last = (whole(read_on(kernel, one)) for one in ids)
            wanted = "".join(f"{number} {'x' * 50}\n" for number in range(100_000))
            assert (printed(first) == wanted, printed(last) == wanted) == (True, True)
            assert between[-1]["status"] == "ok"
            assert kernel.value("treasure") == "42"


def test_a_second_signal_waits_for_nobody_and_ends_nobody() -> None:
    with Mortal(server={"drain_timeout": 600.0}) as mortal:
        kernel = mortal.kernel()
        running = submit(kernel, _COUNTS.format(most=150))
        until(kernel, running, "stream")
        term(mortal)
        eventually(lambda: mortal.gateway.http.get("/healthz").json()["status"] == "stopping", "stopping")
        term(mortal)
        mortal.wait()
        mortal.start()
        kernel = mortal.kernel(kernel)
        assert printed(whole(read_on(kernel, running))) == counted(150)
        assert kernel.value("treasure") == "42"


def test_on_disconnect_does_not_mean_the_end_of_the_gateway() -> None:
    """A cell that is to go with its client stays when all clients are sent away."""
    with Mortal(server={"drain_timeout": 0.5}) as mortal, ThreadPoolExecutor(1) as pool:
        kernel = mortal.kernel()
        body = {"code": _COUNTS.format(most=100), "on_disconnect": "interrupt"}
        waiter: Future[Any] = pool.submit(lambda: kernel.http.post(f"{kernel.path}/execute", json=body, timeout=240))
        state(kernel, "busy")
        mortal.terminate()
        running = problem(waiter.result(), 503, "shutting_down")["execution_id"]
        mortal.start()
        assert printed(whole(read_on(mortal.kernel(kernel), running))) == counted(100)


def test_told_to_end_the_kernels() -> None:
    """on_shutdown=stop: everything ends, is told why, and can still be read by the next gateway."""
    with Mortal(server={"on_shutdown": "stop", "drain_timeout": 0.5}) as mortal, ThreadPoolExecutor(1) as pool:
        kernel = mortal.kernel()
        waiter = pool.submit(post, kernel, "import time; print('last words', flush=True); time.sleep(600)")
        state(kernel, "busy")
        running: str = kernel.http.get(f"{kernel.path}/executions").json()["executions"][0]["execution_id"]
        until(kernel, running, "stream")
        mortal.terminate()
        result = waiter.result().json()
        assert (result["status"], result["cause"]["code"], stdout(result)) == ("died", "gateway_stopped", "last words\n")
        assert (mortal.containers(), mortal.links()) == ([], [])
        mortal.start()
        kernel = mortal.kernel(kernel)
        gone = problem(kernel.http.get(kernel.path), 410, "kernel_gone")
        assert gone["cause"]["code"] == "gateway_stopped"
        assert gone["last_execution"]["execution_id"] == running
        problem(kernel.post("1"), 410, "kernel_gone")
        assert mortal.kernels() == {}
        events = read_on(kernel, running)
        assert (printed(events), events[-1]["cause"]["code"]) == ("last words\n", "gateway_stopped")


def test_without_a_store_on_disk_nothing_can_be_let_go() -> None:
    with Mortal(store={"kind": "memory"}, server={"drain_timeout": 0.5}) as mortal, ThreadPoolExecutor(1) as pool:
        kernel = mortal.kernel()
        waiter = pool.submit(post, kernel, "import time; time.sleep(600)")
        state(kernel, "busy")
        mortal.terminate()
        assert waiter.result().json()["cause"]["code"] == "gateway_stopped"
        assert mortal.containers() == []


# F13: a connection of which one half is gone


class Proxy:
    """TCP between a client and a gateway, until it forwards nothing more: both ends then see an open connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._stalled, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator["Proxy"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()
            for one in (self._listener, *self._open):
                one.close()

    def stall(self) -> None:
        self._stalled.set()

    def _serve(self) -> None:
        peers: dict[socket.socket, socket.socket] = {}
        while not self._over.is_set():
            if self._stalled.is_set():
                self._over.wait()
                return
            for ready in select.select([self._listener, *peers], [], [], 0.05)[0]:
                if ready is self._listener:
                    client = self._listener.accept()[0]
                    server = socket.create_connection(("127.0.0.1", self._port))
                    peers[client], peers[server] = server, client
                    self._open += [client, server]
                elif data := ready.recv(65536):
                    peers[ready].sendall(data)
                else:
                    other = peers.pop(ready)
                    peers.pop(other, None)
                    other.close()


@pytest.mark.parametrize("on_disconnect", ["continue", "interrupt"])
def test_a_half_open_websocket_is_found_out(on_disconnect: str) -> None:
    """Nothing comes through any more, not even an end: the gateway's own pings find out, and the cell is read elsewhere."""
    with Mortal(server={"ws_ping_interval": 1.0}) as mortal, Proxy(mortal.port).running() as proxy:
        kernel = mortal.kernel()
        through = Kernel(Gateway(proxy.url, mortal.settings), kernel.id)
        with through.gateway.http, through.socket(ping_interval=None, close_timeout=0.1) as conversation:
            code = _COUNTS.format(most=200)
            conversation.send("execute", code=code, request_id="a", on_disconnect=on_disconnect)
            conversation.until(lambda event: event["type"] == "stream" and "5\n" in event["text"])
            eventually(lambda: kernel.document()["connections"] == 1, "connected")
            proxy.stall()
            eventually(lambda: kernel.document()["connections"] == 0, "found out")
            seen = [{name: value for name, value in event.items() if name != "request_id"} for event in conversation.seen]
        begun = [event for event in seen if "seq" in event and event["execution_id"]]
        events = begun + read_on(kernel, begun[0]["execution_id"], begun[-1]["seq"])
        if on_disconnect == "continue":
            assert printed(whole(events)) == counted(200)
            assert kernel.value("treasure") == "42"
        else:
            assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
            assert (events[-1]["status"], events[-1]["variables"]) == ("cancelled", "kept")
