"""The Docker engine is stopped, killed and hung under a gateway with kernels: what lives goes on, what ends says why, nothing is left.

Each setting of live-restore has a daemon of its own for the whole module; each test has a gateway of its own, as a process.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.bench.subject import Subject
from tests.faults.daemon import PrivateDaemon, Tap
from tests.load.chaos import Victim
from tests.support import Event, Gateway, Kernel, Running, eventually, printed, problem

pytestmark = pytest.mark.timeout(300)

WAYS = ["stop", "kill", "hang"]
TRUTHS = {"engine_unavailable", "engine_restarted", "sandbox_ended"}
"""What may be said of a box that the end of its engine has ended, depending on what the gateway could still ask."""
CHANT = """
import os, time
count = 0
while not os.path.exists('enough'):
    print(count, flush=True)
    count += 1
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def _restoring() -> Iterator[PrivateDaemon]:
    with PrivateDaemon(live_restore=True) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def _ending() -> Iterator[PrivateDaemon]:
    with PrivateDaemon(live_restore=False) as daemon:
        yield daemon


@pytest.fixture
def restoring(_restoring: PrivateDaemon) -> Iterator[PrivateDaemon]:
    yield _restoring
    nothing_left(_restoring)


@pytest.fixture
def ending(_ending: PrivateDaemon) -> Iterator[PrivateDaemon]:
    yield _ending
    nothing_left(_ending)


def nothing_left(daemon: PrivateDaemon) -> None:
    left = daemon.containers()
    # Not to be found by the next test.
    daemon.remove_containers()
    assert left == []


class Site(Gateway):
    """A gateway in a process of its own, on a daemon of the tests' own."""

    def __init__(self, subject: Subject, daemon: PrivateDaemon) -> None:
        super().__init__(subject.url, subject.settings)
        self.process, self.daemon = subject, daemon

    @contextlib.contextmanager
    def engine_away(self, way: str) -> Iterator[None]:
        getattr(self.daemon, way)()
        try:
            yield
        finally:
            self.daemon.bring_back()

    @property
    def health(self) -> str:
        found: str = self.http.get("/healthz").json()["status"]
        return found

    def states(self) -> dict[str, str]:
        return {kernel["id"]: kernel["state"] for kernel in self.http.get("/v1/kernels").json()["kernels"]}

    def refuses_creates(self) -> None:
        answer = self.http.post("/v1/kernels", json={})
        assert problem(answer, 503, "engine_unavailable")["retryable"] is True
        assert answer.headers["retry-after"]

    def same_kernels_and_boxes(self) -> None:
        """Every kernel that is alive has its box, and there is no other box."""

        def same() -> bool:
            alive = [kernel_id for kernel_id, state in self.states().items() if state != "dead"]
            return self.daemon.containers() == sorted(f"cellgate-{kernel_id}" for kernel_id in alive)

        eventually(same, "boxes are those of the kernels that live")

    def link_directories(self) -> list[str]:
        return sorted(os.listdir(self.settings.state_dir / "links"))


@contextlib.contextmanager
def gateway_at(daemon: PrivateDaemon, url: str = "", **more: Any) -> Iterator[Site]:
    docker = {"url": url or daemon.url, "timeout": 5.0, **more.pop("docker", {})}
    kernels = {"reconcile_interval": 0.3, **more.pop("kernels", {})}
    with Subject(docker=docker, kernels=kernels, **more) as subject:
        site = Site(subject, daemon)
        with site.http:
            try:
                yield site
            finally:
                daemon.bring_back()


class Chant:
    """A cell that prints numbers until a file is put beside it; run by `CHANT`."""

    def __init__(self, kernel: Kernel, cell: Running) -> None:
        self._kernel, self._cell = kernel, cell

    def goes_on(self) -> None:
        """Waits for events that come after all that were there when this was called."""
        path = f"{self._kernel.path}/executions/{self._cell.execution_id}"
        seen = int(self._kernel.http.get(path).json()["last_seq"])

        def later(event: Event) -> bool:
            assert event["type"] != "ended", event
            return int(event.get("seq", 0)) >= seen + 10

        self._cell.socket.until(later)

    def end(self) -> Event:
        """Its last event, after all numbers have come, each once and in order."""
        assert self._kernel.http.put(self._kernel.file("enough"), content=b"").status_code == 201
        end = self._cell.end()
        said = printed(self._cell.events).split()
        assert said == [str(number) for number in range(len(said))]
        assert self._kernel.value("count") == str(len(said))
        return end


