"""The pieces of parameters that each rank owns. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

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
    exactly once. Empty parameters have no owner.

    Args:
        bucket: index into ``buffer.buckets``.
        rank: position in the group that the buffer is sharded over, not the global rank.

    Raises:
        LayoutError: ``bucket`` or ``rank`` is out of range.
    """
    shard = buffer.shard_span(bucket=bucket, rank=rank)
    origin = buffer.buckets[bucket].start
    return tuple(
        ShardSlice(
            param=name,
            in_buffer=piece,
            in_bucket=Span(piece.start - origin, piece.stop - origin),
            in_shard=Span(piece.start - shard.start, piece.stop - shard.start),
            in_param=Span(piece.start - buffer.params[name].start, piece.stop - buffer.params[name].start),
        )
        for name, piece in params_inside(buffer, shard, bucket=bucket)
    )


def params_inside(buffer: BufferLayout, span: Span, *, bucket: int) -> Iterator[tuple[str, Span]]:
    """Yield each parameter of a bucket with elements in ``span``, and their range, in buffer order and coordinates."""
    names = buffer.buckets[bucket].params
    # Names lie in buffer order, so these parameters are consecutive: find the first, stop after the last.
    for position in range(bisect_right(names, span.start, key=lambda name: buffer.params[name].stop), len(names)):
        slot = buffer.params[names[position]]
        if slot.start >= span.stop:
            return
        piece = Span(max(slot.start, span.start), min(slot.stop, span.stop))
        if piece.start < piece.stop:
            yield names[position], piece


class ShardOwners(NamedTuple):
    """Consecutive ranks, ``first_rank`` to ``last_rank`` inclusive, that own pieces of the same parameters."""

    first_rank: int
    last_rank: int
    params: tuple[str, ...]
    """In buffer order; empty if the ranks own padding only."""


def shard_owners(buffer: BufferLayout, *, bucket: int) -> Iterator[ShardOwners]:
    """Yield all ranks with the parameters that they own in one bucket, each once, in rank order.

    Time is linear in the number of parameters, whatever the number of ranks.
    """
    cut = buffer.buckets[bucket]
    shard_numel = cut.numel // buffer.num_shards
    # The owners of the previous parameters. The next parameter may begin in the shard of the last owner.
    first_rank, last_rank = 0, -1
    names: list[str] = []
    for name in cut.params if shard_numel else ():
        slot = buffer.params[name]
        if slot.start == slot.stop:
            continue
        first = (slot.start - cut.start) // shard_numel
        last = (slot.stop - 1 - cut.start) // shard_numel
        if first == last_rank:
            if first_rank < last_rank:  # one parameter spans these ranks; the last rank owns another one as well
                yield ShardOwners(first_rank, last_rank - 1, tuple(names))
            first_rank = last_rank
            names.append(name)
            first += 1
        if first <= last:
            if names:
                yield ShardOwners(first_rank, last_rank, tuple(names))
            if last_rank + 1 < first:
                yield ShardOwners(last_rank + 1, first - 1, ())
            first_rank, last_rank, names = first, last, [name]
    if names:
        yield ShardOwners(first_rank, last_rank, tuple(names))
    if last_rank + 1 < buffer.num_shards:
        yield ShardOwners(last_rank + 1, buffer.num_shards - 1, ())
