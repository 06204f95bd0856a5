"""A gateway over scripted kernels: everything from the socket of a client to the link is real, and a cell does what a test says."""

import contextlib
import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway import app as composition
from gateway.settings import load
from gateway.testing import FakeEngine, KernelScript
from gateway.testing.kernel import Cell
from tests.support import DEADLINE, Gateway, Kernel, eventually


class ScriptedGateway(Gateway):
    """`engine` is the outside of its boxes."""

    engine: FakeEngine
    stop: Callable[[], None]

    def codes(self, kernel: Kernel) -> list[str]:
        """What the kernel process was given to run."""
        process = self.engine.boxes[kernel.id].supervisor.kernel
        assert process is not None
        return process.codes


@contextlib.contextmanager
def scripted(cells: dict[str, Cell] | None = None, **overrides: Any) -> Iterator[ScriptedGateway]:
    directory = Path(tempfile.mkdtemp(prefix="cg-", dir="/tmp"))
    settings = load(
        **{"state_dir": directory, "log_level": "error", **overrides, "server": {"port": 0, **overrides.get("server", {})}}
    )
    engine = FakeEngine(KernelScript(cells or {}))
    ready = threading.Event()
    found: dict[str, str] = {}

    def on_ready(url: str) -> None:
        found["url"] = url
        ready.set()

    server = composition._server(composition.create_app(settings, engine), settings, on_ready)
    thread = threading.Thread(target=server.run, daemon=True)

    def stop() -> None:
        server.should_exit = True

    thread.start()
    try:
        assert ready.wait(DEADLINE), "the gateway did not start"
        gateway = ScriptedGateway(found["url"], settings)
        gateway.engine, gateway.stop = engine, stop
        with gateway.http:
            yield gateway
    finally:
        stop()
        thread.join(DEADLINE)
        shutil.rmtree(directory, ignore_errors=True)
    assert not thread.is_alive()


class RawRequest:
    """A POST of JSON whose client can leave at any moment, as no client library lets one."""

    def __init__(
        self, gateway: Gateway, path: str, body: dict[str, Any], accept: str = "application/json", **headers: str
    ) -> None:
        address = urlsplit(gateway.url)
        self._connection = socket.create_connection((address.hostname, address.port), timeout=DEADLINE)
        content = json.dumps(body).encode()
        fields = {
            "Host": address.netloc,
            "Authorization": f"Bearer {gateway.token}",
            "Accept": accept,
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Connection": "close",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)

    def leave(self) -> None:
        self._connection.close()

    def read(self) -> tuple[int, bytes]:
        """Status and everything behind the head, as it came."""
        answer = b""
        with self._connection:
            while piece := self._connection.recv(65536):
                answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body


def latest(kernel: Kernel) -> dict[str, Any]:
    """The Summary of the execution that was asked for last."""
    found = kernel.http.get(f"{kernel.path}/executions", params={"limit": 1}).json()["executions"]
    return found[0] if found else {"status": None, "execution_id": None}


def wait_for_status(kernel: Kernel, status: str) -> str:
    """The id of the latest execution once it has this status."""
    eventually(lambda: latest(kernel)["status"] == status, status)
    execution_id: str = latest(kernel)["execution_id"]
    return execution_id


def result_of(kernel: Kernel, execution_id: str) -> dict[str, Any]:
    answer = kernel.http.get(f"{kernel.path}/executions/{execution_id}")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document
