"""How data moves on the emulated fabric: large tensors are read, everything else is gloo's.

Works can be waited for by two threads. Gloo's own reduce-scatter copies its result inside of each ``wait``, so a second waiter
would write over what the first has begun to use; and both it and the gather clone or copy through temporaries. Here a gather
is one broadcast of each shard, in place, and a reduce-scatter an exchange of parts, of a copy where the shard lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from megabucket.comm.background_reader import MOST_CALLS, BackgroundReader, ReadWork
from megabucket.comm.gloo_paths import gloo_plan
from megabucket.comm.plan import AllToAll, InBackground, run_through
from megabucket.comm.port import AllGather, AllReduce, Broadcast, Call, ReduceOp, ReduceScatter

Work = dist.Work | ReadWork

_OWN_OPS: Final = ((dist.ReduceOp.SUM, ReduceOp.SUM), (dist.ReduceOp.AVG, ReduceOp.AVG))

_ADDED: Final = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
"""What gloo adds up and we can, too."""

LEAST_READ_BYTES: Final = 1 << 18
"""Of a collective that is read. Below, gloo's messages are as cheap."""

_MAX_PIECES: Final = 1024
"""Remembered before dead ones are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Works under way, and what is left to do when they are done."""

    works: Sequence[Work]
    finish: Callable[[], None] | None = None


class Mover:
    """Moves the data of collectives: large tensors by reading them, everything else with a gloo group.

    Args:
        reader: ``None``: ranks cannot read each other's memory.
    """

    def __init__(self, gloo: Any, reader: BackgroundReader | None, *, rank: int, size: int) -> None:
        self._gloo, self._reader = gloo, reader
        self._rank, self._size = rank, size
        self._filled = _FilledMemory()
        self._spare = _SpareMemory()

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], moves: bool) -> Move:
        """Collect the inputs of all ranks in the outputs.

        Args:
            moves: ``False``: only memory that was never gathered into is filled, because it may hold anything; elsewhere what
                the other ranks sent before stays.
        """
        calls: list[AllGather] = []
        for output, own in zip(outputs, inputs, strict=True):
            is_filled = not moves and self._filled.remember(output)
            if is_filled and self._is_own_part(own, output):
                continue
            part, flat = self._parts(output)[self._rank], own.detach().reshape(-1)
            if part.data_ptr() != flat.data_ptr():
                part.copy_(flat)
            if not is_filled and output.numel():
                calls.append(AllGather(output.detach().view(-1), part))
        if work := self._read(calls):
            return Move([work])
        parts = ((rank, part) for call in calls for rank, part in enumerate(self._parts(call.full)))
        return Move([self._gloo.broadcast([part.view(torch.uint8)], _root(rank)) for rank, part in parts])

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any, otherwise: Callable[[], dist.Work]) -> Work:
        """Reduce one tensor, or several as one batch, over all ranks, in place; ``otherwise`` has gloo do it."""
        own_op = _own(op, tensors)
        work = None if own_op is None else self._read([AllReduce(_flat(tensor), own_op) for tensor in tensors])
        return work or otherwise()

    def broadcast(self, tensor: torch.Tensor, root: int, otherwise: Callable[[], dist.Work]) -> Work:
        """Copy the tensor of one rank to all; ``otherwise`` has gloo do it."""
        work = self._read([Broadcast(_flat(tensor), root)]) if _is_dense(tensor) else None
        return work or otherwise()

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any, moves: bool) -> Move:
        """Reduce each input over all ranks; its output receives this rank's part.

        Args:
            moves: ``False``: nothing is reduced, and the output receives what this rank has.
        """
        parts: list[Move] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for output, full in zip(outputs, inputs, strict=True):
            if not moves and self._is_own_part(output, full):
                continue
            flat = full.detach().reshape(-1)
            buffer = flat if not moves or _lies_in(output, flat) else flat.clone()
            part = self._parts(buffer)[self._rank]
            if part.data_ptr() != output.data_ptr():
                copies.append((output.detach().view(-1), part))
            if moves and buffer.numel():
                parts.append(self._reduce_to(part, buffer, op))
        finishes = [move.finish for move in parts if move.finish is not None]
        works = [work for move in parts for work in move.works]
        return Move(works, partial(_finish, finishes, copies) if finishes or copies else None)

    def _reduce_to(self, part: torch.Tensor, buffer: torch.Tensor, op: Any) -> Move:
        """Reduce a buffer of which this rank keeps its part: each by itself, as gloo does, for the order of additions."""
        own_op = _own(op, [buffer])
        if own_op is None:
            return Move([self._gloo.allreduce([buffer], _reduction(op))])
        call = ReduceScatter(part, buffer, own_op)
        work = self._read([call])
        return Move([work]) if work else self._exchange(call, op)

    def _read(self, calls: Sequence[Call]) -> ReadWork | None:
        """Have like calls done by reading; ``None``: nobody can, or they are too small."""
        is_worth_it = sum(call.full.nbytes for call in calls) >= LEAST_READ_BYTES and len(calls) <= MOST_CALLS
        return self._reader.start(InBackground(calls)) if self._reader is not None and is_worth_it else None

    def _exchange(self, call: ReduceScatter, op: Any) -> Move:
        taken: list[torch.Tensor] = []
        plan = gloo_plan([call], rank=self._rank, size=self._size, empty=self._spare.lender(taken))
        works: list[Work] = []
        for start in plan.starts:
            if isinstance(start, AllToAll):
                sizes = list(start.received_sizes), list(start.sent_sizes)
                works.append(self._gloo.alltoall_base(start.received, start.sent, *sizes, c10d.AllToAllOptions()))
            elif isinstance(start, AllReduce):  # too many ranks to exchange parts
                works.append(self._gloo.allreduce([start.tensor], _reduction(op)))

        def finish() -> None:
            run_through(plan.finish())
            self._spare.take_back(taken)

        return Move(works, finish)

    def _is_own_part(self, part: torch.Tensor, full: torch.Tensor) -> bool:
        """Whether a tensor is this rank's part of another one already: nothing has to be brought there."""
        is_equal_part = part.nbytes * self._size == full.nbytes and part.is_contiguous() and full.is_contiguous()
        return is_equal_part and part.data_ptr() == full.data_ptr() + self._rank * part.nbytes

    def _parts(self, full: torch.Tensor) -> list[torch.Tensor]:
        return list(full.detach().view(-1).chunk(self._size)) if full.numel() else [full.detach().view(-1)] * self._size


