"""``megabucket report``: one page that shows what a bucket plan costs, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.output import print_answer, progress, text_table
from megabucket.cli.workload import Overrides

if TYPE_CHECKING:
    from megabucket.report import Report


def report(
    config: Annotated[
        Path, typer.Option("-c", "--config", help="YAML file or preset with a link and a workload, or a model and its speed")
    ],
    overrides: Overrides = None,
    dp_size: Annotated[int | None, typer.Option(min=1, help="data-parallel ranks; needed for ring and two_level links")] = None,
    expert_dp_size: Annotated[int | None, typer.Option(min=1, help="ranks that expert buckets are cut for")] = None,
    out: Annotated[Path, typer.Option(help="the page; .json and .trace.json are written beside it")] = Path("report.html"),
    measured: Annotated[
        Path | None, typer.Option(help="measured steps: JSON lines of StepTraceLog or of training, or JSON with candidates")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print all figures as JSON on stdout")] = False,
) -> None:
    """Write a page with timeline, sweep, buckets, memory and scaling, its figures as JSON, and a Chrome trace."""
    from megabucket.planning.run_config import load_config
    from megabucket.report import collect, read_measured, write_report

    run = load_config(config, overrides or [])
    steps = None if measured is None else read_measured(measured)
    figures = collect(run, dp_size=dp_size, expert_dp_size=expert_dp_size, measured=steps, title=config.name, note=progress())
    written = write_report(figures, out)
    typer.echo(f"wrote {', '.join(str(path) for path in written)}", err=True)
    print_answer(figures.to_dict(), _lines(figures), as_json=json)


def _lines(figures: Report) -> Iterator[str]:
    yield figures.summary[0]
    yield from figures.outlook.advice.config_lines
    yield from figures.summary[1:]
    yield ""
    rows = [(plan.name, f"{plan.step_s * 1e3:,.2f}", f"{plan.row.buckets:,}") for plan in figures.plans]
    rows.append(("lower bound", f"{figures.outlook.lower_bound_s * 1e3:,.2f}", ""))
    yield from text_table([("plan", "step, ms", "buckets"), *rows])
