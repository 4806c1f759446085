"""What every sound layout must also satisfy, by other means than the named invariants."""

import math
from itertools import pairwise

import numpy as np

from megabucket.layout import ModelLayout, shard_slices


def assert_views_are_a_bijection(layout: ModelLayout) -> None:
    """Each element of a parameter has a place of its own in the flat buffers: writing through all views writes none twice."""
    for buffer in layout.buffers:
        is_written = np.zeros(buffer.numel, dtype=bool)
        for slot in buffer.params.values():
            view = is_written[slot.start : slot.stop]
            assert slot.start >= 0
            assert view.size == slot.numel == math.prod(slot.shape)
            view[:] = True
        assert np.count_nonzero(is_written) == sum(slot.numel for slot in buffer.params.values())


def assert_shards_partition(layout: ModelLayout) -> None:
    """The ranks' shards cut every parameter into consecutive pieces that cover it once, in all four coordinates."""
    for buffer in layout.buffers:
        pieces = {name: [] for name in buffer.params}
        for bucket in buffer.buckets:
            shards = [buffer.shard_span(bucket=bucket.index, rank=rank) for rank in range(buffer.num_shards)]
            assert [bucket.start, *(shard.stop for shard in shards)] == [*(shard.start for shard in shards), bucket.stop]
            for rank, shard in enumerate(shards):
                for piece in shard_slices(buffer, bucket=bucket.index, rank=rank):
                    spans = (piece.in_buffer, piece.in_bucket, piece.in_shard, piece.in_param)
                    origins = (0, bucket.start, shard.start, buffer.params[piece.param].start)
                    assert len({(span.start + at, span.stop + at) for span, at in zip(spans, origins, strict=True)}) == 1
                    assert 0 <= piece.in_shard.start < piece.in_shard.stop <= shard.numel
                    pieces[piece.param].append(piece.in_param)
        for name, slot in buffer.params.items():
            assert len(pieces[name]) <= buffer.num_shards
            edges = [0, *(edge for piece in pieces[name] for edge in piece), slot.numel]
            assert all(stop == start for stop, start in list(pairwise(edges))[::2])
