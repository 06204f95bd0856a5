"""The one door: every HTTP request and every WebSocket passes here before any route sees it.

Pure ASGI, since framework middleware does not run for WebSockets. In order: Host (against DNS rebinding), Origin (against other web
pages), the token, the base URL, then bounds on the body's size and pace. Open are GET /healthz, GET /api, and what a browser asks
before it sends anything (preflights).
"""

import time
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api import problems
from gateway.api.auth import credentials, is_loopback, without_token
from gateway.api.bounds import bounded, too_large
from gateway.api.cors import Cors, is_preflight
from gateway.api.jupyter_errors import route_path, speaks_jupyter
from gateway.errors import ForbiddenOrigin, GatewayError, NotFound, Unauthorized
from gateway.settings import ServerSettings

log = structlog.get_logger()

Observe = Callable[[Scope, int, float], None]
"""Gets scope, status and seconds of each HTTP request that was answered."""
OPEN_PATHS = frozenset({"/healthz"})
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        authorised: Callable[[str | None], bool],
        observe: Observe = lambda _scope, _status, _seconds: None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._authorised = authorised
        self._observe = observe
        self._hosts = {host.lower() for host in (*settings.allowed_hosts, settings.host, "localhost")}
        self._cors = Cors(settings)
        self._base = settings.base_url.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope = self._placed(scope)
        if scope["type"] == "http":
            await self._http(scope, headers, receive, send)
            return
        try:
            self._check(scope, headers)
        except GatewayError as error:
            await _refuse(error, scope, receive, send)
            return
        await self._app(without_token(scope), receive, send)

    def _placed(self, scope: Scope) -> Scope:
        """As ASGI wants it: `root_path` is the base URL. Outside of it the path is one that nothing is at."""
        scope = {**scope, "root_path": self._base}
        path: str = scope["path"]
        if not f"{path}/".startswith(f"{self._base}/"):
            return {**scope, "path": f"{self._base}/ outside"}
        # Clients of Jupyter that join URLs by hand send a slash too many, which its server overlooks.
        return {**scope, "path": path.rstrip("/")} if speaks_jupyter(route_path(scope)) else scope

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._is_known_host(_host_name(host)):
            raise ForbiddenOrigin("This Host is not served here. The operator can add it to server.allowed_hosts.")
        if not self._cors.allows(headers.get("origin"), host):
            raise ForbiddenOrigin(
                "Web pages of this Origin may not call the gateway. The operator can add it to server.allowed_origins."
            )
        if self._is_open(scope, headers):
            return
        query = speaks_jupyter(route_path(scope))
        if not any(self._authorised(found) for found in credentials(headers.get("authorization"), scope, query)):
            raise Unauthorized("Send the gateway's token: 'Authorization: Bearer TOKEN'.")

    def _is_open(self, scope: Scope, headers: Headers) -> bool:
        path = route_path(scope)
        if path in OPEN_PATHS:
            return True
        if scope["type"] != "http":
            return False
        return (scope["method"], path) == ("GET", "/api") or self._is_preflight(scope, headers)

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        # As a Jupyter server does, its paths answer any OPTIONS alike.
        jupyter = scope["method"] == "OPTIONS" and speaks_jupyter(route_path(scope))
        return jupyter or is_preflight(scope["method"], headers)

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
        origin = headers.get("origin")

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                outgoing = MutableHeaders(scope=message)
                for name, value in {**_SECURITY_HEADERS, **self._cors.headers(origin)}.items():
                    outgoing.setdefault(name, value)
                location = outgoing.get("location", "")
                if location.startswith("/") and not location.startswith(f"{self._base}/"):
                    outgoing["location"] = self._base + location
            await send(message)

        entered = without_token(scope)
        try:
            self._check(scope, headers)
            limit = self._settings.max_upload if scope["method"] == "PUT" else self._settings.max_body
            declared = headers.get("content-length", "")
            if declared.isdigit() and int(declared) > limit:
                raise too_large(limit)
            if scope["path"] == f"{self._base}/ outside":
                raise NotFound(f"Everything is served below {self._settings.base_url}.")
        except GatewayError as error:
            await _refuse(error, scope, receive, send_on)
        else:
            if self._is_preflight(scope, headers):
                await Response(headers=self._cors.preflight(origin))(scope, receive, send_on)
            else:
                await self._app(entered, bounded(receive, limit, self._settings.body_timeout), send_on)
        seconds = time.monotonic() - begun
        self._observe(entered, status, seconds)
        log.debug("request", method=scope["method"], path=scope["path"], status=status, ms=round(seconds * 1000, 1))


async def _refuse(error: GatewayError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = problems.response(error, speaks_jupyter(route_path(scope)))
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
