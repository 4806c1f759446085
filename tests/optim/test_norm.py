"""The global norm does not depend on how gradients are cut, and clipping is torch's."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.comm import LocalCommunicator
from megabucket.optim.norm import GlobalNorm, clip_by_norm, l2_norm
from megabucket.testing import LoopbackWorld

CPU = torch.device("cpu")


def norm_here(grads, **fields):
    norm = GlobalNorm(LocalCommunicator(), device=CPU, **fields)
    return norm.of(map(norm.of_grad, grads))


def random_grads(seed, numel, dtype=torch.float32):
    """Values over many orders of magnitude, where float32 sums differ most."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randn(numel, generator=generator, dtype=torch.float64) * 3
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * exponents.exp()).to(dtype)


def cut(values, points):
    places = sorted({0, values.numel(), *(point % (values.numel() + 1) for point in points)})
    return [values[start:stop] for start, stop in pairwise(places)]


class TestNorm:
    def test_of_nothing_is_zero(self):
        assert norm_here([]) == 0.0
        assert norm_here([torch.empty(0)]) == 0.0

    @given(seed=st.integers(0, 2**32), numel=st.integers(1, 3_000), points=st.lists(st.integers(0, 10**6), max_size=8))
    def test_is_bitwise_the_same_for_every_cut_into_tensors(self, seed, numel, points):
        grads = random_grads(seed, numel)

        assert norm_here(cut(grads, points)) == norm_here([grads])

    @given(seed=st.integers(0, 2**32), numel=st.integers(1, 3_000), size=st.integers(1, 5))
    def test_is_bitwise_the_same_for_every_number_of_shards(self, seed, numel, size):
        grads = random_grads(seed, numel)
        shards = [grads[rank * numel // size : (rank + 1) * numel // size] for rank in range(size)]
        world = LoopbackWorld(size)

        def norm_of_rank(rank):
            norms = [l2_norm(shards[rank])] if shards[rank].numel() else []
            return GlobalNorm(world.communicator(rank), device=CPU).of(norms)

        assert world.run(norm_of_rank) == [norm_here([grads])] * size

    def test_is_the_same_for_tensors_larger_than_the_cache_chunks(self):
        grads = random_grads(0, 600_000)

        assert norm_here([grads]) == norm_here(cut(grads, [123_457, 262_144, 262_145]))

    @given(seed=st.integers(0, 2**32), numel=st.integers(1, 3_000))
    def test_is_the_float32_nearest_to_the_exact_norm(self, seed, numel):
        grads = random_grads(seed, numel)
        exact = math.sqrt(math.fsum(value * value for value in grads.double().tolist()))

        assert norm_here([grads]) == torch.tensor(exact, dtype=torch.float64).float().item()

    @given(
        seed=st.integers(0, 2**32),
        numel=st.integers(1, 3_000),
        points=st.lists(st.integers(0, 10**6), max_size=8),
        norm_type=st.sampled_from([1, 1.5, 3.0, math.inf]),
    )
    def test_of_another_kind_is_the_exact_one_whatever_the_cut(self, seed, numel, points, norm_type):
        grads = random_grads(seed, numel)
        largest = max(map(abs, grads.tolist()))
        exact = largest  # the others divided by it, so that no power overflows
        if norm_type != math.inf:
            exact *= math.fsum((abs(value) / largest) ** norm_type for value in grads.double().tolist()) ** (1 / norm_type)

        found = norm_here([part for part in cut(grads, points) if part.numel()], norm_type=norm_type)

        assert found == pytest.approx(exact, rel=2e-7)  # rounded to float32

    def test_finite_gradients_of_any_size_have_a_finite_norm(self):
        largest = torch.finfo(torch.float32).max

        # 2 * max: the norms overflow in float32, and the norm itself does
        assert norm_here([torch.full((4,), largest)]) == 2 * largest

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_one_value_that_is_not_finite_makes_the_norm_so(self, value):
        norm = norm_here([torch.ones(100), torch.tensor([1.0, value])])

        assert not math.isfinite(norm)

    def test_costs_one_collective_of_eight_bytes_when_sharded_and_none_otherwise(self):
        world = LoopbackWorld(2)

        def both(rank):
            communicator = world.communicator(rank)
            for is_sharded in (True, False):
                GlobalNorm(communicator, device=CPU, is_whole=not is_sharded).of([l2_norm(torch.ones(3))])

        world.run(both)

        assert world.schedule(0) == ("grad norm [all_reduce sum of 1 x float64]",)

    def test_of_one_step_does_not_reach_into_the_next(self):
        norm = GlobalNorm(LocalCommunicator(), device=CPU)

        of_steps = [norm.of([l2_norm(torch.tensor([value]))]) for value in (3.0, 4.0)]

        assert [*of_steps, norm.of([])] == [3.0, 4.0, 0.0]

    def test_of_one_gradient_is_a_float64(self):
        norm = l2_norm(torch.full((16,), 3.0))

        assert (norm.dtype, norm.tolist()) == (torch.float64, 12.0)


class TestClip:
    @given(seed=st.integers(0, 2**32), numel=st.integers(1, 500), max_norm=st.floats(1e-3, 1e3))
    def test_is_torchs_up_to_the_roundings_of_torchs_factor(self, seed, numel, max_norm):
        ours, theirs = random_grads(seed, numel), torch.nn.Parameter(torch.zeros(numel))
        theirs.grad = ours.clone()

        torch.nn.utils.clip_grad_norm_([theirs], max_norm)
        clip_by_norm([ours], norm=norm_here([ours]), max_norm=max_norm)

        # Torch sums norms in float32 and rounds norm, norm + 1e-6, its reciprocal and the factor; 4 ulps were seen.
        torch.testing.assert_close(ours, theirs.grad, rtol=16 * 2.0**-24, atol=0)

    @given(seed=st.integers(0, 2**32), numel=st.integers(1, 500), max_norm=st.floats(1e-3, 1e3))
    def test_is_exact_up_to_three_roundings(self, seed, numel, max_norm):
        grads = random_grads(seed, numel)
        exact_norm = math.sqrt(math.fsum(value * value for value in grads.double().tolist()))
        exact = grads.double() * min(1.0, max_norm / (exact_norm + 1e-6))

        clip_by_norm([grads], norm=norm_here([grads]), max_norm=max_norm)

        # The norm, the factor and the product are each rounded to float32: three times 2**-24, and its square.
        torch.testing.assert_close(grads.double(), exact, rtol=3 * 2.0**-24 + 1e-13, atol=0)

    @pytest.mark.parametrize("max_norm", [5.1, 100.0])
    def test_leaves_smaller_gradients_alone(self, max_norm):
        grads = [torch.tensor([3.0, -0.0]), torch.tensor([4.0])]
        versions = [grad._version for grad in grads]

        clip_by_norm(grads, norm=5.0, max_norm=max_norm)

        assert [grad._version for grad in grads] == versions  # not even a pass over memory

    def test_of_nothing_does_nothing(self):
        clip_by_norm([], norm=5.0, max_norm=1.0)

    def test_of_zeros_does_not_divide_by_zero(self):
        grad = torch.zeros(3)

        clip_by_norm([grad], norm=0.0, max_norm=1e-9)

        assert torch.equal(grad, torch.zeros(3))
