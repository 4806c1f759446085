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
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
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

_REDUCE_OPS: Final = MappingProxyType(
    {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVG: dist.ReduceOp.AVG, ReduceOp.MAX: dist.ReduceOp.MAX}
)
# torch 2.13 renamed these methods of groups; 2.11 has only the old names.
_METHODS: Final = frozenset(dir(dist.ProcessGroup))
_ALL_GATHER: Final = "all_gather_single" if "all_gather_single" in _METHODS else "_allgather_base"
_REDUCE_SCATTER: Final = "reduce_scatter_single" if "reduce_scatter_single" in _METHODS else "_reduce_scatter_base"
_ALL_TO_ALL: Final = "all_to_all_single" if "all_to_all_single" in _METHODS else "alltoall_base"
_ALL_GATHERS: Final = f"{_ALL_GATHER}_coalesced" if "all_gather_single" in _METHODS else "allgather_into_tensor_coalesced"
_REDUCE_SCATTERS: Final = (
    f"{_REDUCE_SCATTER}_coalesced" if "reduce_scatter_single" in _METHODS else "reduce_scatter_tensor_coalesced"
)

Pair = tuple[torch.Tensor, torch.Tensor]
Operation = Callable[[], object]
"""One operation in place, as a call in C."""


class Start(NamedTuple):
    """One collective: a method of a process group and its arguments."""

    method: str
    arguments: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    """What threads of gloo hold while it runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is done for one batch: copies, collectives, and in-place operations when these are complete."""

    starts: Sequence[Start]
    copies: Sequence[Pair] = ()
    """Targets and sources, before each launch."""
    after: Sequence[Operation] = ()
    keeps: Sequence[torch.Tensor] = ()
    """Live as long as the plan: see ``Anchor``."""
    is_gloo: bool = True
    """Whether works behave as gloo's do: threads of C++ hold their tensors, and a wait may time out without harm."""

    def __add__(self, other: Plan) -> Plan:
        """Return the plan that does what both do."""
        return Plan(
            [*self.starts, *other.starts],
            [*self.copies, *other.copies],
            [*self.after, *other.after],
            [*self.keeps, *other.keeps],
        )


