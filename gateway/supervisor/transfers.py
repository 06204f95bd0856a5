"""File streams under way: each one is a small state machine that the relay feeds, never a blocking loop.

Out (`FileOut`, `TarOut`): DATA frames as far as the gateway's credit goes, then DATA_END. In (`FileIn`, `TarIn`): each
DATA is written and its size granted back as CREDIT; at DATA_END the command that opened the stream gets its REPLY.
"""

import contextlib
import os
import subprocess
from collections.abc import Callable
from typing import Any, Protocol

from . import frames
from .files import FileError, Upload, translated

Send = Callable[[bytes], None]
Reply = Callable[[dict[str, Any]], None]


class Transfer(Protocol):
    """What the relay needs to know of a stream."""

    done: bool

    def grant(self, size: int) -> None: ...
    def take(self, data: bytes) -> None: ...
    def end(self, value: dict[str, Any]) -> None: ...
    def pump(self) -> bool:
        """Moves what can be moved now, without blocking; True when there may be more at once."""

    def abort(self) -> None: ...


class _Base:
    def __init__(self, stream: int, send: Send) -> None:
        self.stream, self.send, self.done = stream, send, False

    def grant(self, size: int) -> None:
        """Streams in need no credit from the gateway."""

    def take(self, data: bytes) -> None:
        """Streams out expect no data."""

    def end(self, value: dict[str, Any]) -> None:
        """The gateway wants no more of a stream out."""
        self.abort()

    def abort(self) -> None:
        self.done = True

    def pump(self) -> bool:
        """Nothing to move unless a subclass says so."""
        return False

    def _finish(self, error: FileError | None = None) -> None:
        value = {"error": {"code": error.code, "message": str(error)}} if error else {}
        self.send(frames.pack_data_end(self.stream, value))
        self.abort()


class FileOut(_Base):
    def __init__(self, stream: int, send: Send, descriptor: int) -> None:
        super().__init__(stream, send)
        self._file, self._credit = descriptor, frames.WINDOW

    def grant(self, size: int) -> None:
        self._credit += size

    def pump(self) -> bool:
        if self.done or self._credit <= 0:
            return False
        try:
            with translated("the file"):
                data = os.read(self._file, min(frames.CHUNK, self._credit))
        except FileError as error:
            self._finish(error)
            return False
        if data:
            self._credit -= len(data)
            self.send(frames.pack_data(self.stream, data))
        else:
            self._finish()
        return bool(data)

    def abort(self) -> None:
        if not self.done:
            os.close(self._file)
        super().abort()


class _Tar(_Base):
    """A stream through a tar process."""

    def __init__(self, stream: int, send: Send, process: "subprocess.Popen[bytes]", pipe: Any) -> None:
        super().__init__(stream, send)
        self._process = process
        self._pipe, self._complaints = _descriptor(pipe), _descriptor(process.stderr)
        self._said = b""

    def _listen(self) -> None:
        """Takes what tar complains of: nobody reading it, tar would wait for ever once the pipe is full."""
        with contextlib.suppress(BlockingIOError):
            self._said = (self._said + os.read(self._complaints, 65536))[:2000]

    def _error(self) -> FileError | None:
        """What the ended process means."""
        self._listen()
        if self._process.returncode == 0:
            return None
        text = self._said.decode("utf-8", "replace").strip()
        # GNU tar calls a write that was cut short by its own name.
        full = "No space left" in text or "Wrote only" in text
        code = "sandbox_disk_full" if full else "malformed_archive"
        return FileError(code, text or f"tar ended with {self._process.returncode}")

    def abort(self) -> None:
        _close(self._process)
        super().abort()


class TarOut(_Tar):
    def __init__(self, stream: int, send: Send, process: "subprocess.Popen[bytes]") -> None:
        super().__init__(stream, send, process, process.stdout)
        self._credit = frames.WINDOW

    def grant(self, size: int) -> None:
        self._credit += size

    def pump(self) -> bool:
        if self.done or self._credit <= 0:
            return False
        self._listen()
        try:
            data = os.read(self._pipe, min(frames.CHUNK, self._credit))
        except BlockingIOError:
            return False
        if data:
            self._credit -= len(data)
            self.send(frames.pack_data(self.stream, data))
        elif self._process.poll() is not None:
            self._finish(self._error())
        return bool(data)


class FileIn(_Base):
    def __init__(self, stream: int, send: Send, upload: Upload, reply: Reply) -> None:
        super().__init__(stream, send)
        self._upload, self._reply = upload, reply

    def take(self, data: bytes) -> None:
        if self.done:
            return
        try:
            self._upload.write(data)
        except FileError as error:
            self._fail(error)
        else:
            self.send(frames.pack_credit(self.stream, len(data)))

    def end(self, value: dict[str, Any]) -> None:
        if self.done or value.get("error"):
            self.abort()
            return
        try:
            self._reply({"result": self._upload.finish()})
            self.done = True
        except FileError as error:
            self._fail(error)

    def _fail(self, error: FileError) -> None:
        self._reply({"error": {"code": error.code, "message": str(error)}})
        self.abort()

    def abort(self) -> None:
        if not self.done:
            self._upload.abort()
        super().abort()


class TarIn(_Tar):
    def __init__(self, stream: int, send: Send, process: "subprocess.Popen[bytes]", reply: Reply) -> None:
        super().__init__(stream, send, process, process.stdin)
        self._reply = reply
        self._rest = b""
        self._ending = False

    def take(self, data: bytes) -> None:
        if self._process.stdin is None or self._process.stdin.closed:
            # tar wants no more; the pipe's number may be another file's by now.
            return
        self._rest += data
        self.pump()

    def end(self, value: dict[str, Any]) -> None:
        if value.get("error"):
            self.abort()
            return
        self._ending = True
        self.pump()

    def pump(self) -> bool:
        if self.done:
            return False
        self._listen()
        try:
            while self._rest:
                written = os.write(self._pipe, self._rest)
                self._rest = self._rest[written:]
                self.send(frames.pack_credit(self.stream, written))
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._rest, self._ending = b"", True
        if self._ending and self._process.stdin is not None:
            self._process.stdin.close()
            if self._process.poll() is not None:
                error = self._error()
                self._reply({"error": {"code": error.code, "message": str(error)}} if error else {"result": {}})
                self.abort()
        return False


def _descriptor(pipe: Any) -> int:
    descriptor: int = pipe.fileno()
    os.set_blocking(descriptor, False)
    return descriptor


def _close(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
