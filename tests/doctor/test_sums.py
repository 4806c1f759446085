"""What is counted wrongly is read off the sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.doctor.questions import contribution, read_sum

sizes = st.integers(1, 70)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def sum_of(size, counted, *, usual=1):
    """Return the sum when each rank is counted ``usual`` times, except those in ``counted``."""
    return sum(counted.get(rank, usual) * contribution(rank, size, 2 * size) for rank in range(size))


@given(size=sizes, usual=st.integers(1, 3))
def test_the_sum_over_all_ranks_is_known_and_nothing_is_wrong_with_it(size, usual):
    sums = sum_of(size, {}, usual=usual)

    assert sums.unique().tolist() == [5 * usual]
    assert read_sum(sums, size, times=usual) == ("", ())


@given(size=st.integers(2, 70), data=st.data())
def test_a_rank_that_is_missing_or_counted_twice_is_named(size, data):
    rank = data.draw(st.integers(0, size - 1))
    count = data.draw(st.sampled_from([0, 2]))

    problem = read_sum(sum_of(size, {rank: count}), size)

    assert problem == (f"rank {rank} is missing" if count == 0 else f"rank {rank} is counted 2x instead of 1x", (rank,))


@given(data=st.data(), size=st.integers(3, 40))
def test_one_rank_missing_and_another_counted_twice_are_both_named(data, size):
    missing, twice = data.draw(st.permutations(range(size)))[:2]

    problem, ranks = read_sum(sum_of(size, {missing: 0, twice: 2}), size)

    assert set(problem.split("; ")) == {f"rank {missing} is missing", f"rank {twice} is counted 2x instead of 1x"}
    assert ranks == tuple(sorted([missing, twice]))


@given(size=st.integers(2, 70), data=st.data(), dtype=st.sampled_from(DTYPES))
def test_a_missing_rank_is_read_from_a_rounded_mean_too(size, data, dtype):
    rank = data.draw(st.integers(0, size - 1))
    mean = (sum_of(size, {rank: 1}, usual=2) / size).to(dtype)

    problem = read_sum(mean.double() * size, size, times=2)

    assert problem == (f"rank {rank} is counted 1x instead of 2x", (rank,))


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        # Of four ranks each adds 5 to its own elements: 5 everywhere.
        ([5, 5, 5, 0], "rank 3 is missing"),
        ([5, 5, 0, 0], "ranks 2, 3 are missing"),
        ([5, 15, 0, 0], "rank 1 is counted 3x instead of 1x; ranks 2, 3 are missing"),
        ([0, 0, 0, 0], "every value is 0 times the right one"),
        ([10, 10, 10, 10], "every value is 2 times the right one"),
        ([1.25, 1.25, 1.25, 1.25], "every value is 0.25 times the right one"),
        ([6, 6, 6, 6], "every value is 1.2 times the right one"),
        ([5, 5, 7.5, 5], "not a sum of ranks: element 2 is 7.5 instead of 5"),
        ([5, 5, -5, 5], "not a sum of ranks: element 2 is -5 instead of 5"),
        ([5, 5, 5, float("nan")], "values are not finite"),
        ([5, 5, 5, float("inf")], "values are not finite"),
        ([5, 5, 5, 5, 5, 5, 5, 0], "rank 3 is missing"),  # in one place only
        ([5, 5, 5, 5.01], "sums of whole numbers are rounded"),
    ],
)
def test_what_is_wrong_is_said_in_words(sums, text):
    assert read_sum(torch.tensor(sums), size=4)[0] == text
