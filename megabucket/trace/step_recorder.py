"""``StepRecorder``: receives what a run does and cuts it into steps. No torch.

A collective may be launched in one step and complete in the next (the param gather does), and its interval is only known
when it completes. So a step is handed out one step later, when everything that touches it has been recorded; each moment
of an interval then counts for the step it lies in.
"""

from __future__ import annotations

from megabucket.trace.recorder import CollectiveRecord, Interval
from megabucket.trace.step_trace import StepTrace, clip_interval


class StepRecorder:
    """A recorder for a loop of steps: memory stays bounded by two steps.

    ``begin`` and ``end_step`` are called by the loop's thread; recording is thread-safe, because it appends to a list.
    """

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._intervals: list[Interval] = []
        self._collectives: list[CollectiveRecord] = []
        self._started_s = 0.0
        self._num_steps = 0
        self._held: StepTrace | None = None

    @property
    def records_time(self) -> bool:
        """Intervals are wanted."""
        return True

    def record_interval(self, interval: Interval) -> None:
        """Keep the interval until its step is handed out."""
        self._intervals.append(interval)

    def record_collective(self, record: CollectiveRecord) -> None:
        """Count the launch for the step that runs now."""
        self._collectives.append(record)

    def begin(self, now_s: float, *, step: int | None = None) -> None:
        """Start the next step at ``now_s``: what was recorded since the last one (an evaluation, say) belongs to none.

        Args:
            step: its number, where a run goes on that has made steps before.
        """
        self._started_s = now_s
        self._num_steps = self._num_steps if step is None else step
        self._collectives.clear()

    def end_step(self, now_s: float) -> StepTrace | None:
        """End the running step at ``now_s`` and start the next; return the step before it, complete now.

        Returns ``None`` at the end of the first step.
        """
        complete = self._complete(self._held)
        launched, self._collectives = tuple(self._collectives), []
        self._held = StepTrace(self._num_steps, self._rank, self._started_s, now_s, (), launched)
        self._num_steps += 1
        self._started_s = now_s
        return complete

    def flush(self) -> StepTrace | None:
        """Return the last step, once all its collectives are complete; ``None`` when there is none."""
        last, self._held = self._complete(self._held), None
        return last

    def _complete(self, step: StepTrace | None) -> StepTrace | None:
        """Put the intervals into the window of ``step`` and drop those that reach no further."""
        if step is None:
            return None
        known = self._intervals.copy()
        inside = [part for interval in known if (part := clip_interval(interval, step.start_s, step.stop_s)) is not None]
        # Only a prefix is looked at: other threads append meanwhile.
        self._intervals[: len(known)] = [interval for interval in known if interval.stop_s > step.stop_s]
        return StepTrace(
            step=step.step,
            rank=step.rank,
            start_s=step.start_s,
            stop_s=step.stop_s,
            intervals=tuple(sorted(inside, key=lambda interval: (interval.start_s, interval.stop_s))),
            collectives=step.collectives,
        )
