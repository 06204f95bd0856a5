"""The Docker daemon (live-restore on) is restarted again and again under kernels that print: nothing may be lost, nobody may notice.

CI restarts it twice; `scripts/engine-restarts` ten times, or as often as it is told. Every second time it is killed instead of stopped.
Each kernel runs cells that print numbered lines and go on counting where the cell before has ended. One reader follows each cell
from its start; another one asks again and again for what comes after its cursor.
"""

import os
import threading
import time
from dataclasses import dataclass, field

import orjson
import pytest

from gateway.bench.subject import Subject
from tests.faults.daemon import PrivateDaemon
from tests.load.chaos import Transcript, Trouble, Wrong
from tests.support import Gateway, eventually

RESTARTS = int(os.environ.get("CELLGATE_ENGINE_RESTARTS", "2"))
KERNELS = 3
LINES = 150
QUIET = 4.0
"""Seconds before the first restart, for comparison."""
MOMENTS = (0.0, 0.3, 1.0, 0.1, 0.6)
"""Seconds between the daemon's end and its start, and between its start and its next end, in turn."""

CELL = f"""
import time
for _ in range({LINES}):
    print(count, flush=True)
    count += 1
    time.sleep(0.02)
"""


class Timed(Transcript):
    """Also when each event came."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.times: list[float] = []

    def add(self, line: bytes) -> None:
        super().add(line)
        self.times.append(time.perf_counter())

    def longest(self, begin: float, end: float) -> float:
        """Seconds between two neighbouring events of which at least one came in this time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if later >= begin and earlier <= end), default=0.0)


@dataclass
class Singer:
    """One kernel, its cells, and both records of them."""

    gateway: Gateway
    kernel_id: str
    trouble: Trouble
    stop: threading.Event
    followed: list[Timed] = field(default_factory=list)
    paged: list[Transcript] = field(default_factory=list)
    events: int = 0
    """That one reader has seen."""

    @property
    def path(self) -> str:
        return f"/v1/kernels/{self.kernel_id}"

    def run(self) -> None:
        self._execute("count = 0")
        while not self.stop.is_set():
            self._execute(CELL)
        self._execute("count")

    def _execute(self, code: str) -> None:
        answer = self.gateway.http.post(f"{self.path}/execute", json={"code": code, "detach": True})
        if answer.status_code != 202:
            raise Wrong(f"execute: {answer.status_code} {answer.text}")
        path = f"{self.path}/executions/{answer.json()['execution_id']}"
        number = len(self.followed)
        self.followed.append(Timed(f"{self.kernel_id} cell {number}, followed"))
        self.paged.append(Transcript(f"{self.kernel_id} cell {number}, by cursor"))
        other = self.trouble.guarded(f"pages of cell {number}", lambda: self._read_pages(path, self.paged[number]))
        self._follow(path, self.followed[number])
        while other.is_alive():
            self.trouble.check()
            other.join(0.1)

    def _follow(self, path: str, transcript: Timed) -> None:
        headers = {"Accept": "application/x-ndjson"}
        with self.gateway.http.stream("GET", f"{path}/events", headers=headers) as answer:
            for line in answer.iter_lines():
                transcript.add(line.encode())
                self.events += 1
        if not transcript.ended:
            raise Wrong(f"{transcript.label}: the stream broke off after {len(transcript.lines)} events")

    def _read_pages(self, path: str, transcript: Transcript) -> None:
        while not transcript.ended:
            self.trouble.check()
            page = self.gateway.http.get(f"{path}/events", params={"after": len(transcript.lines)}).json()
            for event in page["events"]:
                transcript.add(orjson.dumps(event))
            time.sleep(0.1)

    def verify(self) -> None:
        """Both readers have read the same, and it is what the cells have printed, each line once and in order."""
        count = 0
        for followed, paged in zip(self.followed, self.paged, strict=True):
            if followed.events != paged.events:
                raise Wrong(f"{followed.label}: both readers differ")
            last = followed.events[-1]
            if (last["type"], last["status"]) != ("ended", "ok"):
                raise Wrong(f"{followed.label}: {last}")
            said = "".join(event["text"] for event in followed.events if event["type"] == "stream")
            lines = [int(line) for line in said.split()]
            if lines != list(range(count, count + len(lines))) or len(lines) not in (0, LINES):
                raise Wrong(f"{followed.label}: after {count} lines it printed {said[:200]!r}")
            count += len(lines)
        (result,) = [event for event in self.followed[-1].events if event["type"] == "result"]
        if result["data"]["text/plain"] != str(count):
            raise Wrong(f"{self.kernel_id}: count is {result['data']['text/plain']}, printed were {count}")


@dataclass
class Away:
    """One restart: when the engine went, and when it answered again."""

    way: str
    begin: float
    end: float = 0.0


