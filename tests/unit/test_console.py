"""What a person sees: outputs made harmless, progress bars settled, one line for a figure."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gateway.console.outputs import OutputPrinter, bundle_text
from gateway.console.progress import RunView
from gateway.notebook.execution import NotebookRun
from gateway.notebook.figures import Figures
from gateway.notebook.terminal import MAX_PENDING, LineBuffer, clean, settle
from gateway.protocol.events import Event, EventType
from tests.unit.scripted import OK, printed, raised
from tests.unit.test_notebook import PNG, ScriptedKernel, notebook

SGR = re.compile(r"\x1b\[[0-9;:]*m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def event(kind: EventType, **members: Any) -> Event:
    return Event(1, kind, "", "e1", members)


def shown(*events: Event, terminal: bool = False) -> str:
    """What the printer writes for these events."""
    file = io.StringIO()
    printer = OutputPrinter(
        Console(file=file, force_terminal=terminal, width=80, color_system="standard" if terminal else None)
    )
    for each in events:
        printer.show(each)
    printer.flush()
    return file.getvalue()


def stream(text: str, name: str = "stdout") -> Event:
    return event("stream", name=name, text=text)


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[38;5;28;01mx\x1b[39m", "\x1b[38;5;28;01mx\x1b[39m"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;Y2xpcA==\x1b\\b", "ab"),
        ("a\x1b]0;never ended\nb", "a\nb"),
        ("a\x1bP1$r\x1b\\b", "ab"),
        ("a\x1b[2J\x1b[H\x1b[5Ab", "ab"),
        ("a\x1b[?1049hb", "ab"),
        ("a\x1b[6n\x1bcb\x1b(0", "ab"),
        ("a\x9b31mb\x9d0;t\x07", "ab0;t"),
        ("a\x07\x0e\x7f\x85b", "ab"),
        ("a\x1b", "a"),
        ("\x1b[" + "1" * 5000 + "mx", "x"),
        ("\x1b[²m x", "m x"),
        ("tab\tnew\nline é 日", "tab\tnew\nline é 日"),
    ],
)
def test_control_sequences_go_and_colours_stay(text: str, harmless: str) -> None:
    found = clean(text)
    assert CONTROL.findall(SGR.sub("", found)) == []
    assert found.replace("²", "") == harmless


@given(st.text(st.sampled_from("\x1b[]0;mP\\\x07\x9b\x9c?A\n\r\b\tXé"), max_size=40))
def test_whatever_is_printed_no_other_control_character_gets_through(text: str) -> None:
    assert CONTROL.findall(SGR.sub("", clean(text))) == []
    printed_text = shown(stream(text), event("result", data={"text/plain": text}), terminal=True)
    assert CONTROL.findall(SGR.sub("", printed_text)) == []


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("10%\r20%\r30%", "30%"),
        ("\r10%\r20%\r", "20%"),
        ("windows\r", "windows"),
        ("\r\r", ""),
        ("ab\b\bcd", "cd"),
        ("\b\bx", "x"),
        ("-\b\\\b|\b/", "/"),
        ("\x1b[31m10%\r20%", "20%"),
    ],
)
def test_a_line_settles_to_its_last_state(line: str, state: str) -> None:
    assert settle(line) == state


def test_lines_come_out_whole_and_the_rest_is_pending() -> None:
    lines = LineBuffer()
    assert lines.feed("one\ntw") == ["one"]
    assert lines.pending == "tw"
    assert lines.feed("o\r\nthree") == ["two"]
    assert lines.feed("\rTHREE") == []
    assert lines.pending == "THREE"
    assert lines.flush() == ["THREE"]
    assert lines.flush() == []


def test_an_endless_progress_bar_stays_small_and_an_endless_line_is_broken() -> None:
    bar = LineBuffer()
    done = [line for i in range(20_000) for line in bar.feed(f"\r{i:010}")]
    assert done == []
    assert bar.pending == "0000019999"
    assert bar._length <= MAX_PENDING
    endless = LineBuffer()
    done = [line for _ in range(100) for line in endless.feed("x" * 1000)]
    assert "".join([*done, endless.pending]) == "x" * 100_000
    assert done


def test_a_return_waits_for_what_overwrites_it_even_after_shrinking() -> None:
    lines = LineBuffer()
    lines.feed("x\r" * MAX_PENDING + "last\r")
    lines.feed("over")
    assert lines.pending == "over"


def test_outputs_are_never_markup() -> None:
    text = "[bold]not bold[/bold] [/] :smile: [link=http://x]y[/link]"
    assert shown(stream(text + "\n"), terminal=True) == text + "\n"
    assert shown(event("result", data={"text/plain": text})) == text + "\n"


def test_wide_tables_are_not_wrapped() -> None:
    line = "column " * 40
    assert shown(stream(line + "\n")) == line + "\n"


def test_colours_are_for_terminals_alone() -> None:
    error = event("error", ename="E", evalue="", traceback=["\x1b[31mTraceback\x1b[0m", "E: no"])
    assert shown(error) == "Traceback\nE: no\n"
    assert "\x1b[31m" in shown(error, terminal=True)


def test_a_colour_lasts_over_lines_as_in_a_terminal() -> None:
    text = shown(stream("\x1b[31mred\nstill red\x1b[0m\nplain\n"), terminal=True)
    assert text == "\x1b[31mred\x1b[0m\n\x1b[31mstill red\x1b[0m\nplain\n"


def test_streams_take_turns_in_order() -> None:
    assert shown(stream("a"), stream("b\n", "stderr"), stream("c")) == "a\nb\nc\n"


def test_stderr_goes_where_it_is_sent() -> None:
    out, err = io.StringIO(), io.StringIO()
    printer = OutputPrinter(Console(file=out), Console(file=err))
    printer.show(stream("result\n"))
    printer.show(stream("warning\n", "stderr"))
    assert (out.getvalue(), err.getvalue()) == ("result\n", "warning\n")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"text/plain": "   a\n0  1\n", "text/html": "<table>"}, "   a\n0  1"),
        ({"text/plain": "<IPython.core.display.Math object>", "text/latex": "$x$"}, "$x$"),
        ({"text/plain": "<IPython.core.display.HTML object>"}, "<IPython.core.display.HTML object>"),
        ({"application/vnd.plotly.v1+json": {}}, "[application/vnd.plotly.v1+json]"),
        ({"text/plain": 3, "a\x1b[2Jb/\nc": ""}, "[text/plain, ab/ c]"),
        ({"image/png": base64.b64encode(PNG).decode(), "text/plain": "<Figure>"}, "[figure: 3×2 PNG]"),
        ({"image/svg+xml": "<svg/>"}, "[figure: SVG]"),
        ({}, ""),
    ],
)
def test_a_bundle_is_shown_by_its_most_readable_text(data: dict[str, Any], text: str) -> None:
    assert bundle_text(data) == text


def test_a_display_that_is_updated_is_printed_once_in_its_last_state() -> None:
    updates = [event("update_display", data={"text/plain": f"step {i}"}, metadata={}, display_id="d") for i in range(5)]
    assert shown(event("display", data={"text/plain": "step"}), *updates, stream("end\n")) == "step\nend\nstep 4\n"


def test_what_the_gateway_says_is_told() -> None:
    notes = (
        event("truncated", bytes=1_500_000, events=3, limit=1000),
        event("gap", events=2),
        event("warning", code="w", message="m"),
        event("interrupt", step="interrupt_again", reason="timeout"),
        event("queued", position=1),
    )
    assert shown(*notes).splitlines() == [
        "[1,500,000 bytes of output left out: past the limit of 1000]",
        "[2 outputs are missing here]",
        "[w: m]",
        "[interrupt again: timeout]",
    ]


def run_view(tmp_path: Path, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, highlight=False)
    figure = ("display", {"data": {"image/png": base64.b64encode(PNG).decode()}, "metadata": {}, "display_id": None})
    scripts = {"\n\na": [printed("10%\r"), printed("20%\n"), figure, *OK], "b": raised("ValueError", "no")}
    with RunView(console, Figures("tour", tmp_path)) as view:
        NotebookRun(notebook(*scripts)).execute(ScriptedKernel(**scripts), view)
    return file.getvalue()


def test_a_run_in_plain_lines(tmp_path: Path) -> None:
    assert run_view(tmp_path, terminal=False).splitlines() == [
        "[1/2] a",
        "20%",
        f"[figure: saved as {tmp_path}/tour-cell01-1.png, 3×2]",
        "[2/2] b",
        "---",
        "ValueError: no",
    ]


def test_a_run_in_a_terminal_has_a_bar_and_leaves_none(tmp_path: Path) -> None:
    text = run_view(tmp_path, terminal=True)
    assert "cell 1/2" in text
    assert text.rstrip().endswith(("\x1b[?25h", "\x1b[2K"))  # the bar's line is erased and the cursor shown again
    assert "figure: saved as" in text
