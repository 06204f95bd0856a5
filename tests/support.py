"""A running gateway as the tests see it: over HTTP and WebSocket alone, as any client would.

No test of behaviour reaches into the gateway's objects. What a cell sees is asked by `Kernel.call`, which sends a function's
source into the kernel and brings its answer back as JSON: so the probes of tests/hostile are linted and typed like all else.
"""

import contextlib
import inspect
import json
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import httpx2
from websockets.sync.client import ClientConnection, connect

from gateway.app import gateway_id, serving
from gateway.settings import Settings, load

DEADLINE = 60.0
"""Seconds after which a thing that should have happened has not. Never a measure of speed."""

_OF_THIS_MACHINE = (str(Path(__file__).parents[1]), "/tmp/cg-", "docker.sock")

Event = dict[str, Any]
Result = dict[str, Any]

GATEWAY_IDS: list[str] = []
"""Of every gateway that this run has started, so that the end of the run can look for what they left."""


class Gateway:
    """One gateway in a thread of this process, and an authorised client for it."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url
        self.settings = settings
        self.token = settings.token or (settings.state_dir / "token").read_text().strip()
        self.id = gateway_id(settings.state_dir)
        self.headers = {"Authorization": f"Bearer {self.token}"}
        self.http = httpx2.Client(base_url=url, headers=self.headers, timeout=DEADLINE)

    def new_kernel(self, **body: Any) -> "Kernel":
        answer = self.http.post("/v1/kernels", json=body)
        assert answer.status_code == 201, answer.text
        return Kernel(self, answer.json()["id"])

    @contextlib.contextmanager
    def kernel(self, **body: Any) -> Iterator["Kernel"]:
        kernel = self.new_kernel(**body)
        try:
            yield kernel
        finally:
            kernel.delete()

    @contextlib.contextmanager
    def connect(self, path: str, headers: dict[str, str] | None = None, **options: Any) -> Iterator[ClientConnection]:
        sent = self.headers if headers is None else headers
        url = self.url.replace("http://", "ws://") + path
        with connect(url, additional_headers=sent, max_size=None, open_timeout=DEADLINE, **options) as connection:
            yield connection


@contextlib.contextmanager
def running(**overrides: Any) -> Iterator[Gateway]:
    """A gateway with these settings, on a port of its own and in a state directory of its own."""
    # Short, since the path of a Unix socket in it ends at 107 bytes; pytest's own directories are longer.
    directory = Path(tempfile.mkdtemp(prefix="cg-", dir="/tmp"))
    settings = load(
        **{"state_dir": directory, "log_level": "error", **overrides, "server": {"port": 0, **overrides.get("server", {})}}
    )
    GATEWAY_IDS.append(gateway_id(directory))
    try:
        with serving(settings) as url:
            gateway = Gateway(url, settings)
            with gateway.http:
                yield gateway
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Kernel:
    """One kernel of a gateway."""

    def __init__(self, gateway: Gateway, kernel_id: str) -> None:
        self.gateway, self.id = gateway, kernel_id
        self.path = f"/v1/kernels/{kernel_id}"
        self.http = gateway.http
        self.container = f"cellgate-{kernel_id}"

    def document(self) -> dict[str, Any]:
        answer = self.http.get(self.path)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def delete(self) -> None:
        answer = self.http.delete(self.path)
        assert answer.status_code in (204, 404, 410), answer.text

    def restart(self) -> dict[str, Any]:
        answer = self.http.post(f"{self.path}/restart")
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def interrupt(self) -> dict[str, Any]:
        answer = self.http.post(f"{self.path}/interrupt")
        assert answer.status_code == 202, answer.text
        document: dict[str, Any] = answer.json()
        return document

    # cells

    def post(self, code: str, accept: str = "application/json", **fields: Any) -> httpx2.Response:
        headers = {"Accept": accept}
        return self.http.post(f"{self.path}/execute", json={"code": code, **fields}, headers=headers, timeout=4 * DEADLINE)

    def execute(self, code: str, **fields: Any) -> Result:
        answer = self.post(code, **fields)
        assert answer.status_code == 200, answer.text
        result: Result = answer.json()
        return result

    def run(self, code: str, **fields: Any) -> str:
        """Runs a cell that must succeed; what it printed."""
        result = self.execute(code, **fields)
        assert result["status"] == "ok", (result["cause"], errors_of(result))
        return stdout(result)

    def value(self, code: str) -> str:
        """The text/plain of a cell's result."""
        result = self.execute(code)
        assert result["status"] == "ok", (result["cause"], errors_of(result))
        text: str = result["outputs"][-1]["data"]["text/plain"]
        return text

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs `function` inside the kernel; arguments and answer are JSON values."""
        source = textwrap.dedent(inspect.getsource(function))
        call = f"{function.__name__}(*__import__('json').loads({json.dumps(arguments)!r}))"
        printed = self.run(f"from typing import Any\n{source}\nprint('\\n' + __import__('json').dumps({call}))")
        return json.loads(printed.splitlines()[-1])

    @contextlib.contextmanager
    def submitted(self, code: str, **fields: Any) -> Iterator["Running"]:
        """A cell that is being run while the block does something else."""
        with self.socket() as socket:
            socket.send("execute", code=code, request_id="submitted", **fields)
            running = Running(socket)
            running.wait_for("started")
            yield running

    @contextlib.contextmanager
    def socket(self, **options: Any) -> Iterator["Socket"]:
        with self.gateway.connect(f"{self.path}/ws", **options) as connection:
            yield Socket(connection)

    def events(self, code: str, accept: str = "application/x-ndjson", **fields: Any) -> list[Event]:
        """All events of a cell, read by HTTP."""
        answer = self.post(code, accept, **fields)
        assert answer.status_code == 200, answer.text
        return sse_events(answer.text) if accept == "text/event-stream" else [json.loads(line) for line in answer.iter_lines()]

    # files

    def file(self, path: str) -> str:
        """The URL path of a file; `path` is sent as it is."""
        return f"{self.path}/files/{path}"


class Socket:
    """The native WebSocket with a memory for what came before it was asked for."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.seen: list[Event] = []

    def send(self, op: str, **fields: Any) -> None:
        self.connection.send(json.dumps({"op": op, **fields}))

    def receive(self) -> Event:
        frame = self.connection.recv(timeout=DEADLINE)
        assert isinstance(frame, str)
        event: Event = json.loads(frame)
        self.seen.append(event)
        return event

    def until(self, wanted: Callable[[Event], bool]) -> Event:
        """The first event from now on that is wanted."""
        deadline = time.monotonic() + 4 * DEADLINE
        while time.monotonic() < deadline:
            event = self.receive()
            if wanted(event):
                return event
        raise AssertionError(f"it did not come; last was {self.seen[-1:]}")

    def until_type(self, kind: str, request_id: str | None = None) -> Event:
        return self.until(lambda event: event["type"] == kind and (request_id is None or event.get("request_id") == request_id))

    def execute(self, code: str, request_id: str = "cell", **fields: Any) -> list[Event]:
        """Runs a cell; its events from `queued` to `ended`."""
        start = len(self.seen)
        self.send("execute", code=code, request_id=request_id, **fields)
        self.until_type("ended", request_id)
        return [event for event in self.seen[start:] if event.get("request_id") == request_id and "seq" in event]


