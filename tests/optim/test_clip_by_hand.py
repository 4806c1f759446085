"""``DistributedOptimizer.clip_grad_norm_``: the true norm over all ranks, at the place where torch's own function stands."""

import math

import pytest
import torch
from optim_ranks import in_ways, run_wrapped

from megabucket import DistributedOptimizer
from megabucket.errors import ConfigError, ReplicasDivergedError, ScheduleMismatchError, UnreducedGradientsError

MODES = in_ways("all_reduce", "reduce_scatter", "explicit", "no fence")


def run_ranks(size, program, *, dtype=torch.float32, clip_grad=0.0, **switches):
    """Call ``program(rank, ddp, optimizer)`` on each rank; the model is one matrix of 64 x 64 ones."""
    model = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
    torch.nn.init.ones_(model.weight)

    def optimizer_of(ddp):
        return DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp, clip_grad=clip_grad)

    return run_wrapped(size, model, program, optimizer_of, bucket_size=300, **switches)


def backward(ddp, factor):
    """Leave a gradient of ``factor`` in every element: a norm of 64 * factor."""
    (ddp.module.weight * factor).sum().backward()
    if ddp.ddp_config.finish == "explicit":
        ddp.finish_grad_sync()


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_returns_the_norm_before_and_the_step_has_the_norm_after(size, dtype, switches):
    def program(rank, ddp, optimizer):
        backward(ddp, 2.0 * rank)
        norm = optimizer.clip_grad_norm_(0.25)
        result = optimizer.step()
        return norm.item(), result.grad_norm, ddp.module.weight.float().unique().tolist()

    mean = 2.0 * sum(range(size)) / size
    for norm, norm_after, weights in run_ranks(size, program, dtype=dtype, **switches):
        assert norm == 64 * mean
        assert norm_after == pytest.approx(min(0.25, norm), rel=1e-5)
        expected = torch.tensor(1 - min(0.25, norm) / 64).to(dtype).item()
        assert weights == pytest.approx([expected], rel=1e-6)


@MODES
def test_it_is_taken_after_all_microbatches_and_leaves_nothing_to_the_next_step(switches):
    def program(rank, ddp, optimizer):
        seen = []
        for factor in (1.0, 0.5):
            with ddp.no_sync():
                (ddp.module.weight * factor).sum().backward()
            backward(ddp, factor)
            seen.append(optimizer.clip_grad_norm_(64.0).item())
            optimizer.step()
            optimizer.zero_grad()
        backward(ddp, 1.0)
        seen.append(optimizer.step().grad_norm)
        return seen, ddp.module.weight.unique().tolist()

    for seen, weights in run_ranks(2, program, **switches):
        assert seen == [128.0, 64.0, 64.0]
        assert weights == pytest.approx([1 - 1 - 1 - 1], abs=1e-6)


@MODES
def test_an_infinite_threshold_only_asks_and_a_second_call_finds_what_the_first_has_left(switches):
    def program(rank, ddp, optimizer):
        backward(ddp, 1.0)
        norms = [optimizer.clip_grad_norm_(max_norm).item() for max_norm in (math.inf, 32.0, math.inf, 0.0, math.inf)]
        return norms, optimizer.step().updated, ddp.module.weight.unique().tolist()

    for norms, updated, weights in run_ranks(2, program, **switches):
        assert norms == pytest.approx([64.0, 64.0, 32.0, 32.0, 0.0])
        assert updated
        assert weights == [1.0]


@MODES
def test_clip_grad_still_clips_what_is_left(switches):
    def program(rank, ddp, optimizer):
        backward(ddp, 1.0)
        optimizer.clip_grad_norm_(32.0)
        return optimizer.step().grad_norm, ddp.module.weight.unique().tolist()

    for norm, weights in run_ranks(2, program, clip_grad=16.0, **switches):
        assert norm == pytest.approx(32.0)
        assert weights == pytest.approx([1 - 16 / 64])


@MODES
def test_without_a_finite_norm_nothing_is_changed_and_no_rank_updates(switches):
    def program(rank, ddp, optimizer):
        backward(ddp, math.inf if rank == 1 else 1.0)
        norm = optimizer.clip_grad_norm_(1.0).item()
        result = optimizer.step()
        optimizer.zero_grad()
        backward(ddp, 1.0)
        optimizer.clip_grad_norm_(32.0)
        optimizer.step()
        return norm, result.updated, ddp.module.weight.unique().tolist()

    for norm, updated, weights in run_ranks(2, program, nonfinite_gradients="allow", **switches):
        assert norm == math.inf
        assert not updated
        assert weights == pytest.approx([0.5])


@MODES
def test_a_step_that_the_wrapper_skips_is_skipped(switches):
    def program(rank, ddp, optimizer):
        backward(ddp, math.nan if rank == 1 else 1.0)
        norm = optimizer.clip_grad_norm_(1.0).item()
        return math.isfinite(norm), optimizer.step().updated, ddp.module.weight.unique().tolist()

    if switches.get("fence", True):
        assert run_ranks(2, program, nonfinite_gradients="skip_step", **switches) == [(False, False, [1.0])] * 2


@in_ways("all_reduce", "reduce_scatter")
@pytest.mark.parametrize(
    ("arguments_of", "name"),
    [(lambda rank: (1.0 + rank,), "clip_grad_norm_()"), (lambda rank: (1.0, 1.0 + rank), "its norm_type")],
    ids=["threshold", "norm_type"],
)
def test_arguments_that_differ_between_ranks_are_named_on_all(arguments_of, name, switches):
    is_sharded = "use_distributed_optimizer" in switches

    def program(rank, ddp, optimizer):
        kind = ScheduleMismatchError if is_sharded else ReplicasDivergedError  # before the norm over ranks; at the next fence
        with pytest.raises(kind) as caught:  # noqa: PT012 - at either step
            for _ in range(2):
                backward(ddp, 1.0)
                optimizer.clip_grad_norm_(*arguments_of(rank))
                optimizer.step()
                optimizer.zero_grad()
        return str(caught.value)

    first, second = run_ranks(2, program, **switches)
    assert first == second
    if is_sharded:
        calls = [f"clip_grad_norm_({', norm_type='.join(map(str, (*arguments_of(rank), 2.0)[:2]))})" for rank in range(2)]
        assert f"{calls[0]} on rank 0; {calls[1]} on rank 1" in first
    else:
        assert name in first
        assert "1.0 on rank 0; 2.0 on rank 1" in first


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_what_is_no_norm_is_refused(max_norm):
    def program(rank, ddp, optimizer):
        backward(ddp, 1.0)
        with pytest.raises(ConfigError, match="max_norm must be a number >= 0"):
            optimizer.clip_grad_norm_(max_norm)

    run_ranks(1, program)


def test_gradients_that_are_not_reduced_are_not_clipped():
    def program(rank, ddp, optimizer):
        with ddp.no_sync():
            backward(ddp, 1.0)
        with pytest.raises(UnreducedGradientsError):
            optimizer.clip_grad_norm_(1.0)

    run_ranks(2, program, use_distributed_optimizer=True)


def test_all_reduced_gradients_are_clipped_where_the_caller_sees_them():
    def program(rank, ddp, optimizer):
        backward(ddp, 1.0)
        optimizer.clip_grad_norm_(32.0)
        seen = ddp.module.weight.grad.unique().tolist()
        ddp.module.weight.grad.mul_(2)
        optimizer.step()
        return seen, ddp.module.weight.unique().tolist()

    assert run_ranks(2, program) == [(pytest.approx([0.5]), pytest.approx([0.0], abs=1e-6))] * 2
