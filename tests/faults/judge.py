"""What became of a fault: the reports of all ranks against what must be seen. Pure: reports in, verdict out.

Three verdicts are good: right; named, and the next step right; named, and broken on all ranks. Everything else is a failure.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .cells import AnyOf, Cell, Expectation, Outcome, Recovery
from .player import FaultOf, Play

_LOG_CHARS = 1_500
_STUCK = ("CollectiveDeadlockError", "MismatchedCollectiveError", "CollectiveError")
Event = Mapping[str, Any]


class Name(str, enum.Enum):
    """What became of an episode."""

    RIGHT = "right"
    NAMED = "named, next step right"
    BROKEN = "named, broken on all"
    WRONG = "wrong"  # an error, but another one, or not on all ranks, not alike, not in time; or what follows is wrong
    APART = "a batch apart"  # ranks updated on batches of different steps, whatever each of them has raised or compared
    SILENT = "silent"  # some rank had a wrong gradient or weight without an error in that step
    HUNG = "hung"  # some live rank was not done at the time limit
    ABORTED = "aborted"  # a rank that should live was ended by a signal or without a report
    HARNESS = "harness"  # the harness itself failed, or the fault did not happen
    SKIPPED = "skipped"  # the system has no such thing

    @property
    def is_good(self) -> bool:
        """Whether megabucket may get it."""
        return self in (Name.RIGHT, Name.NAMED, Name.BROKEN)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an episode, and why.

    Attributes:
        reason: what was found, in words; empty where the name says all.
        error: class and text of the error that the live ranks raised.
        detected_s: seconds from the fault to the last live rank's report.
    """

    name: Name
    reason: str = ""
    error: str = ""
    detected_s: float | None = None


@dataclass
class Run:
    """What was seen of a set of ranks.

    Attributes:
        events: reports in order of arrival; each has ``kind`` and ``rank``.
        exits: by rank, the exit code of its process, negative for a signal.
        killed: ranks that had to be killed.
        logs: by rank, the end of what its process printed.
    """

    play: Play
    events: Sequence[Event]
    exits: Mapping[int, int] = field(default_factory=dict)
    killed: Sequence[int] = ()
    timed_out: bool = False
    logs: Mapping[int, str] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def has_started(self) -> bool:
        """Whether every rank has joined the group, so that what happened says something about the cell."""
        return len({event["rank"] for event in self.of("joined")}) == self.play.combo.num_ranks

    def of(self, kind: str, *, rank: int | None = None, attempt: int | None = None) -> Iterator[Event]:
        """Yield the reports of a kind, of one rank or of all, about one step or all."""
        for event in self.events:
            is_its = event["kind"] == kind and (rank is None or event["rank"] == rank)
            if is_its and (attempt is None or event.get("attempt") == attempt):
                yield event

    def first(self, kind: str, *, rank: int | None = None, attempt: int | None = None) -> Event | None:
        """Return the first such report, if there is one."""
        return next(self.of(kind, rank=rank, attempt=attempt), None)


def judge(run: Run, fault_of: FaultOf) -> list[tuple[Cell, Verdict]]:
    """Return the verdicts on the episodes of a run, up to the last one that the ranks came to."""
    play = run.play
    fault = fault_of(play.cells[-1])
    if len(play.cells) == 1:
        cell, expected = play.cells[0], fault.expect
        verdict = _find_breakage(run, expected) or judge_steps(run, expected, cell, play.num_healthy, play.num_steps)
        return [(cell, _unless_vacuous(run, cell, expected, verdict))]
    verdicts = []
    by_episode = _by_episode(run)
    last = max(by_episode)
    for number, cell in enumerate(play.cells[: last + 1]):
        part = replace(run, events=by_episode[number])
        expected, start = fault_of(cell).expect, play.fault_step(number)
        stop = start + 1 + play.steps_after
        if number == last:
            broken = _find_breakage(run, expected)
            if broken is not None:
                return [*verdicts, (cell, broken)]
        verdict = judge_steps(part, expected, cell, 0 if number == 0 else start, stop, start)
        verdicts.append((cell, _unless_vacuous(part, cell, expected, verdict)))
    return verdicts


