"""The flat tensors an optimizer steps on, as ranges of a buffer. Pure arithmetic, no torch.

A run is a range of one bucket that a rank owns, whose parameters all belong to one optimizer group and whose states fit
together. Neighbouring parameters of a group share a run, alignment gaps between them included, so most models step on one
tensor per bucket. ``megabucket.optim`` makes tensors of them, ``megabucket.planning.memory`` counts them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from megabucket.layout.layout import BufferLayout, Span
from megabucket.layout.shards import params_inside


@dataclass(frozen=True, slots=True)
class ShardRun:
    """A range of one buffer, owned by one rank, of one optimizer group."""

    group: int
    span: Span  # in buffer coordinates
    params: tuple[str, ...]


def plan_runs(
    layout: BufferLayout,
    group_of: Mapping[str, int],
    *,
    rank: int,
    is_sharded: bool,
    signature_of: Mapping[str, Hashable] | None = None,
) -> tuple[ShardRun, ...]:
    """Return the runs of one buffer, in buffer order. Parameters outside ``group_of`` are left out, as are empty ones.

    Time is linear in the number of parameters.

    Args:
        group_of: index of the optimizer group by parameter name.
        is_sharded: whether ``rank`` owns its shard of each bucket, or everything.
        signature_of: what else neighbours must have in common to share a run: step counts, for instance.

    Raises:
        LayoutError: ``rank`` is out of range.
    """
    runs: list[_OpenRun] = []
    for bucket in layout.buckets:
        span = layout.shard_span(bucket=bucket.index, rank=rank) if is_sharded else Span(bucket.start, bucket.stop)
        last: _OpenRun | None = None  # runs do not cross buckets: each bucket has a shard of its own
        for name, piece in params_inside(layout, span, bucket=bucket.index):
            group = group_of.get(name)
            signature = signature_of.get(name) if signature_of is not None else None
            if last is not None and group == last.group and signature == last.signature:
                last.stop = piece.stop
                last.params.append(name)
            elif group is not None:
                last = _OpenRun(group, signature, piece.start, piece.stop, [name])
                runs.append(last)
            else:
                last = None
    return tuple(ShardRun(run.group, Span(run.start, run.stop), tuple(run.params)) for run in runs)


@dataclass(slots=True)
class _OpenRun:
    """A run that grows."""

    group: int
    signature: Hashable
    start: int
    stop: int
    params: list[str]
