"""How a client is connected: address, deadlines and limits of the HTTP client, and its errors turned into ours."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import httpx2
import orjson

from gateway.client.calls import Call
from gateway.client.errors import ConnectionLost, GatewayUnreachable, NotAGateway

DEFAULT_URL = "http://127.0.0.1:8890"

QUICK = httpx2.Timeout(connect=5.0, read=60.0, write=60.0, pool=None)
"""For calls that a gateway answers by itself."""
PATIENT = httpx2.Timeout(connect=5.0, read=None, write=60.0, pool=None)
"""For calls that last as long as a cell or a start: the gateway has the deadline, and its answer always comes."""

LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=4.0)
"""Any number of cells may run at once, each on its connection. Idle ones go before the server drops them (5 s)."""


def _keepalive() -> list[tuple[int, int, int]]:
    """Without a read timeout a silent cell looks like a gateway whose machine is gone; probes tell them apart."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


KEEPALIVE = _keepalive()


class ClientOptions(TypedDict):
    """What both HTTP clients are made with."""

    base_url: str
    headers: dict[str, str]
    timeout: httpx2.Timeout


def base_url(url: str | None) -> str:
    """The address as given, or the default one; a missing scheme means http."""
    text = (url or DEFAULT_URL).strip()
    text = text if "://" in text else f"http://{text}"
    try:
        parsed = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise GatewayUnreachable(text, f"not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise GatewayUnreachable(text, "not an http or https URL")
    return text.rstrip("/")


def options(url: str, token: str | None) -> ClientOptions:
    headers = {"Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return {"base_url": url, "headers": headers, "timeout": QUICK}


def deadlines(call: Call[Any]) -> httpx2.Timeout:
    return PATIENT if call.patient else QUICK


def body(call: Call[Any]) -> tuple[bytes | None, dict[str, str]]:
    """Content and headers of a JSON call. Escaped ASCII: text that UTF-8 can't carry is for the gateway to refuse."""
    headers = {"Idempotency-Key": call.key} if call.key else {}
    if call.accept:
        headers["Accept"] = call.accept
    if call.json is None:
        return None, headers
    return json.dumps(call.json).encode(), headers | {"Content-Type": "application/json"}


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Errors of the HTTP library come out as ours, with the original as their cause."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol) as error:
        raise GatewayUnreachable(url, str(error) or "connection timed out") from error
    except orjson.JSONDecodeError as error:
        raise NotAGateway(url, f"a line is no JSON: {error}") from error
    except httpx2.TransportError as error:
        raise ConnectionLost(url, str(error) or type(error).__name__) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when all of it is there."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
