"""How data moves on the emulated fabric: gloo's collectives whose works can be waited for by two threads.

Gloo's own reduce-scatter copies its result inside of each ``wait``, so a second waiter would write over what the first has
begun to use; and both it and the gather clone or copy through temporaries. Here a gather is one broadcast of each shard, in
place. A reduce-scatter whose shard lies in the buffer is an exchange of parts, and any other one an all-reduce of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from megabucket.comm.gloo_paths import gloo_plan
from megabucket.comm.plan import AllToAll, run_through
from megabucket.comm.port import AllReduce, ReduceOp, ReduceScatter

_EXCHANGED: Final = ((dist.ReduceOp.SUM, ReduceOp.SUM), (dist.ReduceOp.AVG, ReduceOp.AVG))

_MAX_PIECES: Final = 1024
"""Remembered before dead ones are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Works under way, and what is left to do when they are done."""

    works: Sequence[dist.Work]
    finish: Callable[[], None] | None = None


class Mover:
    """Moves shards with a gloo group."""

    def __init__(self, gloo: Any, *, rank: int, size: int) -> None:
        self._gloo, self._rank, self._size = gloo, rank, size
        self._filled = _FilledMemory()
        self._spare = _SpareMemory()

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], moves: bool) -> Move:
        """Collect the inputs of all ranks in the outputs.

        Args:
            moves: ``False``: only memory that was never gathered into is filled, because it may hold anything; elsewhere what
                the other ranks sent before stays.
        """
        works: list[dist.Work] = []
        for output, own in zip(outputs, inputs, strict=True):
            parts, flat = self._parts(output), own.detach().reshape(-1)
            if parts[self._rank].data_ptr() != flat.data_ptr():
                parts[self._rank].copy_(flat)
            if moves or not self._filled.remember(output):
                filled = ((rank, part) for rank, part in enumerate(parts) if part.numel())
                works += [self._gloo.broadcast([part.view(torch.uint8)], _root(rank)) for rank, part in filled]
        return Move(works)

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any, moves: bool) -> Move:
        """Reduce the inputs over all ranks; each output receives this rank's part.

        Args:
            moves: ``False``: nothing is reduced, and the output receives what this rank has.
        """
        exchanged = next((own for theirs, own in _EXCHANGED if op == theirs), None)
        pairs = [(output.detach(), full.detach()) for output, full in zip(outputs, inputs, strict=True) if full.numel()]
        if moves and exchanged and all(_lies_in(*pair) for pair in pairs):
            return self._exchange([ReduceScatter(shard, full, exchanged) for shard, full in pairs], op)
        works: list[dist.Work] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for output, full in zip(outputs, inputs, strict=True):
            flat = full.detach().reshape(-1)
            buffer = flat if not moves or _lies_in(output, flat) else flat.clone()
            if moves and buffer.numel():
                options = c10d.AllreduceOptions()
                options.reduceOp = op
                works.append(self._gloo.allreduce([buffer], options))
            part = self._parts(buffer)[self._rank]
            if part.data_ptr() != output.data_ptr():
                copies.append((output.detach().view(-1), part))
        return Move(works, (lambda: _copy_all(copies)) if copies else None)

    def _exchange(self, calls: Sequence[ReduceScatter], op: Any) -> Move:
        if not calls:
            return Move([])
        taken: list[torch.Tensor] = []
        plan = gloo_plan(calls, rank=self._rank, size=self._size, empty=self._spare.lender(taken))
        works = []
        for start in plan.starts:
            if isinstance(start, AllToAll):
                sizes = list(start.received_sizes), list(start.sent_sizes)
                works.append(self._gloo.alltoall_base(start.received, start.sent, *sizes, c10d.AllToAllOptions()))
            elif isinstance(start, AllReduce):  # too many ranks to exchange parts
                options = c10d.AllreduceOptions()
                options.reduceOp = op
                works.append(self._gloo.allreduce([start.tensor], options))

        def finish() -> None:
            run_through(plan.finish())
            self._spare.take_back(taken)

        return Move(works, finish)

    def _parts(self, full: torch.Tensor) -> list[torch.Tensor]:
        return list(full.detach().view(-1).chunk(self._size)) if full.numel() else [full.detach().view(-1)] * self._size


def _root(rank: int) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return options


def _lies_in(shard: torch.Tensor, flat: torch.Tensor) -> bool:
    start = flat.data_ptr()
    return start <= shard.data_ptr() < start + flat.nbytes


def _copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
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
