"""``OnlineRecorder``: turns what is noted while a program trains into one ``StepTrace`` per step. No torch, no profiler.

The wrapper says when forward, backward and optimizer begin and when a bucket is ready; the communicator says what it launches,
what completes, and when the caller's thread stands still. All of that costs an append each, per bucket and phase, never per
parameter. A trace is put together when somebody asks for it.

A step begins with its first training forward (or backward) and ends with its optimizer, as far as that is heard of, and with
the reduction of its gradients otherwise. Time between steps belongs to none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from megabucket.trace.clock import Clock, HostClock, Stamp
from megabucket.trace.launches import Launch, launch_times, time_under_way, with_intervals
from megabucket.trace.recorder import CollectiveRecord, Interval, Lane
from megabucket.trace.step_trace import StepTrace, clip_interval

BETWEEN_STEPS: Final = "between steps"
"""The phase after the gradients are reduced: the step may end here."""

PAUSE: Final = "pause"
"""The phase after a backward or an optimizer: the caller does something of its own."""

_BEGINNINGS: Final = ("forward", "backward")
_COMPUTE: Final = ("forward", "backward", "optimizer")
_STEPS_KEPT: Final = 4
"""The step that runs, the last one, and two more whose times a device may still owe."""
_MOST_KEPT: Final = 100_000
"""Intervals or launches kept when a program communicates without ever beginning a step."""


@dataclass(slots=True)
class _Step:
    """What was noted about one step."""

    number: int
    phases: list[tuple[str, Stamp]] = field(default_factory=list)
    ready: list[tuple[str, Stamp]] = field(default_factory=list)
    launches: list[tuple[CollectiveRecord, Stamp]] = field(default_factory=list)


class OnlineRecorder:
    """The recorder behind ``DistributedDataParallel.last_step_trace``. Also hears what the wrapper does.

    Everything but ``record_interval`` is called by the thread that trains; that one appends to a list, which is atomic.
    """

    def __init__(self, *, rank: int, clock: Clock | None = None) -> None:
        self._rank = rank
        self._clock: Clock = clock if clock is not None else HostClock()
        self._steps: list[_Step] = []
        self._intervals: list[Interval] = []

    @property
    def records_time(self) -> bool:
        """Intervals are wanted."""
        return True

    def record_interval(self, interval: Interval) -> None:
        """Keep the interval for the steps it touches."""
        if len(self._intervals) >= _MOST_KEPT:
            del self._intervals[: _MOST_KEPT // 2]
        self._intervals.append(interval)

    def record_collective(self, record: CollectiveRecord) -> None:
        """Note a launch in the step that runs or has just ended."""
        if self._steps and len(self._steps[-1].launches) < _MOST_KEPT:
            self._steps[-1].launches.append((record, self._clock.stamp()))

    def enter_phase(self, step: int, phase: str) -> None:
        """Note that a phase begins, and ends the one before; the first forward or backward after a reduction begins a step.

        Args:
            step: steps that were agreed on, or dropped, before this moment. It rises when the gradients are reduced, so the
                optimizer's phase comes with the number of the next step.
            phase: ``forward``, ``backward``, ``optimizer``, or something else for what is not computation.
        """
        if phase in _BEGINNINGS and (not self._steps or self._steps[-1].number != step):
            self._begin(step)
        # A loop of forwards without a backward is one phase, however long.
        if self._steps and not (self._steps[-1].phases and self._steps[-1].phases[-1][0] == phase):
            self._steps[-1].phases.append((phase, self._clock.stamp()))

    def note_ready(self, label: str) -> None:
        """Note that a bucket is complete."""
        if self._steps:
            self._steps[-1].ready.append((label, self._clock.stamp()))

    def last(self) -> StepTrace | None:
        """Return the last step that has ended and whose times are known; ``None`` before there is one."""
        for index in range(len(self._steps) - 1, -1, -1):
            trace = self._trace(index)
            if trace is not None:
                return trace
        return None

    def _begin(self, step: int) -> None:
        self._steps.append(_Step(step))
        del self._steps[:-_STEPS_KEPT]
        oldest = next((start_s for one in self._steps if (start_s := self._start_s(one)) is not None), None)
        if oldest is not None:
            known = len(self._intervals)  # other threads append meanwhile
            self._intervals[:known] = [one for one in self._intervals[:known] if one.stop_s > oldest]

    def _start_s(self, step: _Step) -> float | None:
        return self._clock.seconds(step.phases[0][1]) if step.phases else None

    def _trace(self, index: int) -> StepTrace | None:
        """Return the trace of a step that was kept, or ``None`` when it has not ended or its times are not known."""
        step = self._steps[index]
        phases = [(phase, self._clock.seconds(stamp)) for phase, stamp in step.phases]
        known = [(phase, moment_s) for phase, moment_s in phases if moment_s is not None]
        stop_s = _stop_s(known)
        if stop_s is None or len(known) < len(phases):
            return None
        start_s = known[0][1]
        launches = self._launches(self._steps[max(0, index - 1) : index + 1])
        intervals = self._intervals.copy()
        matched = with_intervals(launches, intervals)
        # Those without a record; the others are among the intervals, also those launched long before.
        under_way = [time_under_way(one, stop_s=stop_s) for one in matched if one.under_way is None]
        compute = [Interval(Lane.COMPUTE, *one) for one in _compute_spans(known)]
        inside = [clip_interval(one, start_s, stop_s) for one in (*intervals, *under_way, *compute)]
        own = [one for one in matched if start_s <= one.launched_s < stop_s]
        ready_s = {label: self._clock.seconds(stamp) for label, stamp in step.ready}
        return StepTrace(
            step=step.number,
            rank=self._rank,
            start_s=start_s,
            stop_s=stop_s,
            intervals=tuple(sorted((one for one in inside if one is not None), key=lambda one: (one.start_s, one.stop_s))),
            collectives=tuple(one.record for one in own),
            launches=tuple(launch_times(one, ready_s=ready_s.get(one.record.label), stop_s=stop_s) for one in own),
        )

    def _launches(self, steps: list[_Step]) -> list[Launch]:
        timed = [(record, self._clock.seconds(stamp)) for step in steps for record, stamp in step.launches]
        return [Launch(record, launched_s) for record, launched_s in timed if launched_s is not None]


def _stop_s(phases: list[tuple[str, float]]) -> float | None:
    """Return when a step ended: with the last pause after its reduction, or with the reduction; ``None`` if it has not."""
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
