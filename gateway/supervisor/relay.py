"""The supervisor's loop: between the link, the kernel's sockets, its process, and the clock. One thread, nothing blocks.

It ends the box by ending itself (it is init's only child): when its lifetime is over, when no gateway has spoken to it for the
time of silence, or on SIGTERM. Time in which the box was frozen does not count as silence.
"""

import os
import signal
import time
from typing import Any

import zmq

from . import cgroup, frames
from .commands import Commands
from .frames import Channel, Frame, Kind
from .linkend import LinkEnd, LinkLost
from .overflow import Overflow, envelope
from .process import KernelProcess
from .watch import INTERVAL, Watch

EXIT_LIFETIME, EXIT_SILENCE, EXIT_LINK = 3, 4, 5
"""Exit codes that tell the engine's record of the box why it ended."""

_TICK = 2.0
"""Longest sleep, in seconds; a longer gap between two rounds means that the box was frozen."""
_FIRST_CONTACT = 60.0
_REDIAL, _REDIAL_LATER, _LATER = 0.1, 0.5, 10.0
"""Seconds between two attempts to call a gateway, and those once it has been away for the last of them: it may be for days, and
each costs CPU that is the cell's. A gateway waits for much longer after its start."""
_HANDSHAKE = 5.0
"""A gateway that does not answer a greeting for so long is stopped, or about to end: the next call may reach another one."""
_ACK_DELAY = 0.05
"""What came from the gateway is acknowledged with the next frame that goes there, or after so many seconds."""
_BURST = 256
"""Messages taken from one socket before the others get their turn."""
_MAX_PARTS = 1 << 12
"""Parts of one message; widgets send some dozens."""
_EXIT_QUIET, _EXIT_PATIENCE = 0.03, 1.0
"""After the kernel's death: what is still on its way is read until it is quiet for so long, at most for so long."""


