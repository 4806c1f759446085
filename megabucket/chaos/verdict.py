"""``Verdict``: what became of a cell, and what every judge has to find out first. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megabucket.chaos.cell_run import CellRun
from megabucket.chaos.expectation import Expectation
from megabucket.chaos.recipe import HEALTHY_STEPS

_LOG_CHARS = 1_500
_AT_WRAP = frozenset({"other-model", "other-config", "unwrappable"})
"""Kinds that are at fault from the beginning and announce nothing."""


class VerdictName(str, enum.Enum):
    """What became of a cell."""

    RIGHT = "RIGHT"
    NAMED = "NAMED"
    ERROR = "ERROR"
    LATE = "LATE"
    PARTIAL = "PARTIAL"
    SPREAD = "SPREAD"
    WRONG = "WRONG"
    SILENT = "SILENT"
    HUNG = "HUNG"
    CRASHED = "CRASHED"
    BROKEN = "BROKEN"
    SKIPPED = "SKIPPED"

    @property
    def meaning(self) -> str:
        """What it says, in one sentence."""
        return _MEANINGS[self]


_MEANINGS = {
    VerdictName.RIGHT: "no error; every gradient and weight on every rank is right in every step",
    VerdictName.NAMED: "the expected error, fields and text on every live rank in time, and what follows is right",
    VerdictName.ERROR: "every live rank raised something in the step of the fault",
    VerdictName.LATE: "right, but a signal handler ran late",
    VerdictName.PARTIAL: "only some ranks raised, or only in a later step; no wrong value was seen without an error",
    VerdictName.SPREAD: "nan or inf of one rank is in the weights of all ranks, without an error",
    VerdictName.WRONG: "an error, but another one, or not on all ranks, not alike, not in time; or what follows is wrong",
    VerdictName.SILENT: "some rank had a wrong gradient or weight without an error in that step",
    VerdictName.HUNG: "some live rank was not done at the time limit",
    VerdictName.CRASHED: "a rank that should live was ended by a signal or without a report",
    VerdictName.BROKEN: "the harness itself failed",
    VerdictName.SKIPPED: "not run: the system has no such thing",
}

FAILING = frozenset({VerdictName.WRONG, VerdictName.SILENT, VerdictName.HUNG, VerdictName.CRASHED, VerdictName.BROKEN})
"""The verdicts that megabucket must never get."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a cell, and why.

    Attributes:
        reason: what was found, in words; empty where the name says all.
        error: class of the error that the live ranks raised.
        text: its text.
        detected_s: seconds from the fault to the last live rank's report.
        goes_on: whether all steps after the error were right; ``None`` where there could be none.
    """

    name: VerdictName
    reason: str = ""
    error: str = ""
    text: str = ""
    detected_s: float | None = None
    goes_on: bool | None = None


def find_breakage(run: CellRun, expected: Expectation) -> Verdict | None:
    """Return the verdict on a cell whose ranks did not all come to an end, or ``None``."""
    live = live_ranks(run, expected)
    for name, reason in (
        (VerdictName.BROKEN, _failure_of_harness(run, live)),
        (VerdictName.CRASHED, _crash(run, live)),
        (VerdictName.HUNG, _hang(run, live)),
        (VerdictName.CRASHED, _disappearance(run, live)),
    ):
        if reason:
            return Verdict(name, reason)
    return None


def _failure_of_harness(run: CellRun, live: list[int]) -> str:
    texts = [f"rank {event['rank']}: {event['text']}" for event in run.of("broken") if event["rank"] in live]
    if not run.has_started:
        return f"no group after {run.num_tries} tries: {texts[0] if texts else 'a rank did not join'}"
    return texts[0] if texts else ""


def _crash(run: CellRun, live: list[int]) -> str:
    for rank in live:
        code = run.exits[str(rank)]
        if code != 0 and rank not in run.killed:
            return f"rank {rank} ended with {code}: {run.logs.get(str(rank), '').strip()[-_LOG_CHARS:]}"
    return ""


def _hang(run: CellRun, live: list[int]) -> str:
    child = run.first("child")
    if child is not None and child["said"] == "hung":
        return f"the forked child of rank {child['rank']}"
    if not run.timed_out:
        return ""
    stuck = sorted(set(run.killed) & set(live))
    logs = "; ".join(f"rank {rank}: {run.logs.get(str(rank), '').strip()[-_LOG_CHARS:]}" for rank in stuck)
    return f"ranks {stuck} after {run.wall_s:.1f} s: {logs}"


def _disappearance(run: CellRun, live: list[int]) -> str:
    done = {event["rank"] for event in run.of("step")} | {event["rank"] for event in run.of("wrap") if event["error"]}
    missing = sorted(set(live) - done)
    return f"ranks {missing} ended without a report" if missing else ""


def live_ranks(run: CellRun, expected: Expectation) -> list[int]:
    """Return the ranks that should be alive at the end."""
    return [rank for rank in range(run.cell.combo.num_ranks) if rank not in expected.lost]


def fault_time_s(run: CellRun) -> float | None:
    """Return when the fault happened: a signal that was sent, else what ranks announced, else the last rank's wrapping."""
    signals = [event["at_s"] for event in run.of("signal")]
    armed = [event["at_s"] for event in run.of("fault") if event.get("phase") != "wrap"]
    wraps = [event["at_s"] for event in run.of("fault")]
    times = armed or signals or wraps
    return max(times) if times else None