@contextlib.contextmanager
def chanting(kernel: Kernel) -> Iterator[Chant]:
    with kernel.submitted(CHANT) as cell:
        yield Chant(kernel, cell)


# live-restore on: nobody notices


@pytest.mark.parametrize("way", WAYS)
def test_kernels_go_on_while_the_engine_is_away(restoring: PrivateDaemon, way: str) -> None:
    with gateway_at(restoring) as gateway, gateway.kernel() as kernel, gateway.kernel() as other:
        other.run("treasure = 42")
        assert gateway.health == "ok"
        with chanting(kernel) as chant:
            with gateway.engine_away(way):
                chant.goes_on()
                assert other.value("treasure") == "42"
                assert other.http.put(other.file("up"), content=b"load").status_code == 201
                assert other.http.get(other.file("up")).content == b"load"
                assert gateway.states() == {kernel.id: "busy", other.id: "idle"}
                eventually(lambda: gateway.health == "degraded", "degraded")
                other.interrupt()
                assert other.restart()["state"] == "idle"
                assert other.value("'treasure' in globals(), open('up').read()") == "(False, 'load')"
                chant.goes_on()
            eventually(lambda: gateway.health == "ok", "ok again")
            chant.goes_on()
            assert chant.end()["status"] == "ok"
        assert gateway.states() == {kernel.id: "idle", other.id: "idle"}
        gateway.same_kernels_and_boxes()


@pytest.mark.parametrize("way", WAYS)
def test_creates_are_refused_while_the_engine_is_away_and_work_after_it(restoring: PrivateDaemon, way: str) -> None:
    with gateway_at(restoring) as gateway, gateway.kernel() as kernel:
        with gateway.engine_away(way):
            for _ in range(3):
                gateway.refuses_creates()
            assert gateway.states() == {kernel.id: "idle"}
            assert kernel.document()["state"] == "idle"
        with gateway.kernel() as new:
            assert new.value("6 * 7") == "42"
            gateway.same_kernels_and_boxes()
            assert gateway.link_directories() == sorted([kernel.id, new.id])


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_deleted_while_the_engine_is_away_leaves_no_box(restoring: PrivateDaemon, way: str) -> None:
    with gateway_at(restoring) as gateway, gateway.kernel() as kernel, gateway.kernel() as other:
        with kernel.submitted("while True: pass") as cell, gateway.engine_away(way):
            before = len(restoring.processes())
            assert kernel.http.delete(kernel.path).status_code == 204
            # Its container is there until the engine is back, and empty.
            eventually(lambda: len(restoring.processes()) <= before - 3, "init, supervisor and kernel have ended")
            end = cell.end()
            assert (end["status"], end["cause"]["code"]) == ("died", "kernel_deleted")
            assert problem(kernel.post("1"), 410, "kernel_gone")["cause"]["code"] == "kernel_deleted"
            assert gateway.states() == {other.id: "idle"}
            assert other.value("1") == "1"
        gateway.same_kernels_and_boxes()
        eventually(lambda: gateway.link_directories() == [other.id], "its link directory is gone")


def test_nobody_waits_for_a_create_that_hangs(restoring: PrivateDaemon) -> None:
    # Nothing but the create itself finds out.
    slow: dict[str, Any] = {"docker": {"timeout": 12.0}, "kernels": {"reconcile_interval": 600.0}}
    with gateway_at(restoring, **slow) as gateway, gateway.kernel() as kernel, ThreadPoolExecutor() as threads:
        with gateway.engine_away("hang"):
            create = threads.submit(gateway.http.post, "/v1/kernels", json={})
            eventually(lambda: len(gateway.states()) == 2, "the create has begun")
            assert kernel.value("6 * 7") == "42"
            assert kernel.http.put(kernel.file("up"), content=b"load").status_code == 201
            assert not create.done()
            problem(create.result(), 503, "engine_unavailable")
            # Known by now.
            gateway.refuses_creates()
        assert gateway.states() == {kernel.id: "idle"}
    # What dockerd has made of it in the end was nobody's: it is removed by a round of `reconcile`, here that of the next gateway.
    restoring.remove_containers()