class Anchor:
    """Makes aliases of tensors that C++ owns, too, so that gloo's threads never need Python's lock to let go of them.

    A gloo thread drops its reference after the waiting thread went on. If only Python owned the tensor besides, the drop would
    need the lock: the thread competes with backward for it, and at the end of the program it may never get it, which
    aborts the process ("terminate called without an active exception"). See docs/decisions/gloo-tensors.md.
    """

    def __init__(self) -> None:
        self.views: list[torch.Tensor] = []
        """Own the aliases, in C++, as long as they live."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same memory as a tensor that is no view in autograd's sense, so that a view of it owns it."""
        alias = tensor.data
        self.views.append(alias.view(-1))
        return alias

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of the bytes of a tensor: gloo knows neither bool (masks) nor int16."""
        is_bytes = tensor.dtype == torch.uint8 and tensor.dim() == 1
        return self.alias(tensor if is_bytes else tensor.view(-1).view(torch.uint8))


# Any back-end #


def plain_plan(calls: Sequence[Call], *, can_coalesce_gathers: bool = True, is_anchored: bool = False) -> Plan:
    """Return the plan that does what like calls say, in as few collectives as torch allows.

    Args:
        can_coalesce_gathers: not over gloo, whose heap a coalesced gather breaks (docs/decisions/gloo-coalesced-gather.md).
        is_anchored: whether the tensors handed over shall be owned by C++, too.
    """
    anchor = Anchor() if is_anchored else None
    alone = isinstance(calls[0], Broadcast) or (isinstance(calls[0], AllGather) and not can_coalesce_gathers)
    batches: dict[object, list[Call]] = {}
    for index, call in enumerate(calls):
        # Torch coalesces one reduce op and one dtype at a time.
        batches.setdefault(index if alone else (call.full.dtype, getattr(call, "op", None)), []).append(call)
    starts = [_start_of(batch, anchor) for batch in batches.values()]
    return Plan(starts, after=divisions(calls), keeps=anchor.views if anchor is not None else ())


def _start_of(calls: Sequence[Call], anchor: Anchor | None) -> Start:
    """Return one collective for calls of one kind, dtype and reduce op."""

    def held(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if anchor is None else anchor.alias(tensor)

    first = calls[0]
    if isinstance(first, Broadcast):
        tensor = (anchor or Anchor()).bytes_of(first.tensor)
        return Start("broadcast", ([tensor], _options(c10d.BroadcastOptions, rootRank=first.root)), (tensor,))
    fulls = [held(call.full) for call in calls]
    if isinstance(first, AllReduce):
        options = _options(c10d.AllreduceCoalescedOptions if len(calls) > 1 else c10d.AllreduceOptions, op=first.op)
        return Start("allreduce_coalesced" if len(calls) > 1 else "allreduce", (fulls, options), tuple(fulls))
    shards = [held(call.shard) for call in calls if isinstance(call, AllGather | ReduceScatter)]
    if isinstance(first, AllGather):
        options, names, places = _options(c10d.AllgatherOptions), (_ALL_GATHER, _ALL_GATHERS), (fulls, shards)
    else:
        options, names = _options(c10d.ReduceScatterOptions, op=first.op), (_REDUCE_SCATTER, _REDUCE_SCATTERS)
        places = (shards, fulls)
    if len(calls) > 1:
        return Start(names[1], (*places, options), (*fulls, *shards))
    return Start(names[0], (places[0][0], places[1][0], options), (*fulls, *shards))


def _options(kind: Callable[[], Any], *, op: ReduceOp | None = None, **values: object) -> Any:
    options = kind()
    options.asyncOp = True
    if op is not None:
        options.reduceOp = _REDUCE_OPS[op]
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _all_to_all(sent: torch.Tensor, received: torch.Tensor, sizes: Sequence[int], anchor: Anchor) -> Start:
    """Return the exchange in which this rank sends and receives so many bytes to and from each rank, in rank order."""
    source, target = anchor.bytes_of(sent), anchor.bytes_of(received)
    return Start(_ALL_TO_ALL, (target, source, list(sizes), list(sizes), _options(c10d.AllToAllOptions)), (source, target))


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
            if divisor != 1:
                operations.append(partial(torch.Tensor.div_, call.result.data if result is None else result, divisor))
    return operations


def fp32_plan(calls: Sequence[ReduceScatter], *, rank: int, size: int) -> Plan:
    """Return the plan of reduce-scatters whose 16-bit parts are added up in float32, in rank order, and rounded once.

    On any back-end: it is an all-to-all, and the same bits whatever the size of a bucket is.
    """
    anchor = Anchor()
    starts: list[Start] = []
    after: list[Operation] = []
    for call in calls:
        start, parts = _exchange(call, anchor, rank=rank, size=size)
        starts.append(start)
        numel = call.shard.numel()
        # On a device one kernel for each part; on a host in blocks that stay in the cache.
        block_numel = min(numel, _BLOCK_NUMEL) if Accelerator.of(call.full.device) is None else numel
        total = torch.empty(block_numel, dtype=torch.float32, device=call.full.device)
        for first in range(0, numel, block_numel):
            pieces = [part[first : first + block_numel] for part in parts]
            sum_of_block = total[: pieces[0].numel()]
            after.append(partial(torch.Tensor.copy_, sum_of_block, pieces[0]))
            after += [partial(torch.Tensor.add_, sum_of_block, piece) for piece in pieces[1:]]
            if call.op is ReduceOp.AVG:
                after.append(partial(torch.Tensor.div_, sum_of_block, size))
            after.append(partial(torch.Tensor.copy_, pieces[rank], sum_of_block))
    return Plan(starts, after=[*after, *divisions(calls)], keeps=anchor.views)


# Gloo #


def can_exchange_among(num_ranks: int) -> bool:
    """Whether so many ranks do collectives in ways of their own."""
    return 2 <= num_ranks <= _MOST_RANKS


def gloo_plan(calls: Sequence[Call], *, rank: int, size: int, room_bytes: int | None = None) -> Plan:
    """Return the plan that is best for a batch of like calls on gloo. All ranks make the same one.

    Args:
        room_bytes: what an all-reduce may take to receive in; ``None``: whatever it needs.
    """
    first = calls[0]
    if can_exchange_among(size):
        if isinstance(first, AllGather):
            return _gather_plan([call for call in calls if isinstance(call, AllGather)], rank=rank, size=size)
        if isinstance(first, ReduceScatter) and all(_can_exchange(call) for call in calls):
            return _scatter_plan([call for call in calls if isinstance(call, ReduceScatter)], rank=rank, size=size)
        if isinstance(first, AllReduce) and len(calls) == 1 and _is_small(first, room_bytes, size=size):
            return _small_plan(first, rank=rank, size=size)
    return plain_plan([_in_place(call) for call in calls], can_coalesce_gathers=False, is_anchored=True)


def lies_in_place(call: ReduceScatter) -> bool:
    """Whether the shard is this rank's part of the buffer itself."""
    start, shard = call.full.data_ptr(), call.shard.data_ptr()
    return start <= shard < start + call.full.nbytes


