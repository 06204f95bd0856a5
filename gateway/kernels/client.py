"""The gateway's single conversation with one kernel process: signs what goes out, checks what comes in.

One `KernelClient` per process: a restart makes a new one with a new key, so that nothing from before is taken for new. Messages
that break the protocol (no delimiter, wrong signature, no JSON object) are counted and dropped.
"""

import hmac
import secrets
from collections.abc import Iterable
from typing import Any

import structlog
from jupyter_client.session import Session

from gateway.protocol.messages import BadMessage, RawMessage, split
from gateway.sandboxes.link import Link
from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Frame

log = structlog.get_logger()


class KernelClient:
    """Requests out over the link, messages in from its frames."""

    def __init__(self, link: Link) -> None:
        self.key = secrets.token_hex(32)
        self.bad_messages = 0
        self._link = link
        self._session = Session(key=self.key.encode(), username="cellgate")

    def send(self, channel: Channel, msg_type: str, content: dict[str, Any], parent: dict[str, Any] | None = None) -> str:
        """Signs and sends one message; its msg_id."""
        message = self._session.msg(msg_type, content, parent={"header": parent} if parent else None)
        self._link.send_message(channel, self._session.serialize(message))
        msg_id: str = message["header"]["msg_id"]
        return msg_id

    def decode(self, batch: Iterable[Frame]) -> Iterable[RawMessage]:
        """The good messages of a batch of MESSAGE frames."""
        for frame in batch:
            try:
                channel, parts = frames.unpack_message(frame.payload, self._link.settings.max_parts)
                message = split(channel.name.lower(), parts)
                self._verify(message)
            except BadMessage as error:
                self.count_bad(str(error))
            else:
                yield message

    def _verify(self, message: RawMessage) -> None:
        expected = self._session.sign(list(message.signed))
        if not hmac.compare_digest(expected, message.signature):
            raise BadMessage("wrong signature")

    def count_bad(self, reason: str) -> None:
        self.bad_messages += 1
        if self.bad_messages & (self.bad_messages - 1) == 0:
            # At powers of two: a flood must not become a flood of log lines.
            log.warning("bad_kernel_message", reason=reason, count=self.bad_messages)
