"""`cellgate doctor`: what is there, what is missing, and what to do about it, before anything is started."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.connect import ConfigOption, StateOption

if TYPE_CHECKING:
    from gateway.sandboxes.base import EngineReport, Finding
    from gateway.settings import Settings


def doctor(
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine, the engine and the image. Exit code 1 when something prevents starting."""
    from gateway import settings, telemetry
    from gateway.cli import machine

    # What it has to say is its findings; stdout may be read by a program.
    telemetry.configure("error", "console")
    found = settings.load(config, **({"state_dir": state_dir} if state_dir else {}))
    report, engine_findings = _ask_engine(found)
    findings = [*machine.findings(found), *engine_findings]
    ready = not any(finding.level == "problem" for finding in findings)
    if as_json:
        engine = None
        if report:
            engine = {key: value for key, value in asdict(report).items() if key != "findings"}
        document = {"ready": ready, "engine": engine, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(report, findings, ready)
    if not ready:
        raise typer.Exit(1)


def _ask_engine(settings: "Settings") -> "tuple[EngineReport | None, list[Finding]]":
    """The engine's report, or the reason why there is none as a finding."""
    import anyio

    from gateway.errors import GatewayError
    from gateway.sandboxes.base import Finding
    from gateway.sandboxes.docker import DockerEngine

    async def ask() -> "EngineReport":
        engine = DockerEngine(settings)
        try:
            return await engine.check()
        finally:
            await engine.aclose()

    try:
        report = anyio.run(ask)
    except GatewayError as error:
        return None, [Finding("problem", "engine", error.detail)]
    return report, list(report.findings)


def _print(report: "EngineReport | None", findings: "list[Finding]", ready: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = marks[finding.level]
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", "cyan")
        table.add_row(Text(mark, style), Text(finding.subject), text)
    console = Console(highlight=False)
    if report:
        console.print(Text(f"{report.engine} {report.version} at {report.url}, runtime {report.runtime}", "bold"))
    console.print(table)
    verdict = Text("Ready to start.", "green") if ready else Text("Not ready: see each PROBLEM above.", "red")
    console.print(verdict)
