"""The communicator port: all communication of the package goes through it.

Calls describe collectives, a batch holds calls of one kind that are launched together, a handle is one launch of a batch.
Making a handle sends nothing; ``start`` sends everything or nothing, even if it is interrupted, and ``is_started`` tells which.

A communicator has a second channel, ``control``, for messages between ranks. It has its own order of launches, so a message
never meets a collective on data.
"""

from __future__ import annotations

import enum
import itertools
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from megabucket.comm.device import Accelerator, Arrived, HostCopy
from megabucket.errors import InvariantError, PeerFailedError, PeerLostError, WrapperBrokenError
from megabucket.trace.clock import Clock, HostClock
from megabucket.trace.recorder import CollectiveKind, CollectiveRecord, Moment, Recorder

_call: Final = operator.methodcaller("__call__")

Finding = PeerFailedError | PeerLostError | WrapperBrokenError
"""Why nothing can be launched any more: the error that all ranks raise."""


class ReduceOp(enum.Enum):
    """The operation of a reduction."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """Combine ``full`` over all ranks, in place, and divide the result by ``divisor``."""

    full: torch.Tensor  # 1D, contiguous
    op: ReduceOp = ReduceOp.SUM
    divisor: float = 1.0
    in_rank_order: bool = False  # as in ReduceScatter; each rank receives the whole tensors of all
    kind = CollectiveKind.ALL_REDUCE


@dataclass(frozen=True, slots=True, eq=False)
class ReduceScatter:
    """Combine ``full`` over all ranks; this rank keeps its shard, divided by ``divisor``.

    What the other parts of ``full`` hold afterwards is undefined.
    """

    shard: torch.Tensor  # this rank's part of full
    full: torch.Tensor  # 1D, contiguous
    op: ReduceOp = ReduceOp.SUM
    in_fp32: bool = False  # add 16-bit elements in float32 and round once, on any back-end
    divisor: float = 1.0
    in_rank_order: bool = False  # add in rank order on any back-end; 16-bit elements as with in_fp32
    kind = CollectiveKind.REDUCE_SCATTER


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """Collect the shards of all ranks in ``full``, in rank order."""

    full: torch.Tensor  # 1D, contiguous
    shard: torch.Tensor  # this rank's part of full
    kind = CollectiveKind.ALL_GATHER


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """Copy ``full`` of one rank of the group to all ranks, in place."""

    full: torch.Tensor  # contiguous
    root: int = 0
    kind = CollectiveKind.BROADCAST


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Send a part of ``sent`` to each rank and receive a part of ``received`` from each, both in rank order.

    Sizes differ between ranks: any part may be empty, and a rank may send or receive nothing at all. The own part is copied.
    The two tensors have no memory in common.
    """

    received: torch.Tensor  # 1D, contiguous
    sent: torch.Tensor  # 1D, contiguous, the same dtype
    received_numels: tuple[int, ...]  # by source rank; the own part included
    sent_numels: tuple[int, ...]  # by destination rank; the own part included
    kind = CollectiveKind.ALL_TO_ALL


BufferCall = AllReduce | ReduceScatter | AllGather | Broadcast
"""A call on a buffer, ``full``, that has the same size on all ranks."""

Call = BufferCall | AllToAll


class Batch(tuple[Call, ...]):  # noqa: SLOT001 - a tuple has no room for an attribute otherwise
    """Calls that are launched together, repeatedly, one launch at a time."""

    plan: Any = None
    """The plan of a back-end, made at the first launch."""
    record: CollectiveRecord | None = None
    """The record of the last launch, which has checked the calls."""


class Handle(ABC):
    """One launch of a batch."""

    @property
    @abstractmethod
    def is_started(self) -> bool:
        """Whether the batch was sent."""

    @abstractmethod
    def start(self) -> None:
        """Send the batch, unless it was sent before. An interrupt leaves it sent as a whole or not at all.

        The caller keeps every tensor untouched until ``wait`` has returned.

        Raises:
            MegabucketError: nothing more can be sent; the text says why.
        """

    @abstractmethod
    def wait(self) -> None:
        """Return when the results may be used by the caller's thread (CPU) or current stream (CUDA).

        Idempotent; a wait that was interrupted may be repeated.
        """

    def read(self, result: torch.Tensor) -> torch.Tensor:
        """Wait, and return a result that the host may read. On a device ``wait`` only makes the stream wait.

        Raises:
            MegabucketError: as ``wait``.
        """
        self.wait()
        return result.cpu()

    def poll(self) -> bool:
        """Finish the launch if that needs no waiting. Return whether it is finished."""
        return False

    def has_arrived(self) -> bool:
        """Return whether ``wait`` would return without waiting for another rank."""
        return self.poll()


