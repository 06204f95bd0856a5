"""A cell can reach the socket on which the gateway listens for its supervisor. Whatever it says there, it becomes nobody.

The link's protocol is spoken here with the cell's own means: a socket and a few bytes.
"""

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.supervisor import frames
from gateway.supervisor.frames import Kind
from tests.support import Gateway, Kernel, eventually, running


@pytest.fixture(scope="module")
def own() -> Iterator[Gateway]:
    """A gateway of these tests alone, which gives up on silent connections soon."""
    with running(link={"handshake_timeout": 1.0}) as gateway:
        yield gateway


@pytest.fixture
def cell(own: Gateway) -> Iterator[Kernel]:
    with own.kernel() as kernel:
        yield kernel


def dial(payloads: list[str]) -> Any:
    """Says each of these on a connection of its own, and reads until the gateway ends it: what came back."""
    import base64
    import socket

    found = []
    for payload in payloads:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(50)
            connection.connect("/run/cellgate/link.sock")
            answer = b""
            try:
                connection.sendall(base64.b64decode(payload))
                while piece := connection.recv(65536):
                    answer += piece
            except (ConnectionResetError, BrokenPipeError):
                pass
            found.append(answer.decode("latin-1"))
    return found


def encoded(*payloads: bytes) -> list[str]:
    import base64

    return [base64.b64encode(payload).decode() for payload in payloads]


def hello(**fields: Any) -> bytes:
    return frames.pack_json(Kind.HELLO, {"version": frames.VERSION, "secret": "", "received": 0, "kernel": None, **fields})


LIES: dict[str, bytes] = {
    "no secret": hello(),
    "an empty secret": hello(secret=""),
    "a wrong secret": hello(secret="x" * 43),
    "a secret that is no text": hello(secret={"a": 1}),
    "a missing secret": frames.pack_json(Kind.HELLO, {"version": frames.VERSION}),
    "another version": hello(version=99),
    "a large number": hello(received=2**63),
    "an event before any greeting": frames.pack_json(Kind.EVENT, {"event": "kernel_exit", "code": 0}, 1),
    "a reply before any greeting": frames.pack_json(Kind.REPLY, {"id": 1, "result": {}}),
    "nonsense": os.urandom(10_000),
    "zeros": bytes(10_000),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a length of four gigabytes": struct.pack("!IBQ", 0xFFFFFFFF, Kind.HELLO, 0) + b"x" * 1000,
    "JSON that is none": frames.pack(Kind.HELLO, b"{"),
    "deep JSON": frames.pack(Kind.HELLO, b"[" * 100_000),
    "a list": frames.pack(Kind.HELLO, b"[]"),
    "an unknown kind": frames.pack(Kind.HELLO, b"{}")[:4] + b"\xff" + bytes(8) + b"{}",
    "two greetings": hello() + hello(),
    "a greeting and an event": hello() + frames.pack_json(Kind.EVENT, {"event": "kernel_exit", "code": 0}, 1),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_gets_no_answer_and_changes_nothing(cell: Kernel, name: str) -> None:
    cell.run("kept = 'kept'")
    assert cell.call(dial, encoded(LIES[name])) == [""]
    assert cell.value("kept") == "'kept'"
    assert cell.document()["state"] == "idle"


def test_all_lies_at_once_hurt_nobody(own: Gateway, cell: Kernel) -> None:
    with own.kernel() as neighbour:
        assert cell.call(dial, encoded(*LIES.values()) * 5) == [""] * len(LIES) * 5
        assert neighbour.value("6 * 7") == "42"
    assert cell.value("6 * 7") == "42"


def test_a_cell_that_kills_its_supervisor_cannot_take_its_place(own: Gateway, cell: Kernel) -> None:
    # With the supervisor gone the link is free, but the first greeting was the supervisor's: its secret is asked for.
    code = f"""
import base64, os, signal, socket, time
input()
os.kill(os.getppid(), signal.SIGSTOP)
while True:
    s = socket.socket(socket.AF_UNIX)
    s.connect('/run/cellgate/link.sock')
    s.sendall(base64.b64decode({encoded(hello())[0]!r}))
    try: open('/work/answer', 'ab').write(s.recv(65536))
    except ConnectionResetError: pass
    if os.path.exists('/work/kill'): os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.01)
"""
    with cell.submitted(code) as running_cell, own.kernel() as neighbour:
        running_cell.answer("")
        # Nothing can be asked of the stopped supervisor; the end of the sandbox comes from outside.
        assert neighbour.value("6 * 7") == "42"
        eventually(lambda: own.http.get(cell.path).status_code == 200, "the gateway answers")
        cell.delete()
        assert running_cell.end()["status"] == "died"
        assert neighbour.value("6 * 7") == "42"


HOLD = """
import socket
held = [socket.socket(socket.AF_UNIX) for _ in range({count})]
for connection in held:
    try:
        connection.connect('/run/cellgate/link.sock')
        connection.send({first!r})
    except OSError: pass  # the gateway may have had enough already
"""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("first", [b"", hello()[:5]])
def test_two_hundred_open_connections_are_given_back(own: Gateway, cell: Kernel, first: bytes) -> None:
    own.http.get("/healthz")
    before = descriptors()
    cell.run(HOLD.format(count=200, first=first or b"\0"))
    assert cell.value("6 * 7") == "42"
    with own.kernel() as neighbour:
        assert neighbour.value("6 * 7") == "42"
    # They are held by the cell all the while; it is the gateway that lets go.
    eventually(lambda: descriptors() <= before, "the gateway's descriptors have come back")
    assert cell.value("len(held)") == "200"
    assert cell.value("6 * 7") == "42"


def test_a_flood_of_connections_from_many_processes_is_bounded(own: Gateway, cell: Kernel) -> None:
    before = descriptors()
    flood = HOLD.format(count=900, first=b"\0") + "\nprint('held', flush=True)\nimport time\ntime.sleep(3600)"
    code = f"""
import subprocess, sys
floods = [subprocess.Popen([sys.executable, '-c', {flood!r}], stdout=subprocess.PIPE) for _ in range(10)]
"""
    cell.run(code)
    with own.kernel() as neighbour:
        for _ in range(50):
            assert neighbour.value("6 * 7") == "42"
            # Of 9,000 connections only a few may cost a descriptor of the gateway at a time.
            assert descriptors() - before < 500
    cell.run("for flood in floods: flood.kill()")
    eventually(lambda: descriptors() <= before, "the gateway's descriptors have come back")
    assert cell.value("6 * 7") == "42"
