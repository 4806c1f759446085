"""What a step did, as data: intervals on lanes and collectives with their bytes, and the port that receives them.

The communicator and the training loop write here; metrics and reports read. No torch, no clock of its own: times are
seconds of one monotonic clock (``time.perf_counter``) chosen by the writer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol


class Lane(enum.Enum):
    """Who is busy during an interval."""

    COMPUTE = "compute"  # forward, backward, optimizer: the caller's thread doing arithmetic
    COMM = "comm"  # a collective between launch and completion
    WAIT = "wait"  # the caller's thread blocked on a collective: exposed communication


class CollectiveKind(enum.Enum):
    """The collectives of the communicator port."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"

    @property
    def ring_passes(self) -> int:
        """How often the whole buffer goes round the ring: ``n - 1`` steps and ``S (n-1)/n`` bytes of each rank per pass.

        Two for an all-reduce, which is a reduce-scatter and an all-gather; one for everything else (Patarasuk and Yuan,
        "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009).
        """
        return 2 if self is CollectiveKind.ALL_REDUCE else 1


@dataclass(frozen=True, slots=True)
class Interval:
    """A half-open span of time ``[start_s, stop_s)`` on one lane."""

    lane: Lane
    label: str
    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from start to stop."""
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One launch at the communicator port: a batch of ``num_calls`` like calls.

    ``payload_bytes`` is the size of the full buffers (not of shards), summed over the batch.
    """

    kind: CollectiveKind
    label: str
    num_calls: int
    payload_bytes: int
    num_ranks: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank must send at least, on average over the ranks, with a bandwidth-optimal algorithm.

        For ``n`` ranks and ``S`` bytes: all-reduce ``2 S (n-1)/n``; reduce-scatter, all-gather and broadcast
        ``S (n-1)/n`` (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009).
        """
        return self.kind.ring_passes * self.payload_bytes * (self.num_ranks - 1) / self.num_ranks


class Recorder(Protocol):
    """Receives what happened; called on the hot path and from communication threads, so it must be quick and thread-safe."""

    @property
    def records_time(self) -> bool:
        """Whether intervals are wanted; without, no clock is read and no callback installed."""
        ...

    def record_interval(self, interval: Interval) -> None:
        """Receive one finished interval."""
        ...

    def record_collective(self, record: CollectiveRecord) -> None:
        """Receive one launch, at the moment it is made."""
        ...


class NullRecorder:
    """Drops everything: the default."""

    @property
    def records_time(self) -> bool:
        """No clock is read."""
        return False

    def record_interval(self, interval: Interval) -> None:
        """Drop it."""

    def record_collective(self, record: CollectiveRecord) -> None:
        """Drop it."""


class TeeRecorder:
    """Gives everything to two recorders; each gets intervals only if it wants them."""

    def __init__(self, first: Recorder, second: Recorder) -> None:
        self._first, self._second = first, second

    @property
    def records_time(self) -> bool:
        """Whether one of them wants intervals."""
        return self._first.records_time or self._second.records_time

    def record_interval(self, interval: Interval) -> None:
        """Pass the interval on."""
        for recorder in (self._first, self._second):
            if recorder.records_time:
                recorder.record_interval(interval)

    def record_collective(self, record: CollectiveRecord) -> None:
        """Pass the launch on."""
        self._first.record_collective(record)
        self._second.record_collective(record)


@dataclass(slots=True)
class ListRecorder:
    """Keeps everything in order of arrival. Appending to a list is atomic, so communication threads may write too."""

    records_time: bool = True
    intervals: list[Interval] = field(default_factory=list)
    collectives: list[CollectiveRecord] = field(default_factory=list)

    def record_interval(self, interval: Interval) -> None:
        """Append the interval."""
        self.intervals.append(interval)

    def record_collective(self, record: CollectiveRecord) -> None:
        """Append the launch."""
        self.collectives.append(record)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.intervals.clear()
        self.collectives.clear()
