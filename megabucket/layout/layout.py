"""The layout as data: where each parameter lies, how buffers are cut into buckets. No torch, no decisions.

``build`` makes these values, ``shards`` says who owns what of them, ``serialize`` reads and writes them,
``megabucket.testing.invariants`` checks them. All positions count elements and all ranges are half-open.

::

    buffer   |<------- bucket 0 ------->|<------ bucket 1 ------>|
    params   [ head ]gap[ norm ]padding  [ block ]padding            first gradient first
    shards   | rank 0 | rank 1 | rank 2 | rank 0 | rank 1 | ...      equal, blind to parameter boundaries
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megabucket.errors import LayoutError
from megabucket.layout.spec import BufferKey
from megabucket.units import dtype_bytes


class Span(NamedTuple):
    """A half-open range of element positions."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class ParamSlot(NamedTuple):
    """Where one parameter lies in its buffer: a named tuple, because a large model has 100,000 of them."""

    start: int
    stop: int
    bucket: int
    registration_index: int
    """Position of the parameter in registration order, over all buffers of the model."""
    shape: tuple[int, ...]
    shared_embedding: bool = False
    ready_index: int | None = None
    """Position of the parameter in the recorded order of gradients, over all buffers; ``None``: the reverse of registration."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def expected_position(self) -> int:
        """A number that is smaller the earlier the gradient is expected, over all buffers of a model."""
        return -self.registration_index if self.ready_index is None else self.ready_index


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """One bucket: the unit of communication."""

    index: int
    start: int
    stop: int
    numel_unpadded: int
    """Elements up to the end of the last parameter: counts the alignment gaps between parameters, not the padded tail."""
    params: tuple[str, ...]
    """Names in buffer order: as their gradients become ready, which is the reverse of registration unless recorded."""

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True)
class BufferLayout:
    """One contiguous buffer of parameters with the same dtypes and reduction group."""

    key: BufferKey
    params: Mapping[str, ParamSlot]
    """Slots by parameter name, in registration order."""
    buckets: tuple[BucketLayout, ...]
    num_shards: int
    """Ranks that each bucket is cut for; 1 when the layout is not sharded."""
    bucket_size: int | None
    """The size at which buckets were closed, in elements; ``None``: one bucket, or ``cuts``."""
    start_alignment: int
    """Each parameter starts at a multiple of this many elements."""
    end_multiple: int
    """Each bucket ends at a multiple of this many elements."""
    cuts: tuple[str, ...] | None = None
    """Parameters that the config names to close a bucket, in buffer order; ``None``: buckets were not cut by name."""

    def __hash__(self) -> int:
        """Agree with ``==``, which compares ``params`` without regard to order; a mapping has no hash of its own."""
        return hash((self.key, frozenset(self.params.items()), self.buckets, self.num_shards, self.bucket_size, self.cuts))

    @property
    def numel(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @cached_property
    def params_numel(self) -> int:
        """Number of elements that belong to parameters."""
        return sum(slot.stop - slot.start for slot in self.params.values())

    @property
    def padding_fraction(self) -> float:
        """Share of the buffer that belongs to no parameter; 0 for an empty buffer."""
        return 1 - self.params_numel / self.numel if self.numel else 0.0

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradient buffer."""
        return self.numel * dtype_bytes(self.key.grad_dtype)

    def shard_span(self, *, bucket: int, rank: int) -> Span:
        """Return the buffer range that ``rank`` owns in ``bucket``; it may hold nothing but padding.

        Raises:
            LayoutError: ``bucket`` or ``rank`` is out of range.
        """
        if not 0 <= bucket < len(self.buckets):
            raise LayoutError(f"bucket {bucket} is out of range; the buffer {self.key} has {len(self.buckets)} buckets")
        if not 0 <= rank < self.num_shards:
            raise LayoutError(f"rank {rank} is out of range; the buffer {self.key} is cut for {self.num_shards} shards")
        cut = self.buckets[bucket]
        shard_numel = cut.numel // self.num_shards
        return Span(cut.start + rank * shard_numel, cut.start + (rank + 1) * shard_numel)


@dataclass(frozen=True)
class ModelLayout:
    """All buffers of one model, in the order in which their first parameter was registered."""

    buffers: tuple[BufferLayout, ...]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hex: equal exactly when the layouts are equal."""
        from megabucket.layout.serialize import layout_fingerprint

        return layout_fingerprint(self)

    def to_json(self) -> str:
        """Return the layout as canonical JSON; ``from_json`` gives it back unchanged."""
        from megabucket.layout.serialize import layout_to_json

        return layout_to_json(self)

    @staticmethod
    def from_json(text: str) -> ModelLayout:
        """Read what ``to_json`` wrote.

        Structure and types are checked here; whether the layout is sound is ``check_layout``'s question.

        Raises:
            LayoutError: the text is not JSON, not a layout, or of another version.
        """
        from megabucket.layout.serialize import layout_from_json

        return layout_from_json(text)

    @property
    def num_buckets(self) -> int:
        """Number of buckets over all buffers."""
        return sum(len(buffer.buckets) for buffer in self.buffers)

    @property
    def numel(self) -> int:
        """Number of elements over all buffers, padding included."""
        return sum(buffer.numel for buffer in self.buffers)


class BucketId(NamedTuple):
    """A bucket of a model: which buffer, and which bucket of it."""

    buffer: int
    bucket: int


def launch_order(layout: ModelLayout) -> tuple[BucketId, ...]:
    """Return all buckets in the order in which every rank launches them: that in which backward should complete them.

    A bucket is complete when the gradient of its last parameter is. Gradients are expected in the recorded order
    (``bucket_order``); without one, roughly in reverse registration order. Within one buffer this is index order; buckets of
    several buffers (dtypes) are interleaved, so that none waits for the whole backward. The order is a function of the layout
    alone: what hooks do never changes it.
    """
    ids = [
        (max(buffer.params[name].expected_position for name in bucket.params), BucketId(buffer_index, bucket.index))
        for buffer_index, buffer in enumerate(layout.buffers)
        for bucket in buffer.buckets
    ]
    return tuple(bucket_id for _, bucket_id in sorted(ids))
