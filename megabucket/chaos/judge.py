"""Judges what megabucket's ranks reported about a fault against its expectation. Pure: reports in, verdict out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megabucket.chaos.cell_run import CellRun
from megabucket.chaos.expectation import AnyOf, Expectation, Outcome, Recovery
from megabucket.chaos.recipe import HEALTHY_STEPS, NUM_STEPS
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


@dataclass(frozen=True, slots=True)
class Window:
    """Which steps are judged.

    Attributes:
        fault: index of the step of the fault.
        stop: index behind the last step; the steps after the error must be there and right.
        num_agreements: how often the ranks had agreed before the step of the fault, which is the number in error texts.
    """

    fault: int = HEALTHY_STEPS
    stop: int = NUM_STEPS
    num_agreements: int = HEALTHY_STEPS


def judge(run: CellRun, expected: Expectation) -> Verdict:
    """Return the verdict on a cell."""
    return find_breakage(run, expected) or judge_steps(run, expected, Window())


def judge_steps(run: CellRun, expected: Expectation, window: Window) -> Verdict:
    """Return the verdict on steps that ranks which came to an end have reported."""
    live = live_ranks(run, expected)
    tolerated = range(window.fault, window.fault + expected.later_by)
    for step, rank, what in silent_faults(run, live):
        if step not in tolerated:
            return Verdict(VerdictName.SILENT, f"step {step}, rank {rank}: {what}")
    for step in diverged_steps(run, live):
        if step not in tolerated:
            return Verdict(VerdictName.SILENT, f"after step {step} the ranks hold different weights")
    if expected.outcome is Outcome.NAMED:
        return _ErrorJudge(run, expected, window, live).verdict()
    problem = next(_problems_of_right_steps(run, expected, window, live), "")
    return Verdict(VerdictName.WRONG if problem else VerdictName.RIGHT, problem)


def _problems_of_right_steps(run: CellRun, expected: Expectation, window: Window, live: list[int]) -> Iterator[str]:
    for event in run.of("wrap"):
        if event["error"]:
            yield f"rank {event['rank']} was not wrapped: {_shown(event['error'])}"
    for event in run.of("step"):
        if event["error"]:
            yield f"step {event['attempt']}, rank {event['rank']}: {_shown(event['error'])}"
    yield from _missing_steps(run, live, range(window.fault, window.stop))
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


class _ErrorJudge:
    """Looks for the expected error on every live rank, and for anything else."""

    def __init__(self, run: CellRun, expected: Expectation, window: Window, live: list[int]) -> None:
        self._run, self._expected, self._window, self._live = run, expected, window, live
        self._is_over = expected.recovery is Recovery.OVER

    def verdict(self) -> Verdict:
        """Return NAMED, or WRONG with the first problem."""
        expected = self._expected
        reports = {rank: self._find_error(rank) for rank in self._live}
        started_s = fault_time_s(self._run)
        times_s = [at_s for error, at_s in reports.values() if error]
        detected_s = max(times_s) - started_s if times_s and started_s is not None else None
        problem = next(self._problems({rank: error for rank, (error, _) in reports.items()}), "")
        if not problem and (detected_s is None or detected_s > expected.within_s):
            problem = f"reported after {detected_s} s, later than {expected.within_s:g} s"
        shown = next((error for error, _ in reports.values() if error), {})
        return Verdict(
            VerdictName.WRONG if problem else VerdictName.NAMED,
            problem,
            error=shown.get("class", ""),
            text=shown.get("text", ""),
            detected_s=detected_s,
            goes_on=None if self._is_over or expected.at_wrap else not problem,
        )

    def _find_error(self, rank: int) -> tuple[Mapping[str, Any] | None, float]:
        """Return the error a rank raised about the fault, and when; where it had one of its own, the agreed one."""
        run, expected = self._run, self._expected
        if expected.at_wrap:
            event = run.first("wrap", rank=rank)
            return (None, 0.0) if event is None else (event["error"], event["at_s"])
        last = self._last_step(rank)
        for step in range(self._window.fault, last + 1) if self._is_over else (last,):
            event = run.first("step", rank=rank, attempt=step)
            if event is None:
                continue
            error = event["error"]
            if self._is_own(rank, error):
                if step == last:
                    return (error if self._is_over else self._agreed_on_culprit(event)), event["at_s"]
            elif error is not None:
                return error, event["at_s"]
        return None, 0.0

    def _is_own(self, rank: int, error: Mapping[str, Any] | None) -> bool:
        return rank == self._run.cell.culprit and (error["class"] if error else "") in self._expected.own_error

    def _last_step(self, rank: int) -> int:
        """Return the step in which a rank must have raised the agreed error."""
        return self._window.fault + self._expected.steps_late(is_culprit=rank == self._run.cell.culprit)

    def _agreed_on_culprit(self, event: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what the rank at fault knows of the agreed error: at once, or after its next step."""
        if event["cleanup_error"] or event["last_error"]:
            known: Mapping[str, Any] = event["cleanup_error"] or event["last_error"]
            return known
        following = self._run.first("step", rank=event["rank"], attempt=event["attempt"] + 1)
        return None if following is None else following["last_error"]

    def _problems(self, errors: Mapping[int, Mapping[str, Any] | None]) -> Iterator[str]:
        expected = self._expected
        checked: dict[int, Mapping[str, Any]] = {}
        for rank, error in errors.items():
            if error is None:
                yield f"rank {rank} raised nothing about the fault"
            elif not (self._is_over and self._is_own(rank, error)):
                checked[rank] = error
        for rank, error in checked.items():
            if error["class"] not in expected.errors:
                yield f"rank {rank} raised {_shown(error)}, expected {' or '.join(expected.errors)}"
            yield from self._wrong_fields(rank, error)
            for text in expected.texts:
                if text not in error["text"]:
                    yield f"rank {rank}: {text!r} is not in the text: {_shown(error)}"
        texts = {error["text"] for error in checked.values()}
        if expected.same_text and len(texts) > 1:
            yield f"texts differ: {sorted(texts)}"
        yield from self._problems_around(checked)

    def _wrong_fields(self, rank: int, error: Mapping[str, Any]) -> Iterator[str]:
        expected, fields = self._expected, error["fields"]
        right_fields = dict(expected.fields)
        if "step" in fields and not expected.at_wrap and not expected.lost:
            right_fields.setdefault("step", self._window.num_agreements + expected.later_by)
        for name, right in right_fields.items():
            allowed = [_plain(one) for one in (right.values if isinstance(right, AnyOf) else (right,))]
            if name not in fields:
                yield f"rank {rank}: {error['class']} has no field {name!r}"
            elif _plain(fields[name]) not in allowed:
                yield f"rank {rank}: {error['class']}.{name} is {fields[name]!r}, expected {' or '.join(map(repr, allowed))}"

    def _problems_around(self, errors: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
        """Yield whatever is wrong beside the error itself."""
        run, expected = self._run, self._expected
        yield from _problems_beside_the_error(run, expected)
        if expected.at_wrap:
            return
        yield from self._other_errors()
        if self._is_over:
            return
        yield from self._other_last_errors(errors)
        last = self._window.fault + expected.later_by
        if expected.recovery is Recovery.NOTHING:
            for event in run.of("weights", attempt=last):
                if event["wrong"]:
                    yield f"rank {event['rank']}: the step was dropped, but weight {event['wrong']}"
        yield from _missing_steps(run, self._live, range(last + 1, self._window.stop))

    def _other_errors(self) -> Iterator[str]:
        """Yield errors of living ranks in other steps than the one they belong to."""
        for event in self._run.of("step"):
            step, rank, error = event["attempt"], event["rank"], event["error"]
            if rank not in self._live or error is None or (self._is_over and step >= self._window.fault):
                continue
            is_own = self._window.fault <= step <= self._last_step(rank) and self._is_own(rank, error)
            if step != self._last_step(rank) and not is_own:
                yield f"step {step}, rank {rank}: {_shown(error)}"

    def _other_last_errors(self, errors: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
        for rank, error in errors.items() if self._expected.is_agreed else ():
            event = self._run.first("step", rank=rank, attempt=self._last_step(rank))
            known = None if event is None else event["last_error"]
            if known is None or known["text"] != error["text"]:
                yield f"rank {rank}: last_error is {_shown(known) if known else 'nothing'} after {_shown(error)}"


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _shown(error: Mapping[str, Any]) -> str:
    return f"{error['class']}: {error['text'][:300]}"
