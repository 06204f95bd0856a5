"""The command line against a scripted gateway: what it asks for, what it prints and writes, and its exit codes."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from rich.console import Console
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.api.auth import LoadedToken
from gateway.cli import connect, machine, main, serve
from gateway.cli.tables import age
from gateway.client import ApiError, ConnectionLost, GatewayUnreachable
from gateway.notebook import document
from gateway.settings import MIB, KernelSpecSettings, LimitSettings, load
from tests.unit.scripted import CUT, OK, TOKEN, UNTIL_INTERRUPT, ScriptedGateway, ended, printed, problem, raised
from tests.unit.test_notebook import notebook, outputs


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No setting of the machine counts, files go to a directory of the test, signal handlers are put back."""
    for name in [name for name in os.environ if name.startswith("CELLGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CELLGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def cellgate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["cellgate", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        code = left.value.code
        return Ran(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture
def at(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The scripted gateway is the one that the commands talk to."""
    monkeypatch.setenv("CELLGATE_URL", url)
    monkeypatch.setenv("CELLGATE_TOKEN", TOKEN)
    return url


def save(name: str, *sources: str) -> Path:
    path = Path(name)
    document.write(notebook(*sources), path)
    return path


# exec


@pytest.mark.usefixtures("at")
def test_exec_prints_outputs_and_deletes_its_kernel(scripted: ScriptedGateway, cellgate: Command) -> None:
    scripted.cells["print(6 * 7)"] = [printed("[42]\n"), printed("hm\n", "stderr"), *OK]
    assert cellgate("exec", "print(6 * 7)", "--timeout", "5") == Ran(0, "[42]\n", "hm\n")
    assert scripted.executed == [{"code": "print(6 * 7)", "timeout": 5.0}]
    assert (len(scripted.created), scripted.kernels) == (1, {})


@pytest.mark.usefixtures("at")
@pytest.mark.parametrize("command", [["exec", "1"], ["run", "one.ipynb"]])
def test_limits_are_asked_for(scripted: ScriptedGateway, cellgate: Command, command: list[str]) -> None:
    save("one.ipynb", "1")
    assert cellgate(*command, "--memory", "2g", "--cpus", "0.5", "--spec", "python3").code == 0
    assert scripted.created[0]["limits"] == {"memory": "2g", "cpus": 0.5}
    assert scripted.created[0]["spec"] == "python3"


@pytest.mark.usefixtures("at")
def test_exec_fails_with_the_traceback(scripted: ScriptedGateway, cellgate: Command) -> None:
    scripted.cells["1/0"] = raised("ZeroDivisionError", "division by zero")
    assert cellgate("exec", "1/0") == Ran(1, "---\nZeroDivisionError: division by zero\n", "")


@pytest.mark.usefixtures("at")
def test_exec_says_why_a_kernel_died(scripted: ScriptedGateway, cellgate: Command) -> None:
    scripted.cells["die()"] = [printed("last"), *ended("died", code="out_of_memory", message="It used more than 1 GiB.")]
    assert cellgate("exec", "die()") == Ran(1, "last\n", "It used more than 1 GiB.\n")


@pytest.mark.usefixtures("at")
def test_exec_keeps_a_named_kernel(scripted: ScriptedGateway, cellgate: Command) -> None:
    scripted.kernels["mine"] = {"id": "mine"}
    assert cellgate("exec", "1", "--kernel", "mine").code == 0
    assert (scripted.created, list(scripted.kernels)) == ([], ["mine"])
    gone = cellgate("exec", "1", "--kernel", "other")
    assert (gone.code, gone.out) == (2, "")
    assert gone.err == "error: No kernel has the id 'other'. [kernel_not_found]\n"


@pytest.mark.usefixtures("at")
def test_exec_prints_the_result_as_json(scripted: ScriptedGateway, cellgate: Command) -> None:
    scripted.cells["1/0"] = [printed("x"), *raised("ZeroDivisionError", "no")]
    ran = cellgate("exec", "--json", "1/0")
    found = json.loads(ran.out)
    assert (ran.code, found["status"], found["outputs"][0]["text"]) == (1, "error", "x")


@pytest.mark.usefixtures("at")
def test_exec_takes_code_from_files_and_moves_files(scripted: ScriptedGateway, cellgate: Command, tmp_path: Path) -> None:
    Path("code.py").write_text("code\n")
    Path("in.csv").write_text("in")
    scripted.files["out.csv"] = b"out"
    assert cellgate("exec", "--file", "code.py", "--upload", "in.csv", "--download", "out.csv").code == 0
    assert scripted.executed == [{"code": "code\n"}]
    assert scripted.files["in.csv"] == b"in"
    assert (tmp_path / "out.csv").read_bytes() == b"out"


@pytest.mark.parametrize(
    "arguments", [["exec"], ["exec", "1", "--file", "x"], ["kernels", "stop"], ["kernels", "stop", "a", "--all"]]
)
def test_wrong_usage_is_told(cellgate: Command, arguments: list[str]) -> None:
    ran = cellgate(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "Usage: cellgate" in ran.err


@pytest.mark.usefixtures("at")
def test_a_kernel_that_does_not_start_is_told_with_its_log(cellgate: Command) -> None:
    ran = cellgate("exec", "1", "--spec", "broken")
    assert ran.code == 2
    assert ran.err == "error: The kernel did not start. [start_failed]\n  line one\n  line two\n"


# run


@pytest.mark.usefixtures("at")
def test_run_writes_notebook_page_and_figures(scripted: ScriptedGateway, cellgate: Command, tmp_path: Path) -> None:
    save("report.ipynb", "print(1)", "plot()")
    Path("data.csv").write_text("a,b")
    svg = ("display", {"data": {"image/svg+xml": "<svg/>"}, "metadata": {}, "display_id": None})
    scripted.cells |= {"print(1)": [printed("1\n"), *OK], "plot()": [svg, *OK]}
    ran = cellgate("run", "report.ipynb", "--upload", "data.csv", "--html", "out/r.html", "--figures", "fig", "-p", "n=3")
    assert (ran.code, ran.err) == (0, "")
    assert [cell["code"] for cell in scripted.executed] == ["# Parameters\nn = 3", "print(1)", "plot()"]
    assert scripted.files == {"data.csv": b"a,b"}
    assert scripted.created == [{"label": "report.ipynb"}]
    assert scripted.kernels == {}
    assert outputs(document.read(tmp_path / "report.executed.ipynb"), 2)[0]["text"] == "1\n"
    assert document.read(tmp_path / "report.ipynb") != document.read(tmp_path / "report.executed.ipynb")
    assert "data:image/svg+xml;base64,PHN2Zy8+" in Path("out/r.html").read_text()
    assert Path("fig/report-cell03-1.svg").read_text() == "<svg/>"
    lines = ran.out.splitlines()
    assert lines[0].startswith("The notebook has no cell tagged")
    assert lines[2:4] == ["[2/3] print(1)", "1"]
    assert lines[-1] == "Written: report.executed.ipynb, out/r.html, 1 figure in fig"


@pytest.mark.usefixtures("at")
def test_run_of_a_failing_notebook_writes_what_there_is(scripted: ScriptedGateway, cellgate: Command) -> None:
    save("bad.ipynb", "good", "bad", "never")
    scripted.cells |= {"good": [printed("fine\n"), *OK], "bad": raised("ValueError", "no")}
    ran = cellgate("run", "bad.ipynb", "-o", "deep/out.ipynb")
    assert ran.code == 1
    assert ran.out.splitlines()[-2:] == ["Stopped at cell 2 of 3: ValueError: no", "Written: deep/out.ipynb"]
    written = document.read(Path("deep/out.ipynb"))
    assert [len(outputs(written, number)) for number in (1, 2, 3)] == [1, 1, 0]
    assert scripted.kernels == {}


@pytest.mark.usefixtures("at")
def test_no_text_of_a_cell_or_of_another_client_controls_the_terminal(scripted: ScriptedGateway, cellgate: Command) -> None:
    hostile = "\x1b]0;title\x07\x1b[2Jno\nmore"
    save("bad.ipynb", "bad")
    scripted.cells["bad"] = raised("ValueError", hostile)
    ran = cellgate("run", "bad.ipynb")
    assert "Stopped at cell 1 of 1: ValueError: no\n" in ran.out
    scripted.cells["died"] = ended("died", code="x", message=hostile)
    told = cellgate("exec", "died")
    scripted.kernels["k"] = {"id": "k", "label": hostile}
    assert "\x1b" not in ran.out + ran.err + told.out + told.err + cellgate("kernels", "list").out


@pytest.mark.usefixtures("at")
def test_run_with_a_lost_gateway_writes_what_there_is(scripted: ScriptedGateway, cellgate: Command) -> None:
    save("lost.ipynb", "good")
    scripted.cells["good"] = [printed("fine\n"), CUT]
    ran = cellgate("run", "lost.ipynb")
    assert ran.code == 1
    assert "ended before the answer was complete" in ran.err
    assert outputs(document.read(Path("lost.executed.ipynb")), 1)[0]["text"] == "fine\n"


@pytest.mark.usefixtures("at")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.ipynb"], "There is no notebook at missing.ipynb."),
        (["there.ipynb", "--upload", "missing.csv"], "There is nothing to upload at missing.csv."),
        (["there.ipynb", "-p", "novalue"], "--param 'novalue' is not NAME=VALUE with a Python name."),
    ],
)
def test_run_refuses_before_it_starts_anything(
    scripted: ScriptedGateway, cellgate: Command, arguments: list[str], message: str
) -> None:
    save("there.ipynb", "1")
    assert cellgate("run", *arguments) == Ran(2, "", f"error: {message}\n")
    assert scripted.created == []


def interrupt_when_started(arguments: list[str], url: str, presses: int = 1) -> tuple[int, str]:
    """Run the command in a process of its own and press Ctrl-C once its cell has printed `started`."""
    command = [sys.executable, "-m", "gateway", *arguments]
    environment = os.environ | {"CELLGATE_URL": url, "CELLGATE_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout
        out = ""
        while "started" not in out:
            line = process.stdout.readline()
            assert line, f"{arguments} ended without a word"
            out += line
        for press in range(presses):
            process.send_signal(signal.SIGINT)
            if press + 1 < presses:
                out += process.stdout.readline()
        rest, err = process.communicate(timeout=30)
    assert "Traceback" not in err
    return process.returncode, out + rest


def test_ctrl_c_interrupts_the_cell_and_the_partial_notebook_is_written(scripted: ScriptedGateway, url: str) -> None:
    save("long.ipynb", "long()", "never")
    scripted.cells["long()"] = [printed("started\n"), UNTIL_INTERRUPT, *raised("KeyboardInterrupt", "")]
    code, out = interrupt_when_started(["run", "long.ipynb"], url)
    assert (code, scripted.interrupts) == (130, 1)
    assert "Interrupted in cell 1 of 2." in out
    written = document.read(Path("long.executed.ipynb"))
    assert [output.get("text", output.get("ename")) for output in outputs(written, 1)] == ["started\n", "KeyboardInterrupt"]
    assert scripted.kernels == {}


def test_a_second_ctrl_c_gives_up_on_a_cell_that_does_not_listen(scripted: ScriptedGateway, url: str) -> None:
    save("deaf.ipynb", "deaf()")
    scripted.cells["deaf()"] = [printed("started\n"), UNTIL_INTERRUPT, *OK]
    scripted.deaf = True
    code, _ = interrupt_when_started(["run", "deaf.ipynb"], url, presses=2)
    assert code == 130
    assert outputs(document.read(Path("deaf.executed.ipynb")), 1)[0]["text"] == "started\n"
    assert scripted.kernels == {}


def test_ctrl_c_interrupts_exec(scripted: ScriptedGateway, url: str) -> None:
    scripted.cells["long()"] = [printed("started\n"), UNTIL_INTERRUPT, *raised("KeyboardInterrupt", "")]
    code, out = interrupt_when_started(["exec", "long()"], url)
    assert (code, scripted.interrupts, scripted.kernels) == (130, 1, {})
    assert out.splitlines()[-1] == "KeyboardInterrupt: "


def test_one_signal_does_not_cut_the_clean_up_short_and_a_second_does() -> None:
    cleaned: list[str] = []

    def clean_up(signals: int) -> None:
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)
        cleaned.append(f"after {signals}")

    def command(signals: int) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(clean_up, signals)
            stack.enter_context(connect.cleaned_up())

    command(1)
    with pytest.raises(KeyboardInterrupt):
        command(2)
    assert cleaned == ["after 1"]


# executions


class RestartedGateway(ScriptedGateway):
    """One that knows its executions: a stream that was cut goes on, after it was away for a while."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.away = 0
        """Requests to be refused as if by a gateway that is going."""
        self.followed: list[str] = []
        execution = "/v1/kernels/{id}/executions"
        self.app.router.routes[:0] = [
            Route(execution, self._executions),
            Route(execution + "/{eid}/events", self._events_after),
        ]

    async def _execute(self, request: Request) -> Response:
        if request.headers.get("idempotency-key") and orjson.loads(await request.body()).get("detach"):
            self.executed.append(await request.json())
            return JSONResponse({"execution_id": f"e{len(self.executed)}", "status": "queued"}, 202)
        return await super()._execute(request)

    async def _executions(self, request: Request) -> Response:
        found = [
            {
                "execution_id": f"e{number}",
                "number": number,
                "status": "died",
                "cause": {"code": "signal"},
                "code": body["code"],
            }
            for number, body in reversed(list(enumerate(self.executed, 1)))
        ]
        return JSONResponse({"executions": found[: int(request.query_params["limit"])], "next": None})

    async def _events_after(self, request: Request) -> Response:
        if self.away:
            self.away -= 1
            return problem(503, "shutting_down", "The gateway is stopping.")
        after, number = int(request.query_params["after"]), int(request.path_params["eid"][1:])
        self.followed.append(str(request.url.query))
        whole = [step for step in self.cells[self.executed[number - 1]["code"]] if step != CUT]
        rest = [
            {"seq": seq, "type": kind, "time": "", "execution_id": f"e{number}"} | members
            for seq, (kind, members) in enumerate(whole, 3)
            if seq > after
        ]
        return Response(b"".join(orjson.dumps(event) + b"\n" for event in rest), media_type="application/x-ndjson")


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> Iterator[RestartedGateway]:
    gateway = RestartedGateway()
    monkeypatch.setattr("gateway.client.repeating.pause", lambda seconds: None)
    with gateway.serving() as url:
        monkeypatch.setenv("CELLGATE_URL", url)
        monkeypatch.setenv("CELLGATE_TOKEN", TOKEN)
        yield gateway


BACK = "Connection to the gateway lost, following again…\nThe gateway is back.\n"


def test_exec_outlasts_a_restart_of_the_gateway(restarted: RestartedGateway, cellgate: Command) -> None:
    restarted.cells["long()"] = [printed("one\n"), CUT, printed("two\n"), *OK]
    restarted.away = 2
    assert cellgate("exec", "long()") == Ran(0, "one\ntwo\n", BACK)
    assert restarted.followed == ["after=3"]
    assert restarted.kernels == {}


def test_run_outlasts_a_restart_of_the_gateway(restarted: RestartedGateway, cellgate: Command) -> None:
    save("long.ipynb", "long()")
    restarted.cells["long()"] = [printed("one\n"), CUT, printed("two\n"), *OK]
    ran = cellgate("run", "long.ipynb")
    assert (ran.code, ran.err) == (0, "")
    assert f"one\n{BACK}two\n" in ran.out
    assert outputs(document.read(Path("long.executed.ipynb")), 1)[0]["text"] == "one\ntwo\n"


def test_exec_detaches_and_keeps_what_it_made(restarted: RestartedGateway, cellgate: Command) -> None:
    Path("in.csv").write_text("in")
    ran = cellgate("exec", "--detach", "long()", "--upload", "in.csv", "--timeout", "5")
    assert ran == Ran(0, "e1\n", "Follow it: cellgate follow k1 e1\n")
    assert list(restarted.kernels) == ["k1"]
    assert restarted.files == {"in.csv": b"in"}
    assert restarted.executed == [{"code": "long()", "timeout": 5.0, "detach": True}]
    found = json.loads(cellgate("exec", "--detach", "--json", "x", "--kernel", "k1").out)
    assert found == {"kernel_id": "k1", "execution_id": "e2"}
    assert cellgate("exec", "--detach", "x", "--upload", "missing").code == 2
    assert list(restarted.kernels) == ["k1"]
    assert cellgate("exec", "--detach", "x", "--download", "out.csv").code == 2


def test_an_execution_is_followed_from_anywhere(restarted: RestartedGateway, cellgate: Command) -> None:
    asks = ("input_request", {"prompt": "name? "})
    restarted.cells["long()"] = [printed("one\n"), asks, printed("two\n"), *ended("died", code="signal", message="Killed.")]
    cellgate("exec", "--detach", "long()")
    followed = cellgate("follow", "k1", "e1")
    assert followed == Ran(1, "one\ntwo\n", "[asks for input: name? ]\nKilled.\n")
    assert cellgate("follow", "k1", "e1", "--after", "4") == Ran(1, "two\n", "Killed.\n")
    assert restarted.answers == []


def test_executions_are_listed(restarted: RestartedGateway, cellgate: Command) -> None:
    assert cellgate("executions", "k1").out == "Nothing was executed.\n"
    for code in ("\n  first()\nmore", "\x1b[2Jsecond()"):
        cellgate("exec", "--detach", code)
    table = [line.split() for line in cellgate("executions", "k1").out.splitlines()]
    assert [line[:2] for line in table] == [["number", "id"], ["2", "e2"], ["1", "e1"]]
    assert [line[-1] for line in table] == ["code", "second()", "first()"]
    assert table[1][2:4] == ["died", "(signal)"]
    listed = json.loads(cellgate("executions", "k1", "--json", "--limit", "1").out)
    assert [summary["execution_id"] for summary in listed] == ["e2"]


def test_an_interrupt_waits_for_a_gateway_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "AGAIN", 0)
    sent: list[str] = []
    answers: list[Any] = [GatewayUnreachable("u", "refused"), refusal("shutting_down"), "e1"]

    class Away:
        def interrupt(self) -> str:
            sent.append("interrupt")
            if isinstance(answer := answers.pop(0), Exception):
                raise answer
            return str(answer)

    connect.Interrupts(cast(Any, Away()))._send()
    assert len(sent) == 3
    answers[:] = [ConnectionLost("u", "reset")]  # it may have arrived: a second one would be another interrupt
    connect.Interrupts(cast(Any, Away()))._send()
    assert len(sent) == 4


def refusal(code: str) -> ApiError:
    return ApiError(code=code, status=503, title="", detail="", retryable=True, members={})


# kernels


@pytest.mark.usefixtures("at")
def test_kernels_are_listed_and_stopped(scripted: ScriptedGateway, cellgate: Command) -> None:
    assert cellgate("kernels", "list").out == "No kernel runs.\n"
    for name in ("one", "two", "three"):
        scripted.kernels[name] = {"id": name, "state": "idle", "label": "[red]x", "limits": {"memory": 512 * MIB}}
    table = cellgate("kernels", "list").out.splitlines()
    assert [line.split()[0] for line in table] == ["id", "one", "two", "three"]
    assert {"idle", "0.5", "[red]x"} <= set(table[1].split())
    assert [kernel["id"] for kernel in json.loads(cellgate("kernels", "list", "--json").out)] == ["one", "two", "three"]
    assert cellgate("kernels", "stop", "two", "gone", "one").code == 1
    assert list(scripted.kernels) == ["three"]
    assert cellgate("kernels", "stop", "--all") == Ran(0, "stopped three\n", "")


def test_the_kept_token_is_used_for_this_machine_alone(
    url: str, cellgate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "token").write_text(TOKEN + "\n")
    assert cellgate("kernels", "list", "--url", url).code == 0
    sent: list[str | None] = []

    def remember(url: str, token: str, **more: Any) -> Any:
        sent.append(token)
        raise OSError("not here")

    monkeypatch.setattr("gateway.client.Client", remember)
    for address in ("http://gateway.example:8890", "http://127.0.0.1.example", url):
        cellgate("kernels", "list", "--url", address)
    assert sent == ["", "", TOKEN]


def test_a_gateway_that_is_not_there_is_told(cellgate: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ran = cellgate("kernels", "list", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert (ran.code, ran.out) == (2, "")
    assert "Is a gateway running there?" in ran.err


@pytest.mark.parametrize(
    ("ago", "text"), [(0, "0 s ago"), (59, "59 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (200_000, "2 d ago")]
)
def test_ages_are_told_in_one_unit(ago: int, text: str) -> None:
    assert age((datetime.now(UTC) - timedelta(seconds=ago)).isoformat()) == text


def test_an_age_that_is_no_time_is_left_out() -> None:
    assert age(None) == ""


# serve


def welcome(token: LoadedToken, capsys: pytest.CaptureFixture[str]) -> str:
    serve.welcome(Console(), "http://127.0.0.1:1", token)
    return capsys.readouterr().out


def test_the_token_is_shown_when_it_is_new_and_never_again(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("/state dir/token")
    assert "secret-value" in welcome(LoadedToken("secret-value", True, path), capsys)
    later = welcome(LoadedToken("secret-value", False, path), capsys)
    assert "secret-value" not in later
    assert "/state dir/token" in later
    assert "secret-value" not in welcome(LoadedToken("secret-value", False, None), capsys)


def test_the_curl_line_reads_the_token_where_it_is() -> None:
    line = serve.curl_line("http://127.0.0.1:1", Path("/state dir/token"))
    assert shlex.split(line)[0] == "T=$(cat '/state dir/token');"
    assert 'T="$CELLGATE_TOKEN"' in serve.curl_line("http://127.0.0.1:1", None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "99999"],
        ["--config", "missing.toml"],
        ["--log-level", "loud"],
        ["--max-kernels", "0"],
        ["--on-shutdown", "x"],
    ],
)
def test_a_wrong_configuration_is_told_in_a_line(cellgate: Command, arguments: list[str]) -> None:
    ran = cellgate("serve", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: The configuration")
    assert "[configuration_error]" in ran.err


def test_serve_says_how_to_end_and_how_to_wait(monkeypatch: pytest.MonkeyPatch, cellgate: Command) -> None:
    started: list[Any] = []
    monkeypatch.setattr("gateway.app.serve", lambda settings, on_ready: started.append(settings))
    assert cellgate("serve", "--on-shutdown", "stop", "--standby").code == 0
    assert cellgate("serve").code == 0
    assert [found.server.on_shutdown for found in started] == ["stop", "detach"]
    assert [found.store.lock_wait for found in started] == [serve.STANDBY_WAIT, 0]


# doctor, openapi, version


def test_doctor_names_a_missing_engine_and_fails() -> None:
    command = [sys.executable, "-m", "gateway", "doctor"]  # a process of its own: the docker library leaks a socket here
    environment = os.environ | {"CELLGATE_DOCKER__URL": "unix:///nonexistent/docker.sock", "COLUMNS": "200"}
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, check=False)
    found = json.loads(ran.stdout)
    assert (ran.returncode, found["ready"], found["engine"], ran.stderr) == (1, False, None, "")
    assert ("problem", "engine") in {(finding["level"], finding["subject"]) for finding in found["findings"]}
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (told.returncode, told.stderr) == (1, "")
    assert "PROBLEM" in told.stdout
    assert "/nonexistent/docker.sock" in told.stdout


def spec(memory: int = 1024 * MIB, maximum: int = 4096 * MIB, cpus: float = 4) -> KernelSpecSettings:
    return KernelSpecSettings(limits=LimitSettings(memory=memory), maximum=LimitSettings(memory=maximum, cpus=cpus, pids=512))


@pytest.mark.parametrize(
    ("total", "level"), [(8192 * MIB, "ok"), (2048 * MIB, "warning"), (512 * MIB, "problem"), (None, "warning")]
)
def test_memory_is_measured_against_the_limits(total: int | None, level: str) -> None:
    finding = machine._memory("python3", spec(), total)
    assert finding.level == level
    assert bool(finding.remedy) == (level != "ok" and total is not None)


def test_cores_are_measured_against_the_limits() -> None:
    assert machine._cpus("python3", spec(cpus=4), 4).level == "ok"
    few = machine._cpus("python3", spec(cpus=4), 2)
    assert (few.level, "maximum.cpus to 2" in few.remedy) == ("warning", True)


def test_a_port_in_use_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert machine._port("127.0.0.1", port).level == "warning"
    assert machine._port("127.0.0.1", port).level == "ok"


def test_a_state_directory_needs_not_exist_but_a_place_to_make_it(tmp_path: Path) -> None:
    assert machine._state_dir(tmp_path / "not" / "yet").level == "ok"
    (tmp_path / "file").write_text("")
    assert machine._state_dir(tmp_path / "file" / "below").level == "problem"


def test_the_openapi_document_has_the_routes_of_the_contract(cellgate: Command) -> None:
    found = json.loads(cellgate("openapi").out)
    assert {"/v1/kernels", "/v1/kernels/{kernel_id}/execute"} <= set(found["paths"])


def test_version_and_help(cellgate: Command) -> None:
    assert cellgate("--version").out.split()[0] == "cellgate"
    for command in ("serve", "run", "exec", "follow", "executions", "kernels", "doctor", "openapi"):
        assert command in cellgate("--help").out


def test_help_loads_nothing_heavy() -> None:
    heavy = "{'httpx2', 'fastapi', 'docker', 'nbformat', 'rich.live'}"
    code = f"import sys, gateway.cli; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_default_address_is_where_serve_listens() -> None:
    from gateway.client import connection

    server = load().server
    assert f"http://{server.host}:{server.port}" == connection.DEFAULT_URL
