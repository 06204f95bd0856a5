"""A kernel process in a sandbox that is there: started, and asked until it answers."""

from gateway.errors import StartFailed
from gateway.kernels import causes
from gateway.kernels.client import KernelClient
from gateway.kernels.wishes import KernelRequest
from gateway.sandboxes.link import CommandFailed, Link


async def launch(client: KernelClient, link: Link, request: KernelRequest, kernel_id: str) -> str:
    """The interrupt mode of the kernel, once it has answered; raises `StartFailed` with the last lines of its log."""
    env = {**request.spec.env, **request.env}
    try:
        started = await link.command("start", kernelspec=request.spec.kernelspec, key=client.key, env=env)
    except CommandFailed as failure:
        raise StartFailed(f"The kernel did not start: {failure}.", kernel_id=kernel_id) from None
    client.process_started(started.get("pid"))
    client.names_variables = started.get("names_variables") is True
    if not await client.first_answer():
        cause = causes.from_process(client.exit_info or {})
        how = cause["signal"] or f"exit code {cause['exit_code']}"
        raise StartFailed(f"The kernel process ended before it answered ({how}).", kernel_id=kernel_id, log=cause["log"])
    return "message" if started.get("interrupt_mode") == "message" else "signal"


class RestartBudget:
    """How often a dead kernel may be brought back by a cell: `most` times within `window` seconds."""

    def __init__(self, most: int, window: float) -> None:
        self._most, self._window = most, window
        self._times: list[float] = []

    def left(self, now: float) -> bool:
        self._times = [time for time in self._times if now - time <= self._window]
        return len(self._times) < self._most

    def spend(self, now: float) -> None:
        self._times.append(now)
