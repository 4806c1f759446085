"""Plans how a batch of calls runs on ``torch.distributed``: directly, or over gloo by exchanges that move less.

======================  =================================================================================================
reduce-scatter          every rank sends each other rank its part and adds the parts it receives: half the bytes of the
                        all-reduce that torch runs instead
the same in float32     of 16-bit gradients: also an exchange, on any back-end; the float32 sum is rounded once
small all-reduce        every rank sends its whole tensor to each other rank: one hop, where a ring takes two per rank
all-gather              every rank sends its part to each other rank; a larger one with three ranks or more is a broadcast of
                        each part, because gloo gathers into new memory and copies it
======================  =================================================================================================

The bits are always those of gloo's own collectives. Figures: docs/decisions/gloo.md.
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

_MOST_RANKS: Final = 8  # more ranks were not measured
_SMALL_BYTES: Final = 1 << 20
_SMALL_GATHER_BYTES: Final = 1 << 18
_BLOCK_NUMEL: Final = 1 << 16  # added at a time with three ranks or more, so that partial sums stay in the cache
_SEGMENT_BYTES: Final = 1 << 20  # gloo's default

Pair = tuple[torch.Tensor, torch.Tensor]
Operation = Callable[[], object]
"""One in-place operation, which is a single call in C."""


class Start(NamedTuple):
    """One collective: a method of a process group and its arguments."""

    method: str
    arguments: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    """Tensors that gloo's threads hold while it runs."""


