"""What every back-end of torch plans for a batch: copies, collectives, in-place operations after them.

Torch's own collectives, coalesced where torch can, and sums in rank order, of 16-bit gradients in float32. These are exchanges
on any back-end: every rank sends each other rank its part and adds those it receives; a float32 sum of 16-bit values is rounded
once. Exchanges that are faster on gloo are in ``comm/gloo.py``. Nothing is launched here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megabucket.comm.communicator import AllGather, AllReduce, AllToAll, Broadcast, BufferCall, Call, ReduceOp, ReduceScatter
from megabucket.comm.device import Accelerator

BLOCK_NUMEL: Final = 1 << 16
"""Elements that are added at a time, so that partial sums stay in the cache."""

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

    All ranks make the same plan, except for the sizes of an ``AllToAll``.

    Collectives get aliases of tensors that C++ owns as well, so that gloo's threads never need the GIL to release them. A gloo
    thread drops its reference after the waiting thread has gone on. If Python were the only other owner, the drop would need
    the GIL: the thread would compete with backward for it, and at the end of the program it might never get it, which aborts
    the process ("terminate called without an active exception"). See docs/decisions/gloo.md.

    Args:
        waits_like_gloo: whether works behave like gloo's: C++ threads hold their tensors, and a wait may time out without harm.
        is_kept: whether the batch, and with it the tensors, outlives the launch.
    """

    def __init__(self, *, rank: int, size: int, waits_like_gloo: bool, is_kept: bool) -> None:
        self._rank, self._size = rank, size
        self.waits_like_gloo, self.is_kept = waits_like_gloo, is_kept
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
        alone = isinstance(calls[0], Broadcast | AllToAll) or (isinstance(calls[0], AllGather) and not can_coalesce_gathers)
        batches: dict[object, list[Call]] = {}
        for index, call in enumerate(calls):
            # Torch coalesces one reduce op and one dtype at a time.
            key = index if alone or isinstance(call, AllToAll) else (call.full.dtype, getattr(call, "op", None))
            batches.setdefault(key, []).append(call)
        self.starts += [self._start_of(batch) for batch in batches.values()]
        self.after += divisions(calls)

    def add_in_rank_order(self, calls: Sequence[AllReduce | ReduceScatter]) -> None:
        """Plan reductions that are added in rank order; 16-bit elements in float32, which is rounded once.

        A reduce-scatter is an all-to-all, an all-reduce an all-gather of whole tensors, on any back-end. The bits do not depend
        on bucket sizes.
        """
        for call in calls:
            is_on_host = Accelerator.of(call.full.device) is None
            if isinstance(call, ReduceScatter) and not (is_on_host or call.in_rank_order):
                self._add_in_one_kernel(call)
                continue
            parts = self._exchange(call) if isinstance(call, ReduceScatter) else self._exchange_whole(call.full.data.view(-1))
            numel = parts[0].numel()
            block_numel = min(numel, BLOCK_NUMEL) if is_on_host else numel
            total = wide_block(parts[0], block_numel)
            for first in range(0, numel, block_numel):
                pieces = [part[first : first + block_numel] for part in parts]
                self.after += additions_in_rank_order(pieces, call.op, own_rank=self._rank, total=total)
        self.after += divisions(calls)

    def _exchange_whole(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Send a tensor to all ranks; return the tensors of all, by rank."""
        received = own.new_empty(self._size * own.numel())
        self.starts.append(self._start_of([AllGather(received, own)]))
        return self._parts_of(received, own)

    def _add_in_one_kernel(self, call: ReduceScatter) -> None:
        """Add on a device, where few launches matter most. Its kernel decides the order of additions."""
        full, shard = call.full.data, call.shard.data
        received = torch.empty_like(full)
        self._add_exchange(full, received, [shard.nbytes] * self._size)
        total = torch.empty(shard.shape, dtype=torch.float32, device=full.device)
        add_up = torch.mean if call.op is ReduceOp.AVG else torch.sum
        self.after.append(partial(add_up, received.view(self._size, -1), 0, dtype=torch.float32, out=total))
        self.after.append(partial(torch.Tensor.copy_, shard, total))

    def _exchange(self, call: ReduceScatter) -> list[torch.Tensor]:
        """Exchange the parts of one buffer; return the part of each rank for this rank's shard."""
        full, shard = call.full.data, call.shard.data
        if self._size == 2:
            # The own part is at one end, so the exchange, which would copy it, can leave it out.
            return self._exchange_of_two(full[shard.numel() :] if self._rank == 0 else full[: shard.numel()], shard)
        return self._exchange_parts(full, torch.empty_like(full), shard)

    def _exchange_of_two(self, sent: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        received = torch.empty_like(own)
        self._add_exchange(sent, received, self._sizes_of_two(own))
        return [own, received] if self._rank == 0 else [received, own]

    def _exchange_parts(self, sent: torch.Tensor, received: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        self._add_exchange(sent, received, [own.nbytes] * self._size)
        return self._parts_of(received, own)

    def _parts_of(self, received: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        parts = list(received.view(self._size, -1).unbind())
        parts[self._rank] = own
        return parts

    def _sizes_of_two(self, part: torch.Tensor) -> list[int]:
        """Return the bytes that one of two ranks sends to each rank; its own part stays in place."""
        return [0, part.nbytes] if self._rank == 0 else [part.nbytes, 0]

    def _add_exchange(self, sent: torch.Tensor, received: torch.Tensor, sizes: Sequence[int]) -> None:
        """Send ``sizes`` bytes to the ranks, in rank order, and receive as many from each."""
        self.starts.append(self._all_to_all(sent, received, sent_bytes=sizes, received_bytes=sizes))

    def _all_to_all(
        self, sent: torch.Tensor, received: torch.Tensor, *, sent_bytes: Sequence[int], received_bytes: Sequence[int]
    ) -> Start:
        source, target = self._bytes_of(sent), self._bytes_of(received)
        arguments = (target, source, list(received_bytes), list(sent_bytes), _options(c10d.AllToAllOptions))
        return Start("alltoall_base", arguments, (source, target))

    def _start_of(self, calls: Sequence[Call]) -> Start:
        """Return one collective for calls of one kind, dtype and reduce op; an ``AllToAll`` or a ``Broadcast`` is alone."""
        # Names of torch 2.11, which later versions keep as aliases.
        first, is_one = calls[0], len(calls) == 1
        if isinstance(first, AllToAll):
            itemsize = first.sent.element_size()
            sent_bytes = [numel * itemsize for numel in first.sent_numels]
            received_bytes = [numel * itemsize for numel in first.received_numels]
            return self._all_to_all(first.sent, first.received, sent_bytes=sent_bytes, received_bytes=received_bytes)
        if isinstance(first, Broadcast):
            tensor = self._bytes_of(first.full)
            return Start("broadcast", ([tensor], _options(c10d.BroadcastOptions, root=first.root)), (tensor,))
        fulls = [self._alias(call.full) for call in calls if isinstance(call, BufferCall)]
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
        if not tensor.numel():  # it may have a stride of 0, and then no view as bytes
            return self._alias(tensor.new_empty(0, dtype=torch.uint8))
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


def is_in_rank_order(call: Call) -> TypeGuard[AllReduce | ReduceScatter]:
    """Return whether a call is a sum in rank order, whatever its back-end does."""
    return isinstance(call, AllReduce | ReduceScatter) and (
        call.in_rank_order or (isinstance(call, ReduceScatter) and call.in_fp32)
    )


def wide_block(part: torch.Tensor, numel: int) -> torch.Tensor | None:
    """Return memory for float32 sums of ``numel`` elements of a 16-bit part; ``None`` for others, which add in place."""
    return torch.empty(numel, dtype=torch.float32, device=part.device) if part.itemsize == 2 else None


def additions_in_rank_order(
    pieces: Sequence[torch.Tensor], op: ReduceOp, *, own_rank: int, total: torch.Tensor | None
) -> Iterator[Operation]:
    """Yield the additions of the pieces of all ranks, in rank order; the sum, or the mean, ends in the own piece.

    Args:
        pieces: by rank; they are overwritten.
        total: of ``wide_block``, at least as long as a piece.
    """
    own = pieces[own_rank]
    result = own if total is None else total[: own.numel()]
    if total is None:
        yield from additions_of(pieces, range(len(pieces)), own_rank=own_rank)
    else:
        yield partial(torch.Tensor.copy_, result, pieces[0])
        yield from (partial(torch.Tensor.add_, result, piece) for piece in pieces[1:])
    if op is ReduceOp.AVG:
        yield partial(torch.Tensor.div_, result, len(pieces))
    if result is not own:
        yield partial(torch.Tensor.copy_, own, result)


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
