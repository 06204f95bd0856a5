"""A kernel that plays a script: real signed messages on all channels, and nothing that computes.

What a cell does is a list of steps, or a function that makes a generator of them. A generator can catch `KeyboardInterrupt`, which
is thrown into it by an interrupt, and gets the answer to an `Ask` as the value of its ``yield``; so a deaf cell is one that catches
and goes on. Messages follow https://jupyter-client.readthedocs.io/en/stable/messaging.html.
"""

import asyncio
import hashlib
import hmac
import json
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from gateway.supervisor.frames import Channel

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Emit:
    """An IOPub message of the running cell, as a kernel would send it."""

    msg_type: str
    content: dict[str, Any]
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Sleep:
    """Seconds until the next step; `math.inf` waits for an interrupt."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ask:
    """`input(prompt)`: the next step comes when it is answered."""

    prompt: str
    password: bool = False


@dataclass(frozen=True, slots=True)
class Raise:
    """The cell ends with this exception."""

    ename: str
    evalue: str = ""


@dataclass(frozen=True, slots=True)
class Die:
    """The kernel process ends, by itself or by a signal; `facts` are further members of its exit event."""

    code: int | None = None
    signal: str | None = None
    log: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Oversize:
    """An output of so many bytes, which the supervisor leaves out because it is above the frame limit."""

    size: int


Step = Emit | Sleep | Ask | Raise | Die | Oversize
Steps = Generator[Step, str | None, None]
Cell = Iterable[Step] | Callable[[], Steps]


def printed(text: str, name: str = "stdout") -> Emit:
    return Emit("stream", {"name": name, "text": text})


def result(text: str, execution_count: int = 1) -> Emit:
    return Emit("execute_result", {"data": {"text/plain": text}, "metadata": {}, "execution_count": execution_count})


def display(data: dict[str, Any], display_id: str | None = None, update: bool = False) -> Emit:
    transient = {} if display_id is None else {"display_id": display_id}
    kind = "update_display_data" if update else "display_data"
    return Emit(kind, {"data": data, "metadata": {}, "transient": transient})


@dataclass
class KernelScript:
    """How kernels behave. May be changed while they run; it is read at each request."""

    cells: Mapping[str, Cell] | Callable[[str], Cell] = field(default_factory=dict)
    start: Die | None = None
    """Set: the process ends so, right after its start."""
    dies_after_info: Die | None = None
    """Set: the process answers its first question, and ends so in the same breath."""
    refuses_start: str = ""
    """Set: the supervisor can't start the process, for this reason."""
    answers_info: bool = True
    """False: a process that lives and never answers."""
    info_delay: float = 0.0
    """Seconds until it answers the first question."""
    idle_first: bool = False
    """True: idle comes before the reply, which the protocol allows."""
    log: str = ""
    """What the process has written outside of its channels."""
    interrupt_mode: str = "signal"
    obeys_kill: bool = True
    """False: killing the process changes nothing, as with a supervisor that is stuck."""

    def steps(self, code: str) -> Steps:
        cell = self.cells(code) if callable(self.cells) else self.cells.get(code, ())
        return cell() if callable(cell) else _each(cell)


def _each(steps: Iterable[Step]) -> Steps:
    # A generator, since a plain iterator can't be sent the answer to an Ask.
    yield from (step for step in steps)


