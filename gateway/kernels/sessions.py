"""Sessions in Jupyter's sense: a client's name (a path) for a kernel, so that who opens a notebook again finds its variables.

A session ends with its kernel. Sessions outlive the gateway as kernels do, in one small file of the state directory. The rules are
those of https://github.com/jupyter-server/jupyter_server (services/sessions).
"""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

import anyio
import anyio.to_thread
import orjson
import structlog

from gateway.errors import GatewayError, InvalidRequest, KernelGone, KernelNotFound, LimitExceeded, SessionNotFound
from gateway.kernels.creates import Creates
from gateway.kernels.kernel import Kernel
from gateway.kernels.manager import KernelManager
from gateway.kernels.wishes import CreateRequest

log = structlog.get_logger()

MAX_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    path: str
    name: str
    type: str
    kernel_id: str


class Sessions:
    """`file` None keeps them in memory."""

    def __init__(self, manager: KernelManager, file: Path | None) -> None:
        self._manager, self._file = manager, file
        self._sessions = {session.id: session for session in _load(file)}
        self._opening = Creates()
        self._saving = anyio.Lock()

    def list(self) -> list[tuple[Session, Kernel]]:
        """Those whose kernel is there; the others are forgotten."""
        found = []
        for session in [*self._sessions.values()]:
            if kernel := self._kernel(session):
                found.append((session, kernel))
            else:
                self._sessions.pop(session.id, None)
        return found

    def get(self, session_id: str) -> tuple[Session, Kernel]:
        """Raises `SessionNotFound`, also when its kernel has ended."""
        session = self._sessions.get(session_id)
        kernel = self._kernel(session) if session else None
        if session is None or kernel is None:
            raise SessionNotFound(f"Session not found: session_id='{session_id[:64]}'")
        return session, kernel

    async def open(self, path: str, name: str, kind: str, create: CreateRequest) -> tuple[Session, Kernel]:
        """The session of this path, which there may be already; else with the kernel of `create.kernel_id`, which is started unless it
        runs. Raises what `KernelManager.create` raises."""

        async def make() -> str:
            if found := self._of_path(path):
                return found.id
            if len(self._sessions) >= MAX_SESSIONS and len(self.list()) >= MAX_SESSIONS:
                raise LimitExceeded(f"{MAX_SESSIONS} sessions are open, which is the limit.", limit=MAX_SESSIONS)
            kernel, _ = await self._manager.create(create)
            session = Session(str(uuid4()), path, name, kind, kernel.id)
            self._sessions[session.id] = session
            await self._save()
            return session.id

        session_id, waited = await self._opening.once(path, None, make)
        if not waited:
            self._opening.forget(path)
        return self.get(session_id)

    async def change(
        self, session_id: str, *, path: str | None, name: str | None, kind: str | None, kernel_id: str | None
    ) -> tuple[Session, Kernel]:
        """What is None stays. Another kernel takes the place of the one before, which ends. Raises `SessionNotFound`,
        `InvalidRequest` for a kernel that is not there."""
        before, _ = self.get(session_id)
        if kernel_id is not None:
            self._require(kernel_id)
        given = {"path": path, "name": name, "type": kind, "kernel_id": kernel_id}
        session = replace(before, **{field: value for field, value in given.items() if value is not None})
        self._sessions[session_id] = session
        await self._save()
        if session.kernel_id != before.kernel_id:
            await self._end(before.kernel_id)
        return self.get(session_id)

    async def close(self, session_id: str) -> None:
        """Ends it and its kernel; raises `SessionNotFound`, or `KernelGone` or `KernelNotFound` when the kernel has ended before."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise SessionNotFound(f"Session not found: session_id='{session_id[:64]}'")
        await self._save()
        await self._manager.delete(session.kernel_id)

    def _of_path(self, path: str) -> Session | None:
        """One whose kernel has lost its sandbox for good is none any more: nothing could be run in it."""
        for session, kernel in self.list():
            if session.path == path:
                if not kernel.gone:
                    return session
                self._sessions.pop(session.id, None)
        return None

    def _kernel(self, session: Session) -> Kernel | None:
        try:
            return self._manager.get(session.kernel_id)
        except (KernelGone, KernelNotFound):
            return None

    def _require(self, kernel_id: str) -> None:
        try:
            self._manager.get(kernel_id)
        except (KernelGone, KernelNotFound):
            raise InvalidRequest(f"No such kernel: {kernel_id[:64]}") from None

    async def _end(self, kernel_id: str) -> None:
        try:
            await self._manager.delete(kernel_id)
        except GatewayError as error:
            log.warning("kernel_not_ended", kernel_id=kernel_id, code=error.code)

    async def _save(self) -> None:
        if self._file is None:
            return
        async with self._saving:
            content = orjson.dumps([asdict(session) for session in self._sessions.values()])
            try:
                await anyio.to_thread.run_sync(_write, self._file, content)
            except OSError as error:
                # They are a convenience: what can't be kept is still there until the gateway ends.
                log.warning("sessions_not_saved", reason=error.strerror)


def _write(file: Path, content: bytes) -> None:
    """The file appears whole or not at all."""
    fresh = file.with_suffix(".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(content)
    fresh.replace(file)


def _load(file: Path | None) -> list[Session]:
    if file is None or not file.exists():
        return []
    try:
        return [Session(**{field: str(value) for field, value in item.items()}) for item in orjson.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError, AttributeError):
        log.warning("sessions_unreadable")
        return []
