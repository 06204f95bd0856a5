"""What the gateway may ask of a supervisor: a table of operations, each answered once.

A command is ``{"id", "op", ...}``; its reply ``{"id", "result": {...}}`` or ``{"id", "error": {"code", "message"}}``. Operations
that move files open a stream (see `transfers`) under the number that the gateway chose.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import cgroup, frames
from .files import FileError, WorkDirectory
from .frames import Frame, Kind
from .process import KernelProcess, StartError
from .transfers import FileIn, FileOut, TarIn, TarOut, Transfer

if TYPE_CHECKING:
    from .relay import Relay

Reply = Callable[[dict[str, Any]], None]


class Commands:
    def __init__(self, relay: "Relay", work: str) -> None:
        self._relay = relay
        self._work = WorkDirectory(work)
        self._transfers: dict[int, Transfer] = {}
        self._moved = False
        self._operations: dict[str, Callable[[dict[str, Any], Reply], dict[str, Any] | None]] = {
            "start": self._start,
            "interrupt": self._interrupt,
            "kill": self._kill,
            "end": self._end,
            "extend": self._extend,
            "memory": lambda _arguments, _reply: dict(cgroup.memory()),
            "log": lambda _arguments, _reply: {"log": self._relay.kernel.log if self._relay.kernel else ""},
            "list": lambda arguments, _reply: self._work.list(arguments["path"]),
            "stat": lambda arguments, _reply: self._work.stat(arguments["path"]),
            "delete": self._delete,
            "read": self._read,
            "write": self._write,
            "pack": self._pack,
            "unpack": self._unpack,
        }

    @property
    def patience(self) -> float | None:
        """Seconds that the loop may sleep for the sake of streams, which no descriptor announces; None without any."""
        if not self._transfers:
            return None
        return 0.0 if self._moved else 0.005

    def take(self, frame: Frame) -> None:
        """COMMAND, DATA, DATA_END or CREDIT."""
        if frame.kind is Kind.COMMAND:
            self._command(frames.unpack_json(frame.payload))
        elif frame.kind is Kind.DATA:
            stream, data = frames.unpack_data(frame.payload)
            if transfer := self._transfers.get(stream):
                transfer.take(data)
        elif frame.kind is Kind.DATA_END:
            stream, data = frames.unpack_data(frame.payload)
            if transfer := self._transfers.get(stream):
                transfer.end(frames.unpack_json(data))
        elif frame.kind is Kind.CREDIT:
            stream, size = frames.unpack_credit(frame.payload)
            if transfer := self._transfers.get(stream):
                transfer.grant(size)

    def pump(self) -> None:
        """Moves every stream one step, unless messages wait to be written."""
        self._moved = False
        for stream, transfer in list(self._transfers.items()):
            if not self._relay.link.backlog and transfer.pump():
                self._moved = True
            if transfer.done:
                del self._transfers[stream]

    def abort_transfers(self) -> None:
        for transfer in self._transfers.values():
            if not transfer.done:
                transfer.abort()
        self._transfers.clear()

    def _command(self, command: dict[str, Any]) -> None:
        number, op = command.get("id"), command.get("op")
        if not isinstance(number, int):
            raise frames.FrameError("a command without a number")

        def reply(value: dict[str, Any]) -> None:
            self._relay.link.send(frames.pack_json(Kind.REPLY, {"id": number, **value}))

        operation = self._operations.get(op) if isinstance(op, str) else None
        if operation is None:
            reply({"error": {"code": "unknown_operation", "message": f"this supervisor knows no {op!r}"}})
            return
        try:
            result = operation(command, reply)
        except FileError as error:
            reply({"error": {"code": error.code, "message": str(error)}})
        except StartError as error:
            reply({"error": {"code": "start_failed", "message": str(error)}})
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # Of another shape than this supervisor knows. It may refuse, but must not end: it holds somebody's variables.
            reply({"error": {"code": "invalid_command", "message": f"{type(error).__name__}: {error}"}})
        else:
            if result is not None:
                reply({"result": result})

    def _start(self, arguments: dict[str, Any], _reply: Reply) -> dict[str, Any]:
        self._relay.end_kernel()
        kernel = KernelProcess(arguments["kernelspec"], arguments["key"], arguments["env"], self._work.root)
        self._relay.start_kernel(kernel)
        return {
            "pid": kernel.pid,
            "interrupt_mode": kernel.interrupt_mode,
            "names_variables": kernel.extras.get("names_variables"),
        }

    def _interrupt(self, _arguments: dict[str, Any], _reply: Reply) -> dict[str, Any]:
        if self._relay.kernel is not None:
            self._relay.kernel.interrupt()
        return {}

    def _kill(self, _arguments: dict[str, Any], _reply: Reply) -> dict[str, Any]:
        """Kills the kernel process; its exit is told by the event, as any other."""
        if self._relay.kernel is not None:
            self._relay.kernel.kill()
        return {}

    def _end(self, _arguments: dict[str, Any], _reply: Reply) -> dict[str, Any]:
        self._relay.exit_code = 0
        return {}

    def _extend(self, arguments: dict[str, Any], _reply: Reply) -> dict[str, Any]:
        self._relay.extend(float(arguments["lifetime"]))
        return {}

    def _delete(self, arguments: dict[str, Any], _reply: Reply) -> dict[str, Any]:
        self._work.delete(arguments["path"])
        return {}

    def _read(self, arguments: dict[str, Any], _reply: Reply) -> dict[str, Any]:
        stream = self._new_stream(arguments)
        descriptor, size = self._work.open_to_read(arguments["path"])
        self._transfers[stream] = FileOut(stream, self._relay.link.send, descriptor)
        return {"size": size}

    def _write(self, arguments: dict[str, Any], reply: Reply) -> None:
        stream = self._new_stream(arguments)
        self._transfers[stream] = FileIn(stream, self._relay.link.send, self._work.create(arguments["path"]), reply)

    def _pack(self, arguments: dict[str, Any], _reply: Reply) -> dict[str, Any]:
        stream = self._new_stream(arguments)
        process = self._work.start_tar(arguments["path"], unpack=False)
        self._transfers[stream] = TarOut(stream, self._relay.link.send, process)
        return {}

    def _unpack(self, arguments: dict[str, Any], reply: Reply) -> None:
        stream = self._new_stream(arguments)
        process = self._work.start_tar(arguments["path"], unpack=True)
        self._transfers[stream] = TarIn(stream, self._relay.link.send, process, reply)

    def _new_stream(self, arguments: dict[str, Any]) -> int:
        stream = arguments["stream"]
        if not isinstance(stream, int) or not 0 <= stream < 1 << 32 or stream in self._transfers:
            raise ValueError(f"{stream!r} is no number for a new stream")
        return stream
