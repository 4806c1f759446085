"""The finite test finds every nan and every infinity, names where it is, and nothing else."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.buffer.finite import FiniteTest, NonFiniteParam, describe_nonfinite
from megabucket.buffer.grad_slot import GradSlot

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ANY_VALUE = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, "largest", "smallest", "subnormal"])


def value_of(name, dtype):
    info = torch.finfo(dtype)
    named = {"largest": info.max, "smallest": info.min, "subnormal": info.smallest_normal / 2}
    return named.get(name, name) if isinstance(name, str) else name


def slots_of(flat, sizes):
    """One slot per size, one after another in a flat gradient."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        GradSlot(f"p{index}", torch.nn.Parameter(torch.zeros(size)), flat[start : start + size])
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


@given(rows=st.lists(st.lists(ANY_VALUE, min_size=0, max_size=4), min_size=1, max_size=4), dtype=st.sampled_from(DTYPES))
def test_it_names_the_parameters_that_are_not_finite_and_no_others(rows, dtype):
    values = [[value_of(name, dtype) for name in row] for row in rows]
    flat = torch.tensor([value for row in values for value in row], dtype=dtype)
    test = FiniteTest(slots_of(flat, [len(row) for row in rows]), [flat])

    test.run()

    assert test.peaks == []  # on the CPU the host knows at once
    assert [one.param for one in test.found] == [
        f"p{index}" for index, row in enumerate(values) if not all(math.isfinite(value) for value in row)
    ]


@given(names=st.lists(ANY_VALUE, min_size=1, max_size=12))
def test_the_finding_counts_and_gives_the_first_index(names):
    values = [value_of(name, torch.float32) for name in names]
    bad = [index for index, value in enumerate(values) if not math.isfinite(value)]

    text = describe_nonfinite(torch.tensor(values))

    kinds = [kind for kind, find in (("nan", math.isnan), ("inf", math.isinf)) if any(find(value) for value in values)]
    first = f"first at [{bad[0]}]" if bad else ""
    assert text == (f"{' and '.join(kinds)} in {len(bad)} of {len(values)} elements, {first}" if bad else "")


@given(
    largest_parts=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sign=st.sampled_from([1.0, -1.0]),
)
def test_what_passes_with_headroom_on_every_rank_has_a_finite_sum(largest_parts, dtype, sign):
    headroom = 2.0 ** math.ceil(math.log2(len(largest_parts)))
    ranks = [torch.tensor([sign * part * torch.finfo(dtype).max], dtype=dtype) for part in largest_parts]
    tests = [FiniteTest(slots_of(flat, [1]), [flat], [headroom]) for flat in ranks]

    for test in tests:
        test.run()

    limit = torch.finfo(dtype).max / headroom
    assert [bool(test.found) for test in tests] == [abs(flat.item()) > limit for flat in ranks]
    if not any(test.found for test in tests):
        assert math.isfinite(functools.reduce(torch.add, ranks).item())


def test_without_nan_or_inf_the_largest_gradient_is_the_one_that_leaves_no_headroom():
    flat = torch.tensor([1.0, -2.0, -3e38, 2e38])
    test = FiniteTest(slots_of(flat, [2, 1, 1, 0]), [flat], [2.0])

    test.run()

    assert test.found == (NonFiniteParam("p1", "values of 3e+38, too large to be summed over the ranks"),)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_whose_sum_overflows_are_finite(dtype):
    flat = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    test = FiniteTest(slots_of(flat, [1000]), [flat])

    test.run()

    assert not flat.sum().isfinite()
    assert test.found == ()


def test_the_first_index_is_that_of_the_shape_of_the_parameter():
    grad = torch.zeros(2, 3)
    grad[1, 2] = -math.inf

    assert describe_nonfinite(grad) == "inf in 1 of 6 elements, first at [1, 2]"
    assert describe_nonfinite(torch.tensor(math.nan)) == "nan in 1 of 1 elements, first at []"


def test_each_bucket_of_a_group_is_looked_at():
    flats = [torch.zeros(3), torch.zeros(0), torch.zeros(2)]
    flats[2][1] = math.nan
    test = FiniteTest([*slots_of(flats[0], [3]), *slots_of(flats[2], [2])], flats)

    test.run()

    assert test.found == (NonFiniteParam("p0", "nan in 1 of 2 elements, first at [1]"),)


def test_each_run_looks_anew():
    flat = torch.tensor([math.nan])
    test = FiniteTest(slots_of(flat, [1]), [flat])
    test.run()
    flat.zero_()

    test.run()

    assert test.found == ()
