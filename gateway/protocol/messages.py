"""Jupyter messages as they cross the link: split into parts, checked, and decoded without trust.

The wire format is the one of https://jupyter-client.readthedocs.io/en/stable/messaging.html#the-wire-protocol:
``[identities..., b"<IDS|MSG>", signature, header, parent_header, metadata, content, buffers...]``.
All of it comes from hostile code, so `decode_json` never raises anything but `BadMessage` and returns only values that can be
encoded as JSON again: no NaN, no lone surrogate, no integer beyond 64 bits.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

DELIMITER = b"<IDS|MSG>"
MAX_DEPTH = 200
"""Deepest nesting that is taken; plotly figures and notebooks stay below 30."""
MAX_VALUES = 4_000_000
"""Most values of one message, those of a large figure and more. Each is an object: ``[]`` takes 24 times the bytes of its text,
and a message of nothing else would hold up the gateway for seconds."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ORJSON_DEPTH = 254
"""Deepest nesting that `orjson.dumps` takes; an event or a notebook adds a few levels around a value."""


class BadMessage(ValueError):
    """A message from a sandbox breaks the protocol; it is counted and dropped."""


@dataclass(frozen=True, slots=True)
class RawMessage:
    """One message in its parts; only header and parent are decoded, the rest stays bytes until somebody needs it."""

    channel: str
    header: dict[str, Any]
    parent: dict[str, Any]
    signature: bytes
    signed: tuple[bytes, bytes, bytes, bytes]
    buffers: tuple[bytes, ...] = ()

    @property
    def msg_type(self) -> str:
        return str(self.header.get("msg_type", ""))

    @property
    def parent_id(self) -> str | None:
        value = self.parent.get("msg_id")
        return value if isinstance(value, str) else None

    def content(self) -> dict[str, Any]:
        """The content, decoded; raises `BadMessage` when it is no JSON object."""
        return decode_object(self.signed[3])

    def metadata(self) -> dict[str, Any]:
        return decode_object(self.signed[2])


def split(channel: str, parts: Sequence[bytes]) -> RawMessage:
    """Parts as they came from a socket -> message; raises `BadMessage`."""
    try:
        start = list(parts).index(DELIMITER)
    except ValueError:
        raise BadMessage("no delimiter") from None
    body = parts[start + 1 :]
    if len(body) < 5:
        raise BadMessage(f"{len(body)} parts after the delimiter, at least 5 needed")
    signature, header, parent, metadata, content = body[:5]
    return RawMessage(
        channel=channel,
        header=decode_object(header),
        parent=decode_object(parent),
        signature=signature,
        signed=(header, parent, metadata, content),
        buffers=tuple(body[5:]),
    )


def decode_object(raw: bytes) -> dict[str, Any]:
    """JSON object -> dict; raises `BadMessage`."""
    value = decode_json(raw)
    if not isinstance(value, dict):
        raise BadMessage("not a JSON object")
    return value


def decode_json(raw: bytes) -> Any:
    """Bytes of JSON -> a value that `orjson.dumps` takes; raises `BadMessage`.

    The fast way covers all that is valid by RFC 8259. What Python's own encoder lets through besides (NaN, lone surrogates,
    large integers, bytes that are no UTF-8) takes the slow way and is replaced: NaN and infinities by null, surrogates by
    U+FFFD, integers beyond 64 bits by their digits as a string.
    """
    if marks(raw) > MAX_VALUES and marks(_STRING.sub(b"", raw)) > MAX_VALUES:
        raise BadMessage(f"more than {MAX_VALUES} values")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _decode_leniently(raw)
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def marks(raw: bytes) -> int:
    """About the number of values in JSON, or more: inside of texts the same characters are counted too."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _check_depth(value: Any) -> None:
    """Raises `BadMessage` where nesting is too deep. orjson takes more levels in than it gives out, and says so fast."""
    for _ in range(_ORJSON_DEPTH - MAX_DEPTH):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:
        raise BadMessage(f"nested deeper than {MAX_DEPTH}") from None


def _decode_leniently(raw: bytes) -> Any:
    text = raw.decode("utf-8", "replace")
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_int=_bounded_int)
        return _clean(value, 0)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {type(error).__name__}") from None


def _bounded_int(digits: str) -> int | str:
    if len(digits) > 20:
        return digits
    value = int(digits)
    return value if -(2**63) <= value < 2**64 else digits


def _clean(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise BadMessage(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _clean(item, depth + 1) for key, item in value.items()}
    return value


def clean_text(text: str) -> str:
    """Text that UTF-8 can carry: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
