"""Files of the work directory, moved in and out as the sandbox's own user.

Every path is walked component by component from the open work directory with O_NOFOLLOW, so neither ``..`` nor a symbolic link
leads anywhere else. A file appears whole or not at all: it is written beside its place and renamed. Whole directories travel as
tar, made and unpacked by the image's own tar program. Streams move by credit: the side that reads grants what it can take.
"""

import contextlib
import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from typing import Any

_CODES = {
    errno.ENOENT: "file_not_found",
    errno.ENOTDIR: "file_not_found",
    errno.ELOOP: "not_a_file",
    errno.EISDIR: "not_a_file",
    errno.EEXIST: "not_a_file",
    errno.ENOTEMPTY: "not_a_file",
    errno.ENXIO: "not_a_file",
    errno.ENOSPC: "sandbox_disk_full",
    errno.EDQUOT: "sandbox_disk_full",
    errno.EFBIG: "sandbox_disk_full",
    errno.ENAMETOOLONG: "invalid_path",
}
MAX_ENTRIES = 10_000
"""Entries of one listing; a directory with more is cut and says so."""


class FileError(Exception):
    """A file operation was refused: `code` for programs, text for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """OSError -> `FileError` that names the path as the client gave it."""
    try:
        yield
    except OSError as error:
        code = _CODES.get(error.errno or 0, "not_a_file")
        raise FileError(code, f"{path or '.'}: {error.strerror or error}") from None
    except RecursionError:
        raise FileError("not_a_file", f"{path}: nested too deep; delete it from a cell") from None


def split(path: str) -> list[str]:
    """A relative path's components; raises `FileError` for anything but plain names."""
    parts = [part for part in path.split("/") if part]
    if path.startswith("/") or any(part in (".", "..") or "\0" in part for part in parts) or not _can_be_named(path):
        raise FileError("invalid_path", "a path is relative to the work directory, without '.', '..' or NUL")
    return parts


def _can_be_named(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


class WorkDirectory:
    """The one tree that clients may see."""

    def __init__(self, root: str) -> None:
        self.root = root

    @contextlib.contextmanager
    def _parent(self, parts: list[str], make: bool = False) -> Iterator[int]:
        """Descriptor of the directory that holds the last component."""
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=descriptor)
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_directory(self, path: str, make: bool = False) -> int:
        with self._parent([*split(path), "."], make) as descriptor:
            return os.dup(descriptor)

    def list(self, path: str) -> dict[str, Any]:
        """Entries of a directory, sorted by name; `complete` is False when it holds more than `MAX_ENTRIES`."""
        with translated(path):
            descriptor = self._open_directory(path)
            try:
                with os.scandir(descriptor) as found:
                    described = (_describe(path, entry) for _, entry in zip(range(MAX_ENTRIES + 1), found, strict=False))
                    entries = [entry for entry in described if entry is not None]
            finally:
                os.close(descriptor)
        complete = len(entries) <= MAX_ENTRIES
        return {"entries": sorted(entries[:MAX_ENTRIES], key=lambda e: e["name"]), "complete": complete}

    def stat(self, path: str) -> dict[str, Any]:
        parts = split(path)
        if not parts:
            return {"type": "directory", "size": 0}
        with translated(path), self._parent(parts) as parent:
            found = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
        return {"type": _type(found.st_mode), "size": found.st_size}

    def open_to_read(self, path: str) -> tuple[int, int]:
        """Descriptor and size of a regular file; raises `FileError`."""
        parts = split(path)
        if not parts:
            raise FileError("not_a_file", "the work directory itself is no file")
        with translated(path), self._parent(parts) as parent:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise FileError("not_a_file", f"{path} is not a regular file but a {_type(found.st_mode)}")
        return descriptor, found.st_size

    def delete(self, path: str) -> None:
        parts = split(path)
        if not parts:
            raise FileError("invalid_path", "the work directory itself can't be deleted")
        with translated(path), self._parent(parts) as parent:
            found = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                import shutil  # See `Channels.close`.

                shutil.rmtree(parts[-1], dir_fd=parent)
            else:
                os.unlink(parts[-1], dir_fd=parent)

    def create(self, path: str) -> "Upload":
        parts = split(path)
        if not parts or path.endswith("/"):
            raise FileError("invalid_path", "a file needs a name")
        return Upload(self, path, parts)

    def start_tar(self, path: str, unpack: bool) -> "subprocess.Popen[bytes]":
        """A tar process that packs the directory to its stdout, or unpacks its stdin there; raises `FileError`."""
        with translated(path):
            descriptor = self._open_directory(path, make=unpack)
            command = (
                ["tar", "-x", "--no-same-owner", "--no-same-permissions", "-f", "-"]
                if unpack
                else ["tar", "-c", "-f", "-", "."]
            )
            try:
                return subprocess.Popen(
                    command,
                    cwd=f"/proc/self/fd/{descriptor}",
                    pass_fds=(descriptor,),
                    stdin=subprocess.PIPE if unpack else subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if unpack else subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            finally:
                os.close(descriptor)


class Upload:
    """One file on its way in."""

    def __init__(self, work: WorkDirectory, path: str, parts: list[str]) -> None:
        self.path, self.size = path, 0
        self._name = parts[-1]
        # A part of the name, since characters of four bytes count as such toward the 255 of a name.
        self._temporary = f".{parts[-1][:50]}.{os.urandom(4).hex()}.upload"
        with translated(path), work._parent(parts, make=True) as parent:
            self._parent = os.dup(parent)
            try:
                self._refuse_other_types()
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                self._file = os.open(self._temporary, flags, 0o644, dir_fd=self._parent)
            except (OSError, FileError):
                os.close(self._parent)
                raise

    def _refuse_other_types(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self._name, dir_fd=self._parent, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise FileError("not_a_file", f"{self.path} exists and is not a regular file but a {_type(found.st_mode)}")

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with translated(self.path):
            while view:
                written = os.write(self._file, view)
                self.size += written
                view = view[written:]

    def finish(self) -> dict[str, Any]:
        with translated(self.path):
            os.replace(self._temporary, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        self._close()
        return {"size": self.size}

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._parent)
        self._close()

    def _close(self) -> None:
        os.close(self._file)
        os.close(self._parent)


def _type(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _describe(directory: str, entry: "os.DirEntry[str]") -> dict[str, Any] | None:
    """An entry of a listing; None when a cell has deleted it at this moment."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    prefix = f"{directory.strip('/')}/" if directory.strip("/") else ""
    return {
        "path": prefix + entry.name,
        "name": entry.name,
        "type": _type(found.st_mode),
        "size": found.st_size,
        "modified": found.st_mtime,
    }
