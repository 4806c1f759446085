"""The answers as data, one line a question, and as a table for people. No torch."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

from megabucket.errors import rank_list
from megabucket.units import format_seconds

SCHEMA_VERSION: Final = 2
"""Of the JSON form; a key is never given another meaning under the same number."""


class Verdict(str, enum.Enum):
    """What an answer means for training. From good to bad."""

    HOLDS = "holds"  # as the library needs it
    NOTE = "note"  # unexpected, but the library copes or does not use it
    FINDING = "finding"  # something the library relies on does not hold


@dataclass(frozen=True, slots=True)
class Line:
    """One question, its answer, and what the answer means."""

    question: str
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
        """The lines on which something the library relies on does not hold."""
        return tuple(line for line in self.lines if line.verdict is Verdict.FINDING)

    @property
    def is_healthy(self) -> bool:
        """Whether everything the library relies on holds."""
        return not self.findings

    @property
    def outcome(self) -> str:
        """One sentence about all answers."""
        counts = Counter(line.verdict for line in self.lines)
        asked = f"{len(self.lines)} questions in {format_seconds(self.wall_s)}"
        if self.is_healthy:
            return f"everything that megabucket relies on holds ({asked}; notes: {counts[Verdict.NOTE]})"
        found = counts[Verdict.FINDING]
        ranks = sorted({rank for line in self.findings for rank in line.ranks})
        about = f" about {rank_list(ranks)}" if ranks else ""
        return f"{found} finding{'' if found == 1 else 's'}{about}: do not train before it is cleared up ({asked})"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "schema": SCHEMA_VERSION,
            "is_healthy": self.is_healthy,
            "backend": self.backend,
            "device": self.device,
            "num_ranks": self.num_ranks,
            "wall_s": self.wall_s,
            "lines": [{**asdict(line), "verdict": line.verdict.value, "ranks": list(line.ranks)} for line in self.lines],
        }