def _by_episode(run: Run) -> dict[int, list[Event]]:
    """Return the reports by episode: what a rank said since the step before belongs to the next one."""
    play, loose = run.play, defaultdict(list)
    episodes: dict[int, list[Event]] = defaultdict(list)
    number = 0
    for event in run.events:
        if "attempt" not in event:
            loose[event["rank"]].append(event)
            continue
        number = min(max(0, event["attempt"] - play.num_healthy) // (1 + play.steps_after), len(play.cells) - 1)
        episodes[number] += [*loose.pop(event["rank"], ()), event]
    episodes[number] += [event for events in loose.values() for event in events]
    return episodes


def judge_steps(run: Run, expected: Expectation, cell: Cell, start: int, stop: int, fault_step: int = -1) -> Verdict:
    """Return the verdict on steps that ranks which came to an end have reported: the best one of the ways to end."""
    window = _Window(fault_step if fault_step >= 0 else start, stop)
    if cell.is_torch:
        return _judge_torch(run, expected, window)
    verdicts = [_judge_one(run, one, cell, window) for one in expected.alternatives()]
    return next((verdict for verdict in verdicts if verdict.name.is_good), verdicts[0])


@dataclass(frozen=True, slots=True)
class _Window:
    """The step of the fault, and the one behind the last step that must be there."""

    fault: int
    stop: int


def _judge_one(run: Run, expected: Expectation, cell: Cell, window: _Window) -> Verdict:
    live = live_ranks(run, expected)
    apart = _distance(run, live)
    if apart:
        return Verdict(Name.APART, apart)
    tolerated = {
        (rank, window.fault + late) for rank in live for late in range(expected.steps_late(is_culprit=rank == cell.culprit))
    }
    silent = _silence(run, live, tolerated)
    if silent:
        return Verdict(Name.SILENT, silent)
    if expected.outcome is Outcome.NAMED:
        return _ErrorJudge(run, expected, cell, window, live).verdict()
    problem = next(_problems_of_right_steps(run, expected, window, live), "")
    return Verdict(Name.WRONG if problem else Name.RIGHT, problem)


# What went wrong before anything can be judged #


def _find_breakage(run: Run, expected: Expectation) -> Verdict | None:
    """Return the verdict on ranks that did not all come to an end, or ``None``."""
    live = live_ranks(run, expected)
    for name, reason in (
        (Name.HARNESS, "" if run.has_started else f"no group: {next(iter(_broken(run, live)), 'a rank did not join')}"),
        (Name.APART, _distance(run, live)),
        (Name.SILENT, _raised(run, "InFlightWriteError")),
        (Name.ABORTED, _abort(run, live)),
        (Name.HARNESS, _failure_of_harness(run, live)),
        (Name.HUNG, _hang(run, live)),
        (Name.ABORTED, _disappearance(run, live)),
    ):
        if reason:
            return Verdict(name, reason)
    return None


def _failure_of_harness(run: Run, live: list[int]) -> str:
    return next((text for text in _broken(run, live) if not any(name in text for name in _STUCK)), "")


def _broken(run: Run, live: list[int]) -> list[str]:
    """Return what ranks have raised outside their steps."""
    return [f"rank {event['rank']}: {event['text']}" for event in run.of("broken") if event["rank"] in live]


def _abort(run: Run, live: list[int]) -> str:
    for rank in live:
        code = run.exits.get(rank, 0)
        if code != 0 and rank not in run.killed:
            return f"rank {rank} ended with {code}: {run.logs.get(rank, '').strip()[-_LOG_CHARS:]}"
    return ""


def _hang(run: Run, live: list[int]) -> str:
    child = run.first("child")
    if child is not None and child["said"] == "hung":
        return f"the forked child of rank {child['rank']}"
    # The loopback world notices at once that nobody will come, or that different collectives would be mixed.
    stuck_text = _raised(run, *_STUCK) or next(iter(_broken(run, live)), "")
    if stuck_text or not run.timed_out:
        return stuck_text
    stuck = sorted(set(run.killed) & set(live))
    logs = "; ".join(f"rank {rank}: {run.logs.get(rank, '').strip()[-_LOG_CHARS:]}" for rank in stuck)
    return f"ranks {stuck} after {run.wall_s:.1f} s: {logs}"


def _raised(run: Run, *classes: str) -> str:
    """Return the first step that ended in one of some errors, in words; empty if none."""
    events = [*run.of("step"), *run.of("no recovery")]
    errors = [(event, event["error"]) for event in events if event["error"] and event["error"]["class"] in classes]
    return next((f"step {event['attempt']}, rank {event['rank']}: {_shown(error)}" for event, error in errors), "")


def _disappearance(run: Run, live: list[int]) -> str:
    done = {event["rank"] for event in run.of("step")} | {event["rank"] for event in run.of("wrap") if event["error"]}
    missing = sorted(set(live) - done)
    return f"ranks {missing} ended without a report" if missing else ""


def live_ranks(run: Run, expected: Expectation) -> list[int]:
    """Return the ranks that should be alive at the end."""
    return [rank for rank in range(run.play.combo.num_ranks) if rank not in expected.lost]


def _unless_vacuous(run: Run, cell: Cell, expected: Expectation, verdict: Verdict) -> Verdict:
    """Return the verdict, or HARNESS where all is right because the fault never happened."""
    happened = cell.kind == "none" or any(run.of("signal")) or any(e.get("phase") != "wrap" for e in run.of("fault"))
    if verdict.name is Name.RIGHT and not happened and not expected.at_wrap:
        return Verdict(Name.HARNESS, "the fault did not happen")
    return verdict


# Values #


def _distance(run: Run, live: list[int]) -> str:
    """Return the first step in which ranks updated on different batches, in words; empty if there is none.

    A step is here what the ranks agreed on, counted by the wrapper, and not what each of them takes it for. Nothing else shows
    a rank that has left a batch out: each may have raised what it should, and be right by its own count.
    """
    by_step: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for event in run.of("step"):
        if event["rank"] in live and event["error"] is None and event.get("trained"):
            by_step[event["counter"]][event["rank"]] = list(event["trained"])
    for step, batches in sorted(by_step.items()):
        if len({tuple(found) for found in batches.values()}) > 1:
            first = next((event for event in run.of("step") if event["error"]), None)
            after = f", after rank {first['rank']} had {_shown(first['error'])}" if first else ""
            return f"in agreed step {step} the ranks trained on batches {dict(sorted(batches.items()))}{after}"
    return ""


def _silence(run: Run, live: list[int], tolerated: Collection[tuple[int, int]]) -> str:
    """Return the first wrong value on a rank that saw no error in that step, or where replicas differ without one.

    Args:
        tolerated: ranks and steps whose error comes later.
    """
    digests: dict[int, set[int]] = defaultdict(set)
    for event in run.of("step"):
        rank, step = event["rank"], event["attempt"]
        if rank not in live or event["error"] is not None or (rank, step) in tolerated:
            continue
        if event["wrong_grads"]:
            return f"step {step}, rank {rank}: gradient {event['wrong_grads']}"
        for weights in [*run.of("weights", rank=rank, attempt=step)][-1:]:  # where it was tried again, of the last time
            digests[step].add(weights["digest"])
            if weights["wrong"]:
                return f"step {step}, rank {rank}: weight {weights['wrong']}"
    apart = [step for step, found in digests.items() if len(found) > 1]
    return f"after step {min(apart)} the ranks hold different weights" if apart else ""


def _problems_of_right_steps(run: Run, expected: Expectation, window: _Window, live: list[int]) -> Iterator[str]:
    for event in run.of("wrap"):
        if event["error"]:
            yield f"rank {event['rank']} was not wrapped: {_shown(event['error'])}"
    for event in run.of("step"):
        if event["error"]:
            yield f"step {event['attempt']}, rank {event['rank']}: {_shown(event['error'])}"
    yield from _missing_steps(run, live, range(window.fault, window.stop))
    yield from _problems_beside_the_error(run, expected)


def _problems_beside_the_error(run: Run, expected: Expectation) -> Iterator[str]:
    for event in run.of("no recovery"):
        yield f"rank {event['rank']} could not do what the error asks for: {_shown(event['error'])}"
    if expected.signal_within_s:
        sent, handled = run.first("signal"), run.first("handled")
        if sent is None or handled is None:
            yield "the signal was never handled"
        elif handled["at_s"] - sent["at_s"] > expected.signal_within_s:
            yield f"the handler ran after {handled['at_s'] - sent['at_s']:.2f} s"
    child = run.first("child")
    if expected.child_error and (child is None or child["said"] != expected.child_error):
        yield f"the forked child said {child['said'] if child else 'nothing'!r}, not {expected.child_error}"
    if expected.warning and not any(expected.warning in event["text"] for event in run.of("warning")):
        yield f"nobody was warned of {expected.warning!r}: {[event['text'][:200] for event in run.of('warning')]}"


def _missing_steps(run: Run, live: list[int], steps: range) -> Iterator[str]:
    for rank in live:
        for step in steps:
            if run.first("step", rank=rank, attempt=step) is None:
                yield f"rank {rank} did not report step {step}"
            elif run.first("weights", rank=rank, attempt=step) is None:
                yield f"rank {rank} did not report its weights after step {step}"


def fault_time_s(run: Run) -> float | None:
    """Return when the fault happened: what ranks announced, else a signal that was sent, else the last rank's wrapping."""
    armed = [event["at_s"] for event in run.of("fault") if event.get("phase") != "wrap"]
    signals = [event["at_s"] for event in run.of("signal")]
    times = armed or signals or [event["at_s"] for event in run.of("fault")]
    return max(times) if times else None


class _ErrorJudge:
    """Looks for the expected error on every live rank, and for anything else."""

    def __init__(self, run: Run, expected: Expectation, cell: Cell, window: _Window, live: list[int]) -> None:
        self._run, self._expected, self._cell, self._window, self._live = run, expected, cell, window, live
        self._is_over = expected.recovery in (Recovery.OVER, Recovery.STOP)

    def verdict(self) -> Verdict:
        """Return NAMED or BROKEN, or WRONG with the first problem."""
        expected = self._expected
        reports = {rank: self._find_error(rank) for rank in self._live}
        started_s = fault_time_s(self._run)
        times_s = [at_s for error, at_s in reports.values() if error]
        detected_s = max(times_s) - started_s if times_s and started_s is not None else None
        problem = next(self._problems({rank: error for rank, (error, _) in reports.items()}), "")
        if not problem and (detected_s is None or detected_s > expected.within_s):
            problem = f"reported after {detected_s} s, later than {expected.within_s:g} s"
        name = Name.WRONG if problem else Name.BROKEN if self._is_over and not expected.at_wrap else Name.NAMED
        shown = next((_shown(error) for error, _ in reports.values() if error), "")
        return Verdict(name, problem, error=shown, detected_s=detected_s)

    def _find_error(self, rank: int) -> tuple[Event | None, float]:
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
                if step == last or (self._is_over and error is not None):
                    return (error if self._is_over else self._agreed_on_culprit(event)), event["at_s"]
            elif error is not None:
                return error, event["at_s"]
        return None, 0.0

    def _is_own(self, rank: int, error: Event | None) -> bool:
        is_it = _is_one_of(error, self._expected.own_error) if error else "" in self._expected.own_error
        return rank == self._cell.culprit and is_it

    def _last_step(self, rank: int) -> int:
        """Return the step in which a rank must have raised the agreed error."""
        return self._window.fault + self._expected.steps_late(is_culprit=rank == self._cell.culprit)

    def _agreed_on_culprit(self, event: Event) -> Event | None:
        """Return what the rank at fault knows of the agreed error: at once, or after its next step."""
        known: Event | None = event["cleanup_error"] or event["last_error"]
        if known and self._expected.is_agreed:
            return known
        following = self._run.first("step", rank=event["rank"], attempt=event["attempt"] + 1)
        return known if following is None else following["last_error"] or known

    def _problems(self, errors: Mapping[int, Event | None]) -> Iterator[str]:
        expected = self._expected
        checked: dict[int, Event] = {}
        for rank, error in errors.items():
            if error is None:
                yield f"rank {rank} raised nothing about the fault"
            elif not (self._is_over and self._is_own(rank, error)):
                checked[rank] = error
        for rank, error in checked.items():
            if not _is_one_of(error, expected.errors):
                yield f"rank {rank} raised {_shown(error)}, expected {' or '.join(expected.errors)}"
            yield from self._wrong_fields(rank, error)
            for text in expected.texts:
                if text not in error["text"]:
                    yield f"rank {rank}: {text!r} is not in the text: {_shown(error)}"
        texts = {error["text"] for error in checked.values()}
        if expected.same_text and len(texts) > 1:
            yield f"texts differ: {sorted(texts)}"
        yield from self._problems_around(checked)

    def _wrong_fields(self, rank: int, error: Event) -> Iterator[str]:
        expected, fields = self._expected, error["fields"]
        right_fields = dict(expected.fields)
        counters = {event["counter"] for event in self._run.of("step", attempt=self._window.fault)}
        if len(counters) > 1:
            yield f"the ranks count steps differently: {sorted(counters)}"
        if "step" in fields and not expected.at_wrap and not self._is_over and counters:
            right_fields.setdefault("step", counters.pop() + expected.later_by)
        for name, right in right_fields.items():
            allowed = [_plain(one) for one in (right.values if isinstance(right, AnyOf) else (right,))]
            if name not in fields:
                yield f"rank {rank}: {error['class']} has no field {name!r}"
            elif _plain(fields[name]) not in allowed:
                yield f"rank {rank}: {error['class']}.{name} is {fields[name]!r}, expected {' or '.join(map(repr, allowed))}"

    def _problems_around(self, errors: Mapping[int, Event]) -> Iterator[str]:
        """Yield whatever is wrong beside the error itself."""
        run, expected = self._run, self._expected
        yield from _problems_beside_the_error(run, expected)
        if expected.at_wrap:
            return
        yield from self._other_errors()
        if self._is_over:
            if expected.recovery is Recovery.OVER:
                yield from self._unbroken()
            return
        yield from self._other_last_errors(errors)
        last = self._window.fault + expected.later_by
        if expected.recovery is Recovery.NOTHING:
            for event in run.of("weights", attempt=last):
                if event["wrong"]:
                    yield f"rank {event['rank']}: the step was dropped, but weight {event['wrong']}"
        yield from _missing_steps(run, self._live, range(last + 1, self._window.stop))

    def _unbroken(self) -> Iterator[str]:
        """Yield the ranks on which one more step was not refused."""
        for rank in self._live:
            probe = self._run.first("probe", rank=rank)
            errors = [event["error"]["class"] for event in self._run.of("step", rank=rank) if event["error"]]
            was_interrupted = errors[-1:] == ["KeyboardInterrupt"]  # and the program is over
            if not was_interrupted and (probe is None or probe["error"] is None or not probe["error"]["fields"]):
                gave = _shown(probe["error"]) if probe and probe["error"] else None
                yield f"rank {rank} is not broken: one more step gave {gave}"

    def _other_errors(self) -> Iterator[str]:
        """Yield errors of living ranks in other steps than the one they belong to."""
        for event in self._run.of("step"):
            step, rank, error = event["attempt"], event["rank"], event["error"]
            if rank not in self._live or error is None or (self._is_over and step >= self._window.fault):
                continue
            is_own = self._window.fault <= step <= self._last_step(rank) and self._is_own(rank, error)
            if step != self._last_step(rank) and not is_own:
                yield f"step {step}, rank {rank}: {_shown(error)}"

    def _other_last_errors(self, errors: Mapping[int, Event]) -> Iterator[str]:
        for rank, error in errors.items() if self._expected.is_agreed else ():
            event = self._run.first("step", rank=rank, attempt=self._last_step(rank))
            known = None if event is None else event["last_error"]
            if known is None or known["text"] != error["text"]:
                yield f"rank {rank}: last_error is {_shown(known) if known else 'nothing'} after {_shown(error)}"


# torch DDP: no named error is expected of it. Did all ranks notice, some, or none? #


def _judge_torch(run: Run, expected: Expectation, window: _Window) -> Verdict:
    live = live_ranks(run, expected)
    last = window.fault + expected.later_by
    reports = [run.first("step", rank=rank, attempt=last) for rank in live]
    all_raise = all(report is not None and report["error"] for report in reports)
    late = [(rank, step) for rank in live for step in range(window.fault, last)] if all_raise else ()
    silent = _silence(run, live, late)
    if silent:
        return Verdict(Name.SILENT, silent)
    refused = [event for event in run.of("wrap") if event["error"]]
    errors = {rank: event for rank in live if (event := next((e for e in run.of("step", rank=rank) if e["error"]), None))}
    shown = _shown((refused or list(errors.values()))[0]["error"]) if refused or errors else ""
    if refused:
        is_on_all = len(refused) == len(live)
        return Verdict(Name.NAMED if is_on_all else Name.WRONG, "" if is_on_all else "only on some ranks", error=shown)
    if not errors:
        if any(not event["is_finite"] for event in run.of("weights")):
            return Verdict(Name.SILENT, "weights are nan or inf")
        problems = (*_missing_steps(run, live, range(window.stop - 1, window.stop)), *_problems_beside_the_error(run, expected))
        return Verdict(Name.WRONG if problems else Name.RIGHT, problems[0] if problems else "")
    if any(rank not in errors or not window.fault <= errors[rank]["attempt"] <= last for rank in live):
        return Verdict(Name.WRONG, "only some ranks raised, or only in a later step", error=shown)
    return Verdict(Name.NAMED if _goes_on(run, errors, window) else Name.BROKEN, error=shown)


def _goes_on(run: Run, errors: Mapping[int, Event], window: _Window) -> bool:
    """Return whether every step after the first one with an error is there and without one."""
    for rank, error in errors.items():
        following = [event for event in run.of("step", rank=rank) if event["attempt"] > error["attempt"]]
        if not following or any(event["error"] for event in following) or following[-1]["attempt"] != window.stop - 1:
            return False
    return True


def _is_one_of(error: Event, classes: Sequence[str]) -> bool:
    return any(name in classes for name in (error["class"], *error.get("bases", ())))


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list | tuple | frozenset) else value


def _shown(error: Event) -> str:
    return f"{error['class']}: {error['text'][:300]}"
