"""Collectives of ranks on one host that read each other's memory. The bits are those of gloo's own collectives.

======================  =================================================================================================
reduce-scatter          each rank reads the others' values of its part, block by block, and adds them to its own
all-reduce              the same, then each rank reads the parts that the others have added up
all-gather              each rank reads the others' parts, each to its place
broadcast               each rank reads what the root has
======================  =================================================================================================

Here is what a rank reads, adds and divides. ``comm/background_reader.py`` does it, and sees to it that what is read is there,
and stays until it was read. See docs/decisions/reading-peers.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from megabucket.comm.gloo_paths import add, additions_of, divide, lies_in_place
from megabucket.comm.peer_memory import BLOCK_BYTES, PeerMemory
from megabucket.comm.plan import Operation, Pair, Read, Reading
from megabucket.comm.port import AllGather, AllReduce, Broadcast, Call, ReduceOp, ReduceScatter
from megabucket.comm.ring_order import blocks

LEAST_BYTES = 1 << 20
"""Of a batch that is read. Below, a gather of two ranks would take longer than torch's: tests/benchmarks/gloo_cost.py."""

_Step = tuple[Operation, Read | None]


def can_read(calls: Sequence[Call]) -> bool:
    """Whether a batch of like calls can be done by reading, and that is worth it. The same on all ranks."""
    return sum(call.full.nbytes for call in calls) >= LEAST_BYTES and all(_is_readable(call) for call in calls)


def _is_readable(call: Call) -> bool:
    if call.full.device.type != "cpu":
        return False
    if isinstance(call, ReduceScatter):
        return lies_in_place(call) and call.op is not ReduceOp.MAX and not call.in_fp32
    if isinstance(call, AllReduce):
        return call.op is not ReduceOp.MAX and call.full.is_floating_point()
    return isinstance(call, AllGather)


def own_copies(calls: Sequence[Call], *, rank: int, size: int) -> list[Pair]:
    """Return where gathers need this rank's own part, and where it is, as far as it is not there already."""
    parts = [(_part(call.full.data, rank, size=size), call.shard.data) for call in calls if isinstance(call, AllGather)]
    return [(target, source) for target, source in parts if target.data_ptr() != source.data_ptr()]


def _part(full: torch.Tensor, rank: int, *, size: int) -> torch.Tensor:
    """Return the part of a buffer that a rank adds up, or owns."""
    numel = full.numel()
    return full.view(-1)[rank * numel // size : (rank + 1) * numel // size]


# What ranks tell each other after each stage #

_FINE: Final = 0
_CANNOT_READ: Final = 1  # plus the rank that cannot be read


def word_of(reads: Sequence[Read], results: Sequence[object]) -> int:
    """Return how this rank fares.

    Args:
        results: what operations have returned so far, of which reads return numbers.
    """
    numbers = [result for result in results if isinstance(result, int)]
    failed = (read.rank for read, number in zip(reads, numbers, strict=False) if number != read.nbytes)
    rank = next(failed, None)
    return _FINE if rank is None else _CANNOT_READ + rank


def unread_ranks(words: Sequence[int]) -> dict[int, str]:
    """Return what is the matter with the ranks that others could not read. All ranks have heard the same.

    Args:
        words: by rank.
    """
    states: dict[int, str] = {}
    for reader, word in enumerate(words):
        if word >= _CANNOT_READ:
            states.setdefault(word - _CANNOT_READ, f"is there, but rank {reader} could not read its memory")
    return states


class ReadingPlan:
    """Plans how one rank does one batch. Operations know addresses only: who goes through them keeps the calls.

    Args:
        addresses: by rank, those of its calls.
    """

    def __init__(
        self, calls: Sequence[Call], memory: PeerMemory, addresses: Sequence[Sequence[int]], *, rank: int, size: int
    ) -> None:
        self._calls, self._memory, self._addresses = calls, memory, addresses
        self._rank, self._size = rank, size
        self._others = [(rank + hops) % size for hops in range(1, size)]

    def plan(self) -> Reading:
        """Return it."""
        stages: list[list[_Step]] = []
        if isinstance(self._calls[0], AllReduce | ReduceScatter):
            stages.append(list(self._sum_steps()))
        if isinstance(self._calls[0], AllReduce | AllGather):
            stages.append([step for index in range(len(self._calls)) for step in self._gather_steps(index)])
        if isinstance(self._calls[0], Broadcast):
            stages.append(list(self._copy_steps()))
        operations = [[operation for operation, _ in stage] for stage in stages]
        return Reading(operations, [read for stage in stages for _, read in stage if read is not None])

    def _part(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        return _part(full, rank, size=self._size)

    def _gather_steps(self, index: int) -> Iterator[_Step]:
        """Yield the reads that bring the parts of all other ranks, each to its place."""
        full = self._calls[index].full.data
        for rank in self._others:
            part = self._part(full, rank)
            offset_bytes = part.data_ptr() - full.data_ptr()
            yield from self._memory.read(part, rank, self._addresses[rank][index] + offset_bytes)

    def _copy_steps(self) -> Iterator[_Step]:
        """Yield the reads that bring what the roots of broadcasts have."""
        for index, call in enumerate(self._calls):
            if isinstance(call, Broadcast) and call.root != self._rank:
                yield from self._memory.read(call.full.data, call.root, self._addresses[call.root][index])

    def _sum_steps(self) -> Iterator[_Step]:
        """Yield the reads, additions and divisions that leave the result in this rank's part."""
        calls = [call for call in self._calls if isinstance(call, AllReduce | ReduceScatter)]
        # Where gloo all-reduces several tensors as one, their order of addition is that of all of them, end to end.
        numels: dict[tuple[torch.dtype, ReduceOp], int] = {}
        starts = []
        for call in calls:
            starts.append(numels.get((call.full.dtype, call.op), 0))
            numels[call.full.dtype, call.op] = starts[-1] + call.full.numel()
        for index, call in enumerate(calls):
            addresses = [of_rank[index] for of_rank in self._addresses]
            yield from self._sum_of_call(call, addresses, start=starts[index], numel=numels[call.full.dtype, call.op])

    def _sum_of_call(
        self, call: AllReduce | ReduceScatter, addresses: Sequence[int], *, start: int, numel: int
    ) -> Iterator[_Step]:
        full = call.full.data.view(-1)
        own, itemsize = self._part(full, self._rank), full.element_size()
        divisors = [divisor for divisor in (self._size if call.op is ReduceOp.AVG else 1.0, call.divisor) if divisor != 1]
        offset = (own.data_ptr() - full.data_ptr()) // itemsize
        for block in blocks(
            start=start + offset,
            stop=start + offset + own.numel(),
            numel=numel,
            itemsize_bytes=itemsize,
            num_ranks=self._size,
            block_numel=BLOCK_BYTES // itemsize,
        ):
            pieces = []
            for rank in block.ranks:
                piece = own[block.start : block.stop]
                if rank != self._rank:
                    piece = self._memory.block(rank, full.dtype)[: piece.numel()]
                    address = addresses[rank] + (offset + block.start) * itemsize
                    yield from self._memory.read(piece, rank, address)
                pieces.append(piece)
            for pair in additions_of(pieces, block.ranks, own_rank=self._rank):
                yield (add, [pair]), None
            for divisor in divisors:
                yield (divide, [(own[block.start : block.stop], divisor)]), None
