"""Running notebooks: what is executed, what is written, and how each way of ending is told."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from gateway.client import ClientError, ConnectionLost
from gateway.notebook import document, html, parameters
from gateway.notebook.document import NotebookError
from gateway.notebook.execution import CellRun, NotebookRun
from gateway.notebook.figures import Figures, size
from gateway.protocol.events import Event, EventType
from tests.unit.scripted import OK, Script, ended, printed, raised

new: Any = nbformat.v4  # its functions have no types

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAIAAAASFvFNAAAAEklEQVR4nGP4z8AARAwQCkQBAB3uA/01yBVIAAAAAElFTkSuQmCC")


class ScriptedKernel:
    """Its cells put out what the script says; code without a script ends well."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts = scripts
        self.executed: list[tuple[str, float | None]] = []

    def stream(self, code: str, *, timeout: float | None = None, **options: Any) -> Iterator[Event]:
        self.executed.append((code, timeout))
        script: Script = [("queued", {"position": 0}), ("started", {"execution_count": len(self.executed)})]
        for seq, (kind, members) in enumerate(script + self.scripts.get(code, OK), 1):
            if kind == "cut":
                raise ConnectionLost("http://gateway", "gone", "e1")
            if kind == "press ctrl-c":
                raise KeyboardInterrupt
            event_type: EventType = kind  # type: ignore[assignment]
            yield Event(seq, event_type, f"2026-11-30T16:00:{seq:02}.000000Z", "e1", members)


class Recorder:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def cell_started(self, run: CellRun) -> None:
        self.heard.append(f"{run.number}/{run.total} {run.title}")

    def cell_event(self, run: CellRun, event: Event) -> None:
        self.heard.append(event.type)

    def cell_ended(self, run: CellRun, ended: Event) -> None:
        self.heard.append(ended.members["status"])


def notebook(*sources: str, **tags: list[str]) -> NotebookNode:
    """A notebook of code cells; `tags` maps a source to the tags of its cell."""
    cells = [new.new_code_cell(source, metadata={"tags": tags.get(source, [])}) for source in sources]
    found: NotebookNode = new.new_notebook(cells=[new.new_markdown_cell("# Title"), *cells])
    return found


def outputs(loaded: NotebookNode, cell: int) -> list[Any]:
    return list(loaded.cells[cell].outputs)


def display(text: str, display_id: str | None = None) -> tuple[str, dict[str, Any]]:
    return "display", {"data": {"text/plain": text}, "metadata": {}, "display_id": display_id}


def test_all_code_cells_run_in_order_and_are_filled_in() -> None:
    loaded = notebook("a", "   ", "b")
    kernel, recorder = ScriptedKernel(a=[printed("one"), printed(" line\n"), *OK], b=[display("shown"), *OK]), Recorder()
    outcome = NotebookRun(loaded, timeout=9).execute(kernel, recorder)
    assert (outcome.status, outcome.executed, outcome.total) == ("ok", 2, 2)
    assert kernel.executed == [("a", 9), ("b", 9)]
    assert outputs(loaded, 1) == [{"output_type": "stream", "name": "stdout", "text": "one line\n"}]
    assert outputs(loaded, 3) == [{"output_type": "display_data", "data": {"text/plain": "shown"}, "metadata": {}}]
    assert [cell.get("execution_count") for cell in loaded.cells] == [None, 1, None, 2]
    assert recorder.heard[:5] == ["1/2 a", "queued", "started", "stream", "stream"]
    nbformat.validate(loaded)


def test_the_times_have_the_names_that_nbclient_gives_them() -> None:
    loaded = notebook("a")
    NotebookRun(loaded).execute(ScriptedKernel(a=[printed("x"), *OK]), Recorder())
    assert loaded.cells[1].metadata["execution"] == {
        "iopub.status.busy": "2026-11-30T16:00:02.000000Z",
        "iopub.execute_input": "2026-11-30T16:00:02.000000Z",
        "iopub.status.idle": "2026-11-30T16:00:04.000000Z",
        "shell.execute_reply": "2026-11-30T16:00:04.000000Z",
    }


