"""Faults that a cell can cause: memory, disk, processes, descriptors, endless work, floods of output."""

from typing import Any

from tests.faults.matrix import Fault, Outcome, words
from tests.support import Event, Gateway, Kernel, printed

KEPT, LOST = "kept", "lost"


def ending(events: list[Event]) -> Event:
    """Every cell ends, once, last."""
    assert [event["type"] for event in events].count("ended") == 1
    assert events[-1]["type"] == "ended"
    return events[-1]


def prepared(kernel: Kernel) -> None:
    """Something to lose: a variable and a file."""
    kernel.run("treasure = 42; open('/work/treasure', 'w').write('42')")


def survivors(kernel: Kernel, events: list[Event]) -> Outcome:
    """What the next cell finds, held against what `ended` has said."""
    found = kernel.execute("print('treasure' in globals(), open('/work/treasure').read() == '42')")
    assert found["status"] == "ok", found
    variables, files = "".join(output.get("text", "") for output in found["outputs"]).split()
    assert ending(events)["variables"] == (KEPT if variables == "True" else LOST)
    return Outcome(words(events), KEPT if variables == "True" else LOST, KEPT if files == "True" else LOST)


def after_cell(gateway: Gateway, code: str, expected: tuple[str, str | None], **fields: Any) -> Outcome:
    """Runs a harmful cell; `expected` is the status and the cause's code of its end."""
    with gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events(code, **fields)
        end = ending(events)
        cause = end["cause"]["code"] if end["cause"] else None
        assert (end["status"], cause) == expected, end
        return survivors(kernel, events)


def out_of_memory(gateway: Gateway) -> Outcome:
    # Shared memory is not what RLIMIT_DATA counts, so it is the cgroup that ends it.
    code = "import mmap\nm = mmap.mmap(-1, 3 << 30)\nfor i in range(0, 3 << 30, 4096): m[i] = 1"
    with gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events(code)
        cause = ending(events)["cause"]
        assert cause["code"] == "out_of_memory", cause
        assert 0 < cause["memory_peak"] <= cause["memory_limit"] == kernel.document()["limits"]["memory"]
        return survivors(kernel, events)


def memory_error(gateway: Gateway) -> Outcome:
    return after_cell(gateway, "block = bytearray(3 << 30)", ("error", "memory_error"))


def child_out_of_memory(gateway: Gateway) -> Outcome:
    code = (
        "import subprocess, sys, time\n"
        "hog = 'import mmap; m = mmap.mmap(-1, 3 << 30)\\nfor i in range(0, 3 << 30, 4096): m[i] = 1'\n"
        "print(subprocess.run([sys.executable, '-c', hog]).returncode)\ntime.sleep(1)"
    )
    with gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events(code)
        assert ending(events)["status"] == "ok"
        assert "-9" in printed(events)
        assert "child_out_of_memory" in [event.get("code") for event in events]
        return survivors(kernel, events)


_DISK_FULL = """
import os
for directory in ('/tmp', '/dev/shm', '/work'):
    try:
        file = open(directory + '/fill', 'wb', buffering=0)
        while True:
            file.write(bytes(1 << 20))
    except OSError as error:
        print(directory, error.errno)
        if directory == '/work':
            raise
    finally:
        os.unlink(directory + '/fill')
"""


def disk_full(gateway: Gateway) -> Outcome:
    return after_cell(gateway, _DISK_FULL, ("error", "disk_full"))


_FORK_BOMB = """
import os, time, signal
children = []
try:
    while True:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


def fork_bomb(gateway: Gateway) -> Outcome:
    return after_cell(gateway, _FORK_BOMB, ("error", "process_limit"))


_THREAD_BOMB = """
import threading
done = threading.Event()
try:
    for i in range(10_000):
        threading.Thread(target=done.wait, daemon=True).start()
finally:
    done.set()
"""


def thread_bomb(gateway: Gateway) -> Outcome:
    return after_cell(gateway, _THREAD_BOMB, ("error", "process_limit"))


def descriptors(gateway: Gateway) -> Outcome:
    """The kernel may live or die of it; what counts is that the end is told and the next cell runs."""
    with gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events("held = []\nwhile True: held.append(open('/dev/null'))", timeout=20)
        # Never the timeout: a kernel that can't answer any more ends at once and says why.
        assert ending(events)["status"] in ("error", "died")
        if ending(events)["variables"] == KEPT:
            kernel.execute("del held")
        return survivors(kernel, events)


def endless_loop(gateway: Gateway) -> Outcome:
    return after_cell(gateway, "while True: pass", ("timeout", "cell_timeout"), timeout=1)


def deaf_loop(gateway: Gateway) -> Outcome:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"
    return after_cell(gateway, code, ("timeout", "cell_timeout"), timeout=1)


def c_loop(gateway: Gateway) -> Outcome:
    return after_cell(gateway, "9 ** 9 ** 9", ("timeout", "cell_timeout"), timeout=1)


_SLEEPING_THREADS = """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(5,)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def sleeping_threads(gateway: Gateway) -> Outcome:
    return after_cell(gateway, _SLEEPING_THREADS, ("timeout", "cell_timeout"), timeout=1)