@pytest.mark.parametrize("way", ["hang", "kill"])
@pytest.mark.parametrize("request_line", ["/containers/create", "/start"])
def test_a_create_in_the_middle_of_which_the_engine_goes_leaves_nothing(
    restoring: PrivateDaemon, way: str, request_line: str
) -> None:
    with contextlib.closing(Tap(restoring)) as tap, gateway_at(restoring, tap.url) as gateway, gateway.kernel() as kernel:
        tap.at(request_line, getattr(restoring, way))
        gateway.refuses_creates()
        assert gateway.states() == {kernel.id: "idle"}
        restoring.bring_back()
        eventually(lambda: gateway.health == "ok", "ok again")
        # Whether dockerd goes on with what it was asked before is for it to decide; two rounds later nothing is left of it.
        rounds = len([line for line in tap.passed if "/containers/json" in line])
        eventually(lambda: len([line for line in tap.passed if "/containers/json" in line]) > rounds + 2, "rounds")
        gateway.same_kernels_and_boxes()
        eventually(lambda: gateway.link_directories() == [kernel.id], "its link directory is gone")
        assert kernel.value("6 * 7") == "42"
        with gateway.kernel() as new:
            assert new.value("6 * 7") == "42"


@pytest.mark.parametrize("frozen", [False, True], ids=["awake", "frozen"])
def test_a_kernel_deleted_while_the_engine_is_away_keeps_no_socket(restoring: PrivateDaemon, frozen: bool) -> None:
    with gateway_at(restoring, culling=FREEZING if frozen else {}) as gateway, gateway.kernel() as kernel:
        socket = f"/links/{kernel.id}/link.sock"
        assert socket in Path("/proc/net/unix").read_text()
        if frozen:
            wait_until_frozen(restoring, kernel)
        with gateway.engine_away("stop"):
            assert kernel.http.delete(kernel.path).status_code == 204
            eventually(lambda: socket not in Path("/proc/net/unix").read_text(), "the listening socket is closed")
        gateway.same_kernels_and_boxes()
        eventually(lambda: gateway.link_directories() == [], "its link directory is gone")


# frozen kernels


FREEZING = {"freeze_after": 0.5, "cull_interval": 0.2}


def wait_until_frozen(daemon: PrivateDaemon, kernel: Kernel) -> None:
    with contextlib.closing(daemon.api()) as api:
        eventually(lambda: api.inspect_container(kernel.container)["State"]["Paused"], "paused")
    assert kernel.document()["frozen"]


def test_a_frozen_kernel_is_not_lost_while_the_engine_is_away(restoring: PrivateDaemon) -> None:
    """Only the engine can thaw it: its next cell waits for that, or is refused. Nothing says that it is lost."""
    with (
        gateway_at(restoring, culling=FREEZING) as gateway,
        gateway.kernel() as kernel,
        ThreadPoolExecutor() as threads,
    ):
        kernel.run("treasure = 42")
        wait_until_frozen(restoring, kernel)
        with gateway.engine_away("stop"):
            problem(kernel.http.get(f"{kernel.path}/files"), 503, "engine_unavailable")
            answer = threads.submit(kernel.post, "treasure")
            eventually(lambda: gateway.health == "degraded", "degraded")
            eventually(lambda: answer.done() or kernel.document()["queue_length"], "the cell is refused or waits")
            document = kernel.document()
            assert (document["state"], document["frozen"]) == ("idle", True), document["cause"]
        if answer.result().status_code == 200:
            assert answer.result().json()["outputs"][-1]["data"]["text/plain"] == "42", answer.result().text
        else:
            problem(answer.result(), 503, "engine_unavailable")
        assert kernel.value("treasure") == "42"


def test_a_freeze_that_hangs_stops_no_cell_when_the_engine_goes_on(restoring: PrivateDaemon) -> None:
    """The gateway gives the request up, and dockerd carries it out all the same when it goes on."""
    options: dict[str, Any] = {
        "culling": FREEZING,
        "link": {"ping_interval": 0.5, "lost_timeout": 5},
        "docker": {"timeout": 2.0},
    }
    with (
        contextlib.closing(Tap(restoring)) as tap,
        gateway_at(restoring, tap.url, **options) as gateway,
        gateway.kernel() as kernel,
    ):
        hanging = threading.Event()

        def hang() -> None:
            restoring.hang()
            hanging.set()

        tap.at("/pause", hang)
        assert hanging.wait(60)
        with chanting(kernel) as chant:
            chant.goes_on()
            restoring.resume()
            eventually(lambda: gateway.health == "ok", "ok again")
            chant.goes_on()
            assert chant.end()["status"] == "ok"