def test_a_failing_cell_stops_the_run_and_old_outputs_are_gone() -> None:
    loaded = notebook("good", "bad", "never")
    loaded.cells[3].outputs = [new.new_output("stream", text="from last week")]
    loaded.cells[3].execution_count = 7
    kernel = ScriptedKernel(good=[printed("ok\n"), *OK], bad=[printed("before\n"), *raised("ValueError", "no")])
    outcome = NotebookRun(loaded).execute(kernel, Recorder())
    assert (outcome.status, outcome.number, outcome.message) == ("error", 2, "ValueError: no")
    assert [code for code, _ in kernel.executed] == ["good", "bad"]
    assert [output["output_type"] for output in outputs(loaded, 2)] == ["stream", "error"]
    assert (outputs(loaded, 3), loaded.cells[3].execution_count) == ([], None)


def test_tags_are_honoured_as_nbclient_does() -> None:
    loaded = notebook("skipped", "raising", "after", skipped=["skip-execution"], raising=["raises-exception"])
    loaded.cells[1].outputs = [new.new_output("stream", text="kept")]
    kernel = ScriptedKernel(raising=raised("ValueError", "meant"))
    assert NotebookRun(loaded).execute(kernel, Recorder()).status == "ok"
    assert [code for code, _ in kernel.executed] == ["raising", "after"]
    assert outputs(loaded, 1)[0]["text"] == "kept"
    assert outputs(loaded, 2)[0]["ename"] == "ValueError"


def test_allow_errors_goes_on_but_not_past_a_dead_kernel() -> None:
    died = ended("died", code="out_of_memory", message="It used more than 1 GiB.")
    kernel = ScriptedKernel(bad=raised("ValueError", "no"), worse=[printed("last words"), *died])
    loaded = notebook("bad", "worse", "never")
    outcome = NotebookRun(loaded, allow_errors=True).execute(kernel, Recorder())
    assert (outcome.status, outcome.number) == ("died", 2)
    assert outcome.message == "KernelDied: It used more than 1 GiB."
    assert [output.get("ename", output.get("text")) for output in outputs(loaded, 2)] == ["last words", "KernelDied"]
    nbformat.validate(loaded)


def test_a_timeout_is_in_the_notebook_beside_the_interrupt() -> None:
    interrupted = raised("KeyboardInterrupt", "")[0]
    timeout = ended("timeout", code="cell_timeout", message="It ran longer than 5 s.")
    loaded = notebook("slow")
    outcome = NotebookRun(loaded).execute(ScriptedKernel(slow=[interrupted, *timeout]), Recorder())
    assert outcome.message == "CellTimeout: It ran longer than 5 s."
    assert [output["ename"] for output in outputs(loaded, 1)] == ["KeyboardInterrupt", "CellTimeout"]


@pytest.mark.parametrize(("end", "error"), [("cut", ClientError), ("press ctrl-c", KeyboardInterrupt)])
def test_what_came_before_a_break_is_kept(end: str, error: type[BaseException]) -> None:
    loaded = notebook("a", "b")
    run = NotebookRun(loaded)
    with pytest.raises(error):
        run.execute(ScriptedKernel(a=[printed("one"), *OK], b=[printed("two"), (end, {})]), Recorder())
    assert [outputs(loaded, number)[0]["text"] for number in (1, 2)] == ["one", "two"]


def test_an_interrupted_run_ends_with_its_cell_even_if_that_ends_well() -> None:
    loaded = notebook("a", "b")
    run, kernel = NotebookRun(loaded), ScriptedKernel()
    recorder = Recorder()
    run.interrupted = True
    outcome = run.execute(kernel, recorder)
    assert (outcome.status, outcome.number) == ("interrupted", 1)
    assert [code for code, _ in kernel.executed] == ["a"]


def test_a_later_cell_updates_what_an_earlier_one_displayed() -> None:
    loaded = notebook("show", "update")
    update = ("update_display", display("new", "d1")[1])
    NotebookRun(loaded).execute(ScriptedKernel(show=[display("old", "d1"), *OK], update=[update, *OK]), Recorder())
    assert outputs(loaded, 1)[0]["data"] == {"text/plain": "new"}


def test_left_out_output_is_told_in_the_notebook() -> None:
    loaded = notebook("a")
    cut = ("truncated", {"bytes": 5000, "events": 3, "limit": 1000})
    NotebookRun(loaded).execute(ScriptedKernel(a=[printed("x\n"), cut, *OK]), Recorder())
    assert "5000 bytes of output left out" in outputs(loaded, 1)[1]["text"]


