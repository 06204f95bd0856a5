"""One kernel: its state and its life from the first start to the last word.

`Cells` knows what runs in it, `KernelClient` talks to the process, `Box` is its sandbox; this module ties them together and is the
only place that changes the state. All its tasks live in the task group of `run`. Once it has answered it is recorded (`KernelRecord`), and
a gateway that is started anew takes it up where its record ends (`restore`, `listen_again`, `recover`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import groupby
from typing import Any
from uuid import uuid4

import anyio
import anyio.abc
import structlog

from gateway.errors import (
    EngineUnavailable,
    GatewayError,
    IdempotencyConflict,
    KernelDead,
    KernelGone,
    KernelUnavailable,
    LinkClosed,
    SandboxTimeout,
    ShuttingDown,
    StartFailed,
    StartTimeout,
)
from gateway.kernels import archive, causes, ladder
from gateway.kernels.archive import ArchivedExecution, StoredKernel
from gateway.kernels.box import Box, LinkTerms
from gateway.kernels.cells import Cells
from gateway.kernels.client import KernelClient
from gateway.kernels.culler import Candidate
from gateway.kernels.execution import Cause, CellRequest, Execution
from gateway.kernels.journal import Journal
from gateway.kernels.kernel_record import KernelRecord, Phase, phase_of
from gateway.kernels.launch import RestartBudget, launch
from gateway.kernels.log import EventLog, timestamp
from gateway.kernels.reporter import Reporter
from gateway.kernels.state import ACCEPTS_CELLS, ALIVE, KernelState, check
from gateway.kernels.wishes import KernelRequest
from gateway.protocol.events import Payload
from gateway.sandboxes.base import SandboxEngine, SandboxSpec
from gateway.sandboxes.link import CommandFailed, Link, unpack_object
from gateway.settings import Settings
from gateway.supervisor.frames import Frame, Kind

log = structlog.get_logger()

_RECORDING = 1.0
"""Seconds that ending a kernel waits for the store to hear of it."""
_CATCHING_UP = 2.0
"""Seconds that a recovered kernel gets to hand over what it has said before a passed deadline counts."""
_LOG_BYTES = 8 * 1024 * 1024
"""Bytes of a kernel's own events (state changes, background output) that are kept."""


