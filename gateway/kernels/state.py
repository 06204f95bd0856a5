"""The states of a kernel and the one table of changes between them; anything else is a fault of ours and raises.

The state is what the gateway knows to be true (is a cell in the kernel, is its process alive), not what the kernel says of
itself: a hostile or confused kernel can claim anything.
"""

from enum import StrEnum


class KernelState(StrEnum):
    REQUESTED = "requested"
    """Admitted; nothing exists yet."""
    STARTING = "starting"
    """Its sandbox or its process is being made; it has not answered yet."""
    RECOVERING = "recovering"
    """The gateway was started anew and waits for the sandbox to call; cells are taken and wait."""
    IDLE = "idle"
    BUSY = "busy"
    """A cell is in the kernel."""
    INTERRUPTING = "interrupting"
    """A cell is in the kernel and has been asked to stop."""
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DEAD = "dead"
    """No process; with a cause. The box and its files may still be there, and then a restart is possible."""


S = KernelState
ALLOWED: dict[KernelState, frozenset[KernelState]] = {
    S.REQUESTED: frozenset({S.STARTING, S.RECOVERING, S.STOPPING, S.DEAD}),
    S.STARTING: frozenset({S.IDLE, S.STOPPING, S.DEAD}),
    S.RECOVERING: frozenset({S.IDLE, S.BUSY, S.RESTARTING, S.STOPPING, S.DEAD}),
    S.IDLE: frozenset({S.BUSY, S.RESTARTING, S.STOPPING, S.DEAD}),
    S.BUSY: frozenset({S.IDLE, S.INTERRUPTING, S.RESTARTING, S.STOPPING, S.DEAD}),
    S.INTERRUPTING: frozenset({S.IDLE, S.BUSY, S.RESTARTING, S.STOPPING, S.DEAD}),
    S.RESTARTING: frozenset({S.IDLE, S.STOPPING, S.DEAD}),
    S.STOPPING: frozenset({S.DEAD}),
    S.DEAD: frozenset({S.RESTARTING, S.STOPPING}),
}
ACCEPTS_CELLS = frozenset({S.RECOVERING, S.IDLE, S.BUSY, S.INTERRUPTING})
ALIVE = ACCEPTS_CELLS - {S.RECOVERING}
"""Its process is known to be there."""


class IllegalTransition(RuntimeError):
    """The gateway tried a change of state that the table does not know."""


def check(old: KernelState, new: KernelState) -> None:
    """Raises `IllegalTransition` unless the table allows the change."""
    if new not in ALLOWED[old]:
        raise IllegalTransition(f"{old} -> {new}")
