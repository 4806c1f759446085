"""``python -m examples.bytegpt``: train a byte-level GPT on source code, alone or under torchrun."""

from __future__ import annotations

import json as json_format
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from examples.bytegpt.compare import describe_comparison
from examples.bytegpt.config import load_demo_config
from examples.bytegpt.report import Progress, describe_summary, jsonable
from examples.bytegpt.train import run_training
from megabucket.cli.exit_codes import ExitCode, reports_errors
from megabucket.measure.ranks import joined_ranks

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
@reports_errors
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example mode=all_reduce")] = None,
    config: Annotated[Path, typer.Option("-c", "--config", help="YAML file")] = Path("configs/bytegpt.yaml"),
    compare: Annotated[
        Literal["torch-ddp"] | None, typer.Option(help="train the same with this afterwards and print the weight difference")
    ] = None,
    optimizer: Annotated[
        Literal["adamw", "adam", "sgd", "muon"] | None, typer.Option(help="short for optimizer.name=...")
    ] = None,
    resume: Annotated[str, typer.Option(help="auto, never or a step: where to begin", metavar="WHERE")] = "",
    json: Annotated[bool, typer.Option("--json", help="print the closing figures as JSON on stdout")] = False,
) -> None:
    """Train on bytes of source code; start several ranks with torchrun -m examples.bytegpt ..."""
    options = {"optimizer.name": optimizer, "checkpoint.resume": resume}
    given = [f"{key}={value}" for key, value in options.items() if value]
    run = load_demo_config(config, [*(overrides or []), *given])
    with joined_ranks(os.environ, run.fabric) as ranks:
        is_first = ranks.rank == 0
        report = run_training(run, ranks, progress=Progress(is_shown=is_first), compares=compare is not None)
    if is_first and json:
        typer.echo(json_format.dumps(jsonable(asdict(report)), indent=2))
    elif is_first and report.summary is not None:
        typer.echo(describe_summary(report.summary))
        if report.comparison is not None:
            typer.echo(describe_comparison(report.comparison))
    if report.stopped is not None:
        raise typer.Exit(ExitCode.TERMINATED if report.stopped.signal == "SIGTERM" else ExitCode.INTERRUPTED)
    if report.summary is not None and not math.isfinite(report.summary["held_out_bits_after"]):
        if is_first:
            typer.echo("error: training diverged: the held-out loss is not finite at its end", err=True)
        raise typer.Exit(ExitCode.NUMERICAL)


if __name__ == "__main__":
    app()