class Plan:
    """The operations of one batch: copies, collectives, and in-place operations after these are complete.

    All ranks make the same plan.

    Collectives get aliases of tensors that C++ owns as well, so that gloo's threads never need the GIL to release them. A gloo
    thread drops its reference after the waiting thread has gone on. If Python were the only other owner, the drop would need
    the GIL: the thread would compete with backward for it, and at the end of the program it might never get it, which aborts
    the process ("terminate called without an active exception"). See docs/decisions/gloo.md.

    Args:
        is_gloo: whether works behave like gloo's: C++ threads hold their tensors, and a wait may time out without harm.
        is_kept: whether the batch, and with it the tensors, outlives the launch.
    """

    def __init__(self, *, rank: int, size: int, is_gloo: bool, is_kept: bool) -> None:
        self._rank, self._size = rank, size
        self.is_gloo, self.is_kept = is_gloo, is_kept
        self.accelerator: Accelerator | None = None
        """Of the device of the results; ``None`` on a host."""
        self.starts: list[Start] = []
        self.copies: list[Pair] = []
        """Targets and sources, before each launch."""
        self.after: list[Operation] = []
        self._views: list[torch.Tensor] = []  # own the aliases, in C++, as long as the plan lives

    def add_plain(self, calls: Sequence[Call], *, can_coalesce_gathers: bool = True) -> None:
        """Plan calls of one kind as torch's own collectives, as few as possible.

        Args:
            can_coalesce_gathers: false over gloo, where it corrupts the heap (docs/decisions/gloo.md).
        """
        alone = isinstance(calls[0], Broadcast) or (isinstance(calls[0], AllGather) and not can_coalesce_gathers)
        batches: dict[object, list[Call]] = {}
        for index, call in enumerate(calls):
            # Torch coalesces one reduce op and one dtype at a time.
            batches.setdefault(index if alone else (call.full.dtype, getattr(call, "op", None)), []).append(call)
        self.starts += [self._start_of(batch) for batch in batches.values()]
        self.after += divisions(calls)

    def add_in_fp32(self, calls: Sequence[ReduceScatter]) -> None:
        """Plan reduce-scatters of 16-bit parts that are added in float32, in rank order, and rounded once.

        It is an all-to-all, on any back-end. The bits do not depend on bucket sizes.
        """
        for call in calls:
            if Accelerator.of(call.full.device) is not None:
                self._add_in_one_kernel(call)
                continue
            parts = self._exchange(call)
            numel = call.shard.numel()
            block_numel = min(numel, _BLOCK_NUMEL)  # stays in the cache
            total = torch.empty(block_numel, dtype=torch.float32, device="cpu")
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
        """Add on a device, where few launches matter most. Its kernel decides the order of additions."""
        full, shard = call.full.data, call.shard.data
        received = torch.empty_like(full)
        self._add_all_to_all(full, received, [shard.nbytes] * self._size)
        total = torch.empty(shard.shape, dtype=torch.float32, device=full.device)
        add_up = torch.mean if call.op is ReduceOp.AVG else torch.sum
        self.after.append(partial(add_up, received.view(self._size, -1), 0, dtype=torch.float32, out=total))
        self.after.append(partial(torch.Tensor.copy_, shard, total))

    def add_for_gloo(self, calls: Sequence[Call], *, room_bytes: int | None = None) -> int:
        """Plan calls of one kind in the fastest way on gloo. Return the bytes of receive memory taken.

        Args:
            room_bytes: receive memory that an all-reduce may take; ``None``: no limit.
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
        # Gloo runs a reduce-scatter as clone, all-reduce and copy.
        in_place = [AllReduce(one.full, one.op, one.divisor) if isinstance(one, ReduceScatter) else one for one in calls]
        self.add_plain(in_place, can_coalesce_gathers=False)
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
                # The own part is sent, and the other part received, directly in the buffer.
                self._add_all_to_all(own, parts[1 - self._rank], self._sizes_of_two(own))
            elif full.nbytes <= _SMALL_GATHER_BYTES:
                sent = torch.empty_like(full)
                self.copies.append((sent.view(self._size, -1), own))
                self._add_all_to_all(sent, full, [own.nbytes] * self._size)
            else:
                self.starts += [self._start_of([Broadcast(part, root)]) for root, part in enumerate(parts)]

    def _exchange(self, call: ReduceScatter) -> list[torch.Tensor]:
        """Exchange the parts of one buffer; return the part of each rank for this rank's shard."""
        full, shard = call.full.data, call.shard.data
        if self._size == 2:
            # The own part is at one end, so the exchange, which would copy it, can leave it out.
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
        """Return the bytes that one of two ranks sends to each rank; its own part stays in place."""
        return [0, part.nbytes] if self._rank == 0 else [part.nbytes, 0]

    def _add_all_to_all(self, sent: torch.Tensor, received: torch.Tensor, sizes: Sequence[int]) -> None:
        """Exchange ``sizes`` bytes with the ranks, in rank order."""
        source, target = self._bytes_of(sent), self._bytes_of(received)
        arguments = (target, source, list(sizes), list(sizes), _options(c10d.AllToAllOptions))
        self.starts.append(Start("alltoall_base", arguments, (source, target)))

    def _start_of(self, calls: Sequence[Call]) -> Start:
        """Return one collective for calls of one kind, dtype and reduce op."""
        # Names of torch 2.11, which later versions keep as aliases.
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
        """Return an alias that is not a view for autograd, so that a view of it owns it in C++."""
        alias = tensor.data
        self._views.append(alias.view(-1))
        return alias

    def _bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of the bytes of a tensor: gloo supports neither bool (masks) nor int16."""
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


# Which calls are exchanges #


def can_exchange_among(num_ranks: int) -> bool:
    """Return whether collectives of ``num_ranks`` ranks may run as exchanges."""
    return 2 <= num_ranks <= _MOST_RANKS


def _room_bytes(call: AllReduce, *, size: int) -> int:
    """Return the bytes of send and receive memory of a small all-reduce."""
    return call.full.nbytes * (1 if size == 2 else 2 * size)


def _is_small(call: AllReduce, room_bytes: int | None, *, size: int) -> bool:
    if room_bytes is not None and _room_bytes(call, size=size) > room_bytes:
        return False
    # Kernels differ in whether a maximum keeps nan; integers have none.
    is_alike = call.op is not ReduceOp.MAX or not call.full.is_floating_point()
    return is_alike and 0 < call.full.nbytes <= _SMALL_BYTES


# Operations on received parts #


def divisions(calls: Iterable[Call], *, averages_over: int = 1, result: torch.Tensor | None = None) -> list[Operation]:
    """Return the operations that divide the results of reductions. No other code divides.

    Args:
        averages_over: number of ranks, if the collective has computed a sum where the call asks for a mean (``ReduceOp.AVG``).
        result: the tensor to divide; ``None``: the result of each call.
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
    """Return, for each call, its offset in the tensor that gloo would all-reduce, and the length of that tensor.

    Gloo all-reduces several tensors as one concatenated tensor, which determines the order of additions.
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
    """Yield the additions of the parts of all ranks, in gloo's order; the sum ends in this rank's part.

    Args:
        parts: by rank, 1D and of equal length; they are overwritten.
        start: offset of the parts in the tensor that gloo would all-reduce.
        numel: length of that tensor.
    """
    part_numel, num_ranks = parts[0].numel(), len(parts)
    block_numel = _BLOCK_NUMEL if num_ranks > 2 else max(part_numel, 1)  # a single addition needs no blocks
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
    """Yield the additions of the pieces of the ranks, in that order; the sum ends in the own piece."""
    total = pieces[0]
    for source, piece in zip(ranks[1:], pieces[1:], strict=True):
        if source == own_rank:
            total, piece = piece, total  # noqa: PLW2901 - swap the addends
        yield partial(add, total, piece)


# The order of additions in gloo's ring #


class Stretch(NamedTuple):
    """A range of elements that are added in the same order."""

    start: int
    """Relative to the first element of the caller."""
    stop: int
    ranks: tuple[int, ...]
    """In the order of the additions."""


def ring_blocks(elements: range, *, numel: int, itemsize_bytes: int, num_ranks: int, block_numel: int) -> Iterator[Stretch]:
    """Yield in which order gloo's ring adds some elements of an all-reduced tensor, relative to the first of them.

    Floating-point addition is not associative, so with three ranks or more the order decides the last bits. Gloo cuts a tensor
    into one chunk per rank, each made of whole segments. The values of chunk ``c`` start at the rank before ``c`` and travel
    down the ranks, each of which adds its own, until rank ``c`` has the sum (gloo/allreduce.cc, ``ring``). Addition is
    commutative, so the order of two addends does not matter.

    Args:
        numel: length of the tensor that gloo would all-reduce, of which these elements are a part.
        itemsize_bytes: of one element.
        block_numel: largest length of a stretch.

    >>> list(ring_blocks(range(6), numel=12, itemsize_bytes=4, num_ranks=3, block_numel=100))
    [Stretch(start=0, stop=4, ranks=(2, 1, 0)), Stretch(start=4, stop=6, ranks=(0, 2, 1))]
    """
    chunk_numel = max(elements.stop, 1)
    if num_ranks > 2:  # with two ranks there is only one order
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
    """Return the bytes of one chunk: at least two equal segments of at most 1 MiB, rounded up to whole elements."""
    longest = itemsize_bytes * max(1, _SEGMENT_BYTES // itemsize_bytes)
    num_segments = max(-(-total_bytes // longest), 2 * num_ranks)
    segments_per_rank = -(-num_segments // num_ranks)
    segment_bytes = -(-total_bytes // (segments_per_rank * num_ranks * itemsize_bytes)) * itemsize_bytes
    return segments_per_rank * segment_bytes
