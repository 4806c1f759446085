"""Which stored ranges fill which wanted ranges: the reshard plan. Pure, no torch.

Every checkpoint load is this plan, whatever the layouts: a tensor is a line of elements, stored in ranges that cover it
once, and wanted in any ranges. How many ranks wrote, how their buckets were cut or who wants it now does not appear.
Called by the reader and by ``megabucket checkpoint reshard``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Elements ``start:stop`` of a tensor lie in file ``file`` (a position in the manifest's list)."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WantedRange:
    """Elements ``start:stop`` of tensor ``name`` are wanted in place ``target``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy ``numel`` elements: out of one stored range of a tensor into one wanted range.

    Args:
        source: the stored range that holds them.
        source_start: where they begin in it, counted from its start.
        target: position in the sequence of wanted ranges.
        target_start: where they go in it, counted from its start.
    """

    name: str
    source: StoredRange
    source_start: int
    target: int
    target_start: int
    numel: int


def coverage_problem(ranges: Sequence[StoredRange], numel: int) -> str | None:
    """Return why ``ranges`` do not cover ``0:numel`` exactly once, or None when they do.

    A tensor without elements is covered by the one range ``0:0``; no other range may be empty.

    >>> coverage_problem([StoredRange(0, 0, 3), StoredRange(1, 5, 8)], 8)
    'elements 3:5 are in no file'
    """
    if numel == 0:
        fits = [(part.start, part.stop) for part in ranges] == [(0, 0)]
        return None if fits else "it has no elements, so one range 0:0 must stand for it"
    covered = 0
    for part in [*sorted(ranges, key=lambda part: part.start), StoredRange(-1, numel, numel + 1)]:
        if part.start < covered:
            return f"elements {part.start}:{min(covered, part.stop)} are there twice, or beyond its {numel}"
        if part.start > covered:
            return f"elements {covered}:{part.start} are in no file"
        if part.start == part.stop:
            return f"the range {part.start}:{part.stop} is empty"
        covered = part.stop
    return None


def plan_reads(stored: Mapping[str, Sequence[StoredRange]], wanted: Sequence[WantedRange]) -> list[Copy]:
    """Return the copies that fill every wanted element exactly once, in the order of ``wanted``.

    Each copy is as long as the two layouts allow, so their number is the least possible, and an element that is wanted
    once is copied once.

    Args:
        stored: by tensor; its ranges are in order and cover it exactly once (``coverage_problem``).

    Raises:
        ValueError: a wanted range is of no stored tensor, or does not lie within it.

    >>> stored = {"w": [StoredRange(0, 0, 6), StoredRange(1, 6, 10)]}
    >>> [(copy.source.file, copy.source_start, copy.target_start, copy.numel)
    ...  for copy in plan_reads(stored, [WantedRange("w", 4, 9)])]
    [(0, 4, 0, 2), (1, 0, 2, 3)]
    """
    starts = {name: [part.start for part in stored[name]] for name in {want.name for want in wanted} & stored.keys()}
    copies: list[Copy] = []
    for target, want in enumerate(wanted):
        if want.name not in starts:
            raise ValueError(f"no tensor {want.name!r} is stored")
        copies.extend(_fill(target, want, stored[want.name], starts[want.name]))
    return copies


def _fill(target: int, want: WantedRange, ranges: Sequence[StoredRange], starts: Sequence[int]) -> Iterable[Copy]:
    if not 0 <= want.start <= want.stop <= ranges[-1].stop:
        raise ValueError(f"{want.start}:{want.stop} is not within 0:{ranges[-1].stop} of {want.name!r}")
    position = want.start
    index = bisect_right(starts, position) - 1
    while position < want.stop:
        source = ranges[index]
        stop = min(want.stop, source.stop)
        yield Copy(want.name, source, position - source.start, target, position - want.start, stop - position)
        position = stop
        index += 1


def files_of(copies: Iterable[Copy]) -> dict[int, list[Copy]]:
    """Return the copies by file, files in order: what is read, each file once."""
    by_file: dict[int, list[Copy]] = {}
    for copy in copies:
        by_file.setdefault(copy.source.file, []).append(copy)
    return dict(sorted(by_file.items()))
