"""The code of ranks: whatever was counted wrongly is read off the sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.doctor.rank_code import WIDTHS, RankCode


def sums_of(code: RankCode, counted: dict[int, int], *, usual: int = 1, start: int = 0, numel: int | None = None):
    """Return the sums when each rank is counted ``usual`` times, except those in ``counted``."""
    stop = start + (numel or 2 * code.period)
    contributions = [
        [counted.get(rank, usual) * value for value in code.values(rank, start=start, stop=stop)]
        for rank in range(code.num_ranks)
    ]
    return [sum(column) for column in zip(*contributions, strict=True)]


codes = st.builds(RankCode, num_ranks=st.integers(1, 70), width=st.sampled_from(sorted(set(WIDTHS.values()) | {12})))


@given(code=codes, usual=st.integers(1, 3), start=st.integers(0, 200))
def test_the_sum_over_all_ranks_is_what_the_code_says_and_nothing_is_wrong(code, usual, start):
    sums = sums_of(code, {}, usual=usual, start=start)

    assert sums == code.sums(start=start, stop=start + len(sums), times=usual)
    assert code.read(sums, start=start, times=usual) is None


@given(code=codes.filter(lambda code: code.num_ranks > 1), data=st.data())
def test_a_rank_that_is_missing_or_counted_twice_is_named_from_any_piece_of_a_tensor(code, data):
    rank = data.draw(st.integers(0, code.num_ranks - 1))
    count = data.draw(st.sampled_from([0, 2]))
    start = data.draw(st.integers(0, 100))

    reading = code.read(sums_of(code, {rank: count}, start=start), start=start)

    assert reading == (f"rank {rank} is missing" if count == 0 else f"rank {rank} is counted twice", (rank,))


@given(data=st.data(), num_ranks=st.integers(3, 40))
def test_one_rank_missing_and_another_counted_twice_are_both_named(data, num_ranks):
    code = RankCode(num_ranks, WIDTHS["float32"])
    missing, twice = data.draw(st.permutations(range(num_ranks)))[:2]

    reading = code.read(sums_of(code, {missing: 0, twice: 2}))

    assert sorted(reading.text.split("; ")) == sorted([f"rank {missing} is missing", f"rank {twice} is counted twice"])
    assert reading.ranks == tuple(sorted([missing, twice]))


@given(code=codes)
def test_sums_of_ranks_counted_up_to_three_times_are_exact_in_the_dtype(code):
    significant_bits = {22: 24, 12: 24, 9: 11, 6: 8}[code.width]

    largest = max(code.sums(stop=code.period, times=3))

    assert largest < 2**significant_bits


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ([7, 3, 7, 3], "rank 3 is missing"),
        ([7, 4, 7, 4], "rank 1 is counted 3 times; ranks 2, 3 are missing"),  # 1 + 3 * 2, of 4 contributions
        ([7, 1, 7, 1], "rank 3 is missing"),  # no combination of ranks; the bits say more than the count
        ([0, 0, 0, 0], "every rank is missing: all values are 0"),
        ([12, 2, 12, 2], "ranks 0, 1 are missing"),
        ([30, 8, 30, 8], "every value is 2 times the right one: not divided, or every rank counted as often"),
        ([3.75, 1, 3.75, 1], "every value is 1/4 of the right one: divided once too often"),
        ([18, 4.8, 18, 4.8], "every value is 1.2 times the right one"),
        ([15, 4, 15.5, 4], "not a sum of ranks: element 2 is 15.5 instead of 15"),
        ([15, 4, -1, 4], "not a sum of ranks: element 2 is -1 instead of 15"),
        ([15, 4, 15, float("nan")], "values are not finite"),
        ([15, 4, 15, float("inf")], "values are not finite"),
        ([15, 4, 15, 4, 7, 3], "rank 3 is missing"),  # in one place only
        ([3], "ranks 2, 3 are missing"),  # no count to go by
    ],
)
def test_what_is_wrong_is_said_in_words(sums, text):
    code = RankCode(num_ranks=4, width=22)

    assert code.read(sums).text == text


def test_without_the_bits_the_count_is_said():
    code = RankCode(num_ranks=4, width=22)

    assert code.read([3], start=1).text == "3 instead of 4 contributions arrived"


def test_in_the_second_step_counts_are_compared_with_its_microbatches():
    code = RankCode(num_ranks=4, width=22)

    assert code.read(sums_of(code, {2: 1}, usual=2), times=2).text == "rank 2 is counted once instead of twice"
    assert code.read(sums_of(code, {2: 0}, usual=2), times=2).text == "rank 2 is missing"


def test_more_ranks_than_digits_are_cut_into_blocks():
    code = RankCode(num_ranks=8, width=6)

    assert code.period == 4
    assert code.values(7, stop=6) == [0, 0, 2, 1, 0, 0]  # second of the block of ranks 6 and 7
    assert code.sums(stop=4) == [63, 6, 3, 2]
    assert code.read(sums_of(code, {1: 0, 7: 2})).text == "rank 1 is missing; rank 7 is counted twice"
