"""Assertions about layouts, for tests. Public API; needs neither torch nor hypothesis.

Each takes a finished layout, made by this library or by other code in this library's types, and raises ``AssertionError``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NoReturn

from megabucket.errors import printable
from megabucket.layout import ModelLayout, OwnerPlan, ParamSpec
from megabucket.layout.invariants import BUFFER_INVARIANTS, check_layout, check_owners

__all__ = [
    "BUFFER_INVARIANTS",
    "assert_layouts_equal",
    "assert_owners_sound",
    "assert_places",
    "assert_sound",
    "check_layout",
    "check_owners",
    "layout_diff",
]

_MAX_LINES: Final = 10
_MAX_DIFFERENCES: Final = 20


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


def assert_owners_sound(layout: ModelLayout, plan: OwnerPlan, params: Collection[str] | None = None) -> None:
    """Every named invariant of ``check_owners`` holds.

    Args:
        params: those that need an owner unless they are empty. ``None``: those that the plan names.

    Raises:
        AssertionError: an invariant is violated; the text lists the violations.
    """
    if violations := check_owners(layout, plan, params):
        _fail(f"the plan of owners violates {len(violations)} invariant(s)", violations)


def assert_places(layout: ModelLayout, specs: Sequence[ParamSpec]) -> None:
    """The layout holds exactly ``specs``: each once, with its shape and number, in a buffer of its dtype and group.

    Raises:
        AssertionError: a parameter is missing, too many, or in the wrong place.
    """
    found: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
    for buffer in layout.buffers:
        for name, slot in buffer.params.items():
            place = (slot.registration_index, slot.shape, slot.shared_embedding, buffer.key.param_dtype, buffer.key.group)
            found[name].append(place)
    expected = {
        spec.name: [(index, spec.shape, spec.shared_embedding, spec.dtype, spec.group)] for index, spec in enumerate(specs)
    }
    problems = [
        f"{name!r}: (number, shape, shared, dtype, group) is {found.get(name)}, expected {expected.get(name)}"
        for name in expected | found
        if found.get(name) != expected.get(name)
    ]
    if problems:
        _fail("the layout does not hold the given parameters", problems)


def assert_layouts_equal(ours: ModelLayout, theirs: ModelLayout) -> None:
    """Two layouts are the same; the error says where they are not.

    Raises:
        AssertionError: the layouts differ.
    """
    if ours != theirs:
        _fail("the layouts differ", layout_diff(ours, theirs))


def _fail(what: str, details: Sequence[str] = ()) -> NoReturn:
    hidden = len(details) - _MAX_LINES
    lines = [what, *details[:_MAX_LINES], *([f"and {hidden} more"] if hidden > 0 else [])]
    raise AssertionError("\n  ".join(lines))


def layout_diff(ours: ModelLayout, theirs: ModelLayout) -> tuple[str, ...]:
    """Return how two layouts differ, one line per difference, at most 20 and a count; empty when they are equal."""
    left, right = dict(_facts(ours)), dict(_facts(theirs))
    lines = [
        f"{name}: {printable(str(left.get(name, 'missing')))} != {printable(str(right.get(name, 'missing')))}"
        for name in left | right
        if left.get(name, "missing") != right.get(name, "missing")
    ]
    hidden = len(lines) - _MAX_DIFFERENCES
    return (*lines[:_MAX_DIFFERENCES], f"and {hidden} more differences") if hidden > 0 else tuple(lines)


def _facts(layout: ModelLayout) -> Iterator[tuple[str, object]]:
    """Yield all that a layout consists of, by name."""
    for index, buffer in enumerate(layout.buffers):
        for field in ("key", "num_shards", "bucket_size", "start_alignment", "end_multiple", "numel"):
            yield f"buffer {index}: {field}", getattr(buffer, field)
        yield f"buffer {index}: is cut by name", buffer.cuts is not None
        for position, name in enumerate(buffer.cuts or ()):
            yield f"buffer {index}: cut {name!r}", f"number {position}"
        for name, slot in buffer.params.items():
            yield f"buffer {index}: parameter {name!r}", slot
        for bucket in buffer.buckets:
            yield f"buffer {index}: bucket {bucket.index}", bucket
