"""What must be true of a layout, as assertions for tests. Public API; needs numpy, not hypothesis.

Each function takes a finished layout, of this library or of anybody else's code in this library's types, and raises
``AssertionError`` with the facts. None of them builds a layout, so none repeats the algorithm that it checks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Final, NoReturn

import numpy as np

from megabucket.layout import (
    BUFFER_INVARIANTS,
    BufferLayout,
    ModelLayout,
    ParamSpec,
    ShardSlice,
    Span,
    check_layout,
    layout_diff,
    shard_slices,
)

__all__ = [
    "assert_json_round_trip",
    "assert_layouts_equal",
    "assert_places",
    "assert_shards_partition",
    "assert_sound",
    "assert_views_are_a_bijection",
]

_MAX_LINES: Final = 10
_MAX_ALLOCATED_NUMEL: Final = 50_000_000


def assert_sound(layout: ModelLayout, *, ignoring: Collection[str] = ()) -> None:
    """Every named invariant of ``check_layout`` holds.

    Args:
        ignoring: names from ``BUFFER_INVARIANTS`` that this layout does not promise, for instance
            ``"order-is-reverse-registration"`` for code that orders parameters in another way.

    Raises:
        AssertionError: an invariant is violated; the text lists the violations.
        ValueError: ``ignoring`` holds a name that is no invariant.
    """
    unknown = sorted(set(ignoring) - set(BUFFER_INVARIANTS))
    if unknown:
        raise ValueError(f"{unknown} cannot be ignored: the invariants are {', '.join(BUFFER_INVARIANTS)}")
    violations = [text for text in check_layout(layout) if text.split(":", 1)[0] not in ignoring]
    if violations:
        _fail(f"the layout violates {len(violations)} invariant(s)", violations)


def assert_places(layout: ModelLayout, specs: Sequence[ParamSpec]) -> None:
    """The layout holds exactly ``specs``: each once, with its shape and number, in a buffer of its dtype and group.

    Raises:
        AssertionError: a parameter is missing, too many, or in the wrong place.
    """
    holders = Counter(name for buffer in layout.buffers for name in buffer.params)
    expected = {spec.name: (index, spec) for index, spec in enumerate(specs)}
    problems = [f"{name!r} lies in {holders[name]} buffers" for name in expected if holders[name] != 1]
    problems += [f"{name!r} is not a parameter of the model" for name in holders if name not in expected]
    for buffer in layout.buffers:
        for name, slot in buffer.params.items():
            if name not in expected:
                continue
            index, spec = expected[name]
            wanted = (index, spec.shape, spec.shared_embedding, spec.dtype, spec.group)
            found = (slot.registration_index, slot.shape, slot.shared_embedding, buffer.key.param_dtype, buffer.key.group)
            if wanted != found:
                problems.append(f"{name!r}: (number, shape, shared, dtype, group) is {found}, expected {wanted}")
    if problems:
        _fail("the layout does not hold the given parameters", problems)


def assert_shards_partition(layout: ModelLayout) -> None:
    """The ranks' shards cut every parameter into consecutive pieces that cover it once, in all four coordinates.

    Raises:
        AssertionError: an element has no owner or two, or the coordinates of a piece disagree.
    """
    for buffer in layout.buffers:
        pieces: dict[str, list[Span]] = {name: [] for name in buffer.params}
        for bucket in buffer.buckets:
            owned_up_to = bucket.start
            for rank in range(buffer.num_shards):
                shard = buffer.shard_span(bucket=bucket.index, rank=rank)
                if shard.start != owned_up_to:
                    _fail(f"shard {rank} of bucket {bucket.index} starts at {shard.start}, expected {owned_up_to}")
                owned_up_to = shard.stop
                for piece in shard_slices(buffer, bucket=bucket.index, rank=rank):
                    _check_coordinates(buffer, piece, bucket_start=bucket.start, shard=shard)
                    pieces[piece.param].append(piece.in_param)
            if owned_up_to != bucket.stop:
                _fail(f"the shards of bucket {bucket.index} end at {owned_up_to}, the bucket at {bucket.stop}")
        for name, slot in buffer.params.items():
            _check_cover(name, pieces[name], numel=slot.numel, num_shards=buffer.num_shards)


def assert_views_are_a_bijection(layout: ModelLayout) -> None:
    """Writing distinct numbers through every parameter's view fills the flat buffers with each number once, and nothing else.

    Allocates an array per buffer, one after the other. Padding must keep what it was filled with.

    Raises:
        AssertionError: a number is lost or doubled, padding was written, or a view does not fit into its buffer.
        ValueError: a buffer is too large to allocate (50,000,000 elements).
    """
    for buffer in layout.buffers:
        if buffer.numel > _MAX_ALLOCATED_NUMEL:
            raise ValueError(
                f"buffer {buffer.key} has {buffer.numel} elements; this check allocates at most {_MAX_ALLOCATED_NUMEL}"
            )
        flat = np.zeros(buffer.numel, dtype=np.int32)  # 1D; 0 is what nobody has written
        written = 0
        for name, slot in buffer.params.items():
            view = flat[slot.start : slot.stop]
            if slot.start < 0 or view.size != slot.numel:
                _fail(f"{name!r} at [{slot.start}, {slot.stop}) does not fit into a buffer of {buffer.numel} elements")
            if math.prod(slot.shape) != slot.numel:
                _fail(f"{name!r} has shape {slot.shape} in a range of {slot.numel} elements")
            numbers = np.arange(written + 1, written + 1 + slot.numel, dtype=np.int32)
            view.reshape(slot.shape)[...] = numbers.reshape(slot.shape)
            written += slot.numel
        values = np.sort(flat[flat != 0])
        if not np.array_equal(values, np.arange(1, written + 1)):
            _fail(f"{written} distinct numbers were written into buffer {buffer.key}, {len(values)} are left: views overlap")
        for name, slot in buffer.params.items():
            piece = flat[slot.start : slot.stop]
            if piece.size and (np.diff(piece) != 1).any():
                _fail(f"{name!r} does not read back in the order in which it was written")


def assert_json_round_trip(layout: ModelLayout) -> None:
    """Writing and reading the layout gives an equal one with the same text and fingerprint.

    Raises:
        AssertionError: something is lost on the way.
    """
    text = layout.to_json()
    again = ModelLayout.from_json(text)
    assert_layouts_equal(again, layout)
    if again.to_json() != text or again.fingerprint != layout.fingerprint:
        _fail("the layout read from JSON is equal but has another text or fingerprint")


def assert_layouts_equal(ours: ModelLayout, theirs: ModelLayout) -> None:
    """Two layouts are the same; the error says where they are not.

    Raises:
        AssertionError: the layouts differ.
    """
    if ours != theirs:
        _fail("the layouts differ", layout_diff(ours, theirs))


def _check_coordinates(buffer: BufferLayout, piece: ShardSlice, *, bucket_start: int, shard: Span) -> None:
    slot = buffer.params[piece.param]
    origins = (0, bucket_start, shard.start, slot.start)
    positions = {
        (span.start + origin, span.stop + origin)
        for span, origin in zip((piece.in_buffer, piece.in_bucket, piece.in_shard, piece.in_param), origins, strict=True)
    }
    if len(positions) != 1:
        _fail(f"the four ranges of a piece of {piece.param!r} name different elements: {piece}")
    if not (0 <= piece.in_shard.start < piece.in_shard.stop <= shard.numel):
        _fail(f"a piece of {piece.param!r} is empty or leaves its shard of {shard.numel} elements: {piece}")


def _check_cover(name: str, pieces: Sequence[Span], *, numel: int, num_shards: int) -> None:
    if numel == 0:
        if pieces:
            _fail(f"{name!r} is empty but has owners: {pieces}")
        return
    ends = [0, *(end for piece in pieces for end in piece), numel]
    holes = [(stop, start) for stop, start in list(pairwise(ends))[::2] if stop != start]
    if holes:
        _fail(f"the pieces of {name!r} do not continue one another at (stop, next start) {holes}")
    if len(pieces) > num_shards:
        _fail(f"{name!r} is cut into {len(pieces)} pieces for {num_shards} ranks")


def _fail(what: str, details: Sequence[str] = ()) -> NoReturn:
    hidden = len(details) - _MAX_LINES
    lines = [what, *details[:_MAX_LINES], *([f"and {hidden} more"] if hidden > 0 else [])]
    raise AssertionError("\n  ".join(lines))
