"""How a batch of collectives is done over gloo. The bits are those of gloo's own collectives, whatever the way.

======================  =================================================================================================
reduce-scatter          every rank sends each other one its part, and adds up what it has received: half the bytes of the
                        all-reduce that gloo makes of it
the same in float32     of 16-bit gradients: also an exchange, on any back-end; what is added up is rounded once
small all-reduce        every rank sends all it has to each other one: one hop where a ring takes two for each rank
all-gather              every rank sends each other one its part; larger ones with three ranks or more are a broadcast of each
                        part: gloo gathers into memory of its own and copies that
======================  =================================================================================================

The additions are made by whoever waits: see docs/decisions/gloo-exchanges.md, also for figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from megabucket.comm.plan import AllToAll, Anchor, Operation, Pair, Plan, Start, as_bytes
from megabucket.comm.port import AllGather, AllReduce, Broadcast, Call, ReduceOp, ReduceScatter
from megabucket.comm.ring_order import blocks

_MOST_RANKS: Final = 8  # with more it has not been measured
_SMALL_BYTES: Final = 1 << 20
_SMALL_GATHER_BYTES: Final = 1 << 18
_BLOCK_NUMEL: Final = 1 << 16  # added up at a time from three ranks on, so that partial sums stay in the cache

add, _copy, divide, _take_larger = torch.Tensor.add_, torch.Tensor.copy_, torch.Tensor.div_, torch.Tensor.clamp_min_


def plain_plan(calls: Sequence[Call], *, is_anchored: bool) -> Plan:
    """Return the plan that does what the calls say.

    Args:
        is_anchored: whether the tensors handed over shall be owned by C++, too.
    """
    calls = [Broadcast(as_bytes(call.full), call.root) if isinstance(call, Broadcast) else call for call in calls]
    if not is_anchored:
        return Plan(calls)
    anchor = Anchor()
    return Plan([_anchored(call, anchor) for call in calls], keeps=anchor.views)


_Empty = Callable[[torch.Tensor], torch.Tensor]


def can_exchange_among(num_ranks: int) -> bool:
    """Whether so many ranks do collectives in ways of their own."""
    return num_ranks <= _MOST_RANKS


def gloo_plan(
    calls: Sequence[Call], *, rank: int, size: int, room_bytes: int | None = None, empty: _Empty = torch.empty_like
) -> Plan:
    """Return the plan that is best for a batch of like calls on gloo. All ranks make the same one.

    Args:
        room_bytes: what an all-reduce may take to receive in; ``None``: whatever it needs.
        empty: returns memory like a tensor, for what a reduce-scatter receives.
    """
    anchor = Anchor()
    first = calls[0]
    if can_exchange_among(size):
        if isinstance(first, AllGather):
            return _gather_plan([call for call in calls if isinstance(call, AllGather)], anchor, rank=rank, size=size)
        if isinstance(first, ReduceScatter) and all(_can_exchange(call) for call in calls):
            return _scatter_plan(
                [call for call in calls if isinstance(call, ReduceScatter)], anchor, empty, rank=rank, size=size
            )
        if isinstance(first, AllReduce) and len(calls) == 1 and _is_small(first, room_bytes, size=size):
            return _small_plan(first, anchor, rank=rank, size=size)
    return plain_plan([_in_place(call) for call in calls], is_anchored=True)


# Reduce-scatter #


def lies_in_place(call: ReduceScatter) -> bool:
    """Whether the shard is this rank's part of the buffer itself."""
    start, shard = call.full.data_ptr(), call.shard.data_ptr()
    return start <= shard < start + call.full.nbytes


def _can_exchange(call: Call) -> bool:
    return isinstance(call, ReduceScatter) and not call.in_place and call.op is not ReduceOp.MAX and lies_in_place(call)


def _in_place(call: Call) -> Call:
    """Return an all-reduce for a reduce-scatter whose shard lies in the buffer: gloo would clone, reduce and copy."""
    return AllReduce(call.full, call.op) if isinstance(call, ReduceScatter) and lies_in_place(call) else call


