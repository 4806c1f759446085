"""Layouts as JSON: write, read, fingerprint, compare. No torch.

The text is canonical (sorted keys, no spaces), so its SHA-256 identifies the layout. Reading checks structure and types.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from megabucket.errors import LayoutError, name_list
from megabucket.layout.layout import BucketLayout, BufferLayout, ModelLayout, ParamSlot
from megabucket.layout.spec import BufferKey

_FORMAT: Final = "megabucket-layout"
_VERSION: Final = 1
_MAX_DIFFERENCES: Final = 20


def layout_to_json(layout: ModelLayout) -> str:
    """Return the canonical JSON of a layout."""
    data = {"format": _FORMAT, "version": _VERSION, "buffers": [_buffer_to_data(buffer) for buffer in layout.buffers]}
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def layout_fingerprint(layout: ModelLayout) -> str:
    """Return the SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(layout_to_json(layout).encode()).hexdigest()


def layout_from_json(text: str) -> ModelLayout:
    """Read a layout back; see ``ModelLayout.from_json``."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"the text is not JSON: {error}") from None
    root = _Reader(data, "layout")
    if root.get("format", str) != _FORMAT:
        raise LayoutError(f"the text is JSON but not a layout: format is {data['format']!r}, expected {_FORMAT!r}")
    if root.get("version", int) != _VERSION:
        raise LayoutError(f"layout version {data['version']} is not known to this release, which reads {_VERSION}")
    buffers = root.get("buffers", list)
    return ModelLayout(tuple(_read_buffer(_Reader(item, f"buffers[{i}]")) for i, item in enumerate(buffers)))


def layout_diff(ours: ModelLayout, theirs: ModelLayout) -> tuple[str, ...]:
    """Return how two layouts differ, one line per difference, at most 20 and a count; empty when they are equal."""
    lines: list[str] = []
    if len(ours.buffers) != len(theirs.buffers):
        lines.append(f"number of buffers: {len(ours.buffers)} != {len(theirs.buffers)}")
    for index, (a, b) in enumerate(zip(ours.buffers, theirs.buffers, strict=False)):
        where = f"buffer {index}"
        for field in ("key", "num_shards", "bucket_size", "start_alignment", "end_multiple", "numel"):
            left, right = getattr(a, field), getattr(b, field)
            if left != right:
                lines.append(f"{where}: {field}: {left} != {right}")
        if a.cuts != b.cuts:
            lines.append(f"{where}: cuts: {_cuts_text(a.cuts, b.cuts)} != {_cuts_text(b.cuts, a.cuts)}")
        for name in [*a.params, *(name for name in b.params if name not in a.params)]:
            left_slot, right_slot = a.params.get(name), b.params.get(name)
            if left_slot is None or right_slot is None:
                lines.append(f"{where}: parameter {name!r} is only in the {'second' if left_slot is None else 'first'}")
            elif left_slot != right_slot:
                lines.append(f"{where}: parameter {name!r}: {_slot_text(left_slot)} != {_slot_text(right_slot)}")
        if a.buckets != b.buckets:
            first = next(
                (i for i, (x, y) in enumerate(zip(a.buckets, b.buckets, strict=False)) if x != y),
                min(len(a.buckets), len(b.buckets)),
            )
            lines.append(f"{where}: buckets: {len(a.buckets)} and {len(b.buckets)}, first difference at bucket {first}")
    hidden = len(lines) - _MAX_DIFFERENCES
    return (*lines[:_MAX_DIFFERENCES], f"and {hidden} more differences") if hidden > 0 else tuple(lines)


def _cuts_text(cuts: tuple[str, ...] | None, others: tuple[str, ...] | None) -> str:
    """Return how many cuts there are and which the other layout does not have: the whole list can be long."""
    if cuts is None:
        return "by size"
    own = [name for name in cuts if name not in set(others or ())]
    return f"{len(cuts)} names" + (f", of them only here {name_list(own)}" if own else "")


def _slot_text(slot: ParamSlot) -> str:
    text = f"[{slot.start}, {slot.stop}) in bucket {slot.bucket}, shape {slot.shape}, number {slot.registration_index}"
    ready = "" if slot.ready_index is None else f", ready as number {slot.ready_index}"
    return text + ready + (", shared embedding" if slot.shared_embedding else "")


def _buffer_to_data(buffer: BufferLayout) -> dict[str, Any]:
    return {
        "param_dtype": buffer.key.param_dtype,
        "grad_dtype": buffer.key.grad_dtype,
        "group": buffer.key.group,
        "num_shards": buffer.num_shards,
        "bucket_size": buffer.bucket_size,
        "start_alignment": buffer.start_alignment,
        "end_multiple": buffer.end_multiple,
        **({} if buffer.cuts is None else {"cuts": list(buffer.cuts)}),
        "params": [
            {
                "name": name,
                "start": slot.start,
                "stop": slot.stop,
                "bucket": slot.bucket,
                "index": slot.registration_index,
                "shape": list(slot.shape),
                "shared_embedding": slot.shared_embedding,
                **({} if slot.ready_index is None else {"ready": slot.ready_index}),
            }
            for name, slot in sorted(buffer.params.items(), key=lambda item: (item[1].registration_index, item[0]))
        ],
        "buckets": [
            {
                "index": bucket.index,
                "start": bucket.start,
                "stop": bucket.stop,
                "numel_unpadded": bucket.numel_unpadded,
                "params": list(bucket.params),
            }
            for bucket in buffer.buckets
        ],
    }


class _Reader:
    """One JSON object, read field by field with its path in every error."""

    def __init__(self, data: object, path: str) -> None:
        if not isinstance(data, dict):
            raise LayoutError(f"{path} must be an object, got {type(data).__name__}")
        self._data, self._path = data, path

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def get(self, key: str, kind: type) -> Any:
        if key not in self._data:
            raise LayoutError(f"{self._path} has no {key!r}")
        value = self._data[key]
        # bool is an int to Python but not to JSON.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise LayoutError(f"{self._path}.{key} must be {kind.__name__}, got {type(value).__name__}")
        return value

    def get_optional_int(self, key: str) -> int | None:
        return None if self._data.get(key, 0) is None else int(self.get(key, int))

    def get_list(self, key: str, kind: type) -> tuple[Any, ...]:
        values = self.get(key, list)
        if any(not isinstance(value, kind) or isinstance(value, bool) for value in values):
            raise LayoutError(f"{self._path}.{key} must hold {kind.__name__} only")
        return tuple(values)


def _read_buffer(reader: _Reader) -> BufferLayout:
    params: dict[str, ParamSlot] = {}
    for i, item in enumerate(reader.get("params", list)):
        entry = _Reader(item, f"{reader._path}.params[{i}]")
        name = entry.get("name", str)
        if name in params:
            raise LayoutError(f"{reader._path}: parameter {name!r} stands twice")
        params[name] = ParamSlot(
            start=entry.get("start", int),
            stop=entry.get("stop", int),
            bucket=entry.get("bucket", int),
            registration_index=entry.get("index", int),
            shape=entry.get_list("shape", int),
            shared_embedding=entry.get("shared_embedding", bool),
            ready_index=entry.get("ready", int) if "ready" in entry else None,
        )
    buckets = []
    for i, item in enumerate(reader.get("buckets", list)):
        entry = _Reader(item, f"{reader._path}.buckets[{i}]")
        buckets.append(
            BucketLayout(
                index=entry.get("index", int),
                start=entry.get("start", int),
                stop=entry.get("stop", int),
                numel_unpadded=entry.get("numel_unpadded", int),
                params=entry.get_list("params", str),
            )
        )
    return BufferLayout(
        key=BufferKey(reader.get("param_dtype", str), reader.get("grad_dtype", str), reader.get("group", str)),
        params=params,
        buckets=tuple(buckets),
        num_shards=reader.get("num_shards", int),
        bucket_size=reader.get_optional_int("bucket_size"),
        start_alignment=reader.get("start_alignment", int),
        end_multiple=reader.get("end_multiple", int),
        cuts=reader.get_list("cuts", str) if "cuts" in reader else None,
    )
