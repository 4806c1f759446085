"""Which rank updates each whole tensor, and what travels to it and back. No torch.

Shards are cut without regard to parameters, and an optimizer such as Muon updates whole matrices. So each of them has an owner
among the ranks of its reduction group. In every step the pieces of its gradient travel from the shards to the owner, and its
new values travel back. Within one bucket both ends are in buffer order, so what an owner receives from the ranks, in rank
order, is its whole tensors, one behind the other::

    bucket      | A A A A A A | B B B | C C C C |      owners: A -> rank 1, B -> rank 0, C -> rank 1
    shards      | 0 0 0 0 0 | 1 1 1 1 1 | 2 2 2 |
    to rank 0                   B B B                  from rank 1
    to rank 1     A A A A A   A           C C C C      from rank 0, itself, and ranks 1 and 2
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Final, Literal, NamedTuple

from megabucket.layout.layout import BucketLayout, BufferLayout, JsonPart, ModelLayout, Span
from megabucket.layout.shards import params_inside

_NEWTON_SCHULZ_STEPS: Final = 5
_FLOP_PER_ELEMENT: Final = 16  # of an elementwise update such as Adam's

UpdateCost = Callable[[tuple[int, ...]], int]
"""Returns the floating-point operations of one update of a tensor, from its shape."""


def newton_schulz_flop(shape: tuple[int, ...]) -> int:
    """Return the floating-point operations of Muon's update of one tensor.

    For a matrix of m x n, m <= n, that is k (4 m^2 n + 2 m^3) with k = 5 Newton-Schulz iterations: two products of m x m with
    m x n or n x m, and one of m x m with m x m (Jordan et al., "Muon", 2024). More dimensions count as a matrix of the first
    one by the others. A tensor with fewer costs 16 per element, as an elementwise update does.

    >>> newton_schulz_flop((2, 3))
    320
    >>> newton_schulz_flop((10,))
    160
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return _FLOP_PER_ELEMENT * numel
    m, n = sorted((shape[0], numel // shape[0]))
    return _NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3)


class OwnedTensor(NamedTuple):
    """A parameter and the rank that updates it."""

    param: str
    group: str
    """The reduction group."""
    owner: int
    """Rank in the group."""
    cost: int
    """Floating-point operations of an update."""


@dataclass(frozen=True)
class OwnerPlan:
    """The owners of all parameters of a model that are updated whole."""

    tensors: tuple[OwnedTensor, ...]
    """In the order of the buffers, and of the parameters in them."""
    num_ranks: Mapping[str, int]
    """Ranks that share the updates, by reduction group."""

    def __hash__(self) -> int:
        """Agree with ``==``: a mapping has no hash of its own."""
        return hash((self.tensors, frozenset(self.num_ranks.items())))

    @cached_property
    def owner_of(self) -> Mapping[str, int]:
        """The owner of each parameter, a rank in its reduction group."""
        return {tensor.param: tensor.owner for tensor in self.tensors}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hex: equal exactly when the plans are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as canonical JSON."""
        tensors = [tensor._asdict() for tensor in self.tensors]
        data = {"format": "megabucket-owners", "version": 1, "num_ranks": dict(self.num_ranks), "tensors": tensors}
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> OwnerPlan:
        """Read the output of ``to_json``.

        This checks structure and types; ``check_owners`` checks that the plan is sound.

        Raises:
            LayoutError: the text is not JSON, not a plan, or of another version.
        """
        read = _Plan.read(text, "plan of owners")
        return OwnerPlan(read.tensors, read.num_ranks)

    def loads(self, group: str) -> list[int]:
        """Return the cost of each rank of a reduction group, by rank."""
        found = [0] * self.num_ranks[group]
        for tensor in self.tensors:
            if tensor.group == group:
                found[tensor.owner] += tensor.cost
        return found


class _Plan(JsonPart):
    format: Literal["megabucket-owners"]
    version: Literal[1]
    num_ranks: dict[str, int]
    tensors: tuple[OwnedTensor, ...]


def plan_owners(layout: ModelLayout, params: Collection[str], *, cost: UpdateCost = newton_schulz_flop) -> OwnerPlan:
    """Choose the rank that updates each of ``params``: the longest update first, each to the rank with the least to do.

    The busiest rank has at most 4/3 of the least possible cost (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    Among ranks with equally little to do the one that holds most of the parameter is taken. Empty parameters have no owner.
    """
    places = [
        (buffer, name) for buffer in layout.buffers for bucket in buffer.buckets for name in bucket.params if name in params
    ]
    found: dict[str, OwnedTensor] = {}
    num_ranks: dict[str, int] = {}
    loads: dict[str, _Loads] = {}
    costs = [(cost(buffer.params[name].shape), buffer, name) for buffer, name in places if buffer.params[name].numel]
    for flop, buffer, name in sorted(costs, key=itemgetter(0), reverse=True):  # stable: equal ones in buffer order
        group = buffer.key.group
        if group not in loads:
            num_ranks[group], loads[group] = buffer.num_shards, _Loads(buffer.num_shards)
        found[name] = OwnedTensor(name, group, loads[group].add(flop, _by_share(buffer, name)), flop)
    return OwnerPlan(tuple(found[name] for _, name in places if name in found), num_ranks)


def lower_bound(costs: Iterable[int], num_ranks: int) -> int:
    """Return a cost that the busiest rank has at least, however whole tensors are given to ranks.

    It is the greatest of: the average; the longest; for each k, the k + 1 smallest of the k R + 1 longest, since R ranks
    cannot have k of them each; and for each m up to 2 R the best that pairs can do with the m longest, or the three smallest
    of them if a rank has three. ``plan_owners`` is never above 4/3 of it: its proof needs no other facts about the optimum.

    >>> lower_bound([5, 5, 4, 3, 3], 2)  # average 10; of the 5 longest a rank has three, 3 + 3 + 4
    10
    """
    longest = sorted(costs, reverse=True)
    upto = list(accumulate(longest, initial=0))
    bounds = [-(-upto[-1] // num_ranks), *longest[:1]]
    bounds += [upto[k * num_ranks + 1] - upto[k * num_ranks - k] for k in range(1, (len(longest) - 1) // num_ranks + 1)]
    # Pairs grow with m and the three smallest shrink, so the best m is next to where they cross.
    counts = range(max(num_ranks + 1, 3), min(len(longest), 2 * num_ranks) + 1)
    crossing = bisect_left(counts, True, key=lambda m: _in_pairs(longest[:m], num_ranks) >= upto[m] - upto[m - 3])
    bounds += [
        min(_in_pairs(longest[:m], num_ranks), upto[m] - upto[m - 3]) for m in counts[max(crossing - 1, 0) : crossing + 1]
    ]
    return max(bounds)


def _in_pairs(longest: list[int], num_ranks: int) -> int:
    """Return the least cost of the busiest rank if none has more than two: the longest alone, or with the shortest."""
    alone = 2 * num_ranks - len(longest)
    return max(a + b for a, b in zip(longest[alone:num_ranks], reversed(longest[num_ranks:]), strict=True))


class _Loads:
    """The cost that each rank has so far."""

    def __init__(self, num_ranks: int) -> None:
        self._of = [0] * num_ranks
        self._heap = [(0, rank) for rank in range(num_ranks)]  # entries of ranks that got more since are passed over

    def add(self, cost: int, preferred: Iterable[int]) -> int:
        """Add to a rank with the least cost so far, to the first of ``preferred`` that is one, and return it."""
        while self._heap[0][0] != self._of[self._heap[0][1]]:
            heapq.heappop(self._heap)
        least, first = self._heap[0]
        rank = next((rank for rank in preferred if self._of[rank] == least), first)
        self._of[rank] += cost
        heapq.heappush(self._heap, (self._of[rank], rank))
        return rank


def _by_share(buffer: BufferLayout, param: str) -> Iterator[int]:
    """Yield the ranks whose shards hold a parameter, the one with most elements first, equal ones in rank order."""
    slot, bucket = buffer.params[param], buffer.buckets[buffer.params[param].bucket]
    shard_numel = bucket.numel // buffer.num_shards
    start, stop = slot.start - bucket.start, slot.stop - bucket.start
    whole = range(-(-start // shard_numel), stop // shard_numel)
    yield from whole
    ends = {start // shard_numel, (stop - 1) // shard_numel}.difference(whole)
    pieces = [(min(stop - rank * shard_numel, shard_numel) - max(start - rank * shard_numel, 0), rank) for rank in ends]
    yield from (rank for _, rank in sorted(pieces, key=lambda piece: (-piece[0], piece[1])))


def holders_of(buffer: BufferLayout, param: str) -> Iterator[tuple[int, Span]]:
    """Yield the ranks whose shards hold a parameter, in rank order, with their ranges of the buffer."""
    slot = buffer.params[param]
    bucket = buffer.buckets[slot.bucket]
    shard_numel = bucket.numel // buffer.num_shards
    start = slot.start
    while start < slot.stop:
        rank = (start - bucket.start) // shard_numel
        stop = min(slot.stop, bucket.start + (rank + 1) * shard_numel)
        yield rank, Span(start, stop)
        start = stop


class HeldPiece(NamedTuple):
    """A range of a parameter in the shard of one rank."""

    param: str
    in_buffer: Span


@dataclass(frozen=True, slots=True)
class BucketExchange:
    """What one rank sends to the owners of the tensors in one bucket, and receives for those that it owns.

    New values travel the same way back.
    """

    held: tuple[HeldPiece, ...]
    """The pieces in this rank's shard as they are sent: by owner, then in buffer order."""
    held_numels: tuple[int, ...]
    """Elements for each owner, by rank."""
    owned: tuple[str, ...]
    """The tensors of this rank as they arrive, one behind the other: in buffer order."""
    owned_numels: tuple[int, ...]
    """Elements from each holder, by rank."""

    def sent_numel(self, rank: int) -> int:
        """Return the elements that go to other ranks than ``rank``, which this plan is for."""
        return sum(self.held_numels) - self.held_numels[rank]

    def received_numel(self, rank: int) -> int:
        """Return the elements that come from other ranks than ``rank``, which this plan is for."""
        return sum(self.owned_numels) - self.owned_numels[rank]


def plan_exchange(
    buffer: BufferLayout, bucket: BucketLayout, owner_of: Mapping[str, int], *, rank: int
) -> BucketExchange | None:
    """Return the part of one rank in the exchange of one bucket; ``None`` for all ranks if nothing in it has an owner.

    Args:
        owner_of: ranks in the group of the buffer, by parameter.
        rank: in the same group.

    Raises:
        LayoutError: ``rank`` is out of range.
    """
    if not any(name in owner_of for name in bucket.params):
        return None
    shard = buffer.shard_span(bucket=bucket.index, rank=rank)
    inside = [HeldPiece(*piece) for piece in params_inside(buffer, shard, bucket=bucket.index) if piece[0] in owner_of]
    held = sorted(inside, key=lambda piece: owner_of[piece.param])  # stable
    owned = [name for name in bucket.params if owner_of.get(name) == rank]
    held_numels, owned_numels = [0] * buffer.num_shards, [0] * buffer.num_shards
    for piece in held:
        held_numels[owner_of[piece.param]] += piece.in_buffer.numel
    for name in owned:
        for holder, span in holders_of(buffer, name):
            owned_numels[holder] += span.numel
    return BucketExchange(tuple(held), tuple(held_numels), tuple(owned), tuple(owned_numels))
