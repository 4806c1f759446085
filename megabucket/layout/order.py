"""The order in which buckets are launched: data, the same on every rank. No torch."""

from __future__ import annotations

from typing import NamedTuple

from megabucket.layout.layout import ModelLayout, ParamSlot


class BucketId(NamedTuple):
    """A bucket of a model: which buffer, and which bucket of it."""

    buffer: int
    bucket: int


def launch_order(layout: ModelLayout) -> tuple[BucketId, ...]:
    """Return all buckets, in the order in which backward is expected to complete them.

    A bucket is complete when the gradient of its last parameter is. Gradients are expected in the recorded order
    (``bucket_order``); without one, roughly in reverse registration order. Within one buffer this is index order; buckets of
    several buffers (dtypes) are interleaved, so that none waits for the whole backward. The order is a function of the layout
    alone: what hooks do never changes it.
    """
    ids = [
        (max(expected_position(buffer.params[name]) for name in bucket.params), BucketId(buffer_index, bucket.index))
        for buffer_index, buffer in enumerate(layout.buffers)
        for bucket in buffer.buckets
    ]
    return tuple(bucket_id for _, bucket_id in sorted(ids))


def expected_position(slot: ParamSlot) -> int:
    """Return a number that is smaller the earlier the gradient of a parameter is expected, over all buffers of a model."""
    return -slot.registration_index if slot.ready_index is None else slot.ready_index
