"""The gateway's single conversation with one kernel process: signs what goes out, checks what comes in.

One `KernelClient` per process: a restart makes a new one with a new key, so that nothing from before is taken for new. Messages
that break the protocol (no delimiter, wrong signature, no JSON object) are counted and dropped.
"""

import asyncio
import hmac
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import anyio
import structlog
from jupyter_client.session import Session

from gateway.protocol.messages import BadMessage, RawMessage, split
from gateway.sandboxes.link import Link
from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Frame, FrameError

log = structlog.get_logger()

_IOPUB_PATIENCE = 0.2
"""Seconds after a reply on shell within which the same answer should have been seen on iopub."""


class KernelClient:
    """Requests out over the link, messages in from its frames, and the end of the process when it comes."""

    def __init__(self, link: Link, key: str | None = None) -> None:
        """`key` is that of a process which an earlier gateway has started; `process_started` is then called at once."""
        self.key = key or secrets.token_hex(32)
        self.bad_messages = 0
        self.exit_info: dict[str, Any] | None = None
        """The supervisor's `kernel_exit` event, once the process has ended."""
        self.names_variables = False
        """Whether this kernel's launcher can name its largest variables while a cell runs."""
        self.pid: object = None
        self._early: list[dict[str, Any]] | None = []
        """Ends that were told before it is known which process this client is for; None from then on."""
        self._exited = anyio.Event()
        self._link = link
        self._session = Session(key=self.key.encode(), username="cellgate")
        self._probe_id: str | None = None
        self._probe_reply = anyio.Event()
        self._probe_iopub = anyio.Event()
        self._questions: dict[str, asyncio.Future[dict[str, Any]]] = {}

    def send(self, channel: Channel, msg_type: str, content: dict[str, Any], parent: dict[str, Any] | None = None) -> str:
        """Signs and sends one message; its msg_id."""
        message = self._session.msg(msg_type, content, parent={"header": parent} if parent else None)
        self._link.send_message(channel, self._session.serialize(message))
        msg_id: str = message["header"]["msg_id"]
        return msg_id

    def send_now(self, msg_type: str, content: dict[str, Any]) -> str:
        """A control request that need not survive the gateway; its msg_id."""
        message = self._session.msg(msg_type, content)
        self._link.send_now(Channel.CONTROL, self._session.serialize(message))
        msg_id: str = message["header"]["msg_id"]
        return msg_id

    def take(self, batch: Iterable[Frame]) -> Iterator[RawMessage]:
        """The good messages of a batch of MESSAGE frames, but for the answers to the client's own questions."""
        for frame in batch:
            try:
                channel, parts = frames.unpack_message(frame.payload, self._link.settings.max_parts)
                message = split(channel.name.lower(), parts)
                self._verify(message)
            except (BadMessage, FrameError) as error:
                # The parts are the kernel's doing: the supervisor only packs them.
                self.count_bad(str(error))
                continue
            if self._probe_id is not None and message.parent_id == self._probe_id:
                (self._probe_iopub if message.channel == "iopub" else self._probe_reply).set()
            elif message.parent_id in self._questions:
                self._answered(message.parent_id, message)
            else:
                yield message

    def _answered(self, msg_id: str, message: RawMessage) -> None:
        future = self._questions[msg_id]
        if message.channel != "control" or future.done():
            return
        try:
            future.set_result(message.content())
        except BadMessage as error:
            self.count_bad(str(error))

    async def ask(self, msg_type: str, content: dict[str, Any]) -> dict[str, Any]:
        """A request on the control channel, which answers while a cell runs; the content of the reply. The caller sets a deadline."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        msg_id = self.send_now(msg_type, content)
        self._questions[msg_id] = future
        try:
            return await future
        finally:
            del self._questions[msg_id]

    async def largest_variables(self) -> list[dict[str, Any]]:
        """`name`, `type` and `size` (bytes) of the largest variables, as far as the launcher can tell without running their code."""
        found = (await self.ask("cellgate_variables_request", {"most": 5})).get("variables")
        rows = found if isinstance(found, list) else []
        return [
            {"name": str(row.get("name", ""))[:100], "type": str(row.get("type", ""))[:100], "size": row["size"]}
            for row in rows[:5]
            if isinstance(row, dict) and isinstance(row.get("size"), int)
        ]

    def process_started(self, pid: object) -> None:
        """The supervisor has started the process. What was told of an end before may be the end of the one before it."""
        self.pid, early = pid, self._early
        self._early = None
        for event in early or []:
            self.process_ended(event)

    def process_ended(self, event: dict[str, Any]) -> bool:
        """Takes a `kernel_exit` event; False when it is about another process, or when that is not known yet."""
        if self._early is not None:
            self._early = [*self._early, event][-4:]
            return False
        pid = event.get("pid")
        if isinstance(pid, int) and isinstance(self.pid, int) and pid != self.pid:
            return False
        self.exit_info = event
        self._exited.set()
        return True

    async def first_answer(self) -> bool:
        """Proves both directions, a reply on shell and a message on iopub; False when the process ended before that.

        iopub is a subscription that takes effect at some time after the socket is connected, so the question is repeated until
        its answer is seen there too: from then on nothing is missed.
        """
        async with anyio.create_task_group() as race:
            race.start_soon(self._watch_exit, race.cancel_scope)
            while not self._probe_iopub.is_set():
                self._probe_reply = anyio.Event()
                self._probe_id = self.send(Channel.SHELL, "kernel_info_request", {})
                await self._probe_reply.wait()
                with anyio.move_on_after(_IOPUB_PATIENCE):
                    await self._probe_iopub.wait()
            race.cancel_scope.cancel()
        return self.exit_info is None

    async def _watch_exit(self, scope: anyio.CancelScope) -> None:
        await self._exited.wait()
        scope.cancel()

    def _verify(self, message: RawMessage) -> None:
        expected = self._session.sign(list(message.signed))
        if not hmac.compare_digest(expected, message.signature):
            raise BadMessage("wrong signature")

    def count_bad(self, reason: str) -> None:
        self.bad_messages += 1
        if self.bad_messages & (self.bad_messages - 1) == 0:
            # At powers of two: a flood must not become a flood of log lines.
            log.warning("bad_kernel_message", reason=reason, count=self.bad_messages)
