"""``StepTrace``: what one rank did in one step, and what of its communication was hidden. No torch.

Written by ``StepRecorder`` from measurements; a simulator may write the same type, so that prediction and measurement can be
compared number by number.
"""

from __future__ import annotations

from dataclasses import dataclass

from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Interval, Lane
from megabucket.trace.spans import Spans, difference, intersection, length_s, union


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """One launch in a step. Times are seconds of the trace's clock; ``None``: not within the step, or unknown."""

    label: str
    kind: CollectiveKind
    payload_bytes: int
    ready_s: float | None
    """When the last gradient of the bucket arrived; ``None`` as well for what is no bucket."""
    launched_s: float
    done_s: float | None
    """When the collective was complete."""
    wait_start_s: float | None
    """When the caller's thread came to need the result."""
    wait_stop_s: float | None
    """When it went on; the time in between is exposed."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of one rank: a window of time, the intervals inside it, and the collectives launched in it.

    ::

        COMPUTE  |-- forward --|------ backward ------|- optimizer -|
        COMM                        |- bucket 0 -|- bucket 1 -|
        WAIT                                          |-------|          exposed: the thread stands still
                                    |---- hidden -----|
    """

    step: int
    rank: int
    start_s: float
    stop_s: float
    intervals: tuple[Interval, ...]
    collectives: tuple[CollectiveRecord, ...] = ()
    launches: tuple[LaunchTimes, ...] = ()
    """When each collective of the step was ready, launched, done and waited for; empty where nobody noted it."""

    def lane(self, lane: Lane) -> Spans:
        """Return the moments at which ``lane`` is busy."""
        return union((interval.start_s, interval.stop_s) for interval in self.intervals if interval.lane is lane)

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the end of the step."""
        return self.stop_s - self.start_s

    @property
    def comm_s(self) -> float:
        """Seconds in which at least one collective was under way."""
        return length_s(self.lane(Lane.COMM))

    @property
    def exposed_s(self) -> float:
        """Seconds in which the caller's thread stood still for communication, waiting for slower ranks included."""
        return length_s(self.lane(Lane.WAIT))

    @property
    def compute_s(self) -> float:
        """Seconds in which the caller's thread computed: its COMPUTE intervals without the waits inside them."""
        return length_s(difference(self.lane(Lane.COMPUTE), self.lane(Lane.WAIT)))

    @property
    def hidden_s(self) -> float:
        """Seconds in which a collective was under way and the caller's thread did not stand still."""
        return self.comm_s - length_s(intersection(self.lane(Lane.COMM), self.lane(Lane.WAIT)))

    @property
    def overlap_fraction(self) -> float | None:
        """Share of ``comm_s`` that was hidden, from 0 to 1; ``None`` for a step without communication."""
        comm_s = self.comm_s
        return self.hidden_s / comm_s if comm_s > 0 else None

    @property
    def num_collectives(self) -> int:
        """Collectives launched, counting each call of a batch."""
        return sum(record.num_calls for record in self.collectives)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full buffers handed to the communicator port."""
        return sum(record.payload_bytes for record in self.collectives)

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank must send at least, by the formula of ``CollectiveRecord.wire_bytes``."""
        return sum(record.wire_bytes for record in self.collectives)


def clip_interval(interval: Interval, start_s: float, stop_s: float) -> Interval | None:
    """Return the part of an interval inside ``[start_s, stop_s)``, or ``None`` when there is none.

    >>> clip_interval(Interval(Lane.COMM, "bucket 0", 1.0, 5.0), 2.0, 3.0)
    Interval(lane=<Lane.COMM: 'comm'>, label='bucket 0', start_s=2.0, stop_s=3.0)
    """
    start, stop = max(interval.start_s, start_s), min(interval.stop_s, stop_s)
    return Interval(interval.lane, interval.label, start, stop) if start < stop else None
