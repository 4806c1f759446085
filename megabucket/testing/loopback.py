"""A world of N ranks in one process, with real tensors and no network: the second rung of the tests, and public.

Collectives are matched by their position in each rank's schedule, on data and on control by itself. A mismatch fails at once
and names both calls, where a process group would hang or mix data. Results are computed when a collective completes: at the
last launch, or, with ``completion="manual"``, when the test says so, in any order. Sums run in rank order in the tensors' own
dtype.

The input of every call is copied at launch and compared bit by bit at completion, so a write into a buffer in flight is found
with certainty.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from megabucket.comm import AllGather, AllReduce, Batch, Broadcast, Call, Communicator, Handle, ReduceOp, ReduceScatter
from megabucket.errors import (
    CollectiveDeadlockError,
    CollectiveError,
    InFlightWriteError,
    MismatchedCollectiveError,
    WrapperBrokenError,
)
from megabucket.trace.clock import HostClock
from megabucket.trace.recorder import CollectiveRecord, Launch, Recorder

_Result = TypeVar("_Result")


def describe_call(call: Call) -> str:
    """Return kind, reduce op or root, numel and dtype of a call: what ranks must agree on."""
    how = f" {call.op.value}" if isinstance(call, AllReduce | ReduceScatter) else ""
    if isinstance(call, Broadcast) and call.root:
        how = f" from rank {call.root}"
    return f"{call.kind.value}{how} of {call.full.numel()} x {str(call.full.dtype).removeprefix('torch.')}"


def _describe(calls: Sequence[Call], label: str) -> str:
    return f"{label} [{_shapes(calls)}]"


def _shapes(calls: Sequence[Call]) -> str:
    return ", ".join(describe_call(call) for call in calls)


def _input(call: Call) -> torch.Tensor:
    return call.shard if isinstance(call, AllGather) else call.full


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Collective:
    """One position of the schedule: the batches launched there so far."""

    def __init__(self, sequence: int, *, compares_labels: bool) -> None:
        self.sequence, self.compares_labels = sequence, compares_labels
        self.batches: dict[int, Sequence[Call]] = {}
        self.texts: dict[int, str] = {}
        self.inputs_at_launch: dict[int, list[torch.Tensor]] = {}
        self.is_complete = False
        self.completed_s = 0.0

    def add(self, rank: int, calls: Sequence[Call], text: str) -> None:
        # Those that are here are alike, so one of them stands for all: the work does not grow with the square of the ranks.
        for other_rank, other_text in itertools.islice(self.texts.items(), 1):
            is_alike = other_text == text or not self.compares_labels
            if not is_alike or _shapes(self.batches.get(other_rank, calls)) != _shapes(calls):
                raise MismatchedCollectiveError(
                    sequence=self.sequence, rank=rank, call=text, other_rank=other_rank, other_call=other_text
                )
        self.batches[rank] = calls
        self.texts[rank] = text
        self.inputs_at_launch[rank] = [_input(call).detach().clone() for call in calls]

    def complete(self) -> None:
        ranks = sorted(self.batches)
        for rank in ranks:
            for call, before in zip(self.batches[rank], self.inputs_at_launch[rank], strict=True):
                self._check_untouched(rank, _input(call), before)
        for position in range(len(self.batches[ranks[0]])):
            _execute(
                [self.batches[rank][position] for rank in ranks], [self.inputs_at_launch[rank][position] for rank in ranks]
            )
        self.is_complete, self.completed_s = True, time.perf_counter()
        self.batches.clear()
        self.inputs_at_launch.clear()

    def _check_untouched(self, rank: int, now: torch.Tensor, before: torch.Tensor) -> None:
        # Bits, not values: 0.0 == -0.0 and nan != nan would hide some writes and invent others.
        bits, bits_before = _bits(now), _bits(before)
        if not torch.equal(bits, bits_before):
            index = int((bits != bits_before).nonzero()[0]) // now.element_size()
            raise InFlightWriteError(sequence=self.sequence, rank=rank, call=self.texts[rank], index=index)


def _execute(calls: Sequence[Call], inputs: Sequence[torch.Tensor]) -> None:
    """Write the result of one collective to all ranks; ``calls[r]`` and ``inputs[r]`` belong to rank ``r``."""
    first = calls[0]
    if isinstance(first, Broadcast):
        result = inputs[first.root]
    elif isinstance(first, AllGather):
        result = torch.cat([shard.flatten() for shard in inputs])
    else:
        result = inputs[0].float() if isinstance(first, ReduceScatter) and first.in_fp32 else inputs[0].clone()
        for addend in inputs[1:]:
            torch.maximum(result, addend, out=result) if first.op is ReduceOp.MAX else result.add_(addend)
        if first.op is ReduceOp.AVG:
            result /= len(calls)
    for rank, call in enumerate(calls):
        if isinstance(call, ReduceScatter):
            numel = call.shard.numel()
            call.shard.detach().copy_(result[rank * numel : (rank + 1) * numel])
        else:
            call.full.detach().copy_(result)
        if isinstance(call, AllReduce | ReduceScatter) and call.divisor != 1:
            call.result.detach().div_(call.divisor)


class LoopbackWorld:
    """N ranks in one process.

    One thread may play all ranks in turn (launch on every rank before waiting on any), or ``run`` gives each rank a thread.

    Args:
        size: number of ranks.
        completion: ``"immediate"`` completes a collective at its last launch; ``"manual"`` when ``complete`` or a ``wait``
            asks for it.
        timeout_s: how long a rank in a thread waits for the others before it calls the wait a deadlock.

    >>> world = LoopbackWorld(2)
    >>> tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
    >>> handles = [world.communicator(r).launch([AllReduce(tensors[r])], label="sum") for r in range(2)]
    >>> tensors
    [tensor([3.]), tensor([3.])]
    """

    def __init__(self, size: int, *, completion: Literal["immediate", "manual"] = "immediate", timeout_s: float = 30.0) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least one rank, got size={size}")
        self.size = size
        self._completion = completion
        self._timeout_s = timeout_s
        self._is_threaded = False
        self._changed = threading.Condition()
        self._returned_ranks: set[int] = set()
        self._collectives: list[_Collective] = []
        self._channels: dict[str, list[_Collective]] = {"data": [], "control": []}
        self._num_launched = {(rank, channel): 0 for rank in range(size) for channel in self._channels}
        self._failure: BaseException | None = None
        self._broken: WrapperBrokenError | None = None

    def communicator(self, rank: int, recorder: Recorder | None = None) -> Communicator:
        """Return the communicator of one rank; a second call for a rank continues its schedule.

        Raises:
            ValueError: the world has no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a world of {self.size} (ranks count from 0)")
        communicator = _LoopbackCommunicator(self, rank, recorder)
        communicator.control = _LoopbackCommunicator(self, rank, channel="control")
        communicator.control.progress = communicator.progress
        return communicator

    def break_off(self, error: WrapperBrokenError) -> None:
        """Let no rank launch anything more, and end the waits for what is not complete with an error."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    @property
    def pending(self) -> tuple[int, ...]:
        """Sequence numbers of collectives that all ranks have launched and nothing has completed."""
        return tuple(item.sequence for item in self._collectives if len(item.batches) == self.size and not item.is_complete)

    def schedule(self, rank: int) -> tuple[str, ...]:
        """Return what a rank has launched so far, in order."""
        return tuple(item.texts[rank] for item in self._collectives if rank in item.texts)

    def complete(self, sequence: int) -> None:
        """Complete one pending collective; any order is allowed.

        Raises:
            CollectiveError: the collective is not pending: complete already, or not launched by every rank.
            InFlightWriteError: an input changed since its launch.
        """
        with self._changed:
            if sequence not in self.pending:
                raise CollectiveError(f"collective {sequence} cannot be completed; pending are {list(self.pending)}")
            self._collectives[sequence].complete()
            self._changed.notify_all()

    def run(self, function: Callable[[int], _Result]) -> list[_Result]:
        """Call ``function(rank)`` in one thread per rank and return the results in rank order.

        The first error of any rank ends the waits of all others and is raised here. The ranks have got to different places of
        the schedule by then, so such a world is not good for another run.
        """
        results: dict[int, _Result] = {}
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            try:
                results[rank] = function(rank)
                with self._changed:
                    self._returned_ranks.add(rank)
                    self._changed.notify_all()
            except BaseException as error:
                with self._changed:
                    errors.append(error)
                    self._failure = self._failure or error
                    self._changed.notify_all()

        threads = [threading.Thread(target=target, args=(rank,), name=f"loopback-rank-{rank}") for rank in range(self.size)]
        self._is_threaded = True
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._is_threaded = False
            self._failure = None
            self._returned_ranks.clear()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.size)]

    def _launch(self, rank: int, channel: str, calls: Sequence[Call], label: str) -> _Collective:
        with self._changed:
            if self._broken is not None:
                raise self._broken.copy()
            position, known = self._num_launched[rank, channel], self._channels[channel]
            if position == len(known):
                # Ranks in different calls meet in one message on control, and find out by what it says.
                known.append(_Collective(len(self._collectives), compares_labels=channel == "data"))
                self._collectives.append(known[-1])
            collective = known[position]
            collective.add(rank, calls, _describe(calls, label))
            self._num_launched[rank, channel] += 1
            if len(collective.batches) == self.size:
                if self._completion == "immediate":
                    collective.complete()
                self._changed.notify_all()  # not at every launch: threads that are woken for nothing cost a switch each
        return collective

    def _wait(self, rank: int, collective: _Collective) -> None:
        with self._changed:
            if self._is_threaded:
                self._changed.wait_for(lambda: self._has_news(collective), self._timeout_s)
                if self._broken is not None and not collective.is_complete and len(collective.batches) < self.size:
                    raise self._broken.copy()
                if self._failure is not None and not collective.is_complete:
                    raise CollectiveError(
                        f"[rank {rank}] gave up waiting for collective {collective.sequence}: another rank failed with "
                        f"{type(self._failure).__name__}"
                    ) from self._failure
            if collective.is_complete:
                return
            missing = [other for other in range(self.size) if other not in collective.batches]
            if missing:
                raise CollectiveDeadlockError(
                    sequence=collective.sequence, rank=rank, call=collective.texts[rank], missing_ranks=missing
                )
            collective.complete()
            self._changed.notify_all()

    def _has_news(self, collective: _Collective) -> bool:
        """Whether a wait for a collective is over: it can be completed, or it never will be."""
        if self._failure is not None or self._broken is not None:
            return True
        if collective.is_complete or len(collective.batches) == self.size:
            return True
        return any(rank not in collective.batches for rank in self._returned_ranks)


class _LoopbackCommunicator(Communicator):
    def __init__(self, world: LoopbackWorld, rank: int, recorder: Recorder | None = None, *, channel: str = "data") -> None:
        super().__init__(rank=rank, size=world.size, recorder=recorder)
        self.world, self.channel = world, channel

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:  # noqa: ARG002 - the port's
        return _LoopbackHandle(self, batch, record)

    def break_off(self, error: WrapperBrokenError) -> None:
        self.world.break_off(error)


class _LoopbackHandle(Handle):
    def __init__(self, owner: _LoopbackCommunicator, batch: Batch, record: CollectiveRecord) -> None:
        self._owner, self._batch, self._label = owner, batch, record.label
        self._collective: _Collective | None = None
        wants_time = any(recorder.records_time for recorder in owner.progress.recorders)
        self._launch = Launch(record, clock=HostClock() if wants_time else None)

    @property
    def is_started(self) -> bool:
        return self._collective is not None

    def start(self) -> None:
        if self._collective is not None:
            return
        owner, progress = self._owner, self._owner.progress
        self._launch.note("launched")
        self._collective = owner.world._launch(owner.rank, owner.channel, self._batch, self._label)
        progress.num_launched += 1
        for recorder in progress.recorders:
            recorder.record_launch(self._launch)

    def wait(self) -> None:
        if self._collective is None:
            raise CollectiveError(f"[rank {self._owner.rank}] {self._label} was not launched, so there is nothing to wait for")
        self._launch.note("wait_start")
        self._owner.world._wait(self._owner.rank, self._collective)
        self._launch.done = self._collective.completed_s
        self._launch.note("wait_stop")


@dataclass(slots=True)
class ListRecorder:
    """A recorder that keeps all launches, in order."""

    records_time: bool = True
    launches: list[Launch] = field(default_factory=list)

    @property
    def collectives(self) -> list[CollectiveRecord]:
        """What was launched."""
        return [launch.record for launch in self.launches]

    def record_launch(self, launch: Launch) -> None:
        """Keep it."""
        self.launches.append(launch)

    def enter_phase(self, step: int, phase: str) -> None:
        """Keep nothing."""

    def note_ready(self, label: str) -> None:
        """Keep nothing."""
