"""The layout as data: where each parameter lies, how buffers are cut into buckets. No torch, no decisions.

``build`` makes these values, ``shards`` assigns them to ranks, ``invariants`` checks them. Positions count elements and ranges
are half-open. The JSON is canonical (sorted keys, no spaces), so its SHA-256 identifies a layout.

::

    buffer   |<------- bucket 0 ------->|<------ bucket 1 ------>|
    params   [ head ]gap[ norm ]padding  [ block ]padding            first gradient first
    shards   | rank 0 | rank 1 | rank 2 | rank 0 | rank 1 | ...      equal, blind to parameter boundaries
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from megabucket.errors import LayoutError, name_list
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
        """A sort key over all buffers of a model: smaller for gradients that are expected earlier."""
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
    """Names in buffer order, that of their gradients: the reverse of registration unless recorded."""

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
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the layout as canonical JSON; ``from_json`` gives it back unchanged."""
        buffers = [_buffer_to_data(buffer) for buffer in self.buffers]
        data = {"format": "megabucket-layout", "version": 1, "buffers": buffers}
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> ModelLayout:
        """Read the output of ``to_json``.

        This checks structure and types; ``check_layout`` checks that the layout is sound.

        Raises:
            LayoutError: the text is not JSON, not a layout, or of another version.
        """
        return ModelLayout(tuple(map(_buffer_of, _Layout.read(text, "layout").buffers)))

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
    """Return all buckets in the order in which every rank launches them: the expected order of completion in backward.

    A bucket is complete with the gradient of its last parameter. Gradients are expected in the recorded order
    (``bucket_order``), or in reverse registration order. Within one buffer this is index order; buckets of several buffers
    (dtypes) are interleaved, so that none waits for the whole backward. The order depends on the layout alone, never on hooks.
    """
    ids = [
        (max(buffer.params[name].expected_position for name in bucket.params), BucketId(buffer_index, bucket.index))
        for buffer_index, buffer in enumerate(layout.buffers)
        for bucket in buffer.buckets
    ]
    return tuple(bucket_id for _, bucket_id in sorted(ids))


# JSON #

_SAME: Final = ("num_shards", "bucket_size", "start_alignment", "end_multiple", "cuts")
"""Fields of a buffer that its JSON has under the same names."""

_IN_JSON: Final = {"registration_index": "index", "ready_index": "ready"}
"""Fields of a slot that its JSON has under other names."""


class JsonPart(BaseModel):
    """One object of the JSON. Types are strict: no number in quotes, no boolean for a number."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def read(cls, text: str, what: str) -> Self:
        """Return the object in ``text``.

        Raises:
            LayoutError: the text is not JSON, or not a ``what``.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(map(str, problem["loc"])) or "the text"
            raise LayoutError(f"no {what} that this release reads: {place}: {problem['msg']}") from None


class _Slot(JsonPart):
    name: str
    start: int
    stop: int
    bucket: int
    registration_index: int = Field(alias="index")
    shape: tuple[int, ...]
    shared_embedding: bool
    ready_index: int | None = Field(default=None, alias="ready")


class _Buffer(JsonPart):
    param_dtype: str
    grad_dtype: str
    group: str
    num_shards: int
    bucket_size: int | None
    start_alignment: int
    end_multiple: int
    cuts: tuple[str, ...] | None = None
    params: tuple[_Slot, ...]
    buckets: tuple[BucketLayout, ...]


class _Layout(JsonPart):
    format: Literal["megabucket-layout"]
    version: Literal[1]
    buffers: tuple[_Buffer, ...]


def _buffer_to_data(buffer: BufferLayout) -> dict[str, Any]:
    slots = sorted(buffer.params.items(), key=lambda item: (item[1].registration_index, item[0]))
    return {
        **dataclasses.asdict(buffer.key),
        **{name: getattr(buffer, name) for name in _SAME if name != "cuts" or buffer.cuts is not None},
        "params": [{"name": name} | _slot_to_data(slot) for name, slot in slots],
        "buckets": [dataclasses.asdict(bucket) for bucket in buffer.buckets],
    }


def _slot_to_data(slot: ParamSlot) -> dict[str, Any]:
    return {_IN_JSON.get(field, field): value for field, value in slot._asdict().items() if value is not None}


def _buffer_of(read: _Buffer) -> BufferLayout:
    slots = {one.name: ParamSlot(*(getattr(one, field) for field in ParamSlot._fields)) for one in read.params}
    if len(slots) < len(read.params):
        raise LayoutError(f"no layout that this release reads: a parameter stands twice among {name_list(list(slots))}")
    return BufferLayout(
        key=BufferKey(read.param_dtype, read.grad_dtype, read.group),
        params=slots,
        buckets=read.buckets,
        **{name: getattr(read, name) for name in _SAME},
    )
