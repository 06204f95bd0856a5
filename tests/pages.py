"""The documentation pages that are made from code, so that they can't say something else than the code does."""

import sys
from pathlib import Path

from gateway.errors import GatewayError, all_errors

_HEAD = """# Errors

Made from `gateway/errors.py` by `scripts/docs`. Every error of the API is a problem document (RFC 9457) with one of these codes.

| code | HTTP | WebSocket close | retry | meaning |
| --- | --- | --- | --- | --- |
"""


def errors() -> str:
    """docs/errors.md"""
    return _HEAD + "".join(f"{_row(error)}\n" for error in all_errors() if error.__module__ == "gateway.errors")


def _row(error: type[GatewayError]) -> str:
    title = (error.__doc__ or "").strip()
    retry = "yes" if error.retryable else "no"
    return f"| `{error.code}` | {error.status} | {error.ws_close} | {retry} | {title} |"


PAGES = {"errors.md": errors}

if __name__ == "__main__":
    for name, make in PAGES.items():
        Path(sys.argv[1], name).write_text(make())
