"""What is done for one batch of collectives: the plan that a way of doing it makes once, and that each launch goes through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, starmap
from typing import Any

import torch

from megabucket.comm.port import Call

Pair = tuple[torch.Tensor, torch.Tensor]
Operation = tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]
"""A function in C and the arguments of its calls."""


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Send each rank its part of ``sent`` and receive, from each rank, a part of ``received``. Bytes, in rank order."""

    sent: torch.Tensor
    received: torch.Tensor
    sent_sizes: Sequence[int]
    received_sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Read:
    """What one operation reads of another rank's memory: it returns as many bytes."""

    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """How one rank does a batch by reading: in stages, after each of which it hears from all ranks how they fare."""

    stages: Sequence[Sequence[Operation]]
    reads: Sequence[Read]
    """What operations read from other processes, in their order."""


@dataclass(slots=True, eq=False)
class InBackground:
    """Have the thread of the group do these calls by reading, beside what the caller does next. Sums come divided."""

    calls: Sequence[Call]
    addresses: Sequence[Sequence[int]] = ()
    """By rank, those of the calls, which the thread learns; with them it has made ``reading``."""
    reading: Reading | None = None


Start = Call | AllToAll | InBackground


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is done for one batch: copies, collectives, and in-place operations when these are complete."""

    starts: Sequence[Start]
    copies: Sequence[Pair] = ()
    """Targets and sources, before each launch."""
    after: Sequence[Operation] = ()
    """In-place operations, each with the arguments of its calls, after each launch, in order."""
    keeps: Sequence[torch.Tensor] = ()
    """Live as long as the plan: see ``anchor``."""

    def __add__(self, other: Plan) -> Plan:
        """Return the plan that does what both do."""
        return Plan(*([*getattr(self, part.name), *getattr(other, part.name)] for part in fields(Plan)))

    @property
    def is_read(self) -> bool:
        """Whether it is done by reading other ranks' memory; sums are divided by the calls' divisors then."""
        return any(isinstance(start, InBackground) for start in self.starts)

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
            elif isinstance(start, InBackground):
                yield from (call.full for call in start.calls)
            else:
                yield from {start.full, getattr(start, "shard", start.full)}

    def finish(self) -> Iterator[object]:
        """Return an iterator that does one operation of ``after`` at each step: see ``steps``."""
        return steps(self.after)


def steps(operations: Iterable[Operation]) -> Iterator[object]:
    """Return an iterator that does one operation at each step and gives what it returned.

    Each step is a call in C, and so is going through all of them (``run_through``). A signal handler runs before or after,
    so a wait that it ends and that is begun again goes on where it was, and never adds anything twice.
    """
    return chain.from_iterable(starmap(starmap, operations))


def run_through(operations: Iterator[object]) -> None:
    """Do what is left."""
    deque(operations, maxlen=0)


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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is sent where nothing is computed: gloo knows neither bool (masks) nor int16."""
    is_bytes = tensor.dtype == torch.uint8 and tensor.dim() == 1
    return tensor if is_bytes else tensor.view(-1).view(torch.uint8)
