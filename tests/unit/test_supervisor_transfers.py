"""File streams on the supervisor's side: credit is kept to, nothing blocks, and however a stream ends nothing of it is left."""

import io
import os
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.supervisor import frames
from gateway.supervisor.files import WorkDirectory
from gateway.supervisor.frames import CHUNK, WINDOW, Decoder, Frame, Kind
from gateway.supervisor.transfers import FileIn, FileOut, TarIn, TarOut, Transfer

STREAM = 5
PATIENCE = 10.0


class Said:
    """What a transfer has sent and replied."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.replies: list[dict[str, Any]] = []

    def send(self, data: bytes) -> None:
        self.frames += Decoder(1 << 24).feed(data)

    @property
    def data(self) -> bytes:
        return b"".join(frames.unpack_data(frame.payload)[1] for frame in self.frames if frame.kind is Kind.DATA)

    @property
    def credit(self) -> int:
        return sum(frames.unpack_credit(frame.payload)[1] for frame in self.frames if frame.kind is Kind.CREDIT)

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [frames.unpack_json(frame.payload[4:]) for frame in self.frames if frame.kind is Kind.DATA_END]


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def work(tmp_path: Path) -> WorkDirectory:
    return WorkDirectory(str(tmp_path))


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def pump_until(transfer: Transfer, condition: Callable[[], object]) -> None:
    """Pumps as the relay does, until something has come of it."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come"
        if not transfer.pump():
            time.sleep(0.001)


def file_out(work: WorkDirectory, said: Said, content: bytes) -> FileOut:
    Path(work.root, "x").write_bytes(content)
    descriptor, _ = work.open_to_read("x")
    return FileOut(STREAM, said.send, descriptor)


# a file out


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, WINDOW - 1])
def test_a_file_within_the_window_goes_out_at_once(work: WorkDirectory, said: Said, size: int) -> None:
    content = os.urandom(size)
    transfer = file_out(work, said, content)
    while transfer.pump():
        assert not transfer.done
    assert (said.data, said.ends, transfer.done) == (content, [{}], True)
    assert max((len(frame.payload) for frame in said.frames), default=0) <= CHUNK + 4


def test_a_larger_file_waits_for_credit(work: WorkDirectory, said: Said) -> None:
    content = os.urandom(WINDOW + 1000)
    transfer = file_out(work, said, content)
    while transfer.pump():
        pass
    assert len(said.data) == WINDOW
    assert not transfer.pump()
    transfer.grant(1)
    transfer.pump()
    assert len(said.data) == WINDOW + 1
    transfer.grant(1 << 20)
    pump_until(transfer, lambda: transfer.done)
    assert (said.data, said.ends) == (content, [{}])


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end(work: WorkDirectory, said: Said) -> None:
    transfer = file_out(work, said, b"first")
    transfer.pump()
    with open(Path(work.root, "x"), "ab") as file:
        file.write(b" second")
    pump_until(transfer, lambda: transfer.done)
    assert said.data == b"first second"


def test_the_gateway_may_stop_a_file_out(work: WorkDirectory, said: Said) -> None:
    transfer = file_out(work, said, bytes(WINDOW))
    transfer.pump()
    transfer.end({"error": {"code": "cancelled"}})
    assert transfer.done
    assert not transfer.pump()
    transfer.abort()
    assert said.ends == []


def test_a_read_error_is_told(work: WorkDirectory, said: Said) -> None:
    """A directory can be opened, and refuses to be read: any error of the file system would do."""
    transfer = FileOut(STREAM, said.send, os.open(work.root, os.O_RDONLY))
    transfer.pump()
    assert transfer.done
    assert said.ends == [{"error": {"code": "not_a_file", "message": "the file: Is a directory"}}]


# a file in


def file_in(work: WorkDirectory, said: Said) -> FileIn:
    return FileIn(STREAM, said.send, work.create("x"), said.replies.append)


def test_a_file_in_grants_what_it_has_written(work: WorkDirectory, said: Said) -> None:
    transfer = file_in(work, said)
    for chunk in (b"a" * 10, b"b" * 20):
        transfer.take(chunk)
    assert said.credit == 30
    assert not transfer.pump()
    transfer.end({})
    assert said.replies == [{"result": {"size": 30}}]
    assert transfer.done
    assert Path(work.root, "x").read_bytes() == b"a" * 10 + b"b" * 20


@pytest.mark.parametrize("how", ["error", "abort"])
def test_a_file_in_that_breaks_off_leaves_nothing(work: WorkDirectory, said: Said, how: str) -> None:
    transfer = file_in(work, said)
    transfer.take(b"half")
    if how == "error":
        transfer.end({"error": {"code": "cancelled"}})
    else:
        transfer.abort()
    transfer.abort()
    assert transfer.done
    assert said.replies == []
    assert os.listdir(work.root) == []


