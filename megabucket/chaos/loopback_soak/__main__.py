"""``python -m megabucket.chaos.loopback_soak``: run a soak, or one of its worlds again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
import typer

from megabucket.chaos.loopback_soak.replay import describe_program, replay, shrink
from megabucket.chaos.loopback_soak.soak import SoakCounts, run_loopback_soak

_Steps = Annotated[int, typer.Option(min=1, help="Training steps to run at least.")]
_Seed = Annotated[int, typer.Option(min=0, help="Decides everything that is drawn.")]
_World = Annotated[int, typer.Option(help="Run the world of this seed only, and show the shortest program that fails.")]


def main(steps: _Steps = 2_000, seed: _Seed = 0, world: _World = -1) -> None:
    """Run training steps with random faults in loopback worlds; exit with 1 if one of them went wrong."""
    torch.set_num_threads(1)  # the tensors are tiny
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


def describe_counts(counts: SoakCounts) -> Iterator[str]:
    """Yield what a soak came to, kind by kind."""
    names = ["RIGHT", "NAMED", "SILENT", "WRONG", "HUNG"]
    yield f"{'kind of episode':44}" + "".join(f"{name:>8}" for name in names)
    pairs = dict.fromkeys(names, 0)
    for kind, verdicts in sorted(counts.by_kind.items()):
        if " + " in kind:
            pairs = {name: pairs[name] + verdicts[name] for name in names}
        else:
            yield f"{kind:44}" + "".join(f"{verdicts[name]:8}" for name in names)
    yield f"{'two of these on two ranks':44}" + "".join(f"{pairs[name]:8}" for name in names)
    total = counts.by_verdict
    yield f"{'all':44}" + "".join(f"{total[name]:8}" for name in names)
    errors = ", ".join(f"{name} {count}" for name, count in counts.errors.most_common())
    yield f"errors that all ranks agreed on: {errors or 'none'}"
    worlds = f"{counts.num_worlds} worlds ({counts.num_rank_steps:,} steps of single ranks)"
    rate = counts.num_steps / max(counts.seconds, 1e-9)
    yield f"seed {counts.seed}: {counts.num_steps:,} steps in {worlds}, {rate:.0f} steps/s, {len(counts.failures)} failures"


if __name__ == "__main__":
    typer.run(main)
