"""The gateway is killed at random moments under load, and nobody loses anything.

CI kills a few times; `scripts/chaos` does it a hundred times. Every execution is read by two readers as it runs and a third time at
the end; all three must be the same, byte for byte, and be what the cell printed. Nothing may run twice, no variable be lost, no
kernel or container be left over or missing.
"""

import contextlib
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.sandboxes.lockdown import LABEL
from tests.load.chaos import (
    Agent,
    Cell,
    Churner,
    Reader,
    Tally,
    Transcript,
    Trouble,
    Victim,
    Watcher,
    Wire,
    Writer,
    Wrong,
    check_events,
    check_shown,
    follow,
    shown_by_result,
)
from tests.support import engine

KILLS = int(os.environ.get("CELLGATE_KILLS", "5"))
SEED = int(os.environ.get("CELLGATE_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
KERNELS = 4
SOONEST, LATEST = 0.05, 2.5
"""Seconds between an answer of the gateway and its end."""


class Killer:
    """Kills at random moments: some time after the gateway has answered, or while it is still on its way."""

    def __init__(self, victim: Victim, watcher: Watcher, trouble: Trouble) -> None:
        self._victim, self._watcher, self._trouble = victim, watcher, trouble
        self._dice = random.Random(SEED)
        self.kills = self.in_the_start = 0
        self.answers: list[float] = []
        """Seconds from a SIGKILL to the first answer of the next gateway."""

    def run(self) -> None:
        while self.kills < KILLS:
            if self._trouble.over.wait(self._dice.uniform(SOONEST, LATEST)):
                return
            killed_at = self._kill()
            while self.kills < KILLS and self._dice.random() < 0.2:
                time.sleep(self._dice.uniform(0, 2))
                self._kill()
                self.in_the_start += 1
            self._victim.wait_until_it_answers()
            self.answers.append(time.monotonic() - killed_at)
            self._watcher.killed_at = killed_at

    def _kill(self) -> float:
        self._watcher.killed_at = None
        killed_at = time.monotonic()
        self._victim.kill()
        self._victim.launch()
        self.kills += 1
        return killed_at


def containers(victim: Victim) -> list[str]:
    with contextlib.closing(engine()) as api:
        found = api.containers(all=True, filters={"label": f"{LABEL}gateway={victim.id}"})
    return sorted(container["Labels"][f"{LABEL}kernel"] for container in found)


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise Wrong(what)
        time.sleep(0.1)


def verify(wire: Wire, tally: Tally) -> tuple[int, int]:
    """Holds all that was read of a kernel against each other and against what the cells must show; executions and events."""
    if tally.read.keys() != tally.cells.keys():
        raise Wrong(f"{tally.kernel_id}: {len(tally.cells)} cells were asked for, {len(tally.read)} executions are there")
    for transcript in tally.transcripts:
        same(tally.read[transcript.execution_id], transcript)
    events = 0
    for execution_id, cell in tally.cells.items():
        label = f"{tally.kernel_id} {execution_id} (cell {cell.count}, at the end)"
        path = f"{tally.path}/executions/{execution_id}"
        read = tally.read[execution_id]
        again = Transcript(label)
        follow(wire, path, again)
        same(read, again)
        check_events(cell, read.events, read.label)
        check_result(wire, tally, cell, execution_id, read)
        pages = page_by_page(wire, path)
        if pages != read.events:
            raise Wrong(f"{label}: pages of JSON differ from the stream")
        events += len(read.lines)
    return len(tally.cells), events


def same(one: Transcript, other: Transcript) -> None:
    if one.lines != other.lines:
        pairs = zip(one.lines, other.lines, strict=False)
        differing = next(((a, b) for a, b in pairs if a != b), (b"", b""))
        raise Wrong(f"{one.label} and {other.label}: {len(one.lines)} and {len(other.lines)} events; {differing}")


def check_result(wire: Wire, tally: Tally, cell: Cell, execution_id: str, read: Transcript) -> None:
    label = f"{tally.kernel_id} {execution_id} (cell {cell.count}, GET)"
    result = wire.get(f"{tally.path}/executions/{execution_id}")
    end = read.events[-1]
    for name in ("status", "cause", "execution_count", "kernel_state", "variables", "duration", "usage"):
        if result[name] != end[name]:
            raise Wrong(f"{label}: {name} is {result[name]} and in its last event {end[name]}")
    if (result["last_seq"], result["gap"], result["truncated"], result["warnings"]) != (end["seq"], None, None, []):
        raise Wrong(f"{label}: {result}")
    check_shown(cell, shown_by_result(result["outputs"]), label)
    if tally.results.get(execution_id, result) != result:
        raise Wrong(f"{label}: {result} and, when it was asked for, {tally.results[execution_id]}")


def page_by_page(wire: Wire, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        page = wire.get(f"{path}/events", params={"after": len(found), "limit": 100})
        found += page["events"]
        if page["complete"]:
            return found


class Run:
    """All of it: the gateway, those who use it, and who kills it."""

    def __init__(self, directory: Path) -> None:
        self.victim = Victim(directory)
        self.trouble, self.stop = Trouble(), threading.Event()
        self.victim.launch()
        self.victim.wait_until_it_answers()
        self.wire = Wire(self.victim, self.trouble)
        self.tallies = [Tally(self._new_kernel()) for _ in range(KERNELS + 1)]
        self.churner = Churner(self.victim, self.trouble, self.stop, SEED)
        self.watcher = Watcher(self.victim, self.trouble, self.stop, self.known)
        self.killer = Killer(self.victim, self.watcher, self.trouble)
        self.writers = [
            Writer(self.victim, self.trouble, self.stop, SEED + number, tally) for number, tally in enumerate(self.tallies[1:])
        ]
        self.agent = Agent(self.victim, self.stop, SEED, self.tallies[0])

    def _new_kernel(self) -> str:
        found: str = self.wire.ask("POST", "/v1/kernels", json={}).json()["id"]
        return found

    def known(self) -> set[str]:
        return {tally.kernel_id for tally in self.tallies} | self.churner.alive

    def go(self) -> None:
        start = self.trouble.guarded
        workers = [start("agent", self.agent.run), start("churner", self.churner.run), start("watcher", self.watcher.run)]
        workers += [start(f"writer {number}", writer.run) for number, writer in enumerate(self.writers)]
        workers += [
            start(f"reader {number}", Reader(self.victim, self.trouble, tally, SEED + number).run)
            for number, tally in enumerate(self.tallies)
        ]
        killer = start("killer", self.killer.run)
        killer.join()
        self.stop.set()
        for worker in workers:
            while worker.is_alive() and not self.trouble.over.is_set():
                worker.join(0.1)
        self.check()

    def check(self) -> None:
        if self.trouble.found:
            raise Wrong("\n".join(self.trouble.found))

    def finish(self) -> tuple[int, int]:
        """Verifies what was read, deletes all kernels; executions and events."""
        ids = sorted(tally.kernel_id for tally in self.tallies)
        listed = self.wire.get("/v1/kernels")["kernels"]
        states = {kernel["id"]: (kernel["state"], kernel["queue_length"]) for kernel in listed}
        if states != dict.fromkeys(ids, ("idle", 0)):
            raise Wrong(f"GET /v1/kernels: {states}, not all of {ids} idle")
        wait_for(lambda: containers(self.victim) == ids, f"containers {containers(self.victim)} of kernels {ids}")
        sums = [verify(self.wire, tally) for tally in self.tallies]
        for kernel_id in ids:
            answer = self.wire.ask("DELETE", f"/v1/kernels/{kernel_id}")
            if answer.status_code != 204:
                raise Wrong(f"DELETE {kernel_id}: {answer.status_code} {answer.text}")
        links = self.victim.directory / "state" / "links"
        wait_for(lambda: containers(self.victim) == [] and os.listdir(links) == [], "something is left of deleted kernels")
        if kernels := self.wire.get("/v1/kernels")["kernels"]:
            raise Wrong(f"listed after they were deleted: {kernels}")
        return sum(cells for cells, _ in sums), sum(events for _, events in sums)

    def table(self, cells: int, events: int) -> str:
        answers, recoveries = self.killer.answers, self.watcher.recoveries or [0.0]
        breaks = sum(wire.breaks for wire in self.trouble.wires) + self.agent.reconnects
        rows = {
            "kills": f"{self.killer.kills} ({self.killer.in_the_start} of them during the start)",
            "kernels": f"{len(self.tallies)}, and {self.churner.made} made and deleted meanwhile",
            "cells": str(cells),
            "events": f"{events}, each read three times",
            "lost": "0",
            "duplicated": "0",
            "attempts broken off or refused": str(breaks),
            "SIGKILL to first answer, p50 / max": f"{statistics.median(answers):.2f} / {max(answers):.2f} s",
            "SIGKILL to all recovered, p50 / max": f"{statistics.median(recoveries):.2f} / {max(recoveries):.2f} s",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())

    def clean_up(self) -> None:
        self.stop.set()
        self.trouble.over.set()
        self.victim.kill()
        for wire in self.trouble.wires:
            wire.http.close()
        with contextlib.closing(engine()) as api:
            for kernel_id in containers(self.victim):
                api.remove_container(f"cellgate-{kernel_id}", force=True)


@pytest.mark.timeout(120 + 60 * KILLS)
def test_nothing_is_lost() -> None:
    directory = Path(tempfile.mkdtemp(prefix="cgx-", dir="/tmp"))
    print(f"seed {SEED}: CELLGATE_SEED={SEED} gives the same moments and cells; gateway's log: {directory}/log", flush=True)
    run = Run(directory)
    try:
        run.go()
        table = run.table(*run.finish())
    finally:
        run.clean_up()
    print(f"\n{table}", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