def test_missing_output_is_told_in_the_notebook() -> None:
    loaded = notebook("a")
    NotebookRun(loaded).execute(ScriptedKernel(a=[printed("x\n"), ("gap", {"events": 3, "bytes": None}), *OK]), Recorder())
    assert outputs(loaded, 1)[1]["text"] == "[3 outputs are missing here]\n"


# Files


def test_reads_old_formats_and_writes_what_it_read(tmp_path: Path) -> None:
    path = tmp_path / "old.ipynb"
    cell = {"cell_type": "code", "language": "python", "input": "1", "outputs": [], "collapsed": False, "metadata": {}}
    old = {"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": [{"cells": [cell], "metadata": {}}]}
    path.write_text(json.dumps(old))
    loaded = document.read(path)
    assert (loaded.nbformat, loaded.nbformat_minor) == (4, 5)
    document.write(loaded, tmp_path / "deep" / "new.ipynb")
    again = document.read(tmp_path / "deep" / "new.ipynb")
    assert again.cells[0].source == "1"
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["new.ipynb"]


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", "{}", '{"nbformat": 4}', '{"nbformat":4,"nbformat_minor":5,"cells":[{}]}']
)
def test_what_is_no_notebook_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.ipynb"
    path.write_text(text)
    with pytest.raises(NotebookError, match=r"bad\.ipynb is not a"):
        document.read(path)


def test_a_missing_notebook_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="no notebook at"):
        document.read(tmp_path / "missing.ipynb")


def test_hostile_outputs_are_written(tmp_path: Path) -> None:
    data: dict[str, Any] = {"text/plain": {"not": "text"}, "image/png": [1, None], "application/json": {"deep": [[1]]}}
    loaded = notebook("a")
    shown = ("display", {"data": data, "metadata": {}, "display_id": None})
    NotebookRun(loaded).execute(ScriptedKernel(a=[shown, printed("\x00\u2028"), *OK]), Recorder())
    document.write(loaded, tmp_path / "out.ipynb")
    assert json.loads((tmp_path / "out.ipynb").read_text())["cells"][1]["outputs"][0]["data"] == data


# Parameters


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-12", -12),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", ""),
        ("north", "north"),
        ("007", "007"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ('"3"', "3"),
        ('"open', '"open'),
        ("[1, 2.5, null]", [1, 2.5, None]),
        ('{"a": [true]}', {"a": [True]}),
        ("a=b", "a=b"),
        (".inf", float("inf")),
    ],
)
def test_parameter_values_get_types(text: str, value: Any) -> None:
    found = parameters.parse([f"name={text}"])
    assert found == {"name": value}
    assert type(found["name"]) is type(value)


@pytest.mark.parametrize("text", ["novalue", "1a=2", "class=3", "a b=1", "=1", "a=[1,"])
def test_wrong_parameters_are_refused(text: str) -> None:
    with pytest.raises(NotebookError):
        parameters.parse([text])


def test_parameters_follow_their_defaults_and_replace_earlier_ones() -> None:
    loaded = notebook("n = 1\nname = 'x'", "print(n)")
    loaded.cells[1].metadata["tags"] = ["parameters"]
    assert parameters.inject(loaded, {"n": 5, "name": "O'Neil", "limit": float("inf"), "days": [1, None]}) == [
        "The `parameters` cell sets no 'days'; is the name right?",
        "The `parameters` cell sets no 'limit'; is the name right?",
    ]
    assert parameters.inject(loaded, {"n": 6, "x": {"a": float("nan")}}) == [
        "The `parameters` cell sets no 'x'; is the name right?"
    ]
    assert [cell.metadata.get("tags") for cell in loaded.cells] == [None, ["parameters"], ["injected-parameters"], []]
    values: dict[str, Any] = {}
    exec(loaded.cells[2].source, values)
    assert values["n"] == 6
    assert values["x"]["a"] != values["x"]["a"]
    nbformat.validate(loaded)


def test_parameters_without_a_cell_for_them_come_first_with_a_word() -> None:
    loaded = notebook("print(n)")
    notes = parameters.inject(loaded, {"n": 5})
    assert loaded.cells[0].source == "# Parameters\nn = 5"
    assert "no cell tagged `parameters`" in notes[0]


