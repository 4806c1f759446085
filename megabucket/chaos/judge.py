"""Judges a cell of megabucket against its expectation. Pure: reports in, verdict out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megabucket.chaos.cell_run import CellRun
from megabucket.chaos.expectation import AnyOf, Expectation, Outcome, Recovery
from megabucket.chaos.loop import HEALTHY_STEPS, NUM_STEPS
from megabucket.chaos.verdict import (
    Verdict,
    VerdictName,
    diverged_steps,
    fault_time_s,
    find_breakage,
    late_signal,
    live_ranks,
    silent_faults,
)


def judge(run: CellRun, expected: Expectation) -> Verdict:
    """Return the verdict on a cell."""
    broken = find_breakage(run, expected)
    if broken is not None:
        return broken
    live = live_ranks(run, expected)
    tolerated = range(HEALTHY_STEPS, HEALTHY_STEPS + expected.later_by)
    for step, rank, what in silent_faults(run, live):
        if step in tolerated:
            continue
        return Verdict(VerdictName.SILENT, f"step {step}, rank {rank}: {what}")
    for step in diverged_steps(run, live):
        if step not in tolerated:
            return Verdict(VerdictName.SILENT, f"after step {step} the ranks hold different weights")
    if expected.outcome is not Outcome.NAMED:
        problem = next(_problems_of_right_cell(run, expected, live), "")
        return Verdict(VerdictName.WRONG if problem else VerdictName.RIGHT, problem)
    return _judge_error(run, expected, live)


def _problems_of_right_cell(run: CellRun, expected: Expectation, live: list[int]) -> Iterator[str]:
    for event in run.of("wrap"):
        if event["error"]:
            yield f"rank {event['rank']} was not wrapped: {_shown(event['error'])}"
    for event in run.of("step"):
        if event["error"]:
            yield f"step {event['attempt']}, rank {event['rank']}: {_shown(event['error'])}"
    yield from _missing_steps(run, live, range(NUM_STEPS))
    yield from _problems_beside_the_error(run, expected)


def _problems_beside_the_error(run: CellRun, expected: Expectation) -> Iterator[str]:
    if late := late_signal(run, expected):
        yield late
    child = run.first("child")
    if expected.child_error and (child is None or child["said"] != expected.child_error):
        yield f"the forked child said {child['said'] if child else 'nothing'!r}, not {expected.child_error}"
    if expected.warning and not any(expected.warning in event["text"] for event in run.of("warning")):
        yield f"nobody was warned of {expected.warning!r}: {[event['text'][:200] for event in run.of('warning')]}"


def _missing_steps(run: CellRun, live: list[int], steps: range) -> Iterator[str]:
    for rank in live:
        for step in steps:
            if run.first("step", rank=rank, attempt=step) is None:
                yield f"rank {rank} did not report step {step}"
            elif run.first("weights", rank=rank, attempt=step) is None:
                yield f"rank {rank} did not report its weights after step {step}"


def _judge_error(run: CellRun, expected: Expectation, live: list[int]) -> Verdict:
    reports = {rank: _find_error(run, expected, rank) for rank in live}
    agreed = [error for error, _ in reports.values() if error]
    shown = agreed[0] if agreed else {}
    started_s = fault_time_s(run)
    times_s = [at_s for error, at_s in reports.values() if error]
    detected_s = max(times_s) - started_s if times_s and started_s is not None else None
    problem = next(_problems_of_error(run, expected, {rank: error for rank, (error, _) in reports.items()}), "")
    if not problem and (detected_s is None or detected_s > expected.within_s):
        problem = f"reported after {detected_s} s, later than {expected.within_s:g} s"
    problem = problem or next(_problems_around_the_error(run, expected, live), "")
    return Verdict(
        VerdictName.WRONG if problem else VerdictName.NAMED,
        problem,
        error=shown.get("class", ""),
        text=shown.get("text", ""),
        detected_s=detected_s,
        goes_on=None if expected.recovery is Recovery.OVER or expected.at_wrap else not problem,
    )


def _find_error(run: CellRun, expected: Expectation, rank: int) -> tuple[Mapping[str, Any] | None, float]:
    """Return the error that a rank raised about the fault and when; for a rank with an exception of its own, the agreed one."""
    if expected.at_wrap:
        event = run.first("wrap", rank=rank)
        return (None, 0.0) if event is None else (event["error"], event["at_s"])
    last = _last_step(run, expected, rank)
    steps = range(HEALTHY_STEPS, last + 1) if expected.lost or expected.recovery is Recovery.OVER else (last,)
    for step in steps:
        event = run.first("step", rank=rank, attempt=step)
        if event is None:
            continue
        error = event["error"]
        has_own = rank == run.cell.culprit and (error["class"] if error else "") in expected.own_error
        if has_own and step == last:
            if expected.recovery is Recovery.OVER:
                return error, event["at_s"]
            return _agreed_on_culprit(run, event), event["at_s"]
        if error is not None and not has_own:
            return error, event["at_s"]
    return None, 0.0


def _last_step(run: CellRun, expected: Expectation, rank: int) -> int:
    """Return the step in which a rank must have raised the agreed error."""
    return HEALTHY_STEPS + expected.steps_late(is_culprit=rank == run.cell.culprit)


def _agreed_on_culprit(run: CellRun, event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what the rank at fault knows of the agreed error: at once, or after its next call."""
    if event["cleanup_error"] or event["last_error"]:
        known: Mapping[str, Any] = event["cleanup_error"] or event["last_error"]
        return known
    following = run.first("step", rank=event["rank"], attempt=event["attempt"] + 1)
    return None if following is None else following["last_error"]


