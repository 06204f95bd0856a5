"""A gateway that is killed again and again while it is used, and everything that a client may then hold against it.

`Victim` is the gateway, a process that is started and killed (SIGKILL). `Writer`s run cells of which they know what they must print;
a `Reader` per kernel reads every execution a second time with nothing but HTTP; `Agent` does the same work through the client
library; `Churner` makes and deletes kernels. Each keeps what it was sent, byte for byte, and the first thing that is wrong
ends all of it (`Trouble`).
"""

import base64
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import httpx2
import orjson

from gateway.client import Client
from gateway.protocol.events import Event

TOKEN = "chaos-" + "x" * 16
PATIENCE, LONG_PATIENCE = 120.0, 1200.0
"""Seconds without any answer, and of attempts that were all broken off, after which a client gives up: never a measure of speed. A
create may take longer than most gateways here live."""
Status = Literal["ok", "error"]
Form = Literal["jsonl", "sse"]
BROKEN = (httpx2.NetworkError, httpx2.RemoteProtocolError)
"""How a request fails when the gateway is killed or not there: not by silence."""


class Wrong(Exception):
    """Something that a client was promised is not so."""


@dataclass
class Trouble:
    """What went wrong first; from then on everybody stops."""

    over: threading.Event = field(default_factory=threading.Event)
    found: list[str] = field(default_factory=list)
    wires: list["Wire"] = field(default_factory=list)
    """All there are, to be closed at the end."""

    def guarded(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - told at the end, with whatever it is
                self.found.append(f"{name}: {type(error).__name__}: {error}")
                self.over.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def check(self) -> None:
        if self.over.is_set():
            raise Wrong("stopped, since something else went wrong")


# the gateway


class Victim:
    """`cellgate serve` as a process of its own, always on the same port and state directory."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.directory = directory
        self.log = directory / "log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers = {"Authorization": f"Bearer {TOKEN}"}
        self._environment = {
            **os.environ,
            "CELLGATE_STATE_DIR": str(directory / "state"),
            "CELLGATE_TOKEN": TOKEN,
            "CELLGATE_SERVER__PORT": str(self.port),
            "CELLGATE_LOG_LEVEL": "info",
            "CELLGATE_LOG_FORMAT": "json",
            **environment,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def id(self) -> str:
        return (self.directory / "state" / "gateway-id").read_text()

    def launch(self) -> None:
        """Starts it and does not wait."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "serve"],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + PATIENCE
        with httpx2.Client(base_url=self.url, timeout=5) as http:
            while time.monotonic() < deadline:
                if self._process is not None and self._process.poll() is not None:
                    raise Wrong(f"the gateway ended by itself ({self._process.returncode}):\n{self.last_words()}")
                try:
                    http.get("/healthz")
                except httpx2.TransportError:
                    time.sleep(0.01)
                else:
                    return
        raise Wrong(f"the gateway did not answer within {PATIENCE:g} s:\n{self.last_words()}")

    def kill(self) -> None:
        """SIGKILL: no word, no tidying up."""
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(number)
            self._process.wait(PATIENCE)
            self._process = None

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


# plain HTTP that begins again until it is answered


class Wire:
    """What the tests send themselves, without the client library's help."""

    def __init__(self, victim: Victim, trouble: Trouble) -> None:
        self.http = httpx2.Client(base_url=victim.url, headers=victim.headers, timeout=PATIENCE)
        self._trouble = trouble
        self.breaks = 0
        trouble.wires.append(self)

    def attempts(self) -> Iterator[int]:
        """Numbers from 0, with a pause between them, until the caller is content or its patience is at its end."""
        deadline = time.monotonic() + LONG_PATIENCE
        for number in range(1_000_000):
            self._trouble.check()
            yield number
            if time.monotonic() > deadline:
                raise Wrong("no attempt came through")
            time.sleep(0.1)

    def ask(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Repeated until something answers; what it answers is the caller's affair."""
        for _ in self.attempts():
            try:
                return self.http.request(method, path, **more)
            except BROKEN:
                self.breaks += 1
        raise AssertionError

    def get(self, path: str, **more: Any) -> Any:
        answer = self.ask("GET", path, **more)
        if answer.status_code != 200:
            raise Wrong(f"GET {path}: {answer.status_code} {answer.text}")
        return answer.json()


class _Cutter:
    """Cuts a byte stream into whole events; what is half at the end is dropped."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._separator = b"\n" if form == "jsonl" else b"\n\n"
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *whole, self._rest = (self._rest + data).split(self._separator)
        found = [self._event(piece) for piece in whole]
        return [event for event in found if event]

    def _event(self, piece: bytes) -> bytes:
        if self._form == "jsonl":
            return piece
        lines = [line for line in piece.split(b"\n") if line and not line.startswith(b":")]
        if not lines:
            return b""
        fields = dict(line.split(b": ", 1) for line in lines)
        event = orjson.loads(fields[b"data"])
        if (fields[b"id"], fields[b"event"]) != (str(event["seq"]).encode(), event["type"].encode()):
            raise Wrong(f"SSE fields differ from their data: {piece[:300]!r}")
        return fields[b"data"]


_ACCEPT = {"jsonl": "application/x-ndjson", "sse": "text/event-stream"}


class Transcript:
    """The events of one execution as they came to one reader: checked for holes and repetitions as they come."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.lines: list[bytes] = []
        self.ended = False

    def add(self, line: bytes) -> None:
        event = orjson.loads(line)
        if self.ended or event["seq"] != len(self.lines) + 1:
            kind = "duplicated" if self.ended or event["seq"] <= len(self.lines) else "lost"
            raise Wrong(f"{self.label}: {kind}: event {event['seq']} after {len(self.lines)}: {line[:300]!r}")
        self.lines.append(line)
        self.ended = event["type"] == "ended"

    @property
    def events(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self.lines]

    @property
    def execution_id(self) -> str:
        found: str = orjson.loads(self.lines[0])["execution_id"]
        return found


def follow(wire: Wire, path: str, transcript: Transcript, first: Form = "jsonl") -> None:
    """Reads on from where the transcript ends, until `ended`; each connection in the other form."""
    forms: tuple[Form, Form] = ("jsonl", "sse") if first == "jsonl" else ("sse", "jsonl")
    for number in wire.attempts():
        form = forms[number % 2]
        last = len(transcript.lines)
        headers = {"Accept": _ACCEPT[form]}
        # The header counts more than the query, which would begin again from the start.
        query = {"after": 0 if form == "sse" else last}
        if form == "sse":
            headers["Last-Event-ID"] = str(last)
        try:
            with wire.http.stream("GET", f"{path}/events", params=query, headers=headers) as answer:
                if answer.status_code != 200:
                    raise Wrong(f"{transcript.label}: {answer.status_code} {answer.read()!r}")
                _take(answer, form, transcript)
        except BROKEN:
            wire.breaks += 1
        if transcript.ended:
            return


def _take(answer: httpx2.Response, form: Form, transcript: Transcript) -> None:
    cutter = _Cutter(form)
    for data in answer.iter_bytes():
        for line in cutter.feed(data):
            transcript.add(line)


# cells


@dataclass(frozen=True)
class Cell:
    """Code, and what it must show: neighbouring texts of one stream joined; a picture as the hash of its bytes."""

    count: int
    code: str
    shows: tuple[tuple[str, str], ...]
    status: Status = "ok"


_LINES = """
import random, sys, time
seen.append({count})
dice = random.Random({seed})
for number in range({lines}):
    print(f"{count}:{{number}}", flush=dice.random() < 0.3)
    if dice.random() < {pauses}:
        time.sleep(dice.random() * 0.1)
"""
_BOTH = """
import sys, time
seen.append({count})
for number in range(5):
    print(f"out {count}:{{number}}"); sys.stdout.flush()
    print(f"err {count}:{{number}}", file=sys.stderr); sys.stderr.flush()
    time.sleep(0.02)
"""
_PICTURE = """
import hashlib, io
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt, numpy as np
from IPython.display import Image, display
seen.append({count})
figure, axes = plt.subplots()
axes.imshow(np.random.default_rng({seed}).random(({size}, {size})))
buffer = io.BytesIO()
figure.savefig(buffer, format="png", metadata={{"Software": None}})
plt.close(figure)
display(Image(buffer.getvalue()))
print(hashlib.sha256(buffer.getvalue()).hexdigest())
"""
_RESULT = "seen.append({count})\nlen(seen)"
_ERROR = "seen.append({count})\nprint('before {count}')\nraise ValueError('cell {count}')"
_STATE = "seen.append({count})\nprint(seen == list(range({count} + 1)), len(seen), seen[-3:])"


def numbered(count: int, lines: int) -> str:
    return "".join(f"{count}:{number}\n" for number in range(lines))


def some_cell(count: int, dice: random.Random) -> Cell:
    """The cell with this number; before it, `seen` holds all numbers below."""
    seed = dice.randrange(10**9)
    kind = dice.choices(["lines", "burst", "both", "picture", "result", "error", "state"], [8, 3, 3, 2, 3, 1, 3])[0]
    if kind == "lines":
        lines = dice.randint(1, 60)
        code = _LINES.format(count=count, seed=seed, lines=lines, pauses=0.4)
        return Cell(count, code, (("stdout", numbered(count, lines)),))
    if kind == "burst":
        code = _LINES.format(count=count, seed=seed, lines=2000, pauses=0.003)
        return Cell(count, code, (("stdout", numbered(count, 2000)),))
    if kind == "both":
        shows = tuple((name, f"{name[3:]} {count}:{number}\n") for number in range(5) for name in ("stdout", "stderr"))
        return Cell(count, _BOTH.format(count=count), shows)
    if kind == "picture":
        code = _PICTURE.format(count=count, seed=seed, size=dice.choice([20, 400]))
        return Cell(count, code, (("png", "?"), ("stdout", "?")))
    if kind == "result":
        return Cell(count, _RESULT.format(count=count), (("result", str(count + 1)),))
    if kind == "error":
        shows = (("stdout", f"before {count}\n"), ("error", f"ValueError: cell {count}"))
        return Cell(count, _ERROR.format(count=count), shows, "error")
    last = list(range(count + 1))[-3:]
    return Cell(count, _STATE.format(count=count), (("stdout", f"True {count + 1} {last}\n"),))


def shown(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What events show, in the terms of `Cell.shows`."""
    found: list[tuple[str, str]] = []
    for event in events:
        kind = event["type"]
        if kind == "stream":
            found.append((event["name"], event["text"]))
        elif kind == "display":
            found.append(("png", hashlib.sha256(base64.b64decode(event["data"]["image/png"])).hexdigest()))
        elif kind == "result":
            found.append(("result", event["data"]["text/plain"]))
        elif kind == "error":
            found.append(("error", f"{event['ename']}: {event['evalue']}"))
    return _joined(found)


def shown_by_result(outputs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The same, of nbformat outputs."""
    kinds = {"display_data": "display", "execute_result": "result"}
    return shown([{**output, "type": kinds.get(output["output_type"], output["output_type"])} for output in outputs])


def _joined(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    joined: list[tuple[str, str]] = []
    for name, text in found:
        if joined and joined[-1][0] == name and name in ("stdout", "stderr"):
            joined[-1] = (name, joined[-1][1] + text)
        else:
            joined.append((name, text))
    return joined


def check_shown(cell: Cell, found: list[tuple[str, str]], label: str) -> None:
    wanted = list(cell.shows)
    if wanted and wanted[0] == ("png", "?"):
        # The cell says itself what its picture was.
        digest = found[1][1].strip() if len(found) == 2 else "none"
        wanted = [("png", digest), ("stdout", f"{digest}\n")]
    if found != wanted:
        raise Wrong(f"{label}: {first_difference(wanted, found)}\ncode:\n{cell.code}")


def first_difference(wanted: list[tuple[str, str]], found: list[tuple[str, str]]) -> str:
    for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
        if one == other:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(one[1], other[1], strict=False)) if a != b), min(len(one[1]), len(other[1]))
        )
        start = max(0, at - 60)
        return (
            f"output {number} differs at character {at} of {len(one[1])} and {len(other[1])}: "
            f"expected {one[0]} …{one[1][start : at + 60]!r}, got {other[0]} …{other[1][start : at + 60]!r}"
        )
    return f"expected {len(wanted)} outputs, got {len(found)}: {[*map(_short, wanted)]} against {[*map(_short, found)]}"


def _short(item: tuple[str, str]) -> tuple[str, str]:
    return item[0], item[1][:60]


def check_events(cell: Cell, events: list[dict[str, Any]], label: str) -> None:
    """An execution from its first event to its last."""
    kinds = [event["type"] for event in events]
    if [event["seq"] for event in events] != list(range(1, len(events) + 1)):
        raise Wrong(f"{label}: numbers {[event['seq'] for event in events]}")
    odd = [event for event in events if event["type"] in ("gap", "warning", "truncated", "interrupt", "input_request")]
    if odd:
        raise Wrong(f"{label}: {odd}")
    if kinds[0] != "queued" or kinds.count("started") != 1 or kinds.count("ended") != 1 or kinds[-1] != "ended":
        raise Wrong(f"{label}: {kinds}")
    if set(kinds[kinds.index("started") + 1 :]) & {"queued", "started"}:
        raise Wrong(f"{label}: {kinds}")
    end = events[-1]
    if (end["status"], end["variables"]) != (cell.status, "kept"):
        raise Wrong(f"{label}: ended {end}, shown {first_difference(list(cell.shows), shown(events))}")
    check_shown(cell, shown(events), label)


# those who use it


@dataclass
class Tally:
    kernel_id: str
    cells: dict[str, Cell] = field(default_factory=dict)
    """By execution."""
    transcripts: list[Transcript] = field(default_factory=list)
    """Of the one who asked, as far as events were read."""
    read: dict[str, Transcript] = field(default_factory=dict)
    """Of the second reader, by execution."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def path(self) -> str:
        return f"/v1/kernels/{self.kernel_id}"

    def ran(self, execution_id: str, cell: Cell) -> None:
        if (other := self.cells.get(execution_id)) is not None and other is not cell:
            raise Wrong(f"{self.kernel_id}: execution {execution_id} was given for cells {other.count} and {cell.count}")
        self.cells[execution_id] = cell


class Writer:
    """Runs cells in one kernel over plain HTTP in every way there is, until it is told to stop."""

    def __init__(self, victim: Victim, trouble: Trouble, stop: threading.Event, seed: int, tally: Tally) -> None:
        self._wire = Wire(victim, trouble)
        self._stop, self._dice, self._tally = stop, random.Random(seed), tally
        self._count = 0
        self.most = 1_000_000

    def run(self) -> None:
        answer = self._execute("seen = []", uuid4().hex)
        if answer.json()["status"] != "ok":
            raise Wrong(f"{self._tally.kernel_id}: {answer.text}")
        self._tally.cells[answer.json()["execution_id"]] = Cell(-1, "seen = []", ())
        while not self._stop.is_set() and self._count < self.most:
            self._dice.choice([self._as_json, self._as_json, self._as_stream, self._as_stream, self._detached])()
        self._last()
        self._tally.done.set()

    def _next(self) -> Cell:
        cell = some_cell(self._count, self._dice)
        self._count += 1
        return cell

    def _execute(self, code: str, key: str, accept: str = "application/json", **fields: Any) -> httpx2.Response:
        body = {"code": code, "stop_on_error": False, **fields}
        headers = {"Accept": accept, "Idempotency-Key": key}
        answer = self._wire.ask("POST", f"{self._tally.path}/execute", json=body, headers=headers)
        if answer.status_code not in (200, 202):
            raise Wrong(f"{self._tally.kernel_id}: execute: {answer.status_code} {answer.text}")
        return answer

    def _as_json(self) -> None:
        cell = self._next()
        result = self._execute(cell.code, uuid4().hex).json()
        label = f"{self._tally.kernel_id} {result['execution_id']} (cell {cell.count}, asked as JSON)"
        if result["status"] != cell.status:
            raise Wrong(f"{label}: {result}")
        check_shown(cell, shown_by_result(result["outputs"]), label)
        self._tally.ran(result["execution_id"], cell)
        self._tally.results[result["execution_id"]] = result

    def _as_stream(self) -> None:
        """Streamed by the execute itself; after a break asked for again with the key, or followed by cursor."""
        cell, key = self._next(), uuid4().hex
        form: Form = self._dice.choice(["jsonl", "sse"])
        repeats = self._dice.random() < 0.5
        transcript = Transcript(f"{self._tally.kernel_id} (cell {cell.count}, asked as {form})")
        for _ in self._wire.attempts():
            if transcript.lines and not repeats:
                break
            before = transcript
            transcript = Transcript(before.label)
            self._stream(cell, key, form, transcript)
            shorter, longer = sorted((before.lines, transcript.lines), key=len)
            if longer[: len(shorter)] != shorter:
                raise Wrong(f"{transcript.label}: asked again, other events: {shorter} and {longer[: len(shorter)]}")
            if len(transcript.lines) < len(before.lines):
                transcript = before
            if transcript.ended:
                break
        self._read_on(cell, transcript)

    def _stream(self, cell: Cell, key: str, form: Form, transcript: Transcript) -> None:
        body = {"code": cell.code, "stop_on_error": False}
        headers = {"Accept": _ACCEPT[form], "Idempotency-Key": key}
        try:
            with self._wire.http.stream("POST", f"{self._tally.path}/execute", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    raise Wrong(f"{transcript.label}: {answer.status_code} {answer.read()!r}")
                _take(answer, form, transcript)
        except BROKEN:
            self._wire.breaks += 1

    def _detached(self) -> None:
        """A few at once, so that some wait in the queue."""
        asked: list[tuple[Cell, str]] = []
        for _ in range(self._dice.randint(1, 4)):
            cell = self._next()
            answer = self._execute(cell.code, uuid4().hex, detach=True)
            if answer.status_code != 202:
                raise Wrong(f"{self._tally.kernel_id}: detached: {answer.status_code} {answer.text}")
            asked.append((cell, answer.json()["execution_id"]))
        for cell, execution_id in asked:
            self._tally.ran(execution_id, cell)
            transcript = Transcript(f"{self._tally.kernel_id} {execution_id} (cell {cell.count}, detached)")
            self._read_on(cell, transcript, execution_id)

    def _read_on(self, cell: Cell, transcript: Transcript, execution_id: str | None = None) -> None:
        if not transcript.ended:
            found = execution_id or transcript.execution_id
            follow(self._wire, f"{self._tally.path}/executions/{found}", transcript, self._dice.choice(["jsonl", "sse"]))
        self._tally.ran(transcript.execution_id, cell)
        check_events(cell, transcript.events, f"{transcript.label} {transcript.execution_id}")
        self._tally.transcripts.append(transcript)

    def _last(self) -> None:
        code = f"seen == list(range({self._count}))"
        answer = self._execute(code, uuid4().hex).json()
        texts = [output["data"]["text/plain"] for output in answer["outputs"]]
        if texts != ["True"]:
            more = self._execute("print(seen)", uuid4().hex).json()
            raise Wrong(f"{self._tally.kernel_id}: {code} is {texts}; seen = {more['outputs']}")
        self._tally.ran(answer["execution_id"], Cell(-2, code, (("result", "True"),)))


class Agent:
    """Runs cells as the users of the client library do: it knows nothing of what happens to the gateway."""

    def __init__(self, victim: Victim, stop: threading.Event, seed: int, tally: Tally) -> None:
        self._victim, self._stop, self._tally = victim, stop, tally
        self._dice = random.Random(seed)
        self.reconnects = 0
        self.most = 1_000_000

    def run(self) -> None:
        with Client(self._victim.url, TOKEN, reconnect=PATIENCE, on_reconnect=self._told) as client:
            client.kernelspecs()
            kernel = client.kernels.get(self._tally.kernel_id)
            first = kernel.execute("seen = []")
            self._tally.cells[first.execution_id] = Cell(-1, "seen = []", ())
            count = 0
            while not self._stop.is_set() and count < self.most:
                cell = some_cell(count, self._dice)
                count += 1
                if self._dice.random() < 0.5:
                    result = kernel.execute(cell.code, stop_on_error=False)
                    label = f"{kernel.id} {result.execution_id} (cell {cell.count}, by the client library)"
                    if result.status != cell.status or result.warnings or result.gap or result.truncated:
                        raise Wrong(f"{label}: {result}")
                    check_shown(cell, shown_by_result(result.outputs), label)
                    self._tally.ran(result.execution_id, cell)
                else:
                    self._stream(cell, list(kernel.stream(cell.code, stop_on_error=False)))
            code = f"seen == list(range({count}))"
            last = kernel.execute(code)
            if last.text != "True\n":
                raise Wrong(f"{kernel.id}: {code}: {last}, seen = {kernel.execute('print(seen)').text}")
            self._tally.ran(last.execution_id, Cell(-2, code, (("result", "True"),)))
        self._tally.done.set()

    def _told(self, error: Exception | None) -> None:
        self.reconnects += error is not None

    def _stream(self, cell: Cell, events: list[Event]) -> None:
        label = f"{self._tally.kernel_id} {events[0].execution_id} (cell {cell.count}, streamed by the client library)"
        check_events(cell, [event.to_dict() for event in events], label)
        transcript = Transcript(label)
        for event in events:
            transcript.add(event.json)
        self._tally.ran(transcript.execution_id, cell)
        self._tally.transcripts.append(transcript)


class Reader:
    """Finds every execution of a kernel in its list and reads it from the first event on."""

    def __init__(self, victim: Victim, trouble: Trouble, tally: Tally, seed: int) -> None:
        self._wire = Wire(victim, trouble)
        self._tally = tally
        self._dice = random.Random(seed)
        self._last = 0

    def run(self) -> None:
        while True:
            done = self._tally.done.is_set()
            found = self._new()
            for summary in found:
                self._read(summary)
            if not found:
                if done:
                    return
                self._tally.done.wait(0.05)

    def _new(self) -> list[dict[str, Any]]:
        """Those not seen yet, oldest first."""
        found: list[dict[str, Any]] = []
        before: int | None = None
        while True:
            query = {"limit": 5} | ({} if before is None else {"before": before})
            page = self._wire.get(f"{self._tally.path}/executions", params=query)
            found += [summary for summary in page["executions"] if summary["number"] > self._last]
            before = page["next"]
            if before is None or before <= self._last + 1:
                break
        found.reverse()
        numbers = [summary["number"] for summary in found]
        if numbers != list(range(self._last + 1, self._last + 1 + len(numbers))):
            raise Wrong(f"{self._tally.kernel_id}: executions {numbers} after {self._last}")
        return found

    def _read(self, summary: dict[str, Any]) -> None:
        execution_id = summary["execution_id"]
        transcript = Transcript(f"{self._tally.kernel_id} {execution_id} (number {summary['number']}, second reader)")
        follow(self._wire, f"{self._tally.path}/executions/{execution_id}", transcript, self._dice.choice(["jsonl", "sse"]))
        if transcript.execution_id != execution_id:
            raise Wrong(f"{transcript.label}: events of {transcript.execution_id}")
        self._tally.read[execution_id] = transcript
        self._last = summary["number"]


class Churner:
    """Makes kernels, uses each once, and deletes them; every request is repeated until it is answered, and once more."""

    def __init__(self, victim: Victim, trouble: Trouble, stop: threading.Event, seed: int) -> None:
        self._wire = Wire(victim, trouble)
        self._stop, self._dice = stop, random.Random(seed)
        self.made = 0
        self.alive: set[str] = set()

    def run(self) -> None:
        while not self._stop.is_set():
            key = uuid4().hex
            kernel_id = self._create(key)
            if self._create(key) != kernel_id:
                raise Wrong(f"the key {key} gave another kernel than {kernel_id}")
            self.alive.add(kernel_id)
            path = f"/v1/kernels/{kernel_id}"
            answer = self._wire.ask("POST", f"{path}/execute", json={"code": "6 * 7"}, headers={"Idempotency-Key": key})
            if answer.status_code != 200 or answer.json()["outputs"][0]["data"]["text/plain"] != "42":
                raise Wrong(f"{path}: {answer.status_code} {answer.text}")
            self._stop.wait(self._dice.random())
            self.alive.discard(kernel_id)
            answer = self._wire.ask("DELETE", path)
            if answer.status_code not in (204, 404, 410):
                raise Wrong(f"DELETE {path}: {answer.status_code} {answer.text}")
            answer = self._wire.ask("GET", path)
            if answer.status_code != 410 or answer.json()["cause"]["code"] != "kernel_deleted":
                raise Wrong(f"GET {path} after DELETE: {answer.status_code} {answer.text}")
            found = self._wire.get(f"{path}/executions")["executions"]
            if [summary["status"] for summary in found] != ["ok"]:
                raise Wrong(f"executions of {path} after its end: {found}")
            self.made += 1
            self._stop.wait(self._dice.random() * 3)

    def _create(self, key: str) -> str:
        answer = self._wire.ask("POST", "/v1/kernels", json={"label": "churn"}, headers={"Idempotency-Key": key})
        if answer.status_code != 201:
            raise Wrong(f"create: {answer.status_code} {answer.text}")
        found: str = answer.json()["id"]
        return found


class Watcher:
    """Looks at the list of kernels all the time: those that live are in it and never dead. Times how long a recovery takes."""

    def __init__(self, victim: Victim, trouble: Trouble, stop: threading.Event, known: Callable[[], set[str]]) -> None:
        self._wire = Wire(victim, trouble)
        self._stop, self._known = stop, known
        self.killed_at: float | None = None
        self.recoveries: list[float] = []

    def run(self) -> None:
        while not self._stop.wait(0.02):
            known = self._known()
            killed_at = self.killed_at
            kernels = {kernel["id"]: kernel for kernel in self._wire.get("/v1/kernels")["kernels"]}
            known &= self._known()
            missing = known - kernels.keys()
            bad = [
                kernels[one] for one in known & kernels.keys() if kernels[one]["state"] not in _LIVE or kernels[one]["cause"]
            ]
            if missing or bad:
                raise Wrong(f"GET /v1/kernels: missing {missing}, not as they should be {bad}")
            recovering = any(kernels[one]["state"] == "recovering" for one in known)
            if killed_at is not None and killed_at == self.killed_at and not recovering:
                self.recoveries.append(time.monotonic() - killed_at)
                self.killed_at = None


_LIVE = ("recovering", "idle", "busy")
