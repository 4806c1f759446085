"""Sum to mean: what a gradient is multiplied by before the sum, and what the sum is divided by."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megabucket.buffer.bucket_group import grad_scale

WIDE = [torch.float32, torch.float64, torch.bfloat16]
NUM_RANKS = st.integers(1, 4096)


@given(num_ranks=NUM_RANKS, dtype=st.sampled_from(WIDE))
def test_a_gradient_is_multiplied_once_before_the_sum_unless_it_is_float16(num_ranks, dtype):
    assert grad_scale(num_ranks, dtype) == (1.0 / num_ranks, 1.0)


@given(num_ranks=NUM_RANKS)
@example(num_ranks=3)
def test_before_a_float16_sum_the_divisor_is_a_power_of_two_near_the_root(num_ranks):
    factor, after = grad_scale(num_ranks, torch.float16)

    assert math.frexp(factor)[0] == 0.5  # a power of two: multiplying by it is exact
    assert 1 / factor <= math.sqrt(num_ranks) < 2 / factor
    assert after / factor == num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "factor", "after"), [(1, 1, 1), (2, 1, 2), (4, 1 / 2, 2), (6, 1 / 2, 3), (64, 1 / 8, 8), (512, 1 / 16, 32)]
)
def test_scales_in_float16(num_ranks, factor, after):
    assert grad_scale(num_ranks, torch.float16) == (factor, after)


def reduce_in_float16(value, *, num_ranks, scale):
    """The mean of a value that all ranks hold, summed one rank after the other."""
    factor, after = scale
    mine = torch.tensor([value], dtype=torch.float16).mul_(factor)
    total = mine.clone()
    for _ in range(num_ranks - 1):
        total += mine
    return total.div_(after).item()


class TestFloat16:
    """64 ranks. Smallest float16: 2**-24 = 6e-8; largest: 65504."""

    def test_a_small_gradient_that_dividing_first_would_flush_to_zero_survives(self):
        split = grad_scale(64, torch.float16)

        assert reduce_in_float16(2.0**-20, num_ranks=64, scale=(1 / 64, 1.0)) == 0.0  # 2**-26 is below 2**-25
        assert reduce_in_float16(2.0**-20, num_ranks=64, scale=split) == 2.0**-20

    def test_a_large_gradient_that_dividing_last_would_overflow_survives(self):
        split = grad_scale(64, torch.float16)

        assert reduce_in_float16(4096.0, num_ranks=64, scale=(1.0, 64.0)) == math.inf  # 64 * 4096 = 262144
        assert reduce_in_float16(4096.0, num_ranks=64, scale=split) == 4096.0  # 64 * 512 = 32768
