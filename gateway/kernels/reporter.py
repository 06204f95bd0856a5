"""What a supervisor tells of its box beside Jupyter's messages: figures of use, warnings for the running cell, messages left out."""

from typing import Any

import anyio

from gateway.kernels import reports
from gateway.kernels.cells import Cells
from gateway.kernels.client import KernelClient
from gateway.kernels.execution import SOON, Execution
from gateway.kernels.log import EventLog
from gateway.protocol.events import Payload
from gateway.protocol.messages import BadMessage, decode_object

_NAMING_TIME = 1.0
"""Seconds that the kernel gets to name its largest variables for a warning about memory."""
_LARGEST = 2**53 - 1
"""Above it a number is not the same any more once JavaScript has read it."""


class Reporter:
    """Turns reports into events: of the cell that runs, else of the kernel itself."""

    def __init__(self, cells: Cells, log: EventLog) -> None:
        self.usage = reports.Usage()
        self._cells, self._log = cells, log

    def used(self, event: dict[str, Any]) -> None:
        """A `usage` event, which comes before the reply of the cell it belongs to."""
        used = self.usage.take(event)
        if self._cells.current is not None:
            self._cells.current.usage = used
            self._cells.current.changed(SOON)

    def left_out(self, value: dict[str, Any]) -> None:
        """OVERSIZE: a message was larger than the link takes."""
        try:
            parent = decode_object(str(value.get("parent")).encode()).get("msg_id")
        except BadMessage:
            parent = None
        size = value.get("size")
        self._cells.oversize(parent, max(0, size) if isinstance(size, int) else 0)

    def gap(self, event: dict[str, Any]) -> None:
        """A `gap` event: outputs were left out, as nobody took them. Told to the cell they belong to, in their place."""
        events, size = _count(event.get("messages")), _count(event.get("bytes"))
        if not events:
            return
        current = self._cells.current
        if current is not None and current.msg_id is not None and current.msg_id == event.get("parent"):
            current.leave_gap(events, size)
        else:
            self._log.append_bounded(Payload("gap", {"events": events, "bytes": size}), 100)

    async def warn(self, event: dict[str, Any], execution: Execution | None, client: KernelClient | None) -> None:
        largest = None
        if event.get("event") == "memory_high" and client is not None and client.names_variables:
            with anyio.move_on_after(_NAMING_TIME):
                largest = await client.largest_variables()
        payload = reports.warning(event, largest)
        if payload is None:
            return
        if execution is not None and not execution.ended:
            if execution.report():
                execution.tell(payload)
        else:
            self._log.append_bounded(payload, 1000)


def _count(value: object) -> int:
    """A number that a sandbox tells; 0 for what is none, or no possible one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST else 0
