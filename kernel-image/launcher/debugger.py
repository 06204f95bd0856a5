"""Stands in for `ipykernel.debugger` until somebody debugs.

Importing the real one loads debugpy, a quarter of the kernel's start-up time and 7 MB, for a feature that most
kernels never use. ipykernel asks this module only for two names; both are here, and the first request that needs more
brings in the real module and makes the real debugger.
"""

import asyncio
import importlib
import os
import sys
from typing import Any

_is_debugpy_available = True  # ipykernel's name for it; kernel_info lists the feature by it

REAL = "ipykernel.debugger"


def install() -> None:
    """Take the real module's place; before the kernel is made."""
    sys.modules[REAL] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_real(), name)


def _real() -> Any:
    if sys.modules.get(REAL) is sys.modules[__name__]:
        # Else debugpy complains on stderr that the standard library is frozen, which is where we want it.
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        del sys.modules[REAL]
    return importlib.import_module(REAL)


class Debugger:
    """Has the part of the real debugger's interface that the kernel uses."""

    def __init__(self, *args: Any) -> None:
        self._arguments = args
        self._debugger: Any = None
        self._loaded = asyncio.Event()

    async def process_request(self, message: dict[str, Any]) -> Any:
        """Answer one request of the Debug Adapter Protocol."""
        return await self._load().process_request(message)

    async def handle_stopped_event(self) -> None:
        """Wait for a breakpoint to be hit; the kernel calls this in a loop from its start."""
        await self._loaded.wait()
        await self._debugger.handle_stopped_event()

    @property
    def tcp_client(self) -> Any:
        """The connection to debugpy."""
        return self._load().tcp_client

    def _load(self) -> Any:
        if self._debugger is None:
            self._debugger = _real().Debugger(*self._arguments)
            self._loaded.set()
        return self._debugger
