"""The command `cellgate`: what each subcommand is called and how a failure is told.

The work is in the modules of this package, one a command. They import what they need when they run, so that `--help` is
quick and `doctor` can report what is missing.
"""

import sys
from typing import Annotated

import typer

from gateway.cli import bench, doctor, execute, executions, kernels, openapi, run, serve

app = typer.Typer(
    name="cellgate",
    help="Run stateful Jupyter kernels in locked-down containers, and stream what their cells put out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("run")(run.run)
app.command("exec")(execute.execute)
app.command("follow")(executions.follow)
app.command("executions")(executions.executions)
app.add_typer(kernels.app, name="kernels")
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("openapi")(openapi.openapi)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"cellgate {version('cellgate')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Exit codes: 0 done, 1 the code failed, 2 it could not be tried, 130 interrupted."""
    try:
        app()
    except Exception as error:
        from gateway.cli.failures import expected, report

        if not isinstance(error, expected()):
            raise
        report(error)
        sys.exit(2)
