"""``megabucket doctor``: what this back-end really does, and whether gradients through the config are right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from megabucket.doctor import Report

_WIDTH_WITHOUT_TERMINAL = 160


def doctor(
    config: Annotated[Path | None, typer.Option("-c", "--config", help="YAML file; the defaults when not given")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example mode=reduce_scatter")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON on stdout")] = False,
) -> None:
    """Check the ranks, their back-end and the gradients; start the ranks with torchrun -m megabucket doctor ..."""
    import os

    from megabucket.doctor import run_doctor
    from megabucket.errors import ConfigError
    from megabucket.measure.ranks import joined_ranks, read_launch
    from megabucket.planning.run_config import RunConfig, load_config

    if config is None and overrides:
        raise ConfigError(f"overrides change a config, and none was given; add -c FILE to {' '.join(overrides)}")
    run = RunConfig() if config is None else load_config(config, overrides or [])
    with joined_ranks(read_launch(os.environ), run.fabric) as ranks:
        report = run_doctor(run.ddp, device=ranks.device)
        if ranks.rank == 0:
            _print_report(report, as_json=json)
        # torchrun ends the other ranks as soon as one has failed; none may leave before the report is out.
        ranks.gather("printed")
    if not report.is_healthy:
        raise typer.Exit(ExitCode.FAILED)


def _print_report(report: Report, *, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(report.to_dict(), indent=2))
        return
    from rich.console import Console

    from megabucket.doctor.report import describe_outcome, report_table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    console.print(report_table(report))
    typer.echo(describe_outcome(report))
