"""``megabucket``: the commands and what they have in common."""

from __future__ import annotations

import typer

from megabucket.cli.calibrate import calibrate
from megabucket.cli.chaos import chaos
from megabucket.cli.checkpoint import app as checkpoint
from megabucket.cli.doctor import doctor
from megabucket.cli.exit_codes import exit_code_table, reports_errors
from megabucket.cli.explain import explain
from megabucket.cli.plan import plan
from megabucket.cli.profile import profile
from megabucket.cli.report import report
from megabucket.cli.simulate import simulate
from megabucket.cli.train import train
from megabucket.cli.tune import tune

app = typer.Typer(
    name="megabucket",
    help="Megatron's param-and-grad buffers, buckets and distributed optimizer: plan them, explain them, train with them.",
    epilog=f"\b\nExit codes:\n{exit_code_table()}",
    no_args_is_help=True,
    add_completion=False,
    # Our errors carry their own text; a rich traceback would bury it and print the values of local variables.
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(reports_errors(train))
app.command()(reports_errors(plan))
app.command()(reports_errors(explain))
app.command()(reports_errors(simulate))
app.command()(reports_errors(report))
app.command()(reports_errors(calibrate))
app.command()(reports_errors(profile))
app.command()(reports_errors(tune))
app.command()(reports_errors(doctor))
app.command()(reports_errors(chaos))
app.add_typer(checkpoint, name="checkpoint")
