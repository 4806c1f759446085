"""A layout as rows of a table: what each bucket holds, sends and wastes. Pure arithmetic, no torch, no printing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megabucket.layout import BucketLayout, BufferLayout, ModelLayout, shard_owners
from megabucket.units import dtype_bytes


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket in numbers."""

    buffer: str
    """The buffer's key in its short form, for example ``dense/bfloat16->float32``."""
    bucket: int
    """Position in the buffer; bucket 0 is complete first in backward."""
    first_param: str
    """The parameter with the lowest position, whose gradient is expected first."""
    last_param: str
    """The parameter with the highest position, whose gradient is expected last."""
    num_params: int
    params_numel: int
    """Elements that belong to parameters."""
    numel: int
    """Elements of the bucket, padding included; a collective moves all of them."""
    grad_bytes: int
    """Bytes of the bucket's gradients, padding included."""
    num_shards: int
    """Ranks the bucket is cut for; 1 when it is not sharded."""
    num_padding_only_ranks: int
    """Ranks whose shard holds no element of any parameter."""
    closed_by: str
    """Why the bucket ends where it does: ``size``, ``cut`` (by name), ``shared embedding``, or ``end`` of the buffer."""

    padding_fraction: float
    """Share of the bucket that belongs to no parameter; 0 for an empty bucket."""


@dataclass(frozen=True, slots=True)
class LayoutTotals:
    """A whole layout in numbers."""

    num_buffers: int
    num_buckets: int
    num_params: int
    params_numel: int
    """Elements that belong to parameters."""
    numel: int
    """Elements of all buffers, padding included."""
    grad_bytes: int
    """Bytes of all gradient buffers."""
    param_bytes: int
    """Bytes of all parameters in their own dtype, padding included."""
    num_buckets_with_padding_only_ranks: int

    padding_fraction: float
    """Share of the buffers that belongs to no parameter; 0 for empty buffers."""


def describe_rows(layout: ModelLayout) -> tuple[BucketRow, ...]:
    """Return one row per bucket, in buffer and bucket order. Time is linear in the number of parameters."""
    rows = []
    for buffer in layout.buffers:
        cuts = frozenset(buffer.cuts or ())
        rows += [_row(buffer, bucket, closed_by=_closed_by(buffer, bucket, cuts)) for bucket in buffer.buckets]
    return tuple(rows)


def describe_totals(layout: ModelLayout, rows: Iterable[BucketRow]) -> LayoutTotals:
    """Return the totals of ``layout``, given its rows."""
    rows = tuple(rows)
    return LayoutTotals(
        num_buffers=len(layout.buffers),
        num_buckets=len(rows),
        num_params=sum(row.num_params for row in rows),
        params_numel=sum(row.params_numel for row in rows),
        numel=layout.numel,
        grad_bytes=sum(buffer.grad_bytes for buffer in layout.buffers),
        param_bytes=sum(buffer.numel * dtype_bytes(buffer.key.param_dtype) for buffer in layout.buffers),
        num_buckets_with_padding_only_ranks=sum(row.num_padding_only_ranks > 0 for row in rows),
        padding_fraction=_padding_fraction(sum(row.params_numel for row in rows), layout.numel),
    )


def _closed_by(buffer: BufferLayout, bucket: BucketLayout, cuts: frozenset[str]) -> str:
    if not bucket.params:
        return "end"
    last = buffer.params[bucket.params[-1]]
    if bucket.params[-1] in cuts:
        return "cut"
    if buffer.bucket_size is not None and last.stop - bucket.start >= buffer.bucket_size:
        return "size"
    return "end" if bucket.index == len(buffer.buckets) - 1 else "shared embedding"


def _row(buffer: BufferLayout, bucket: BucketLayout, *, closed_by: str) -> BucketRow:
    slots = buffer.params
    params_numel = sum(slots[name].stop - slots[name].start for name in bucket.params)
    return BucketRow(
        buffer=str(buffer.key),
        bucket=bucket.index,
        first_param=bucket.params[0] if bucket.params else "",
        last_param=bucket.params[-1] if bucket.params else "",
        num_params=len(bucket.params),
        params_numel=params_numel,
        numel=bucket.numel,
        grad_bytes=bucket.numel * dtype_bytes(buffer.key.grad_dtype),
        num_shards=buffer.num_shards,
        num_padding_only_ranks=sum(
            owners.last_rank - owners.first_rank + 1
            for owners in shard_owners(buffer, bucket=bucket.index)
            if not owners.params
        ),
        closed_by=closed_by,
        padding_fraction=_padding_fraction(params_numel, bucket.numel),
    )


def _padding_fraction(params_numel: int, numel: int) -> float:
    return 1 - params_numel / numel if numel else 0.0
