"""``megabucket tune``: find the bucket plan for a training program on these ranks, with evidence."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.workload import ConfigFile, WorkloadName, open_workload

if TYPE_CHECKING:
    from megabucket.measure.tune import Tuning


class Modes(str, Enum):
    """What ``--modes`` may be."""

    CONFIGURED = "configured"
    BOTH = "both"


def tune(  # noqa: PLR0913, PLR0917 - one argument per option
    workload: WorkloadName,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example fabric.latency_s=1e-4")] = None,
    config: ConfigFile = None,
    out: Annotated[Path, typer.Option(help="where the tuned config is written")] = Path("tuned.yaml"),
    evidence: Annotated[Path, typer.Option(help="where predictions and measurements are written, as JSON")] = Path("tune.json"),
    modes: Annotated[Modes, typer.Option(help="search in the config's mode, or in both")] = Modes.CONFIGURED,
    candidates: Annotated[int, typer.Option(help="plans to run besides the default")] = 4,
    rounds: Annotated[int, typer.Option(help="turns of each plan, paired with the default's")] = 10,
    steps: Annotated[int, typer.Option(help="steps that count in each turn")] = 2,
    seconds: Annotated[float, typer.Option(help="begin no round after this time")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="print the evidence as JSON on stdout")] = False,
) -> None:
    """Find the bucket plan with the shortest step, measured; start the ranks with torchrun -m megabucket tune ..."""
    import os

    from megabucket.measure.ranks import read_launch
    from megabucket.measure.tune import TunePlan, tune_program, write_tuning

    function, run = open_workload(workload, config, overrides)
    plan = TunePlan(
        num_candidates=candidates,
        num_rounds=rounds,
        steps_per_turn=steps,
        max_s=seconds,
        all_modes=modes is Modes.BOTH,
    )

    launch = read_launch(os.environ)
    note = lambda text: typer.echo(text, err=True)  # noqa: E731
    tuning = tune_program(function, run, plan, launch=launch, outputs=(out, evidence), note=note)
    if launch.rank == 0:
        _print(tuning, out=out, evidence=evidence, as_json=json)
        write_tuning(run, tuning, out=out, evidence=evidence)


def _print(tuning: Tuning, *, out: Path, evidence: Path, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(tuning.to_dict(), indent=1))
        return
    from megabucket.measure.tune import describe

    for line in describe(tuning):
        typer.echo(line)
    typer.echo(f"wrote {out} and {evidence}")
