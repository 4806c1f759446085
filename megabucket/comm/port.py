"""The communicator port: what a bucket group may ask of the ranks it reduces with.

A launch takes a batch of like calls and returns one handle; batching (coalescing) is the business behind the port. Every
launch is asynchronous; ``Handle.wait`` may be called any number of times. Launches are recorded here, so the number and the
bytes of collectives are counted in one place for every implementation.
"""

from __future__ import annotations

import enum
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megabucket.errors import ForkedProcessError, InvariantError
from megabucket.trace.clock import Clock, HostClock
from megabucket.trace.online import PAUSE, OnlineRecorder
from megabucket.trace.recorder import (
    CollectiveKind,
    CollectiveRecord,
    Interval,
    Lane,
    NullRecorder,
    Recorder,
    TeeRecorder,
)


class ReduceOp(enum.Enum):
    """How elements of the ranks are combined."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """Combine ``tensor`` over all ranks, in place."""

    tensor: torch.Tensor  # 1D, contiguous
    op: ReduceOp = ReduceOp.SUM
    divisor: float = 1.0  # a wish: see Handle.has_divided
    kind = CollectiveKind.ALL_REDUCE

    @property
    def full(self) -> torch.Tensor:
        """The buffer as every rank sees it."""
        return self.tensor


@dataclass(frozen=True, slots=True, eq=False)
class ReduceScatter:
    """Combine ``full`` over all ranks; this rank keeps its shard in ``shard``, which may be its own part of ``full``.

    What the other parts of ``full`` hold afterwards is undefined.
    """

    shard: torch.Tensor  # 1D, contiguous, numel = full / ranks
    full: torch.Tensor  # 1D, contiguous
    op: ReduceOp = ReduceOp.SUM
    in_fp32: bool = False  # whether 16-bit elements are added up in float32 and rounded once, whatever the back-end does
    in_place: bool = False  # whether no memory beside ``full`` may be taken, also where that would be faster
    divisor: float = 1.0  # a wish: see Handle.has_divided
    kind = CollectiveKind.REDUCE_SCATTER


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """Collect the shards of all ranks in ``full``, in rank order; ``shard`` may be this rank's own part of ``full``."""

    full: torch.Tensor  # 1D, contiguous
    shard: torch.Tensor  # 1D, contiguous, numel = full / ranks
    kind = CollectiveKind.ALL_GATHER


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """Copy ``tensor`` of one rank of the group to all ranks, in place."""

    tensor: torch.Tensor  # contiguous
    root: int = 0
    kind = CollectiveKind.BROADCAST

    @property
    def full(self) -> torch.Tensor:
        """The buffer as every rank sees it."""
        return self.tensor


Call = AllReduce | ReduceScatter | AllGather | Broadcast


class Batch(tuple[Call, ...]):  # noqa: SLOT001 - a tuple has no room for an attribute otherwise
    """Calls that are launched together, again and again."""

    plan: Any = None
    """What a back-end has made of them: see ``Communicator.prepare``."""
    record: CollectiveRecord | None = None
    """What the last launch has recorded, so the calls were looked at then. The next one is the same, under the same label."""


class Handle(ABC):
    """A launched batch of collectives."""

    has_divided = False
    """Whether the results come divided by the ``divisor`` of their calls. Who adds up anyway does that in the same pass."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the results may be used by the caller's thread (CPU) or current stream (CUDA). Idempotent."""


