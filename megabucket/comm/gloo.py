"""Plans how a batch of calls runs on gloo: directly, or by exchanges that move less.

======================  =================================================================================================
reduce-scatter          every rank sends each other rank its part and adds the parts it receives: half the bytes of the
                        all-reduce that torch runs instead
small all-reduce        every rank sends its whole tensor to each other rank: one hop, where a ring takes two per rank
all-gather              every rank sends its part to each other rank; a larger one with three ranks or more is a broadcast of
                        each part, because gloo gathers into new memory and copies it
======================  =================================================================================================

The bits are always those of gloo's own collectives. Figures: docs/decisions/gloo.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from megabucket.comm.communicator import AllGather, AllReduce, Broadcast, BufferCall, Call, ReduceOp, ReduceScatter
from megabucket.comm.plan import BLOCK_NUMEL, Operation, Plan, additions_of, divisions

_MOST_RANKS: Final = 8  # more ranks were not measured
_SMALL_BYTES: Final = 1 << 20
_SMALL_GATHER_BYTES: Final = 1 << 18
_SEGMENT_BYTES: Final = 1 << 20  # gloo's default


class GlooPlan(Plan):
    """A plan for gloo: exchanges where they are faster, torch's own collectives otherwise."""

    room_bytes = 0
    """Receive memory that was taken from the room of its channel."""

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
                self._add_exchange(own, parts[1 - self._rank], self._sizes_of_two(own))
            elif full.nbytes <= _SMALL_GATHER_BYTES:
                sent = torch.empty_like(full)
                self.copies.append((sent.view(self._size, -1), own))
                self._add_exchange(sent, full, [own.nbytes] * self._size)
            else:
                self.starts += [self._start_of([Broadcast(part, root)]) for root, part in enumerate(parts)]


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


# Sums of received parts #


def places_in_sums(calls: Sequence[BufferCall]) -> list[tuple[int, int]]:
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
    block_numel = BLOCK_NUMEL if num_ranks > 2 else max(part_numel, 1)  # a single addition needs no blocks
    elements, itemsize = range(start, start + part_numel), parts[0].element_size()
    for block in ring_blocks(elements, numel=numel, itemsize_bytes=itemsize, num_ranks=num_ranks, block_numel=block_numel):
        pieces = [parts[source][block.start : block.stop] for source in block.ranks]
        yield from additions_of(pieces, block.ranks, own_rank=rank, add=add)


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


def rank_blocks(numel: int, *, num_ranks: int, block_numel: int) -> Iterator[Stretch]:
    """Yield stretches of ``block_numel`` elements at most that are added in rank order."""
    for start in range(0, numel, block_numel):
        yield Stretch(start, min(start + block_numel, numel), tuple(range(num_ranks)))


def _chunk_bytes(total_bytes: int, itemsize_bytes: int, num_ranks: int) -> int:
    """Return the bytes of one chunk: at least two equal segments of at most 1 MiB, rounded up to whole elements."""
    longest = itemsize_bytes * max(1, _SEGMENT_BYTES // itemsize_bytes)
    num_segments = max(-(-total_bytes // longest), 2 * num_ranks)
    segments_per_rank = -(-num_segments // num_ranks)
    segment_bytes = -(-total_bytes // (segments_per_rank * num_ranks * itemsize_bytes)) * itemsize_bytes
    return segments_per_rank * segment_bytes
