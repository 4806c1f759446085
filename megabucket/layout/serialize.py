"""Layouts as JSON: write, read, fingerprint. No torch.

The text is canonical (sorted keys, no spaces), so its SHA-256 identifies the layout. Reading checks structure and types.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megabucket.errors import LayoutError, name_list
from megabucket.layout.layout import BucketLayout, BufferLayout, ModelLayout, ParamSlot
from megabucket.layout.spec import BufferKey

_SAME: Final = ("num_shards", "bucket_size", "start_alignment", "end_multiple", "cuts")
"""Of a buffer: fields that the text has under the same names."""


class _Part(BaseModel):
    """What one object in the text holds. Types are those of JSON: no number in quotes, no boolean for a number."""

    model_config = ConfigDict(strict=True, frozen=True)


class _Slot(_Part):
    name: str
    start: int
    stop: int
    bucket: int
    index: int
    shape: tuple[int, ...]
    shared_embedding: bool
    ready: int | None = None


class _Buffer(_Part):
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


class _Layout(_Part):
    format: Literal["megabucket-layout"]
    version: Literal[1]
    buffers: tuple[_Buffer, ...]


def layout_to_json(layout: ModelLayout) -> str:
    """Return the canonical JSON of a layout."""
    data = {"format": "megabucket-layout", "version": 1, "buffers": [_buffer_to_data(buffer) for buffer in layout.buffers]}
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def layout_fingerprint(layout: ModelLayout) -> str:
    """Return the SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(layout_to_json(layout).encode()).hexdigest()


def layout_from_json(text: str) -> ModelLayout:
    """Read a layout back; see ``ModelLayout.from_json``."""
    try:
        read = _Layout.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the text"
        raise LayoutError(f"no layout that this release reads: {place}: {problem['msg']}") from None
    return ModelLayout(tuple(map(_buffer_of, read.buffers)))


def _buffer_to_data(buffer: BufferLayout) -> dict[str, Any]:
    return {
        **{name: getattr(buffer.key, name) for name in ("param_dtype", "grad_dtype", "group")},
        **{name: getattr(buffer, name) for name in _SAME if name != "cuts" or buffer.cuts is not None},
        "params": [
            {
                "name": name,
                "start": slot.start,
                "stop": slot.stop,
                "bucket": slot.bucket,
                "index": slot.registration_index,
                "shape": slot.shape,
                "shared_embedding": slot.shared_embedding,
                **({} if slot.ready_index is None else {"ready": slot.ready_index}),
            }
            for name, slot in sorted(buffer.params.items(), key=lambda item: (item[1].registration_index, item[0]))
        ],
        "buckets": [dataclasses.asdict(bucket) for bucket in buffer.buckets],
    }


def _buffer_of(read: _Buffer) -> BufferLayout:
    slots = {
        one.name: ParamSlot(one.start, one.stop, one.bucket, one.index, one.shape, one.shared_embedding, one.ready)
        for one in read.params
    }
    if len(slots) < len(read.params):
        raise LayoutError(f"no layout that this release reads: a parameter stands twice among {name_list(list(slots))}")
    return BufferLayout(
        key=BufferKey(read.param_dtype, read.grad_dtype, read.group),
        params=slots,
        buckets=read.buckets,
        **{name: getattr(read, name) for name in _SAME},
    )