def fill_disk(transfer: FileIn) -> None:
    """From here on each write says what it says on a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, transfer._upload._file)
    os.close(full)


def test_a_full_disk_is_replied_once_and_leaves_nothing(work: WorkDirectory, said: Said) -> None:
    transfer = file_in(work, said)
    transfer.take(b"half")
    fill_disk(transfer)
    transfer.take(b"more")
    assert [reply["error"]["code"] for reply in said.replies] == ["sandbox_disk_full"]
    assert transfer.done
    assert os.listdir(work.root) == []


def test_data_and_end_after_a_failure_are_ignored(work: WorkDirectory, said: Said) -> None:
    """The gateway sends what was granted before it knows of the failure; the transfer is forgotten only at the next pump."""
    transfer = file_in(work, said)
    fill_disk(transfer)
    transfer.take(b"x")
    transfer.take(b"y")
    transfer.end({})
    transfer.end({"error": {}})
    assert len(said.replies) == 1


def test_a_place_taken_at_the_end_is_replied(work: WorkDirectory, said: Said) -> None:
    transfer = file_in(work, said)
    transfer.take(b"x")
    Path(work.root, "x").mkdir()
    transfer.end({})
    assert [reply["error"]["code"] for reply in said.replies] == ["not_a_file"]
    assert os.listdir(work.root) == ["x"]


# a directory out


def tree(work: WorkDirectory, files: int = 3, size: int = 1000) -> None:
    root = Path(work.root, "tree")
    root.mkdir()
    for number in range(files):
        (root / f"f{number}").write_bytes(os.urandom(size))


def tar_out(work: WorkDirectory, said: Said) -> TarOut:
    return TarOut(STREAM, said.send, work.start_tar("tree", unpack=False))


def test_a_directory_goes_out_as_tar(work: WorkDirectory, said: Said) -> None:
    tree(work)
    transfer = tar_out(work, said)
    pump_until(transfer, lambda: transfer.done)
    assert said.ends == [{}]
    with tarfile.open(fileobj=io.BytesIO(said.data)) as tar:
        assert sorted(tar.getnames()) == [".", "./f0", "./f1", "./f2"]


def test_a_directory_out_keeps_to_the_credit(work: WorkDirectory, said: Said) -> None:
    tree(work, files=4, size=WINDOW)
    transfer = tar_out(work, said)
    pump_until(transfer, lambda: len(said.data) == WINDOW)
    time.sleep(0.05)
    assert not transfer.pump()
    assert len(said.data) == WINDOW
    while not transfer.done:
        before = len(said.data)
        transfer.grant(CHUNK)
        pump_until(transfer, lambda before=before: transfer.done or len(said.data) > before)  # type: ignore[misc]
        assert len(said.data) <= before + CHUNK + WINDOW
    assert said.ends == [{}]


def test_a_directory_out_that_is_stopped_leaves_no_process(work: WorkDirectory, said: Said) -> None:
    tree(work, files=4, size=WINDOW)
    transfer = tar_out(work, said)
    pump_until(transfer, lambda: said.data)
    transfer.end({"error": {}})
    assert transfer.done
    assert transfer._process.returncode == -9
    transfer.abort()


def test_many_warnings_of_tar_do_not_stop_it(work: WorkDirectory, said: Said) -> None:
    """tar complains of each socket it meets; nobody reading that, it would wait for ever once a pipe is full."""
    root = Path(work.root, "tree")
    root.mkdir()
    here = os.getcwd()
    os.chdir(root)
    try:
        for number in range(1200):
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(f"{number:04}" + "s" * 90)
    finally:
        os.chdir(here)
    transfer = tar_out(work, said)
    pump_until(transfer, lambda: transfer.done)
    assert said.ends == [{}]


# a directory in


def archive(files: int = 3, size: int = 1000) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(files):
            info = tarfile.TarInfo(f"f{number}")
            info.size = size
            tar.addfile(info, io.BytesIO(os.urandom(size)))
    return buffer.getvalue()


def tar_in(work: WorkDirectory, said: Said) -> TarIn:
    return TarIn(STREAM, said.send, work.start_tar("into", unpack=True), said.replies.append)


def test_a_tar_is_unpacked_and_replied_once_all_is_there(work: WorkDirectory, said: Said) -> None:
    content = archive(files=20, size=20_000)
    transfer = tar_in(work, said)
    for start in range(0, len(content), 5000):
        transfer.take(content[start : start + 5000])
        pump_until(transfer, lambda start=start: said.credit == min(start + 5000, len(content)))  # type: ignore[misc]
    assert said.replies == []
    transfer.end({})
    pump_until(transfer, lambda: transfer.done)
    assert said.replies == [{"result": {}}]
    assert len(os.listdir(Path(work.root, "into"))) == 20


def test_an_end_right_behind_the_data_loses_nothing(work: WorkDirectory, said: Said) -> None:
    content = archive(files=10, size=90_000)
    transfer = tar_in(work, said)
    transfer.take(content)
    transfer.end({})
    pump_until(transfer, lambda: transfer.done)
    assert said.replies == [{"result": {}}]
    assert sorted(os.listdir(Path(work.root, "into"))) == [f"f{number}" for number in range(10)]
    assert {path.stat().st_size for path in Path(work.root, "into").iterdir()} == {90_000}


def test_a_tar_that_is_broken_off_leaves_no_process(work: WorkDirectory, said: Said) -> None:
    transfer = tar_in(work, said)
    transfer.take(archive()[:1500])
    transfer.end({"error": {"code": "cancelled"}})
    assert transfer.done
    assert transfer._process.returncode == -9
    assert said.replies == []


@pytest.mark.parametrize("content", [b"this is no tar" * 1000, os.urandom(3 * WINDOW)], ids=["small", "large"])
def test_what_is_no_tar_is_refused(work: WorkDirectory, said: Said, content: bytes) -> None:
    transfer = tar_in(work, said)
    transfer.take(content)
    transfer.end({})
    pump_until(transfer, lambda: transfer.done)
    assert [reply["error"]["code"] for reply in said.replies] == ["malformed_archive"]


def test_data_after_tar_has_closed_its_input_is_dropped(work: WorkDirectory, said: Said) -> None:
    """The descriptor it was for is closed and its number may be another file's by now."""
    process = subprocess.Popen(
        ["sh", "-c", "exec 0<&-; sleep 0.3; exit 2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    transfer = TarIn(STREAM, said.send, process, said.replies.append)
    end = time.monotonic() + PATIENCE
    while process.stdin is not None and not process.stdin.closed:
        assert time.monotonic() < end
        transfer.take(b"x" * 1000)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        for _ in range(50):
            transfer.take(b"y" * 1000)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)
    transfer.end({})
    pump_until(transfer, lambda: transfer.done)
    assert [reply["error"]["code"] for reply in said.replies] == ["malformed_archive"]


@pytest.mark.parametrize(
    ("complaint", "code"),
    [
        ("tar: f: Cannot write: No space left on device", "sandbox_disk_full"),
        ("tar: f: Wrote only 4096 of 10240 bytes", "sandbox_disk_full"),
        ("tar: f: Cannot open: Permission denied", "malformed_archive"),
        ("", "malformed_archive"),
    ],
)
def test_what_tar_complains_of_says_why(said: Said, complaint: str, code: str) -> None:
    command = f"cat > /dev/null; printf '%s' '{complaint}' >&2; exit 2"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    transfer = TarIn(STREAM, said.send, subprocess.Popen(["sh", "-c", command], **pipes), said.replies.append)
    transfer.take(b"x")
    transfer.end({})
    pump_until(transfer, lambda: transfer.done)
    assert said.replies == [{"error": {"code": code, "message": complaint or "tar ended with 2"}}]


def test_many_complaints_of_tar_do_not_stop_it(work: WorkDirectory, said: Said) -> None:
    """Each member of this archive can't be made, and tar says so in more bytes than a pipe holds."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(1500):
            tar.addfile(tarfile.TarInfo(f"file/{'n' * 80}{number}"))
    Path(work.root, "into").mkdir()
    Path(work.root, "into", "file").write_bytes(b"a file where a directory should be")
    transfer = tar_in(work, said)
    transfer.take(buffer.getvalue())
    transfer.end({})
    pump_until(transfer, lambda: transfer.done)
    assert [reply["error"]["code"] for reply in said.replies] == ["malformed_archive"]
    assert len(said.replies[0]["error"]["message"]) <= 2000


@pytest.mark.parametrize("kind", ["out", "in"])
def test_what_does_not_concern_a_stream_is_ignored(work: WorkDirectory, said: Said, kind: str) -> None:
    tree(work)
    transfer: Transfer = tar_out(work, said) if kind == "out" else tar_in(work, said)
    if kind == "out":
        transfer.take(b"data for a stream out")
    else:
        transfer.grant(5)
    assert not transfer.done
    transfer.abort()
    assert transfer.done