def test_a_frozen_kernel_is_taken_over_although_the_engine_is_away(restoring: PrivateDaemon) -> None:
    with gateway_at(restoring, culling=FREEZING, link={"lost_timeout": 4}) as gateway, gateway.kernel() as kernel:
        kernel.run("treasure = 42")
        wait_until_frozen(restoring, kernel)
        gateway.process.kill()
        with gateway.engine_away("stop"):
            gateway.process.start()
            with ThreadPoolExecutor() as threads:
                answer = threads.submit(kernel.post, "treasure")
                # Longer than a supervisor that gets CPU needs to call; nothing but the engine can tell whether it gets any.
                time.sleep(5)
                assert not answer.done(), answer.result().text
                assert kernel.document()["state"] == "recovering", kernel.document()["cause"]
                restoring.bring_back()
                assert answer.result().json()["outputs"][-1]["data"]["text/plain"] == "42", answer.result().text


# the gateway goes too


def test_a_gateway_starts_without_the_engine_where_kernels_wait_for_it(restoring: PrivateDaemon) -> None:
    with gateway_at(restoring) as gateway, gateway.kernel() as kernel, gateway.kernel() as other:
        usual = lockdown_of(restoring, kernel)
        other.run("treasure = 42")
        execution = kernel.post(CHANT, detach=True).json()["execution_id"]
        path = f"{kernel.path}/executions/{execution}"
        eventually(lambda: kernel.http.get(path).json()["last_seq"] > 10, "it prints")
        with gateway.engine_away("stop"):
            gateway.process.kill()
            gateway.process.start()
            eventually(lambda: gateway.states() == {kernel.id: "busy", other.id: "idle"}, "taken over")
            assert gateway.health == "degraded"
            gateway.refuses_creates()
            assert other.value("treasure") == "42"
            seen = kernel.http.get(path).json()["last_seq"]
            eventually(lambda: kernel.http.get(path).json()["last_seq"] > seen + 10, "it goes on")
            assert kernel.http.put(kernel.file("enough"), content=b"").status_code == 201
            eventually(lambda: kernel.http.get(path).json()["status"] == "ok", "the cell ends")
        result = kernel.http.get(path).json()
        said = "".join(output["text"] for output in result["outputs"]).split()
        assert said == [str(number) for number in range(int(kernel.value("count")))]
        eventually(lambda: gateway.health == "ok", "ok again")
        with gateway.kernel() as new:
            assert new.value("6 * 7") == "42"
            assert lockdown_of(restoring, new) == usual
            gateway.same_kernels_and_boxes()


def lockdown_of(daemon: PrivateDaemon, kernel: Kernel) -> dict[str, Any]:
    """All that the engine was told about its box, besides the directory that is its own."""
    with contextlib.closing(daemon.api()) as api:
        host: dict[str, Any] = api.inspect_container(kernel.container)["HostConfig"]
    assert any(option.startswith("seccomp=") for option in host["SecurityOpt"])
    assert "no-new-privileges:true" in host["SecurityOpt"]
    for mount in host["Mounts"]:
        assert mount.pop("Source").endswith(f"/links/{kernel.id}")
    return host


@pytest.mark.parametrize("way", WAYS)
def test_a_gateway_without_kernels_and_without_an_engine_says_where_it_looked(restoring: PrivateDaemon, way: str) -> None:
    getattr(restoring, way)()
    try:
        with tempfile.TemporaryDirectory(prefix="cgb-", dir="/tmp") as directory:
            done = command("serve", CELLGATE_DOCKER__URL=restoring.url, CELLGATE_STATE_DIR=directory, CELLGATE_SERVER__PORT="0")
    finally:
        restoring.bring_back()
    assert done.returncode not in (0, None)
    said = done.stdout + done.stderr
    assert restoring.url in said.replace("\n", "")
    assert "Traceback" not in said
    assert "listens" not in said


