"""``megabucket chaos``: make every fault there is on real processes, and see what becomes of gradients, weights and errors."""

from __future__ import annotations

import platform
import secrets
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabucket.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from megabucket.chaos.outcome import CellOutcome

_WIDTH_WITHOUT_TERMINAL = 160
_SOAK_RANKS = 2
_REASON_CHARS = 500


class System(str, Enum):
    """What the ranks can train with."""

    MEGABUCKET = "megabucket"
    TORCH_DDP = "torch-ddp"


def chaos(  # noqa: PLR0913, PLR0917 - one parameter per option
    full: Annotated[bool, typer.Option("--full/--quick", help="every cell, or one for each error class")] = False,
    system: Annotated[System, typer.Option(help="what the ranks train with")] = System.MEGABUCKET,
    kinds: Annotated[str, typer.Option(help="only kinds, kinds/places or cells that match this glob")] = "*",
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, max=4, help="only cells with so many ranks; may be repeated")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="of batches and random steps; random if not given")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="cells that run at the same time")] = 2,
    time_limit: Annotated[float, typer.Option(min=5.0, help="seconds after which a cell counts as hung")] = 20.0,
    out: Annotated[Path | None, typer.Option(help="write the JSON lines here instead of to stdout")] = None,
    beside: Annotated[list[Path] | None, typer.Option(help="JSON lines of an earlier run, to show beside this one")] = None,
    page: Annotated[Path | None, typer.Option(help="write an HTML page")] = None,
    random_steps: Annotated[int, typer.Option(min=0, help="run so many steps with random faults instead of the cells")] = 0,
) -> None:
    """Run faults on real processes and check every gradient, weight and error; exit with 1 if anything is not as it must be."""
    from rich.console import Console

    from megabucket.chaos.cell import SystemName
    from megabucket.chaos.kinds import full_matrix, quick_matrix, select
    from megabucket.chaos.run import num_failing, prepared, run_matrix

    console = _console(Console(stderr=True))
    if seed is None:
        seed = secrets.randbelow(2**31)
    console.print(f"seed {seed}", highlight=False)
    if random_steps:
        _run_random_steps(random_steps, ranks or [_SOAK_RANKS], seed=seed, console=console)
        return
    cells = select(full_matrix() if full else quick_matrix(), kinds=kinds, ranks=frozenset(ranks or ()))
    if not cells:
        typer.echo(f"error: no cell matches --kinds {kinds!r} and the other options", err=True)
        raise typer.Exit(ExitCode.USAGE)
    cells = prepared(cells, system=SystemName(system.value), seed=seed)
    outcomes = _show_while_running(run_matrix(cells, num_jobs=jobs, time_limit_s=time_limit), len(cells), out, console)
    _print_tables(outcomes, beside or [], page, console, seed=seed)
    if num_failing(outcomes):
        raise typer.Exit(ExitCode.FAILED)


def _show_while_running(
    outcomes: Iterable[CellOutcome], num_cells: int, out: Path | None, console: Console
) -> list[CellOutcome]:
    """Write a line of JSON for each outcome as it comes, and say at once what has failed."""
    import json

    from rich.progress import Progress

    from megabucket.chaos.run import num_failing

    done: list[CellOutcome] = []
    with ExitStack() as stack:
        stream = stack.enter_context(out.open("w")) if out is not None else sys.stdout
        progress = stack.enter_context(Progress(console=console, disable=not console.is_terminal, transient=True))
        task = progress.add_task("cells", total=num_cells)
        for outcome in outcomes:
            done.append(outcome)
            stream.write(json.dumps(outcome.to_dict(), default=list) + "\n")
            stream.flush()
            progress.advance(task)
            if num_failing([outcome]):
                line = f"{outcome.verdict.name.value} {outcome.cell.name}: {outcome.verdict.reason[:_REASON_CHARS]}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    return done


def _print_tables(outcomes: list[CellOutcome], beside: list[Path], page: Path | None, console: Console, *, seed: int) -> None:
    import torch

    import megabucket
    from megabucket.chaos.outcome import read_outcomes
    from megabucket.chaos.page import render_page
    from megabucket.chaos.summary import comparison_table, summary_table

    console.print(summary_table(outcomes, outcomes[0].cell.system))
    others = [read_outcomes(path) for path in beside]
    if others:
        console.print(comparison_table([outcomes, *others]))
    if page is not None:
        facts = {
            "megabucket": megabucket.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "back-end": "gloo",
            "seed": str(seed),
        }
        everything = [*outcomes, *(one for other in others for one in other)]
        page.write_text(render_page(everything, facts=facts), encoding="utf-8")


def _run_random_steps(num_steps: int, ranks: list[int], *, seed: int, console: Console) -> None:
    """Share the steps out over modes, overlap and numbers of ranks, each in one long-lived set of processes."""
    import json

    from megabucket.chaos.cell import Combo, Mode
    from megabucket.chaos.soak import run_random_steps
    from megabucket.chaos.soak_plan import SoakPlan
    from megabucket.chaos.summary import soak_table

    combos = [Combo(mode, overlaps, num_ranks) for num_ranks in ranks for mode in Mode for overlaps in (True, False)]
    shares = [num_steps // len(combos) + (index < num_steps % len(combos)) for index in range(len(combos))]
    plans = [SoakPlan(share, seed + index, combo) for index, (share, combo) in enumerate(zip(shares, combos, strict=True))]
    results = []
    for result in run_random_steps([plan for plan in plans if plan.num_steps]):
        results.append(result)
        typer.echo(json.dumps(result.to_dict()))
        for problem in result.problems:
            console.print(problem, highlight=False, markup=False, soft_wrap=True)
    console.print(soak_table(results))
    if any(result.has_failed for result in results):
        raise typer.Exit(ExitCode.FAILED)


def _console(console: Console) -> Console:
    """Return a console that does not fold its lines for a terminal that is not there."""
    if console.is_terminal:
        return console
    from rich.console import Console

    return Console(stderr=console.stderr, width=_WIDTH_WITHOUT_TERMINAL)
