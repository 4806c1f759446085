"""``python -m megabucket.chaos.loopback_soak``: run a soak, or one of its worlds again."""

from __future__ import annotations

import logging
from typing import Annotated

import torch
import typer

from megabucket.chaos.loopback_soak.counts import describe_counts
from megabucket.chaos.loopback_soak.replay import describe_program, replay, shrink
from megabucket.chaos.loopback_soak.soak import run_loopback_soak

_Steps = Annotated[int, typer.Option(min=1, help="Training steps to run at least.")]
_Seed = Annotated[int, typer.Option(min=0, help="Decides everything that is drawn.")]
_World = Annotated[int, typer.Option(help="Run the world of this seed only, and show the shortest program that fails.")]


def main(steps: _Steps = 2_000, seed: _Seed = 0, world: _World = -1) -> None:
    """Run training steps with random faults in loopback worlds; exit with 1 if one of them went wrong."""
    torch.set_num_threads(1)  # the tensors are tiny
    logging.getLogger("megabucket").setLevel(logging.ERROR)  # many worlds are drawn whose buckets cannot overlap
    if world >= 0:
        failure = replay(world)
        typer.echo(failure.describe() if failure else f"world {world} is fine")
        for line in describe_program(shrink(failure)) if failure else ():
            typer.echo(line)
        raise typer.Exit(int(failure is not None))
    counts = run_loopback_soak(steps, seed, report=typer.echo)
    for line in describe_counts(counts):
        typer.echo(line)
    raise typer.Exit(int(bool(counts.failures)))


if __name__ == "__main__":
    typer.run(main)
