"""Runs a matrix and yields an outcome for each of its cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megabucket.chaos.cell import Cell, SystemName
from megabucket.chaos.farm import run_cells
from megabucket.chaos.kinds import kind_named
from megabucket.chaos.outcome import CellOutcome, outcome_of
from megabucket.chaos.verdict import FAILING, Verdict, VerdictName

DEFAULT_TIME_LIMIT_S = 20.0


def run_matrix(cells: Sequence[Cell], *, num_jobs: int, time_limit_s: float = DEFAULT_TIME_LIMIT_S) -> Iterator[CellOutcome]:
    """Run cells and yield their outcomes as they come; first those that the system has no equivalent of.

    Args:
        num_jobs: how many cells run at the same time.
        time_limit_s: seconds after which a cell counts as hung.
    """
    to_run = []
    for cell in cells:
        reason = _why_not(cell)
        if reason:
            yield CellOutcome(cell, Verdict(VerdictName.SKIPPED, reason))
        else:
            to_run.append(cell)
    for run in run_cells(to_run, num_jobs=num_jobs, time_limit_s=time_limit_s):
        yield outcome_of(run)


def _why_not(cell: Cell) -> str:
    if cell.system is SystemName.MEGABUCKET:
        return ""
    if not cell.combo.overlaps:
        return "torch DDP always overlaps"
    return kind_named(cell.kind).torch_skip(cell)


def prepared(cells: Sequence[Cell], *, system: SystemName, seed: int) -> list[Cell]:
    """Return the cells for a system, with the seed of their batches."""
    return [replace(cell, system=system, seed=seed) for cell in cells]


def num_failing(outcomes: Sequence[CellOutcome]) -> int:
    """Return how many outcomes megabucket must never have."""
    return sum(1 for one in outcomes if one.cell.system is SystemName.MEGABUCKET and one.verdict.name in FAILING)
