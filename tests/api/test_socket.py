"""Frames that make no sense on the native WebSocket: each is refused with its request_id where it has one, and the talk goes on."""

import json
import os
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.support import Gateway, Kernel, Socket


def refuse(socket: Socket, frame: str | bytes) -> dict[str, Any]:
    """The refusal of a frame; and a proof that the connection lives on."""
    socket.connection.send(frame)
    refused = socket.until_type("refused")
    problem = refused["problem"]
    assert isinstance(problem, dict)
    assert {"code", "detail", "retryable", "status", "title", "type"} <= set(problem)
    socket.send("ping", request_id="still here")
    socket.until_type("pong", "still here")
    return refused


NONSENSE: dict[str, str | bytes] = {
    "empty": "",
    "not JSON": "hello",
    "half JSON": '{"op": "execute"',
    "a list": "[]",
    "a number": "1",
    "null": "null",
    "no op": "{}",
    "op of a wrong type": '{"op": 1}',
    "unknown op": '{"op": "sudo"}',
    "execute without code": '{"op": "execute"}',
    "unknown field": '{"op": "ping", "extra": 1}',
    "wrong timeout": '{"op": "execute", "code": "1", "timeout": -1}',
    "NaN": '{"op": "execute", "code": "1", "timeout": NaN}',
    "lone surrogate": '{"op": "execute", "code": "\\ud800"}',
    "deep": "[" * 100_000,
    "binary": os.urandom(1000),
    "binary zeros": bytes(1000),
    "not UTF-8 in binary": b'{"op": "\xff"}',
    "request_id of a wrong type": '{"op": "ping", "request_id": []}',
    "input for nobody": '{"op": "input", "execution_id": "x", "value": "y"}',
    "input without value": '{"op": "input", "execution_id": "x"}',
    "cancel of nothing": '{"op": "cancel", "execution_id": "x"}',
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_and_the_connection_lives_on(kernel: Kernel, name: str) -> None:
    with kernel.socket() as socket:
        refused = refuse(socket, NONSENSE[name])
        assert refused["request_id"] is None
        assert refused["problem"]["code"] in ("invalid_request", "execution_not_found")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown op": ({"op": "sudo"}, "invalid_request"),
    "no code": ({"op": "execute"}, "invalid_request"),
    "wrong execution": ({"op": "input", "execution_id": "x", "value": ""}, "execution_not_found"),
    "cancel": ({"op": "cancel", "execution_id": "x"}, "execution_not_found"),
    "timeout": ({"op": "execute", "code": "1", "timeout": 1e9}, "limit_exceeded"),
    "long code": ({"op": "execute", "code": "#" * 20_000}, "body_too_large"),
}


@pytest.mark.parametrize("request_id", ["text", "", 7, 0, "ä ✓", 2**53])
@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_names_the_request(kernel: Kernel, name: str, request_id: str | int) -> None:
    fields, code = WRONG[name]
    with kernel.socket() as socket:
        refused = refuse(socket, json.dumps({**fields, "request_id": request_id}))
        assert (refused["request_id"], refused["problem"]["code"]) == (request_id, code)


def test_an_answer_to_a_cell_that_did_not_ask_is_refused(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        execution = socket.execute("1")[-1]["execution_id"]
        refused = refuse(socket, json.dumps({"op": "input", "execution_id": execution, "value": "", "request_id": "r"}))
        assert (refused["request_id"], refused["problem"]["code"]) == ("r", "not_waiting_for_input")


@pytest.mark.parametrize("request_id", [2**64, 10**30, -(2**70)])
def test_a_request_id_beyond_any_integer_ends_nothing(kernel: Kernel, request_id: int) -> None:
    with kernel.socket() as socket:
        socket.connection.send(json.dumps({"op": "execute", "code": "1", "request_id": request_id}))
        socket.send("ping", request_id="still here")
        socket.until_type("pong", "still here")
        socket.execute("1")


def read_all(socket: Socket) -> None:
    """Until the connection ends."""
    while True:
        socket.receive()


def test_a_message_that_is_too_big_closes_with_1009(strict: Gateway, kernel: Kernel) -> None:
    with kernel.socket() as socket, kernel.socket() as other:
        # Only the head of the frame: the length in it is enough, and an answer is not lost under bytes nobody reads.
        socket.connection.socket.sendall(bytes([0x81, 0x80 | 127]) + (20_000_000).to_bytes(8, "big") + bytes(4))
        with pytest.raises(ConnectionClosed) as closed:
            read_all(socket)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        # It was the affair of that connection alone.
        other.send("ping", request_id="p")
        other.until_type("pong", "p")
    assert kernel.value("1") == "1"


def test_a_thousand_pings_are_a_thousand_pongs(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        for number in range(1000):
            socket.send("ping", request_id=number)
        for number in range(1000):
            assert socket.until_type("pong")["request_id"] == number


def test_a_socket_closes_when_its_kernel_is_deleted(strict: Gateway) -> None:
    kernel = strict.new_kernel()
    with kernel.socket() as socket:
        kernel.delete()
        with pytest.raises(ConnectionClosed) as closed:
            read_all(socket)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000
    assert [event["state"] for event in socket.seen if event["type"] == "state"][-2:] == ["stopping", "dead"]


def test_text_and_binary_frames_are_read_alike(kernel: Kernel) -> None:
    with kernel.socket() as socket:
        socket.connection.send(json.dumps({"op": "ping", "request_id": "b"}).encode())
        socket.until_type("pong", "b")
