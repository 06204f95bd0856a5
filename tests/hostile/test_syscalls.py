"""Which system calls reach the host's kernel from a cell: all of them tried, by number, and compared with a golden list.

Growth of this set is what the seccomp profile is there to prevent, so it has to be seen and wanted. A call counts as reachable
unless it is answered by EPERM or ENOSYS. Each is made in a process of its own, with arguments that no call can make use of (-1
everywhere), since some of them end, stop or double the process.
"""

import errno
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import Kernel

GOLDEN = Path(__file__).with_name("reachable_syscalls.txt")
LAST = 462
"""The highest x86_64 number of Linux 6.12; what comes later is refused as unknown to the profile."""


def probe_all(last: int) -> Any:
    import subprocess
    import sys

    # A fresh interpreter without threads, so that forking it 463 times is sound.
    program = r"""
import ctypes, errno, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
minus = [ctypes.c_long(-1)] * 6
# clone without any namespace, a socket of AF_UNIX, and FUTEX_WAKE: their first answers depend on the arguments.
special = {56: [17, 0, 0, 0, 0, 0], 41: [1, 1, 0, 0, 0, 0], 202: [0, 1, 0, 0, 0, 0]}
reachable = []
for number in range(int(sys.argv[1]) + 1):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        arguments = [ctypes.c_long(a) for a in special[number]] if number in special else minus
        ctypes.set_errno(0)
        answer = libc.syscall(ctypes.c_long(number), *arguments)
        # Also the second process that a fork-like call has made comes here; it only ends.
        os._exit(ctypes.get_errno() if answer == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) else 100)
    _, status = os.waitpid(child, 0)
    if status not in (errno.EPERM << 8, errno.ENOSYS << 8):
        reachable.append(number)
print(*reachable)
"""
    # What the calls do to their processes may complain on stderr.
    done = subprocess.run([sys.executable, "-I", "-c", program, str(last)], capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


def golden() -> dict[int, list[str]]:
    """Number -> name, and perhaps `optional`."""
    lines = [line.split() for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
    return {int(number): words for number, *words in lines}


def test_the_reachable_system_calls_are_those_of_the_golden_list(shared: Kernel) -> None:
    assert platform.machine() == "x86_64", "the numbers of the golden list are those of x86_64"
    found, expected = set(shared.call(probe_all, LAST)), golden()
    assert found - set(expected) == set(), "calls that are new"
    # A call that this host's kernel does not have yet can't be reached; any other that is missing would break cells.
    missing = {number: words for number, words in expected.items() if number not in found and "optional" not in words}
    assert {number: words for number, words in missing.items() if host_has(number)} == {}


def host_has(number: int) -> bool:
    """Whether the kernel of this machine knows the call at all, asked by a process of its own that is refused by its arguments."""
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(ctypes.c_long({number}), *[ctypes.c_long(-1)] * 6)
exit(ctypes.get_errno())
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode != errno.ENOSYS


REFUSED = {
    "mount": (165, [0, 0, 0, 0, 0]),
    "umount2": (166, [0, 0]),
    "pivot_root": (155, [0, 0]),
    "chroot": (161, [0]),
    "unshare user": (272, [0x10000000]),
    "unshare mount": (272, [0x00020000]),
    "setns": (308, [0, 0]),
    "clone new user": (56, [0x10000011, 0, 0, 0, 0]),
    "clone new pid": (56, [0x20000011, 0, 0, 0, 0]),
    "clone3": (435, [0, 0]),
    "ptrace": (101, [0, 0, 0, 0]),
    "process_vm_readv": (310, [1, 0, 0, 0, 0, 0]),
    "process_vm_writev": (311, [1, 0, 0, 0, 0, 0]),
    "kcmp": (312, [1, 1, 0, 0, 0]),
    "pidfd_getfd": (438, [0, 0, 0]),
    "bpf": (321, [0, 0, 0]),
    "keyctl": (250, [0, 0, 0, 0, 0]),
    "add_key": (248, [0, 0, 0, 0, 0]),
    "io_uring_setup": (425, [1, 0]),
    "userfaultfd": (323, [0]),
    "perf_event_open": (298, [0, 0, 0, 0, 0]),
    "init_module": (175, [0, 0, 0]),
    "finit_module": (313, [0, 0, 0]),
    "kexec_load": (246, [0, 0, 0, 0]),
    "reboot": (169, [0, 0, 0, 0]),
    "open_by_handle_at": (304, [0, 0, 0]),
    "name_to_handle_at": (303, [0, 0, 0, 0, 0]),
    "fsopen": (430, [0, 0]),
    "move_mount": (429, [0, 0, 0, 0, 0]),
    "quotactl": (179, [0, 0, 0, 0]),
    "acct": (163, [0]),
    "swapon": (167, [0, 0]),
    "settimeofday": (164, [0, 0]),
    "sethostname": (170, [0, 0]),
    "mknod": (133, [0, 0, 0]),
    "setuid": (105, [0]),
    "capset": (126, [0, 0]),
    "personality": (135, [0]),
    "modify_ldt": (154, [0, 0, 0]),
    "iopl": (172, [3]),
    "sync": (162, []),
    "syslog": (103, [2, 0, 0]),
    "memfd_secret": (447, [0]),
    "landlock": (444, [0, 0, 1]),
    "vmsplice": (278, [0, 0, 0, 0]),
    "io_setup": (206, [1, 0]),
    "shmget": (29, [0, 4096, 0o1600]),
    "mq_open": (240, [0, 0, 0, 0]),
}


def call_each(calls: dict[str, Any]) -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    found = {}
    for name, (number, arguments) in calls.items():
        ctypes.set_errno(0)
        answer = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(argument) for argument in arguments])
        found[name] = [answer, ctypes.get_errno()]
    return found


@pytest.fixture(scope="module")
def answers(shared: Kernel) -> dict[str, list[int]]:
    found: dict[str, list[int]] = shared.call(call_each, REFUSED)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_has_broken_out_of_containers_is_refused(answers: dict[str, list[int]], name: str) -> None:
    assert answers[name] in ([-1, errno.EPERM], [-1, errno.ENOSYS])
