"""``StepTrace``: one step of one rank, and how much of its communication was hidden. No torch.

``StepRecorder`` writes it from measurements and the simulator from a model, so both can be compared number by number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Interval, Lane

TimeSpan: TypeAlias = tuple[float, float]
"""``(start_s, stop_s)``, half-open, in seconds."""


def union(spans: Iterable[TimeSpan]) -> tuple[TimeSpan, ...]:
    """Return the union of spans, sorted, without spans that overlap, touch or are empty. Reversed spans count as empty.

    >>> union([(4, 5), (0, 2), (1, 3), (3, 3)])
    ((0, 3), (4, 5))
    """
    merged: list[TimeSpan] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def length_s(spans: Iterable[TimeSpan], *, outside: Iterable[TimeSpan] = ()) -> float:
    """Return the seconds covered by at least one span and by no span of ``outside``.

    >>> length_s([(0, 2), (1, 3), (4, 5)]), length_s([(0, 3)], outside=[(2, 5)])
    (4, 2)
    """
    without = union(outside)
    seconds = sum(stop - start for start, stop in union((*spans, *without))) - sum(stop - start for start, stop in without)
    return max(seconds, 0)  # a sum of many may be off by a rounding


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """One launch in a step. Times are seconds of the trace's clock; ``None``: not within the step, or unknown."""

    label: str
    kind: CollectiveKind
    payload_bytes: int
    ready_s: float | None
    """When the last gradient of the bucket arrived; ``None`` also for other collectives."""
    launched_s: float
    done_s: float | None
    """When the collective was complete."""
    wait_start_s: float | None
    """When the caller's thread began to wait for the result."""
    wait_stop_s: float | None
    """When it stopped waiting; the time in between is exposed."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of one rank: a window of time, the intervals inside it, and the collectives launched in it.

    ::

        COMPUTE  |-- forward --|------ backward ------|- optimizer -|
        COMM                        |- bucket 0 -|- bucket 1 -|
        WAIT                                          |-------|          exposed: the thread is blocked
                                    |---- hidden -----|
    """

    step: int
    rank: int
    start_s: float
    stop_s: float
    intervals: tuple[Interval, ...]
    collectives: tuple[CollectiveRecord, ...] = ()
    launches: tuple[LaunchTimes, ...] = ()
    """When each collective of the step was ready, launched, done and waited for; empty if not recorded."""

    def lane(self, lane: Lane) -> tuple[TimeSpan, ...]:
        """Return the spans in which ``lane`` is busy."""
        return union((interval.start_s, interval.stop_s) for interval in self.intervals if interval.lane is lane)

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the end of the step."""
        return self.stop_s - self.start_s

    @property
    def comm_s(self) -> float:
        """Seconds in which at least one collective was in flight."""
        return length_s(self.lane(Lane.COMM))

    @property
    def exposed_s(self) -> float:
        """Seconds in which the caller's thread was blocked by communication, including waits for slower ranks."""
        return length_s(self.lane(Lane.WAIT))

    @property
    def compute_s(self) -> float:
        """Seconds in which the caller's thread computed: its COMPUTE intervals without the waits inside them."""
        return length_s(self.lane(Lane.COMPUTE), outside=self.lane(Lane.WAIT))

    @property
    def hidden_s(self) -> float:
        """Seconds in which a collective was in flight and the caller's thread was not blocked."""
        return length_s(self.lane(Lane.COMM), outside=self.lane(Lane.WAIT))

    @property
    def overlap_fraction(self) -> float | None:
        """Share of ``comm_s`` that was hidden, from 0 to 1; ``None`` for a step without communication."""
        comm_s = self.comm_s
        return self.hidden_s / comm_s if comm_s > 0 else None

    @property
    def num_collectives(self) -> int:
        """Launched collectives, counting each call of a batch."""
        return sum(record.num_calls for record in self.collectives)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full buffers given to the communicator."""
        return sum(record.payload_bytes for record in self.collectives)

    @property
    def wire_bytes(self) -> float:
        """Least bytes that this rank sends, by the formula of ``CollectiveRecord.wire_bytes``."""
        return sum(record.wire_bytes for record in self.collectives)


def clip_interval(interval: Interval, start_s: float, stop_s: float) -> Interval | None:
    """Return the part of an interval inside ``[start_s, stop_s)``, or ``None`` if there is none.

    >>> clip_interval(Interval(Lane.COMM, "bucket 0", 1.0, 5.0), 2.0, 3.0)
    Interval(lane=<Lane.COMM: 'comm'>, label='bucket 0', start_s=2.0, stop_s=3.0)
    """
    start, stop = max(interval.start_s, start_s), min(interval.stop_s, stop_s)
    return Interval(interval.lane, interval.label, start, stop) if start < stop else None
