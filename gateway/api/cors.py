"""Which web pages may call the gateway, and what their browsers are told: https://fetch.spec.whatwg.org/#http-cors-protocol."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers

from gateway.settings import ServerSettings

ANY = "*"


class Cors:
    """`allowed_origins` and the `cors_` settings, as headers."""

    def __init__(self, settings: ServerSettings) -> None:
        self._origins = frozenset(settings.allowed_origins)
        self._shared = {"Access-Control-Allow-Credentials": "true"} if settings.cors_credentials else {}
        self._exposed = {"Access-Control-Expose-Headers": ", ".join(settings.cors_expose_headers)}
        self._preflight = {
            "Access-Control-Allow-Methods": ", ".join(settings.cors_methods),
            "Access-Control-Allow-Headers": ", ".join(settings.cors_headers),
            "Access-Control-Max-Age": str(settings.cors_max_age),
        }

    def allows(self, origin: str | None, host: str) -> bool:
        """Who sends no Origin is no web page; a page of the gateway's own host is no foreign one."""
        return origin is None or self._is_listed(origin) or _is_same_origin(origin, host)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Of every answer to a page of an allowed origin."""
        return {**self._of(origin), **self._exposed} if origin is not None and self._is_listed(origin) else {}

    def preflight(self, origin: str | None) -> dict[str, str]:
        """Of the answer to a preflight, which the route itself never sees."""
        return {**self._of(origin), **self._preflight} if origin is not None and self._is_listed(origin) else {}

    def _is_listed(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins

    def _of(self, origin: str | None) -> dict[str, str]:
        if ANY in self._origins:
            return {"Access-Control-Allow-Origin": ANY, **self._shared}
        return {"Access-Control-Allow-Origin": origin or "", "Vary": "Origin", **self._shared}


def is_preflight(method: str, headers: Headers) -> bool:
    """https://fetch.spec.whatwg.org/#cors-preflight-request"""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def _is_same_origin(origin: str, host: str) -> bool:
    """Exact comparison of the parsed origin with the Host the request was sent to; `null` is never the same."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() != ""