class Running:
    """A cell under way, whose events are read by a WebSocket of its own."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self._answered = 0

    @property
    def execution_id(self) -> str:
        found: str = next(event["execution_id"] for event in self.socket.seen if event["type"] == "accepted")
        return found

    @property
    def events(self) -> list[Event]:
        return [event for event in self.socket.seen if event.get("request_id") == "submitted" and "seq" in event]

    def wait_for(self, kind: str) -> Event:
        return self.socket.until_type(kind, "submitted")

    def answer(self, value: str) -> None:
        """Answers the cell's next question, which may have been asked already or not yet."""
        asked = [event for event in self.events if event["type"] == "input_request"]
        if len(asked) <= self._answered:
            self.wait_for("input_request")
        self._answered += 1
        self.socket.send("input", execution_id=self.execution_id, value=value)

    def end(self) -> Event:
        return self.wait_for("ended")


def sse_events(text: str) -> list[Event]:
    """Server-Sent Events -> their data, checked against `id` and `event` of each."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            event = json.loads(fields["data"])
            assert (fields["event"], fields["id"]) == (event["type"], str(event["seq"]))
            found.append(event)
    return found


def stdout(result: Result) -> str:
    return streamed(result["outputs"], "stdout")


def streamed(outputs: list[dict[str, Any]], name: str) -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream" and output["name"] == name)


def printed(events: list[Event], name: str = "stdout") -> str:
    """All text that came as stream events of this name."""
    return "".join(event["text"] for event in events if event["type"] == "stream" and event["name"] == name)


def errors_of(result: Result) -> list[str]:
    return ["\n".join(output["traceback"]) for output in result["outputs"] if output["output_type"] == "error"]


def problem(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Checks that an answer is a problem document with this status and code, and hands it back."""
    assert (answer.status_code, answer.headers.get("content-type")) == (status, "application/problem+json"), answer.text
    document: dict[str, Any] = answer.json()
    assert document["code"] == code, document
    assert document["status"] == status
    assert document["type"] == f"urn:cellgate:error:{code}"
    assert document["title"]
    assert document["detail"]
    assert isinstance(document["retryable"], bool)
    # What a kernel has said is its own affair; what the gateway says tells nothing about this machine.
    ours = json.dumps({name: value for name, value in document.items() if name not in ("log", "cause")})
    assert not [word for word in (*_OF_THIS_MACHINE, "Traceback", ".py") if word in ours], ours
    return document


def engine() -> docker.APIClient:
    """The Docker daemon itself, to look at what the gateway made there and to do harm from outside."""
    return docker.APIClient(version="auto", timeout=60)


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`, asked again until the deadline; for states that nobody announces."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {DEADLINE:g} s")
