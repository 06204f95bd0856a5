"""A Docker daemon of the tests' own, to be stopped, killed and hung: nobody else's kernels are on it.

It lives in one short directory under /tmp, with containerd, shims and mounts of its own, and needs root. The kernel image is taken
from the shared daemon once and kept as a data root beside it, of which each new daemon gets a copy made of hard links: layers are
never written to.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import docker.errors
import requests.exceptions

IMAGE = "cellgate-kernel:latest"
DEADLINE = 60.0
_CACHE = Path("/tmp/cellgate-test-daemon")
_NO_ANSWER = (requests.exceptions.RequestException, OSError, docker.errors.DockerException)


class PrivateDaemon:
    """`with PrivateDaemon(live_restore=True) as daemon:` gives one that runs and has the kernel image."""

    def __init__(self, live_restore: bool, image: str = IMAGE) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="cgd-", dir="/tmp"))
        self.log = self.directory / "log"
        self.url = f"unix://{self.directory}/s"
        self._options = ["--live-restore"] if live_restore else []
        self._process: subprocess.Popen[bytes] | None = None
        try:
            if image:
                _copy_image(image, self.directory / "data")
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "PrivateDaemon":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts it, for the first time or again, and waits until it answers."""
        assert self._process is None, "it runs already"
        at = self.directory
        # Not the machine's configuration file, whose settings would clash with the options.
        (at / "daemon.json").write_text("{}")
        self._forget_containerd()
        command = [
            *("dockerd", "--config-file", f"{at}/daemon.json", "-H", self.url, "--pidfile", f"{at}/pid"),
            *("--data-root", f"{at}/data", "--exec-root", f"{at}/exec"),
            *("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
            *self._options,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + DEADLINE
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"dockerd did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def _forget_containerd(self) -> None:
        """A killed dockerd takes containerd with it. Where the first process of the machine is slow to reap, that is a zombie for
        seconds, which the next dockerd would take for alive and wait for in vain."""
        file = self.directory / "exec/containerd/containerd.pid"
        if file.exists() and int(file.read_text()) not in self.processes():
            file.unlink()

    def answers(self, timeout: float = 2.0) -> bool:
        # Not by the SDK, which leaves a socket behind that could not be connected.
        try:
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(timeout)
                asking.connect(f"{self.directory}/s")
                asking.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in asking.recv(64)
        except OSError:
            return False

    def api(self, timeout: float = DEADLINE) -> docker.APIClient:
        # With a version, so that making it asks nothing; the oldest that has all that the tests look at.
        return docker.APIClient(base_url=self.url, version="1.41", timeout=timeout)  # type: ignore[arg-type]

    def stop(self) -> None:
        """As an operator or an update would."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """As the kernel's out-of-memory killer would; containerd ends with it."""
        self._end(signal.SIGKILL)

    def hang(self) -> None:
        """Connections are taken, and nothing comes back."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def bring_back(self) -> None:
        """Whatever was done to it."""
        if self._process is None or self._process.poll() is not None:
            self._process = None
            self.start()
        else:
            self.resume()

    def containers(self) -> list[str]:
        """Names of all there are, running or not."""
        with contextlib.closing(self.api()) as api:
            return sorted(container["Names"][0].removeprefix("/") for container in api.containers(all=True))

    def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(DEADLINE)
        self._process = None

    def close(self) -> None:
        """Ends it and all that it started, and removes its directory."""
        try:
            if self._process is None and (self.directory / "exec").exists():
                # Only a daemon knows how to end containers that are frozen.
                self.start()
            if self._process is not None:
                self.resume()
                self.remove_containers()
                self.stop()
        except (AssertionError, *_NO_ANSWER):
            pass
        finally:
            self._end(signal.SIGKILL)
            self._kill_rest()
            self._unmount()
            shutil.rmtree(self.directory, ignore_errors=True)

    def remove_containers(self) -> None:
        """Also those that are frozen."""
        with contextlib.closing(self.api()) as api:
            for container in api.containers(all=True):
                with contextlib.suppress(docker.errors.APIError):
                    if container["State"] == "paused":
                        api.unpause(container["Id"])
                    api.remove_container(container["Id"], force=True)

    def _kill_rest(self) -> None:
        """containerd and shims, known by our directory in their command lines, and what the shims have started."""
        deadline = time.monotonic() + DEADLINE
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def processes(self) -> set[int]:
        """All that belong to this daemon and live, itself included."""
        found: set[int] = set()
        parents: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z":
                    continue
                parents[int(entry)] = int(parent)
                command = Path(f"/proc/{entry}/cmdline").read_text().split("\0")
                program = os.path.basename(command[0])
                if program.startswith(("dockerd", "containerd")) and any(str(self.directory) in word for word in command):
                    found.add(int(entry))
        while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
            found |= more
        return found

    def _unmount(self) -> None:
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in sorted((point for point in points if point.startswith(f"{self.directory}/")), reverse=True):
            subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)


class Tap:
    """Between a gateway and its daemon: something is done at the very moment when a request is about to reach the daemon."""

    def __init__(self, daemon: PrivateDaemon) -> None:
        self._daemon_socket = f"{daemon.directory}/s"
        path = daemon.directory / f"tap{time.monotonic_ns()}"
        self.url = f"unix://{path}"
        self.passed: list[str] = []
        """Request lines."""
        self._waiting: tuple[str, Callable[[], None]] | None = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        self._start(self._accept)

    def at(self, part: str, do: Callable[[], None]) -> None:
        """`do` is called once, before the first request from now on that has `part` in its first line is passed on."""
        self._waiting = (part, do)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Wakes the one who accepts.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _start(self, function: Callable[..., None], *arguments: socket.socket) -> None:
        threading.Thread(target=function, args=arguments, name="tap", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                upstream = socket.socket(socket.AF_UNIX)
                try:
                    upstream.connect(self._daemon_socket)
                except OSError:
                    client.close()
                    upstream.close()
                else:
                    self._start(self._pass_on, client, upstream)
                    self._start(self._pass_back, upstream, client)

    def _pass_on(self, client: socket.socket, upstream: socket.socket) -> None:
        # Clients send a request's head in one piece, and one request at a time.
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if data.startswith((b"GET ", b"POST ", b"DELETE ")):
                    self._look_at(data.partition(b"\r\n")[0].decode())
                upstream.sendall(data)
        _hang_up(upstream)

    def _look_at(self, line: str) -> None:
        self.passed.append(line)
        if self._waiting is not None and self._waiting[0] in line:
            do, self._waiting = self._waiting[1], None
            do()

    def _pass_back(self, upstream: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := upstream.recv(65536):
                client.sendall(data)
        _hang_up(client)
        upstream.close()
        client.close()


def _hang_up(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_WR)


def _copy_image(image: str, data: Path) -> None:
    """A data root with the image in it, at `data`."""
    with contextlib.closing(docker.APIClient(version="auto", timeout=60)) as api:
        digest = api.inspect_image(image)["Id"].removeprefix("sha256:")  # type: ignore[no-untyped-call]
    with _lock():
        kept = _CACHE / digest
        if not kept.exists():
            for old in _CACHE.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            _load(image, kept)
        data.mkdir()
        for entry in sorted(kept.iterdir()):
            links = ["--link"] if entry.name == "overlay2" else []
            subprocess.run(["cp", "--archive", *links, str(entry), str(data)], check=True)


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    _CACHE.mkdir(mode=0o700, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _load(image: str, kept: Path) -> None:
    with PrivateDaemon(live_restore=False, image="") as daemon:
        save = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE)
        subprocess.run(["docker", "-H", daemon.url, "load", "--quiet"], stdin=save.stdout, check=True, capture_output=True)
        assert save.stdout is not None
        save.stdout.close()
        assert save.wait() == 0
        daemon.stop()
        # In one step, so that what is there is whole.
        (daemon.directory / "data").rename(kept)
