"""The buckets of a layout as rows with padding and owners. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megabucket.layout import BufferLayout, ModelLayout, launch_order, shard_owners
from megabucket.planning.describe import describe_rows

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
                owners=tuple(_shown_owners(buffer, bucket.index))
                if is_sharded and buffer.num_shards > 1 and bucket.numel
                else (),
                closed_by=row.closed_by,
            )
        )
    return tuple(entries)


def _shown_owners(buffer: BufferLayout, bucket: int) -> Iterator[Owner]:
    everybody = list(shard_owners(buffer, bucket=bucket))
    for owners in everybody[:OWNERS_SHOWN] + everybody[OWNERS_SHOWN:][-1:]:
        params = owners.params
        yield Owner(owners.first_rank, owners.last_rank, params[0] if params else "", params[-1] if params else "", len(params))
