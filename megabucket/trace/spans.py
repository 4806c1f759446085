"""Arithmetic on spans of time: union, intersection, difference, length. Pure functions on numbers; no clock, no torch.

A span is a pair ``(start_s, stop_s)``, half-open, in seconds. A *union* is a sorted tuple of spans that neither overlap
nor touch nor are empty; every function here returns one, so lengths count each moment once.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TypeAlias

TimeSpan: TypeAlias = tuple[float, float]
Spans: TypeAlias = tuple[TimeSpan, ...]


def union(spans: Iterable[TimeSpan]) -> Spans:
    """Return the moments that lie in at least one span. Empty and reversed spans hold no moment.

    >>> union([(4, 5), (0, 2), (1, 3), (3, 3)])
    ((0, 3), (4, 5))
    """
    merged: list[TimeSpan] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def intersection(left: Iterable[TimeSpan], right: Iterable[TimeSpan]) -> Spans:
    """Return the moments that lie in both.

    >>> intersection([(0, 3), (4, 6)], [(2, 5)])
    ((2, 3), (4, 5))
    """
    ours, theirs = union(left), union(right)
    shared: list[TimeSpan] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start, stop = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if start < stop:
            shared.append((start, stop))
        # Only the span that ends first can meet nothing more.
        if ours[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return tuple(shared)


def difference(left: Iterable[TimeSpan], right: Iterable[TimeSpan]) -> Spans:
    """Return the moments of ``left`` that do not lie in ``right``.

    >>> difference([(0, 10)], [(2, 3), (9, 12)])
    ((0, 2), (3, 9))
    """
    edges = [-inf, *(moment for span in union(right) for moment in span), inf]
    return intersection(left, zip(edges[::2], edges[1::2], strict=True))


def length_s(spans: Iterable[TimeSpan]) -> float:
    """Return the seconds covered by at least one span.

    >>> length_s([(0, 2), (1, 3), (4, 5)])
    4
    """
    return sum(stop - start for start, stop in union(spans))
