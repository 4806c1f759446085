"""Judges a cell of torch DDP, of which no named error is expected: did all ranks notice, some, or none? Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megabucket.chaos.cell_run import CellRun
from megabucket.chaos.expectation import Expectation
from megabucket.chaos.recipe import HEALTHY_STEPS, NUM_STEPS
from megabucket.chaos.verdict import (
    Verdict,
    VerdictName,
    diverged_steps,
    fault_time_s,
    find_breakage,
    first_error,
    late_signal,
    live_ranks,
    silent_faults,
)


def judge_torch(run: CellRun, expected: Expectation) -> Verdict:
    """Return the verdict on a cell; what megabucket promises for it says only which ranks live and how long is late."""
    broken = find_breakage(run, expected)
    if broken is not None:
        return broken
    live = live_ranks(run, expected)
    silent = _silence(run, expected, live)
    if silent:
        return Verdict(VerdictName.SILENT, silent)
    refused = [event for event in run.of("wrap") if event["error"]]
    if refused:
        name = VerdictName.ERROR if len(refused) == len(live) else VerdictName.PARTIAL
        times_s = [event["at_s"] for event in refused]
        return _with_error(name, run, refused[0]["error"], max(times_s))
    errors = {rank: error for rank in live if (error := first_error(run, rank, since=0)) is not None}
    if not errors:
        return _judge_without_errors(run, expected, live)
    in_time = all(
        rank in errors and HEALTHY_STEPS <= errors[rank]["attempt"] <= HEALTHY_STEPS + expected.later_by for rank in live
    )
    shown = next(iter(errors.values()))
    name = VerdictName.ERROR if in_time else VerdictName.PARTIAL
    return _with_error(name, run, shown["error"], max(one["at_s"] for one in errors.values()), goes_on=_goes_on(run, live))


def _silence(run: CellRun, expected: Expectation, live: list[int]) -> str:
    """Return what was wrong without an error; the same steps are forgiven as with megabucket, if all ranks raise after them."""
    last = HEALTHY_STEPS + expected.later_by
    reports = [run.first("step", rank=rank, attempt=last) for rank in live]
    all_raise = all(report is not None and report["error"] for report in reports)
    forgiven = range(HEALTHY_STEPS, last) if all_raise else range(0)
    for step, rank, what in silent_faults(run, live):
        if step not in forgiven:
            return f"step {step}, rank {rank}: {what}"
    for step in diverged_steps(run, live):
        if step not in forgiven:
            return f"after step {step} the ranks hold different weights"
    return ""


def _judge_without_errors(run: CellRun, expected: Expectation, live: list[int]) -> Verdict:
    if any(not event["is_finite"] for event in run.of("weights")):
        return Verdict(VerdictName.SPREAD, "weights are nan or inf")
    missing = [rank for rank in live if run.first("weights", rank=rank, attempt=NUM_STEPS - 1) is None]
    if missing:
        return Verdict(VerdictName.PARTIAL, f"ranks {missing} did not come to the last step")
    late = late_signal(run, expected)
    return Verdict(VerdictName.LATE if late else VerdictName.RIGHT, late)


def _with_error(
    name: VerdictName, run: CellRun, error: Mapping[str, Any], at_s: float, *, goes_on: bool | None = None
) -> Verdict:
    started_s = fault_time_s(run)
    return Verdict(
        name,
        error=error["class"],
        text=error["text"],
        detected_s=None if started_s is None else at_s - started_s,
        goes_on=goes_on,
    )


def _goes_on(run: CellRun, live: list[int]) -> bool:
    """Return whether every step after the first one with an error is there and without one."""
    for rank in live:
        first = first_error(run, rank, since=0)
        following = [event for event in run.of("step", rank=rank) if first is None or event["attempt"] > first["attempt"]]
        if not following or any(event["error"] for event in following) or following[-1]["attempt"] != NUM_STEPS - 1:
            return False
    return True
