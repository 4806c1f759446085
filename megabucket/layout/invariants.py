"""What must hold for every sound layout, by name. No torch.

The checks look at the layout alone, never at how it was built, so they hold layouts of any origin to the same rules: ours,
one read from JSON, one made by somebody else's code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, zip_longest
from typing import Final

from megabucket.layout.layout import BucketLayout, BufferLayout, ModelLayout
from megabucket.layout.spec import GROUPS
from megabucket.units import DTYPE_BYTES

_Check = Callable[[BufferLayout], Iterator[str]]


def check_layout(layout: ModelLayout) -> list[str]:
    """Return every violated invariant as ``"name: what is wrong where"``; empty when the layout is sound.

    Time is linear in the number of parameters (plus the sort by position). Never raises for a badly cut layout.
    """
    violations = [f"each-parameter-once: {text}" for text in _names_repeat(layout)]
    for index, buffer in enumerate(layout.buffers):
        for name, check in BUFFER_INVARIANTS.items():
            violations += [f"{name}: buffer {index} ({buffer.key}): {text}" for text in check(buffer)]
    return violations


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


def _buckets_close_at_the_bucket_size(buffer: BufferLayout) -> Iterator[str]:
    """A bucket closes at the first parameter that reaches the size, and for no other reason but a shared embedding."""
    if buffer.cuts is not None or any(name not in buffer.params for bucket in buffer.buckets for name in bucket.params):
        return
    for bucket, following in zip_longest(buffer.buckets, buffer.buckets[1:]):
        if not bucket.params:
            continue
        slots = [buffer.params[name] for name in bucket.params]
        if buffer.bucket_size is not None and any(slot.stop - bucket.start >= buffer.bucket_size for slot in slots[:-1]):
            yield f"bucket {bucket.index} goes on after reaching bucket_size={buffer.bucket_size}"
        is_full = buffer.bucket_size is not None and slots[-1].stop - bucket.start >= buffer.bucket_size
        if following is not None and not is_full and not _closes_for_embedding(buffer, bucket, following):
            yield f"bucket {bucket.index} closes at {bucket.numel_unpadded} elements, before bucket_size={buffer.bucket_size}"


def _buckets_close_at_the_cuts(buffer: BufferLayout) -> Iterator[str]:
    """A bucket closes at each named parameter, and for no other reason but a shared embedding."""
    if buffer.cuts is None:
        return
    if buffer.bucket_size is not None:
        yield f"buckets are cut by name and by bucket_size={buffer.bucket_size}"
    cuts = set(buffer.cuts)
    yield from (f"cut {name!r} is no parameter of the buffer" for name in buffer.cuts if name not in buffer.params)
    for bucket, following in zip_longest(buffer.buckets, buffer.buckets[1:]):
        yield from (f"bucket {bucket.index} goes on after the cut at {name!r}" for name in bucket.params[:-1] if name in cuts)
        is_cut = bool(bucket.params) and bucket.params[-1] in cuts
        if following is not None and bucket.params and not is_cut and not _closes_for_embedding(buffer, bucket, following):
            yield f"bucket {bucket.index} closes after {bucket.params[-1]!r}, which is no cut"


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
    if buffer.key.group not in GROUPS:
        yield f"group {buffer.key.group!r} is not known"


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
    "buckets-close-at-the-bucket-size": _buckets_close_at_the_bucket_size,
    "buckets-close-at-the-cuts": _buckets_close_at_the_cuts,
    "shared-embeddings-are-alone": _shared_embeddings_are_alone,
    "key-is-known": _key_is_known,
}
"""Checks of one buffer by name; each yields a text per violation."""
