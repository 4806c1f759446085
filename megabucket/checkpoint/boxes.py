"""A flat range of a tensor as axis-aligned boxes: what formats that know only boxes can store of it. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor: its elements follow one another in the flat order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return boxes that cover the elements ``start:stop`` of a row-major tensor, each once, in flat order.

    At most ``2 * dimensions - 1`` of them (one, for a tensor without dimensions or elements).

    >>> [(box.offsets, box.sizes) for box in boxes_of((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if not shape or math.prod(shape) == 0:
        return [Box((0,) * len(shape), tuple(shape))]
    if start >= stop:
        return []
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that are whole: first, ..., last - 1
    if first > last:  # within one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    head = _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    whole = [Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    tail = _in_row(shape, last, 0, stop - last * row) if last * row < stop else []
    return [*head, *whole, *tail]


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes_of(shape[1:], start, stop)]
