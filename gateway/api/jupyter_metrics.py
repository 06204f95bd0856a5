"""GET /metrics in Prometheus' text format, under the names that a Jupyter server has."""

from collections.abc import Iterator
from datetime import datetime

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from gateway import __version__
from gateway.kernels.manager import KernelManager

router = APIRouter(include_in_schema=False)

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class Metrics:
    """One registry per application: two gateways of one process count apart."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._durations = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests",
            ["method", "handler", "status_code"],
            registry=self._registry,
        )
        self._kernels: _Kernels | None = None

    def watch(self, manager: KernelManager, started: str) -> None:
        if self._kernels is not None:
            self._registry.unregister(self._kernels)
        self._kernels = _Kernels(manager, started)
        self._registry.register(self._kernels)

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """`handler` is the route and not the path: a name for each kernel would be too many."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        handler = getattr(scope.get("route"), "path", "")
        self._durations.labels(method, handler, status).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Kernels(Collector):
    """Asked when somebody reads, so that nothing is counted twice or forgotten."""

    def __init__(self, manager: KernelManager, started: str) -> None:
        self._manager, self._started = manager, started

    def collect(self) -> Iterator[Metric]:
        kernels = self._manager.list()
        running = GaugeMetricFamily("kernel_currently_running_total", "Kernels that run, by kernelspec", labels=["type"])
        for name in self._manager.specs():
            running.add_metric([name], sum(kernel.request.spec_name == name for kernel in kernels if not kernel.gone))
        yield running
        latest = max([self._started, *(kernel.last_activity for kernel in kernels)])
        for name, text, value in (
            ("jupyter_server_started_timestamp_seconds", "When the gateway was started", self._started),
            ("jupyter_server_last_activity_timestamp_seconds", "When a client last asked for something", latest),
        ):
            yield GaugeMetricFamily(name, text, value=datetime.fromisoformat(value).timestamp())
        yield InfoMetricFamily("cellgate", "Version of the gateway", value={"version": __version__})


@router.get("/metrics")
async def get_metrics(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
