"""All routes of the application, found by walking it: a route that is added later is tested by whoever walks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.app import create_app
from gateway.settings import load

NOBODY = "00000000-0000-0000-0000-000000000000"


class Route(NamedTuple):
    """`method` is None for a WebSocket; `path` has its parameters."""

    method: str | None
    path: str

    @property
    def url(self) -> str:
        """A URL that matches the route and names nothing that exists."""
        filled = self.path.replace("{path:path}", "file").replace("{path}", "file")
        for parameter in ("{kernel_id}", "{execution_id}", "{session_id}", "{name}", "{file}"):
            filled = filled.replace(parameter, NOBODY)
        return filled.replace("{seq}", "1")

    @property
    def jupyter(self) -> bool:
        """Errors are told in Jupyter's way, and all spellings of the token count."""
        return self.path.startswith(("/api", "/kernelspecs"))

    @property
    def open(self) -> bool:
        """Needs no token."""
        return (self.method, self.path) in (("GET", "/healthz"), ("GET", "/api"))


def walk(routes: list[Any]) -> Iterator[Route]:
    for route in routes:
        if (inner := getattr(route, "original_router", None)) is not None:
            yield from walk(inner.routes)
        elif (methods := getattr(route, "methods", None)) is not None:
            for method in sorted(methods - {"HEAD"}):
                yield Route(method, route.path)
        else:
            yield Route(None, route.path)


APP = create_app(load())
ROUTES = sorted(walk(APP.routes), key=str)
HTTP_ROUTES = [route for route in ROUTES if route.method]
SOCKETS = [route for route in ROUTES if not route.method]
