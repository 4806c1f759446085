"""Named invariants of a finished layout, made by this library or by other code in this library's types.

``check_layout`` returns what is violated. Nothing here builds a layout, so nothing repeats the algorithm that is checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Final

from megabucket.errors import name_list
from megabucket.layout.layout import BucketLayout, BufferLayout, ModelLayout, Span
from megabucket.layout.owners import BucketExchange, OwnerPlan, lower_bound, plan_exchange
from megabucket.units import DTYPE_BYTES

_Check = Callable[[BufferLayout], Iterator[str]]


def check_layout(layout: ModelLayout) -> list[str]:
    """Return every violated invariant as ``"name: buffer: problem"``; empty when the layout is sound.

    Time is linear in the number of parameters (plus the sort by position). Never raises for a badly cut layout.
    """
    violations = [f"each-parameter-once: {text}" for text in _names_repeat(layout)]
    violations += [f"groups-have-one-size: {text}" for text in _groups_have_several_sizes(layout)]
    for index, buffer in enumerate(layout.buffers):
        for name, check in BUFFER_INVARIANTS.items():
            violations += [f"{name}: buffer {index} ({buffer.key}): {text}" for text in check(buffer)]
    return violations


def check_owners(layout: ModelLayout, plan: OwnerPlan, params: Collection[str] | None = None) -> list[str]:
    """Return every violated invariant of a plan of owners as ``"name: problem"``; empty when the plan is sound.

    What travels is computed for every rank, so time grows with the square of the ranks. Never raises for a bad plan of a sound
    layout.

    Args:
        params: those that need an owner unless they are empty. ``None``: those that the plan names.
    """
    buffer_of = {name: buffer for buffer in layout.buffers for name in buffer.params}
    violations = [f"each-tensor-once: {text}" for text in _owned_not_once(buffer_of, plan, params)]
    for name, group, owner, cost in plan.tensors:
        buffer = buffer_of.get(name)
        if buffer is not None and (group != buffer.key.group or plan.num_ranks.get(group) != buffer.num_shards):
            cut = f"{buffer.num_shards} of {buffer.key.group!r}"
            violations.append(f"group-is-the-buffer's: {name!r} has {plan.num_ranks.get(group)} ranks of {group!r}, not {cut}")
        if not 0 <= owner < plan.num_ranks.get(group, 0):
            violations.append(f"owner-is-a-rank: {name!r} belongs to rank {owner} of {plan.num_ranks.get(group)}")
        if cost < 0:
            violations.append(f"cost-is-not-negative: {name!r} costs {cost}")
    if violations:
        return violations
    for group, num_ranks in plan.num_ranks.items():
        busiest = max(plan.loads(group))
        least = lower_bound((tensor.cost for tensor in plan.tensors if tensor.group == group), num_ranks)
        if 3 * busiest > 4 * least:
            violations.append(f"busiest-is-within-4/3: {busiest} of {group!r} is more than 4/3 of the lower bound {least}")
    for buffer in layout.buffers:
        for bucket in buffer.buckets:
            parts = [plan_exchange(buffer, bucket, plan.owner_of, rank=rank) for rank in range(buffer.num_shards)]
            violations += _exchange_violations(buffer, bucket, plan.owner_of, [part for part in parts if part is not None])
    return violations


def _owned_not_once(buffer_of: Mapping[str, BufferLayout], plan: OwnerPlan, params: Collection[str] | None) -> Iterator[str]:
    count = Counter(tensor.param for tensor in plan.tensors)
    wanted = set(count if params is None else params)
    for name in sorted(wanted | set(count)):
        is_there = name in buffer_of and buffer_of[name].params[name].numel > 0
        if count[name] != (name in wanted and is_there):
            yield f"{name!r} has {count[name]} owners" + ("" if is_there else " and no elements")


def _exchange_violations(
    buffer: BufferLayout, bucket: BucketLayout, owner_of: Mapping[str, int], parts: Sequence[BucketExchange]
) -> Iterator[str]:
    """Yield what is wrong with the exchange of one bucket: ``parts`` by rank; none where no rank has one."""
    place = f"bucket {bucket.index} of {buffer.key}"
    if [part.held_numels for part in parts] != list(zip(*(part.owned_numels for part in parts), strict=True)):
        yield f"sent-is-received: {place}: the elements that ranks send and receive are not each other's transpose"
    arriving: dict[str, list[Span]] = {name: [] for name in bucket.params if name in owner_of}
    for part in parts:
        for name, piece in part.held:
            arriving.setdefault(name, []).append(piece)
    for name, pieces in arriving.items():
        whole = buffer.params[name]
        starts, stops = [piece.start for piece in pieces], [piece.stop for piece in pieces]
        if [*starts, whole.stop] != [whole.start, *stops]:
            yield f"each-element-travels-once: {place}: the pieces of {name!r} in rank order are {list(map(tuple, pieces))}"
    owned = [name for part in parts for name in part.owned]
    if sorted(owned) != sorted(arriving):
        yield f"each-element-travels-once: {place}: owners await {name_list(owned)}, not {name_list(list(arriving))}"


# The invariants, one by one: each looks at one buffer and yields a text per violation #


def _names_repeat(layout: ModelLayout) -> Iterator[str]:
    holders = Counter(name for buffer in layout.buffers for name in buffer.params)
    yield from (f"{name!r} lies in {count} buffers" for name, count in holders.items() if count > 1)
    indices = Counter(slot.registration_index for buffer in layout.buffers for slot in buffer.params.values())
    yield from (f"registration number {index} is used {count} times" for index, count in indices.items() if count > 1)
    ready = Counter(slot.ready_index for buffer in layout.buffers for slot in buffer.params.values())
    num_unplaced = ready.pop(None, 0)
    if ready and num_unplaced:
        yield f"{num_unplaced} of {ready.total() + num_unplaced} parameters have no place in the recorded order"
    yield from (f"place {index} of the recorded order is used {count} times" for index, count in ready.items() if count > 1)


def _groups_have_several_sizes(layout: ModelLayout) -> Iterator[str]:
    sizes: dict[str, set[int]] = {}
    for buffer in layout.buffers:
        sizes.setdefault(buffer.key.group, set()).add(buffer.num_shards)
    yield from (f"buffers of {group!r} are cut for {sorted(found)} shards" for group, found in sizes.items() if len(found) > 1)


def _each_parameter_in_one_bucket(buffer: BufferLayout) -> Iterator[str]:
    listed = Counter(name for bucket in buffer.buckets for name in bucket.params)
    for name in buffer.params:
        if listed[name] != 1:
            yield f"{name!r} is listed in {listed[name]} buckets"
    for name in listed:
        if name not in buffer.params:
            yield f"bucket lists {name!r}, which has no slot"
    for bucket in buffer.buckets:
        for name in bucket.params:
            if name in buffer.params and buffer.params[name].bucket != bucket.index:
                yield f"{name!r} is listed in bucket {bucket.index} but its slot says {buffer.params[name].bucket}"


def _ranges_have_the_size_of_the_shape(buffer: BufferLayout) -> Iterator[str]:
    for name, slot in buffer.params.items():
        if slot.stop - slot.start != math.prod(slot.shape) or any(size < 0 for size in slot.shape):
            yield f"{name!r} has shape {slot.shape} but range [{slot.start}, {slot.stop})"


def _ranges_are_disjoint(buffer: BufferLayout) -> Iterator[str]:
    filled = sorted((slot.start, slot.stop, name) for name, slot in buffer.params.items() if slot.stop > slot.start)
    for (_, stop, before), (start, _, after) in pairwise(filled):
        if start < stop:
            yield f"{before!r} and {after!r} overlap at element {start}"


def _ranges_lie_inside_their_bucket(buffer: BufferLayout) -> Iterator[str]:
    for name, slot in buffer.params.items():
        if not 0 <= slot.bucket < len(buffer.buckets):
            yield f"{name!r} is in bucket {slot.bucket} of {len(buffer.buckets)}"
            continue
        bucket = buffer.buckets[slot.bucket]
        if not bucket.start <= slot.start <= slot.stop <= bucket.start + bucket.numel_unpadded:
            yield f"{name!r} at [{slot.start}, {slot.stop}) leaves the unpadded part of bucket {slot.bucket}"


def _buckets_tile_the_buffer(buffer: BufferLayout) -> Iterator[str]:
    position = 0
    for number, bucket in enumerate(buffer.buckets):
        if bucket.index != number:
            yield f"bucket at position {number} is numbered {bucket.index}"
        if bucket.start != position or bucket.stop < bucket.start:
            yield f"bucket {number} is [{bucket.start}, {bucket.stop}), expected to start at {position}"
        position = bucket.stop


def _order_is_the_expected_one(buffer: BufferLayout, *, is_recorded: bool) -> Iterator[str]:
    """Parameters lie in the order in which gradients are expected. Looks at pairs with a recorded place, or at the others."""
    names = [name for bucket in buffer.buckets for name in bucket.params if name in buffer.params]
    for before, after in pairwise(names):
        first, second = buffer.params[before], buffer.params[after]
        if is_recorded != (first.ready_index is not None and second.ready_index is not None):
            continue
        if first.expected_position >= second.expected_position or first.start > second.start:
            known = f"ready as number {first.ready_index}" if is_recorded else f"number {first.registration_index}"
            later = second.ready_index if is_recorded else second.registration_index
            yield f"{before!r} ({known}) stands before {after!r} (number {later})"


def _starts_are_aligned(buffer: BufferLayout) -> Iterator[str]:
    for name, slot in buffer.params.items():
        if buffer.start_alignment < 1 or slot.start % buffer.start_alignment:
            yield f"{name!r} starts at {slot.start}, not a multiple of {buffer.start_alignment}"


def _bucket_ends_are_aligned(buffer: BufferLayout) -> Iterator[str]:
    for bucket in buffer.buckets:
        if buffer.end_multiple < 1 or bucket.stop % buffer.end_multiple:
            yield f"bucket {bucket.index} ends at {bucket.stop}, not a multiple of {buffer.end_multiple}"


def _shards_are_equal(buffer: BufferLayout) -> Iterator[str]:
    for bucket in buffer.buckets:
        if buffer.num_shards < 1 or bucket.numel % buffer.num_shards:
            yield f"bucket {bucket.index} has {bucket.numel} elements, not divisible into {buffer.num_shards} shards"


def _padding_is_minimal(buffer: BufferLayout) -> Iterator[str]:
    for bucket, following in zip_longest(buffer.buckets, buffer.buckets[1:]):
        tail = bucket.numel - bucket.numel_unpadded
        if not 0 <= tail < max(buffer.end_multiple, 1):
            yield f"bucket {bucket.index} ends with {tail} elements of padding, limit {buffer.end_multiple - 1}"
        end = bucket.start
        for name in bucket.params:
            slot = buffer.params.get(name)
            if slot is None:
                continue
            if slot.start - end >= max(buffer.start_alignment, 1):
                yield f"{slot.start - end} unused elements before {name!r}, limit {buffer.start_alignment - 1}"
            end = slot.stop
        counted = bucket.start + bucket.numel_unpadded - end
        # Only a bucket that a shared embedding closed may count the gap up to where the embedding would have started.
        first = buffer.params.get(following.params[0]) if following is not None and following.params else None
        gap = -end % max(buffer.start_alignment, 1) if first is not None and first.shared_embedding else 0
        if counted > 0 and counted != gap:
            yield f"bucket {bucket.index} counts {counted} elements after its last parameter"


def _no_bucket_is_empty(buffer: BufferLayout) -> Iterator[str]:
    yield from (f"bucket {bucket.index} holds no parameter" for bucket in buffer.buckets if not bucket.params)


def _buckets_close_where_they_should(buffer: BufferLayout) -> Iterator[str]:
    """A bucket closes at the first parameter that is a cut or reaches the size; else only for a shared embedding."""
    size, cuts = buffer.bucket_size, set(buffer.cuts or ())
    if size is not None and buffer.cuts is not None:
        yield f"buckets are cut by name and by bucket_size={size}"
    yield from (f"cut {name!r} is no parameter of the buffer" for name in buffer.cuts or () if name not in buffer.params)
    for bucket, following in zip_longest(buffer.buckets, buffer.buckets[1:]):
        if any(name not in buffer.params for name in bucket.params):
            return
        stops = {name: buffer.params[name].stop - bucket.start for name in bucket.params}
        ends = [name for name, stop in stops.items() if name in cuts or (size is not None and stop >= size)]
        yield from (f"bucket {bucket.index} goes on after {name!r}" for name in ends if name != bucket.params[-1])
        if following is None or not stops or _closes_for_embedding(buffer, bucket, following):
            continue
        if (last := bucket.params[-1]) not in ends:
            yield f"bucket {bucket.index} closes after {last!r}, which neither reaches bucket_size={size} nor is a cut"


def _closes_for_embedding(buffer: BufferLayout, bucket: BucketLayout, following: BucketLayout) -> bool:
    """Whether a bucket ends because of a shared embedding: its own, or the one that comes next."""
    names = (*bucket.params[-1:], *following.params[:1])
    return buffer.start_alignment > 1 and any(name in buffer.params and buffer.params[name].shared_embedding for name in names)


def _shared_embeddings_are_alone(buffer: BufferLayout) -> Iterator[str]:
    if buffer.start_alignment == 1:
        return  # unpadded layouts are not sharded, so copies on other stages need no common cut
    for bucket in buffer.buckets:
        shared = [name for name in bucket.params if name in buffer.params and buffer.params[name].shared_embedding]
        if shared and len(bucket.params) > 1:
            yield f"shared embedding {shared[0]!r} shares bucket {bucket.index} with {len(bucket.params) - 1} others"


def _key_is_known(buffer: BufferLayout) -> Iterator[str]:
    for dtype in (buffer.key.param_dtype, buffer.key.grad_dtype):
        if dtype not in DTYPE_BYTES:
            yield f"dtype {dtype!r} is not known"
    if not buffer.key.group:
        yield "the reduction group has no name"


BUFFER_INVARIANTS: Final[dict[str, _Check]] = {
    "each-parameter-in-one-bucket": _each_parameter_in_one_bucket,
    "range-has-the-size-of-the-shape": _ranges_have_the_size_of_the_shape,
    "ranges-are-disjoint": _ranges_are_disjoint,
    "ranges-lie-inside-their-bucket": _ranges_lie_inside_their_bucket,
    "buckets-tile-the-buffer": _buckets_tile_the_buffer,
    "order-is-reverse-registration": partial(_order_is_the_expected_one, is_recorded=False),
    "order-is-the-recorded-one": partial(_order_is_the_expected_one, is_recorded=True),
    "starts-are-aligned": _starts_are_aligned,
    "bucket-ends-are-aligned": _bucket_ends_are_aligned,
    "shards-are-equal": _shards_are_equal,
    "padding-is-minimal": _padding_is_minimal,
    "no-bucket-is-empty": _no_bucket_is_empty,
    "buckets-close-where-they-should": _buckets_close_where_they_should,
    "shared-embeddings-are-alone": _shared_embeddings_are_alone,
    "key-is-known": _key_is_known,
}
"""Checks of one buffer by name; each yields a text per violation."""
