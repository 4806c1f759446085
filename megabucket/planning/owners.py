"""What owners of whole tensors cost: operations, bytes that travel and buffers, from a layout and its plan. No torch.

An optimizer such as Muon updates matrices whole, so that each has an owner (``layout.owners``). Time is linear in the number of
parameters and of ranks, also where a parameter lies in the shards of a thousand ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from megabucket.layout import BucketLayout, BufferLayout, ModelLayout, OwnerPlan, plan_exchange, plan_owners
from megabucket.layout.owners import lower_bound
from megabucket.units import dtype_bytes

_MAIN_BYTES: Final = 4  # float32


@dataclass(frozen=True, slots=True)
class GroupOwners:
    """The owners of one reduction group in numbers: of the busiest rank, each by itself."""

    group: str
    num_ranks: int
    num_tensors: int
    """Tensors that have an owner."""
    numel: int
    """Elements of them."""
    mean_flop: float
    """Operations of an update, on average over the ranks."""
    busiest_flop: int
    """Operations of the rank that has most to do."""
    least_flop: int
    """What no plan can be below, see ``layout.owners.lower_bound``."""
    sent_bytes: int
    """Most bytes that a rank sends to others in a step: pieces of gradients to owners, and values back."""
    received_bytes: int
    """Most bytes that a rank receives from others in a step."""
    reduce_gather_bytes: float
    """Bytes that each rank sends in the reduce-scatters and gathers of all parameters of the group."""
    exchange_buffer_bytes: int
    """Most bytes of the buffers of a rank's exchange, as ``owner_exchange_bytes`` counts them."""

    @property
    def sent_fraction(self) -> float:
        """The bytes that the busiest rank sends, as a share of those in reduce-scatters and gathers."""
        return self.sent_bytes / self.reduce_gather_bytes if self.reduce_gather_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self) | {"sent_fraction": self.sent_fraction}


class RankTraffic(NamedTuple):
    """Elements of owned parameters of one buffer at one rank."""

    held: int
    """In its shards."""
    owned: int
    """In the tensors that it updates."""
    kept: int
    """In both, so that they do not travel."""


def describe_owners(layout: ModelLayout, whole_params: Collection[str]) -> tuple[GroupOwners, ...]:
    """Return the owners of parameters that are updated whole, in numbers for each reduction group that has such."""
    plan = plan_owners(layout, whole_params)
    return tuple(_group(layout, plan, group) for group in plan.num_ranks)


def owned_flop(plan: OwnerPlan) -> int:
    """Return the operations of the rank with most to do over all groups, of which smaller ones repeat over the ranks."""
    loads = [plan.loads(group) for group in plan.num_ranks]
    return max((sum(load[rank % len(load)] for load in loads) for rank in range(max(map(len, loads), default=0))), default=0)


def rank_traffic(buffer: BufferLayout, owner_of: Mapping[str, int]) -> list[RankTraffic]:
    """Return what each rank holds and owns, by rank."""
    # Of whole shards only the first and the last rank are touched: steps[r] is what rank r has more than rank r - 1.
    steps, owned, kept = ([0] * (buffer.num_shards + 1) for _ in range(3))
    for name, slot in buffer.params.items():
        if name in owner_of and slot.numel:
            owned[owner_of[name]] += slot.numel
            for first, stop, numel in _shares(buffer, name):
                steps[first] += numel
                steps[stop] -= numel
                if first <= owner_of[name] < stop:
                    kept[owner_of[name]] += numel
    return [RankTraffic(*each) for each in zip(accumulate(steps[:-1]), owned[:-1], kept[:-1], strict=True)]


def busiest_exchange(layout: ModelLayout, plan: OwnerPlan) -> int:
    """Return the rank that sends or receives most in a step, the first of several. Smaller groups repeat over the ranks."""
    loads = []
    for buffer in layout.buffers:
        both_bytes = dtype_bytes(buffer.key.param_dtype) + dtype_bytes(buffer.key.grad_dtype)
        loads.append([(max(each[:2]) - each.kept) * both_bytes for each in rank_traffic(buffer, plan.owner_of)])
    return max(range(max(map(len, loads))), key=lambda rank: sum(load[rank % len(load)] for load in loads))


