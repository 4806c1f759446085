"""Intervals on lanes, collectives with their bytes, and the ``Recorder`` port that receives them. No torch.

The communicator and the wrapper write; metrics and reports read. Times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from megabucket.trace.clock import Clock, Stamp


class Lane(enum.Enum):
    """What is busy during an interval."""

    COMPUTE = "compute"  # forward, backward, optimizer: the caller's thread doing arithmetic
    COMM = "comm"  # a collective between launch and completion
    WAIT = "wait"  # the caller's thread blocked on a collective: exposed communication


class CollectiveKind(enum.Enum):
    """The collectives of the communicator port."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"

    @property
    def ring_passes(self) -> int:
        """How often the whole buffer goes round the ring: ``n - 1`` steps and ``S (n-1)/n`` bytes of each rank per pass.

        Two for an all-reduce, which is a reduce-scatter and an all-gather; one for everything else (Patarasuk and Yuan,
        "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009). An all-to-all is no ring, but also
        takes ``n - 1`` steps: a message to each other rank.
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
    """One launch of the communicator: a batch of ``num_calls`` calls of one kind.

    ``payload_bytes`` is the size of the full buffers (not of shards), summed over the batch. For an all-to-all, whose sizes
    differ between ranks, it is the bytes that this rank sends to other ranks; its own part is not counted.
    """

    kind: CollectiveKind
    label: str
    num_calls: int
    payload_bytes: int
    num_ranks: int

    @property
    def wire_bytes(self) -> float:
        """Least bytes that each rank sends, on average over the ranks, with a bandwidth-optimal algorithm.

        For ``n`` ranks and ``S`` bytes: all-reduce ``2 S (n-1)/n``; reduce-scatter, all-gather and broadcast
        ``S (n-1)/n`` (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009). For an all-to-all the bytes
        that this rank sends: ``S``.
        """
        if self.kind is CollectiveKind.ALL_TO_ALL:
            return self.payload_bytes
        return self.kind.ring_passes * self.payload_bytes * (self.num_ranks - 1) / self.num_ranks


Moment: TypeAlias = Literal["launched", "done", "wait_start", "wait_stop"]


@dataclass(slots=True, eq=False)
class Launch:
    """One launch and its moments, filled in as they happen; ``None``: not yet, or not recorded."""

    record: CollectiveRecord
    clock: Clock | None
    """Records the moments; ``None``: not at all."""
    launched: Stamp = None
    done: Stamp = None
    """When the collective was complete."""
    wait_start: Stamp = None
    """When the caller's thread began to wait for the result."""
    wait_stop: Stamp = None
    """When it stopped waiting."""
    on_moment: Callable[[str, Moment], None] | None = None
    """Called with the label and each moment as it happens, "done" perhaps in another thread."""

    def note(self, moment: Moment) -> None:
        """Record a moment, the first time it happens."""
        if self.on_moment is not None:
            self.on_moment(self.record.label, moment)
        if self.clock is not None and getattr(self, moment) is None:
            setattr(self, moment, self.clock.stamp())


class Recorder(Protocol):
    """Receives launches and phases. Called on the hot path, so it must be fast."""

    @property
    def records_time(self) -> bool:
        """Whether moments are recorded; otherwise no clock is read and no callback installed."""
        ...

    def record_launch(self, launch: Launch) -> None:
        """Receive one launch when it is made. Its later moments are filled in, perhaps by other threads."""
        ...

    def enter_phase(self, step: int, phase: str) -> None:
        """Receive the begin of a phase of a step, which ends the previous one."""
        ...

    def note_ready(self, label: str) -> None:
        """Receive the completion of a bucket group."""
        ...
