"""Which gateway a command talks to, and with which token.

`run` and `exec` need none: without an address they start a private gateway inside this process, on a port that the
system chooses, and stop it at the end. `kernels` looks at the one that `cellgate serve` starts from the same settings.
"""

import ipaddress
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from gateway.client import Client, ClientError, Kernel
    from gateway.settings import Settings

UrlOption = Annotated[str, typer.Option(envvar="CELLGATE_URL", metavar="URL", help="Address of a running gateway.")]
TokenOption = Annotated[
    str,
    typer.Option(
        envvar="CELLGATE_TOKEN",
        metavar="TOKEN",
        show_default=False,
        help="Its token; for a gateway on this machine the token file is read.",
    ),
]
ConfigOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Configuration file (TOML).")]
SpecOption = Annotated[str | None, typer.Option("--spec", metavar="NAME", help="Kernel spec of the new kernel.")]
MemoryOption = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Its memory, as 512m or 2g.", show_default=False)]
CpusOption = Annotated[float | None, typer.Option("--cpus", metavar="CORES", help="Its share of the processor.")]
UploadOption = Annotated[
    list[Path] | None,
    typer.Option("--upload", metavar="PATH", help="Copy a file or directory into the work directory. Repeatable."),
]
DownloadOption = Annotated[
    list[str] | None,
    typer.Option("--download", metavar="PATH", help="Copy a file from there at the end. Repeatable."),
]
FiguresOption = Annotated[Path | None, typer.Option("--figures", metavar="DIR", help="Save each figure as a file there.")]
TimeoutOption = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", help="How long each cell may run.")]
StateOption = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="Where the gateway keeps its token and sockets.")
]


AGAIN = 0.5
"""Seconds until an interrupt that no gateway took is sent again."""
LONGEST_TEMPORARY = 30
"""Characters. A Unix socket path ends at 107; the private directory and what the gateway makes in it take up to 75."""


@contextmanager
def running_gateway(url: str, token: str, state_dir: Path | None = None) -> "Iterator[Client]":
    """A client of the gateway at `url`, or of the one that this configuration describes."""
    from gateway import settings
    from gateway.client import Client

    found = settings.load(**({"state_dir": state_dir} if state_dir else {}))
    url = url or f"http://{_bracketed(found.server.host)}:{found.server.port}"
    with Client(url, token or _local_token(url, found), on_reconnect=_tell_reconnect) as client:
        yield client


@contextmanager
def any_gateway(url: str, token: str, config: Path | None) -> "Iterator[Client]":
    """A client of the gateway at `url`; without a url, of a private one that ends with this block."""
    if url:
        with running_gateway(url, token) as client:
            yield client
        return
    from gateway import settings, telemetry
    from gateway.app import serving
    from gateway.client import Client

    # A directory of its own: a gateway removes what an earlier one left in its state directory.
    with tempfile.TemporaryDirectory(prefix="cellgate-", dir=_short_directory()) as directory:
        private: dict[str, Any] = {
            "state_dir": Path(directory),
            "token": secrets.token_urlsafe(32),
            "log_level": "error",
            "server": {"host": "127.0.0.1", "port": 0},
        }
        found = settings.load(config, **private)
        telemetry.configure(found.log_level, found.log_format)
        # It ends with this process: there is none to wait for.
        with serving(found) as address, Client(address, found.token, reconnect=0) as client:
            yield client


def reconnect_note(error: "ClientError | None") -> str:
    """What to say when a client begins to wait for its gateway (`error`), and when one answers again (None)."""
    return "Connection to the gateway lost, following again…" if error else "The gateway is back."


def _tell_reconnect(error: "ClientError | None") -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(reconnect_note(error), "yellow"), soft_wrap=True)


def limits(memory: str, cpus: float | None) -> dict[str, Any] | None:
    """What a create asks for; None leaves all to the spec."""
    wanted = {"memory": memory or None, "cpus": cpus}
    return {name: value for name, value in wanted.items() if value is not None} or None


def _short_directory() -> str | None:
    """The usual place for temporary files, unless it is so deep that the path of a socket in it would not fit."""
    return "/tmp" if len(tempfile.gettempdir()) > LONGEST_TEMPORARY else None  # noqa: S108 (the directory made in it is private)


def _local_token(url: str, settings: "Settings") -> str:
    """The configured or kept token belongs to this machine's gateway: it is not sent anywhere else."""
    if not _is_loopback(urlsplit(url if "://" in url else f"http://{url}").hostname or ""):
        return ""
    if settings.token:
        return settings.token
    try:
        return (settings.state_dir / "token").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    """A listening address as the host of a URL: any address means this machine, IPv6 takes brackets."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


class Interrupts:
    """Inside it Ctrl-C interrupts the kernel, so that the cell ends as it should; a second one gives up at once.

    The request is sent from a thread: the signal may come while the client is in the middle of a call.
    """

    def __init__(self, kernel: "Kernel", then: Callable[[], None] | None = None) -> None:
        self._kernel = kernel
        self._then = then
        self._before: dict[int, Any] = {}
        self._left = threading.Event()
        self.happened = False

    def __enter__(self) -> "Interrupts":
        self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt)}
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, question: Callable[[], str]) -> str | None:
        """Wait for the user's answer; None when Ctrl-C or the end of input took its place, and the kernel is interrupted."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return question()
        except (KeyboardInterrupt, EOFError):
            self._begin()
            return None
        finally:
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.happened:
            raise KeyboardInterrupt
        self._begin()

    def _begin(self) -> None:
        self.happened = True
        if self._then:
            self._then()
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        """Until a gateway takes it: one that is being restarted is away for a moment, and the cell goes on meanwhile."""
        from gateway.client import ApiError, ClientError, GatewayUnreachable

        while True:
            try:
                self._kernel.interrupt()
            except ClientError as error:
                refused = isinstance(error, ApiError) and error.code == "shutting_down"
                if not refused and not isinstance(error, GatewayUnreachable):
                    return  # the cell's stream tells what became of it; Ctrl-C again ends the wait
            else:
                return
            if self._left.wait(AGAIN):
                return


@contextmanager
def cleaned_up() -> Iterator[None]:
    """The innermost block of a command: once it ends, one signal does not cut short the clean-up around it.

    A kernel that is being deleted, or a private gateway that is stopping, would be left behind otherwise.
    """
    try:
        yield
    finally:
        noted: list[int] = []

        def note(number: int, frame: FrameType | None) -> None:
            if noted:
                raise KeyboardInterrupt
            noted.append(number)
            typer.echo("Cleaning up; once more leaves at once.", err=True)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, note)


def leave_on_signals() -> None:
    """SIGTERM and SIGHUP end the program by an exception, so that what it has started is stopped too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