def restart(daemon: PrivateDaemon, singers: list[Singer], number: int, trouble: Trouble) -> Away:
    def all_sing_on() -> None:
        """Each reader sees something that was not there before."""
        seen = [singer.events for singer in singers]
        eventually(
            lambda: trouble.over.is_set() or all(singer.events > before for singer, before in zip(singers, seen, strict=True)),
            "output goes on",
        )
        trouble.check()

    away = Away("SIGTERM" if number % 2 == 0 else "SIGKILL", time.perf_counter())
    daemon.stop() if number % 2 == 0 else daemon.kill()
    all_sing_on()
    time.sleep(MOMENTS[number % len(MOMENTS)])
    daemon.start()
    away.end = time.perf_counter()
    all_sing_on()
    time.sleep(MOMENTS[(number + 2) % len(MOMENTS)])
    return away


def table(singers: list[Singer], aways: list[Away], before: tuple[float, float], answers: dict[str, int]) -> str:
    cells = [cell for singer in singers for cell in singer.followed]
    gone = [away.end - away.begin for away in aways]
    quiet = max(cell.longest(*before) for cell in cells)
    pauses = [max(cell.longest(away.begin, away.end) for cell in cells) for away in aways]
    rows = {
        "restarts": f"{len(aways)} ({', '.join(f'{[away.way for away in aways].count(way)} {way}' for way in ('SIGTERM', 'SIGKILL'))})",
        "kernels": str(len(singers)),
        "cells": str(len(cells)),
        "events": f"{sum(len(cell.lines) for cell in cells)}, each read twice",
        "lost": "0",
        "duplicated": "0",
        "creates in all the time": ", ".join(f"{count} × {answer}" for answer, count in sorted(answers.items())),
        "engine away, mean / longest": f"{sum(gone) / len(gone):.2f} / {max(gone):.2f} s",
        "longest pause of a stream before": f"{quiet * 1000:.0f} ms",
        "longest pause of a stream meanwhile": f"{max(pauses) * 1000:.0f} ms ({', '.join(f'{pause * 1000:.0f}' for pause in pauses)})",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


@pytest.mark.timeout(240 + 60 * RESTARTS)
def test_nobody_notices_that_the_engine_is_restarted() -> None:
    with PrivateDaemon(live_restore=True) as daemon:
        options = {"reconcile_interval": 0.5}
        with Subject(docker={"url": daemon.url}, kernels=options) as subject:
            gateway = Gateway(subject.url, subject.settings)
            with gateway.http:
                print(f"\n{under_load(daemon, gateway)}", flush=True)
        assert daemon.containers() == []


def under_load(daemon: PrivateDaemon, gateway: Gateway) -> str:
    """The table of a run in which nothing was wrong."""
    trouble, stop = Trouble(), threading.Event()
    singers = [Singer(gateway, gateway.new_kernel().id, trouble, stop) for _ in range(KERNELS)]
    threads = [trouble.guarded(singer.kernel_id, singer.run) for singer in singers]
    eventually(lambda: trouble.over.is_set() or all(singer.events > 20 for singer in singers), "all print")
    begin = time.perf_counter()
    time.sleep(QUIET)
    before = (begin, time.perf_counter())
    answers: dict[str, int] = {}
    asking = trouble.guarded("creator", lambda: ask_for_kernels(gateway, stop, answers))
    try:
        aways = [restart(daemon, singers, number, trouble) for number in range(RESTARTS)]
    finally:
        stop.set()
        for thread in [*threads, asking]:
            thread.join(120)
    assert trouble.found == []
    for singer in singers:
        singer.verify()
    expected = sorted(f"cellgate-{singer.kernel_id}" for singer in singers)
    eventually(lambda: daemon.containers() == expected, "a box for each kernel and none besides")
    for singer in singers:
        assert gateway.http.get(singer.path).json()["state"] == "idle"
        assert gateway.http.delete(singer.path).status_code == 204
    return table(singers, aways, before, answers)


def ask_for_kernels(gateway: Gateway, stop: threading.Event, answers: dict[str, int]) -> None:
    """Creates come at any moment: they work or are refused with the one reason; what was made can be deleted at any moment."""
    while not stop.wait(0.5):
        answer = gateway.http.post("/v1/kernels", json={})
        said = "201" if answer.status_code == 201 else f"{answer.status_code} {answer.json()['code']}"
        answers[said] = answers.get(said, 0) + 1
        if said not in ("201", "503 engine_unavailable"):
            raise Wrong(f"a create: {answer.status_code} {answer.text}")
        if answer.status_code == 201:
            answer = gateway.http.delete(f"/v1/kernels/{answer.json()['id']}")
            if answer.status_code != 204:
                raise Wrong(f"a delete: {answer.status_code} {answer.text}")
