"""Tables of a run for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.table import Table

from megabucket.chaos.cell import SystemName
from megabucket.chaos.outcome import CellOutcome
from megabucket.chaos.soak import SoakResult
from megabucket.chaos.verdict import FAILING, VerdictName

_BAD_STYLE: Final = "bold red"
_OF_MEGABUCKET: Final = (
    VerdictName.RIGHT,
    VerdictName.NAMED,
    VerdictName.WRONG,
    VerdictName.SILENT,
    VerdictName.HUNG,
    VerdictName.CRASHED,
    VerdictName.BROKEN,
)
_OF_TORCH: Final = (
    VerdictName.RIGHT,
    VerdictName.ERROR,
    VerdictName.LATE,
    VerdictName.PARTIAL,
    VerdictName.SPREAD,
    VerdictName.SILENT,
    VerdictName.HUNG,
    VerdictName.CRASHED,
    VerdictName.BROKEN,
    VerdictName.SKIPPED,
)


def verdicts_of(system: SystemName) -> tuple[VerdictName, ...]:
    """Return the verdicts that a system can get, the good ones first."""
    return _OF_MEGABUCKET if system is SystemName.MEGABUCKET else _OF_TORCH


def summary_table(outcomes: Sequence[CellOutcome], system: SystemName) -> Table:
    """Return counts of verdicts by kind, and the longest time from a fault to the last report."""
    names = verdicts_of(system)
    table = Table(title=f"megabucket chaos: {system.value}", show_footer=True)
    table.add_column("kind", footer="all")
    total = Counter(one.verdict.name for one in outcomes)
    for name in names:
        table.add_column(name.value, footer=str(total[name]), justify="right")
    table.add_column("cells", footer=str(len(outcomes)), justify="right")
    table.add_column("noticed, s", footer=_slowest(outcomes), justify="right")
    for kind in dict.fromkeys(one.cell.kind for one in sorted(outcomes, key=lambda one: one.cell.name)):
        rows = [one for one in outcomes if one.cell.kind == kind]
        count = Counter(one.verdict.name for one in rows)
        table.add_row(kind, *(_count(count[name], name) for name in names), str(len(rows)), _slowest(rows))
    return table


def comparison_table(by_system: Sequence[Sequence[CellOutcome]]) -> Table:
    """Return counts of verdicts by system."""
    table = Table(title="the same matrix on each system")
    table.add_column("system")
    names = tuple(dict.fromkeys((*_OF_MEGABUCKET, *_OF_TORCH)))
    for name in names:
        table.add_column(name.value, justify="right")
    for outcomes in by_system:
        count = Counter(one.verdict.name for one in outcomes)
        table.add_row(outcomes[0].cell.system.value, *(_count(count[name], name) for name in names))
    return table


def soak_table(results: Sequence[SoakResult]) -> Table:
    """Return what became of random steps, by setup."""
    table = Table(title="megabucket chaos: random steps")
    columns = ("setup", "steps", "with a fault", "RIGHT", "NAMED", "WRONG", "SILENT", "HUNG", "noticed, s", "steps/s", "seed")
    for column in columns:
        table.add_column(column, justify="left" if column == "setup" else "right")
    for result in results:
        combo = result.plan.combo
        counts = [result.total(VerdictName(name)) for name in columns[3:8]]
        table.add_row(
            f"{combo.mode.value}, {'overlap' if combo.overlaps else 'no overlap'}, {combo.num_ranks} ranks",
            str(result.num_judged),
            str(result.num_faults),
            *(_count(count, VerdictName(name)) for count, name in zip(counts, columns[3:8], strict=True)),
            f"{result.slowest_s:.2f}",
            f"{result.num_judged / max(result.wall_s, 1e-9):.0f}",
            str(result.plan.seed),
        )
    return table


def _count(count: int, name: VerdictName) -> str:
    if count == 0:
        return "0" if name in FAILING else "."
    return f"[{_BAD_STYLE}]{count}[/]" if name in FAILING else str(count)


def _slowest(outcomes: Sequence[CellOutcome]) -> str:
    times_s = [one.verdict.detected_s for one in outcomes if one.verdict.detected_s is not None]
    return f"{max(times_s):.2f}" if times_s else ""
