"""The fault table: kind, what must happen, verdicts and their counts, how soon it was noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from .cells import Cell
from .judge import Name, Verdict
from .kinds import KINDS

Results = Sequence[tuple[Cell, Verdict]]
_SHOWN = (Name.RIGHT, Name.NAMED, Name.BROKEN, Name.WRONG, Name.APART, Name.SILENT, Name.HUNG, Name.ABORTED)


def fault_table(results: Results, *, system: str) -> Table:
    """Return counts of verdicts by kind, and the longest time from a fault to the last report."""
    names = [*_SHOWN, *(name for name in Name if name not in _SHOWN and any(v.name is name for _, v in results))]
    table = Table(title=f"faults: {system}", show_footer=True)
    table.add_column("kind", footer="all")
    table.add_column("what must happen")
    total = Counter(verdict.name for _, verdict in results)
    for name in names:
        table.add_column(name.value, footer=str(total[name]), justify="right")
    table.add_column("noticed, s", footer=_slowest(results), justify="right")
    for kind in KINDS.values():
        rows = [(cell, verdict) for cell, verdict in results if cell.kind == kind.name]
        if rows:
            counts = Counter(verdict.name for _, verdict in rows)
            table.add_row(kind.name, kind.says, *(_shown(counts[name], name) for name in names), _slowest(rows))
    return table


def _shown(count: int, name: Name) -> str:
    if count == 0:
        return "."
    return str(count) if name.is_good or name is Name.SKIPPED else f"[bold red]{count}[/]"


def _slowest(results: Results) -> str:
    times_s = [verdict.detected_s for _, verdict in results if verdict.detected_s is not None]
    return f"{max(times_s):.2f}" if times_s else ""
