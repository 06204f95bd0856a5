"""Files of the work directory, on a real directory: no path and no link leads out of it, and no file is ever half there."""

import io
import itertools
import os
import socket
import stat
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.supervisor import files
from gateway.supervisor.files import FileError, WorkDirectory, split

SECRET = b"the host's own"


@pytest.fixture
def work(tmp_path: Path) -> WorkDirectory:
    """A work directory with a file, a directory, and links that lead out of it."""
    root, outside = tmp_path / "work", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    (root / "file").write_bytes(b"content")
    (root / "dir").mkdir()
    (root / "dir" / "inner").write_bytes(b"inner")
    (root / "link").symlink_to(outside)
    (root / "filelink").symlink_to(outside / "secret")
    (root / "here").symlink_to("file")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(root / "sock"))
    return WorkDirectory(str(root))


@pytest.fixture
def root(work: WorkDirectory) -> Path:
    return Path(work.root)


@pytest.fixture(autouse=True)
def nothing_outside_changes(tmp_path: Path) -> Iterator[None]:
    yield
    outside = tmp_path / "outside"
    if outside.exists():
        assert [entry.name for entry in outside.iterdir()] == ["secret"]
        assert (outside / "secret").read_bytes() == SECRET


@pytest.fixture(autouse=True)
def no_descriptor_is_left(work: WorkDirectory) -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert len(set(os.listdir("/proc/self/fd"))) == len(before)


def read(work: WorkDirectory, path: str) -> bytes:
    descriptor, size = work.open_to_read(path)
    with open(descriptor, "rb") as file:
        content = file.read()
    assert len(content) == size
    return content


def write(work: WorkDirectory, path: str, content: bytes) -> dict[str, Any]:
    upload = work.create(path)
    upload.write(content)
    return upload.finish()


OPERATIONS: dict[str, Callable[[WorkDirectory, str], Any]] = {
    "list": WorkDirectory.list,
    "stat": WorkDirectory.stat,
    "read": read,
    "delete": WorkDirectory.delete,
    "write": lambda work, path: write(work, path, b"new"),
    "pack": lambda work, path: work.start_tar(path, unpack=False),
    "unpack": lambda work, path: work.start_tar(path, unpack=True),
}
TRICKS = [
    "..",
    "../outside/secret",
    "dir/../../outside/secret",
    "dir/..",
    "./file",
    ".",
    "dir/.",
    "/etc/passwd",
    "/",
    "//file",
    "fi\0le",
    "\0",
    "dir/\0/x",
]


@pytest.mark.parametrize("path", TRICKS, ids=repr)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_paths_that_are_no_plain_paths_are_refused(work: WorkDirectory, operation: str, path: str) -> None:
    with pytest.raises(FileError) as error:
        OPERATIONS[operation](work, path)
    assert error.value.code == "invalid_path"


