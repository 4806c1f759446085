"""Sum to mean: the divisors around one collective."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megabucket.buffer.scaling import GradScale

ALL_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUM_RANKS = st.integers(1, 4096)


@given(num_ranks=NUM_RANKS, dtype=st.sampled_from(ALL_DTYPES))
@example(num_ranks=3, dtype=torch.float16)
def test_the_divisors_multiply_to_the_number_of_ranks(num_ranks, dtype):
    scale = GradScale.mean_of(num_ranks, dtype)

    assert scale.divisor_before * scale.divisor_after == num_ranks


@given(num_ranks=NUM_RANKS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_wide_sum_is_divided_once_at_the_end(num_ranks, dtype):
    assert GradScale.mean_of(num_ranks, dtype) == GradScale(1.0, float(num_ranks))


@given(num_ranks=NUM_RANKS, dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_before_a_16_bit_collective_the_divisor_is_a_power_of_two_near_the_root(num_ranks, dtype):
    before = GradScale.mean_of(num_ranks, dtype).divisor_before

    assert math.frexp(before)[0] == 0.5  # a power of two: dividing by it is exact
    assert before <= math.sqrt(num_ranks) < 2 * before


@pytest.mark.parametrize(
    ("num_ranks", "before", "after"), [(1, 1, 1), (2, 1, 2), (4, 2, 2), (6, 2, 3), (64, 8, 8), (512, 16, 32)]
)
def test_divisors_in_float16(num_ranks, before, after):
    assert GradScale.mean_of(num_ranks, torch.float16) == GradScale(before, after)


def reduce_in(dtype, value, *, num_ranks, scale):
    """The mean of a value that all ranks hold, summed one rank after the other in ``dtype``."""
    mine = torch.tensor([value], dtype=dtype)
    scale.before(mine)
    total = mine.clone()
    for _ in range(num_ranks - 1):
        total += mine
    next(scale.divisions(total), None)
    return total.item()


class TestFloat16:
    """64 ranks. Smallest float16: 2**-24 = 6e-8; largest: 65504."""

    def test_a_small_gradient_that_dividing_first_would_flush_to_zero_survives(self):
        divided_first = GradScale(64.0, 1.0)
        split = GradScale.mean_of(64, torch.float16)

        assert reduce_in(torch.float16, 2.0**-20, num_ranks=64, scale=divided_first) == 0.0  # 2**-26 is below 2**-25
        assert reduce_in(torch.float16, 2.0**-20, num_ranks=64, scale=split) == 2.0**-20

    def test_a_large_gradient_that_dividing_last_would_overflow_survives(self):
        divided_last = GradScale(1.0, 64.0)
        split = GradScale.mean_of(64, torch.float16)

        assert reduce_in(torch.float16, 4096.0, num_ranks=64, scale=divided_last) == math.inf  # 64 * 4096 = 262144
        assert reduce_in(torch.float16, 4096.0, num_ranks=64, scale=split) == 4096.0  # 64 * 512 = 32768


def test_a_divisor_of_one_is_no_pass_over_memory():
    values = torch.ones(3)
    version = values._version

    GradScale.mean_of(1, torch.float32).before(values)
    next(GradScale.mean_of(1, torch.float32).divisions(values), None)

    assert values._version == version


def test_scaling_is_in_place_and_covers_every_element():
    values = torch.tensor([2.0, -4.0, 0.0])

    GradScale(2.0, 4.0).before(values)
    before = values.tolist()
    next(GradScale(2.0, 4.0).divisions(values), None)

    assert before == [1.0, -2.0, 0.0]
    assert values.tolist() == [0.25, -0.5, 0.0]
