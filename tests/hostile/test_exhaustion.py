"""A cell that takes all it can get, or turns on its own supervisor: it meets its limit, ends with a cause, and hurts nobody beside it.

A second kernel stands next to each attack and is asked afterwards; that it answers is part of every test.
"""

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.settings import MIB, KernelSpecSettings
from tests.support import Gateway, Kernel, eventually, running

SPEC = KernelSpecSettings()


@pytest.fixture(scope="module")
def cell(gateway: Gateway) -> Iterator[Kernel]:
    """The kernel beside the one that is attacked; it meets only such limits as leave no trace."""
    with gateway.kernel() as kernel:
        yield kernel


# limits


def limits() -> Any:
    import os
    import resource

    names = ("CORE", "NOFILE", "FSIZE", "MEMLOCK")
    found: dict[str, Any] = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names}
    for name, paths in {
        "memory": ("memory/memory.limit_in_bytes", "memory.max"),
        "swap": ("memory/memory.memsw.limit_in_bytes", "memory.swap.max"),
        "pids": ("pids/pids.max", "pids.max"),
    }.items():
        for path in paths:
            if os.path.exists(f"/sys/fs/cgroup/{path}"):
                with open(f"/sys/fs/cgroup/{path}") as file:
                    found[name] = file.read().strip()
    return found


def test_the_limits_are_those_of_the_spec(cell: Kernel) -> None:
    found = cell.call(limits)
    assert found["CORE"] == [0, 0]
    assert found["NOFILE"] == [1024, 1024]
    assert found["FSIZE"] == [SPEC.work_size, SPEC.work_size]
    assert found["MEMLOCK"] == [65536, 65536]
    assert found["memory"] == str(SPEC.limits.memory)
    assert found["pids"] == str(SPEC.limits.pids)
    # Where the host does not count swap there is nothing to read; where it does there is none to use.
    assert found.get("swap") in (None, "0", str(SPEC.limits.memory))


