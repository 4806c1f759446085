"""``Outcome``: a cell with its verdict and with what its ranks reported, as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabucket.chaos.cell import Cell, SystemName
from megabucket.chaos.cell_run import CellRun
from megabucket.chaos.judge import judge
from megabucket.chaos.judge_torch import judge_torch
from megabucket.chaos.kinds import kind_named
from megabucket.chaos.verdict import Verdict, VerdictName, fault_time_s, unless_vacuous
from megabucket.errors import ConfigError

_REASON_CHARS = 4_000


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """What became of a cell.

    Attributes:
        reports: of every rank and step that is worth a look: errors and wrong values; times are seconds since the fault.
        num_right: steps of ranks without anything to say.
    """

    cell: Cell
    verdict: Verdict
    reports: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    num_right: int = 0
    wall_s: float = 0.0
    num_tries: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        cell, verdict = self.cell, self.verdict
        return {
            "cell": cell.name,
            "says": kind_named(cell.kind).says,
            **cell.to_dict(),
            "verdict": verdict.name.value,
            "reason": verdict.reason[:_REASON_CHARS],
            "error": verdict.error,
            "text": verdict.text,
            "detected_s": verdict.detected_s,
            "goes_on": verdict.goes_on,
            "num_right": self.num_right,
            "wall_s": round(self.wall_s, 3),
            "num_tries": self.num_tries,
            "reports": list(self.reports),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CellOutcome:
        """Return the outcome that ``to_dict`` has written."""
        verdict = Verdict(
            VerdictName(data["verdict"]),
            reason=data["reason"],
            error=data["error"],
            text=data["text"],
            detected_s=data["detected_s"],
            goes_on=data["goes_on"],
        )
        return CellOutcome(
            Cell.from_dict(dict(data)), verdict, data["reports"], data["num_right"], data["wall_s"], data["num_tries"]
        )


def outcome_of(run: CellRun) -> CellOutcome:
    """Judge a run."""
    cell = run.cell
    expected = kind_named(cell.kind).fault(cell).expect()
    verdict = unless_vacuous(run, (judge if cell.system is SystemName.MEGABUCKET else judge_torch)(run, expected))
    reports = list(_reports(run))
    num_steps = sum(1 for _ in run.of("step"))
    num_loud = sum(1 for report in reports if report["kind"] == "step")
    return CellOutcome(cell, verdict, reports, num_steps - num_loud, run.wall_s, run.num_tries)


def _reports(run: CellRun) -> Iterator[dict[str, Any]]:
    since_s = fault_time_s(run) or 0.0
    for event in run.events:
        kind = event["kind"]
        is_loud = (
            (kind == "wrap" and event["error"])
            or (kind == "step" and (event["error"] or event["wrong_grads"]))
            or (kind == "weights" and (event["wrong"] or not event["is_finite"]))
            or kind in ("signal", "handled", "child", "warning", "no weights", "broken")
        )
        if is_loud:
            at_s = event.get("at_s")
            yield {**event, "at_s": None if at_s is None else round(at_s - since_s, 4)}


def read_outcomes(path: Path) -> list[CellOutcome]:
    """Return the outcomes of a file of JSON lines.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    try:
        return [CellOutcome.from_dict(json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not hold results of megabucket chaos: {type(error).__name__}: {error}") from None
