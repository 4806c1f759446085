"""A world of N ranks in one process, with real tensors and no network.

Collectives are matched by their position in each rank's schedule; each group of ranks has one schedule for data and one for
control. A mismatch fails at once and names both calls, where a process group would hang or mix data. Results are computed when
a collective completes: at the last launch, or, with ``completion="manual"``, when the test says so, in any order. Sums run in
the tensors' own dtype and in the order of gloo's ring, so that with three ranks or more the last bits depend on where an
element lies in its batch; calls that ask for rank order get it.

The input of every call is copied at launch and compared bit by bit at completion, so every write into a buffer in flight is
found.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from megabucket.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Batch,
    Broadcast,
    Call,
    Communicator,
    Handle,
    ReduceOp,
    ReduceScatter,
)
from megabucket.comm.communicator import BufferCall, Finding, RankState
from megabucket.comm.gloo import places_in_sums, ring_blocks
from megabucket.comm.plan import is_in_rank_order
from megabucket.errors import CollectiveError
from megabucket.trace.clock import HostClock
from megabucket.trace.recorder import CollectiveRecord, Launch, Recorder

_Result = TypeVar("_Result")


class MismatchedCollectiveError(CollectiveError):
    """Two ranks launched different collectives at the same position of their schedules."""

    def __init__(self, *, sequence: int, rank: int, call: str, other_rank: int, other_call: str) -> None:
        self.sequence, self.rank, self.call = sequence, rank, call
        self.other_rank, self.other_call = other_rank, other_call
        super().__init__(
            f"collective {sequence} differs between ranks: rank {other_rank} launched {other_call}, rank {rank} launched "
            f"{call}. On a real process group this hangs or mixes unrelated data. All ranks must launch the same "
            "collectives in the same order."
        )


class CollectiveDeadlockError(CollectiveError):
    """A rank waits for a collective that other ranks have not launched and cannot launch any more."""

    def __init__(self, *, sequence: int, rank: int, call: str, missing_ranks: Sequence[int], elsewhere: str = "") -> None:
        self.sequence, self.rank, self.call, self.missing_ranks = sequence, rank, call, tuple(missing_ranks)
        super().__init__(
            f"[rank {rank}] waits for collective {sequence} ({call}), which rank(s) {', '.join(map(str, missing_ranks))} "
            f"have not launched{elsewhere}. Launch it on every rank before waiting, or run the ranks in threads."
        )


class InFlightWriteError(CollectiveError):
    """A buffer changed between the launch and the completion of the collective that owned it."""

    def __init__(self, *, sequence: int, rank: int, call: str, index: int) -> None:
        self.sequence, self.rank, self.call, self.index = sequence, rank, call, index
        super().__init__(
            f"[rank {rank}] the input of collective {sequence} ({call}) changed while it was in flight, first at element "
            f"{index}. On a real process group the reduced value would depend on timing. Nothing may write a buffer "
            "between launch and completion."
        )


def _describe(call: Call, members: Sequence[int]) -> str:
    """Return kind, reduce op or root, numel and dtype of a call, on which ranks must agree; no numel of an all-to-all."""
    if isinstance(call, AllToAll):
        return f"{call.kind.value} of {_name(call.sent.dtype)}"
    how = f" {call.op.value}" if isinstance(call, AllReduce | ReduceScatter) else ""
    if isinstance(call, Broadcast) and call.root:
        how = f" from rank {members[call.root]}"
    return f"{call.kind.value}{how} of {call.full.numel()} x {_name(call.full.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _input(call: Call) -> torch.Tensor:
    if isinstance(call, AllToAll):
        return call.sent
    return call.shard if isinstance(call, AllGather) else call.full


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Collective:
    """One position of the schedule of a group: the batches launched there so far, by rank of the world."""

    def __init__(self, sequence: int, channel: _Channel) -> None:
        self.sequence, self._channel = sequence, channel
        self.missing = set(channel.members)
        self.batches: dict[int, Sequence[Call]] = {}
        self.texts: dict[int, str] = {}
        self.inputs_at_launch: dict[int, list[torch.Tensor]] = {}
        self.is_complete = False
        self.completed_s = 0.0

    def add(self, rank: int, calls: Sequence[Call], label: str) -> None:
        described = f" [{', '.join(_describe(call, self._channel.members) for call in calls)}]"
        text = f"{label}{described}"
        # The ranks so far are alike, so comparing with one of them is enough.
        other_rank, other_text = next(iter(self.texts.items()), (rank, text))
        if other_text != text if self._channel.compares_labels else not other_text.endswith(described):
            raise MismatchedCollectiveError(
                sequence=self.sequence, rank=rank, call=text, other_rank=other_rank, other_call=other_text
            )
        for other_rank in self.batches:
            self._check_parts(rank, calls, text, other_rank)
        self.missing.discard(rank)
        self.batches[rank] = calls
        self.texts[rank] = text
        self.inputs_at_launch[rank] = [_input(call).detach().clone() for call in calls]

    def _check_parts(self, rank: int, calls: Sequence[Call], text: str, other_rank: int) -> None:
        """Check that two ranks agree on what they send each other in all-to-alls."""
        members = self._channel.members
        one, other = members.index(rank), members.index(other_rank)
        for call, theirs in zip(calls, self.batches[other_rank], strict=True):
            if not isinstance(call, AllToAll) or not isinstance(theirs, AllToAll):
                return
            parts = call.sent_numels[other], call.received_numels[other]
            their_parts = theirs.sent_numels[one], theirs.received_numels[one]
            if parts != their_parts[::-1]:
                with_parts = "{} with {} elements for rank {} and {} from it"
                raise MismatchedCollectiveError(
                    sequence=self.sequence,
                    rank=rank,
                    call=with_parts.format(text, parts[0], other_rank, parts[1]),
                    other_rank=other_rank,
                    other_call=with_parts.format(self.texts[other_rank], their_parts[0], rank, their_parts[1]),
                )

    def complete(self) -> None:
        ranks = self._channel.members
        for rank in ranks:
            for call, before in zip(self.batches[rank], self.inputs_at_launch[rank], strict=True):
                self._check_untouched(rank, _input(call), before)
        first = self.batches[ranks[0]]
        places = places_in_sums([call for call in first if isinstance(call, BufferCall)]) or [(0, 0)] * len(first)
        for position, place in enumerate(places):
            _execute(
                [self.batches[rank][position] for rank in ranks],
                [self.inputs_at_launch[rank][position] for rank in ranks],
                place,
            )
        self.is_complete, self.completed_s = True, time.perf_counter()
        self.batches.clear()
        self.inputs_at_launch.clear()

    def _check_untouched(self, rank: int, now: torch.Tensor, before: torch.Tensor) -> None:
        if not now.numel():
            return
        # Bits, not values: 0.0 == -0.0 and nan != nan would hide some writes and invent others.
        bits, bits_before = _bits(now), _bits(before)
        if not torch.equal(bits, bits_before):
            index = int((bits != bits_before).nonzero()[0]) // now.element_size()
            raise InFlightWriteError(sequence=self.sequence, rank=rank, call=self.texts[rank], index=index)


def _execute(calls: Sequence[Call], inputs: Sequence[torch.Tensor], place: tuple[int, int]) -> None:
    """Write the result of one collective to all ranks; ``calls[r]`` and ``inputs[r]`` belong to rank ``r`` of the group.

    Args:
        place: of the first element in the tensor that gloo would all-reduce, and the length of that tensor.
    """
    if isinstance(calls[0], AllToAll):
        _exchange_parts([call for call in calls if isinstance(call, AllToAll)], inputs)
    else:
        _combine([call for call in calls if isinstance(call, BufferCall)], inputs, place)


def _exchange_parts(calls: Sequence[AllToAll], inputs: Sequence[torch.Tensor]) -> None:
    parts = [sent.split(call.sent_numels) for call, sent in zip(calls, inputs, strict=True)]  # by source, then by destination
    for rank, call in enumerate(calls):
        for target, of_source in zip(call.received.detach().split(call.received_numels), parts, strict=True):
            target.copy_(of_source[rank])


def _combine(calls: Sequence[BufferCall], inputs: Sequence[torch.Tensor], place: tuple[int, int]) -> None:
    first = calls[0]
    if isinstance(first, Broadcast):
        result = inputs[first.root]
    elif isinstance(first, AllGather):
        result = torch.cat([shard.flatten() for shard in inputs])
    elif first.op is ReduceOp.MAX:
        result = inputs[0].clone()
        for addend in inputs[1:]:
            torch.maximum(result, addend, out=result)
    else:
        result = _sum_in_rank_order(inputs) if is_in_rank_order(first) else _sum_in_ring(inputs, *place)
        if first.op is ReduceOp.AVG:
            result /= len(calls)
    for rank, call in enumerate(calls):
        target = call.full.detach()
        if isinstance(call, ReduceScatter):
            numel, target = call.shard.numel(), call.shard.detach()
            target.copy_(result[rank * numel : (rank + 1) * numel])
        else:
            target.copy_(result)
        if isinstance(call, AllReduce | ReduceScatter) and call.divisor != 1:
            target.div_(call.divisor)


def _sum_in_rank_order(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    total = inputs[0].float() if inputs[0].itemsize == 2 else inputs[0].clone()
    for addend in inputs[1:]:
        total.add_(addend)
    return total


def _sum_in_ring(inputs: Sequence[torch.Tensor], start: int, numel: int) -> torch.Tensor:
    result = torch.empty_like(inputs[0])
    flat, parts = result.view(-1), [part.view(-1) for part in inputs]
    elements, itemsize = range(start, start + flat.numel()), flat.itemsize
    for at in ring_blocks(elements, numel=numel, itemsize_bytes=itemsize, num_ranks=len(parts), block_numel=flat.numel()):
        total, (first, *others) = flat[at.start : at.stop], [parts[rank][at.start : at.stop] for rank in at.ranks]
        total.copy_(first)
        for addend in others:
            total.add_(addend)
    return result


@dataclass(frozen=True, slots=True)
class _Channel:
    """The collectives of one group of ranks, on data or on control."""

    members: Sequence[int]
    compares_labels: bool  # not on control, where ranks in different calls meet to find that out
    collectives: list[_Collective] = field(default_factory=list)
    num_launched: Counter[int] = field(default_factory=Counter)  # by rank of the world


def _channels(members: Sequence[int]) -> tuple[_Channel, _Channel]:
    return _Channel(members, compares_labels=True), _Channel(members, compares_labels=False)


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
        self._waiting: defaultdict[_Collective, set[int]] = defaultdict(set)
        self._collectives: list[_Collective] = []
        self._schedules: list[list[str]] = [[] for _ in range(size)]
        self._channels = _channels(range(size))
        self._states: dict[int, RankState] = {}  # of the newest communicator of each rank
        self._in_subgroups: dict[int, list[_LoopbackCommunicator]] = {}
        self._failure: BaseException | None = None
        self._broken: Finding | None = None

    def communicator(self, rank: int, recorder: Recorder | None = None) -> Communicator:
        """Return the communicator of one rank; a second call for a rank continues its schedule.

        Raises:
            ValueError: the world has no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a world of {self.size} (ranks count from 0)")
        communicator = _LoopbackCommunicator(self, rank, self._channels, recorder)
        self._states[rank] = communicator.state
        for other in self._in_subgroups.get(rank, ()):
            other.share(communicator.state)
        return communicator

    def subgroup(self, ranks: Sequence[int]) -> dict[int, Communicator]:
        """Return the communicators of a new group of some ranks, by rank of the world.

        Its members count in the order given. Its collectives have an order of their own; numbers of collectives and ranks in
        errors are those of the world. Progress and recorder of a member are those of the newest communicator of its rank.

        Raises:
            ValueError: the world has no such rank, or a rank is given twice.
        """
        members = tuple(ranks)
        if not members or len(set(members)) < len(members) or not set(members) <= set(range(self.size)):
            raise ValueError(f"a group in a world of {self.size} needs different ranks of it, got {list(members)}")
        channels, made = _channels(members), dict[int, Communicator]()
        for position, rank in enumerate(members):
            made[rank] = communicator = _LoopbackCommunicator(self, position, channels)
            communicator.share(self._states.get(rank, communicator.state))
            self._in_subgroups.setdefault(rank, []).append(communicator)
        return made

    def break_off(self, error: Finding) -> None:
        """Refuse all further launches, and end waits for incomplete collectives with an error."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    @property
    def pending(self) -> tuple[int, ...]:
        """Sequence numbers of the incomplete collectives that all their ranks have launched."""
        return tuple(item.sequence for item in self._collectives if not item.missing and not item.is_complete)

    def schedule(self, rank: int) -> tuple[str, ...]:
        """Return the launches of a rank so far, in order."""
        return tuple(self._schedules[rank])

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

        The first error of any rank ends the waits of all others and is raised here. By then the ranks are at different places
        of the schedule, so the world cannot be used for another run.
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

    def _launch(self, rank: int, channel: _Channel, calls: Sequence[Call], label: str) -> _Collective:
        with self._changed:
            if self._broken is not None:
                raise self._broken.copy()
            position, known = channel.num_launched[rank], channel.collectives
            if position == len(known):
                known.append(_Collective(len(self._collectives), channel))
                self._collectives.append(known[-1])
            collective = known[position]
            collective.add(rank, calls, label)
            self._schedules[rank].append(collective.texts[rank])
            channel.num_launched[rank] += 1
            if not collective.missing:
                if self._completion == "immediate":
                    collective.complete()
                self._changed.notify_all()  # not at every launch: threads that are woken for nothing cost a switch each
        return collective

    def _wait(self, rank: int, collective: _Collective) -> None:
        with self._changed:
            if self._is_threaded:
                waiting = self._waiting[collective]
                try:
                    waiting.add(rank)
                    self._changed.wait_for(
                        lambda: self._failure or self._broken or not collective.missing or self._is_dead(collective),
                        self._timeout_s,
                    )
                finally:
                    waiting.discard(rank)
                    if not waiting:
                        self._waiting.pop(collective, None)
                if self._broken is not None and collective.missing:
                    raise self._broken.copy()
                if self._failure is not None and not collective.is_complete:
                    raise CollectiveError(
                        f"[rank {rank}] gave up waiting for collective {collective.sequence}: another rank failed with "
                        f"{type(self._failure).__name__}"
                    ) from self._failure
            if collective.is_complete:
                return
            if missing := sorted(collective.missing):
                raise CollectiveDeadlockError(
                    sequence=collective.sequence,
                    rank=rank,
                    call=collective.texts[rank],
                    missing_ranks=missing,
                    elsewhere="".join(
                        f"; rank {other} waits for collective {each.sequence} ({each.texts[other]})"
                        for each, waiting in self._waiting.items()
                        for other in sorted(waiting & collective.missing)
                    ),
                )
            collective.complete()
            self._changed.notify_all()

    def _is_dead(self, collective: _Collective) -> bool:
        """Whether a rank that has not launched a collective never will: it has returned, or waits for a dead collective itself.

        The last of the waits that depend on each other sees this first, and its error ends the others.
        """
        dead = {each for each in self._waiting if each.missing}
        while True:
            gone = self._returned_ranks.union(*(self._waiting[each] for each in dead))
            alive = {each for each in dead if each.missing.isdisjoint(gone)}
            if not alive:
                return collective in dead
            dead -= alive


class _LoopbackCommunicator(Communicator):
    def __init__(self, world: LoopbackWorld, rank: int, channels: Sequence[_Channel], recorder: Recorder | None = None) -> None:
        self.channel, *others = channels
        super().__init__(rank=rank, size=len(self.channel.members), recorder=recorder)
        self.world, self.members = world, self.channel.members
        if others:
            self.control = _LoopbackCommunicator(world, rank, others)
            self.control.launches = self.launches
            self.share(self.state)

    def share(self, state: RankState) -> None:
        """Take over the state of a rank, on both channels."""
        self.state, self.progress, self.recorders = state, state.progress, state.recorders
        if isinstance(control := self.control, _LoopbackCommunicator) and control is not self:
            control.share(state)

    def _handle(self, batch: Batch, record: CollectiveRecord, *, is_kept: bool) -> Handle:  # noqa: ARG002 - the port's
        return _LoopbackHandle(self, batch, record)

    def break_off(self, error: Finding) -> None:
        self.world.break_off(error)


class _LoopbackHandle(Handle):
    def __init__(self, owner: _LoopbackCommunicator, batch: Batch, record: CollectiveRecord) -> None:
        self._owner, self._batch, self._label = owner, batch, record.label
        self._rank = owner.members[owner.rank]
        self._collective: _Collective | None = None
        wants_time = any(recorder.records_time for recorder in owner.recorders.active)
        self._launch = Launch(record, clock=HostClock() if wants_time else None, on_moment=owner.recorders.on_moment)

    @property
    def is_started(self) -> bool:
        return self._collective is not None

    def start(self) -> None:
        if self._collective is not None:
            return
        owner = self._owner
        self._launch.note("launched")
        self._collective = owner.world._launch(self._rank, owner.channel, self._batch, self._label)
        owner.launches.last = next(owner.launches.numbers)
        for recorder in owner.recorders.active:
            recorder.record_launch(self._launch)

    def poll(self) -> bool:
        return self._collective is not None and self._collective.is_complete

    def has_arrived(self) -> bool:
        return self._collective is not None and not self._collective.missing

    def wait(self) -> None:
        if self._collective is None:
            raise CollectiveError(f"[rank {self._rank}] {self._label} was not launched, so there is nothing to wait for")
        self._launch.note("wait_start")
        self._owner.world._wait(self._rank, self._collective)
        self._launch.done = self._collective.completed_s
        self._launch.note("wait_stop")


@dataclass(slots=True)
class ListRecorder:
    """A recorder that keeps all launches, in order."""

    records_time: bool = True
    launches: list[Launch] = field(default_factory=list)

    @property
    def collectives(self) -> list[CollectiveRecord]:
        """The records of the launches."""
        return [launch.record for launch in self.launches]

    def record_launch(self, launch: Launch) -> None:
        """Keep a launch."""
        self.launches.append(launch)

    def enter_phase(self, step: int, phase: str) -> None:
        """Ignore it."""

    def note_ready(self, label: str) -> None:
        """Ignore it."""
