"""``megabucket``: the commands and what they have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from megabucket import __version__
from megabucket.cli.calibrate import calibrate
from megabucket.cli.checkpoint import app as checkpoint
from megabucket.cli.doctor import doctor
from megabucket.cli.exit_codes import exit_code_table, reports_errors
from megabucket.cli.explain import explain
from megabucket.cli.plan import plan
from megabucket.cli.profile import profile
from megabucket.cli.report import report
from megabucket.cli.simulate import simulate
from megabucket.cli.tune import tune

app = typer.Typer(
    name="megabucket",
    help="Megatron's param-and-grad buffers, buckets and distributed optimizer: plan them, explain them, measure them.",
    epilog=f"\b\nExit codes:\n{exit_code_table()}",
    no_args_is_help=True,
    add_completion=False,
    # Our errors carry their own text; a rich traceback would bury it and print the values of local variables.
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"megabucket {__version__}")
        raise typer.Exit


@app.callback(help=app.info.help)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Take what stands before the command."""


app.command()(reports_errors(plan))
app.command()(reports_errors(explain))
app.command()(reports_errors(simulate))
app.command()(reports_errors(report))
app.command()(reports_errors(calibrate))
app.command()(reports_errors(profile))
app.command()(reports_errors(tune))
app.command()(reports_errors(doctor))
app.add_typer(checkpoint, name="checkpoint")