def sleeping_child(gateway: Gateway) -> Outcome:
    return after_cell(gateway, "import subprocess; subprocess.run(['sleep', '600'])", ("timeout", "cell_timeout"), timeout=1)


def unanswered_input(gateway: Gateway) -> Outcome:
    return after_cell(gateway, "input('well? ')", ("timeout", "cell_timeout"), timeout=1, allow_stdin=True)


def stopped_process(gateway: Gateway) -> Outcome:
    return after_cell(
        gateway, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ("timeout", "cell_timeout"), timeout=1
    )


def print_flood(gateway: Gateway) -> Outcome:
    with gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events("for i in range(3_000_000): print(i)", timeout=300)
        text = printed(events)
        missing = sum(event["bytes"] for event in events if event["type"] == "truncated")
        assert text.startswith("0\n1\n2\n")
        assert text.endswith("2999999\n")
        assert missing or text.count("\n") == 3_000_000
        return survivors(kernel, events)


def raw_flood(gateway: Gateway) -> Outcome:
    code = "import os\nfor i in range(2000): os.write(1, b'x' * 65535 + b'\\n')"
    return after_cell(gateway, code, ("ok", None))


def huge_display(gateway: Gateway) -> Outcome:
    with gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events(
            "from IPython.display import display\ndisplay({'text/plain': 'x' * 140_000_000}, raw=True)", timeout=60
        )
        assert [event["type"] for event in events if event["type"] == "truncated"] == ["truncated"], words(events)
        return survivors(kernel, events)


def display_storm(gateway: Gateway) -> Outcome:
    code = (
        "from IPython.display import display, clear_output\nh = display(0, display_id=True)\n"
        "for i in range(3000): h.update(i)\nfor i in range(3000): clear_output(wait=True); print(i)"
    )
    return after_cell(gateway, code, ("ok", None))


def core_dump(gateway: Gateway) -> Outcome:
    with gateway.kernel() as kernel:
        prepared(kernel)
        events = kernel.events("import ctypes; ctypes.string_at(1)")
        assert ending(events)["cause"]["code"] == "signal"
        assert ending(events)["cause"]["signal"] == "SIGSEGV"
        assert "core" not in kernel.run("import os; print(os.listdir('/work'), os.listdir('/tmp'))")
        return survivors(kernel, events)


def exit_quietly(gateway: Gateway) -> Outcome:
    return after_cell(gateway, "import os; os._exit(0)", ("died", "exit"))


def kill_itself(gateway: Gateway) -> Outcome:
    return after_cell(gateway, "import os; os.kill(os.getpid(), 9)", ("died", "signal"))


_SYNC_STORM = """
import os
for i in range(200):
    with open('/work/s', 'w') as file:
        file.write('x')
        file.flush()
        os.fsync(file.fileno())
    try:
        os.sync()
    except OSError:
        pass
"""


def sync_storm(gateway: Gateway) -> Outcome:
    return after_cell(gateway, _SYNC_STORM, ("ok", None))


FAULTS = [
    Fault("R01", "use up the memory of the box", out_of_memory),
    Fault("R01b", "ask for more memory than there is at once", memory_error),
    Fault("R02", "a child process uses up the memory", child_out_of_memory),
    Fault("R03", "fill /tmp, /dev/shm and /work", disk_full),
    Fault("R06", "fork bomb", fork_bomb),
    Fault("R07", "10,000 threads", thread_bomb),
    Fault("R08", "open files until there are no more descriptors", descriptors),
    Fault("R09", "endless Python loop", endless_loop),
    Fault("R10", "endless loop that ignores SIGINT and SIGTERM", deaf_loop),
    Fault("R10b", "endless loop in C", c_loop),
    Fault("R10c", "sleep in threads that are joined", sleeping_threads),
    Fault("R10d", "wait for a child that sleeps", sleeping_child),
    Fault("R10e", "input() that nobody answers", unanswered_input),
    Fault("R10f", "the kernel process stops itself (SIGSTOP)", stopped_process),
    Fault("R12", "3,000,000 prints", print_flood),
    Fault("R13", "one display of 140 MB", huge_display),
    Fault("R13b", "3,000 updates of a display and 3,000 clears", display_storm),
    Fault("R14", "130 MB written to descriptor 1", raw_flood),
    Fault("R15", "segmentation fault", core_dump),
    Fault("R15b", "the process ends itself with code 0", exit_quietly),
    Fault("R18", "sync and fsync storm", sync_storm),
    Fault("F01", "SIGKILL to the kernel process", kill_itself),
]
