"""How a batch of calls becomes calls of ``torch.distributed``: as they are, or over gloo in ways that move less.

======================  =================================================================================================
reduce-scatter          every rank sends each other one its part, and adds up what it has received: half the bytes of the
                        all-reduce that gloo makes of it
the same in float32     of 16-bit gradients: also an exchange, on any back-end; what is added up is rounded once
small all-reduce        every rank sends all it has to each other one: one hop where a ring takes two for each rank
all-gather              every rank sends each other one its part; larger ones with three ranks or more are a broadcast of each
                        part: gloo gathers into memory of its own and copies that
======================  =================================================================================================

The bits are those of gloo's own collectives, whatever the way: docs/decisions/gloo-exchanges.md, also for figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megabucket.comm.communicator import AllGather, AllReduce, Broadcast, Call, ReduceOp, ReduceScatter
from megabucket.comm.device import Accelerator

_MOST_RANKS: Final = 8  # with more it has not been measured
_SMALL_BYTES: Final = 1 << 20
_SMALL_GATHER_BYTES: Final = 1 << 18
_BLOCK_NUMEL: Final = 1 << 16  # added up at a time from three ranks on, so that partial sums stay in the cache
_SEGMENT_BYTES: Final = 1 << 20  # gloo's default

Pair = tuple[torch.Tensor, torch.Tensor]
Operation = Callable[[], object]
"""One operation in place, as a call in C."""


class Start(NamedTuple):
    """One collective: a method of a process group and its arguments."""

    method: str
    arguments: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    """What threads of gloo hold while it runs."""


class Plan:
    """What is done for one batch: copies, collectives, and in-place operations when these are complete.

    All ranks make the same one.

    Collectives get aliases of tensors that C++ owns, too, so that gloo's threads never need Python's lock to let go of them.
    A gloo thread drops its reference after the waiting thread went on. If only Python owned the tensor besides, the drop would
    need the lock: the thread competes with backward for it, and at the end of the program it may never get it, which
    aborts the process ("terminate called without an active exception"). See docs/decisions/gloo-tensors.md.

    Args:
        is_gloo: whether works behave as gloo's do: threads of C++ hold their tensors, and a wait may time out without harm.
        is_kept: whether the batch, and with it the tensors, outlives the launch.
    """

    def __init__(self, *, rank: int, size: int, is_gloo: bool, is_kept: bool) -> None:
        self._rank, self._size = rank, size
        self.is_gloo, self.is_kept = is_gloo, is_kept
        self.accelerator: Accelerator | None = None
        """Of the device that the results are on, if it has a queue."""
        self.starts: list[Start] = []
        self.copies: list[Pair] = []
        """Targets and sources, before each launch."""
        self.after: list[Operation] = []
        self._views: list[torch.Tensor] = []  # own the aliases, in C++, as long as the plan lives

    def add_plain(self, calls: Sequence[Call], *, can_coalesce_gathers: bool = True) -> None:
        """Do what like calls say, in as few collectives as torch allows.

        Args:
            can_coalesce_gathers: not over gloo, whose heap a coalesced gather breaks (docs/decisions/gloo-coalesced-gather.md).
        """
        alone = isinstance(calls[0], Broadcast) or (isinstance(calls[0], AllGather) and not can_coalesce_gathers)
        batches: dict[object, list[Call]] = {}
        for index, call in enumerate(calls):
            # Torch coalesces one reduce op and one dtype at a time.
            batches.setdefault(index if alone else (call.full.dtype, getattr(call, "op", None)), []).append(call)
        self.starts += [self._start_of(batch) for batch in batches.values()]
        self.after += divisions(calls)

    def add_in_fp32(self, calls: Sequence[ReduceScatter]) -> None:
        """Do reduce-scatters whose 16-bit parts are added up in float32, in rank order, and rounded once.

        On any back-end: it is an all-to-all, and the same bits whatever the size of a bucket is.
        """
        for call in calls:
            if Accelerator.of(call.full.device) is not None:
                self._add_in_one_kernel(call)
                continue
            parts = self._exchange(call)
            numel = call.shard.numel()
            block_numel = min(numel, _BLOCK_NUMEL)  # which stays in the cache
            total = torch.empty(block_numel, dtype=torch.float32)
            for first in range(0, numel, block_numel):
                pieces = [part[first : first + block_numel] for part in parts]
                sum_of_block = total[: pieces[0].numel()]
                self.after.append(partial(torch.Tensor.copy_, sum_of_block, pieces[0]))
                self.after += [partial(torch.Tensor.add_, sum_of_block, piece) for piece in pieces[1:]]
                if call.op is ReduceOp.AVG:
                    self.after.append(partial(torch.Tensor.div_, sum_of_block, self._size))
                self.after.append(partial(torch.Tensor.copy_, pieces[self._rank], sum_of_block))
        self.after += divisions(calls)

    def _add_in_one_kernel(self, call: ReduceScatter) -> None:
        """Add up on a device, where it is launches that cost, and its kernel decides on the order."""
        full, shard = call.full.data, call.shard.data
        received = torch.empty_like(full)
        self._add_all_to_all(full, received, [shard.nbytes] * self._size)
        total = torch.empty(shard.shape, dtype=torch.float32, device=full.device)
        add_up = torch.mean if call.op is ReduceOp.AVG else torch.sum
        self.after.append(partial(add_up, received.view(self._size, -1), 0, dtype=torch.float32, out=total))
        self.after.append(partial(torch.Tensor.copy_, shard, total))

    def add_for_gloo(self, calls: Sequence[Call], *, room_bytes: int | None = None) -> int:
        """Do what is best for like calls on gloo. Return the bytes taken of the room.

        Args:
            room_bytes: what an all-reduce may take to receive in; ``None``: whatever it needs.
        """
        first = calls[0]
        if can_exchange_among(self._size):
            if isinstance(first, AllGather):
                self._add_gathers([call for call in calls if isinstance(call, AllGather)])
                return 0
            if isinstance(first, ReduceScatter) and first.op is not ReduceOp.MAX:
                self._add_scatters([call for call in calls if isinstance(call, ReduceScatter)])
                return 0
            if isinstance(first, AllReduce) and len(calls) == 1 and _is_small(first, room_bytes, size=self._size):
                self._add_small(first)
                return 0 if room_bytes is None else _room_bytes(first, size=self._size)
        self.add_plain([_in_place(call) for call in calls], can_coalesce_gathers=False)
        return 0

    def _add_scatters(self, calls: Sequence[ReduceScatter]) -> None:
        for call, (first, numel) in zip(calls, places_in_sums(calls), strict=True):
            start = first + self._rank * call.shard.numel()
            self.after += _additions(self._exchange(call), rank=self._rank, start=start, numel=numel)
        self.after += divisions(calls, averages_over=self._size)

    def _add_small(self, call: AllReduce) -> None:
        full = call.full.data.view(-1)
        if self._size == 2:
            parts = self._exchange_of_two(full, full)
        else:
            sent, received = torch.empty(2, self._size, full.numel(), dtype=full.dtype, device=full.device)
            self.copies.append((sent, full))
            parts = self._exchange_parts(sent, received, full)
        combine = torch.Tensor.clamp_min_ if call.op is ReduceOp.MAX else torch.Tensor.add_
        self.after += _additions(parts, rank=self._rank, start=0, numel=full.numel(), add=combine)
        self.after += divisions([call], averages_over=self._size)

    def _add_gathers(self, calls: Sequence[AllGather]) -> None:
        for call in calls:
            full = call.full.data.view(-1).view(torch.uint8)
            parts = full.view(self._size, -1).unbind()
            own = parts[self._rank]
            if self._size == 2:
                # The own part is sent, and the other one received, in its place.
                self._add_all_to_all(own, parts[1 - self._rank], self._sizes_of_two(own))
            elif full.nbytes <= _SMALL_GATHER_BYTES:
                sent = torch.empty_like(full)
                self.copies.append((sent.view(self._size, -1), own))
                self._add_all_to_all(sent, full, [own.nbytes] * self._size)
            else:
                self.starts += [self._start_of([Broadcast(part, root)]) for root, part in enumerate(parts)]

    def _exchange(self, call: ReduceScatter) -> list[torch.Tensor]:
        """Exchange the parts of one buffer, and return what each rank has sent for this rank's shard."""
        full, shard = call.full.data, call.shard.data
        if self._size == 2:
            # The own part is at one end, so it can stay out of the exchange, which would copy it.
            return self._exchange_of_two(full[shard.numel() :] if self._rank == 0 else full[: shard.numel()], shard)
        return self._exchange_parts(full, torch.empty_like(full), shard)

    def _exchange_of_two(self, sent: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        received = torch.empty_like(own)
        self._add_all_to_all(sent, received, self._sizes_of_two(own))
        return [own, received] if self._rank == 0 else [received, own]

    def _exchange_parts(self, sent: torch.Tensor, received: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        self._add_all_to_all(sent, received, [own.nbytes] * self._size)
        parts = list(received.view(self._size, -1).unbind())
        parts[self._rank] = own
        return parts

    def _sizes_of_two(self, part: torch.Tensor) -> list[int]:
        """Return the bytes that a rank of two sends to each, if its own part stays where it is."""
        return [0, part.nbytes] if self._rank == 0 else [part.nbytes, 0]

    def _add_all_to_all(self, sent: torch.Tensor, received: torch.Tensor, sizes: Sequence[int]) -> None:
        """Exchange so many bytes with each rank, in rank order."""
        source, target = self._bytes_of(sent), self._bytes_of(received)
        arguments = (target, source, list(sizes), list(sizes), _options(c10d.AllToAllOptions))
        self.starts.append(Start("alltoall_base", arguments, (source, target)))

    def _start_of(self, calls: Sequence[Call]) -> Start:
        """Return one collective for calls of one kind, dtype and reduce op."""
        # Names of torch 2.11, which later ones keep beside their own.
        first, is_one = calls[0], len(calls) == 1
        if isinstance(first, Broadcast):
            tensor = self._bytes_of(first.full)
            return Start("broadcast", ([tensor], _options(c10d.BroadcastOptions, root=first.root)), (tensor,))
        fulls = [self._alias(call.full) for call in calls]
        if isinstance(first, AllReduce):
            options = _options(c10d.AllreduceOptions if is_one else c10d.AllreduceCoalescedOptions, op=first.op)
            return Start("allreduce" if is_one else "allreduce_coalesced", (fulls, options), tuple(fulls))
        shards = [self._alias(call.shard) for call in calls if isinstance(call, AllGather | ReduceScatter)]
        if isinstance(first, AllGather):
            options, places = _options(c10d.AllgatherOptions), (fulls, shards)
            method = "_allgather_base" if is_one else "allgather_into_tensor_coalesced"
        else:
            options, places = _options(c10d.ReduceScatterOptions, op=first.op), (shards, fulls)
            method = "_reduce_scatter_base" if is_one else "reduce_scatter_tensor_coalesced"
        return Start(method, (*(place[0] if is_one else place for place in places), options), (*fulls, *shards))

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same memory as a tensor that is no view in autograd's sense, so that a view of it owns it."""
        alias = tensor.data
        self._views.append(alias.view(-1))
        return alias

    def _bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of the bytes of a tensor: gloo knows neither bool (masks) nor int16."""
        is_bytes = tensor.dtype == torch.uint8 and tensor.dim() == 1
        return self._alias(tensor if is_bytes else tensor.view(-1).view(torch.uint8))


def _options(kind: Callable[[], Any], *, op: ReduceOp | None = None, root: int = 0) -> Any:
    options = kind()
    options.asyncOp = True
    if op is not None:
        options.reduceOp = getattr(dist.ReduceOp, op.name)
    if root:
        options.rootRank = root
    return options


# What is done how #


def can_exchange_among(num_ranks: int) -> bool:
    """Whether so many ranks do collectives in ways of their own."""
    return 2 <= num_ranks <= _MOST_RANKS


def _in_place(call: Call) -> Call:
    """Return an all-reduce for a reduce-scatter: gloo would clone, reduce and copy."""
    return AllReduce(call.full, call.op, call.divisor) if isinstance(call, ReduceScatter) else call


def _room_bytes(call: AllReduce, *, size: int) -> int:
    """Return what a small all-reduce takes to send from and to receive in."""
    return call.full.nbytes * (1 if size == 2 else 2 * size)


def _is_small(call: AllReduce, room_bytes: int | None, *, size: int) -> bool:
    if room_bytes is not None and _room_bytes(call, size=size) > room_bytes:
        return False
    # nan is lost or kept by different kernels; integers have none.
    is_alike = call.op is not ReduceOp.MAX or not call.full.is_floating_point()
    return is_alike and 0 < call.full.nbytes <= _SMALL_BYTES


# What is done with what was sent #


def divisions(calls: Iterable[Call], *, averages_over: int = 1, result: torch.Tensor | None = None) -> list[Operation]:
    """Return what divides the results of reductions. No other code divides.

    Args:
        averages_over: number of ranks, where a mean (``ReduceOp.AVG``) is asked for and only a sum was made.
        result: divided in place of the whole results.
    """
    operations: list[Operation] = []
    for call in calls:
        if isinstance(call, AllReduce | ReduceScatter):
            divisor = call.divisor * (averages_over if call.op is ReduceOp.AVG else 1)
            whole = call.shard if isinstance(call, ReduceScatter) else call.full
            if divisor != 1:
                operations.append(partial(torch.Tensor.div_, whole.data if result is None else result, divisor))
    return operations


def places_in_sums(calls: Sequence[Call]) -> list[tuple[int, int]]:
    """Return where each call begins in the tensor that gloo would all-reduce, and how many elements that one has.

    Gloo all-reduces several tensors as one, whose order of addition is that of all of them, end to end.
    """
    keys = [(call.full.dtype, getattr(call, "op", None)) for call in calls]
    starts, numels = [], dict.fromkeys(keys, 0)
    for key, call in zip(keys, calls, strict=True):
        starts.append(numels[key])
        numels[key] += call.full.numel()
    return [(start, numels[key]) for start, key in zip(starts, keys, strict=True)]


def _additions(
    parts: Sequence[torch.Tensor],
    *,
    rank: int,
    start: int,
    numel: int,
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.Tensor.add_,
) -> Iterator[Operation]:
    """Yield what adds up what each rank has sent, in gloo's order, at last in this rank's part.

    Args:
        parts: by rank, 1D and of equal length; they are written to.
        start: where the parts lie in the tensor that gloo would all-reduce.
        numel: of that tensor.
    """
    part_numel, num_ranks = parts[0].numel(), len(parts)
    block_numel = _BLOCK_NUMEL if num_ranks > 2 else max(part_numel, 1)  # one addition passes over memory once
    elements, itemsize = range(start, start + part_numel), parts[0].element_size()
    for block in ring_blocks(elements, numel=numel, itemsize_bytes=itemsize, num_ranks=num_ranks, block_numel=block_numel):
        pieces = [parts[source][block.start : block.stop] for source in block.ranks]
        yield from additions_of(pieces, block.ranks, own_rank=rank, add=add)


def additions_of(
    pieces: Sequence[torch.Tensor],
    ranks: Sequence[int],
    *,
    own_rank: int,
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.Tensor.add_,
) -> Iterator[Operation]:
    """Yield what adds up the pieces of the ranks, in that order, at last in the own one."""
    total = pieces[0]
    for source, piece in zip(ranks[1:], pieces[1:], strict=True):
        if source == own_rank:
            total, piece = piece, total  # noqa: PLW2901 - the two addends change places
        yield partial(add, total, piece)


# In which order gloo's ring adds #


class Stretch(NamedTuple):
    """Neighbouring elements that are added in one order."""

    start: int
    """First element, counted from where the caller starts."""
    stop: int
    ranks: tuple[int, ...]
    """In the order in which their values are added."""


def ring_blocks(elements: range, *, numel: int, itemsize_bytes: int, num_ranks: int, block_numel: int) -> Iterator[Stretch]:
    """Yield how gloo's ring adds some elements of an all-reduced tensor, counted from the first of them.

    Floating-point addition does not associate, so from three ranks on the order decides the last bits. Gloo cuts a tensor into
    as many chunks as there are ranks, each made of whole segments. The values of chunk ``c`` start at the rank before ``c`` and
    travel down the ranks, each of which adds its own, until rank ``c`` has the sum (gloo/allreduce.cc, ``ring``). It makes no
    difference which of two addends comes first.

    Args:
        numel: of the tensor that gloo would all-reduce, of which these elements are a part.
        itemsize_bytes: of one element.
        block_numel: elements in one stretch at most.

    >>> list(ring_blocks(range(6), numel=12, itemsize_bytes=4, num_ranks=3, block_numel=100))
    [Stretch(start=0, stop=4, ranks=(2, 1, 0)), Stretch(start=4, stop=6, ranks=(0, 2, 1))]
    """
    chunk_numel = max(elements.stop, 1)
    if num_ranks > 2:  # one addition has one order
        chunk_numel = _chunk_bytes(numel * itemsize_bytes, itemsize_bytes, num_ranks) // itemsize_bytes
    first = elements.start
    while first < elements.stop:
        chunk = first // chunk_numel
        last = min((chunk + 1) * chunk_numel, elements.stop)
        ranks = tuple((chunk - hops) % num_ranks for hops in range(1, num_ranks + 1)) if num_ranks > 2 else (0, 1)
        for block in range(first, last, block_numel):
            yield Stretch(block - elements.start, min(block + block_numel, last) - elements.start, ranks)
        first = last


def _chunk_bytes(total_bytes: int, itemsize_bytes: int, num_ranks: int) -> int:
    """Return the bytes of one rank's chunk: at least two segments of at most a MiB, all equal, rounded up to whole elements."""
    longest = itemsize_bytes * max(1, _SEGMENT_BYTES // itemsize_bytes)
    num_segments = max(-(-total_bytes // longest), 2 * num_ranks)
    segments_per_rank = -(-num_segments // num_ranks)
    segment_bytes = -(-total_bytes // (segments_per_rank * num_ranks * itemsize_bytes)) * itemsize_bytes
    return segments_per_rank * segment_bytes
