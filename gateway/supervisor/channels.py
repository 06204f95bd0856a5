"""The supervisor's side of a kernel's ZMQ sockets: one peer for all channels, at which nothing is dropped.

The sockets live in a private directory of the sandbox's own /tmp. While too much is unacknowledged the relay stops reading. What
then waits in ZMQ's own queue depends on the kernel: one that waits for a slow reader (XPUB_NODROP, as our launcher sets it) gets a
short queue and is held up itself; any other would drop messages at a high-water mark, so there is none and the queue grows.
"""

import os
from typing import Any

import zmq

from .frames import Channel

_SOCKETS = {Channel.SHELL: zmq.DEALER, Channel.CONTROL: zmq.DEALER, Channel.STDIN: zmq.DEALER, Channel.IOPUB: zmq.SUB}
_PORTS = {Channel.SHELL: 1, Channel.IOPUB: 2, Channel.STDIN: 3, Channel.CONTROL: 4}
_IDENTITY = b"cellgate"
_HEARTBEAT_PORT = 5
_QUEUE = 100
"""Messages of a patient kernel that may wait in ZMQ's queue; one may be megabytes, and counts toward the sandbox's memory."""


class Channels:
    """Shell, control, stdin and iopub of one kernel process."""

    def __init__(self) -> None:
        self.directory = f"/tmp/.cellgate-{os.getpid()}-{os.urandom(8).hex()}"
        os.mkdir(self.directory, 0o700)
        self.path = os.path.join(self.directory, "k")
        self.sockets: dict[zmq.Socket[bytes], Channel] = {}
        self._by_channel: dict[Channel, zmq.Socket[bytes]] = {}

    def connection_info(self, key: str, kernel_name: str) -> dict[str, Any]:
        """The connection file's content, for a kernel that binds ipc sockets here."""
        return {
            "transport": "ipc",
            "ip": self.path,
            "shell_port": _PORTS[Channel.SHELL],
            "iopub_port": _PORTS[Channel.IOPUB],
            "stdin_port": _PORTS[Channel.STDIN],
            "control_port": _PORTS[Channel.CONTROL],
            "hb_port": _HEARTBEAT_PORT,
            "key": key,
            "signature_scheme": "hmac-sha256",
            "kernel_name": kernel_name,
        }

    def connect(self, context: "zmq.Context[zmq.Socket[bytes]]", patient: bool) -> None:
        """Connects all four; the kernel need not have bound them yet. `patient`: it waits rather than drop."""
        for channel, kind in _SOCKETS.items():
            socket = context.socket(kind)
            socket.linger = 0
            socket.rcvhwm = _QUEUE if patient else 0
            socket.sndhwm = 0
            # The kernel binds within some 300 ms; a missed attempt must not cost the default 100 ms more.
            socket.reconnect_ivl = 5
            if kind == zmq.SUB:
                socket.subscribe(b"")
            else:
                socket.identity = _IDENTITY
            socket.connect(f"ipc://{self.path}-{_PORTS[channel]}")
            self.sockets[socket] = channel
            self._by_channel[channel] = socket

    def send(self, channel: Channel, parts: list[bytes]) -> None:
        self._by_channel[channel].send_multipart(parts)

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)
        self.sockets.clear()
        self._by_channel.clear()
        import shutil  # Only here: it brings in compression modules, and a start is counted in milliseconds.

        shutil.rmtree(self.directory, ignore_errors=True)
