"""``python -m faults checkpoints``: run one campaign, or all of them; exit with 1 if one found something."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_SHOWN = 20
_Seed = Annotated[int, typer.Option(min=0, help="Decides everything that is drawn.")]
_Where = Annotated[Path | None, typer.Option(help="Work in a directory of its own here; otherwise where temporary files go.")]
_Ranks = Annotated[int, typer.Option(min=1, help="Ranks that save together, as threads.")]


def _end(failures: Sequence[str]) -> None:
    for failure in failures[:_SHOWN]:
        typer.echo(failure)
    raise typer.Exit(int(bool(failures)))


@app.command()
def crash_points(ranks: _Ranks = 2, where: _Where = None) -> None:
    """Kill a save at each of its calls, with whole and with half-done writes."""
    from faults.checkpoints.crash_points import run_crash_points

    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=where) as base:
        for torn in (False, True):
            place = Path(base) / ("torn" if torn else "whole")
            failures += run_crash_points(place, size=ranks, torn=torn, report=typer.echo).failures
    _end(failures)


@app.command()
def kills(
    kills: Annotated[int, typer.Option(min=1, help="How many processes to kill.")] = 1_000,
    seed: _Seed = 0,
    ranks: _Ranks = 2,
    where: _Where = None,
) -> None:
    """Kill processes that save, at random moments."""
    from faults.checkpoints.kills import run_kills

    with tempfile.TemporaryDirectory(dir=where) as base:
        _end(run_kills(Path(base), kills, seed, size=ranks, report=typer.echo).failures)


@app.command()
def io_errors(ranks: _Ranks = 2, where: _Where = None) -> None:
    """Refuse each call on each rank, with each error number."""
    from faults.checkpoints.io_errors import run_io_errors

    with tempfile.TemporaryDirectory(dir=where) as base:
        _end(run_io_errors(Path(base), size=ranks, report=typer.echo).failures)


@app.command()
def damage(
    cases: Annotated[int, typer.Option(min=1, help="How often to damage something.")] = 10_000,
    seed: _Seed = 0,
    ranks: _Ranks = 2,
    where: _Where = None,
) -> None:
    """Flip, cut, swap, delete and exchange files, and load."""
    from faults.checkpoints.damage import run_damage

    with tempfile.TemporaryDirectory(dir=where) as base:
        _end(run_damage(Path(base), cases, seed, size=ranks, report=typer.echo).failures)
