"""The report as a table for people: question, answer, what it means. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Final

from rich.table import Table
from rich.text import Text

from megabucket.doctor.report import Line, Report, Verdict
from megabucket.errors import printable, rank_list
from megabucket.units import format_seconds

_FOLDED_FROM: Final = 4
"""Neighbouring lines that say the same become one from this many on."""

_STYLES: Final = MappingProxyType(
    {Verdict.HOLDS: "green", Verdict.NOTE: "yellow", Verdict.FINDING: "bold red", Verdict.NOT_TRIED: "dim"}
)


def report_table(report: Report) -> Table:
    """Return one row a question, in sections; a long run of equal answers is one row with their count."""
    ranks = "1 rank" if report.num_ranks == 1 else f"{report.num_ranks} ranks"
    table = Table(title=f"megabucket doctor: {report.backend} on {report.device}, {ranks}", title_justify="left")
    for heading in ("", "question", "answer", "what it means"):
        table.add_column(heading, no_wrap=not heading, overflow="fold")
    for section in dict.fromkeys(line.section for line in report.lines):
        table.add_section()
        for run in _runs([line for line in report.lines if line.section == section]):
            table.add_row(*_cells(run))
    return table


def describe_outcome(report: Report) -> str:
    """Return the one sentence under the table."""
    counts = {verdict: sum(line.verdict is verdict for line in report.lines) for verdict in Verdict}
    asked = len(report.lines) - counts[Verdict.NOT_TRIED]
    talk = f"{asked} questions in {format_seconds(report.wall_s)}, {counts[Verdict.NOT_TRIED]} not tried"
    if report.is_healthy:
        return f"everything that megabucket relies on holds ({talk}, {counts[Verdict.NOTE]} notes)"
    findings = "1 finding" if counts[Verdict.FINDING] == 1 else f"{counts[Verdict.FINDING]} findings"
    ranks = sorted({rank for line in report.findings for rank in line.ranks})
    return f"{findings}{f' about {rank_list(ranks)}' if ranks else ''}: do not train on this before it is cleared up ({talk})"


def _runs(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Return neighbours that say the same together, if they are many; what differs stands alone."""
    run: list[Line] = []
    for line in [*lines, None]:
        if line is not None and run and _says(line) == _says(run[0]):
            run.append(line)
            continue
        if len(run) >= _FOLDED_FROM:
            yield run
        else:
            yield from ([one] for one in run)
        run = [] if line is None else [line]


def _says(line: Line) -> tuple[Verdict, str, str, tuple[int, ...]]:
    return line.verdict, line.answer, line.meaning, line.ranks


def _cells(run: Sequence[Line]) -> tuple[Text, ...]:
    first, last = run[0], run[-1]
    question = first.probe if len(run) == 1 else f"{first.probe} ... {last.probe}: {len(run)} questions"
    # As Text: square brackets in an error message are no markup.
    cells = (question, first.answer, first.meaning)
    return Text(first.verdict.value, style=_STYLES[first.verdict]), *(Text(printable(cell)) for cell in cells)
