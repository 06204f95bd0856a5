"""How the answers of a gateway are read: documents, problems, and the lines of an event stream. Pure."""

from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httpx2
import orjson

from gateway.client.errors import ApiError, NotAGateway
from gateway.client.results import Result
from gateway.protocol.events import Event, EventType

Document = dict[str, Any]

JSON_LINES = "application/x-ndjson"


def nothing(response: httpx2.Response) -> None:
    """For 204 and for answers of which only the success counts."""


def raw(response: httpx2.Response) -> bytes:
    return response.content


def content(response: httpx2.Response) -> bytes:
    require_file(response)
    return response.content


def require_file(response: httpx2.Response) -> None:
    """A directory answers a GET with its listing: a success that is not what was asked for. Files come as attachments."""
    if "content-disposition" not in response.headers:
        raise ApiError(
            code="not_a_file",
            status=409,
            title="It is a directory",
            detail=f"{unquote(response.url.path.partition('/files/')[2])} is a directory; `files.list` shows what is in it.",
            retryable=False,
            members={},
        )


def document(response: httpx2.Response) -> Document:
    value = _json(response.content)
    if not isinstance(value, dict):
        raise NotAGateway(str(response.url), f"HTTP {response.status_code} without a JSON object")
    return value


def result(response: httpx2.Response) -> Result:
    return to_result(document(response))


def to_result(found: Document) -> Result:
    """A Result document -> Result; members that this version does not know are left out."""
    return Result(
        execution_id=str(found.get("execution_id", "")),
        kernel_id=str(found.get("kernel_id", "")),
        status=str(found.get("status", "")),
        cause=found.get("cause"),
        execution_count=found.get("execution_count"),
        outputs=found.get("outputs") or [],
        kernel_state=found.get("kernel_state"),
        variables=found.get("variables"),
        duration=found.get("duration"),
        usage=found.get("usage"),
        truncated=found.get("truncated"),
        warnings=found.get("warnings") or [],
        gap=found.get("gap"),
        last_seq=found.get("last_seq"),
    )


def member(name: str) -> Callable[[httpx2.Response], Any]:
    """Reads one member of a JSON object."""

    def read(response: httpx2.Response) -> Any:
        found = document(response)
        if name not in found:
            raise NotAGateway(str(response.url), f"no {name!r} in the answer")
        return found[name]

    return read


def problem(response: httpx2.Response) -> ApiError:
    """An answer that is no success -> the error it stands for. The body must have been read."""
    found = _json(response.content)
    if not isinstance(found, dict) or not isinstance(found.get("code"), str):
        text = response.text.strip()[:200] or response.reason_phrase
        found = {"code": f"http_{response.status_code}", "title": response.reason_phrase, "detail": text}
    return ApiError(
        code=found["code"],
        status=response.status_code,
        title=str(found.get("title", "")),
        detail=str(found.get("detail", "")),
        retryable=found.get("retryable") is True,
        members={key: value for key, value in found.items() if key not in _PROBLEM_MEMBERS},
    )


_PROBLEM_MEMBERS = {"type", "title", "status", "code", "detail", "retryable"}


def _json(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None


def to_event(line: bytes) -> Event:
    """One line of JSON -> Event; raises `orjson.JSONDecodeError` when it is none."""
    members = orjson.loads(line)
    if not isinstance(members, dict) or "type" not in members:
        raise orjson.JSONDecodeError("not an event", line.decode("utf-8", "replace"), 0)
    return Event(
        seq=int(members.pop("seq", 0)),
        type=cast(EventType, members.pop("type")),
        time=str(members.pop("time", "")),
        execution_id=members.pop("execution_id", None),
        members=members,
    )


class EventLines:
    """Cuts a byte stream into Events.

    Only a newline byte ends a line: text inside JSON may hold the other line ends that `str.splitlines` knows.
    """

    def __init__(self) -> None:
        self._pending: list[bytes] = []

    def feed(self, chunk: bytes) -> list[Event]:
        *lines, rest = chunk.split(b"\n")
        events: list[Event] = []
        for line in lines:
            self._pending.append(line)
            whole = b"".join(self._pending)
            self._pending.clear()
            if whole.strip():
                events.append(to_event(whole))
        if rest:
            self._pending.append(rest)
        return events