def _scatter_plan(calls: Sequence[ReduceScatter], anchor: Anchor, empty: _Empty, *, rank: int, size: int) -> Plan:
    starts: list[Start] = []
    combined: list[Pair] = []
    # Where gloo all-reduces several tensors as one, their order of addition is that of all of them, end to end.
    numels: dict[tuple[torch.dtype, ReduceOp], int] = {}
    for call in calls:
        numels[call.full.dtype, call.op] = numels.get((call.full.dtype, call.op), 0) + call.full.numel()
    before = dict.fromkeys(numels, 0)
    for call in calls:
        key = call.full.dtype, call.op
        start, parts = _exchange(call, anchor, empty, rank=rank, size=size)
        starts.append(start)
        offset = before[key] + rank * call.shard.numel()
        combined += _additions(parts, rank=rank, start=offset, numel=numels[key])
        before[key] += call.full.numel()
    divided = [(call.shard.data, size) for call in calls if call.op is ReduceOp.AVG]
    return Plan(starts, after=[(add, combined), (divide, divided)], keeps=anchor.views)


def _exchange(
    call: ReduceScatter, anchor: Anchor, empty: _Empty, *, rank: int, size: int
) -> tuple[AllToAll, list[torch.Tensor]]:
    """Return the exchange of the parts of one buffer, and what each rank has sent for this rank's shard."""
    full, shard = call.full.data, call.shard.data
    numel, nbytes = shard.numel(), shard.nbytes
    if size == 2:
        # The own part is at one end, so it can stay out of the exchange, which would copy it.
        other = full[numel:] if rank == 0 else full[:numel]
        received = empty(shard)
        sizes = [0, nbytes] if rank == 0 else [nbytes, 0]
        parts = [shard, received] if rank == 0 else [received, shard]
        return AllToAll(anchor.bytes_of(other), anchor.bytes_of(received), sizes, sizes), parts
    received = empty(full)
    parts = list(received.view(size, numel).unbind())
    parts[rank] = shard
    sizes = [nbytes] * size
    return AllToAll(anchor.bytes_of(full), anchor.bytes_of(received), sizes, sizes), parts


def _additions(parts: Sequence[torch.Tensor], *, rank: int, start: int, numel: int) -> Iterator[Pair]:
    """Yield targets and addends: what each rank has sent is added up in gloo's order, at last in this rank's part.

    Args:
        parts: by rank, 1D and of equal length; they are written to.
        start: where the parts lie in the tensor that gloo would all-reduce.
        numel: of that tensor.
    """
    part_numel, itemsize_bytes, num_ranks = parts[0].numel(), parts[0].element_size(), len(parts)
    stop = start + part_numel
    block_numel = _BLOCK_NUMEL if num_ranks > 2 else max(part_numel, 1)  # one addition passes over memory once
    order = {"numel": numel, "itemsize_bytes": itemsize_bytes, "num_ranks": num_ranks, "block_numel": block_numel}
    for block in blocks(start=start, stop=stop, **order):
        pieces = [parts[source][block.start : block.stop] for source in block.ranks]
        yield from additions_of(pieces, block.ranks, own_rank=rank)


def additions_of(pieces: Sequence[torch.Tensor], ranks: Sequence[int], *, own_rank: int) -> Iterator[Pair]:
    """Yield targets and addends that add up the pieces of the ranks, in that order, at last in the own one."""
    total = pieces[0]
    for source, piece in zip(ranks[1:], pieces[1:], strict=True):
        if source == own_rank:
            total, piece = piece, total  # noqa: PLW2901 - the two addends change places
        yield total, piece


def fp32_plan(calls: Sequence[ReduceScatter], *, rank: int, size: int) -> Plan:
    """Return the plan of reduce-scatters whose 16-bit parts are added up in float32, in rank order, and rounded once.

    On any back-end: it is an all-to-all, and the same bits whatever the size of a bucket is.
    """
    anchor = Anchor()
    starts: list[Start] = []
    after: list[Operation] = []
    for call in calls:
        start, parts = _exchange(call, anchor, torch.empty_like, rank=rank, size=size)
        starts.append(start)
        numel = call.shard.numel()
        # On a device one kernel for each part; on a host in blocks that stay in the cache.
        block_numel = numel if call.full.is_cuda else min(numel, _BLOCK_NUMEL)
        total = torch.empty(block_numel, dtype=torch.float32, device=call.full.device)
        for first in range(0, numel, block_numel):
            pieces = [part[first : first + block_numel] for part in parts]
            sum_of_block = total[: pieces[0].numel()]
            after.append((_copy, [(sum_of_block, pieces[0])]))
            after.append((add, [(sum_of_block, piece) for piece in pieces[1:]]))
            if call.op is ReduceOp.AVG:
                after.append((divide, [(sum_of_block, size)]))
            after.append((_copy, [(pieces[rank], sum_of_block)]))
    return Plan(starts, after=after, keeps=anchor.views)


