"""The work directory of a scripted sandbox: a tree in memory that refuses what the real supervisor refuses."""

import time
from typing import Any

from gateway.supervisor import frames


class Refused(Exception):
    """What the supervisor answers instead of a result."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class MemoryFiles:
    """Files by path; directories are there when something is in them, or when they were made."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        """Bytes of all files together; past it the disk is full."""
        self.contents: dict[str, bytes] = {}
        self.directories: set[str] = {""}

    @property
    def size(self) -> int:
        return sum(map(len, self.contents.values()))

    def list(self, path: str) -> dict[str, Any]:
        directory = self._clean(path)
        if directory in self.contents or directory not in self.directories:
            raise Refused("file_not_found", f"{directory}: No such directory")
        prefix = f"{directory}/" if directory else ""
        entries = [
            {
                "path": name,
                "name": name.removeprefix(prefix),
                "type": "file" if name in self.contents else "directory",
                "size": len(self.contents.get(name, b"")),
                "modified": time.time(),
            }
            for name in sorted({*self.contents, *self.directories} - {directory})
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        ]
        return {"entries": entries, "complete": True}

    def stat(self, path: str) -> dict[str, Any]:
        name = self._clean(path)
        if name in self.directories:
            return {"type": "directory", "size": 0}
        return {"type": "file", "size": len(self.read(path))}

    def read(self, path: str) -> bytes:
        name = self._clean(path)
        if name in self.directories:
            raise Refused("not_a_file", f"{name} is not a regular file but a directory")
        if name not in self.contents:
            raise Refused("file_not_found", f"{name}: No such file or directory")
        return self.contents[name]

    def check_write(self, path: str) -> str:
        """The name under which a file may be put; makes the directories above it."""
        name = self._clean(path)
        if not name or path.endswith("/"):
            raise Refused("invalid_path", "a file needs a name")
        if name in self.directories:
            raise Refused("not_a_file", f"{name} exists and is not a regular file but a directory")
        parts = name.split("/")[:-1]
        above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        if any(directory in self.contents for directory in above):
            raise Refused("file_not_found", f"{name}: Not a directory")
        self.directories.update(above)
        return name

    def has_room(self, size: int) -> bool:
        return self.size + size <= self.capacity

    def delete(self, path: str) -> dict[str, Any]:
        name = self._clean(path)
        if not name:
            raise Refused("invalid_path", "the work directory itself can't be deleted")
        if name not in self.contents and name not in self.directories:
            raise Refused("file_not_found", f"{name}: No such file or directory")
        for found in [*self.contents]:
            if found == name or found.startswith(f"{name}/"):
                del self.contents[found]
        self.directories = {found for found in self.directories if found != name and not found.startswith(f"{name}/")}
        return {}

    def _clean(self, path: str) -> str:
        parts = [part for part in path.split("/") if part]
        if path.startswith("/") or any(part in (".", "..") or "\0" in part for part in parts):
            raise Refused("invalid_path", "a path is relative to the work directory, without '.', '..' or NUL")
        return "/".join(parts)


class Reading:
    """A file on its way out, and the credit that its reader has granted."""

    def __init__(self, data: bytes) -> None:
        self.rest, self.credit = memoryview(data), frames.WINDOW

    def take(self) -> bytes:
        size = min(frames.CHUNK, self.credit)
        chunk, self.rest = bytes(self.rest[:size]), self.rest[size:]
        self.credit -= len(chunk)
        return chunk


class Writing:
    """A file on its way in, for the command that opened it."""

    def __init__(self, command: int, name: str) -> None:
        self.command, self.name, self.data = command, name, bytearray()
