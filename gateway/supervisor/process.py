"""The kernel process: started from its kernelspec, signalled, reaped, its last words kept.

Its standard output and error are a pipe into a bounded tail: enough to say why a start failed, never more. Ending it ends every
other process of the sandbox too, since what a cell has left behind may hold the ports, the memory or the files of the next one.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from . import cgroup
from .channels import Channels

LOG_TAIL = 16 * 1024
"""Bytes of the kernel's own output that are kept."""
_OOM_SCORE = 900
"""The kernel is the one to go when memory is short; the supervisor has to tell of it."""
_SPEC_DIRS = (
    os.path.join(sys.prefix, "share/jupyter/kernels"),
    "/usr/local/share/jupyter/kernels",
    "/usr/share/jupyter/kernels",
)


class StartError(Exception):
    """The kernel process could not be started; the text says why."""


def read_kernelspec(name: str) -> dict[str, Any]:
    """The kernel.json of a kernelspec in the image; raises `StartError`."""
    for base in _SPEC_DIRS:
        path = os.path.join(base, name, "kernel.json")
        try:
            with open(path, encoding="utf-8") as file:
                return {"resource_dir": os.path.dirname(path), **dict(json.load(file))}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError) as error:
            raise StartError(f"the kernelspec {name!r} can't be read: {error}") from None
    raise StartError(f"the image has no kernelspec named {name!r}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class KernelProcess:
    """One run of a kernel: a child process and the sockets it is spoken to over."""

    def __init__(self, spec_name: str, key: str, env: dict[str, str], cwd: str) -> None:
        self.spec = read_kernelspec(spec_name)
        self.interrupt_mode = str(self.spec.get("interrupt_mode", "signal"))
        self.extras: dict[str, Any] = self.spec.get("metadata", {}).get("cellgate", {})
        """What the kernelspec says of its launcher: `patient` (waits rather than drop output), `names_variables`."""
        self.channels = Channels()
        self._tail = bytearray()
        self._memory_at_start = cgroup.memory()
        try:
            self._child = self._spawn(spec_name, key, env, cwd)
        except (OSError, ValueError, TypeError, LookupError) as error:
            self.channels.close()
            raise StartError(f"the kernel process can't be started: {error}") from None
        self.pid = self._child.pid
        assert self._child.stdout is not None
        self.output = self._child.stdout.fileno()
        os.set_blocking(self.output, False)
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/oom_score_adj", "w") as file:
            file.write(str(_OOM_SCORE))

    def _spawn(self, spec_name: str, key: str, env: dict[str, str], cwd: str) -> "subprocess.Popen[bytes]":
        connection_file = os.path.join(self.channels.directory, "kernel.json")
        descriptor = os.open(connection_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(self.channels.connection_info(key, spec_name), file)
        replacements = {"{connection_file}": connection_file, "{resource_dir}": self.spec["resource_dir"]}
        argv = [replacements.get(word, word) for word in self.spec["argv"]]
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env={**os.environ, **self.spec.get("env", {}), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def read_output(self) -> bool:
        """Takes what the process has written outside of its channels; False at the end of the pipe."""
        try:
            chunk = os.read(self.output, 65536)
        except BlockingIOError:
            return True
        self._tail += chunk
        del self._tail[:-LOG_TAIL]
        return bool(chunk)

    @property
    def log(self) -> str:
        return self._tail.decode("utf-8", "replace")

    def interrupt(self) -> None:
        """SIGINT to the kernel's process group, as Jupyter does: a child such as a shell command gets it too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to every process of the sandbox but this one and init (kill(2): pid -1)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def reap(self) -> dict[str, Any] | None:
        """What became of the process, once it has ended: `code`, or `signal`, and what it used; else None."""
        try:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        self._child.returncode = code
        memory = cgroup.memory()
        before, after = self._memory_at_start["oom_kills"], memory["oom_kills"]
        return {
            "pid": pid,
            "code": code if code >= 0 else None,
            "signal": _signal_name(-code) if code < 0 else None,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "max_rss": usage.ru_maxrss * 1024,
            **memory,
            "oom_kills": None if before is None or after is None else after - before,
        }

    def close(self) -> None:
        self.channels.close()
        if self._child.stdout is not None:
            self._child.stdout.close()