# All-reduce #


def small_room_bytes(call: AllReduce, *, size: int) -> int:
    """Return what a small all-reduce takes to send from and to receive in."""
    return call.tensor.nbytes * (1 if size == 2 else 2 * size)


def _is_small(call: AllReduce, room_bytes: int | None, *, size: int) -> bool:
    if room_bytes is not None and small_room_bytes(call, size=size) > room_bytes:
        return False
    # nan is lost or kept by different kernels; integers have none.
    is_alike = call.op is not ReduceOp.MAX or not call.tensor.is_floating_point()
    return is_alike and 0 < call.tensor.nbytes <= _SMALL_BYTES


def _small_plan(call: AllReduce, anchor: Anchor, *, rank: int, size: int) -> Plan:
    full = call.tensor.data.view(-1)
    nbytes = full.nbytes
    if size == 2:
        sent, received = full, torch.empty_like(full)
        sizes = [0, nbytes] if rank == 0 else [nbytes, 0]
        parts = [full, received] if rank == 0 else [received, full]
        copies = []
    else:
        sent, received = torch.empty(2, size, full.numel(), dtype=full.dtype, device=full.device)
        sizes = [nbytes] * size
        parts = list(received.unbind())
        parts[rank] = full
        copies = [(sent, full)]
    start = AllToAll(anchor.bytes_of(sent), anchor.bytes_of(received), sizes, sizes)
    combine = _take_larger if call.op is ReduceOp.MAX else add
    combined = list(_additions(parts, rank=rank, start=0, numel=full.numel()))
    divided = [(full, size)] if call.op is ReduceOp.AVG else []
    return Plan([start], copies, [(combine, combined), (divide, divided)], anchor.views)


# All-gather #


def _gather_plan(calls: Sequence[AllGather], anchor: Anchor, *, rank: int, size: int) -> Plan:
    starts: list[Start] = []
    copies: list[Pair] = []
    for call in calls:
        full = as_bytes(call.full.data)
        parts = full.view(size, -1).unbind()
        nbytes = parts[rank].nbytes
        if parts[rank].data_ptr() != call.shard.data_ptr():
            copies.append((parts[rank], as_bytes(call.shard.data)))
        if size == 2:
            # The own part is sent, and the other one received, in its place.
            sizes = [0, nbytes] if rank == 0 else [nbytes, 0]
            starts.append(AllToAll(anchor.bytes_of(parts[rank]), anchor.bytes_of(parts[1 - rank]), sizes, sizes))
        elif full.nbytes <= _SMALL_GATHER_BYTES:
            sent = torch.empty_like(full)
            copies.append((sent.view(size, nbytes), parts[rank]))
            starts.append(AllToAll(anchor.bytes_of(sent), anchor.bytes_of(full), [nbytes] * size, [nbytes] * size))
        else:
            starts += [Broadcast(anchor.bytes_of(part), root) for root, part in enumerate(parts)]
    return Plan(starts, copies, keeps=anchor.views)


def _anchored(call: Call, anchor: Anchor) -> Call:
    if isinstance(call, Broadcast | AllReduce):
        return replace(call, tensor=anchor.alias(call.tensor))
    return replace(call, full=anchor.alias(call.full), shard=anchor.alias(call.shard))


def alike(calls: Iterable[Call]) -> dict[tuple[torch.dtype, ReduceOp | None], list[Call]]:
    """Return the calls that torch can coalesce, together: one reduce op and one dtype at a time."""
    batches: dict[tuple[torch.dtype, ReduceOp | None], list[Call]] = {}
    for call in calls:
        batches.setdefault((call.full.dtype, getattr(call, "op", None)), []).append(call)
    return batches
