"""``megabucket``: the commands and their common options."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
import typer.core

from megabucket._version import __version__
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
from megabucket.errors import printable


class _Commands(typer.core.TyperGroup):
    """The commands. Their errors about the value of an option contain the value."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            # typer lets pydantic check a value, and drops it from the message
            if isinstance(error.__cause__, ValidationError):
                value = error.__cause__.errors()[0]["input"]
                error.message = f"{error.message.removeprefix('Input ')} (got {printable(repr(value), 60)})"
            raise


app = typer.Typer(
    name="megabucket",
    cls=_Commands,
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
    """Handle the options before the command."""
    del version  # printed by its callback
    if "" not in sys.path:  # an installed command does not look for modules in its working directory, python -m does
        sys.path.insert(0, "")


for command in (plan, explain, simulate, report, calibrate, profile, tune, doctor):
    app.command()(reports_errors(command))
app.add_typer(checkpoint, name="checkpoint")