def test_a_crash_leaves_no_core_file(gateway: Gateway) -> None:
    with gateway.kernel() as kernel:
        kernel.execute("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
        kernel.restart()
        assert kernel.value("import os\nos.listdir('/work') + os.listdir('/dev/shm')") == "[]"
        assert kernel.value("[name for name in os.listdir('/tmp') if 'core' in name]") == "[]"


def open_files_until_refused() -> Any:
    import os

    opened = []
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        return [len(opened), error.errno]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_open_files_end_at_their_limit(cell: Kernel) -> None:
    count, code = cell.call(open_files_until_refused)
    assert code == errno.EMFILE
    assert 900 < count < 1024
    assert cell.value("1") == "1"


def threads_until_refused() -> Any:
    import threading

    stop = threading.Event()
    threads: list[Any] = []
    try:
        while len(threads) < 10_000:
            thread = threading.Thread(target=stop.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        return [len(threads), str(error)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return [len(threads), ""]


def test_threads_end_at_the_pids_limit(cell: Kernel) -> None:
    count, text = cell.call(threads_until_refused)
    assert text == "can't start new thread"
    assert 32 < count < SPEC.limits.pids
    assert cell.value("1") == "1"


BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
START_BOMB = f"import subprocess, sys\nbomb = subprocess.Popen([sys.executable, '-c', {BOMB!r}], start_new_session=True)"


def processes_now() -> Any:
    import os

    path = next(path for path in ("/sys/fs/cgroup/pids/pids.current", "/sys/fs/cgroup/pids.current") if os.path.exists(path))
    return int(open(path).read())


def test_a_fork_bomb_ends_at_the_pids_limit_and_the_kernel_answers(gateway: Gateway, cell: Kernel) -> None:
    with gateway.kernel() as kernel:
        kernel.run(START_BOMB)
        # The bomb goes on at the limit; its kernel answers, and so does the one beside it.
        eventually(lambda: kernel.call(processes_now) == SPEC.limits.pids, "the bomb is at its limit")
        assert cell.value("6 * 7") == "42"
        kernel.run("import os, signal\nos.killpg(bomb.pid, signal.SIGKILL)\nbomb.wait();")
        assert kernel.value("subprocess.run(['true']).returncode") == "0"


def test_a_restart_ends_a_fork_bomb(gateway: Gateway) -> None:
    with gateway.kernel() as kernel:
        kernel.run(START_BOMB)
        assert kernel.restart()["state"] == "idle"
        assert kernel.call(processes_now) < 64


def test_the_end_of_a_kernel_ends_a_fork_bomb(gateway: Gateway, cell: Kernel) -> None:
    with gateway.kernel() as kernel:
        kernel.run(START_BOMB)
    assert cell.value("6 * 7") == "42"


def test_a_small_box_has_small_limits(gateway: Gateway) -> None:
    with gateway.kernel(limits={"memory": "256m", "cpus": 0.5, "pids": 40}) as kernel:
        found = kernel.call(limits)
        assert (found["memory"], found["pids"]) == (str(256 * MIB), "40")
        assert kernel.call(threads_until_refused)[0] < 40
        assert kernel.value("1") == "1"


# what a cell does to its own supervisor, and to its neighbours


def test_a_supervisor_killed_by_its_cell_ends_only_its_kernel(gateway: Gateway, cell: Kernel) -> None:
    with gateway.kernel() as kernel:
        result = kernel.execute(
            "import os, signal\nprint('in', flush=True)\nos.kill(os.getppid(), signal.SIGKILL)\nwhile True: pass"
        )
        assert (result["status"], result["variables"], result["kernel_state"]) == ("died", "lost", "dead")
        assert result["cause"]["code"] == "sandbox_ended"
    assert cell.value("6 * 7") == "42"


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *(("os.getppid()", name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGSEGV", "SIGABRT")),
        # Init passes on what it gets; a signal that it does not handle can't end it from inside.
        *(("1", name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1")),
    ],
)
def test_a_signal_that_ends_the_supervisor_ends_its_kernel(gateway: Gateway, target: str, name: str) -> None:
    with gateway.kernel() as kernel, kernel.socket() as socket:
        socket.send("execute", code=f"import os, signal\nos.kill({target}, signal.{name})\nwhile True: pass", request_id="cell")
        ended = socket.until_type("ended", "cell")
        assert (ended["status"], ended["cause"]["code"], ended["variables"]) == ("died", "sandbox_ended", "lost")


@pytest.mark.parametrize("name", ["SIGINT", "SIGCHLD", "SIGWINCH", "SIGCONT"])
def test_a_signal_that_means_nothing_to_the_supervisor_does_nothing(gateway: Gateway, name: str) -> None:
    with gateway.kernel() as kernel:
        kernel.run(f"import os, signal\nfor pid in (1, os.getppid()): os.kill(pid, signal.{name})")
        assert kernel.value("6 * 7") == "42"


def test_a_supervisor_stopped_by_its_cell_does_not_stop_the_gateway(cell: Kernel) -> None:
    settings = {"ping_interval": 0.5, "lost_timeout": 2.0, "command_timeout": 1.0}
    with running(link=settings) as gateway, gateway.kernel() as kernel, gateway.kernel() as neighbour:
        result = kernel.execute("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass")
        assert (result["status"], result["cause"]["code"]) == ("died", "sandbox_unreachable")
        assert neighbour.value("6 * 7") == "42"
    assert cell.value("6 * 7") == "42"


def test_a_cell_that_takes_its_kernels_sockets_away_hurts_only_itself(gateway: Gateway) -> None:
    with gateway.kernel() as kernel:
        kernel.run("import glob, shutil\nfor d in glob.glob('/tmp/.cellgate-*'): shutil.rmtree(d)")
        assert kernel.value("6 * 7") == "42"
        assert kernel.restart()["state"] == "idle"
        assert kernel.value("6 * 7") == "42"


def use_all_inodes() -> Any:
    import os

    count = 0
    try:
        while True:
            os.close(os.open(f"/tmp/{count}", os.O_CREAT))
            count += 1
    except OSError:
        return count


def test_a_cell_that_fills_every_inode_of_tmp_does_not_lose_its_files() -> None:
    with running(kernels={"specs": {"python3": {"tmp_size": "16m"}}}) as gateway, gateway.kernel() as kernel:
        kernel.run("open('/work/file', 'w').write('kept')")
        assert kernel.call(use_all_inodes) > 10_000
        answer = kernel.http.post(f"{kernel.path}/restart")
        # Whether it can start again there or not: the answer is one, and the files can still be had.
        assert answer.status_code == 200 or answer.json()["code"] == "start_failed", answer.text
        assert kernel.http.get(kernel.file("file")).content == b"kept"
