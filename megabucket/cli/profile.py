"""``megabucket profile``: measure the computation in a training program's steps, and write it as a workload."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megabucket.cli.output import print_answer, progress, text_table
from megabucket.cli.workload import ConfigFile, Overrides, WorkloadName, open_workload
from megabucket.errors import printable
from megabucket.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from megabucket.measure.profile_steps import WorkloadProfile

_TENSORS_SHOWN = 5


def profile(
    workload: WorkloadName = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    out: Annotated[Path, typer.Option(help="file for the workload")] = Path("workload.json"),
    steps: Annotated[int, typer.Option(min=1, help="steps that count")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="steps before them that do not")] = 3,
    rank: Annotated[Literal["slowest", "median"], typer.Option(help="whose profile is written")] = "slowest",
    json: Annotated[bool, typer.Option("--json", help="print the workload as JSON on stdout")] = False,
) -> None:
    """Measure when gradients are ready and parameters needed; start several ranks with torchrun -m megabucket profile ..."""
    from megabucket.measure.profile import ProfilePlan, profile_program
    from megabucket.measure.ranks import joined_ranks

    function, run = open_workload(workload, config, overrides)
    plan = ProfilePlan(num_steps=steps, num_warmup_steps=warmup, which_rank=rank)
    with joined_ranks(os.environ, note=progress()) as ranks:
        measured = profile_program(function, run, plan, ranks=ranks, out=out)
    if ranks.rank:
        return
    print_answer(measured.to_dict(), _lines(measured, out), as_json=json)


def _lines(measured: WorkloadProfile, out: Path) -> Iterator[str]:
    workload, facts = measured.workload, measured.facts
    yield f"wrote {out}: {len(workload.tensors)} tensors, {workload.numel:,} elements"
    step = f"microbatches: {workload.num_microbatches}; nothing sent"
    gradients = format_bytes(workload.numel * workload.bytes_per_element)
    rows = [
        ("figure", "value", "meaning"),
        ("forward", format_seconds(workload.forward_s), "per microbatch"),
        ("backward", format_seconds(workload.backward_s), "per microbatch, until the last gradient"),
        ("optimizer", format_seconds(workload.optimizer_s), "per step, of all parameters on one rank"),
        ("step", format_seconds(workload.compute_s), step),
        ("gradients", gradients, f"{workload.bytes_per_element} bytes each"),
        ("ranks", str(len(facts["compute_s_of_ranks"])), f"rank {facts['rank']} is the {facts['which_rank']} one"),
        ("steps", str(facts["num_steps"]), f"on {facts['device']}"),
    ]
    yield from text_table(rows, num_folded=1)
    yield ""
    longest = sorted(workload.tensors, key=lambda tensor: -tensor.backward_s)[:_TENSORS_SHOWN]
    slow = [(format_seconds(tensor.backward_s), printable(tensor.name)) for tensor in longest]
    yield from text_table([("backward", "of the tensors with the longest"), *slow], num_left=0, num_folded=1)
    if facts["unused"]:
        yield f"without a gradient: {', '.join(printable(name) for name in facts['unused'])}"
