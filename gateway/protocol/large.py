"""Large values of a MIME bundle: told apart from the event that carries them, and as the bytes that they stand for.

A MIME name is whatever a kernel chose to write. It becomes a media type of ours only when it is one (RFC 6838 section 4.2).
"""

import base64
import binascii
import re
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from gateway.protocol.events import Event

LIMIT = 64 * 1024
"""Bytes up to which a value stays in its event."""
_UNKNOWN = "application/octet-stream"
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}")
_BASE64 = re.compile(r"(image|audio|video)/(?!.*\+(xml|json)$)|application/pdf$")
"""What Jupyter sends as base64: https://jupyter-client.readthedocs.io/en/stable/messaging.html#display-data."""
_SPACE = str.maketrans("", "", " \t\r\n")


class Content(NamedTuple):
    """`media` is safe in a header."""

    body: bytes
    media: str


def content(mime: str, value: Any) -> Content:
    """The bytes of a bundle's value: binary types decoded, JSON types as JSON, everything else as UTF-8."""
    kind = mime.lower()
    media = mime if _MEDIA_TYPE.fullmatch(mime) else _UNKNOWN
    if kind == "application/json" or kind.endswith("+json"):
        return Content(orjson.dumps(value), media)
    if not isinstance(value, str):
        return Content(orjson.dumps(value), "application/json")
    if _BASE64.match(kind):
        try:
            return Content(base64.b64decode(value.translate(_SPACE), validate=True), media)
        except (binascii.Error, ValueError):
            return Content(value.encode(), _UNKNOWN)
    return Content(value.encode(), media)


def referenced(event: Event, prefix: str) -> bytes:
    """The event as JSON, its large values replaced by `references`; `prefix` is the URL path of the log's events."""
    data = event.members.get("data")
    if not isinstance(data, dict) or len(event.json) <= LIMIT:
        return event.json
    large = {mime: value for mime, value in data.items() if _is_large(value)}
    if not large:
        return event.json
    references = {
        mime: {"size": len(content(mime, value).body), "url": f"{prefix}/{event.seq}/data?type={quote(mime, safe='')}"}
        for mime, value in large.items()
    }
    rest = {mime: value for mime, value in data.items() if mime not in large}
    return orjson.dumps({**event.to_dict(), "data": rest, "references": references})


def _is_large(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) > LIMIT or (len(value) > LIMIT // 4 and len(value.encode()) > LIMIT)
    return isinstance(value, dict | list) and len(orjson.dumps(value)) > LIMIT