class ScriptedKernel:
    """One run of a kernel process. `send` takes its messages, `leave_out` a message above the limit, `die` its end."""

    def __init__(
        self,
        script: KernelScript,
        key: str,
        send: Callable[[Channel, list[bytes]], None],
        leave_out: Callable[[int, Message], None],
        die: Callable[[Die], None],
    ) -> None:
        self.requests: list[Message] = []
        """Headers of the execute_requests so far; for late output in their name."""
        self.codes: list[str] = []
        self.answers: list[str] = []
        self.interrupts = 0
        self._script, self._key = script, key.encode()
        self._send, self._leave_out, self._die = send, leave_out, die
        self._session = uuid4().hex
        self._queue: deque[tuple[Message, Message]] = deque()
        self._steps: Steps | None = None
        self._parent: Message = {}
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = False

    def take(self, channel: Channel, parts: list[bytes]) -> None:
        """A request of the gateway: ``[delimiter, signature, header, parent, metadata, content]``."""
        header, content = json.loads(parts[2]), json.loads(parts[5])
        kind = header["msg_type"]
        if kind == "kernel_info_request":
            self._timer = asyncio.get_running_loop().call_later(self._script.info_delay, self._introduce, channel, header)
        elif kind == "execute_request":
            self._queue.append((header, content))
            self._begin()
        elif kind == "input_reply" and self._waiting:
            self.answers.append(content["value"])
            self._advance(content["value"])
        elif kind == "interrupt_request":
            self.interrupt()
            self.say(channel, "interrupt_reply", {"status": "ok"}, header)

    def _introduce(self, channel: Channel, header: Message) -> None:
        if not self._script.answers_info:
            return
        self.publish("status", {"execution_state": "busy"}, header)
        self.say(channel, "kernel_info_reply", {"status": "ok", "protocol_version": "5.4"}, header)
        self.publish("status", {"execution_state": "idle"}, header)
        if self._script.dies_after_info is not None:
            self._die(self._script.dies_after_info)

    def interrupt(self) -> None:
        """SIGINT: breaks off the step that waits, if one does."""
        self.interrupts += 1
        if self._steps is not None and self._waiting:
            self._advance(None, KeyboardInterrupt())

    def stop(self) -> None:
        """The process is gone; nothing is said any more."""
        self._forget_timer()
        self._queue.clear()
        self._steps = None

    def publish(self, msg_type: str, content: Message, parent: Message, buffers: tuple[bytes, ...] = ()) -> None:
        self.say(Channel.IOPUB, msg_type, content, parent, buffers)

    def say(self, channel: Channel, msg_type: str, content: Message, parent: Message, buffers: tuple[bytes, ...] = ()) -> None:
        self._send(channel, self.message(msg_type, content, parent, buffers))

    def message(self, msg_type: str, content: Message, parent: Message, buffers: tuple[bytes, ...] = ()) -> list[bytes]:
        """The signed parts of a message."""
        header = {
            "msg_id": uuid4().hex,
            "msg_type": msg_type,
            "session": self._session,
            "username": "kernel",
            "date": datetime.now(UTC).isoformat(),
            "version": "5.4",
        }
        signed = [json.dumps(value).encode() for value in (header, parent, {}, content)]
        signature = hmac.new(self._key, b"".join(signed), hashlib.sha256).hexdigest().encode()
        return [b"<IDS|MSG>", signature, *signed, *buffers]

    # one cell at a time

    def _begin(self) -> None:
        if self._steps is not None or not self._queue:
            return
        self._parent, content = self._queue.popleft()
        self.requests.append(self._parent)
        self.codes.append(content["code"])
        self.publish("status", {"execution_state": "busy"}, self._parent)
        if not content["silent"]:
            self.publish("execute_input", {"code": content["code"], "execution_count": len(self.codes)}, self._parent)
        self._steps = self._script.steps(content["code"])
        self._advance(None)

    def _advance(self, answer: str | None, interrupt: KeyboardInterrupt | None = None) -> None:
        """Takes steps until one has to wait or the cell has ended."""
        self._forget_timer()
        steps = self._steps
        while steps is not None and self._steps is steps and not self._waiting:
            try:
                step = steps.throw(interrupt) if interrupt is not None else steps.send(answer)
            except StopIteration:
                self._finish({"status": "ok", "execution_count": len(self.codes), "user_expressions": {}, "payload": []})
            except KeyboardInterrupt:
                self._fail(Raise("KeyboardInterrupt"))
            else:
                self._take_step(step)
            answer = interrupt = None

    def _take_step(self, step: Step) -> None:
        if isinstance(step, Emit):
            self.publish(step.msg_type, step.content, self._parent, step.buffers)
        elif isinstance(step, Sleep):
            self._waiting = True
            if step.seconds < math.inf:
                self._timer = asyncio.get_running_loop().call_later(step.seconds, self._advance, None)
        elif isinstance(step, Ask):
            self._waiting = True
            self.say(Channel.STDIN, "input_request", {"prompt": step.prompt, "password": step.password}, self._parent)
        elif isinstance(step, Raise):
            self._fail(step)
        elif isinstance(step, Oversize):
            self._leave_out(step.size, self._parent)
        else:
            self._die(step)

    def _fail(self, error: Raise) -> None:
        content = {"ename": error.ename, "evalue": error.evalue, "traceback": [f"{error.ename}: {error.evalue}"]}
        self.publish("error", content, self._parent)
        self._finish({"status": "error", "execution_count": len(self.codes), **content})

    def _finish(self, reply: Message) -> None:
        parent, self._steps = self._parent, None
        if self._script.idle_first:
            self.publish("status", {"execution_state": "idle"}, parent)
        self.say(Channel.SHELL, "execute_reply", reply, parent)
        if not self._script.idle_first:
            self.publish("status", {"execution_state": "idle"}, parent)
        self._begin()

    def _forget_timer(self) -> None:
        self._waiting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
