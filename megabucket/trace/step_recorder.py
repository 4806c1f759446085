"""``StepRecorder``: makes one ``StepTrace`` per step from what the wrapper and the communicator record. No torch, no profiler.

The wrapper records when forward, backward and optimizer begin and when a bucket is ready; the communicator records launches,
their completion and the waits of the caller's thread. Each costs an append, per bucket and phase, never per parameter. A trace
is built on demand.

A step begins with its first training forward (or backward). It ends with its optimizer if that is recorded, otherwise with the
reduction of its gradients. Time between steps belongs to no step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from megabucket.trace.clock import Clock, HostClock, Stamp
from megabucket.trace.recorder import Interval, Lane, Launch
from megabucket.trace.step_trace import LaunchTimes, StepTrace, clip_interval

BETWEEN_STEPS: Final = "between steps"
"""The phase after the reduction of gradients: the step may end here."""

PAUSE: Final = "pause"
"""The phase after a backward or an optimizer: the caller's own code."""

_BEGINNINGS: Final = ("forward", "backward")
_COMPUTE: Final = ("forward", "backward", "optimizer")
_STEPS_KEPT: Final = 4
"""The current step, the last one, and two more whose times a device may not have reported."""
_MOST_KEPT: Final = 100_000
"""Launches kept of one step, for programs that communicate without beginning another step."""


@dataclass(slots=True)
class _Step:
    """The records of one step."""

    number: int
    phases: list[tuple[str, Stamp]] = field(default_factory=list)
    ready: list[tuple[str, Stamp]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)


class StepRecorder:
    """The recorder behind ``DistributedDataParallel.last_step_trace``, for the training thread only."""

    records_time: Final = True
    """Moments are recorded."""

    def __init__(self, *, rank: int, clock: Clock | None = None) -> None:
        self._rank = rank
        self._clock: Clock = clock if clock is not None else HostClock()
        self._steps: list[_Step] = []

    def record_launch(self, launch: Launch) -> None:
        """Keep a launch in the current or last step."""
        if self._steps and len(self._steps[-1].launches) < _MOST_KEPT:
            self._steps[-1].launches.append(launch)

    def enter_phase(self, step: int, phase: str) -> None:
        """Record the begin of a phase, which ends the previous one. A step begins with its first forward or backward.

        Args:
            step: number of steps agreed on or dropped so far. It rises with the reduction of gradients, so the optimizer's
                phase has the number of the next step.
            phase: ``forward``, ``backward``, ``optimizer``, or another name if it is not computation.
        """
        if phase in _BEGINNINGS and (not self._steps or self._steps[-1].number != step):
            self._steps.append(_Step(step))
            del self._steps[:-_STEPS_KEPT]
        # A loop of forwards without a backward is one phase, however long.
        if self._steps and not (self._steps[-1].phases and self._steps[-1].phases[-1][0] == phase):
            self._steps[-1].phases.append((phase, self._clock.stamp()))

    def note_ready(self, label: str) -> None:
        """Record that a bucket is complete."""
        if self._steps:
            self._steps[-1].ready.append((label, self._clock.stamp()))

    def last(self) -> StepTrace | None:
        """Return the last finished step with known times, or ``None``."""
        return next((trace for step in reversed(self._steps) if (trace := self._trace(step)) is not None), None)

    def _trace(self, step: _Step) -> StepTrace | None:
        """Return the trace of a step, or ``None`` if it has not ended or its times are not known."""
        phases = [(phase, self._clock.seconds(stamp)) for phase, stamp in step.phases]
        known = [(phase, moment_s) for phase, moment_s in phases if moment_s is not None]
        stop_s = _stop_s(known)
        if stop_s is None or len(known) < len(phases):
            return None
        start_s = known[0][1]
        ready_s = {label: self._clock.seconds(stamp) for label, stamp in step.ready}
        own, intervals = [], [Interval(Lane.COMPUTE, *span) for span in _compute_spans(known)]
        for launch in (launch for kept in self._steps for launch in kept.launches):
            launched_s, *later_s = _moments_s(launch)
            if launched_s is not None:
                intervals += _intervals_of(launch.record.label, launched_s, *later_s, stop_s=stop_s)
                if start_s <= launched_s < stop_s:
                    record, within_s = launch.record, [one if one is not None and one <= stop_s else None for one in later_s]
                    facts = (record.label, record.kind, record.payload_bytes, ready_s.get(record.label))
                    own.append((record, LaunchTimes(*facts, launched_s, *within_s)))
        inside = [part for one in intervals if (part := clip_interval(one, start_s, stop_s)) is not None]
        return StepTrace(
            step=step.number,
            rank=self._rank,
            start_s=start_s,
            stop_s=stop_s,
            intervals=tuple(sorted(inside, key=lambda one: (one.start_s, one.stop_s))),
            collectives=tuple(record for record, _ in own),
            launches=tuple(times for _, times in own),
        )


def _moments_s(launch: Launch) -> list[float | None]:
    """Return the times of launch, completion, and start and stop of the wait, as far as known."""
    clock, moments = launch.clock, (launch.launched, launch.done, launch.wait_start, launch.wait_stop)
    launched_s, done_s, wait_start_s, wait_stop_s = [
        None if clock is None or moment is None else clock.seconds(moment) for moment in moments
    ]
    # A launch that was waited for is complete, even without a recorded completion.
    return [launched_s, wait_stop_s if done_s is None else done_s, wait_start_s, wait_stop_s]


def _intervals_of(
    label: str, launched_s: float, done_s: float | None, wait_start_s: float | None, wait_stop_s: float | None, *, stop_s: float
) -> Iterator[Interval]:
    """Yield the intervals of a launch, to the end of the step if its completion is not known, and of the wait for it."""
    yield Interval(Lane.COMM, label, launched_s, max(stop_s, launched_s) if done_s is None else done_s)
    if wait_start_s is not None and wait_stop_s is not None:
        yield Interval(Lane.WAIT, label, wait_start_s, wait_stop_s)


def _stop_s(phases: list[tuple[str, float]]) -> float | None:
    """Return the end of a step: its last pause after the reduction, or the reduction; ``None`` if it has not ended."""
    stop_s, is_reduced = None, False
    for phase, moment_s in phases:
        is_reduced = is_reduced or phase == BETWEEN_STEPS
        if is_reduced and phase in (BETWEEN_STEPS, PAUSE):
            stop_s = moment_s
    return stop_s


def _compute_spans(phases: list[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Return label, start and stop of each phase of computation that has ended."""
    return [
        (phase, start_s, stop_s) for (phase, start_s), (_, stop_s) in pairwise(phases) if phase in _COMPUTE and start_s < stop_s
    ]
