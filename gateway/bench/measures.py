"""The measurements: what a cell costs over the floor, and what a new kernel costs over the bare engine."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.bench.floor import FloorKernel
from gateway.bench.subject import Subject, SubjectSocket

Progress = Callable[[str], None]
_WARM_UP = 20


@dataclass
class Series:
    """Samples in seconds of one way of doing a thing."""

    name: str
    samples: list[float] = field(default_factory=list)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def summary(self) -> dict[str, float | int | str]:
        """Milliseconds."""
        return {
            "name": self.name,
            "n": len(self.samples),
            "p50_ms": round(self.median * 1000, 3),
            "p95_ms": round(self.quantile(0.95) * 1000, 3),
            "p99_ms": round(self.quantile(0.99) * 1000, 3),
            "min_ms": round(min(self.samples) * 1000, 3),
        }


def round_trips(cells: int, progress: Progress) -> list[Series]:
    """`1+1` by direct ZMQ, over the native WebSocket and over HTTP, one after the other, `cells` times; the WebSocket also to a
    gateway that stores nothing, so that the difference is what the store costs."""
    floor, socket, http = Series("direct ZMQ"), Series("native WebSocket"), Series("HTTP JSON")
    storeless = Series("native WebSocket, store in memory")
    with Subject() as subject, Subject(store={"kind": "memory"}) as plain:
        spec = subject.settings.kernels.specs["python3"]
        kernel_id, plain_id = subject.create()[0], plain.create()[0]
        with (
            FloorKernel(spec) as bare,
            SubjectSocket(subject, kernel_id) as connection,
            SubjectSocket(plain, plain_id) as other,
        ):
            bare.start()
            ways: tuple[tuple[Series, Callable[[], float]], ...] = (
                (floor, lambda: bare.execute("1+1")),
                (storeless, lambda: other.execute("1+1")),
                (socket, lambda: connection.execute("1+1")),
                (http, lambda: subject.execute_http(kernel_id, "1+1")),
            )
            for number in range(cells + _WARM_UP):
                durations = [(series, run()) for series, run in ways]
                if number >= _WARM_UP:
                    for series, duration in durations:
                        series.samples.append(duration)
                if number % 50 == 0:
                    progress(f"round trips: {number} of {cells + _WARM_UP}")
        subject.delete(kernel_id)
    return [floor, storeless, socket, http]


def cold_starts(rounds: int, progress: Progress) -> list[Series]:
    """Create to first answer: the bare engine calls with the same flags, and the gateway, in turn."""
    floor, gateway = Series("engine alone"), Series("gateway")
    with Subject() as subject:
        spec = subject.settings.kernels.specs["python3"]
        for number in range(rounds + 1):
            with FloorKernel(spec) as bare:
                bare_duration = bare.start()
            kernel_id, duration = subject.create()
            subject.delete(kernel_id)
            if number > 0:
                floor.samples.append(bare_duration)
                gateway.samples.append(duration)
            progress(f"cold starts: {number} of {rounds}")
    return [floor, gateway]
