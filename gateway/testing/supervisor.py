"""A supervisor that lives in the gateway's own event loop: the real frames over a real socket, the rest from a script.

It keeps the promises that the real one keeps: dials again when the stream breaks or its greeting is not answered, sends again what
was not acknowledged, drops what came twice, refuses a gateway that another has replaced, ends itself when its lifetime or the time
of silence is over. It leaves no output out, whatever `overflow` says. Everything is a callback of the loop, so there is no
task to be lost.
"""

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Decoder, Frame, Kind
from gateway.testing.files import MemoryFiles, Reading, Refused, Writing
from gateway.testing.kernel import Die, KernelScript, ScriptedKernel

EXIT_LIFETIME, EXIT_SILENCE = 3, 4
_REDIAL = 0.01
_HANDSHAKE = 5.0
_FIRST_CONTACT = 60.0
_MAX_FRAME = 64 * 1024 * 1024


class ScriptedSupervisor:
    """The inside of one sandbox. `address` is the Unix socket to dial; `on_exit` gets the exit code."""

    def __init__(self, script: KernelScript, address: str, on_exit: Callable[[int], None]) -> None:
        self.kernel: ScriptedKernel | None = None
        self.files = MemoryFiles()
        self.redials = True
        """False: a stream that broke stays broken."""
        self.env: dict[str, str] = {}
        self.greetings = 0
        """How often a gateway has welcomed it."""
        self.refusals = 0
        """How often it has refused a gateway's welcome."""
        self.version = frames.VERSION
        """The highest that it speaks; 1 makes it a supervisor of the first release."""
        self.epoch = 0
        """The highest of the gateways that have welcomed it."""
        self._script, self._address, self._on_exit = script, address, on_exit
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._decoder = Decoder(_MAX_FRAME)
        self._out = bytearray()
        self._secret = ""
        self._welcomed = self._frozen = self._ended = False
        self._sent = self._received = self._pid = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._reads: dict[int, Reading] = {}
        self._writes: dict[int, Writing] = {}
        self._begun = self._loop.time()
        self._silence = _FIRST_CONTACT
        self._be_patient()

    # what a test does to it

    def drop(self) -> None:
        """The stream breaks; it dials again if it may."""
        self._hang_up()
        if self.redials and not self._ended:
            self._at("redial", _REDIAL, self.dial)

    def freeze(self) -> None:
        """Like a paused box: nothing is read, nothing is written, until `thaw`."""
        self._frozen = True
        self._timers["silence"].cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)

    def thaw(self) -> None:
        self._frozen = False
        self._be_patient()
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._on_readable)
        self._flush()

    def send_raw(self, data: bytes) -> None:
        """Bytes on the stream as they are, right or wrong."""
        self._out += data
        self._flush()

    def event(self, value: dict[str, Any]) -> None:
        self._number(lambda seq: frames.pack_json(Kind.EVENT, value, seq))

    def die(self, how: Die) -> None:
        """The kernel process ends."""
        if self.kernel is None:
            return
        self._stop_kernel()
        facts = {"memory_peak": None, "memory_limit": None, "oom_kills": 0, **how.facts}
        self.event({"event": "kernel_exit", "pid": self._pid, "code": how.code, "signal": how.signal, "log": how.log, **facts})

    def end(self, code: int) -> None:
        """The first process of the box ends."""
        if self._ended:
            return
        self._ended = True
        self._stop_kernel()
        for timer in self._timers.values():
            timer.cancel()
        self._hang_up()
        self._on_exit(code)

    # stream

    def dial(self) -> None:
        if self._ended or self._socket is not None:
            return
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.setblocking(False)
        try:
            stream.connect(self._address)
        except OSError:
            stream.close()
            self._at("redial", _REDIAL, self.dial)
            return
        self._socket = stream
        self._decoder = Decoder(_MAX_FRAME)
        self._out += frames.pack_json(Kind.HELLO, self._greeting())
        if self._secret:
            # As the real one: before it has one, it must not hang up on a gateway that may have given it away already.
            self._at("handshake", _HANDSHAKE, self._give_up_waiting)
        if not self._frozen:
            self._loop.add_reader(stream, self._on_readable)
        self._flush()

    def _greeting(self) -> dict[str, Any]:
        kernel = None if self.kernel is None else {"pid": self._pid}
        hello = {"version": self.version, "secret": self._secret, "received": self._received, "kernel": kernel}
        return hello if self.version == 1 else {**hello, "minimum": frames.MINIMUM_VERSION, "epoch": self.epoch}

    def _give_up_waiting(self) -> None:
        if self._socket is not None and not self._welcomed and not self._frozen:
            self.drop()

    def _hang_up(self) -> None:
        stream, self._socket = self._socket, None
        if stream is not None:
            self._loop.remove_reader(stream)
            self._loop.remove_writer(stream)
            stream.close()
        self._welcomed = False
        self._out.clear()
        self._reads.clear()
        self._writes.clear()

    def _on_readable(self) -> None:
        stream = self._socket
        assert stream is not None
        try:
            data = stream.recv(256 * 1024)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop()
            return
        try:
            for frame in self._decoder.feed(data):
                if self._socket is stream:
                    self._take(frame)
        except frames.FrameError:
            self.drop()

    def _flush(self) -> None:
        stream = self._socket
        if stream is None or self._frozen:
            return
        try:
            while self._out:
                del self._out[: stream.send(self._out)]
        except BlockingIOError:
            self._loop.add_writer(stream, self._flush)
            return
        except OSError:
            self.drop()
            return
        self._loop.remove_writer(stream)

    def _send(self, frame: bytes) -> None:
        if self._socket is not None:
            self.send_raw(frame)

    def _number(self, make: Callable[[int], bytes]) -> None:
        """A frame that must not be lost: kept until it is acknowledged."""
        self._sent += 1
        frame = make(self._sent)
        self._kept.append((self._sent, frame))
        if self._welcomed:
            self._send(frame)

    def _at(self, name: str, delay: float, action: Callable[[], None]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.call_later(delay, action)

    # frames

    def _take(self, frame: Frame) -> None:
        self._be_patient()
        if frame.kind is Kind.WELCOME:
            self._welcome(frames.unpack_json(frame.payload))
        elif frame.kind is Kind.MESSAGE:
            self._pass_on(frame)
        elif frame.kind is Kind.ACK:
            self._acknowledge(frame.seq)
        elif frame.kind is Kind.PING:
            self._send(frames.pack(Kind.PONG))
        elif frame.kind is Kind.COMMAND:
            self._command(frames.unpack_json(frame.payload))
        else:
            self._stream(frame)

    def _pass_on(self, frame: Frame) -> None:
        """A message to the kernel: each number once, and those without one always (which the first release did not know)."""
        wanted = frame.seq > self._received or (frame.seq == 0 and self.version > 1)
        self._received = max(self._received, frame.seq)
        if wanted and self.kernel is not None:
            self.kernel.take(*frames.unpack_message(frame.payload, 1 << 12))
        if frame.seq:
            self._send(frames.pack(Kind.ACK, seq=self._received))

    def _welcome(self, welcome: dict[str, Any]) -> None:
        version, epoch = welcome.get("version", frames.MINIMUM_VERSION), welcome.get("epoch", 0)
        if not frames.MINIMUM_VERSION <= version <= self.version or epoch < self.epoch:
            self.refusals += 1
            self.drop()
            return
        self.epoch = epoch
        self._secret = self._secret or welcome["secret"]
        self._silence = float(welcome["silence"])
        self._acknowledge(welcome["received"])
        self._welcomed = True
        self.greetings += 1
        self._be_patient()
        self._live_for(float(welcome["lifetime"]))
        for _, frame in list(self._kept):
            self._send(frame)

    def _be_patient(self) -> None:
        """The time of silence begins anew."""
        if not self._ended:
            self._at("silence", self._silence, lambda: self.end(EXIT_SILENCE))

    def _live_for(self, lifetime: float) -> None:
        """Seconds from its beginning."""
        left = self._begun + lifetime - self._loop.time()
        self._at("lifetime", max(0.0, left), lambda: self.end(EXIT_LIFETIME))

    def _acknowledge(self, seq: int) -> None:
        while self._kept and self._kept[0][0] <= seq:
            self._kept.popleft()

    # commands

    def _command(self, command: dict[str, Any]) -> None:
        try:
            answer = self._perform(command)
        except Refused as refusal:
            answer = {"error": {"code": refusal.code, "message": str(refusal)}}
        if answer is not None:
            self._reply(command["id"], answer)
        if command["op"] == "end":
            self.end(0)

    def _reply(self, number: int, answer: dict[str, Any]) -> None:
        self._send(frames.pack_json(Kind.REPLY, {"id": number, **answer}))

    def _perform(self, command: dict[str, Any]) -> dict[str, Any] | None:
        match command["op"]:
            case "start":
                return {"result": self._start(command)}
            case "interrupt":
                if self.kernel is not None:
                    self.kernel.interrupt()
                return {"result": {}}
            case "kill":
                if self.kernel is not None and self._script.obeys_kill:
                    self._loop.call_soon(self.die, Die(signal="SIGKILL"))
                return {"result": {}}
            case "end":
                return {"result": {}}
            case "memory":
                return {"result": dict.fromkeys(("memory_used", "memory_peak", "memory_limit", "oom_kills"))}
            case "log":
                return {"result": {"log": self._script.log if self.kernel is not None else ""}}
            case "extend":
                self._live_for(float(command["lifetime"]))
                return {"result": {}}
            case "list" | "stat" | "delete" as op:
                return {"result": getattr(self.files, op)(command["path"])}
            case "read":
                data = self.files.read(command["path"])
                self._reply(command["id"], {"result": {"size": len(data)}})
                self._reads[command["stream"]] = Reading(data)
                self._pump(command["stream"])
                return None
            case "write":
                self._writes[command["stream"]] = Writing(command["id"], self.files.check_write(command["path"]))
                return None
            case unknown:
                raise Refused("unknown_operation", f"a scripted supervisor knows no {unknown!r}")

    def _start(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._script.refuses_start:
            raise Refused("start_failed", self._script.refuses_start)
        self._stop_kernel()
        self.env = command["env"]
        self.kernel = ScriptedKernel(self._script, command["key"], self._message, self._oversize, self.die)
        if self._script.start is not None:
            self._loop.call_soon(self.die, self._script.start)
        self._pid += 1
        return {"pid": self._pid, "interrupt_mode": self._script.interrupt_mode}

    def _stop_kernel(self) -> None:
        if self.kernel is not None:
            self.kernel.stop()
            self.kernel = None

    def _message(self, channel: Channel, parts: list[bytes]) -> None:
        self._number(lambda seq: frames.pack_message(channel, parts, seq))

    def _oversize(self, size: int, parent: dict[str, Any]) -> None:
        value = {"channel": int(Channel.IOPUB), "size": size, "header": "{}", "parent": json.dumps(parent)}
        self._number(lambda seq: frames.pack_json(Kind.OVERSIZE, value, seq))

    # file streams

    def _stream(self, frame: Frame) -> None:
        number = int.from_bytes(frame.payload[:4], "big")
        if frame.kind is Kind.CREDIT and number in self._reads:
            self._reads[number].credit += frames.unpack_credit(frame.payload)[1]
            self._pump(number)
        elif frame.kind is Kind.DATA_END and number in self._reads:
            del self._reads[number]
        elif number in self._writes:
            self._write(number, frame)

    def _pump(self, number: int) -> None:
        stream = self._reads[number]
        while stream.credit > 0 and (chunk := stream.take()):
            self._send(frames.pack_data(number, chunk))
        if not stream.rest:
            del self._reads[number]
            self._send(frames.pack_data_end(number, {}))

    def _write(self, number: int, frame: Frame) -> None:
        stream = self._writes[number]
        if frame.kind is Kind.DATA:
            chunk = frames.unpack_data(frame.payload)[1]
            stream.data += chunk
            if self.files.has_room(len(stream.data)):
                self._send(frames.pack_credit(number, len(chunk)))
            else:
                del self._writes[number]
                self._reply(stream.command, {"error": {"code": "sandbox_disk_full", "message": "No space left on device"}})
        elif frame.kind is Kind.DATA_END:
            del self._writes[number]
            if not frames.unpack_json(frame.payload[4:]).get("error"):
                self.files.contents[stream.name] = bytes(stream.data)
                self._reply(stream.command, {"result": {"size": len(stream.data)}})
