"""F11: the disk of the store is full, turns read-only, or the file is damaged. New work is refused, what runs goes on, nothing that
was told is ever lost, and what could not be told yet is told once there is room again."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_gateway_death import Mortal, read_on, so_far, state, submit, until, whole
from tests.support import Event, Kernel, eventually, printed, problem

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts disks")]

_LINES = 200
_COUNTS = f"import time\nfor number in range({_LINES}): print(number, 'x' * 500, flush=True); time.sleep(0.05)\ntreasure = 42"
COUNTED = "".join(f"{number} {'x' * 500}\n" for number in range(_LINES))


@contextlib.contextmanager
def small_disk(size: str = "4m") -> Iterator[Path]:
    """A disk of its own, so that it can be filled."""
    where = Path(tempfile.mkdtemp(prefix="cgd-", dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", where], check=True)
        where.rmdir()


class Medium:
    """A disk with a file system whose device can fail: from then on it is read-only, however many files are open."""

    def __init__(self) -> None:
        self.where = Path(tempfile.mkdtemp(prefix="cgd-", dir="/tmp"))
        self._image = self.where.with_suffix(".img")
        with self._image.open("wb") as image:
            image.truncate(64 * 1024 * 1024)
        subprocess.run(["mkfs.ext4", "-q", self._image], check=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.where], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", self.where], check=True)

    def fail(self) -> None:
        subprocess.run(["mount", "-o", "remount,abort", self.where], check=True)

    def remount(self, mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", self.where], check=True)

    @contextlib.contextmanager
    def there(self) -> Iterator["Medium"]:
        try:
            yield self
        finally:
            subprocess.run(["umount", "--lazy", self.where], check=True)
            self.where.rmdir()
            self._image.unlink()


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def health(mortal: Mortal) -> str:
    found: str = mortal.gateway.http.get("/healthz").json()["status"]
    return found


def degraded(mortal: Mortal, kernel: Kernel) -> None:
    """The store fails: it is known, new work is refused, and the kernel lives on."""
    eventually(lambda: health(mortal) == "degraded", "degraded")
    told = problem(kernel.post("1", detach=True), 503, "store_unavailable")
    assert told["retryable"]
    problem(mortal.gateway.http.post("/v1/kernels", json={}), 503, "store_unavailable")
    assert mortal.kernels() == {kernel.id: "busy"}
    assert kernel.document()["cause"] is None


def running_cell(mortal: Mortal) -> tuple[Kernel, str]:
    kernel = mortal.kernel()
    running = submit(kernel, _COUNTS)
    until(kernel, running, "stream")
    return kernel, running


def all_there(kernel: Kernel, running: str, seen: list[Event]) -> None:
    """Everything that a reader has ever been told, and everything that the cell has printed."""
    events = whole(read_on(kernel, running))
    assert events[: len(seen)] == seen
    assert printed(events) == COUNTED
    assert events[-1]["status"] == "ok"
    assert kernel.value("treasure") == "42"


def test_a_full_disk_holds_up_the_news_and_nothing_else() -> None:
    with small_disk() as disk, Mortal(store={"path": disk / "store"}) as mortal:
        kernel, running = running_cell(mortal)
        ballast = fill(disk)
        degraded(mortal, kernel)
        seen = so_far(kernel, running)
        # far past the end of the cell
        time.sleep(15)
        assert so_far(kernel, running) == seen
        assert health(mortal) == "degraded"
        problem(mortal.gateway.http.post("/v1/kernels", json={}), 503, "store_unavailable")
        ballast.unlink()
        all_there(kernel, running, seen)
        assert health(mortal) == "ok"
        other = mortal.kernel()
        other.delete()
        mortal.reborn()
        all_there(mortal.kernel(kernel), running, seen)


def test_a_delete_on_a_full_disk_is_a_delete() -> None:
    """What a client wants to get rid of goes, whether that can be written down or not."""
    with small_disk() as disk, Mortal(store={"path": disk / "store"}) as mortal:
        kernel, _ = running_cell(mortal)
        ballast = fill(disk)
        degraded(mortal, kernel)
        kernel.delete()
        assert (mortal.kernels(), mortal.containers()) == ({}, [])
        mortal.kill()
        ballast.unlink()
        mortal.start()
        # The record says that it should be there; the engine knows better.
        kernel = mortal.kernel(kernel)
        eventually(lambda: kernel.http.get(kernel.path).json().get("state") in (None, "dead"), "not alive")
        problem(
            kernel.post("1"),
            *((410, "kernel_gone") if kernel.http.get(kernel.path).status_code == 410 else (409, "kernel_dead")),
        )


def test_killed_while_the_disk_is_full() -> None:
    with small_disk() as disk, Mortal(store={"path": disk / "store"}) as mortal:
        kernel, running = running_cell(mortal)
        ballast = fill(disk)
        degraded(mortal, kernel)
        seen = so_far(kernel, running)
        mortal.kill()
        time.sleep(1)
        mortal.launch()
        code, text = mortal.word()
        mortal.wait()
        # Either it can't start on such a disk and says so, or it starts and knows of it.
        if code != "url":
            assert (code, "full" in text) == ("configuration_error", True), text
        mortal.wait() if code != "url" else mortal.kill()
        assert mortal.containers() == [kernel.id]
        ballast.unlink()
        mortal.start()
        kernel = mortal.kernel(kernel)
        all_there(kernel, running, seen)


def test_a_disk_that_fails() -> None:
    """What a file system has not written when its device fails is lost, as when the machine's power fails: so here it has."""
    with Medium().there() as medium, Mortal(store={"path": medium.where / "store"}) as mortal:
        kernel = mortal.kernel()
        running = submit(kernel, f"print('first', flush=True); import time; time.sleep(6)\n{_COUNTS}")
        until(kernel, running, "stream")
        time.sleep(1)
        os.sync()
        medium.fail()
        degraded(mortal, kernel)
        seen = so_far(kernel, running)
        time.sleep(2)
        assert so_far(kernel, running) == seen
        mortal.kill()
        assert mortal.containers() == [kernel.id]
        medium.unmount()
        medium.mount()
        mortal.start()
        kernel = mortal.kernel(kernel)
        events = whole(read_on(kernel, running))
        assert (events[: len(seen)], printed(events)) == (seen, "first\n" + COUNTED)
        assert kernel.value("treasure") == "42"