class DoneHandle(Handle):
    """A launch with nothing to do: on one rank, or of empty tensors."""

    is_started = True
    """Nothing needs to be sent."""

    def start(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""

    def poll(self) -> bool:
        """Return at once."""
        return True


class LocalCopyHandle(Handle):
    """A launch of all-to-alls on one rank, which copies what it sends to itself."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._copies = [
            partial(torch.Tensor.copy_, call.received.data, call.sent.data) for call in calls if isinstance(call, AllToAll)
        ]
        self._copied: list[torch.Tensor] = []  # filled by a single C call

    @property
    def is_started(self) -> bool:
        """Whether the copies were made."""
        return bool(self._copied)

    def start(self) -> None:
        """Copy, unless that was done before."""
        if not self._copied:
            self._copied.extend(map(_call, self._copies))

    def wait(self) -> None:
        """Return at once."""

    def poll(self) -> bool:
        """Return whether the copies were made."""
        return self.is_started


class Recorders:
    """The recorders of a rank: those it was given, and those of the wrapper that was made last."""

    def __init__(self, *given: Recorder) -> None:
        self.given = given
        self.active = given
        """All that record at present."""
        self.on_moment: Callable[[str, Moment], None] | None = None
        """Callback of the wrapper for the moments of each launch; called only if there are recorders."""

    def activate(self, recorders: Sequence[Recorder], *, on_moment: Callable[[str, Moment], None] | None) -> None:
        """Add the recorders of a wrapper. They replace those of an earlier one."""
        self.active, self.on_moment = (*self.given, *recorders), on_moment

    def deactivate(self, recorders: Sequence[Recorder]) -> None:
        """Remove the recorders of a wrapper, unless those of a later one have replaced them."""
        if any(recorder in self.active for recorder in recorders):
            self.active, self.on_moment = self.given, None


class Progress:
    """Where this rank stands, for heartbeats, errors and recorders."""

    def __init__(self, recorders: Recorders) -> None:
        self.step, self.phase = 0, "setup"
        self.bucket = -1
        """-1: in none."""
        self._recorders = recorders

    def enter(self, step: int, phase: str) -> None:
        """Note that a phase begins."""
        self.step, self.phase, self.bucket = step, phase, -1
        for recorder in self._recorders.active:
            recorder.enter_phase(step, phase)


@dataclass(slots=True, eq=False)
class WrapperRanks:
    """The ranks of a wrapper, by which errors number them, and the name by which they know it."""

    members: Sequence[int] = ()
    """Global ranks that agree on steps, if the wrapper has several communicators; otherwise those of its only one count."""
    token: str = ""
    """Identifies the wrapper on the board (``comm/liveness``); the same for all of its communicators."""

    def number_of(self, member: int, rank: int) -> int:
        """Return the number of a rank in errors: its place among all ranks of the wrapper.

        Args:
            member: the global rank.
            rank: its rank in the group, used by wrappers of one group.
        """
        return self.members.index(member) if member in self.members else rank


class RankState:
    """The state of this rank in a wrapper. All communicators of the wrapper share it.

    Args:
        recorder: receives launches and phases.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorders = Recorders() if recorder is None else Recorders(recorder)
        self.progress = Progress(self.recorders)
        self.ranks = WrapperRanks()
        self.failure: PeerFailedError | None = None
        """The failure that this rank has reported, until it knows that the others have read the report."""


@dataclass(slots=True, eq=False)
class LaunchCount:
    """Counts the batches of collectives that a communicator has launched on both channels. All of its ranks count alike."""

    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Gives each launch its number, from 1: ``next`` is part of the single C call of a launch."""
    last: int = 0
    """The number of the last launch."""


class Communicator(ABC):
    """A group of ranks. Implementations make handles; this class checks and records.

    Args:
        recorder: receives launches and phases.
        state: of this rank, if other communicators share it; it has the recorders then.
    """

    def __init__(self, *, rank: int, size: int, recorder: Recorder | None = None, state: RankState | None = None) -> None:
        self.rank = rank
        self.size = size
        self.members: Sequence[int] = range(size)
        """The global ranks, in order."""
        self.state = RankState(recorder) if state is None else state
        """Shared with ``control``, and with the other communicators of a wrapper."""
        self.progress, self.recorders = self.state.progress, self.state.recorders
        self.launches = LaunchCount()
        """Shared with ``control``."""
        self._control: Communicator | None = None

    @property
    def control(self) -> Communicator:
        """The channel for messages between ranks; this one, if there is no other."""
        return self if self._control is None else self._control  # no reference to itself, which would outlive the last owner

    @control.setter
    def control(self, control: Communicator) -> None:
        self._control = None if control is self else control

    def number_of(self, rank: int) -> int:
        """Return the number of a rank of this group in errors: its place among all ranks of the wrapper."""
        return self.state.ranks.number_of(self.members[rank], rank)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a buffer of parameters or gradients: 1D, contiguous, not initialized.

        The place for a pool, for symmetric or registered memory. Nothing else may use the memory. A wrapper calls this for each
        buffer when it wraps and rebuilds, on all ranks in one order. It drops its references at ``detach()``; an optimizer over
        its shards keeps its own.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def prepare(self, calls: Sequence[Call]) -> Batch:
        """Return the calls as a batch for many launches. Calls on empty tensors are left out, except all-to-alls.

        A back-end plans a batch once, at its first launch, and may keep memory for it; other calls are planned at each launch.
        """
        return Batch(call for call in calls if isinstance(call, AllToAll) or call.full.numel())

    def forget(self, batch: Batch) -> None:
        """Drop the plan of a batch, with its memory: the tensors of its calls move. The next launch plans it anew."""
        batch.plan = None

    def handle(self, calls: Sequence[Call], *, label: str) -> Handle:
        """Return a launch of calls of one kind that has not started.

        Calls on empty tensors are dropped: all ranks hold the same layout, so all of them drop the same ones. An all-to-all is
        never dropped, because its sizes differ between ranks.

        Args:
            label: names the batch in traces and errors.

        Raises:
            InvariantError: the calls are of different kinds, a shard is not this rank's part of its buffer, or the parts of an
                all-to-all do not fit its tensors.
        """
        batch = calls if isinstance(calls, Batch) else self.prepare(calls)
        if not batch:
            return DoneHandle()
        record = batch.record
        if record is None or record.label != label or record.num_ranks != self.size:
            self._check(batch, label)
            payload_bytes = sum(_payload_bytes(call, self.rank) for call in batch)
            record = batch.record = CollectiveRecord(batch[0].kind, label, len(batch), payload_bytes, num_ranks=self.size)
        if self.size == 1:
            return LocalCopyHandle(batch) if isinstance(batch[0], AllToAll) else DoneHandle()
        return self._handle(batch, record, is_kept=batch is calls)

    def launch(self, calls: Sequence[Call], *, label: str) -> Handle:
        """Start a launch of calls of one kind and return its handle. See ``handle``.

        Raises:
            MegabucketError: as ``handle`` and ``Handle.start``.
        """
        handle = self.handle(calls, label=label)
        handle.start()
        return handle

    def read(self, values: torch.Tensor, *, label: str) -> torch.Tensor:
        """Return values that the host may read. Use it instead of ``float(values)``, which could wait forever for a device.

        Raises:
            MegabucketError: a rank that the device waits for was lost.
        """
        if (accelerator := Accelerator.of(values.device)) is None:
            return values
        copy = HostCopy(accelerator, values)
        self._wait_for(copy, label)
        return copy.values

    def wait_for(self, device: torch.device, *, label: str) -> None:
        """Wait until the current stream of a device has finished. Raises as ``read``."""
        if (accelerator := Accelerator.of(device)) is not None:
            self._wait_for(Arrived(accelerator), label)

    def _wait_for(self, arrived: Arrived, label: str) -> None:  # noqa: ARG002 - implementations watch the other ranks
        arrived.wait()

    def break_off(self, error: Finding) -> None:  # noqa: B027  (one rank alone has no peers)
        """Launch nothing more, and notify the other ranks: their waits raise ``error`` within two seconds.

        Unfinished collectives may never end, so their buffers are kept until the program ends.
        """

    def close(self) -> None:  # noqa: B027  (most implementations have nothing to end)
        """End the threads and groups of this communicator. Idempotent; nothing may be launched afterwards."""

    def clock_for(self, device: torch.device) -> Clock:  # noqa: ARG002 - implementations have clocks for devices
        """Return the clock by which collectives on a device are timed."""
        return HostClock()

    @abstractmethod
    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        """Return a launch of a non-empty batch of calls of one kind on more than one rank.

        Args:
            record: for traces.
            is_kept: whether the caller will launch the batch again.
        """

    def _check(self, batch: Batch, label: str) -> None:
        if any(call.kind is not batch[0].kind for call in batch):
            raise InvariantError(f"{label}: a batch must hold calls of one kind, got {[call.kind.value for call in batch]}")
        for call in batch:
            if isinstance(call, ReduceScatter | AllGather):
                numel, remainder = divmod(call.full.numel(), self.size)
                if remainder or not call.shard.is_set_to(call.full[self.rank * numel : (self.rank + 1) * numel]):
                    raise InvariantError(
                        f"{label}: a shard of {call.shard.numel()} elements is not part {self.rank} of {self.size} of a buffer "
                        f"of {call.full.numel()}"
                    )
            elif isinstance(call, AllToAll) and (problem := self._problem_of_parts(call)):
                raise InvariantError(f"{label}: {problem}")

    def _problem_of_parts(self, call: AllToAll) -> str:
        """Return what is wrong with the parts of an all-to-all; empty if nothing."""
        for name, numels, tensor in (
            ("received", call.received_numels, call.received),
            ("sent", call.sent_numels, call.sent),
        ):
            if len(numels) != self.size:
                return f"an all-to-all of {self.size} ranks has {len(numels)} {name} parts, it needs one for each rank"
            if tensor.dim() != 1 or not tensor.is_contiguous():
                return f"the {name} tensor of an all-to-all must be 1D and contiguous, got {list(tensor.shape)}"
            if min(numels) < 0 or sum(numels) != tensor.numel():
                return (
                    f"the {name} parts of an all-to-all, {list(numels)}, do not make up its tensor of {tensor.numel()} elements"
                )
        if call.received.dtype != call.sent.dtype:
            return f"an all-to-all receives {call.received.dtype} but sends {call.sent.dtype}"
        if call.received_numels[self.rank] != call.sent_numels[self.rank]:
            return (
                f"rank {self.rank} sends {call.sent_numels[self.rank]} elements to itself but receives "
                f"{call.received_numels[self.rank]} from itself"
            )
        return ""


def _payload_bytes(call: Call, rank: int) -> int:
    """Return the bytes of a call as ``CollectiveRecord`` counts them."""
    if isinstance(call, AllToAll):
        return call.sent.nbytes - call.sent_numels[rank] * call.sent.element_size()
    return call.full.nbytes


class ReplicaReducer:
    """Reductions over replicas, each of the result of a reduction inside each replica.

    ::

        inside         |-- bucket 0 --|-- bucket 1 --|-- bucket 2 --|
        over replicas                 |-- bucket 0 --|-- bucket 1 --|-- bucket 2 --|

    On each of the two communicators all ranks launch in bucket order. On a host a reduction over replicas is sent by the first
    launch or wait after the one inside is complete, so backward never waits for it. On a device both are sent at once, the
    second behind the first on its own stream: all ranks send everything in one order, as NCCL requires, and the stream of
    backward does not wait.

    Args:
        communicator: the ranks that hold the same shard, one of each replica.
        accelerator: of the buffers; ``None``: they are on a host.
    """

    def __init__(self, communicator: Communicator, accelerator: Accelerator | None) -> None:
        self.communicator = communicator
        self._stream = None if accelerator is None else accelerator.side_stream()
        self.pending: deque[_TwoLevelHandle] = deque()
        """Launches whose reduction over replicas is not sent yet, in order."""

    def behind(self, inside: Handle, calls: Sequence[Call], *, label: str) -> Handle:
        """Return a launch of ``inside`` followed by calls over the replicas."""
        return _TwoLevelHandle(self, inside, self.communicator.handle(calls, label=label))

    def begin(self, handle: _TwoLevelHandle) -> None:
        """Start the launch inside, and those launches over the replicas that are ready."""
        self.pending.append(handle)
        handle.inside.start()
        if self._stream is None:
            self.advance()
        else:
            with self._stream:
                self.advance(until=handle)

    def advance(self, *, until: _TwoLevelHandle | None = None) -> None:
        """Start the reductions over replicas that are ready, in order, waiting for all up to that of ``until``."""
        while self.pending:
            first = self.pending[0]
            if first.inside.is_started:  # otherwise it was interrupted before its start, and another launch replaces it
                if until not in self.pending and not first.inside.poll():
                    return
                first.inside.wait()
                first.over_replicas.start()
            self.pending.popleft()


class _TwoLevelHandle(Handle):
    """A launch inside a replica, followed by one over the replicas."""

    def __init__(self, reducer: ReplicaReducer, inside: Handle, over_replicas: Handle) -> None:
        self._reducer, self.inside, self.over_replicas = reducer, inside, over_replicas

    @property
    def is_started(self) -> bool:
        # A replica of one rank sends nothing inside, so ``inside.is_started`` alone is not enough.
        return self.inside.is_started and (self in self._reducer.pending or self.over_replicas.is_started)

    def start(self) -> None:
        if not self.is_started:
            self._reducer.begin(self)

    def wait(self) -> None:
        self._reducer.advance(until=self)
        self.over_replicas.wait()

    def poll(self) -> bool:
        self._reducer.advance()
        return self.over_replicas.is_started and self.over_replicas.poll()


class LocalCommunicator(Communicator):
    """The communicator of a process that trains alone: the same code path without communication."""

    def __init__(self, state: RankState | None = None) -> None:
        super().__init__(rank=0, size=1, state=state)

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:  # noqa: ARG002 - the port's
        raise InvariantError(f"{record.label}: a single rank launches no collectives, got {len(batch)} calls")


class ForwardingCommunicator(Communicator):
    """A communicator around another one, to which it passes everything on: the base for decorators.

    A decorator overrides ``_handle``, for launches on data, and whatever else it does in another way. Messages between ranks go
    over the control channel of the inner communicator, past the decorator. See docs/contributing/wire.md.

    Args:
        inner: the wrapped communicator. It has the same ranks, and they share one state.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(rank=inner.rank, size=inner.size, state=inner.state)
        self.inner = inner
        """The wrapped communicator."""
        self.members, self.launches, self.control = inner.members, inner.launches, inner.control

    def handle_on_inner(self, calls: Sequence[Call], *, label: str, is_kept: bool) -> Handle:
        """Return a launch of calls on the inner communicator that has not started. Errors: as ``handle``.

        Args:
            is_kept: whether the caller will launch the same batch again; then the inner communicator may keep a plan on it.
        """
        return self.inner.handle(calls if is_kept else tuple(calls), label=label)

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:
        return self.handle_on_inner(batch, label=record.label, is_kept=is_kept)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory of the inner communicator."""
        return self.inner.allocate(numel, dtype, device)

    def forget(self, batch: Batch) -> None:
        """Drop the plan of a batch."""
        self.inner.forget(batch)

    def read(self, values: torch.Tensor, *, label: str) -> torch.Tensor:
        """Return values that the host may read."""
        return self.inner.read(values, label=label)

    def wait_for(self, device: torch.device, *, label: str) -> None:
        """Wait until the current stream of a device has finished."""
        self.inner.wait_for(device, label=label)

    def break_off(self, error: Finding) -> None:
        """Launch nothing more, and notify the other ranks."""
        self.inner.break_off(error)

    def close(self) -> None:
        """End the threads and groups of the inner communicator."""
        self.inner.close()

    def clock_for(self, device: torch.device) -> Clock:
        """Return the clock of the inner communicator."""
        return self.inner.clock_for(device)
