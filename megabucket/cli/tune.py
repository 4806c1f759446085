"""``megabucket tune``: find the bucket plan for a training program on these ranks, with evidence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megabucket.cli.output import print_answer, text_table
from megabucket.cli.workload import ConfigFile, Overrides, WorkloadName, open_workload
from megabucket.errors import printable

if TYPE_CHECKING:
    from megabucket.measure.tune import Tuning


def tune(  # noqa: PLR0913, PLR0917 - one argument per option
    workload: WorkloadName = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    out: Annotated[Path, typer.Option(help="file for the tuned config")] = Path("tuned.yaml"),
    evidence: Annotated[
        Path | None, typer.Option(help="file for predictions and measurements, as JSON (default: tune.json beside --out)")
    ] = None,
    modes: Annotated[
        Literal["configured", "both"], typer.Option(help="search in the config's mode, or in both")
    ] = "configured",
    candidates: Annotated[int, typer.Option(min=1, help="plans to run besides the default")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each plan, paired with the default's")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="steps that count in each turn")] = 2,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, help="begin no further round this long after start-up; calibration and one round always run to their end"
        ),
    ] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="print the evidence as JSON on stdout")] = False,
) -> None:
    """Find the bucket plan with the shortest step, measured; start the ranks with torchrun -m megabucket tune ...

    Measures everything itself on these ranks: the collectives, the program's computation, then steps of the program with the
    plans that are predicted to be best. The sections link and workload of the config are not read.
    """
    from megabucket.measure.ranks import joined_ranks
    from megabucket.measure.tune import TunePlan, tune_program, write_tuning

    function, run = open_workload(workload, config, overrides)
    evidence = evidence or out.with_name("tune.json")
    plan = TunePlan(candidates, rounds, steps, max_s=seconds, all_modes=modes == "both")
    note = partial(typer.echo, err=True)  # it takes minutes, so every activity is printed
    with joined_ranks(os.environ, run.fabric, note=note) as ranks:
        tuning = tune_program(function, run, plan, ranks=ranks, outputs=(out, evidence))
    if ranks.rank:
        return
    write_tuning(run, tuning, out=out, evidence=evidence)
    print_answer(tuning.to_dict(), [*_lines(tuning), f"wrote {out} and {evidence}"], as_json=json)


def _lines(tuning: Tuning) -> Iterator[str]:
    from megabucket.planning.candidates import saved_fraction

    yield tuning.summary[0]
    yield from tuning.config_lines
    yield from tuning.summary[1:]
    table: list[tuple[str, ...]] = [
        ("plan", "buckets", "predicted, ms", "measured, ms", "error, %", "saves, %", "interval, %", "faster, rounds")
    ]
    ran = [row for row in tuning.to_dict()["candidates"] if "measured_s" in row]
    for row in sorted(ran, key=lambda row: row["measured_s"]):
        saves = interval = faster = ""
        if "gain" in row:
            saves, low, high = (f"{100 * saved_fraction(row[name]):+.1f}" for name in ("gain", "gain_low", "gain_high"))
            interval = f"{low} to {high}" if row["gain_low"] > -1 else "too few"
            faster = f"{row['num_faster']} of {row['num_rounds']}"
        times = (f"{row[name] * 1e3:,.2f}" for name in ("predicted_s", "measured_s"))
        error = f"{100 * row['prediction_error']:+.1f}"
        table.append((printable(row["name"]), str(row["num_buckets"]), *times, error, saves, interval, faster))
    yield from text_table(table)
