"""``megabucket train``: train a byte-level GPT on source code, alone or under torchrun."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from megabucket.training.loop import Report

_WIDTH_WITHOUT_TERMINAL = 140


class Reference(str, Enum):
    """What ``--compare`` can train with."""

    TORCH_DDP = "torch-ddp"


def train(
    config: Annotated[Path, typer.Option("-c", "--config", help="YAML file with a model section of kind gpt")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example mode=all_reduce")] = None,
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
    """Train on bytes of source code; start several ranks with torchrun -m megabucket train ..."""
    import os

    from rich.console import Console

    from megabucket.planning.run_config import load_config
    from megabucket.training.launch import read_launch
    from megabucket.training.loop import run_training
    from megabucket.training.progress import SilentView, make_view

    run = load_config(config, [*(overrides or []), *_overrides(resume, allow_fallback=allow_fallback)])
    launch = read_launch(os.environ)
    is_first = launch.rank == 0
    view = make_view(_console(Console(stderr=True))) if is_first else SilentView()
    report = run_training(run, launch=launch, view=view, compares=compare is not None)
    if is_first:
        _print_report(report, as_json=json)
    if report.stopped is not None:
        raise typer.Exit(ExitCode.TERMINATED if report.stopped.signal == "SIGTERM" else ExitCode.INTERRUPTED)
    if report.summary is not None and not math.isfinite(report.summary.measured.held_out_bits_after):
        if is_first:
            typer.echo("error: training diverged: the held-out loss is not finite at its end", err=True)
        raise typer.Exit(ExitCode.NUMERICAL)


def _overrides(resume: str | None, *, allow_fallback: bool) -> list[str]:
    """Return the options as the overrides they stand for."""
    import json

    given = [] if resume is None else [f"checkpoint.resume={json.dumps(resume)}"]
    return [*given, "checkpoint.allow_fallback=true"] if allow_fallback else given


def _print_report(report: Report, *, as_json: bool) -> None:
    from rich.console import Console

    from megabucket.training.compare import comparison_table, describe_difference
    from megabucket.training.summary import summary_table

    if as_json:
        import json

        typer.echo(json.dumps(report.to_dict(), indent=2))
        return
    if report.summary is None:
        return
    console = _console(Console())
    console.print(summary_table(report.summary))
    if report.comparison is not None:
        console.print(comparison_table(report.comparison))
        console.print(describe_difference(report.comparison), highlight=False, markup=False, soft_wrap=True)


def _console(console: Console) -> Console:
    """Return a console that does not fold its lines for a terminal that is not there."""
    if console.is_terminal:
        return console
    from rich.console import Console

    return Console(stderr=console.stderr, width=_WIDTH_WITHOUT_TERMINAL)