@pytest.mark.parametrize(
    "path", ["link/secret", "link/new", "link/a/b", "filelink/x", "dangling/x", "here/x", "fifo/x", "sock/x", "file/x"]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_links_and_files_on_the_way_are_not_passed(work: WorkDirectory, operation: str, path: str) -> None:
    with pytest.raises(FileError) as error:
        OPERATIONS[operation](work, path)
    assert error.value.code in ("file_not_found", "not_a_file")
    assert path in str(error.value)


@pytest.mark.parametrize("path", ["link", "filelink", "here", "dangling", "fifo", "sock"])
@pytest.mark.parametrize("operation", ["read", "write", "list", "pack", "unpack"])
def test_what_is_no_file_and_no_directory_is_not_opened(work: WorkDirectory, operation: str, path: str) -> None:
    with pytest.raises(FileError) as error:
        OPERATIONS[operation](work, path)
    assert error.value.code in ("file_not_found", "not_a_file")


@pytest.mark.parametrize(("operation", "path"), [("read", "dir"), ("write", "dir"), ("list", "file"), ("pack", "file")])
def test_files_are_no_directories_and_the_other_way_round(work: WorkDirectory, operation: str, path: str) -> None:
    with pytest.raises(FileError) as error:
        OPERATIONS[operation](work, path)
    assert error.value.code in ("not_a_file", "file_not_found")


@pytest.mark.parametrize("operation", ["read", "stat", "delete", "list", "pack"])
def test_what_is_not_there_is_not_found(work: WorkDirectory, operation: str) -> None:
    for path in ("missing", "missing/deeper", "dir/missing"):
        with pytest.raises(FileError) as error:
            OPERATIONS[operation](work, path)
        assert error.value.code == "file_not_found"


@pytest.mark.parametrize("operation", ["read", "write", "delete"])
def test_the_work_directory_itself_is_no_file(work: WorkDirectory, root: Path, operation: str) -> None:
    with pytest.raises(FileError):
        OPERATIONS[operation](work, "")
    assert (root / "file").exists()


@given(st.text(max_size=20))
def test_split_gives_plain_names_or_refuses(path: str) -> None:
    try:
        parts = split(path)
    except FileError:
        return
    assert all(part not in ("", ".", "..") and "/" not in part and "\0" not in part for part in parts)
    assert "/".join(parts) == "/".join(part for part in path.split("/") if part)


# looking


def test_stat_says_what_is_there_and_follows_nothing(work: WorkDirectory) -> None:
    kinds = {name: work.stat(name)["type"] for name in ("file", "dir", "link", "filelink", "dangling", "fifo", "sock")}
    assert kinds == {
        "file": "file",
        "dir": "directory",
        "link": "symlink",
        "filelink": "symlink",
        "dangling": "symlink",
        "fifo": "other",
        "sock": "other",
    }
    assert work.stat("file")["size"] == 7
    assert work.stat("") == {"type": "directory", "size": 0}


@pytest.mark.parametrize("path", ["", "dir", "dir/", "dir//"])
def test_a_listing_names_each_entry_with_its_path(work: WorkDirectory, path: str) -> None:
    found = work.list(path)
    names = ["dangling", "dir", "fifo", "file", "filelink", "here", "link", "sock"] if not path else ["inner"]
    assert [entry["name"] for entry in found["entries"]] == names
    assert all(entry["path"] == (f"dir/{entry['name']}" if path else entry["name"]) for entry in found["entries"])
    assert found["complete"] is True


def test_a_listing_is_bounded_and_says_so(work: WorkDirectory, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 5)
    many = root / "many"
    many.mkdir()
    for count, complete in ((4, True), (5, True), (6, False), (9, False)):
        for number in range(count):
            (many / f"{number:03}").touch()
        found = work.list("many")
        assert (len(found["entries"]), found["complete"]) == (min(count, 5), complete)


def test_a_listing_leaves_out_what_vanishes_meanwhile(work: WorkDirectory, root: Path) -> None:
    """A cell may delete files at any moment; the rest is still there and is told."""
    busy = root / "busy"
    busy.mkdir()
    (busy / "stays").touch()
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(30):
                (busy / f"temporary{number}").touch()
            for number in range(30):
                (busy / f"temporary{number}").unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            assert "stays" in [entry["name"] for entry in work.list("busy")["entries"]]
    finally:
        stop.set()
        thread.join()


def test_names_that_are_not_utf8_are_listed_and_reached(work: WorkDirectory, root: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (root / name).write_bytes(b"x")
    assert name in [entry["name"] for entry in work.list("")["entries"]]
    assert read(work, name) == b"x"


@pytest.mark.parametrize("path", ["\ud800", "dir/\udfff\ud800"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_names_that_no_file_can_have_are_refused(work: WorkDirectory, operation: str, path: str) -> None:
    with pytest.raises(FileError) as error:
        OPERATIONS[operation](work, path)
    assert error.value.code == "invalid_path"


# writing


@pytest.mark.parametrize("path", ["new", "file", "dir/new", "a/b/c/new", "dir//new", "with space", "ünïcode", "-rf", "*"])
def test_a_file_appears_with_its_directories(work: WorkDirectory, root: Path, path: str) -> None:
    content = os.urandom(1000)
    assert write(work, path, content) == {"size": 1000}
    assert read(work, path) == content
    assert stat.S_IMODE((root / path).stat().st_mode) == 0o644


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "😀" * 63])
def test_the_longest_names(work: WorkDirectory, name: str) -> None:
    write(work, name, b"x")
    assert read(work, name) == b"x"
    with pytest.raises(FileError) as error:
        work.create(name + "xxxx")
    assert error.value.code == "invalid_path"


def test_a_path_of_many_levels(work: WorkDirectory) -> None:
    """Longer than any single path may be: each level is opened from the one above."""
    path = "/".join(["d" * 200] * 60) + "/file"
    assert len(path) > 4096
    write(work, path, b"deep")
    assert read(work, path) == b"deep"


def test_a_file_is_not_there_until_it_is_whole(work: WorkDirectory, root: Path) -> None:
    upload = work.create("file")
    upload.write(b"half of the new")
    assert (root / "file").read_bytes() == b"content"
    upload.write(b" content")
    upload.finish()
    assert (root / "file").read_bytes() == b"half of the new content"
    assert {entry.name for entry in root.iterdir() if "upload" in entry.name} == set()


def test_an_aborted_upload_leaves_nothing(work: WorkDirectory, root: Path) -> None:
    before = sorted(entry.name for entry in root.iterdir())
    upload = work.create("file")
    upload.write(b"half")
    upload.abort()
    assert sorted(entry.name for entry in root.iterdir()) == before
    assert (root / "file").read_bytes() == b"content"


def test_two_uploads_of_one_name_do_not_mix(work: WorkDirectory) -> None:
    first, second = work.create("x"), work.create("x")
    first.write(b"first")
    second.write(b"second")
    second.finish()
    first.finish()
    assert read(work, "x") == b"first"


def test_a_directory_in_the_place_of_the_file_at_the_end(work: WorkDirectory, root: Path) -> None:
    upload = work.create("x")
    (root / "x").mkdir()
    with pytest.raises(FileError) as error:
        upload.finish()
    assert error.value.code == "not_a_file"
    upload.abort()
    assert list((root / "x").iterdir()) == []


def test_a_link_put_in_the_place_of_the_file_is_replaced_not_followed(work: WorkDirectory, root: Path) -> None:
    upload = work.create("x")
    upload.write(b"new")
    (root / "x").symlink_to(root.parent / "outside" / "secret")
    upload.finish()
    assert not (root / "x").is_symlink()
    assert read(work, "x") == b"new"


def test_a_directory_moved_away_takes_the_upload_with_it(work: WorkDirectory, root: Path) -> None:
    upload = work.create("dir/x")
    (root / "dir").rename(root / "moved")
    (root / "dir").symlink_to(root.parent / "outside")
    upload.write(b"new")
    upload.finish()
    assert read(work, "moved/x") == b"new"


def test_a_temporary_file_deleted_meanwhile(work: WorkDirectory, root: Path) -> None:
    upload = work.create("x")
    for entry in root.iterdir():
        if entry.name.endswith(".upload"):
            entry.unlink()
    with pytest.raises(FileError) as error:
        upload.finish()
    assert error.value.code == "file_not_found"
    upload.abort()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """Linux's device that is always full, at the place of the temporary file."""
    upload = WorkDirectory(str(tmp_path)).create("x")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, upload._file)
    os.close(full)
    with pytest.raises(FileError) as error:
        upload.write(b"x")
    assert error.value.code == "sandbox_disk_full"
    assert "x: No space left on device" in str(error.value)
    upload.abort()
    assert {entry.name for entry in tmp_path.iterdir()} == {"work", "outside"}


# deleting


def test_a_tree_is_deleted_and_its_links_are_not_followed(work: WorkDirectory, root: Path) -> None:
    tree = root / "tree" / "deep"
    tree.mkdir(parents=True)
    (tree / "x").touch()
    (tree / "out").symlink_to(root.parent / "outside")
    (tree / "up").symlink_to("../..")
    (tree / "secret").symlink_to(root.parent / "outside" / "secret")
    work.delete("tree")
    assert not (root / "tree").exists()
    assert (root / "file").exists()


@pytest.mark.parametrize("path", ["link", "filelink", "dangling", "fifo", "sock", "file", "dir", "dir/inner", "dir/"])
def test_everything_can_be_deleted(work: WorkDirectory, root: Path, path: str) -> None:
    work.delete(path)
    assert not os.path.lexists(root / path.rstrip("/"))


def test_a_tree_deeper_than_any_program_can_go(work: WorkDirectory, root: Path) -> None:
    """What a cell can make must not end the supervisor when a client asks to delete it."""
    descriptor = os.open(root, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    try:
        with pytest.raises(FileError, match="d: nested too deep") as error:
            work.delete("d")
    finally:
        # Neither can pytest.
        subprocess.run(["rm", "-rf", root / "d"], check=True)
    assert error.value.code == "not_a_file"


# races


@pytest.mark.parametrize("operation", ["read", "write", "delete", "list", "pack", "unpack"])
def test_a_directory_that_becomes_a_link_all_the_time(work: WorkDirectory, root: Path, operation: str) -> None:
    """A cell swaps a directory for a link to the outside while a client moves files through it."""
    outside = root.parent / "outside"
    stop = threading.Event()
    os.mkdir(root / "real")
    (root / "real" / "secret").write_bytes(b"inside")
    os.symlink(outside, root / "evil")

    def swap() -> None:
        """`swapped` is in turn the directory and the link; what a writer makes in its place is put away."""
        for turn in itertools.count():
            name = ("real", "evil")[turn % 2]
            try:
                os.rename(root / name, root / "swapped")
                os.rename(root / "swapped", root / name)
            except OSError:
                os.rename(root / "swapped", root / f"made{turn}")
            if stop.is_set():
                return

    thread = threading.Thread(target=swap)
    thread.start()
    done = refused = 0
    try:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            try:
                if operation == "read":
                    assert read(work, "swapped/secret") == b"inside"
                elif operation == "write":
                    write(work, "swapped/new/er", b"new")
                elif operation == "delete":
                    work.delete("swapped/secret")
                    (root / "real" / "secret").write_bytes(b"inside")
                elif operation == "list":
                    assert {entry["name"] for entry in work.list("swapped")["entries"]} <= {"secret", "new"}
                else:
                    process = work.start_tar("swapped", unpack=operation == "unpack")
                    process.communicate(archive({"new": b"x"}) if operation == "unpack" else None)
                done += 1
            except FileError:
                refused += 1
            except FileNotFoundError:
                # Of the line that puts the file back: the directory is at its other name at this moment.
                continue
    finally:
        stop.set()
        thread.join()
    assert done + refused > 10
    assert (outside / "secret").read_bytes() == SECRET


def test_a_file_that_becomes_a_link_all_the_time(work: WorkDirectory, root: Path) -> None:
    outside = root.parent / "outside"
    stop = threading.Event()
    (root / "good").write_bytes(b"inside")
    (root / "evil").symlink_to(outside / "secret")

    def swap() -> None:
        while not stop.is_set():
            for name in ("good", "evil"):
                os.link(root / name, root / "fresh", follow_symlinks=False)
                os.replace(root / "fresh", root / "target")

    thread = threading.Thread(target=swap)
    thread.start()
    seen = 0
    refusals: set[str] = set()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            try:
                assert read(work, "target") == b"inside"
                seen += 1
            except FileError as error:
                refusals.add(error.code)
    finally:
        stop.set()
        thread.join()
    assert seen > 0
    assert refusals <= {"not_a_file", "file_not_found"}


# archives


def archive(members: dict[str, bytes | None], links: dict[str, str] | None = None, hard: bool = False) -> bytes:
    """A tar: files by name (None: a directory), then links by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.LNKTYPE if hard else tarfile.SYMTYPE
            info.linkname = target
            tar.addfile(info)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def unpack(work: WorkDirectory, path: str, content: bytes) -> tuple[int, str]:
    process = work.start_tar(path, unpack=True)
    _, said = process.communicate(content)
    return process.returncode, said.decode()


def test_a_directory_is_packed_without_following_links(work: WorkDirectory, root: Path) -> None:
    (root / "sock").unlink()
    (root / "fifo").unlink()
    process = work.start_tar("", unpack=False)
    content, _ = process.communicate()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        found = {member.name.removeprefix("./"): member for member in tar}
    assert found["link"].issym()
    assert found["filelink"].issym()
    assert found["dir/inner"].isfile()
    assert SECRET not in content


def test_what_was_packed_can_be_unpacked(work: WorkDirectory, root: Path) -> None:
    content, _ = work.start_tar("dir", unpack=False).communicate()
    assert unpack(work, "copy/of/it", content)[0] == 0
    assert (root / "copy" / "of" / "it" / "inner").read_bytes() == b"inner"


HOSTILE_ARCHIVES = {
    "up": archive({"../evil": b"x", "../../outside/secret": b"x", "a/../../../outside/secret": b"x"}),
    "absolute": archive({"/tmp/../tmp/outside/secret": b"x"}),
    "a link and a file through it": archive({"l/secret": b"x", "l/new": b"x"}, {"l": "../outside"}),
    "an absolute link and a file through it": archive({"l/secret": b"x"}, {"l": "OUTSIDE"}),
    "a link to a file and the file": archive({"l": b"x"}, {"l": "../outside/secret"}),
    "links on links": archive({"b/secret": b"x"}, {"a": "..", "b": "a/outside"}),
    "a hard link outside": archive({"h": b"x"}, {"h": "../outside/secret"}, hard=True),
    "a hard link to a link": archive({"h/secret": b"x"}, {"h": "link"}, hard=True),
}


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_a_hostile_archive_changes_nothing_outside(work: WorkDirectory, root: Path, name: str) -> None:
    content = HOSTILE_ARCHIVES[name].replace(b"OUTSIDE\0", os.fsencode(root.parent / "outside")[:7].ljust(8, b"\0"))
    unpack(work, "into", content)
    assert not (root.parent / "evil").exists()
    assert (root.parent / "outside" / "secret").read_bytes() == SECRET


def test_an_archive_that_lies_about_its_length_is_refused(work: WorkDirectory) -> None:
    assert unpack(work, "into", archive({"x": b"y" * 5000})[:2000])[0] != 0


@pytest.mark.parametrize("content", [b"garbage" * 500, os.urandom(20_000)], ids=["text", "noise"])
def test_what_is_no_archive_is_refused(work: WorkDirectory, content: bytes) -> None:
    code, said = unpack(work, "into", content)
    assert code != 0
    assert said


def test_an_archive_gives_no_file_another_owner_or_special_bits(work: WorkDirectory, root: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("x")
        info.uid = info.gid = 4321
        info.mode = 0o6777
        tar.addfile(info)
    assert unpack(work, "into", buffer.getvalue())[0] == 0
    found = (root / "into" / "x").stat()
    assert found.st_uid == os.getuid()
    assert not found.st_mode & (stat.S_ISUID | stat.S_ISGID)
