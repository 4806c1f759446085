"""``python -m examples.bytegpt``: train a byte-level GPT on source code, alone or under torchrun."""

from __future__ import annotations

import json as json_format
import math
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.bytegpt.compare import comparison_table, describe_difference
from examples.bytegpt.config import load_demo_config
from examples.bytegpt.loop import Report, run_training
from examples.bytegpt.progress import SilentView, make_view
from examples.bytegpt.summary import summary_table
from megabucket.cli.exit_codes import ExitCode, reports_errors
from megabucket.measure.ranks import read_launch

_WIDTH_WITHOUT_TERMINAL = 140

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Reference(str, Enum):
    """What ``--compare`` can train with."""

    TORCH_DDP = "torch-ddp"


@app.command()
@reports_errors
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example mode=all_reduce")] = None,
    config: Annotated[Path, typer.Option("-c", "--config", help="YAML file")] = Path("configs/bytegpt.yaml"),
    compare: Annotated[
        Reference | None, typer.Option(help="train the same with this afterwards and print the weight difference")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto, never, a step or a path: where to begin (checkpoint.resume)", metavar="WHERE")
    ] = None,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="take the newest whole checkpoint where the one that is meant is damaged")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the closing figures as JSON on stdout")] = False,
) -> None:
    """Train on bytes of source code; start several ranks with torchrun -m examples.bytegpt ..."""
    options = [] if resume is None else [f"checkpoint.resume={json_format.dumps(resume)}"]
    options += ["checkpoint.allow_fallback=true"] if allow_fallback else []
    launch = read_launch(os.environ)
    view = make_view(_console(is_for_talk=True)) if launch.rank == 0 else SilentView()
    run = load_demo_config(config, [*(overrides or []), *options])
    report = run_training(run, launch=launch, view=view, compares=compare is not None)
    if launch.rank == 0:
        _print_report(report, as_json=json)
    if report.stopped is not None:
        raise typer.Exit(ExitCode.TERMINATED if report.stopped.signal == "SIGTERM" else ExitCode.INTERRUPTED)
    if report.summary is not None and not math.isfinite(report.summary.held_out_bits_after):
        if launch.rank == 0:
            typer.echo("error: training diverged: the held-out loss is not finite at its end", err=True)
        raise typer.Exit(ExitCode.NUMERICAL)


def _print_report(report: Report, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json_format.dumps(report.to_dict(), indent=2))
    elif report.summary is not None:
        console = _console()
        console.print(summary_table(report.summary))
        if report.comparison is not None:
            console.print(comparison_table(report.comparison))
            console.print(describe_difference(report.comparison), highlight=False, markup=False, soft_wrap=True)


def _console(*, is_for_talk: bool = False) -> Console:
    """Return a console that does not fold its lines for a terminal that is not there."""
    console = Console(stderr=is_for_talk)
    return console if console.is_terminal else Console(stderr=is_for_talk, width=_WIDTH_WITHOUT_TERMINAL)


if __name__ == "__main__":
    app()
