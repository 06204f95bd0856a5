"""The images of a run as files, `NAME-cellNN-K.png`: written as they come, put right when an output changes later."""

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.client.results import images
from gateway.protocol.events import Event

EXTENSIONS = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One image of an output. `size` is width and height in pixels, None when the format doesn't say simply."""

    mime: str
    size: tuple[int, int] | None
    path: Path | None = None


class Figures:
    """The figure files of one notebook. Without a directory nothing is written."""

    def __init__(self, stem: str, directory: Path | None = None) -> None:
        self._stem = stem
        self._directory = directory
        self._written: dict[Path, bytes] = {}

    def update(self, cell: int, outputs: list[dict[str, Any]]) -> list[Figure]:
        """Bring the files of a cell (numbered from 1) in line with its outputs; returns its figures in order."""
        found = [(figure, data) for output in outputs for figure, data in _images_of(output)]
        figures: list[Figure] = []
        for number, (figure, data) in enumerate(found, 1):
            path = self._write(f"{self._prefix(cell)}{number}.{EXTENSIONS[figure.mime]}", data)
            figures.append(replace(figure, path=path))
        self._remove_others(self._prefix(cell), {figure.path for figure in figures})
        return figures

    def save(self, cell: int, outputs: list[dict[str, Any]], event: Event) -> list[Figure] | None:
        """The figures that came with this event, saved; None for events that show nothing new."""
        if event.type not in ("display", "result"):
            return None
        count = len(figures_of(event.members["data"]))
        return self.update(cell, outputs)[-count:] if count else []

    @property
    def paths(self) -> list[Path]:
        return sorted(self._written)

    def _prefix(self, cell: int) -> str:
        return f"{self._stem}-cell{cell:02}-"

    def _write(self, name: str, data: bytes) -> Path | None:
        if self._directory is None:
            return None
        path = self._directory / name
        if self._written.get(path) != data:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            self._written[path] = data
        return path

    def _remove_others(self, prefix: str, kept: set[Path | None]) -> None:
        """An output that was cleared takes its file along; files of an earlier run are not touched."""
        for path in [path for path in self._written if path.name.startswith(prefix) and path not in kept]:
            path.unlink(missing_ok=True)
            del self._written[path]


def figures_of(data: dict[str, Any]) -> list[Figure]:
    """The figures of one MIME bundle."""
    return [figure for figure, _ in _images_of({"data": data})]


def _images_of(output: dict[str, Any]) -> list[tuple[Figure, bytes]]:
    return [(Figure(mime, size(mime, data)), data) for mime, data in images(output).items() if mime in EXTENSIONS]


def size(mime: str, data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels from the header of a PNG or JPEG."""
    if mime == "image/png" and data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return width, height
    if mime == "image/jpeg" and data[:2] == b"\xff\xd8":
        return _jpeg_size(data)
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Walk the segments up to the frame header (ITU-T T.81, B.2.2): 0xC0 to 0xCF without DHT, JPG and DAC."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], struct.unpack(">H", data[at + 2 : at + 4])[0]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        at += 2 + length
    return None