def _can_exchange(call: Call) -> bool:
    return isinstance(call, ReduceScatter) and not call.in_place and call.op is not ReduceOp.MAX and lies_in_place(call)


def _in_place(call: Call) -> Call:
    """Return an all-reduce for a reduce-scatter whose shard lies in the buffer: gloo would clone, reduce and copy."""
    if isinstance(call, ReduceScatter) and lies_in_place(call):
        return AllReduce(call.full, call.op, call.divisor)
    return call


def _scatter_plan(calls: Sequence[ReduceScatter], *, rank: int, size: int) -> Plan:
    anchor = Anchor()
    starts: list[Start] = []
    after: list[Operation] = []
    for call, (first, numel) in zip(calls, places_in_sums(calls), strict=True):
        start, parts = _exchange(call, anchor, rank=rank, size=size)
        starts.append(start)
        after += _additions(parts, rank=rank, start=first + rank * call.shard.numel(), numel=numel)
    return Plan(starts, after=[*after, *divisions(calls, averages_over=size)], keeps=anchor.views)


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


def _exchange(call: ReduceScatter, anchor: Anchor, *, rank: int, size: int) -> tuple[Start, list[torch.Tensor]]:
    """Return the exchange of the parts of one buffer, and what each rank has sent for this rank's shard."""
    full, shard = call.full.data, call.shard.data
    numel, nbytes = shard.numel(), shard.nbytes
    if size == 2:
        # The own part is at one end, so it can stay out of the exchange, which would copy it.
        other = full[numel:] if rank == 0 else full[:numel]
        received = torch.empty_like(shard)
        parts = [shard, received] if rank == 0 else [received, shard]
        return _all_to_all(other, received, _sizes_of_two(rank, nbytes), anchor), parts
    received = torch.empty_like(full)
    parts = list(received.view(size, numel).unbind())
    parts[rank] = shard
    return _all_to_all(full, received, [nbytes] * size, anchor), parts


def _sizes_of_two(rank: int, nbytes: int) -> list[int]:
    """Return what a rank of two sends to each, if its own part stays where it is."""
    return [0, nbytes] if rank == 0 else [nbytes, 0]


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
    for block in ring_blocks(
        start=start,
        stop=start + part_numel,
        numel=numel,
        itemsize_bytes=parts[0].element_size(),
        num_ranks=num_ranks,
        block_numel=block_numel,
    ):
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


def small_room_bytes(call: AllReduce, *, size: int) -> int:
    """Return what a small all-reduce takes to send from and to receive in."""
    return call.tensor.nbytes * (1 if size == 2 else 2 * size)


def _is_small(call: AllReduce, room_bytes: int | None, *, size: int) -> bool:
    if room_bytes is not None and small_room_bytes(call, size=size) > room_bytes:
        return False
    # nan is lost or kept by different kernels; integers have none.
    is_alike = call.op is not ReduceOp.MAX or not call.tensor.is_floating_point()
    return is_alike and 0 < call.tensor.nbytes <= _SMALL_BYTES


def _small_plan(call: AllReduce, *, rank: int, size: int) -> Plan:
    anchor, full = Anchor(), call.tensor.data.view(-1)
    copies: list[Pair] = []
    if size == 2:
        sent, received, sizes = full, torch.empty_like(full), _sizes_of_two(rank, full.nbytes)
        parts = [full, received] if rank == 0 else [received, full]
    else:
        sent, received = torch.empty(2, size, full.numel(), dtype=full.dtype, device=full.device)
        sizes = [full.nbytes] * size
        parts = list(received.unbind())
        parts[rank] = full
        copies = [(sent, full)]
    combine = torch.Tensor.clamp_min_ if call.op is ReduceOp.MAX else torch.Tensor.add_
    after = [*_additions(parts, rank=rank, start=0, numel=full.numel(), add=combine), *divisions([call], averages_over=size)]
    return Plan([_all_to_all(sent, received, sizes, anchor)], copies, after, anchor.views)


