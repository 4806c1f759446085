"""The buckets of a layout as rows with padding and owners. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megabucket.layout import BucketLayout, BufferLayout, ModelLayout, launch_order, shard_slices
from megabucket.layout.describe import describe_rows

OWNERS_SHOWN: Final = 4
"""Groups of ranks listed for each bucket, counted from rank 0; the last rank is added when it is not among them."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Ranks ``first_rank`` to ``last_rank``, inclusive, own pieces of the same parameters."""

    first_rank: int
    last_rank: int
    first_param: str
    """Empty when the ranks own padding only."""
    last_param: str
    num_params: int


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One bucket of the layout."""

    buffer: str
    bucket: int
    num_params: int
    first_param: str
    last_param: str
    params_numel: int
    numel: int
    """Padding included."""
    grad_bytes: int
    """Padding included."""
    num_shards: int
    shard_numel: int
    owners: tuple[Owner, ...]
    """The first groups of ranks and the last one; empty when the bucket is not sharded."""
    closed_by: str

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - self.params_numel


def bucket_entries(layout: ModelLayout, *, is_sharded: bool) -> tuple[BucketEntry, ...]:
    """Return all buckets in launch order.

    Args:
        is_sharded: whether ranks own shards, or all of them everything.
    """
    rows = {(row.buffer, row.bucket): row for row in describe_rows(layout)}
    entries = []
    for id_ in launch_order(layout):
        buffer = layout.buffers[id_.buffer]
        bucket = buffer.buckets[id_.bucket]
        row = rows[str(buffer.key), bucket.index]
        entries.append(
            BucketEntry(
                buffer=row.buffer,
                bucket=row.bucket,
                num_params=row.num_params,
                first_param=row.first_param,
                last_param=row.last_param,
                params_numel=row.params_numel,
                numel=row.numel,
                grad_bytes=row.grad_bytes,
                num_shards=buffer.num_shards,
                shard_numel=bucket.numel // buffer.num_shards,
                owners=tuple(_shown_owners(buffer, bucket)) if is_sharded and buffer.num_shards > 1 and bucket.numel else (),
                closed_by=row.closed_by,
            )
        )
    return tuple(entries)


def _shown_owners(buffer: BufferLayout, bucket: BucketLayout) -> Iterator[Owner]:
    rank, last = 0, -1
    for _ in range(OWNERS_SHOWN):
        owner = _owner(buffer, bucket, rank)
        yield owner
        rank = last = owner.last_rank + 1
        if rank >= buffer.num_shards:
            return
    final = _owner(buffer, bucket, buffer.num_shards - 1)
    yield Owner(max(final.first_rank, last), final.last_rank, final.first_param, final.last_param, final.num_params)


def _owner(buffer: BufferLayout, bucket: BucketLayout, rank: int) -> Owner:
    """Return who owns the same as ``rank``: several ranks when one parameter, or padding, spans their whole shards."""
    pieces = shard_slices(buffer, bucket=bucket.index, rank=rank)
    if not pieces:
        return _padding_owner(buffer, bucket, rank)
    first = last = rank
    if len(pieces) == 1:
        slot, shard_numel = buffer.params[pieces[0].param], bucket.numel // buffer.num_shards
        low, high = slot.start - bucket.start, slot.stop - bucket.start
        # Only ranks that own nothing else: the shards that lie inside the parameter altogether, and this one.
        inside_first, inside_last = -(-low // shard_numel), high // shard_numel - 1
        if inside_first <= rank <= inside_last:
            first, last = inside_first, inside_last
    return Owner(first, last, pieces[0].param, pieces[-1].param, len(pieces))


def _padding_owner(buffer: BufferLayout, bucket: BucketLayout, rank: int) -> Owner:
    tail = -(-bucket.numel_unpadded // (bucket.numel // buffer.num_shards))  # the first rank behind the last parameter
    if rank >= tail:
        return Owner(tail, buffer.num_shards - 1, "", "", 0)
    return Owner(rank, rank, "", "", 0)  # an alignment gap that happens to be a whole shard