def _own(op: Any, tensors: Sequence[torch.Tensor]) -> ReduceOp | None:
    """Return our name of what is done with the tensors, ``None`` where gloo has to do it."""
    if not all(tensor.dtype in _ADDED and _is_dense(tensor) for tensor in tensors):
        return None
    return next((own for theirs, own in _OWN_OPS if op == theirs), None)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in whatever order. Ranks may have different orders; gloo does not ask."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _reduction(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    return options


def _root(rank: int) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return options


def _lies_in(shard: torch.Tensor, flat: torch.Tensor) -> bool:
    start = flat.data_ptr()
    return start <= shard.data_ptr() < start + flat.nbytes


def _finish(finishes: Sequence[Callable[[], None]], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for finish in finishes:
        finish()
    for target, source in copies:
        target.copy_(source)


class _SpareMemory:
    """What exchanges receive in, kept for the next one of the same size: new memory costs as much as moving the data."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def lender(self, taken: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that returns memory like a tensor and adds it to ``taken``."""

        def empty(like: torch.Tensor) -> torch.Tensor:
            spare = self._tensors.get((like.numel(), like.dtype))
            tensor = spare.pop() if spare else torch.empty_like(like)
            taken.append(tensor)
            return tensor

        return empty

    def take_back(self, taken: Sequence[torch.Tensor]) -> None:
        """Keep what was lent."""
        for tensor in taken:
            self._tensors.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


class _FilledMemory:
    """Which pieces of memory hold something that was gathered.

    Ranks run the same program, so they all give the same answers: a storage is known while it lives, wherever it lies.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int, int], StorageWeakRef] = {}

    def remember(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor is known, and know it from now on."""
        reference = StorageWeakRef(tensor.untyped_storage())
        key = (int(reference.cdata), int(tensor.storage_offset()), tensor.nbytes)
        # A weak reference keeps its address from being given to another storage, so an equal address is the same storage.
        is_known = key in self._pieces
        if not is_known:
            if len(self._pieces) >= _MAX_PIECES:
                self._pieces = {key: piece for key, piece in self._pieces.items() if not piece.expired()}
            self._pieces[key] = reference
        return is_known