def test_parameters_are_refused_for_other_languages() -> None:
    loaded = notebook("x <- 1")
    loaded.metadata["kernelspec"] = {"name": "ir", "language": "R", "display_name": "R"}
    with pytest.raises(NotebookError, match="this notebook is in r"):
        parameters.inject(loaded, {"n": 5})


# Figures


def image(data: bytes, mime: str = "image/png") -> dict[str, Any]:
    text = data.decode() if mime == "image/svg+xml" else base64.b64encode(data).decode()
    return {"output_type": "display_data", "data": {mime: text}, "metadata": {}}


def test_figures_are_named_by_cell_and_follow_their_outputs(tmp_path: Path) -> None:
    figures = Figures("tour", tmp_path / "figures")
    found = figures.update(3, [image(PNG), image(b"<svg/>", "image/svg+xml")])
    assert [figure.path.name for figure in found if figure.path] == ["tour-cell03-1.png", "tour-cell03-2.svg"]
    assert found[0].size == (3, 2)
    figures.update(12, [image(PNG)])
    figures.update(3, [image(b"other")])
    names = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert names == {"tour-cell03-1.png": b"other", "tour-cell12-1.png": PNG}
    assert len(figures.paths) == 2


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Figures("tour").update(1, [image(PNG)])[0].path is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mime", "data", "expected"),
    [
        ("image/png", PNG, (3, 2)),
        ("image/png", PNG[:20], None),
        ("image/jpeg", b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x0b\x08\x00\x10\x00\x20\x01\x00", (32, 16)),
        ("image/jpeg", b"\xff\xd8\xff\xe0\x00\x04ab", None),
        ("image/jpeg", b"\xff\xd8" + b"\xff" * 50, None),
        ("image/svg+xml", b"<svg/>", None),
    ],
)
def test_sizes_come_from_the_header(mime: str, data: bytes, expected: tuple[int, int] | None) -> None:
    assert size(mime, data) == expected


# HTML


def test_the_page_stands_alone_and_shows_everything() -> None:
    loaded = notebook("a")
    table = ("result", {"data": {"text/html": "<table><td>cell</td></table>"}, "metadata": {}, "execution_count": 1})
    formula = ("display", {"data": {"text/latex": r"$\beta_1 < 0$"}, "metadata": {}, "display_id": None})
    figure = ("display", {"data": image(PNG)["data"], "metadata": {}, "display_id": None})
    widget = (
        "display",
        {"data": {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "IntSlider", "image/png": [1]}, "metadata": {}},
    )
    script: Script = [printed("\rhalf\rdone\n"), table, formula, figure, widget, *OK]
    NotebookRun(loaded).execute(ScriptedKernel(a=script), Recorder())
    loaded.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    page = html.export(loaded, "tour")
    for part in ("<title>tour</title>", "<td>cell</td>", r"\beta_1", "data:image/png;base64,iVBOR", "done", "<h1"):
        assert part in page
    assert "half" not in page
    assert loads(page) == []
    policy = re.search(r'<meta content="([^"]*)" http-equiv="Content-Security-Policy"', page)
    assert policy
    assert "http" not in policy[1]
    assert page.index("Content-Security-Policy") < page.index("<style")


def loads(page: str) -> list[str]:
    """All that a browser would fetch for this page: sources, style sheets, imports and CSS urls that are no data."""
    found = re.findall(r"""(?:\ssrc|<link[^>]*\shref)=["']?([^"'\s>]+)""", page)
    found += re.findall(r"url\(\s*[\"']?([^\"')]+)", page)
    found += re.findall(r"""\bimport\s*\(?[^;{]{0,80}?["'](https?:[^"']+)""", page)
    return [address for address in found if not address.startswith(("data:", "#"))]


def test_the_check_for_loads_sees_what_nbconvert_does_by_default() -> None:
    from nbconvert import HTMLExporter

    make: Any = HTMLExporter
    page, _ = make().from_notebook_node(notebook("1"))
    assert any("require" in address for address in loads(page))
    assert any("mathjax" in address.lower() for address in loads(page))


def test_missing_nbconvert_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    with pytest.raises(html.HTMLError, match=r"cellgate\[html\]"):
        html.require()
