"""Finite gradients whose sum over the ranks is infinite: one error on all ranks, and the next step is right."""

import math

import pytest
import torch
from loop_ranks import Ranks, Weights, grads

from megabucket import DistributedOptimizer
from megabucket.errors import ConfigError, NonFiniteGradientError

HALF = {"grad_reduce_in_fp32": False}
TEXT = (
    "step 0: the gradient of 'a' summed over all ranks (bucket 0 of 1, counted from 0) has inf in 100 of 100 elements, first "
    "at [0]. Each rank's part is finite, but 16 bits do not hold their sum. No optimizer step was taken on any rank. Reduce in "
    "float32 (grad_reduce_in_fp32=True, the default) or make the loss smaller; set nonfinite_gradients='skip_step' to skip "
    "such steps, or 'allow' with a loss scaler such as torch.amp.GradScaler. The "
    "step was dropped on all ranks; its gradients are forgotten, and the next step may run."
)


def steps_of(ranks, *gradients):
    """Train with one gradient per step and a learning rate of 1; what each step raised, and the gradients after it."""

    def program(_, ddp):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        seen = []
        for value in gradients:
            try:
                ddp(a=value).backward()
                seen.append(grads(ddp.module)["a"])
                optimizer.step()
            except NonFiniteGradientError as error:
                seen.append(str(error))
            optimizer.zero_grad()
        return seen, ddp.module.a.unique().tolist()

    return ranks.run(program)


@pytest.mark.parametrize("size", [2, 3])
def test_a_float16_sum_that_overflows_is_an_error_on_all_ranks_and_the_next_step_is_right(size):
    ranks = Ranks(size, Weights("a", dtype=torch.float16), **HALF)

    # 2 * 40000 is more than 65504, the largest float16; 2 * 4 is not.
    assert steps_of(ranks, 40000.0, 4.0) == [([TEXT, 4.0], [-3.0])] * size


@pytest.mark.parametrize("policy", ["error", "skip_step"])
def test_its_buckets_are_sent_once(policy):
    ranks = Ranks(2, Weights("a", dtype=torch.float16), nonfinite_gradients=policy, **HALF)

    steps_of(ranks, 40000.0)

    assert [label for label in ranks.schedule() if label.startswith("bucket")] == ["bucket 0"]


def test_such_a_step_may_be_left_out():
    ranks = Ranks(2, Weights("a", dtype=torch.float16), nonfinite_gradients="skip_step", **HALF)

    assert steps_of(ranks, 40000.0, 4.0) == [([None, 4.0], [-3.0])] * 2
    assert [ddp.last_error for ddp in ranks.ddps] == [None, None]


def test_where_a_loss_scaler_looks_itself_it_finds_the_infinity():
    ranks = Ranks(2, Weights("a", dtype=torch.float16), nonfinite_gradients="allow", **HALF)

    assert [seen for seen, _ in steps_of(ranks, 40000.0)] == [[math.inf]] * 2


def test_a_float16_sum_that_fits_is_no_finding():
    ranks = Ranks(2, Weights("a", dtype=torch.float16), **HALF)

    assert steps_of(ranks, 32736.0) == [([32736.0], [-32736.0])] * 2  # 2 * 32736 = 65472


def test_a_gradient_of_a_single_rank_may_be_as_large_as_its_dtype():
    assert steps_of(Ranks(1, Weights("a", dtype=torch.float16), **HALF), 65504.0) == [([65504.0], [-65504.0])]
    assert steps_of(Ranks(1, Weights("a")), 3e38)[0][0] == [pytest.approx(3e38)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["all_reduce", "sharded"])
def test_a_wide_gradient_that_cannot_be_summed_is_refused_before_it_is_sent(dtype, is_sharded):
    fields = {"use_distributed_optimizer": is_sharded, "grad_reduction": "sum", **HALF}
    ranks = Ranks(2, Weights("a", dtype=dtype), **fields)

    def program(rank, ddp):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-30)
        if is_sharded:
            optimizer = DistributedOptimizer(optimizer, ddp)
        seen = []
        for value in ((1.0, 2.0**127)[rank], 2.0**126):
            try:
                ddp(a=value).backward()
                optimizer.step()
                seen.append("")
            except NonFiniteGradientError as error:
                seen.append(str(error))
            optimizer.zero_grad()
        return seen

    first, second = ranks.run(program)
    assert first == second
    assert first[0].startswith(
        "step 0: the gradient of 'a' on rank 1 (bucket 0 of 1, counted from 0) has values of 1.7e+38, too large to be summed "
        "over the ranks. Reduced, it would reach every rank."
    )
    assert first[1] == ""  # 2 * 2**126 is finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_mean_of_the_largest_finite_gradients_is_finite(dtype, size):
    largest = torch.finfo(dtype).max * (0.74 if size == 3 else 1.0)  # a third is rounded up
    ranks = Ranks(size, Weights("a", dtype=dtype), **HALF)

    by_rank = steps_of(ranks, largest)

    assert [seen for seen, _ in by_rank] == [[pytest.approx(largest, rel=0.01)]] * size


def test_a_sum_that_overflowed_is_forgotten_by_a_later_reduce_scatter():
    ranks = Ranks(2, Weights("a", dtype=torch.float16), use_distributed_optimizer=True, **HALF)

    def program(_, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        ddp(a=40000.0).backward()
        with pytest.raises(NonFiniteGradientError):
            ddp.finish_grad_sync(force_all_reduce=True)
        ddp(a=4.0).backward()
        return optimizer.step().updated, ddp.module.a.unique().tolist()

    assert ranks.run(program) == [(True, [-3.0])] * 2


def test_a_reduce_scattered_sum_that_overflows_is_not_stepped_on():
    ranks = Ranks(2, Weights("a", dtype=torch.float16), use_distributed_optimizer=True, **HALF)

    def program(_, ddp):
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp)
        ddp(a=40000.0).backward()
        result = optimizer.step()
        return result.updated, result.grad_norm, ddp.module.a.unique().tolist()

    assert ranks.run(program) == [(False, math.inf, [1.0])] * 2


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan, 1 / torch.tensor(0.0)])
def test_a_factor_that_is_not_finite_is_refused(factor):
    ranks = Ranks(2, Weights("a"), grad_reduction="sum")

    def program(_, ddp):
        ddp(a=0.0).backward()
        with pytest.raises(ConfigError) as caught:
            ddp.scale_gradients(factor)
        return str(caught.value), grads(ddp.module)

    text = (
        f"scale_gradients() needs a finite factor, got {float(factor)}: every gradient would be nan or inf, and the weights "
        "after it. One over the number of tokens is infinite for a batch without any: leave such a step out on all ranks, with "
        "zero_grad() in place of the optimizer's step."
    )
    assert ranks.run(program) == [(text, {"a": 0.0})] * 2
