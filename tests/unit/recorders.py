"""A link that goes nowhere and remembers what was sent, and messages as a kernel would send them: for tests of `kernels`."""

import json
from typing import Any
from uuid import uuid4

from jupyter_client.session import Session

from gateway.kernels.client import KernelClient
from gateway.protocol.messages import RawMessage, split
from gateway.sandboxes.link import Link
from gateway.settings import LinkSettings
from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Decoder, Frame


class RecordingLink(Link):
    """Remembers messages as `(channel, header, parent, content)`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(LinkSettings(**settings), lambda _batch: None, 60.0, 60.0)
        self.messages: list[tuple[Channel, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self.wire: list[list[bytes]] = []

    def send_message(self, channel: Channel, parts: list[bytes]) -> None:
        header, parent, _metadata, content = (json.loads(part) for part in parts[2:6])
        self.wire.append(parts)
        self.messages.append((channel, header, parent, content))

    def send_now(self, channel: Channel, parts: list[bytes]) -> None:
        self.send_message(channel, parts)


class KernelVoice:
    """Says what a kernel would say to a client: signed with its key, numbered as frames."""

    def __init__(self, client: KernelClient) -> None:
        self.session = Session(key=client.key.encode(), username="kernel")
        self._seq = 0

    def frame(self, channel: Channel, msg_type: str, content: dict[str, Any], parent_id: str | None = None) -> Frame:
        parent = None if parent_id is None else {"header": {"msg_id": parent_id}}
        return self.pack(channel, self.session.serialize(self.session.msg(msg_type, content, parent=parent)))

    def pack(self, channel: int, parts: list[bytes]) -> Frame:
        self._seq += 1
        (frame,) = Decoder(1 << 26).feed(frames.pack_message(channel, parts, self._seq))
        return frame


def raw(channel: str, msg_type: str, content: Any, parent_id: object = None, **header: Any) -> RawMessage:
    """A message behind the check of its signature."""
    head = {"msg_id": uuid4().hex, "msg_type": msg_type, **header}
    parent = {} if parent_id is None else {"msg_id": parent_id}
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return split(channel, [b"<IDS|MSG>", b"", json.dumps(head).encode(), json.dumps(parent).encode(), b"{}", body])
