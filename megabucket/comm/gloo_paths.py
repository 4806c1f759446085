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

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, starmap
from typing import Any, Final

import torch

from megabucket.comm.port import AllGather, AllReduce, Broadcast, Call, ReduceOp, ReduceScatter
from megabucket.comm.ring_order import stretches

_MOST_RANKS: Final = 8  # with more it has not been measured
_SMALL_BYTES: Final = 1 << 20
_SMALL_GATHER_BYTES: Final = 1 << 18
_BLOCK_NUMEL: Final = 1 << 16  # added up at a time from three ranks on, so that partial sums stay in the cache

_Pair = tuple[torch.Tensor, torch.Tensor]
_Operation = tuple[Callable[..., torch.Tensor], Sequence[tuple[Any, ...]]]

_add, _copy, _divide, _take_larger = torch.Tensor.add_, torch.Tensor.copy_, torch.Tensor.div_, torch.Tensor.clamp_min_


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Send each rank its part of ``sent`` and receive, from each rank, a part of ``received``. Bytes, in rank order."""

    sent: torch.Tensor
    received: torch.Tensor
    sent_sizes: Sequence[int]
    received_sizes: Sequence[int]


Start = Call | AllToAll


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is done for one batch: copies, collectives, and in-place operations when these are complete."""

    starts: Sequence[Start]
    copies: Sequence[_Pair] = ()
    """Targets and sources, before each launch."""
    after: Sequence[_Operation] = ()
    """In-place operations, each with the arguments of its calls, after each launch, in order."""
    keeps: Sequence[torch.Tensor] = ()
    """Live as long as the plan: see ``anchor``."""

    def __add__(self, other: Plan) -> Plan:
        """Return the plan that does what both do."""
        return Plan(*([*getattr(self, part.name), *getattr(other, part.name)] for part in fields(Plan)))

    @property
    def device(self) -> torch.device:
        """Where it all happens."""
        return next(self.tensors).device

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """What threads of gloo hold while the collectives run."""
        for start in self.starts:
            if isinstance(start, AllToAll):
                yield from (start.sent, start.received)
            else:
                yield from {start.full, getattr(start, "shard", start.full)}

    def finish(self) -> Iterator[object]:
        """Return an iterator that does one operation at each step.

        Each step is a call in C, and so is going through all of them (``run_through``). A signal handler runs before or after,
        so a wait that it ends and that is begun again goes on where it was, and never adds anything twice.
        """
        return chain(*(starmap(function, arguments) for function, arguments in self.after))


def run_through(operations: Iterator[object]) -> None:
    """Do what is left."""
    deque(operations, maxlen=0)


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
    if size <= _MOST_RANKS:
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


def _lies_in_place(call: ReduceScatter) -> bool:
    start, shard = call.full.data_ptr(), call.shard.data_ptr()
    return start <= shard < start + call.full.nbytes


def _can_exchange(call: Call) -> bool:
    return isinstance(call, ReduceScatter) and not call.in_place and call.op is not ReduceOp.MAX and _lies_in_place(call)


def _in_place(call: Call) -> Call:
    """Return an all-reduce for a reduce-scatter whose shard lies in the buffer: gloo would clone, reduce and copy."""
    return AllReduce(call.full, call.op) if isinstance(call, ReduceScatter) and _lies_in_place(call) else call


def _scatter_plan(calls: Sequence[ReduceScatter], anchor: Anchor, empty: _Empty, *, rank: int, size: int) -> Plan:
    starts: list[Start] = []
    combined: list[_Pair] = []
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
    return Plan(starts, after=[(_add, combined), (_divide, divided)], keeps=anchor.views)


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


def _additions(parts: Sequence[torch.Tensor], *, rank: int, start: int, numel: int) -> Iterator[_Pair]:
    """Yield targets and addends: what each rank has sent is added up in gloo's order, at last in this rank's part.

    Args:
        parts: by rank, 1D and of equal length; they are written to.
        start: where the parts lie in the tensor that gloo would all-reduce.
        numel: of that tensor.
    """
    itemsize_bytes, num_ranks = parts[0].element_size(), len(parts)
    stop = start + parts[0].numel()
    block_numel = _BLOCK_NUMEL if num_ranks > 2 else parts[0].numel()  # one addition passes over memory once
    for stretch in stretches(start=start, stop=stop, numel=numel, itemsize_bytes=itemsize_bytes, num_ranks=num_ranks):
        for first in range(stretch.start, stretch.stop, block_numel):
            last = min(first + block_numel, stretch.stop)
            pieces = [parts[source][first:last] for source in stretch.ranks]
            total = pieces[0]
            for source, piece in zip(stretch.ranks[1:], pieces[1:], strict=True):
                if source == rank:
                    total, piece = piece, total  # noqa: PLW2901 - the two addends change places
                yield total, piece


def fp32_plan(calls: Sequence[ReduceScatter], *, rank: int, size: int) -> Plan:
    """Return the plan of reduce-scatters whose 16-bit parts are added up in float32, in rank order, and rounded once.

    On any back-end: it is an all-to-all, and the same bits whatever the size of a bucket is.
    """
    anchor = Anchor()
    starts: list[Start] = []
    after: list[_Operation] = []
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
            after.append((_add, [(sum_of_block, piece) for piece in pieces[1:]]))
            if call.op is ReduceOp.AVG:
                after.append((_divide, [(sum_of_block, size)]))
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
    combine = _take_larger if call.op is ReduceOp.MAX else _add
    combined = list(_additions(parts, rank=rank, start=0, numel=full.numel()))
    divided = [(full, size)] if call.op is ReduceOp.AVG else []
    return Plan([start], copies, [(combine, combined), (_divide, divided)], anchor.views)


# All-gather #


def _gather_plan(calls: Sequence[AllGather], anchor: Anchor, *, rank: int, size: int) -> Plan:
    starts: list[Start] = []
    copies: list[_Pair] = []
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


# Tensors that threads of gloo hold #


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
        """Return an alias of the bytes of a tensor."""
        return self.alias(as_bytes(tensor))


def _anchored(call: Call, anchor: Anchor) -> Call:
    if isinstance(call, Broadcast | AllReduce):
        return replace(call, tensor=anchor.alias(call.tensor))
    return replace(call, full=anchor.alias(call.full), shard=anchor.alias(call.shard))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is sent where nothing is computed: gloo knows neither bool (masks) nor int16."""
    is_bytes = tensor.dtype == torch.uint8 and tensor.dim() == 1
    return tensor if is_bytes else tensor.view(-1).view(torch.uint8)


def alike(calls: Iterable[Call]) -> dict[tuple[torch.dtype, ReduceOp | None], list[Call]]:
    """Return the calls that torch can coalesce, together: one reduce op and one dtype at a time."""
    batches: dict[tuple[torch.dtype, ReduceOp | None], list[Call]] = {}
    for call in calls:
        batches.setdefault((call.full.dtype, getattr(call, "op", None)), []).append(call)
    return batches
