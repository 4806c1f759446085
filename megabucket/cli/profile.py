"""``megabucket profile``: measure what the steps of a training program compute; write a workload for the planner."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.workload import ConfigFile, WorkloadName, open_workload

if TYPE_CHECKING:
    from megabucket.measure.profile_steps import WorkloadProfile

_TENSORS_SHOWN = 5


class WhichRank(str, Enum):
    """What ``--rank`` may be."""

    SLOWEST = "slowest"
    MEDIAN = "median"


def profile(
    workload: WorkloadName,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example mode=reduce_scatter")] = None,
    config: ConfigFile = None,
    out: Annotated[Path, typer.Option(help="where the workload is written")] = Path("workload.json"),
    steps: Annotated[int, typer.Option(help="steps that count")] = 10,
    warmup: Annotated[int, typer.Option(help="steps before them that do not")] = 3,
    rank: Annotated[WhichRank, typer.Option(help="whose figures are taken")] = WhichRank.SLOWEST,
    json: Annotated[bool, typer.Option("--json", help="print the workload as JSON on stdout")] = False,
) -> None:
    """Measure when gradients are ready and parameters needed; start several ranks with torchrun -m megabucket profile ..."""
    import os

    from megabucket.measure.profile import ProfilePlan, profile_program
    from megabucket.measure.ranks import read_launch

    function, run = open_workload(workload, config, overrides)
    launch = read_launch(os.environ)
    plan = ProfilePlan(num_steps=steps, num_warmup_steps=warmup, which_rank=rank.value)
    measured = profile_program(function, run, plan, launch=launch, out=out)
    if launch.rank == 0:
        if json:
            _print_json(measured)
        else:
            _print_summary(measured, out)


def _print_json(measured: WorkloadProfile) -> None:
    import json

    typer.echo(json.dumps(measured.to_dict(), indent=1))


def _print_summary(measured: WorkloadProfile, out: Path) -> None:
    from megabucket.errors import printable
    from megabucket.units import format_bytes, format_seconds

    workload, facts = measured.workload, measured.facts
    ranks_s = facts["compute_s_of_ranks"]
    typer.echo(f"wrote {out}: {len(workload.tensors)} tensors, {workload.numel:,} elements")
    grad_bytes = format_bytes(workload.numel * workload.bytes_per_element)
    lines = (
        ("forward", format_seconds(workload.forward_s), "per microbatch"),
        ("backward", format_seconds(workload.backward_s), "per microbatch, until the last gradient"),
        ("optimizer", format_seconds(workload.optimizer_s), "per step, of all parameters on one rank"),
        ("step", format_seconds(workload.compute_s), f"{workload.num_microbatches} microbatch(es), nothing sent"),
        ("gradients", grad_bytes, f"{workload.bytes_per_element} bytes per element on the wire"),
        ("ranks", f"{len(ranks_s)}", f"rank {facts['rank']} is the {facts['which_rank']} one"),
        ("steps", f"{facts['num_steps']}", f"on {facts['device']}"),
    )
    for name, value, meaning in lines:
        typer.echo(f"  {name:<10}{value:>12}  {meaning}")
    typer.echo("longest backward:")
    for tensor in sorted(workload.tensors, key=lambda tensor: -tensor.backward_s)[:_TENSORS_SHOWN]:
        typer.echo(f"  {format_seconds(tensor.backward_s):>12}  {printable(tensor.name)}")
    if facts["unused"]:
        typer.echo(f"without a gradient: {', '.join(printable(name) for name in facts['unused'])}")
