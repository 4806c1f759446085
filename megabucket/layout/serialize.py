"""Layouts as JSON: write, read, fingerprint, compare. No torch.

The text is canonical (sorted keys, no spaces), so its SHA-256 identifies the layout. Reading checks structure and types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, get_args, get_origin

from megabucket.errors import LayoutError, name_list
from megabucket.layout.layout import BucketLayout, BufferLayout, ModelLayout, ParamSlot
from megabucket.layout.spec import BufferKey

_FORMAT: Final = "megabucket-layout"
_VERSION: Final = 1
_MAX_DIFFERENCES: Final = 20

# What the objects in the text hold.
_BUFFER: Final = {
    **dict.fromkeys(("param_dtype", "grad_dtype", "group"), str),
    **dict.fromkeys(("num_shards", "bucket_size", "start_alignment", "end_multiple"), int),
    "cuts": list[str],
    "params": list,
    "buckets": list,
}
_SLOT: Final = {
    **dict.fromkeys(("start", "stop", "bucket", "index", "ready"), int),
    "name": str,
    "shape": list[int],
    "shared_embedding": bool,
}
_BUCKET: Final = {"index": int, "start": int, "stop": int, "numel_unpadded": int, "params": list[str]}
_MAY_BE_MISSING: Final = frozenset({"cuts", "ready"})
_MAY_BE_NULL: Final = frozenset({"bucket_size"})


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
    root = _read_fields(data, "layout", {"format": str})
    if root["format"] != _FORMAT:
        raise LayoutError(f"the text is JSON but not a layout: format is {root['format']!r}, expected {_FORMAT!r}")
    root = _read_fields(data, "layout", {"version": int})
    if root["version"] != _VERSION:
        raise LayoutError(f"layout version {root['version']} is not known to this release, which reads {_VERSION}")
    root = _read_fields(data, "layout", {"buffers": list})
    return ModelLayout(tuple(_read_buffer(item, f"buffers[{i}]") for i, item in enumerate(root["buffers"])))


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
        **{name: getattr(buffer.key, name) for name in ("param_dtype", "grad_dtype", "group")},
        **{name: getattr(buffer, name) for name in ("num_shards", "bucket_size", "start_alignment", "end_multiple")},
        **({} if buffer.cuts is None else {"cuts": buffer.cuts}),
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
        "buckets": [{name: getattr(bucket, name) for name in _BUCKET} for bucket in buffer.buckets],
    }


def _read_buffer(data: object, path: str) -> BufferLayout:
    fields = _read_fields(data, path, _BUFFER)
    slots: dict[str, ParamSlot] = {}
    for i, item in enumerate(fields["params"]):
        slot = _read_fields(item, f"{path}.params[{i}]", _SLOT)
        name = slot.pop("name")
        if name in slots:
            raise LayoutError(f"{path}: parameter {name!r} stands twice")
        slots[name] = ParamSlot(registration_index=slot.pop("index"), ready_index=slot.pop("ready", None), **slot)
    buckets = (_read_fields(item, f"{path}.buckets[{i}]", _BUCKET) for i, item in enumerate(fields.pop("buckets")))
    key = BufferKey(*(fields.pop(name) for name in ("param_dtype", "grad_dtype", "group")))
    return BufferLayout(**fields | {"key": key, "params": slots, "buckets": tuple(BucketLayout(**one) for one in buckets)})


def _read_fields(data: object, path: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one JSON object; an error names the path of a field that is missing or of another type."""
    if not isinstance(data, dict):
        raise LayoutError(f"{path} must be an object, got {type(data).__name__}")
    fields: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name in data:
            is_null = data[name] is None and name in _MAY_BE_NULL
            fields[name] = None if is_null else _checked(data[name], f"{path}.{name}", kind)
        elif name not in _MAY_BE_MISSING:
            raise LayoutError(f"{path} has no {name!r}")
    return fields


def _checked(value: Any, path: str, kind: Any) -> Any:
    """Return a value of the type it must have, a list as a tuple if its items have one, too."""
    item_kinds = get_args(kind)
    if not _is_a(value, get_origin(kind) or kind):
        raise LayoutError(f"{path} must be {kind.__name__}, got {type(value).__name__}")
    if not item_kinds:
        return value
    if not all(_is_a(item, item_kinds[0]) for item in value):
        raise LayoutError(f"{path} must hold {item_kinds[0].__name__} only")
    return tuple(value)


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))  # bool is an int to Python, not to JSON
