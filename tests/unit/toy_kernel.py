"""A kernel process for tests of the supervisor: real ZMQ sockets, and no computing. Run with the path of a connection file.

Each shell request's last part is a JSON order. It is carried out and answered on shell with the same parts, so that a test can
tell when it is done: `emit` messages of `size` bytes on iopub in the name of `id`, of the type `kind`, then `idle` if wanted; `say`
text on stdout; `exit` or `signal`.
"""

import json
import os
import sys
import time
from typing import Any

import zmq

DELIMITER = b"<IDS|MSG>"


def header(kind: str, number: int = 0) -> bytes:
    return json.dumps({"msg_type": kind, "msg_id": f"{kind}-{number}"}).encode()


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        info = json.load(file)
    context = zmq.Context()
    sockets = {}
    for name, kind in (("shell", zmq.ROUTER), ("control", zmq.ROUTER), ("stdin", zmq.ROUTER), ("iopub", zmq.XPUB)):
        sockets[name] = context.socket(kind)
        sockets[name].linger = -1
        sockets[name].sndhwm = 100
        if kind == zmq.XPUB:
            # As the real launcher does: an output waits for its reader and is not dropped.
            sockets[name].setsockopt(zmq.XPUB_NODROP, 1)
        sockets[name].bind(f"ipc://{info['ip']}-{info[f'{name}_port']}")
    sockets["iopub"].recv()  # The supervisor's subscription has arrived.
    print("toy kernel is up", flush=True)
    while True:
        identity, *parts = sockets["shell"].recv_multipart()
        order = json.loads(parts[-1])
        carry_out(order, sockets["iopub"])
        sockets["shell"].send_multipart([identity, *parts])
        if "exit" in order or "signal" in order:
            for socket in sockets.values():
                socket.close()
            context.term()
            if "signal" in order:
                os.kill(os.getpid(), order["signal"])
            os._exit(order["exit"])


def message(kind: str, number: int, order: dict[str, Any]) -> list[bytes]:
    parent = json.dumps({"msg_id": order.get("id")}).encode()
    body = json.dumps({"number": number}).encode().ljust(order.get("size", 0))
    return [b"topic", DELIMITER, b"", header(kind, number), parent, b"{}", body, *[b"b"] * order.get("buffers", 0)]


def output(order: dict[str, Any], number: int) -> list[bytes]:
    """The parts of one of the messages that `emit` asks for."""
    return message(order.get("kind", "stream"), number, order)


def carry_out(order: dict[str, Any], iopub: Any) -> None:
    if "say" in order:
        print(order["say"], flush=True)
    if "spawn" in order:
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", str(order["spawn"]))
    for number in range(order.get("emit", 0)):
        iopub.send_multipart(output(order, number))
    if "idle" in order:
        iopub.send_multipart(message("status", 0, order))
    time.sleep(order.get("sleep", 0))


if __name__ == "__main__":
    main(sys.argv[1])
