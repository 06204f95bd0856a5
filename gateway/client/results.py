"""The Result of one execution, with the parts that programs ask for most: its text, its images, its error.

Outputs come from cell code, so no shape inside them is trusted: what is not as Jupyter defines it is left out.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

IMAGE_TYPES = ("image/png", "image/jpeg", "image/svg+xml", "image/gif", "image/webp")


@dataclass(frozen=True, slots=True)
class CellError:
    """The exception that ended a cell. `traceback` lines carry ANSI colours."""

    ename: str
    evalue: str
    traceback: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Result:
    """How an execution stands or ended; the members are those of docs/native-api.md. `duration` in seconds.

    `truncated` and `gap` count what is missing from the outputs, None when nothing is. `last_seq` is the number of the last
    event in it: what `Kernel.events` goes on after.
    """

    execution_id: str
    kernel_id: str
    status: str
    cause: dict[str, Any] | None
    execution_count: int | None
    outputs: list[dict[str, Any]] = field(repr=False)
    kernel_state: str | None
    variables: str | None
    duration: float | None
    usage: dict[str, Any] | None = None
    truncated: dict[str, Any] | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    gap: dict[str, Any] | None = None
    last_seq: int | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "running")

    @property
    def text(self) -> str:
        """All that was printed to stdout and the text form of all that was shown, in order."""
        return "".join(_texts(self.outputs))

    @property
    def images(self) -> list[dict[str, bytes]]:
        """One dict of MIME type to bytes for each output that holds an image."""
        return [found for output in self.outputs if (found := images(output))]

    @property
    def error(self) -> CellError | None:
        """The last error among the outputs; None when the cell raised nothing."""
        for output in reversed(self.outputs):
            if output.get("output_type") == "error":
                lines = tuple(str(line) for line in output.get("traceback", ()))
                return CellError(str(output.get("ename", "")), str(output.get("evalue", "")), lines)
        return None


def images(output: dict[str, Any]) -> dict[str, bytes]:
    """The images of one nbformat output: MIME type -> bytes. What is no valid base64 is left out."""
    data = output.get("data")
    found: dict[str, bytes] = {}
    for mime in IMAGE_TYPES:
        content = _joined(data.get(mime)) if isinstance(data, dict) else ""
        if not content:
            continue
        if mime == "image/svg+xml":
            found[mime] = content.encode()
            continue
        try:
            found[mime] = base64.b64decode("".join(content.split()), validate=True)
        except ValueError:
            continue
    return found


def _texts(outputs: list[dict[str, Any]]) -> Iterator[str]:
    """Pieces of text; what was shown ends with a newline, as a terminal would have it."""
    for output in outputs:
        if output.get("output_type") == "stream":
            if output.get("name") == "stdout":
                yield _joined(output.get("text"))
        elif isinstance(output.get("data"), dict) and (text := _joined(output["data"].get("text/plain"))):
            yield text + "\n"


def _joined(value: Any) -> str:
    """nbformat allows a list of lines wherever it allows text."""
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""
