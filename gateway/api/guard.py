"""The one door: every HTTP request and every WebSocket passes here before any route sees it.

Pure ASGI, since framework middleware does not run for WebSockets. In order: Host (against DNS rebinding), Origin (against other web
pages), the token, then bounds on the body's size and pace. Only GET /healthz is open.
"""

import time
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

import anyio
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api import problems
from gateway.api.auth import is_loopback
from gateway.errors import BodyTooLarge, ForbiddenOrigin, GatewayError, MalformedBody, Unauthorized
from gateway.settings import ServerSettings

log = structlog.get_logger()

OPEN_PATHS = frozenset({"/healthz"})
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class Guard:
    def __init__(self, app: ASGIApp, settings: ServerSettings, authorised: Callable[[str | None], bool]) -> None:
        self._app = app
        self._settings = settings
        self._authorised = authorised
        self._hosts = {host.lower() for host in (*settings.allowed_hosts, settings.host, "localhost")}
        self._origins = frozenset(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
        except GatewayError as error:
            await _refuse(error, scope, receive, send)
            return
        if scope["type"] == "http":
            await self._http(scope, headers, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = _host_name(headers.get("host", ""))
        if not self._is_known_host(host):
            raise ForbiddenOrigin("This Host is not served here. The operator can add it to server.allowed_hosts.")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and not _is_same_origin(origin, headers.get("host", "")):
            raise ForbiddenOrigin(
                "Web pages of this Origin may not call the gateway. The operator can add it to server.allowed_origins."
            )
        if scope["path"] not in OPEN_PATHS and not self._authorised(headers.get("authorization")):
            raise Unauthorized("Send the gateway's token: 'Authorization: Bearer TOKEN'.")

    def _is_known_host(self, host: str) -> bool:
        if host in self._hosts or is_loopback(host):
            return True
        try:
            ip_address(host)
        except ValueError:
            return False
        return True

    async def _http(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        begun = time.monotonic()
        status = 500

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                outgoing = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    outgoing.setdefault(name, value)
            await send(message)

        is_upload = scope["method"] == "PUT"
        limit = self._settings.max_upload if is_upload else self._settings.max_body
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            await _refuse(_too_large(limit), scope, receive, send_on)
        else:
            await self._app(scope, _bounded(receive, limit, self._settings.body_timeout), send_on)
        duration = round((time.monotonic() - begun) * 1000, 1)
        log.debug("request", method=scope["method"], path=scope["path"], status=status, ms=duration)


def _bounded(receive: Receive, limit: int, patience: float) -> Receive:
    """A `receive` that refuses a body above `limit` bytes, or one that stops coming for `patience` seconds."""
    size = 0
    complete = False

    async def bounded() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            with anyio.fail_after(patience):
                message = await receive()
        except TimeoutError:
            raise MalformedBody(f"The body stopped coming for {patience:g} s.") from None
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > limit:
            raise _too_large(limit)
        return message

    return bounded


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit} bytes, the limit of this route.", limit=limit)


async def _refuse(error: GatewayError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = problems.response(error)
    for name, value in _SECURITY_HEADERS.items():
        answer.headers.setdefault(name, value)
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": error.ws_close, "reason": error.title})
            return
        await send({"type": "websocket.http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "websocket.http.response.body", "body": answer.body})
        return
    await answer(scope, receive, send)


def _host_name(header: str) -> str:
    """`example.org:8080` -> `example.org`, `[::1]:80` -> `::1`, lower case; empty for nonsense."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def _is_same_origin(origin: str, host: str) -> bool:
    """Exact comparison of the parsed origin with the Host the request was sent to; `null` is never the same."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() != ""
