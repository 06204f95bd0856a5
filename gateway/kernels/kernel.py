"""One kernel: its state, its sandbox, and its life from the first start to the last word.

`Cells` knows what runs in it, `KernelClient` talks to the process, `Sandbox` is the box; this module ties them together and is the
only place that changes the state. All its tasks live in the task group of `run`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import anyio
import anyio.abc
import structlog

from gateway.errors import EngineUnavailable, GatewayError, KernelDead, KernelUnavailable, LinkClosed, StartFailed, StartTimeout
from gateway.kernels import causes, ladder, loss
from gateway.kernels.cells import Cells
from gateway.kernels.client import KernelClient
from gateway.kernels.execution import Cause, CellRequest, Execution
from gateway.kernels.log import EventLog, timestamp
from gateway.kernels.state import ACCEPTS_CELLS, KernelState, check
from gateway.protocol.events import Payload
from gateway.protocol.messages import BadMessage, decode_object
from gateway.sandboxes.base import Limits, Sandbox, SandboxEngine, SandboxSpec
from gateway.sandboxes.link import CommandFailed, Link
from gateway.settings import KernelSpecSettings, Settings
from gateway.supervisor import frames
from gateway.supervisor.frames import Channel, Frame, Kind

log = structlog.get_logger()

_LOG_BYTES = 8 * 1024 * 1024
"""Bytes of a kernel's own events (state changes, background output) that are kept."""


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What to start. Limits are within the spec's maximum already."""

    spec_name: str
    spec: KernelSpecSettings
    limits: Limits
    env: dict[str, str]
    label: str


