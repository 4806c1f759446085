"""Which pieces of which parameters a rank owns, in the four coordinate systems that meet in an optimizer step. No torch."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from megabucket.errors import LayoutError
from megabucket.layout.layout import BufferLayout, Span


class ShardSlice(NamedTuple):
    """A piece of one parameter owned by one rank: four ranges of equal length.

    ::

        in_buffer   counted from the start of the buffer
        in_bucket   counted from the start of the bucket
        in_shard    counted from the start of the rank's shard of that bucket
        in_param    counted from the start of the flattened parameter
    """

    param: str
    in_buffer: Span
    in_bucket: Span
    in_shard: Span
    in_param: Span


def shard_slices(buffer: BufferLayout, *, bucket: int, rank: int) -> tuple[ShardSlice, ...]:
    """Return the pieces of each parameter that ``rank`` owns in one bucket, in buffer order.

    A bucket is cut into ``num_shards`` equal shards without regard to where parameters begin, so a parameter may be owned by
    several ranks and a rank may own padding only (an empty result). Over all ranks the pieces of a parameter cover it
    exactly once. Empty parameters are owned by nobody.

    Args:
        bucket: index into ``buffer.buckets``.
        rank: position in the group that the buffer is sharded over, not the global rank.

    Raises:
        LayoutError: ``bucket`` or ``rank`` is out of range.
    """
    if not 0 <= bucket < len(buffer.buckets):
        raise LayoutError(f"bucket {bucket} is out of range; the buffer {buffer.key} has {len(buffer.buckets)} buckets")
    if not 0 <= rank < buffer.num_shards:
        raise LayoutError(f"rank {rank} is out of range; the buffer {buffer.key} is cut for {buffer.num_shards} shards")
    cut = buffer.buckets[bucket]
    shard = buffer.shard_span(bucket=bucket, rank=rank)
    # Names lie in buffer order, so the owned parameters are consecutive: find the first, stop after the last.
    first = bisect_right(cut.params, shard.start, key=lambda name: buffer.params[name].stop)
    pieces = []
    for position in range(first, len(cut.params)):
        name = cut.params[position]
        slot = buffer.params[name]
        start, stop = max(slot.start, shard.start), min(slot.stop, shard.stop)
        if slot.start >= shard.stop:
            break
        if start < stop:
            pieces.append(
                ShardSlice(
                    param=name,
                    in_buffer=Span(start, stop),
                    in_bucket=Span(start - cut.start, stop - cut.start),
                    in_shard=Span(start - shard.start, stop - shard.start),
                    in_param=Span(start - slot.start, stop - slot.start),
                )
            )
    return tuple(pieces)
