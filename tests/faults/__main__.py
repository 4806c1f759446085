"""``python -m faults`` (with ``tests`` on the path): the fault table, the soak, interrupts, campaigns against checkpoints."""

from __future__ import annotations

import json
import platform
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .cells import Cell
from .checkpoints.campaigns import app as checkpoints
from .interrupts import CALLS, COMBOS, FORM_COMBOS, OWNER_COMBOS, Call, interrupt_at_lines
from .judge import Name, Run, Verdict, judge
from .kinds import KINDS, fault_of, select
from .loopback import run_in_threads
from .player import Play
from .processes import run_many
from .soak import run_soak
from .table import fault_table

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(checkpoints, name="checkpoints", help="Campaigns against checkpoints.")
_WIDTH = 200
_Seed = Annotated[int | None, typer.Option(min=0, help="Decides everything that is drawn; random if not given.")]
_Jobs = Annotated[int, typer.Option(min=1, help="Sets of ranks that run at the same time.")]
_Loopback = Annotated[
    bool, typer.Option("--loopback", help="Ranks are threads of this process; kinds of processes are left out.")
]


@app.command()
def table(
    kinds: Annotated[str, typer.Option(help="Only kinds, kinds/places or cells that match this glob.")] = "*",
    torch_ddp: Annotated[bool, typer.Option("--torch-ddp", help="Train with torch DDP.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Only the first combination of each place.")] = False,
    loopback: _Loopback = False,
    *,
    reduction_order: Annotated[str, typer.Option(help="Of the config of all ranks: backend, or rank.")] = "backend",
    seed: _Seed = None,
    jobs: _Jobs = 2,
    time_limit: Annotated[float, typer.Option(min=5.0, help="Seconds after which a cell counts as hung.")] = 25.0,
    out: Annotated[Path | None, typer.Option(help="Write a JSON line for each cell.")] = None,
) -> None:
    """Make every fault, check every gradient, weight and error; exit with 1 if anything is not as it must be."""
    console = Console(stderr=True)
    seed = secrets.randbelow(2**31) if seed is None else seed
    system = "torch DDP" if torch_ddp else "megabucket"
    console.print(f"{system}, seed {seed}, torch {torch.__version__}, Python {platform.python_version()}", highlight=False)
    cells = [replace(cell, seed=seed, is_torch=torch_ddp) for cell in select(kinds, is_quick=quick)]
    if loopback:
        cells = [cell for cell in cells if not KINDS[cell.kind].needs_processes]
    results = [(cell, Verdict(Name.SKIPPED, why)) for cell in cells if (why := KINDS[cell.kind].why_not(cell)) and torch_ddp]
    skipped = {cell for cell, _ in results}
    plays = [Play([cell], {"reduction_order": reduction_order}) for cell in cells if cell not in skipped]
    runs: Iterable[Run] = map(run_in_threads, plays) if loopback else run_many(plays, num_jobs=jobs, time_limit_s=time_limit)
    for run in runs:
        for cell, verdict in judge(run, fault_of):
            results.append((cell, verdict))
            if not verdict.name.is_good and not torch_ddp:
                console.print(f"{cell.name}: {verdict.name.value}: {verdict.reason[:600]}", highlight=False, markup=False)
    Console(width=_WIDTH).print(fault_table(results, system=system))
    if out is not None:
        out.write_text("".join(_line(cell, verdict) for cell, verdict in results))
    bad = [cell for cell, verdict in results if not verdict.name.is_good and not torch_ddp]
    raise typer.Exit(int(bool(bad)))


def _line(cell: Cell, verdict: Verdict) -> str:
    values = {"cell": cell.name, "seed": cell.seed, "verdict": verdict.name.value, "reason": verdict.reason}
    return json.dumps({**values, "error": verdict.error, "noticed_s": verdict.detected_s}) + "\n"


@app.command()
def interrupts(
    every: Annotated[int, typer.Option(min=1, help="Interrupt at every nth line of the step.")] = 1,
    first: Annotated[int, typer.Option(min=1, help="The first line.")] = 1,
    only: Annotated[str, typer.Option(help="Only modes and calls that match this glob.")] = "*",
) -> None:
    """Interrupt one step at its lines, in each mode and form, and each collective call, over the loopback world."""
    has_failed = False
    runs = {str(combo): Call(combo=combo) for combo in (*COMBOS, *FORM_COMBOS, *OWNER_COMBOS)} | CALLS
    for name, call in {name: call for name, call in runs.items() if fnmatchcase(name, only)}.items():
        result = interrupt_at_lines(call.combo, every=every, first=first, call=call)
        has_failed |= bool(result.failures)
        typer.echo(f"{name}: {result.describe()}")
        for failure in result.failures:
            typer.echo(f"  {failure[:600]}")
    raise typer.Exit(int(has_failed))


@app.command()
def soak(
    steps: Annotated[int, typer.Option(min=1, help="How many steps, at least.")] = 50_000,
    seed: _Seed = None,
    processes: Annotated[bool, typer.Option("--processes", help="Ranks are processes over gloo.")] = False,
) -> None:
    """Run steps with random faults, world after world."""
    console = Console(stderr=True)
    seed = secrets.randbelow(2**20) if seed is None else seed

    def run_worlds(plays: Iterable[Play]) -> Iterator[Run]:
        return run_many(list(plays), time_limit_s=120.0) if processes else map(run_in_threads, plays)

    result = run_soak(
        steps, seed, run_worlds=run_worlds, report=lambda text: console.print(text, highlight=False, markup=False)
    )
    typer.echo(result.describe())
    raise typer.Exit(int(bool(result.failures)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