class Relay:
    def __init__(self, link: LinkEnd, work: str) -> None:
        self.link = link
        self.kernel: KernelProcess | None = None
        self.exit_code: int | None = None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.commands = Commands(self, work)
        self._poller = zmq.Poller()
        self._interest: dict[Any, int] = {}
        self._wakeup = self._catch_signals()
        self._started = time.monotonic()
        self._last_round = self._started
        self._silent = 0.0
        self._heard_at = self._started
        self._lifetime, self._silence = _FIRST_CONTACT * 10, _FIRST_CONTACT
        self._redial_at = 0.0
        self._lost_at = self._started
        self._unanswered = 0.0
        self._overflow = Overflow()
        self._exit: dict[str, Any] | None = None
        self._watch = self._new_watch()
        self._requests = 0
        self._sampled_at = self._started
        self._exit_since = self._exit_heard = 0.0

    def _catch_signals(self) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # A function, not SIG_IGN, which the kernel would inherit: many programs leave an ignored SIGINT ignored.
        signal.signal(signal.SIGINT, lambda *_: None)
        return reader

    def _on_sigterm(self, *_: object) -> None:
        self.exit_code = 0

    # the loop

    def run(self) -> int:
        """Until the box has to end; the exit code of the process."""
        while self.exit_code is None:
            if not self.link.connected:
                self._dial()
            self._update_interest()
            ready = dict(self._poller.poll(int(self._timeout() * 1000)))
            self._clock()
            try:
                self._serve(ready)
            except (LinkLost, frames.FrameError):
                self._lose_link()
        self.commands.abort_transfers()
        if self.kernel:
            self.kernel.kill()
        self.link.drain(1.0)
        return self.exit_code

    def _serve(self, ready: dict[Any, int]) -> None:
        link = self.link
        if self._wakeup in ready:
            os.read(self._wakeup, 4096)
        if link.in_fd in ready and ready[link.in_fd] & ~zmq.POLLOUT:
            for frame in link.read():
                self._silent = 0.0
                self._heard_at = self._last_round
                self._on_frame(frame)
        if self._overflow.pending and not link.overflowing:
            self._tell_gaps()
        kernel = self.kernel
        if kernel is not None:
            for socket, channel in list(kernel.channels.sockets.items()):
                if socket in ready:
                    self._relay(socket, channel)
            if kernel.output in ready and not kernel.read_output():
                self._forget(kernel.output)
            self._watch_exit(kernel)
            self._sample()
        self.commands.pump()
        if link.ack_due and (link.wants_to_write or self._last_round - self._heard_at > _ACK_DELAY):
            link.send(frames.pack(Kind.ACK, seq=link.received))
            link.ack_due = False
        if link.connected and link.wants_to_write:
            link.flush()
        if self._unanswered > _HANDSHAKE and not link.welcomed:
            raise LinkLost

    def _relay(self, socket: "zmq.Socket[bytes]", channel: Channel) -> None:
        """Kernel → gateway. Frames above the limit are reported, not sent; those for which there is no room may be left out."""
        link = self.link
        for _ in range(_BURST):
            if link.full:
                return
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._exit_heard = self._last_round
            if link.overflowing:
                gaps = self._overflow.take(channel, parts)
                if gaps is None:
                    continue
                self._tell(gaps)
            if channel is Channel.SHELL:
                # Before the reply, so that who waits for the reply has it.
                self.event({"event": "usage", **self._watch.usage()})
                self._requests = max(0, self._requests - 1)
            seq = link.next_seq()
            size = frames.message_size(parts)
            if size > link.max_frame or len(parts) > _MAX_PARTS:
                link.send_numbered(seq, _oversize(channel, parts, size, seq))
            else:
                link.send_numbered(seq, frames.pack_message(channel, parts, seq))

    def _on_frame(self, frame: Frame) -> None:
        kind, link = frame.kind, self.link
        if kind is Kind.MESSAGE:
            if frame.seq:
                if frame.seq <= link.received:
                    return
                link.received, link.ack_due = frame.seq, True
            channel, parts = frames.unpack_message(frame.payload, _MAX_PARTS)
            if channel is Channel.IOPUB:
                raise frames.FrameError("iopub goes one way")
            if self.kernel is not None and self._exit is None:
                self.kernel.channels.send(channel, parts)
                self._requests += channel is Channel.SHELL
        elif kind is Kind.ACK:
            link.acknowledge(frame.seq)
        elif kind is Kind.PING:
            link.send(frames.pack(Kind.PONG))
        elif kind is Kind.WELCOME:
            welcome = frames.unpack_json(frame.payload)
            try:
                lifetime, silence = float(welcome["lifetime"]), float(welcome["silence"])
                link.welcome(welcome)
                self._lifetime, self._silence = lifetime, silence
            except (KeyError, TypeError, ValueError):
                raise LinkLost from None
        else:
            self.commands.take(frame)

    def _sample(self) -> None:
        """Looks at the cgroup now and then while a request is in the kernel."""
        if (
            self.kernel is not None
            and self._exit is None
            and (self._requests or self._watch.pending)
            and self._last_round - self._sampled_at >= INTERVAL
        ):
            self._sampled_at = self._last_round
            self._watch.sample()

    # the kernel process

    def start_kernel(self, kernel: KernelProcess) -> None:
        self.end_kernel()
        self.kernel = kernel
        self._requests = 0
        self._watch = self._new_watch()
        kernel.channels.connect(self.context, kernel.extras.get("patient") is True)

    def end_kernel(self) -> None:
        """Kills what runs and forgets it without an event: the one who asked knows."""
        kernel = self.kernel
        if kernel is None:
            return
        kernel.kill()
        deadline = time.monotonic() + 5
        while self._exit is None and kernel.reap() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        self._tell_gaps()
        self._drop(kernel)

    def _watch_exit(self, kernel: KernelProcess) -> None:
        now = time.monotonic()
        if self._exit is None:
            self._exit = kernel.reap()
            self._exit_since = self._exit_heard = now
        if self._exit is None:
            return
        if self.link.full or not self._interest.keys() >= kernel.channels.sockets.keys():
            # Nothing is read at the moment: what waits in the sockets is the last that the process had to say.
            self._exit_since = self._exit_heard = now
        if now - self._exit_heard > _EXIT_QUIET or now - self._exit_since > _EXIT_PATIENCE:
            kernel.read_output()
            self._tell_gaps()
            self._watch.flush()
            self.event({"event": "kernel_exit", **self._exit, "log": kernel.log})
            kernel.kill()
            self._drop(kernel)

    def _drop(self, kernel: KernelProcess) -> None:
        self._forget(kernel.output)
        for socket in kernel.channels.sockets:
            self._forget(socket)
        kernel.close()
        self.kernel, self._exit = None, None

    def extend(self, lifetime: float) -> None:
        """The gateway has granted another lifetime, in seconds from the start of the box."""
        self._lifetime = lifetime

    def event(self, value: dict[str, Any]) -> int:
        """Tells the gateway, now or once there is one; the number of the frame."""
        seq = self.link.next_seq()
        self.link.send_numbered(seq, frames.pack_json(Kind.EVENT, value, seq))
        return seq

    def _tell(self, values: list[dict[str, Any]]) -> None:
        for value in values:
            self.event(value)

    def _tell_gaps(self) -> None:
        self._tell(self._overflow.flush())

    def _new_watch(self) -> Watch:
        return Watch(self.event, self.link.is_safe)

    def summary(self) -> dict[str, Any] | None:
        """What HELLO says about the kernel process."""
        return {"pid": self.kernel.pid, **cgroup.memory()} if self.kernel else None

    # link and clock

    def _dial(self) -> None:
        if time.monotonic() >= self._redial_at and not self.link.dial(self.summary):
            self._redial_at = time.monotonic() + self._redial_delay

    @property
    def _redial_delay(self) -> float:
        return _REDIAL if time.monotonic() - self._lost_at < _LATER else _REDIAL_LATER

    def _lose_link(self) -> None:
        self.commands.abort_transfers()
        if self.link.welcomed:
            self._lost_at = time.monotonic()
        self._unanswered = 0.0
        self._forget(self.link.in_fd)
        self._forget(self.link.out_fd)
        self.link.close()
        self._redial_at = time.monotonic() + self._redial_delay
        if self.link.path is None:
            self.exit_code = EXIT_LINK

    def _clock(self) -> None:
        now = time.monotonic()
        awake = min(now - self._last_round, _TICK)
        self._silent += awake
        # Without a secret it must not hang up: the gateway may have given one already, which it asks for from then on.
        waits = self.link.connected and not self.link.welcomed and self.link.path is not None and self.link.secret
        self._unanswered = self._unanswered + awake if waits else 0.0
        self._last_round = now
        if now - self._started > self._lifetime:
            self.exit_code = EXIT_LIFETIME
        elif self._silent > self._silence:
            self.exit_code = EXIT_SILENCE

    def _timeout(self) -> float:
        if self._exit is not None:
            return _EXIT_QUIET
        if not self.link.connected:
            return self._redial_delay
        longest = INTERVAL if self._requests or self._watch.pending else _TICK
        if self.link.ack_due:
            longest = _ACK_DELAY
        patience = self.commands.patience
        return longest if patience is None else min(patience, longest)

    # what to poll

    def _update_interest(self) -> None:
        wanted: dict[Any, int] = {self._wakeup: zmq.POLLIN}
        link, kernel = self.link, self.kernel
        if link.connected:
            wanted[link.in_fd] = zmq.POLLIN
            if link.wants_to_write:
                wanted[link.out_fd] = wanted.get(link.out_fd, 0) | zmq.POLLOUT
        if kernel is not None:
            wanted[kernel.output] = zmq.POLLIN
            if not link.full:
                wanted.update(dict.fromkeys(kernel.channels.sockets, zmq.POLLIN))
        for thing in self._interest.keys() - wanted.keys():
            self._forget(thing)
        for thing, flags in wanted.items():
            if self._interest.get(thing) != flags:
                self._poller.register(thing, flags)
                self._interest[thing] = flags

    def _forget(self, thing: Any) -> None:
        if self._interest.pop(thing, None) is not None:
            self._poller.unregister(thing)


def _oversize(channel: Channel, parts: list[bytes], size: int, seq: int) -> bytes:
    """What can be told about a message that is too large: which cell it belongs to, and its size."""
    header, parent = envelope(parts)
    value = {"channel": int(channel), "size": size, "header": _short(header), "parent": _short(parent)}
    return frames.pack_json(Kind.OVERSIZE, value, seq)


def _short(part: bytes) -> str:
    return part.decode("utf-8", "replace") if len(part) < 10_000 else ""
