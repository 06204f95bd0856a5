"""Talk to a gateway from Python: `Client` for scripts, `AsyncClient` for event loops, with the same calls on both.

The client knows the protocol and nothing of how the gateway works inside, so that it can be used where no engine is.
"""

from gateway.client.asynchronous import AsyncClient, AsyncFiles, AsyncKernel
from gateway.client.blocking import Client, Files, Kernel
from gateway.client.errors import ApiError, ClientError, ConnectionLost, GatewayUnreachable, NotAGateway
from gateway.client.results import CellError, Result
from gateway.protocol.events import Event

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncFiles",
    "AsyncKernel",
    "CellError",
    "Client",
    "ClientError",
    "ConnectionLost",
    "Event",
    "Files",
    "GatewayUnreachable",
    "Kernel",
    "NotAGateway",
    "Result",
]
