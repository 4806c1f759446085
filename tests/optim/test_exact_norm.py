"""The norm of integers: the same bits however gradients are cut, and the value of an exact sum."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.comm import LocalCommunicator
from megabucket.optim.norm import ExactNorm, GlobalNorm
from megabucket.testing import LoopbackWorld

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def norm_of(grads, norm_type=2.0, kind=ExactNorm):
    measured = kind(LocalCommunicator(), device=CPU, is_whole=True, norm_type=norm_type)
    return measured.of(map(measured.of_grad, grads))


def exact(grads, norm_type):
    values = [abs(value) ** norm_type for grad in grads for value in grad.double().tolist()]
    total = math.fsum(values)
    return math.sqrt(total) if norm_type == 2 else total


def in_float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def gradients(numel, dtype, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (values * torch.exp(spread * torch.randn(numel, generator=generator))).to(dtype)


@given(
    numel=st.integers(1, 5_000),
    dtype=st.sampled_from(DTYPES),
    norm_type=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.0, 1.0, 2.0]),
    data=st.data(),
)
def test_any_cut_and_order_has_the_same_bits_and_they_are_those_of_the_exact_sum(numel, dtype, norm_type, seed, spread, data):
    grad = gradients(numel, dtype, seed, spread)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=5)))
    pieces = list(grad.tensor_split(cuts))
    shuffled = data.draw(st.permutations(pieces))

    whole = norm_of([grad], norm_type)

    assert norm_of(shuffled, norm_type) == whole
    assert whole == in_float32(exact([grad], norm_type))


def test_float64_sums_depend_on_the_cut_at_the_border_between_two_floats_and_integers_do_not():
    # The border after 2**27 is 2**27 + 8, whose square is 2**54 + 2**31 + 2**6. Float64 has steps of 4 from 2**54 on: ones that
    # are added to the large square one by one are lost. 46340**2 is 88048 less than 2**31.
    large, ones = torch.tensor([2.0**27, 46340.0]), torch.ones(88048 + 64 + 2000)
    together, apart = [torch.cat([large, ones])], [large, ones]

    assert norm_of(together, kind=GlobalNorm) != norm_of(apart, kind=GlobalNorm)
    assert norm_of(together) == norm_of(apart)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [],
        [1e-45],
        [-3.4028234663852886e38],
        [3.0e38, 3.0e38, 1e-45],
        [65504.0] * 3000,
    ],
    ids=str,
)
def test_the_ends_of_the_range_of_float32(values, norm_type):
    grad = torch.tensor(values, dtype=torch.float32)

    assert norm_of([grad], norm_type) == pytest.approx(exact([grad], norm_type), rel=2**-23, abs=0)


@pytest.mark.parametrize(("value", "norm"), [(5e-324, 0.0), (1e300, 1e300), (1e-300, 0.0), (1.7e308, 1.7e308)])
def test_the_ends_of_the_range_of_float64(value, norm):
    """Too small for a float32, the norm is rounded to 0, as that of float64 sums."""
    assert norm_of([torch.tensor([value, value / 4], dtype=torch.float64)]) == pytest.approx(
        norm * (math.sqrt(17) / 4), rel=1e-7, abs=0
    )


def over_ranks(by_rank, norm_type=2.0, kind=ExactNorm):
    world = LoopbackWorld(len(by_rank))

    def program(rank):
        measured = kind(world.communicator(rank), device=CPU, norm_type=norm_type)
        first = measured.of(map(measured.of_grad, by_rank[rank]))
        return first, measured.of([torch.full((3,), 2.0)])  # what was measured before is forgotten

    return world.run(program), [text.split(" of ")[0] for text in world.schedule(0)]


def test_over_ranks_it_takes_two_collectives_and_a_rank_may_have_nothing():
    found, launched = over_ranks([[torch.tensor([3.0])], [], [torch.tensor([4.0]), torch.empty(0)]])

    assert found == [(5.0, 6.0)] * 3  # sqrt(9 * 4)
    assert launched == ["grad norm [all_reduce max", "grad norm [all_reduce sum"] * 2


@pytest.mark.parametrize(("bad", "expected"), [(math.nan, math.nan), (math.inf, math.inf), (-math.inf, math.inf)])
def test_what_is_not_finite_on_one_rank_is_found_on_all_as_with_float64_sums(bad, expected):
    grads = [[torch.tensor([1.0])], [torch.tensor([1.0, bad, 2.0])]]

    found, launched = over_ranks(grads)
    as_before, _ = over_ranks(grads, kind=GlobalNorm)

    assert [repr(one) for one, _ in found] == [repr(expected)] * 2 == [repr(one) for one, _ in as_before]
    assert [two for _, two in found] == [in_float32(math.sqrt(24))] * 2
    assert launched == ["grad norm [all_reduce max"] * 2 + ["grad norm [all_reduce sum"]


def test_zeros_need_no_second_collective():
    found, launched = over_ranks([[torch.zeros(5)], [torch.zeros(5)]])

    assert found[0][0] == 0.0
    assert launched[:2] == ["grad norm [all_reduce max"] * 2


def test_a_thousand_million_elements_fit_into_the_sum():
    """2**20 elements of the largest integer make 2**72: as many rows as this stand for 2**40 of them."""
    grad = torch.full((1 << 20,), 1.0 - 2**-24)

    assert norm_of([grad] * 4) == in_float32((1.0 - 2**-24) * 2**11)
