"""stdout and stderr of the cells: when the reader is slow the cell waits; nothing is dropped, cut or reordered.

Four differences from ipykernel's stream, each found by losing output to it:

- Text that is not flushed piles up without bound while the reader stalls. Here a write that would leave more than
  `CHUNK` characters unsent waits for them to go out. So memory is bounded, and so is each message.
- A flush gives up after 10 s and says so in the cell's output, and returns before its text is sent. Here it waits until
  that is done; an interrupt still ends it.
- What subprocesses and C code write to the file descriptor is read by a thread whenever it gets to it: after a later
  `print`, or after the cell has ended. Here each write and each flush first takes what has already arrived.
- It is decoded in pieces of 1,000 bytes, which breaks characters. Here an incremental decoder does it.
"""

import codecs
import fcntl
import os
import select
import sys
import termios
import threading
from typing import Any

from ipykernel.iostream import OutStream

CHUNK = 1 << 18  # characters
NOTHING = bytes(4)


class PatientStream(OutStream):
    """A stream that sends everything, in order, at the speed of its reader."""

    flush_timeout = None  # type: ignore[assignment]  # for ever

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the base class, which already starts the thread that watches the descriptor.
        self._unsent = 0
        self._descriptor_lock = threading.Lock()
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        super().__init__(*args, **kwargs)

    def write(self, string: str) -> int:
        """Queue text to be sent; waits while `CHUNK` characters are still unsent."""
        if string != "\n":  # else nothing may come between a line of `print` and its end
            self._take_from_descriptor()
        if isinstance(string, str) and len(string) > CHUNK:
            for start in range(0, len(string), CHUNK):
                self.write(string[start : start + CHUNK])
            return len(string)
        super().write(string)
        self._unsent += len(string)
        if self._unsent >= CHUNK:
            self.flush()
        return len(string)

    def flush(self) -> None:
        """Send all that was written so far, by Python or past it, and wait until it is sent."""
        self._take_from_descriptor()
        sender = self.pub_thread
        if sender.thread is threading.current_thread() or not sender.thread.is_alive():
            super().flush()
            return
        sent = threading.Event()
        sender.schedule(self._flush)
        # `_flush` only queues what it sends, behind this: so the event is queued once more, behind that. Else a cell that
        # goes on into C code with the interpreter's lock would keep it from being sent.
        sender.schedule(lambda: sender.schedule(sent.set))
        sent.wait()

    def _rotate_buffers(self) -> Any:
        self._unsent = 0
        return super()._rotate_buffers()

    def _watch_pipe_fd(self) -> None:
        # Not echoed to the process's own stdout, as ipykernel does: nobody reads that one.
        assert self._fid is not None
        arrivals = select.poll()
        arrivals.register(self._fid, select.POLLIN)
        try:
            while arrivals.poll() and self._should_watch:
                self._take_from_descriptor()
                if self._unsent >= CHUNK:
                    super().flush()
        except (OSError, ValueError):  # closed meanwhile
            self._exc = sys.exc_info()

    def _take_from_descriptor(self) -> None:
        # A forked child has the descriptor but not the thread, and its output is not ours to take.
        if self._fid is None or not self._is_master_process():
            return
        # Nothing there, and nobody on the way with what was.
        if fcntl.ioctl(self._fid, termios.FIONREAD, NOTHING) == NOTHING and not self._descriptor_lock.locked():
            return
        with self._descriptor_lock:
            waiting = fcntl.ioctl(self._fid, termios.FIONREAD, NOTHING)
            if waiting != NOTHING:
                text = self._decode(os.read(self._fid, int.from_bytes(waiting, sys.byteorder)))
                self._unsent += len(text)
                super().write(text)
