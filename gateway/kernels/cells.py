"""The cells of one kernel: a bounded FIFO queue, one cell in the kernel at a time, and the routing of what comes back.

A cell is complete when both its ``execute_reply`` and the ``idle`` whose parent it is were seen; their order is not fixed
(https://jupyter-client.readthedocs.io/en/stable/messaging.html#request-reply). Output whose parent is an earlier cell is
background output and goes to the kernel's own log. Everything else from unknown parents is counted and dropped.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gateway.errors import ExecutionNotFound, KernelUnavailable, NotWaitingForInput, QueueFull
from gateway.kernels import causes
from gateway.kernels.budget import OutputBudget
from gateway.kernels.client import KernelClient
from gateway.kernels.execution import SOON, Cause, CellRequest, Execution
from gateway.kernels.journal import Journal
from gateway.protocol.events import EndStatus, Payload
from gateway.protocol.messages import BadMessage, RawMessage
from gateway.protocol.outputs import is_output, to_payload, weight
from gateway.settings import KernelSettings
from gateway.supervisor.frames import Channel

if TYPE_CHECKING:
    from gateway.kernels.archive import StoredKernel

Outputs = list[tuple[Payload, int]]
_KEPT_EXECUTIONS = 64
"""In memory, for a kernel; with all that have not ended."""
_KNOWN_ORIGINS = 4096


class Cells:
    """`on_change` is called after a cell has entered or left the kernel; `on_background` gets late output and its size."""

    def __init__(
        self,
        kernel_id: str,
        settings: KernelSettings,
        on_change: Callable[[], None],
        on_background: Callable[[Payload, str, int], None],
        journal: Journal | None = None,
    ) -> None:
        self.current: Execution | None = None
        self.held = False
        """True while no cell may be handed to the kernel: an interrupt is on its way, or there is no kernel."""
        self.dropped = 0
        self.execution_count = 0
        self.ended_count = 0
        self.output_bytes = 0
        self._kernel_id = kernel_id
        self._settings = settings
        self._on_change = on_change
        self._on_background = on_background
        self._client: KernelClient | None = None
        self._journal = journal
        self._queue: deque[Execution] = deque()
        self._executions: OrderedDict[str, Execution] = OrderedDict()
        self._keys: dict[str, Execution] = {}
        self._origins: OrderedDict[str, str] = OrderedDict()
        """Execution ids by the msg_id of their request: late output tells by it where it comes from."""
        self._kept_bytes = 0
        self._last_stored: dict[str, Any] | None = None
        self.asked_count = 0
        """Executions that were ever asked for; the number of the last."""
        self.complete = True
        """False once there are executions that only the store knows."""

    @property
    def last(self) -> dict[str, Any] | None:
        """Of the execution that was asked for last: `execution_id`, `status` and `ended`, the members of its last event."""
        if self._executions:
            found = next(reversed(self._executions.values()))
            return {"execution_id": found.id, "status": found.status, "ended": found.end}
        return self._last_stored

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    async def all_done(self) -> None:
        """Waits until no cell runs or waits."""
        for execution in [self.current, *self._queue]:
            if execution is not None:
                await execution.done.wait()

    def release(self) -> None:
        """Whoever waits for a cell is let go: it goes on without this gateway."""
        for execution in self._executions.values():
            execution.log.release()

    def attach(self, client: KernelClient | None) -> None:
        """Another kernel process (or none) is there to be talked to."""
        self._client = client
        self.held = client is None
        self.execution_count = 0
        self._origins.clear()
        self.pump()

    def restore(self, stored: "StoredKernel") -> None:
        """Takes up what an earlier gateway had under way: the cell in the kernel, if any, and those behind it. Nothing moves before
        `resume`."""
        self.held, self.complete = True, False
        document, last = stored.document, stored.last
        as_of = document["as_of"]
        self.asked_count, self.execution_count = document["asked_count"], document["execution_count"]
        self.output_bytes, self.ended_count = document["usage"]["output_bytes"], document["usage"]["executions"]
        if last is not None:
            self._last_stored = {"execution_id": last["execution_id"], "status": last["status"], "ended": last["end"]}
            # The kernel's own figures are written seldom.
            self.asked_count = max(self.asked_count, last["number"])
            if last["execution_count"] is not None and (last["ended_at"] or 0.0) > as_of:
                self.execution_count = last["execution_count"]
        unfinished, origins = stored.unfinished, stored.origins
        self._origins.update(origins)
        for execution in unfinished:
            self._remember(execution)
            if execution.msg_id is None:
                self._queue.append(execution)
            else:
                self.current = execution

    def resume(self, client: KernelClient) -> None:
        """The kernel process of before can be talked to again."""
        self._client = client
        self.held = False
        self.pump()

    def of_key(self, key: str) -> Execution | None:
        """The execution, among those in memory, that was asked for with this idempotency key."""
        return self._keys.get(key)

    def submit(
        self, request: CellRequest, notice: Payload | None = None, key: str | None = None, fingerprint: str | None = None
    ) -> Execution:
        """Queues a cell, or hands it to an idle kernel at once; `notice` is its first event. Raises `QueueFull`."""
        if len(self._queue) >= self._settings.max_queue:
            raise QueueFull(
                f"{len(self._queue)} cells wait for this kernel already, which is the limit. Wait for one to end, or cancel some.",
                limit=self._settings.max_queue,
                kernel_id=self._kernel_id,
            )
        budget = OutputBudget(self._settings.max_output, self._settings.max_output_events)
        self.asked_count += 1
        execution = Execution(
            self._kernel_id,
            request,
            budget,
            number=self.asked_count,
            key=key,
            fingerprint=fingerprint,
            journal=self._journal,
        )
        if notice is not None:
            execution.tell(notice)
        self._remember(execution)
        position = len(self._queue) + (self.current is not None)
        self._queue.append(execution)
        execution.tell(Payload("queued", {"position": position}))
        self.pump()
        return execution

    def _remember(self, execution: Execution) -> None:
        self._executions[execution.id] = execution
        if execution.key is not None:
            self._keys[execution.key] = execution

    def pump(self) -> None:
        """Hands the next cell to the kernel if there is one and the kernel is free."""
        if self.current is not None or self.held or self._client is None or not self._queue:
            return
        execution = self._queue.popleft()
        request = execution.request
        self.current = execution
        content = {
            "code": request.code,
            "silent": request.silent,
            "store_history": request.store_history and not request.silent,
            "user_expressions": {},
            "allow_stdin": request.allow_stdin,
            "stop_on_error": request.stop_on_error,
        }
        msg_id = self._client.send(Channel.SHELL, "execute_request", content)
        execution.sent(msg_id)
        self._origins[msg_id] = execution.id
        if len(self._origins) > _KNOWN_ORIGINS:
            self._origins.popitem(last=False)
        for position, waiting in enumerate(self._queue):
            waiting.tell(Payload("queued", {"position": position + 1}))
        self._on_change()

    def find(self, execution_id: str) -> Execution | None:
        """One that is in memory: it has not ended, or not long ago."""
        return self._executions.get(execution_id)

    def recent(self) -> list[Execution]:
        """Those in memory, oldest first."""
        return [*self._executions.values()]

    def get(self, execution_id: str) -> Execution:
        """As `find`; raises `ExecutionNotFound`."""
        if found := self.find(execution_id):
            return found
        raise ExecutionNotFound(f"This kernel has no execution '{execution_id[:64]}'.", kernel_id=self._kernel_id)

    def answer(self, execution: Execution, value: str) -> None:
        """Answers the execution's input_request; raises `NotWaitingForInput`, `KernelUnavailable`."""
        header = execution.input_request
        if header is None:
            raise NotWaitingForInput(
                "This execution has asked no question, or it has been answered.", kernel_id=self._kernel_id
            )
        if self._client is None:
            text = "The gateway was just restarted and waits for this kernel's sandbox; try again shortly."
            raise KernelUnavailable(text, kernel_id=self._kernel_id)
        execution.input_request = None
        execution.changed()
        self._client.send(Channel.STDIN, "input_reply", {"value": value, "status": "ok"}, parent=header)

    def withdraw(self, execution: Execution) -> bool:
        """Takes a queued cell out of the queue; False when it is not waiting there."""
        try:
            self._queue.remove(execution)
        except ValueError:
            return False
        self._finish(execution, "cancelled", {"code": "cancelled", "message": "Cancelled before it ran."})
        return True

    # what comes back

    def take(self, messages: Iterable[RawMessage]) -> None:
        """Messages of one read, in order."""
        outputs: Outputs = []
        for message in messages:
            try:
                self._route(message, outputs)
            except BadMessage as error:
                self._refuse(message, str(error))
        self._flush(outputs)

    def _refuse(self, message: RawMessage, reason: str) -> None:
        """Counts a bad message; was it an output of the running cell, its end tells that something is missing."""
        if self._client is not None:
            self._client.count_bad(reason)
        if self.current is not None and message.parent_id == self.current.msg_id and is_output(message.msg_type):
            self.current.leave_out(len(message.signed[3]))

    def _route(self, message: RawMessage, outputs: Outputs) -> None:
        current = self.current
        if current is None or message.parent_id != current.msg_id:
            self._late(message)
        elif message.channel == "iopub":
            self._iopub(current, message, outputs)
        elif message.channel == "shell" and message.msg_type == "execute_reply":
            if current.reply is None:
                current.replied(message.content())
                self._complete(current, outputs)
        elif message.channel == "stdin" and message.msg_type == "input_request":
            self._ask(current, message, outputs)

    def _late(self, message: RawMessage) -> None:
        """What an earlier cell has left running puts out; everything else from unknown parents is counted and dropped."""
        origin = self._origins.get(message.parent_id or "")
        if origin is None or message.channel != "iopub" or message.msg_type == "input_request":
            self.dropped += 1
        elif payload := to_payload(message.msg_type, message.content()):
            self._on_background(payload, origin, weight(payload, message.signed[3]))

    def _iopub(self, execution: Execution, message: RawMessage, outputs: Outputs) -> None:
        kind = message.msg_type
        if kind == "status":
            if message.content().get("execution_state") == "idle":
                execution.idle_seen = True
                execution.changed(SOON)
                self._complete(execution, outputs)
        elif kind == "execute_input":
            count = message.content().get("execution_count")
            execution.announce_start(count if isinstance(count, int) else None)
        elif kind == "input_request":
            # Questions come on stdin; one that comes here could not be answered.
            self.dropped += 1
        elif payload := to_payload(kind, message.content()):
            outputs.append((payload, weight(payload, message.signed[3])))

    def _ask(self, execution: Execution, message: RawMessage, outputs: Outputs) -> None:
        if not execution.request.allow_stdin:
            self.dropped += 1
            return
        payload = to_payload("input_request", message.content())
        assert payload is not None
        self._flush(outputs)
        if not execution.budget.admit_question(len(message.signed[3])):
            execution.changed()
            return
        execution.input_request = message.header
        execution.announce_start(None)
        execution.tell(payload)

    def oversize(self, parent_id: str | None, size: int) -> None:
        """An output was too large for the link; its cell is told at its end."""
        if self.current is not None and self.current.msg_id == parent_id:
            self.current.leave_out(size)
        else:
            self.dropped += 1

    def _flush(self, outputs: Outputs) -> None:
        if outputs and self.current is not None:
            self.current.produce(outputs)
        outputs.clear()

    def _complete(self, execution: Execution, outputs: Outputs) -> None:
        reply = execution.reply
        if reply is None or not execution.idle_seen:
            return
        self._flush(outputs)
        count = reply.get("execution_count")
        if isinstance(count, int):
            execution.execution_count = self.execution_count = count
        status, cause = _outcome(execution, reply)
        self._finish(execution, status, cause)
        if status != "ok" and execution.request.stop_on_error:
            self._abort_queue(execution)
        self.current = None
        self.pump()
        if self.current is None:
            self._on_change()

    # ends

    def _abort_queue(self, failed: Execution) -> None:
        while self._queue:
            cause = {
                "code": "previous_cell_failed",
                "message": "A cell that was to run before this one failed, and it asked to stop on error.",
                "execution_id": failed.id,
            }
            self._finish(self._queue.popleft(), "aborted", cause)

    def end_all(self, status: EndStatus, cause: Cause, kernel_state: str) -> None:
        """The kernel is gone: the running cell ends with `status`, those behind it as aborted, all with the cause."""
        current, self.current = self.current, None
        self.held = True
        if current is not None:
            own = {**timeout_cause(current), "after": cause} if current.timed_out else cause
            self._finish(current, "timeout" if current.timed_out else status, own, "lost", kernel_state)
        while self._queue:
            self._finish(self._queue.popleft(), "aborted", cause, "lost", kernel_state)

    def _finish(
        self, execution: Execution, status: EndStatus, cause: Cause | None, variables: str = "kept", state: str | None = None
    ) -> None:
        execution.finish(status, cause, state or ("busy" if self._queue else "idle"), variables)
        self.ended_count += 1
        self.output_bytes += execution.budget.size
        self._kept_bytes += execution.budget.size
        self._forget_old(execution)

    def _forget_old(self, last: Execution) -> None:
        """Keeps memory bounded: ended executions are read from the store when they are asked for again."""
        limit = self._settings.max_kept_output
        while (self._kept_bytes > limit or len(self._executions) > _KEPT_EXECUTIONS) and len(self._executions) > 1:
            oldest = next((old for old in self._executions.values() if old.log.closed and old is not last), None)
            if oldest is None:
                break
            self.complete = False
            del self._executions[oldest.id]
            if oldest.key is not None:
                del self._keys[oldest.key]
            self._kept_bytes -= oldest.budget.size


def timeout_cause(execution: Execution) -> Cause:
    return {
        "code": "cell_timeout",
        "message": f"The cell ran longer than its timeout of {execution.request.timeout:g} s.",
        "timeout": execution.request.timeout,
        "step": execution.last_step,
    }


def _outcome(execution: Execution, reply: dict[str, Any]) -> tuple[EndStatus, Cause | None]:
    """What the reply means, given what the gateway has done to the cell meanwhile."""
    status = reply.get("status")
    if status == "ok" and not execution.timed_out:
        return "ok", None
    if execution.timed_out:
        return "timeout", timeout_cause(execution)
    if execution.cancelled:
        return "cancelled", {"code": "cancelled", "message": "Cancelled while it ran.", "step": execution.last_step}
    if status == "aborted":
        return "aborted", {"code": "aborted_by_kernel", "message": "The kernel did not run the cell."}
    name, value = str(reply.get("ename", "")), str(reply.get("evalue", ""))[:1000]
    return "error", causes.from_reply(name, value, execution.interrupted)