class Kernel:
    def __init__(self, request: KernelRequest, settings: Settings, engine: SandboxEngine) -> None:
        self.id = str(uuid4())
        self.request = request
        self.state = KernelState.REQUESTED
        self.cause: Cause | None = None
        self.log = EventLog(None, keep_bytes=_LOG_BYTES)
        self.created_at = datetime.now(UTC)
        self.last_activity = timestamp()
        self.sandbox: Sandbox | None = None
        self.cells = Cells(self.id, settings.kernels, self._cells_changed, self._background)
        self._settings = settings
        self._engine = engine
        self._client: KernelClient | None = None
        self._interrupt_mode = "signal"
        self._closed = anyio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._changing = anyio.Lock()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._starting: anyio.CancelScope | None = None

    @property
    def alive(self) -> bool:
        return self.state in ACCEPTS_CELLS

    @property
    def gone(self) -> bool:
        """Dead for good: there is no sandbox any more in which it could be restarted."""
        return self.state is KernelState.DEAD and self.sandbox is None

    def forget(self) -> None:
        """Ends the tasks and readers of a kernel that is gone."""
        self.log.close()
        self._closed.set()

    @property
    def expires_at(self) -> datetime:
        return self.created_at + timedelta(seconds=self.request.spec.lifetime)

    def touch(self) -> None:
        """The one place that stamps activity: a client asked for something. What the kernel emits does not count."""
        self.last_activity = timestamp()

    # life

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Holds the kernel's tasks until it is closed. A fault here ends this kernel, not its neighbours."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                await self._closed.wait()
                tasks.cancel_scope.cancel()
        except Exception:
            log.exception("kernel_task_failed", kernel_id=self.id)
            self._die(causes.INTERNAL)

    async def start(self) -> None:
        """Makes the sandbox and waits until the kernel answers; raises `GatewayError`. The caller then stops what is there."""
        assert self._tasks is not None
        self._set(KernelState.STARTING)
        async with self._start_deadline():
            self.sandbox = sandbox = await self._engine.create(self._sandbox_spec(), self._make_link)
            self._tasks.start_soon(self._watch_link, sandbox)
            await self._wait_connected(sandbox)
            self._tasks.start_soon(sandbox.link.keep, self._on_silence)
            await self._launch(sandbox.link)

    @contextlib.asynccontextmanager
    async def _start_deadline(self) -> AsyncIterator[None]:
        """Bounds a start: by the spec's time, by the loss of the sandbox, by a delete that comes in between."""
        timeout = self.request.spec.start_timeout
        try:
            with anyio.fail_after(timeout) as scope:
                self._starting = scope
                yield
        except TimeoutError:
            text = f"The kernel did not answer within {timeout:g} s and was ended."
            raise StartTimeout(text, kernel_id=self.id, log=await self._process_log()) from None
        finally:
            self._starting = None
        if scope.cancelled_caught:
            reason = (self.cause or causes.DELETED)["message"]
            raise StartFailed(f"The start was broken off. {reason}", kernel_id=self.id)

    async def _process_log(self) -> str:
        """The last lines the process has written so far, if the sandbox still answers."""
        try:
            found = await self.sandbox.link.command("log", deadline=2.0) if self.sandbox else {}
        except (GatewayError, CommandFailed):
            return ""
        return str(found.get("log", ""))[-4000:]

    def _sandbox_spec(self) -> SandboxSpec:
        spec = self.request.spec
        return SandboxSpec(
            kernel_id=self.id,
            image=spec.image,
            limits=self.request.limits,
            work_size=spec.work_size,
            tmp_size=spec.tmp_size,
            shm_size=spec.shm_size,
        )

    def _make_link(self) -> Link:
        spec = self.request.spec
        return Link(self._settings.link, self._on_frames, spec.lifetime, spec.silence)

    async def _wait_connected(self, sandbox: Sandbox) -> None:
        while not sandbox.link.connected.is_set():
            with anyio.move_on_after(0.5):
                await sandbox.link.connected.wait()
                return
            if end := await sandbox.exit():
                raise StartFailed(f"The sandbox ended before its supervisor answered: {causes.from_sandbox(end)['message']}")

    async def _launch(self, link: Link) -> None:
        """Starts a kernel process and waits for its first answer; raises `StartFailed`."""
        self._client = client = KernelClient(link)
        self.cells.attach(None)
        env = {**self.request.spec.env, **self.request.env}
        try:
            started = await link.command("start", kernelspec=self.request.spec.kernelspec, key=client.key, env=env)
        except CommandFailed as failure:
            raise StartFailed(f"The kernel did not start: {failure}.", kernel_id=self.id) from None
        self._interrupt_mode = str(started.get("interrupt_mode"))
        if not await client.first_answer():
            cause = causes.from_process(client.exit_info or {})
            how = cause["signal"] or f"exit code {cause['exit_code']}"
            raise StartFailed(f"The kernel process ended before it answered ({how}).", kernel_id=self.id, log=cause["log"])
        self.cells.attach(client)
        self._set(KernelState.IDLE)

    async def stop(self, cause: Cause) -> None:
        """Ends everything and removes the sandbox; no error when that is done already. A start or restart gives way to it."""
        self._break_start()
        async with self._changing:
            if not self._closed.is_set():
                self.cause = self.cause or cause
                self._set(KernelState.STOPPING)
                self.cells.end_all("died", cause, KernelState.STOPPING)
            with anyio.CancelScope(shield=True):
                await self._remove_sandbox()
            self._set(KernelState.DEAD)
            self.log.close()
            self._closed.set()

    async def restart(self) -> None:
        """A new process in the same box: id and files stay, variables go."""
        if self._changing.locked():
            raise KernelUnavailable("The kernel is being restarted or stopped already.", kernel_id=self.id)
        async with self._changing:
            sandbox = self.sandbox
            if sandbox is None or not sandbox.link.connected.is_set():
                raise self._dead("Its sandbox is gone, so it can't be restarted.")
            self.touch()
            self._set(KernelState.RESTARTING)
            self.cells.end_all("died", causes.RESTARTED, KernelState.RESTARTING)
            self.cause = None
            await self._relaunch(sandbox)

    async def _relaunch(self, sandbox: Sandbox) -> None:
        try:
            async with self._start_deadline():
                await self._launch(sandbox.link)
        except GatewayError as error:
            self._die(causes.plain("restart_failed", error.detail))
            raise

    # cells

    def execute(self, request: CellRequest) -> Execution:
        """Queues a cell; raises `KernelDead`, `KernelUnavailable`, `QueueFull`."""
        self.require_alive()
        self.touch()
        return self.cells.submit(request)

    def require_alive(self) -> None:
        if self.state is KernelState.DEAD:
            raise self._dead("")
        if not self.alive:
            raise KernelUnavailable(f"The kernel is {self.state} at the moment; try again shortly.", kernel_id=self.id)

    async def interrupt(self, execution: Execution | None = None, reason: str = "client") -> Execution | None:
        """SIGINT, or interrupt_request where the kernelspec says so, for the running cell; None when none runs."""
        self.require_alive()
        self.touch()
        current = self.cells.current
        if current is None or (execution is not None and execution is not current):
            return None
        current.interrupted = True
        await self.signal_cell(current, "interrupt", reason)
        return current

    async def signal_cell(self, execution: Execution, step: ladder.Step, reason: str) -> None:
        """One interrupt, told as an event; no further cell enters the kernel until the signal is known to be delivered."""
        execution.last_step = step
        execution.tell(Payload("interrupt", {"step": step, "reason": reason}))
        if self.state is KernelState.BUSY:
            self._set(KernelState.INTERRUPTING)
        self.cells.held = True
        try:
            if self._interrupt_mode == "message" and self._client is not None:
                self._client.send(Channel.CONTROL, "interrupt_request", {})
            elif self.sandbox is not None:
                await self.sandbox.link.command("interrupt")
        except (LinkClosed, CommandFailed):
            log.warning("interrupt_not_delivered", kernel_id=self.id)
        finally:
            self.cells.held = not self.alive
            self.cells.pump()

    @property
    def max_code(self) -> int:
        return self._settings.kernels.max_code

    @property
    def interrupt_grace(self) -> float:
        return self._settings.kernels.interrupt_grace

    def link(self) -> Link:
        """The way to the sandbox for file transfers, which need no kernel process; raises `KernelDead`."""
        if self.sandbox is None or not self.sandbox.link.connected.is_set():
            raise (
                self._dead("Its files are gone with its sandbox.")
                if self.gone
                else KernelUnavailable(
                    "The sandbox of this kernel can't be reached at the moment; try again shortly.", kernel_id=self.id
                )
            )
        self.touch()
        return self.sandbox.link

    async def kill_process(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.link.command("kill")

    async def cancel(self, execution: Execution) -> None:
        """A queued cell never runs; a running one is interrupted."""
        if execution.ended or self.cells.withdraw(execution):
            return
        execution.cancelled = True
        await self.interrupt(execution)

    # what happens to it

    def _on_frames(self, batch: list[Frame]) -> None:
        """Called by the link in its read callback: the whole way from the socket to the logs of the executions."""
        messages = [frame for frame in batch if frame.kind is Kind.MESSAGE]
        if messages and self._client is not None:
            self.cells.take(self._client.take(messages))
        for frame in batch:
            if frame.kind is Kind.EVENT:
                self._on_event(frames.unpack_json(frame.payload))
            elif frame.kind is Kind.OVERSIZE:
                self._on_oversize(frames.unpack_json(frame.payload))

    def _on_event(self, event: dict[str, Any]) -> None:
        if event.get("event") != "kernel_exit" or self._client is None:
            return
        self._client.process_ended(event)
        if self.alive:
            self._die(causes.from_process(event))

    def _on_oversize(self, value: dict[str, Any]) -> None:
        try:
            parent = decode_object(str(value.get("parent")).encode()).get("msg_id")
        except BadMessage:
            parent = None
        size = value.get("size")
        self.cells.oversize(parent, size if isinstance(size, int) else 0)

    def _background(self, payload: Payload, execution_id: str, size: int) -> None:
        self.log.append_bounded(Payload(payload.type, {**payload.members, "from_execution": execution_id}), size)

    def _cells_changed(self) -> None:
        current = self.cells.current
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if current is not None:
            self._set(KernelState.BUSY)
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(current.request.timeout, self._at_deadline, current)
        elif self.alive and self.state is not KernelState.IDLE:
            self._set(KernelState.IDLE)

    def _at_deadline(self, execution: Execution) -> None:
        if execution.running and self._tasks is not None and not self._closed.is_set():
            execution.timed_out = True
            self._tasks.start_soon(ladder.climb, self, execution, "timeout")

    async def _watch_link(self, sandbox: Sandbox) -> None:
        while True:
            await sandbox.link.lost.wait()
            cause = await loss.judge(sandbox, self._settings.link.lost_timeout)
            if cause is not None:
                await self._lose_sandbox(cause)
                return

    async def _on_silence(self) -> None:
        log.warning("supervisor_silent", kernel_id=self.id)
        await self._lose_sandbox(causes.UNREACHABLE)

    async def _lose_sandbox(self, cause: Cause) -> None:
        self._die(cause)
        with anyio.CancelScope(shield=True):
            await self._remove_sandbox()

    async def end_sandbox(self, cause: Cause) -> None:
        """The last step of the ladder."""
        await self._lose_sandbox(cause)

    async def _remove_sandbox(self) -> None:
        sandbox = self.sandbox
        if sandbox is None:
            return
        self.sandbox = None
        try:
            await sandbox.remove()
        except EngineUnavailable as error:
            log.warning("sandbox_not_removed", kernel_id=self.id, reason=error.detail)

    def _die(self, cause: Cause) -> None:
        if self.state in (KernelState.DEAD, KernelState.STOPPING):
            return
        self.cause = cause
        self._set(KernelState.DEAD)
        self._break_start()
        self.cells.end_all("died", cause, KernelState.DEAD)

    def _break_start(self) -> None:
        if self._starting is not None:
            self._starting.cancel()

    def _dead(self, what: str) -> KernelDead:
        message = (self.cause or {}).get("message", "The kernel is dead.")
        return KernelDead(f"{message} {what}".strip(), kernel_id=self.id, cause=self.cause)

    def _set(self, new: KernelState) -> None:
        if new is self.state:
            return
        old = self.state
        check(old, new)
        self.state = new
        if old in ACCEPTS_CELLS and new in ACCEPTS_CELLS:
            return
        self.log.append_bounded(Payload("state", {"state": str(new), "cause": self.cause}), 200)