def exchanged_numel(buffer: BufferLayout, bucket: BucketLayout, owner_of: Mapping[str, int], *, rank: int) -> int:
    """Return the elements that a rank sends to others or receives, whichever are more, in each exchange of one bucket."""
    exchange = plan_exchange(buffer, bucket, owner_of, rank=rank)
    return 0 if exchange is None else max(exchange.sent_numel(rank), exchange.received_numel(rank))


def owner_exchange_bytes(traffic: Sequence[tuple[BufferLayout, RankTraffic]]) -> int:
    """Return the bytes of the buffers of one rank's exchange. They live inside a step only, so no table of memory has them.

    The greater of two moments: pieces of gradients to send beside the whole ones that arrive, in the gradients' dtype; and
    then these, with a float32 copy where 16-bit parameters have 16-bit gradients, beside the new values that leave and
    arrive, in the parameters' dtype.

    Args:
        traffic: of each buffer of the model at the rank.
    """
    arriving = leaving = 0
    for buffer, (held, owned, _) in traffic:
        param_bytes, grad_bytes = dtype_bytes(buffer.key.param_dtype), dtype_bytes(buffer.key.grad_dtype)
        widened_bytes = _MAIN_BYTES if max(param_bytes, grad_bytes) < _MAIN_BYTES else 0
        arriving += (held + owned) * grad_bytes
        leaving += owned * (grad_bytes + widened_bytes) + (owned + held) * param_bytes
    return max(arriving, leaving)


def _group(layout: ModelLayout, plan: OwnerPlan, group: str) -> GroupOwners:
    buffers = [buffer for buffer in layout.buffers if buffer.key.group == group]
    num_ranks = plan.num_ranks[group]
    by_rank = list(zip(*(rank_traffic(buffer, plan.owner_of) for buffer in buffers), strict=True))
    sent = [[0] * num_ranks, [0] * num_ranks]
    for rank, traffic in enumerate(by_rank):
        for buffer, (held, owned, kept) in zip(buffers, traffic, strict=True):
            param_bytes, grad_bytes = dtype_bytes(buffer.key.param_dtype), dtype_bytes(buffer.key.grad_dtype)
            sent[0][rank] += (held - kept) * grad_bytes + (owned - kept) * param_bytes
            sent[1][rank] += (owned - kept) * grad_bytes + (held - kept) * param_bytes
    both_ways = sum(
        buffer.numel * (dtype_bytes(buffer.key.param_dtype) + dtype_bytes(buffer.key.grad_dtype)) for buffer in buffers
    )
    loads = plan.loads(group)
    costs = [tensor.cost for tensor in plan.tensors if tensor.group == group]
    return GroupOwners(
        group=group,
        num_ranks=num_ranks,
        num_tensors=len(costs),
        numel=sum(each.owned for traffic in by_rank for each in traffic),
        mean_flop=sum(loads) / num_ranks,
        busiest_flop=max(loads),
        least_flop=lower_bound(costs, num_ranks),
        sent_bytes=max(sent[0]),
        received_bytes=max(sent[1]),
        reduce_gather_bytes=both_ways * (num_ranks - 1) / num_ranks,
        exchange_buffer_bytes=max(owner_exchange_bytes(list(zip(buffers, each, strict=True))) for each in by_rank),
    )


class _Share(NamedTuple):
    """Consecutive ranks, ``first`` to ``stop`` (exclusive), that hold equally many elements of a parameter each."""

    first: int
    stop: int
    numel: int


def _shares(buffer: BufferLayout, param: str) -> Iterator[_Share]:
    """Yield the ranks that hold a parameter, in rank order: its first one, those between, its last one."""
    slot = buffer.params[param]
    if not slot.numel:
        return
    bucket = buffer.buckets[slot.bucket]
    shard_numel = bucket.numel // buffer.num_shards
    first, last = (slot.start - bucket.start) // shard_numel, (slot.stop - 1 - bucket.start) // shard_numel
    if first == last:
        yield _Share(first, first + 1, slot.numel)
        return
    yield _Share(first, first + 1, bucket.start + (first + 1) * shard_numel - slot.start)
    if first + 1 < last:
        yield _Share(first + 1, last, shard_numel)
    yield _Share(last, last + 1, slot.stop - bucket.start - last * shard_numel)
