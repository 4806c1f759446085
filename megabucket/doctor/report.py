"""The answers as data, one line a question, and as a table for people. No torch."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from megabucket.errors import printable, rank_list
from megabucket.units import format_seconds

SCHEMA_VERSION: Final = 1
"""Of the JSON form; a key is never given another meaning under the same number."""

_FOLDED_FROM: Final = 4
"""Neighbouring lines with the same answer become one row of the table from this many on."""


class Verdict(str, enum.Enum):
    """What an answer is to somebody who wants to train."""

    HOLDS = "holds"  # as the library needs it
    NOTE = "note"  # different from what one might expect; the library copes or does not use it
    FINDING = "finding"  # something the library relies on is not so
    NOT_TRIED = "not tried"  # does not apply here, or trying it would do harm


@dataclass(frozen=True, slots=True)
class Line:
    """One question, its answer, and what the answer means."""

    section: str
    probe: str
    verdict: Verdict
    answer: str
    meaning: str
    ranks: tuple[int, ...] = ()
    """The ranks that differ from the others, or on which something is wrong; empty when it concerns all or none."""


@dataclass(frozen=True, slots=True)
class Report:
    """All answers, the same on every rank."""

    backend: str
    """``gloo``, ``nccl``, the class of a communicator, or ``none`` for one process on its own."""
    device: str
    num_ranks: int
    lines: tuple[Line, ...]
    wall_s: float
    """Of this rank."""

    @property
    def findings(self) -> tuple[Line, ...]:
        """The lines on which something the library relies on is not so."""
        return tuple(line for line in self.lines if line.verdict is Verdict.FINDING)

    @property
    def is_healthy(self) -> bool:
        """Whether everything the library relies on holds."""
        return not self.findings

    def counts(self) -> dict[Verdict, int]:
        """Return the number of lines by verdict."""
        counted = Counter(line.verdict for line in self.lines)
        return {verdict: counted[verdict] for verdict in Verdict}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "schema": SCHEMA_VERSION,
            "is_healthy": self.is_healthy,
            "backend": self.backend,
            "device": self.device,
            "num_ranks": self.num_ranks,
            "wall_s": self.wall_s,
            "counts": {verdict.value: count for verdict, count in self.counts().items()},
            "lines": [{**asdict(line), "verdict": line.verdict.value, "ranks": list(line.ranks)} for line in self.lines],
        }


_STYLES: Final = MappingProxyType(
    {Verdict.HOLDS: "green", Verdict.NOTE: "yellow", Verdict.FINDING: "bold red", Verdict.NOT_TRIED: "dim"}
)


def report_table(report: Report) -> Table:
    """Return one row a question, in sections; a long run of equal answers is one row with their count."""
    ranks = "1 rank" if report.num_ranks == 1 else f"{report.num_ranks} ranks"
    table = Table(title=f"megabucket doctor: {report.backend} on {report.device}, {ranks}", title_justify="left")
    for heading in ("", "question", "answer", "what it means"):
        table.add_column(heading, no_wrap=not heading, overflow="fold")
    for _, section in groupby(report.lines, key=lambda line: line.section):
        table.add_section()
        for question, line in _rows(list(section)):
            # As Text: square brackets in an error message are no markup.
            cells = [Text(printable(cell)) for cell in (question, line.answer, line.meaning)]
            table.add_row(Text(line.verdict.value, style=_STYLES[line.verdict]), *cells)
    return table


def describe_outcome(report: Report) -> str:
    """Return the one sentence under the table."""
    counts = report.counts()
    asked = len(report.lines) - counts[Verdict.NOT_TRIED]
    talk = f"{asked} questions in {format_seconds(report.wall_s)}, {counts[Verdict.NOT_TRIED]} not tried"
    if report.is_healthy:
        return f"everything that megabucket relies on holds ({talk}, {counts[Verdict.NOTE]} notes)"
    findings = "1 finding" if counts[Verdict.FINDING] == 1 else f"{counts[Verdict.FINDING]} findings"
    ranks = sorted({rank for line in report.findings for rank in line.ranks})
    return f"{findings}{f' about {rank_list(ranks)}' if ranks else ''}: do not train on this before it is cleared up ({talk})"


def _rows(lines: list[Line]) -> Iterator[tuple[str, Line]]:
    for _, run in groupby(lines, key=lambda line: (line.verdict, line.answer, line.meaning, line.ranks)):
        alike = list(run)
        if len(alike) < _FOLDED_FROM:
            yield from ((line.probe, line) for line in alike)
        else:
            yield f"{alike[0].probe} ... {alike[-1].probe}: {len(alike)} questions", alike[0]