class Kernel:
    def __init__(
        self,
        request: KernelRequest,
        settings: Settings,
        engine: SandboxEngine,
        journal: Journal,
        *,
        kernel_id: str | None = None,
        created_at: float | None = None,
        key: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.id = kernel_id or str(uuid4())
        self.request = request
        self.key, self.fingerprint = key, fingerprint
        """Idempotency key of its create, and what tells that body from others."""
        self.state = KernelState.REQUESTED
        self.phase: Phase = "launching"
        self.cause: Cause | None = None
        self.log = EventLog(None, keep_bytes=_LOG_BYTES)
        self.created = time.time() if created_at is None else created_at
        self.last_activity = timestamp()
        self.lifetime = request.lifetime
        self.draining = False
        self.connections = 0
        """Open WebSockets; only the culler cares."""
        self.cells = Cells(self.id, settings.kernels, self._cells_changed, self._background, journal)
        self.record = KernelRecord(self, journal)
        self._reporter = Reporter(self.cells, self.log)
        self._settings = settings
        self._journal = journal
        self._box = Box(engine, self._sandbox_spec(), self._terms(), settings.link, self)
        self._client: KernelClient | None = None
        self._interrupt_mode = "signal"
        now = anyio.current_time()
        self._born = now - max(0.0, time.time() - self.created)
        self._idle_since = now
        self._busy_since: float | None = None
        self._revivals = RestartBudget(settings.kernels.max_restarts, settings.kernels.restart_window)
        self._closed = anyio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._patience = 0.0
        """Seconds that a cell gets past its deadline: what it has said while no gateway was there is still on its way."""
        self._changing = anyio.Lock()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._starting: anyio.CancelScope | None = None
        self._reaching = anyio.CancelScope()

    def _sandbox_spec(self) -> SandboxSpec:
        spec = self.request.spec
        return SandboxSpec(
            self.id,
            spec.image,
            self.request.limits,
            spec.work_size,
            spec.tmp_size,
            spec.shm_size,
            epoch=self._journal.store.epoch,
            expires_at=self.created + self.lifetime,
        )

    def _terms(self) -> LinkTerms:
        return LinkTerms(self.request.lifetime, self.request.spec.silence, self._settings.kernels.output_rate)

    @property
    def alive(self) -> bool:
        return self.state in ACCEPTS_CELLS

    @property
    def gone(self) -> bool:
        """Dead for good: there is no sandbox any more in which it could be restarted."""
        return self.state is KernelState.DEAD and not self._box.present

    def usage(self) -> dict[str, Any]:
        """CPU seconds, bytes of memory and of output, and executions over its life."""
        return self._reporter.usage.document(self.cells.output_bytes, self.cells.ended_count)

    @property
    def has_box(self) -> bool:
        return self._box.present

    async def wake_box(self) -> None:
        await self._box.wake()

    async def check_box(self) -> None:
        await self._box.check()

    @property
    def started(self) -> bool:
        """It has been alive once: before that its start deadline watches over it."""
        return self.state not in (KernelState.REQUESTED, KernelState.STARTING, KernelState.RECOVERING)

    @property
    def frozen(self) -> bool:
        return self._box.frozen

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)

    @property
    def expires_at(self) -> datetime:
        return datetime.fromtimestamp(self.created + self.lifetime, UTC)

    @property
    def settings(self) -> Settings:
        return self._settings

    def touch(self) -> None:
        """The one place that stamps activity: a client asked for something. What the kernel emits does not count."""
        self.last_activity = timestamp()
        self._idle_since = anyio.current_time()

    def candidate(self) -> Candidate:
        return Candidate(
            id=self.id,
            born=self._born,
            idle_since=self._idle_since,
            busy_since=self._busy_since,
            connections=self.connections,
            frozen=self.frozen,
            freezable=self.state is KernelState.IDLE,
            idle_timeout=self.request.idle_timeout,
            lifetime=self.lifetime,
            busy_timeout=self.request.spec.busy_timeout,
        )

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
            await self._box.remove()

    async def start(self) -> None:
        """Makes the sandbox and waits until the kernel answers; raises `GatewayError`. The caller then stops what is there."""
        assert self._tasks is not None
        self._set(KernelState.STARTING)
        async with self._start_deadline():
            await self._launch(await self._box.open(self._tasks))

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

    async def _launch(self, link: Link) -> None:
        self._client = client = KernelClient(link)
        self.cells.attach(None)
        # Before the process has the new key: else the next gateway could not understand what it says.
        await self.record.written()
        self._interrupt_mode = await launch(client, link, self.request, self.id)
        self.cause = None
        self._set(KernelState.IDLE)
        self.cells.attach(client)

    async def _process_log(self) -> str:
        """The last lines the process has written so far, if the sandbox still answers."""
        try:
            found = await self._box.ask("log", deadline=2.0)
        except (GatewayError, CommandFailed):
            return ""
        return str(found.get("log", ""))[-4000:]

    async def stop(self, cause: Cause) -> None:
        """Ends everything and removes the sandbox; no error when that is done already. A start, restart or recovery gives way to it."""
        self._break_start()
        self._reaching.cancel()
        async with self._changing:
            if not self._closed.is_set():
                self.cause = self.cause or cause
                self._set(KernelState.STOPPING)
                self.cells.end_all("died", cause, KernelState.STOPPING)
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(_RECORDING):
                    await self._journal.flush()
                await self._box.remove()
            self._set(KernelState.DEAD)
            self.forget()

    def forget(self) -> None:
        """Ends the tasks and readers of a kernel that is gone."""
        self.log.close()
        self._closed.set()

    async def detach(self) -> None:
        """Lets go of a recorded kernel: its box waits for the next gateway, with all that comes from now on."""
        self.draining = True
        self.record.part()
        await self._box.detach()
        self._closed.set()

    async def restart(self) -> None:
        """A new process in the same box: id and files stay, variables go."""
        if self._changing.locked() or self.state in (KernelState.REQUESTED, KernelState.STARTING):
            raise KernelUnavailable("The kernel is being started, restarted or stopped already.", kernel_id=self.id)
        async with self._changing:
            if self.gone:
                raise self._dead("Its sandbox is gone, so it can't be restarted.")
            self._journal.require()
            link = await self._box.link()
            self.touch()
            self._set(KernelState.RESTARTING)
            self.cells.end_all("died", causes.RESTARTED, KernelState.RESTARTING)
            await self._relaunch(link)

    async def _relaunch(self, link: Link) -> None:
        try:
            async with self._start_deadline():
                await self._launch(link)
        except GatewayError as error:
            self._die(causes.plain("restart_failed", error.detail))
            raise

    async def extend(self, lifetime: float | None) -> None:
        """Keeps the kernel from being idle; with `lifetime` (seconds from now, already bounded) it may live longer."""
        self.touch()
        if lifetime is None:
            return
        wanted = anyio.current_time() - self._born + lifetime
        link = await self._box.link()
        await link.command("extend", lifetime=wanted)
        # So that the supervisor hears the same when it has to dial again.
        link.extend(wanted)
        self.lifetime = wanted
        await self.record.written()

    @property
    def age(self) -> float:
        return anyio.current_time() - self._born

    # cells

    async def submit(
        self, request: CellRequest, key: str | None = None, fingerprint: str | None = None
    ) -> tuple[Execution | ArchivedExecution, bool]:
        """As `execute`, but a key that was used before gives the execution of that time, and True; raises `IdempotencyConflict`
        when it asked for something else."""
        if key is not None and (found := await self._asked_before(key)):
            if found.fingerprint != fingerprint:
                text = "This Idempotency-Key was used for another request to this kernel. Use a new key for a new request."
                raise IdempotencyConflict(text, kernel_id=self.id, execution_id=found.id)
            return found, True
        return self.execute(request, key, fingerprint), False

    async def _asked_before(self, key: str) -> Execution | ArchivedExecution | None:
        if found := self.cells.of_key(key):
            return found
        if self.cells.complete:
            return None
        stored = await archive.of_key(self._journal.store, self.id, key)
        # Another request with this key may have come while the store was asked.
        return self.cells.of_key(key) or stored

    def execute(self, request: CellRequest, key: str | None = None, fingerprint: str | None = None) -> Execution:
        """Queues a cell; raises `KernelDead`, `KernelUnavailable`, `QueueFull`, `ShuttingDown`, `StoreUnavailable`."""
        if self.draining:
            raise ShuttingDown("The gateway is stopping and takes no new cells.")
        if self.state is KernelState.DEAD and self._may_revive():
            self._journal.require()
            return self._revive(request, key, fingerprint)
        self.require_alive()
        self._journal.require()
        self.touch()
        if self.frozen:
            assert self._tasks is not None
            if not self.cells.held:
                self.cells.held = True
                self._tasks.start_soon(self._thaw)
        # Which number it has is recorded, though nothing of it may ever go over the link.
        self.record.changed()
        return self.cells.submit(request, None, key, fingerprint)

    def require_alive(self) -> None:
        if self.state is KernelState.DEAD:
            raise self._dead("")
        if self.state is KernelState.STOPPING:
            cause = self.cause or causes.DELETED
            raise KernelGone(str(cause["message"]), kernel_id=self.id, cause=cause)
        if not self.alive:
            raise KernelUnavailable(f"The kernel is {self.state} at the moment; try again shortly.", kernel_id=self.id)

    def require_reached(self) -> None:
        """Raises `KernelUnavailable` while a gateway that was started anew waits for the sandbox."""
        if self.state is KernelState.RECOVERING:
            text = "The gateway was just restarted and waits for this kernel's sandbox; try again shortly."
            raise KernelUnavailable(text, kernel_id=self.id)

    async def _thaw(self) -> None:
        """Only the engine can: while it is away, cells wait."""
        while self.frozen and self.alive:
            try:
                await self._box.thaw()
            except EngineUnavailable as error:
                log.warning("not_thawed", kernel_id=self.id, reason=error.detail)
                await anyio.sleep(1.0)
        self._release()

    def _may_revive(self) -> bool:
        """Whether the next cell brings a dead kernel back: the box is there, and it has not died too often lately."""
        ready = self._box.connected and not self._changing.locked() and not self._closed.is_set()
        return ready and self.request.on_death == "restart" and self._revivals.left(anyio.current_time())

    def _revive(self, request: CellRequest, key: str | None, fingerprint: str | None) -> Execution:
        assert self._tasks is not None
        why = str((self.cause or {}).get("message", "")).replace(causes.RESTART_ADVICE, "").strip()
        text = f"This cell runs in a fresh kernel process: variables are lost, files are kept. {why}"
        self.touch()
        self._revivals.spend(anyio.current_time())
        self._set(KernelState.RESTARTING)
        notice = Payload("warning", {"code": "kernel_restarted", "message": text, "cause": self.cause})
        execution = self.cells.submit(request, notice, key, fingerprint)
        self._tasks.start_soon(self._bring_back)
        return execution

    async def _bring_back(self) -> None:
        async with self._changing:
            try:
                await self._relaunch(await self._box.link())
            except GatewayError as error:
                log.warning("kernel_not_revived", kernel_id=self.id, reason=error.detail)
                self._die(causes.plain("restart_failed", error.detail))

    async def interrupt(
        self, execution: Execution | None = None, reason: ladder.Reason = "client", up_to: ladder.Step = "kill_sandbox"
    ) -> Execution | None:
        """Climbs the ladder for the running cell, as far as `up_to`, in the background after its first step; None when none runs."""
        self.require_alive()
        self.require_reached()
        self.touch()
        current = self.cells.current
        if current is None or (execution is not None and execution is not current):
            return None
        assert self._tasks is not None
        current.interrupted = True
        current.changed()
        self._tasks.start_soon(ladder.climb, self, current, reason, up_to)
        return current

    async def signal_cell(self, execution: Execution) -> None:
        """One interrupt. No further cell enters the kernel until the signal is known to be delivered."""
        if self.state is KernelState.BUSY:
            self._set(KernelState.INTERRUPTING)
        self.cells.held = True
        try:
            if self._interrupt_mode == "message" and self._client is not None:
                self._client.send_now("interrupt_request", {})
            else:
                await self._box.ask("interrupt", execution_id=execution.id)
        except (LinkClosed, SandboxTimeout, KernelUnavailable, CommandFailed):
            log.warning("interrupt_not_delivered", kernel_id=self.id)
        finally:
            self._release()

    async def kill_process(self) -> None:
        with contextlib.suppress(LinkClosed, SandboxTimeout, KernelUnavailable, CommandFailed):
            await self._box.ask("kill")

    async def cancel(self, execution: Execution) -> None:
        """A queued cell never runs; a running one is interrupted."""
        if execution.ended:
            return
        if self.cells.withdraw(execution):
            await self.record.written()
            return
        execution.cancelled = True
        execution.changed()
        if self.state is KernelState.RECOVERING:
            # What is recorded here is carried out once the sandbox has called.
            await self.record.written()
            return
        await self.interrupt(execution)

    async def answer(self, execution: Execution, value: str) -> None:
        """Answers the execution's question, and waits until the answer can't be lost; raises `NotWaitingForInput`, `StoreUnavailable`."""
        self.require_reached()
        self._journal.require()
        self.touch()
        self.cells.answer(execution, value)
        await self.record.written()

    async def link(self) -> Link:
        """The way to the sandbox for file transfers, which need no kernel process; raises `KernelDead`, `KernelUnavailable`."""
        if self.gone:
            raise self._dead("Its files are gone with its sandbox.")
        self.touch()
        return await self._box.link()

    async def freeze(self) -> None:
        if self.state is KernelState.IDLE:
            await self._box.freeze()

    # what happens to it

    def on_frames(self, batch: list[Frame]) -> None:
        """Called by the link in its read callback: the whole way from the socket to the logs of the executions."""
        for kind, run in groupby(batch, key=lambda frame: frame.kind):
            if kind is Kind.MESSAGE and self._client is not None:
                self.cells.take(self._client.take(run))
            elif kind is Kind.EVENT:
                for frame in run:
                    self._on_event(unpack_object(frame.payload))
            elif kind is Kind.OVERSIZE:
                for frame in run:
                    self._reporter.left_out(unpack_object(frame.payload))

    def _on_event(self, event: dict[str, Any]) -> None:
        kind, client = event.get("event"), self._client
        if event.get("oom_kills") or kind == "out_of_memory_kill":
            self._box.out_of_memory_told = True
        if kind == "usage":
            self._reporter.used(event)
        elif kind == "gap":
            self._reporter.gap(event)
        elif kind == "kernel_exit" and client is not None:
            if client.process_ended(event) and self.alive:
                self._die(causes.from_process(event))
        elif self._tasks is not None and not self._closed.is_set():
            self._tasks.start_soon(self._reporter.warn, event, self.cells.current, client)

    def _background(self, payload: Payload, execution_id: str, size: int) -> None:
        self.cells.output_bytes += size
        self.log.append_bounded(Payload(payload.type, {**payload.members, "from_execution": execution_id}), size)

    def _cells_changed(self) -> None:
        current = self.cells.current
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.state is KernelState.RECOVERING:
            return
        if current is not None:
            self._set(KernelState.BUSY)
            self._busy_since = self._busy_since or anyio.current_time()
            left = max(self._patience, current.request.timeout - current.elapsed)
            self._deadline = asyncio.get_running_loop().call_later(left, self._at_deadline, current)
        elif self.alive:
            self._set(KernelState.IDLE)

    def _at_deadline(self, execution: Execution) -> None:
        if execution.running and self._tasks is not None and not self._closed.is_set():
            execution.timed_out = True
            execution.changed()
            self._tasks.start_soon(ladder.climb, self, execution, "timeout", "kill_sandbox")

    async def on_lost(self, cause: Cause) -> None:
        """The sandbox is gone or given up: dead for good."""
        if self.state is KernelState.RECOVERING and self.cells.current is not None:
            text = "The sandbox ended while no gateway was there. What the cell has put out since then could not be taken."
            self.cells.current.tell(Payload("warning", {"code": "output_may_be_missing", "message": text}))
        self._die(cause)
        with anyio.CancelScope(shield=True):
            await self._box.remove()
        self.log.append_bounded(Payload("state", {"state": str(self.state), "cause": self.cause, "gone": True}), 200)
        self.record.changed()

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

    def _release(self) -> None:
        """Lets the next cell in, unless there is no kernel for it."""
        self.cells.held = self.state not in ALIVE
        self.cells.pump()

    def _dead(self, what: str) -> KernelDead:
        message = (self.cause or {}).get("message", "The kernel is dead.")
        return KernelDead(f"{message} {what}".strip(), kernel_id=self.id, cause=self.cause)

    def _set(self, new: KernelState) -> None:
        if new is self.state:
            return
        old = self.state
        check(old, new)
        self.state = new
        self.phase = phase_of(new, self.phase)
        self.record.changed()
        if new not in (KernelState.BUSY, KernelState.INTERRUPTING):
            self._busy_since = None
            self._idle_since = anyio.current_time()
        if old in ALIVE and new in ALIVE:
            return
        self.log.append_bounded(Payload("state", {"state": str(new), "cause": self.cause}), 200)

    # what another gateway has to know

    @property
    def own_link(self) -> Link | None:
        """The link of its box, connected or not; None without a box."""
        return self._box.own_link

    @property
    def process(self) -> dict[str, Any] | None:
        """What it takes to talk to the kernel process; None before there was one."""
        client = self._client
        if client is None:
            return None
        return {
            "key": client.key,
            "pid": client.pid if isinstance(client.pid, int) else None,
            "names_variables": client.names_variables,
            "interrupt_mode": self._interrupt_mode,
        }

    # taken up again

    def restore(self, stored: StoredKernel) -> None:
        """Takes up the record of an earlier gateway; nothing is reached yet."""
        document = stored.document
        self.phase, self.cause = document["phase"], document["cause"]
        self.last_activity = document["last_activity"]
        self.record.restore(stored)
        self._reporter.usage.restore(document["usage"])
        self.cells.restore(stored)
        if self.phase == "dead":
            self.state = KernelState.DEAD
        else:
            self._set(KernelState.RECOVERING)

    async def listen_again(self, stored: StoredKernel) -> None:
        """Its supervisor can call from here on; raises `EngineUnavailable`."""
        process = stored.document["process"] or {}
        self._interrupt_mode = process.get("interrupt_mode", "signal")
        link = await self._box.listen_again(
            {
                "secret": stored.document["secret"],
                "received": stored.row.received,
                "sent": stored.row.sent,
                "frames_out": stored.frames,
            }
        )
        self._client = client = KernelClient(link, process.get("key"))
        client.names_variables = process.get("names_variables", False)
        if self.phase != "launching":
            # Else what it tells of an end is that of the process before.
            client.process_started(process.get("pid"))
        self.record.resume(link)

    async def recover(self) -> None:
        """Waits for its sandbox to call and goes on where the record ends; a box that is gone ends it, with the cause."""
        assert self._tasks is not None
        async with self._changing:
            with self._reaching:
                cause = await self._box.reach(self._tasks)
            if self._reaching.cancelled_caught:
                # It is being deleted: nothing is to be gone on with.
                return
            if cause is not None:
                await self.on_lost(cause)
            elif self.phase == "launching":
                self._set(KernelState.RESTARTING)
                try:
                    await self._relaunch(await self._box.link())
                except GatewayError as error:
                    self._die(causes.plain("restart_failed", error.detail))
            elif self.state is KernelState.RECOVERING and self._client is not None:
                self._go_on(self._client)
        log.info("kernel_recovered", kernel_id=self.id, state=str(self.state))

    def _go_on(self, client: KernelClient) -> None:
        self._set(KernelState.BUSY if self.cells.current else KernelState.IDLE)
        self._patience = _CATCHING_UP
        self.cells.resume(client)
        self._cells_changed()
        self._patience = 0.0
        current = self.cells.current
        if current is not None and (current.cancelled or current.ladder) and self._tasks is not None:
            asked: tuple[Any, Any] = current.ladder or ("client", "kill_sandbox")
            self._tasks.start_soon(ladder.climb, self, current, *asked)