class DoneHandle(Handle):
    """A batch that was complete when it was launched."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(slots=True)
class Progress:
    """Where this rank is in its work. The wrapper writes it, which costs an attribute; heartbeats carry it to other ranks."""

    step: int = 0
    phase: str = "setup"
    bucket: int = -1  # -1: in none
    num_launched: int = 0  # batches of collectives so far; the communicator counts them


class Communicator(ABC):
    """Ranks that reduce together. Implementations launch; this class checks and records."""

    def __init__(self, *, rank: int, size: int, recorder: Recorder | None = None) -> None:
        self.rank = rank
        self.size = size
        self._given_recorder: Recorder = recorder if recorder is not None else NullRecorder()
        self.recorder = self._given_recorder
        """Receives launches and intervals."""
        self.step_listener: OnlineRecorder | None = None
        """Hears what the wrapper does; ``None``: nobody, and nothing is noted."""
        self.progress = Progress()
        self._pid = os.getpid()

    def launch(self, calls: Sequence[Call], *, label: str) -> Handle:
        """Start a batch of like calls and return its handle.

        The caller keeps every tensor untouched until ``wait`` has returned. Calls on empty tensors are dropped: all ranks
        hold the same layout, so all of them drop the same ones.

        Args:
            label: names the batch in traces and errors.

        Raises:
            InvariantError: the calls are not alike, or a shard is not ``full / ranks``.
            ForkedProcessError: this process is a child of the one that made the communicator.
            PeerLostError: a rank was found lost before.
            GroupDestroyedError: the process group does not exist any more.
        """
        record = calls.record if isinstance(calls, Batch) else None
        if record is None or (record.label, record.num_ranks) != (label, self.size):
            if not isinstance(calls, Batch):
                calls = [call for call in calls if call.full.numel()]
            self._check(calls, label)
            if not calls or self.size == 1:
                self._keep_own_shards(calls)
                return DoneHandle()
            record = self._record_of(calls, label)
            if isinstance(calls, Batch):
                calls.record = record
        if os.getpid() != self._pid:
            raise ForkedProcessError(rank=self.rank, operation=f"{label} was launched")
        self.recorder.record_collective(record)
        self.progress.num_launched += 1
        return self._launch(calls, label)

    def prepare(self, calls: Sequence[Call]) -> Batch:
        """Return the calls as a batch that is best launched again and again.

        A back-end does once, at the first launch of a batch, what it does at every launch of other calls, and may keep memory
        for it. Calls on empty tensors are left out.
        """
        return Batch(call for call in calls if call.full.numel())

    def introduce(self, batches: Sequence[Batch]) -> None:  # noqa: B027  (most back-ends send everything)
        """Let ranks on one host read each other's memory for these batches, where that is faster. All ranks call it alike.

        What any of them launches after the memory was let go of is lost.

        Raises:
            PeerLostError: a rank went away meanwhile.
        """

    def close(self) -> None:  # noqa: B027  (most implementations have nothing to end)
        """End what runs in the background on behalf of this communicator. Idempotent; nothing may be launched afterwards."""

    @abstractmethod
    def _launch(self, calls: Sequence[Call], label: str) -> Handle:
        """Start a non-empty batch of like calls on more than one rank."""

    def _check(self, calls: Sequence[Call], label: str) -> None:
        if any(call.kind is not calls[0].kind for call in calls):
            raise InvariantError(f"{label}: a batch must hold calls of one kind, got {[call.kind.value for call in calls]}")
        for call in calls:
            if isinstance(call, ReduceScatter | AllGather) and call.shard.numel() * self.size != call.full.numel():
                raise InvariantError(
                    f"{label}: a shard of {call.shard.numel()} elements is not one of {self.size} equal shards of a buffer of "
                    f"{call.full.numel()}"
                )

    def _record_of(self, calls: Sequence[Call], label: str) -> CollectiveRecord:
        return CollectiveRecord(
            kind=calls[0].kind,
            label=label,
            num_calls=len(calls),
            payload_bytes=sum(call.full.nbytes for call in calls),
            num_ranks=self.size,
        )

    @staticmethod
    def _keep_own_shards(calls: Sequence[Call]) -> None:
        """Do what a collective of one rank means: nothing, unless the shard is a tensor of its own."""
        for call in calls:
            if isinstance(call, ReduceScatter) and call.shard.data_ptr() != call.full.data_ptr():
                call.shard.copy_(call.full)
            elif isinstance(call, AllGather) and call.shard.data_ptr() != call.full.data_ptr():
                call.full.copy_(call.shard)

    # For whoever wants figures #

    def hear(self, listener: OnlineRecorder | None) -> None:
        """Let a recorder have launches, intervals and the wrapper's phases, beside the one given; ``None`` ends that."""
        self.step_listener = listener
        given = self._given_recorder
        if listener is None:
            self.recorder = given
        else:
            self.recorder = listener if isinstance(given, NullRecorder) else TeeRecorder(given, listener)

    def enter_phase(self, step: int, phase: str) -> None:
        """Note what the wrapper does now, for heartbeats and the listener."""
        progress = self.progress
        progress.step, progress.phase, progress.bucket = step, phase, -1
        self.tell_phase(phase)

    def tell_phase(self, phase: str) -> None:
        """Tell the listener of a phase that is of no interest to other ranks."""
        if self.step_listener is not None:
            self.step_listener.enter_phase(self.progress.step, phase)

    def tell_pause(self) -> None:
        """Tell the listener that the wrapper's caller does something of its own now."""
        self.tell_phase(PAUSE)

    def tell_ready(self, label: str) -> None:
        """Tell the listener that a bucket group is complete."""
        if self.step_listener is not None:
            self.step_listener.note_ready(label)

    def clock_for(self, device: torch.device) -> Clock:  # noqa: ARG002 - implementations have clocks for devices
        """Return the clock by which collectives on a device are timed."""
        return HostClock()

    def collect_times(self) -> None:  # noqa: B027  (most implementations owe nothing)
        """Hand intervals to the recorder that could not be told when they were measured. Never waits."""

    def record_wait(self, label: str, start_s: float) -> None:
        """Record that the caller's thread was blocked from ``start_s`` until now."""
        self.recorder.record_interval(Interval(Lane.WAIT, label, start_s, time.perf_counter()))


class LocalCommunicator(Communicator):
    """The communicator of a process that trains alone: the same code path, minus the wire."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def _launch(self, calls: Sequence[Call], label: str) -> Handle:
        raise InvariantError(f"{label}: one rank has nobody to talk to, got {len(calls)} calls")
