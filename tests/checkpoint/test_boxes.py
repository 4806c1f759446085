"""Flat ranges as boxes: every element once, in order, and no more boxes than are needed."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.convert.dcp import boxes_of


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def flat_positions(shape, box):
    """The flat positions of a box's elements, in the order of its own indices."""
    positions = [0]
    for size, offset, length in zip(shape, *box, strict=True):
        positions = [position * size + offset + index for position in positions for index in range(length)]
    return positions


@given(given_range=ranges())
def test_boxes_cover_a_range_once_and_in_order(given_range):
    shape, start, stop = given_range

    boxes = boxes_of(shape, start, stop)

    assert [position for box in boxes for position in flat_positions(shape, box)] == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_a_tensor_without_dimensions_or_elements_is_one_box():
    assert boxes_of((), 0, 1) == [((), ())]
    assert boxes_of((3, 0, 2), 0, 0) == [((0, 0, 0), (3, 0, 2))]
    assert boxes_of((3, 2), 2, 2) == []