def silent_faults(run: CellRun, live: list[int]) -> Iterator[tuple[int, int, str]]:
    """Yield (step, rank, what) where a rank had wrong values although it saw no error in that step."""
    for rank in live:
        for event in run.of("step", rank=rank):
            step = event["attempt"]
            if event["error"] is not None:
                continue
            if event["wrong_grads"]:
                yield step, rank, f"gradient {event['wrong_grads']}"
            weights = run.first("weights", rank=rank, attempt=step)
            if weights is not None and weights["wrong"]:
                yield step, rank, f"weight {weights['wrong']}"


def diverged_steps(run: CellRun, live: list[int]) -> Iterator[int]:
    """Yield the steps after which ranks without an error hold different weights."""
    steps = sorted({event["attempt"] for event in run.of("weights")})
    for step in steps:
        digests = set()
        for rank in live:
            report, weights = run.first("step", rank=rank, attempt=step), run.first("weights", rank=rank, attempt=step)
            if report is not None and report["error"] is None and weights is not None:
                digests.add(weights["digest"])
        if len(digests) > 1:
            yield step


def unless_vacuous(run: CellRun, verdict: Verdict) -> Verdict:
    """Return the verdict, or BROKEN where all is right because the fault never happened."""
    happened = run.cell.kind == "none" or any(run.of("signal")) or any(e.get("phase") != "wrap" for e in run.of("fault"))
    if verdict.name in (VerdictName.RIGHT, VerdictName.LATE) and not happened and run.cell.kind not in _AT_WRAP:
        return Verdict(VerdictName.BROKEN, "the fault did not happen")
    return verdict


def late_signal(run: CellRun, expected: Expectation) -> str:
    """Return how late a signal's handler ran, or an empty text when it was in time or none was sent."""
    if not expected.signal_within_s:
        return ""
    sent, handled = run.first("signal"), run.first("handled")
    if sent is None or handled is None:
        return "the signal was never handled"
    delay_s = handled["at_s"] - sent["at_s"]
    return "" if delay_s <= expected.signal_within_s else f"the handler ran after {delay_s:.2f} s"


def first_error(run: CellRun, rank: int, *, since: int = HEALTHY_STEPS) -> dict[str, Any] | None:
    """Return the report of a rank's first step that ended in an error."""
    return next((dict(one) for one in run.of("step", rank=rank) if one["attempt"] >= since and one["error"]), None)
