"""Blocks that cover a tensor once, and what is said of others."""

import pytest

from megabucket.checkpoint.format import block_problem


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
    ],
)
def test_blocks_cover_a_tensor_once_or_it_is_said_why_not(boxes, shape, problem):
    assert block_problem(boxes, shape) == problem
