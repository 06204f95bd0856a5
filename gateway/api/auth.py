"""The one bearer token of single-user mode: where it comes from and how it is compared."""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

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
    """Refuses to listen beyond this machine without a token; raises `ConfigurationError`."""
    if settings.auth == "none" and not is_loopback(settings.server.host):
        raise ConfigurationError(
            f"auth = none is for loopback addresses alone, and {settings.server.host} is none. Use a token, or listen on 127.0.0.1."
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