def _gather_plan(calls: Sequence[AllGather], *, rank: int, size: int) -> Plan:
    anchor = Anchor()
    starts: list[Start] = []
    copies: list[Pair] = []
    for call in calls:
        full = call.full.data.view(-1).view(torch.uint8)
        parts = full.view(size, -1).unbind()
        nbytes = parts[rank].nbytes
        if parts[rank].data_ptr() != call.shard.data_ptr():
            copies.append((parts[rank], call.shard.data.view(-1).view(torch.uint8)))
        if size == 2:
            # The own part is sent, and the other one received, in its place.
            starts.append(_all_to_all(parts[rank], parts[1 - rank], _sizes_of_two(rank, nbytes), anchor))
        elif full.nbytes <= _SMALL_GATHER_BYTES:
            sent = torch.empty_like(full)
            copies.append((sent.view(size, nbytes), parts[rank]))
            starts.append(_all_to_all(sent, full, [nbytes] * size, anchor))
        else:
            starts += [_start_of([Broadcast(part, root)], anchor) for root, part in enumerate(parts)]
    return Plan(starts, copies, keeps=anchor.views)


# In which order gloo's ring adds #


class Stretch(NamedTuple):
    """Neighbouring elements that are added in one order."""

    start: int
    """First element, counted from where the caller starts."""
    stop: int
    ranks: tuple[int, ...]
    """In the order in which their values are added."""


def ring_blocks(
    *, start: int, stop: int, numel: int, itemsize_bytes: int, num_ranks: int, block_numel: int
) -> Iterator[Stretch]:
    """Yield how gloo's ring adds the elements from ``start`` to ``stop`` of an all-reduced tensor, counted from ``start``.

    Floating-point addition does not associate, so from three ranks on the order decides the last bits. Gloo cuts a tensor into
    as many chunks as there are ranks, each made of whole segments. The values of chunk ``c`` start at the rank before ``c`` and
    travel down the ranks, each of which adds its own, until rank ``c`` has the sum (gloo/allreduce.cc, ``ring``). It makes no
    difference which of two addends comes first.

    Args:
        numel: of the tensor that gloo would all-reduce, of which these elements are a part.
        itemsize_bytes: of one element.
        block_numel: elements in one stretch at most.

    >>> list(ring_blocks(start=0, stop=6, numel=12, itemsize_bytes=4, num_ranks=3, block_numel=100))
    [Stretch(start=0, stop=4, ranks=(2, 1, 0)), Stretch(start=4, stop=6, ranks=(0, 2, 1))]
    """
    chunk_numel = max(stop, 1)
    if num_ranks > 2:  # one addition has one order
        chunk_numel = _chunk_bytes(numel * itemsize_bytes, itemsize_bytes, num_ranks) // itemsize_bytes
    first = start
    while first < stop:
        chunk = first // chunk_numel
        last = min((chunk + 1) * chunk_numel, stop)
        ranks = tuple((chunk - hops) % num_ranks for hops in range(1, num_ranks + 1)) if num_ranks > 2 else (0, 1)
        for block in range(first, last, block_numel):
            yield Stretch(block - start, min(block + block_numel, last) - start, ranks)
        first = last


def _chunk_bytes(total_bytes: int, itemsize_bytes: int, num_ranks: int) -> int:
    """Return the bytes of one rank's chunk: at least two segments of at most a MiB, all equal, rounded up to whole elements."""
    longest = itemsize_bytes * max(1, _SEGMENT_BYTES // itemsize_bytes)
    num_segments = max(-(-total_bytes // longest), 2 * num_ranks)
    segments_per_rank = -(-num_segments // num_ranks)
    segment_bytes = -(-total_bytes // (segments_per_rank * num_ranks * itemsize_bytes)) * itemsize_bytes
    return segments_per_rank * segment_bytes
