"""The one bearer token of single-user mode: where it comes from and how it is compared."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote_plus

from starlette.types import Scope

from gateway.errors import ConfigurationError
from gateway.settings import Settings

_MINIMUM = 16
_BYTES = 32


@dataclass(frozen=True)
class LoadedToken:
    """`created` is True at the first start, the only time when the token is shown; `path` is None when it was configured."""

    value: str
    created: bool
    path: Path | None


def load_token(settings: Settings) -> LoadedToken:
    """The configured token, else the one in the state directory, else a new one; raises `ConfigurationError`."""
    if settings.token:
        if len(settings.token) < _MINIMUM or not settings.token.isascii():
            raise ConfigurationError(f"The token needs at least {_MINIMUM} ASCII characters. Leave it empty to have one made.")
        return LoadedToken(settings.token, created=False, path=None)
    path = settings.state_dir / "token"
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        value, created = _read_or_make(path)
    except OSError as error:
        raise ConfigurationError(
            f"The state directory {settings.state_dir} can't be used ({error.strerror}). Name another with --state-dir."
        ) from None
    if len(value) < _MINIMUM or not value.isascii():
        raise ConfigurationError(f"{path} holds no usable token. Delete it to have one made.")
    return LoadedToken(value, created, path)


def _read_or_make(path: Path) -> tuple[str, bool]:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(errors="replace").strip(), False
    with os.fdopen(descriptor, "w") as file:
        value = secrets.token_urlsafe(_BYTES)
        file.write(value + "\n")
    return value, True


def check_bind(settings: Settings) -> None:
    """Refuses to listen beyond this machine, or to any web page, without a token; raises `ConfigurationError`."""
    if settings.auth == "none" and not is_loopback(settings.server.host):
        raise ConfigurationError(
            f"auth = none is for loopback addresses alone, and {settings.server.host} is none. Use a token, or listen on 127.0.0.1."
        )
    if "*" in settings.server.allowed_origins and (settings.auth == "none" or settings.server.cors_credentials):
        raise ConfigurationError(
            "server.allowed_origins = * lets any web page call, so it needs a token and no credentials of browsers. Name the origins."
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class TokenCheck:
    """Compares what a client presents in constant time, by hashes, so that not even the length shows."""

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()

    def __call__(self, header: str | None) -> bool:
        """`header` is the value of Authorization (RFC 6750)."""
        scheme, _, presented = (header or "").partition(" ")
        digest = hashlib.sha256(presented.strip().encode("utf-8", "replace")).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"


def credentials(header: str | None, scope: Scope, jupyter: bool) -> Iterator[str]:
    """What a request presents, each as a value of Authorization. Jupyter's clients also say ``token`` for ``Bearer``, and browsers,
    which can't set a header on a WebSocket, send ``?token=``."""
    yield header or ""
    if jupyter:
        scheme, _, presented = (header or "").partition(" ")
        if scheme.lower() == "token":
            yield f"Bearer {presented}"
        for name, value in _parameters(scope):
            if name == "token":
                yield f"Bearer {value}"


def without_token(scope: Scope) -> Scope:
    """The request as it goes on: from here on nobody can log or tell what was in its query."""
    query: bytes = scope.get("query_string", b"")
    if b"token" not in query.lower() and b"%" not in query:
        return scope
    kept = [part for part in query.split(b"&") if unquote_plus(part.partition(b"=")[0].decode("latin-1")) != "token"]
    return {**scope, "query_string": b"&".join(kept)}


def _parameters(scope: Scope) -> Iterator[tuple[str, str]]:
    for part in scope.get("query_string", b"").decode("latin-1").split("&"):
        name, _, value = part.partition("=")
        yield unquote_plus(name), unquote_plus(value)
