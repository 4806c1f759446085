"""``returns_grad_norm=False``: no norm where nothing but the result needs it, and otherwise the same step."""

import copy
import math
from contextlib import suppress

import pytest
import torch
from optim_ranks import in_ways

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import NonFiniteGradientError
from megabucket.optim import kernels, norm
from megabucket.testing import LoopbackWorld

SIZE = 3
MODES = in_ways("all_reduce", "reduce_scatter", "overlap")


def run_ranks(program, dtype=torch.float32, **switches):
    """Call ``program(rank, ddp)`` on each rank; returns the labels of rank 0's collectives and the results."""
    torch.manual_seed(0)
    world, model = LoopbackWorld(SIZE), torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 8)).to(dtype)
    models = [copy.deepcopy(model) for _ in range(SIZE)]
    config = DistributedDataParallelConfig(bucket_size=1, init_sync=False, **switches)
    results = world.run(
        lambda rank: program(rank, DistributedDataParallel(models[rank], config, communicator=world.communicator(rank)))
    )
    return [text.split(" [")[0] for text in world.schedule(0)], results


def backward(ddp, rank, step=0, factor=1.0):
    inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
    (ddp(inputs) * factor).square().mean().backward()


def values(ddp):
    ddp.finish_param_sync()
    return torch.cat([param.detach().flatten() for param in ddp.parameters()])


def adamw(ddp, **fields):
    return DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp, **fields)


def train(optimizer_fields):
    def play(rank, ddp):
        optimizer = adamw(ddp, **optimizer_fields)
        norms = []
        for step in range(3):
            backward(ddp, rank, step)
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        return norms, values(ddp)

    return play


def count_norms(monkeypatch):
    taken = []
    counting = kernels.TORCH._replace(l2_norm=lambda grad: taken.append(grad) or norm.l2_norm(grad))
    monkeypatch.setattr(kernels, "TORCH", counting)
    return taken


@MODES
def test_weights_are_the_same_bits_without_a_norm_and_no_pass_is_spent_on_it(switches, monkeypatch):
    _, expected = run_ranks(train({}), **switches)
    taken = count_norms(monkeypatch)

    labels, found = run_ranks(train({"returns_grad_norm": False}), **switches)

    for (norms, weights), (other_norms, other_weights) in zip(expected, found, strict=True):
        assert all(math.isfinite(norm) and norm > 0 for norm in norms)
        assert all(math.isnan(norm) for norm in other_norms)
        assert torch.equal(weights, other_weights)
    assert not taken
    assert "grad norm" not in labels


NEEDS = {
    "clipping": ({"clip_grad": 0.01}, {}),
    "nan allowed": ({}, {"nonfinite_gradients": "allow"}),
    "no fence": ({}, {"fence": False}),
}


@MODES
@pytest.mark.parametrize(("fields", "needs"), NEEDS.values(), ids=NEEDS)
def test_the_norm_is_there_where_something_needs_it(fields, needs, switches):
    _, expected = run_ranks(train(fields), **needs, **switches)
    _, found = run_ranks(train({**fields, "returns_grad_norm": False}), **needs, **switches)

    for (norms, weights), (other_norms, other_weights) in zip(expected, found, strict=True):
        assert other_norms == norms
        assert torch.equal(weights, other_weights)


@MODES
def test_a_limit_that_is_set_later_counts_from_then_on(switches):
    def play(rank, ddp):
        optimizer = adamw(ddp, returns_grad_norm=False)
        norms = []
        for step, optimizer.clip_grad in enumerate((0.0, 0.5, 0.0)):
            backward(ddp, rank, step)
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        return [math.isnan(norm) for norm in norms]

    assert run_ranks(play, **switches)[1] == [[True, False, True]] * SIZE


@MODES
def test_float16_sums_that_overflow_update_nobody(switches):
    """After an all-reduce the sums are looked through; after a reduce-scatter the norm is what finds them."""

    def play(rank, ddp):
        optimizer = adamw(ddp, returns_grad_norm=False)
        before = values(ddp)
        updated = False
        with suppress(NonFiniteGradientError):
            sum((param.float() * 40_000.0).sum() for param in ddp.parameters()).backward()  # three are beyond float16
            updated = optimizer.step().updated
        return updated, torch.equal(values(ddp), before)

    fields = {"grad_reduce_in_fp32": False, "grad_reduction": "sum"}
    assert run_ranks(play, torch.float16, **fields, **switches)[1] == [(False, True)] * SIZE


@MODES
def test_gradients_that_are_not_finite_are_found_by_the_gradient_sync(switches):
    def play(rank, ddp):
        optimizer = adamw(ddp, returns_grad_norm=False)
        before = values(ddp)

        def step():
            backward(ddp, rank, factor=math.inf if rank == 1 else 1.0)  # with all-reduce it raises at the end
            optimizer.step()

        with pytest.raises(NonFiniteGradientError, match="rank 1"):
            step()
        return torch.equal(values(ddp), before)

    assert run_ranks(play, **switches)[1] == [True] * SIZE


def test_a_rebuild_keeps_it():
    def play(rank, ddp):
        optimizer = adamw(ddp, returns_grad_norm=False)
        ddp.rebuild()
        backward(ddp, rank)
        return math.isnan(optimizer.step().grad_norm)

    assert run_ranks(play, use_distributed_optimizer=True)[1] == [True] * SIZE