def command(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "gateway", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# live-restore off: what ends says so


def check_lost(kernel: Kernel, end: Event) -> None:
    assert (end["type"], end["status"], end["variables"], end["kernel_state"]) == ("ended", "died", "lost", "dead"), end
    assert end["cause"]["code"] in TRUTHS, end
    check_dead(kernel)
    assert kernel.document()["cause"] == end["cause"]


def check_dead(kernel: Kernel) -> None:
    document = kernel.document()
    assert (document["state"], document["cause"]["code"] in TRUTHS) == ("dead", True), document
    assert "lost" in document["cause"]["message"]
    for answer in (kernel.post("1"), kernel.http.post(f"{kernel.path}/restart"), kernel.http.get(f"{kernel.path}/files")):
        assert problem(answer, 409, "kernel_dead")["cause"] == document["cause"]


def check_works_again(gateway: Site, *dead: Kernel) -> None:
    eventually(lambda: gateway.health == "ok", "ok again")
    with gateway.kernel() as new:
        assert new.value("6 * 7") == "42"
        assert gateway.states() == {**{kernel.id: "dead" for kernel in dead}, new.id: "idle"}
        gateway.same_kernels_and_boxes()
    for kernel in dead:
        assert kernel.http.delete(kernel.path).status_code == 204
    assert gateway.states() == {}
    eventually(lambda: gateway.link_directories() == [], "link directories are gone")


def test_stopping_an_engine_without_live_restore_ends_its_kernels_truthfully(ending: PrivateDaemon) -> None:
    with gateway_at(ending) as gateway, gateway.kernel() as kernel, gateway.kernel() as idle:
        idle.run("treasure = 42")
        with kernel.submitted(CHANT) as cell, gateway.engine_away("stop"):
            check_lost(kernel, cell.end())
            said = printed(cell.events).split()
            assert said == [str(number) for number in range(len(said))]
            eventually(lambda: gateway.states() == {kernel.id: "dead", idle.id: "dead"}, "no ghost")
            check_dead(idle)
            gateway.refuses_creates()
            assert gateway.health == "degraded"
        check_works_again(gateway, kernel, idle)


def test_killing_an_engine_without_live_restore_ends_its_kernels_when_it_is_back(ending: PrivateDaemon) -> None:
    with gateway_at(ending) as gateway, gateway.kernel() as kernel, gateway.kernel() as idle:
        idle.run("treasure = 42")
        with kernel.submitted(CHANT) as cell:
            with gateway.engine_away("kill"):
                Chant(kernel, cell).goes_on()
                assert idle.value("treasure") == "42"
                gateway.refuses_creates()
                assert gateway.states() == {kernel.id: "busy", idle.id: "idle"}
            check_lost(kernel, cell.end())
            said = printed(cell.events).split()
            assert said == [str(number) for number in range(len(said))]
        eventually(lambda: gateway.states() == {kernel.id: "dead", idle.id: "dead"}, "no ghost")
        check_dead(idle)
        check_works_again(gateway, kernel, idle)


def test_a_hang_of_an_engine_without_live_restore_harms_nobody(ending: PrivateDaemon) -> None:
    with gateway_at(ending) as gateway, gateway.kernel() as kernel:
        with chanting(kernel) as chant:
            with gateway.engine_away("hang"):
                chant.goes_on()
                gateway.refuses_creates()
                eventually(lambda: gateway.health == "degraded", "degraded")
            eventually(lambda: gateway.health == "ok", "ok again")
            assert chant.end()["status"] == "ok"
        gateway.same_kernels_and_boxes()


# what an operator is told


def test_the_doctor_names_live_restore_and_what_its_absence_costs(restoring: PrivateDaemon, ending: PrivateDaemon) -> None:
    found = {}
    for daemon in (restoring, ending):
        document = json.loads(command("doctor", "--json", CELLGATE_DOCKER__URL=daemon.url).stdout)
        (found[daemon],) = [finding for finding in document["findings"] if finding["subject"] == "live-restore"]
    assert (found[restoring]["level"], found[restoring]["remedy"]) == ("ok", "")
    assert found[ending]["level"] == "warning"
    assert "ends every kernel" in found[ending]["text"]
    assert "live-restore" in found[ending]["remedy"]


def test_the_log_of_a_start_names_live_restore_and_what_its_absence_costs(ending: PrivateDaemon) -> None:
    with tempfile.TemporaryDirectory(prefix="cgb-", dir="/tmp") as directory:
        victim = Victim(Path(directory), CELLGATE_DOCKER__URL=ending.url)
        victim.launch()
        try:
            victim.wait_until_it_answers()
        finally:
            victim.end()
        lines = [json.loads(line) for line in victim.log.read_text().splitlines() if line.startswith("{")]
    (told,) = [line for line in lines if line.get("subject") == "live-restore"]
    assert told["level"] == "warning"
    assert "ends every kernel" in told["text"]
    assert '{"live-restore": true}' in told["text"]
