"""What the doctor found, as data: one line a question. No torch."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any, Final

SCHEMA_VERSION: Final = 1
"""Of the JSON form; a key is never given another meaning under the same number."""


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

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "schema": SCHEMA_VERSION,
            "is_healthy": self.is_healthy,
            "backend": self.backend,
            "device": self.device,
            "num_ranks": self.num_ranks,
            "wall_s": self.wall_s,
            "counts": {verdict.value: sum(line.verdict is verdict for line in self.lines) for verdict in Verdict},
            "lines": [{**asdict(line), "verdict": line.verdict.value, "ranks": list(line.ranks)} for line in self.lines],
        }
