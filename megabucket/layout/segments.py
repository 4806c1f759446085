"""The flat tensors an optimizer steps on, as ranges of a buffer. Pure arithmetic, no torch.

A segment is a range of one bucket that a rank owns, whose parameters all belong to one optimizer group and have compatible
optimizer state. Neighbouring parameters share a segment, alignment gaps between them included, so most models step on one
tensor per bucket. ``megabucket.optim`` makes the tensors, ``megabucket.planning.memory`` counts them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import groupby

from megabucket.layout.layout import BufferLayout, Span
from megabucket.layout.shards import params_inside


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of one buffer, owned by one rank, of one optimizer group."""

    group: int
    span: Span  # in buffer coordinates
    params: tuple[str, ...]


def plan_segments(
    layout: BufferLayout,
    group_of: Mapping[str, int],
    *,
    rank: int,
    is_sharded: bool,
    signature_of: Mapping[str, Hashable] | None = None,
) -> tuple[Segment, ...]:
    """Return the segments of one buffer, in buffer order. Parameters outside ``group_of`` and empty ones are left out.

    Time is linear in the number of parameters.

    Args:
        group_of: index of the optimizer group by parameter name.
        is_sharded: whether ``rank`` owns its shard of each bucket, or everything.
        signature_of: further values that must be equal for neighbours to share a segment: step counts, for instance.

    Raises:
        LayoutError: ``rank`` is out of range.
    """
    signatures = signature_of or {}
    segments: list[Segment] = []
    for bucket in layout.buckets:
        span = layout.shard_span(bucket=bucket.index, rank=rank) if is_sharded else Span(bucket.start, bucket.stop)
        inside = params_inside(layout, span, bucket=bucket.index)
        for (group, _), members in groupby(inside, lambda item: (group_of.get(item[0]), signatures.get(item[0]))):
            if group is not None:
                names, pieces = zip(*members, strict=True)
                segments.append(Segment(group, Span(pieces[0].start, pieces[-1].stop), names))
    return tuple(segments)