def test_no_start_on_a_disk_that_is_read_only() -> None:
    with Medium().there() as medium, Mortal(store={"path": medium.where / "store"}) as mortal:
        kernel, running = running_cell(mortal)
        seen = so_far(kernel, running)
        mortal.kill()
        medium.remount("ro")
        mortal.launch()
        code, text = mortal.word()
        mortal.wait()
        assert (code, "read-only" in text) == ("configuration_error", True), text
        assert mortal.containers() == [kernel.id]
        medium.remount("rw")
        mortal.start()
        all_there(mortal.kernel(kernel), running, seen)


@pytest.mark.parametrize("harm", ["garbage", "truncated", "a page"])
def test_a_damaged_store_is_refused_and_costs_no_kernel(harm: str) -> None:
    with Mortal() as mortal:
        kernel, running = running_cell(mortal)
        seen = so_far(kernel, running)
        mortal.kill()
        path = mortal.directory / "store.sqlite3"
        saved = mortal.directory / "saved"
        saved.mkdir()
        for found in mortal.directory.glob("store.sqlite3*"):
            shutil.move(found, saved / found.name)
            shutil.copy(saved / found.name, found)
        _damage(path, harm)
        mortal.launch()
        code, text = mortal.word()
        mortal.wait()
        assert (code, "damaged" in text, str(path) in text) == ("configuration_error", True, True), text
        assert mortal.containers() == [kernel.id]
        for found in mortal.directory.glob("store.sqlite3*"):
            found.unlink()
        for found in saved.iterdir():
            shutil.move(found, mortal.directory / found.name)
        mortal.start()
        kernel = mortal.kernel(kernel)
        state(kernel, "idle", "busy")
        all_there(kernel, running, seen)


def _damage(path: Path, harm: str) -> None:
    # Nothing of the journal may mend it.
    for name in ("-wal", "-shm"):
        Path(f"{path}{name}").unlink(missing_ok=True)
    if harm == "garbage":
        path.write_bytes(b"this is my diary\n" * 1000)
    elif harm == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * 4096 * 3)
