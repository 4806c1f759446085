"""Ranges and blocks that cover a tensor once, and what is said of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.format import StoredRange, block_problem, coverage_problem


@pytest.mark.parametrize(
    ("ranges", "numel", "problem"),
    [
        ([], 3, "elements 0:3 are in no file"),
        ([(0, 3)], 4, "elements 3:4 are in no file"),
        ([(0, 5)], 4, "elements 4:5 are there twice, or beyond its 4"),
        ([(0, 2), (1, 4)], 4, "elements 1:2 are there twice, or beyond its 4"),
        ([(0, 2), (0, 2), (2, 4)], 4, "elements 0:2 are there twice, or beyond its 4"),
        ([(0, 2), (3, 4)], 4, "elements 2:3 are in no file"),
        ([(0, 2), (2, 2), (2, 4)], 4, "the range 2:2 is empty"),
        ([], 0, "it has no elements, so one range 0:0 must stand for it"),
        ([(0, 0), (0, 0)], 0, "it has no elements, so one range 0:0 must stand for it"),
        ([(0, 1)], 0, "it has no elements, so one range 0:0 must stand for it"),
        ([(0, 0)], 0, None),
        ([(2, 4), (0, 2)], 4, None),
    ],
)
def test_what_does_not_cover_a_tensor_once_is_said(ranges, numel, problem):
    assert coverage_problem([StoredRange(0, *edges) for edges in ranges], numel) == problem


@given(ranges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4), numel=st.integers(1, 6))
def test_ranges_without_a_problem_hold_each_element_once_and_others_do_not(ranges, numel):
    held = sorted(element for start, stop in ranges for element in range(start, stop))
    is_cover = held == list(range(numel)) and all(start < stop for start, stop in ranges)

    assert (coverage_problem([StoredRange(0, *edges) for edges in ranges], numel) is None) == is_cover


def box(*spans):
    return tuple(spans)


@pytest.mark.parametrize(
    ("boxes", "shape", "problem"),
    [
        ([box()], (), None),
        ([box((0, 0), (0, 3))], (0, 3), None),
        ([box((0, 2), (0, 3)), box((2, 4), (0, 1)), box((2, 4), (1, 3))], (4, 3), None),
        ([box((0, 0)), box((0, 0))], (0,), "hold elements twice: [0:0] and [0:0]"),
        ([box((0, 2)), box((1, 3))], (3,), "hold elements twice: [0:2] and [1:3]"),
        ([box((0, 2)), box((3, 4))], (4,), "hold 3 of its 4 elements: [0:2], [3:4]"),
        ([box((0, 5))], (4,), "lie outside of it: [0:5] of shape (4,)"),
        ([box((0, 4))], (2, 2), "lie outside of it: [0:4] of shape (2, 2)"),
    ],
)
def test_blocks_cover_a_tensor_once_or_it_is_said_why_not(boxes, shape, problem):
    assert block_problem(boxes, shape) == problem