def _problems_of_error(run: CellRun, expected: Expectation, errors: Mapping[int, Mapping[str, Any] | None]) -> Iterator[str]:
    raised: dict[int, Mapping[str, Any]] = {}
    for rank, error in errors.items():
        if error is None:
            yield f"rank {rank} raised nothing about the fault"
        else:
            raised[rank] = error
    is_over = expected.recovery is Recovery.OVER
    checked = {
        rank: error
        for rank, error in raised.items()
        if not (is_over and rank == run.cell.culprit and error["class"] in expected.own_error)
    }
    for rank, error in checked.items():
        if error["class"] not in expected.errors:
            yield f"rank {rank} raised {_shown(error)}, expected {' or '.join(expected.errors)}"
        yield from _wrong_fields(rank, error, expected)
        yield from (
            f"rank {rank}: {text!r} is not in the text: {_shown(error)}" for text in expected.texts if text not in error["text"]
        )
    texts = {error["text"] for error in checked.values()}
    if expected.same_text and len(texts) > 1:
        yield f"texts differ: {sorted(texts)}"


def _wrong_fields(rank: int, error: Mapping[str, Any], expected: Expectation) -> Iterator[str]:
    fields, right_fields = error["fields"], dict(expected.fields)
    if "step" in fields and not expected.at_wrap and not expected.lost:
        right_fields.setdefault("step", HEALTHY_STEPS + expected.later_by)
    for name, right in right_fields.items():
        allowed = [_plain(one) for one in (right.values if isinstance(right, AnyOf) else (right,))]
        if name not in fields:
            yield f"rank {rank}: {error['class']} has no field {name!r}"
        elif _plain(fields[name]) not in allowed:
            yield f"rank {rank}: {error['class']}.{name} is {fields[name]!r}, expected {' or '.join(map(repr, allowed))}"


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _problems_around_the_error(run: CellRun, expected: Expectation, live: list[int]) -> Iterator[str]:
    yield from _problems_beside_the_error(run, expected)
    if expected.at_wrap:
        return
    for event in run.of("step"):
        step, rank = event["attempt"], event["rank"]
        if rank not in live or event["error"] is None:
            continue
        last = _last_step(run, expected, rank)
        is_own = rank == run.cell.culprit and HEALTHY_STEPS <= step <= last and event["error"]["class"] in expected.own_error
        is_in_window = HEALTHY_STEPS <= step <= last and (step == last or bool(expected.lost) or is_own)
        if not is_in_window and not (expected.recovery is Recovery.OVER and step >= HEALTHY_STEPS):
            yield f"step {step}, rank {rank}: {_shown(event['error'])}"
    if expected.recovery is Recovery.OVER:
        return
    last = HEALTHY_STEPS + expected.later_by
    if expected.recovery is Recovery.NOTHING:
        for event in run.of("weights", attempt=last):
            if event["wrong"]:
                yield f"rank {event['rank']}: the step was dropped, but weight {event['wrong']}"
    yield from _missing_steps(run, live, range(last + 1, NUM_STEPS))


def _shown(error: Mapping[str, Any]) -> str:
    return f"{error['class']}: {error['text'][:300]}"
