"""Other norms than the L2 norm, a threshold above which a step is skipped, and zeros that are counted."""

import math

import pytest
import torch
from optim_ranks import WAYS, in_ways, run_wrapped

from megabucket import DistributedDataParallel, DistributedOptimizer
from megabucket.errors import ConfigError, LayoutMismatchError
from megabucket.testing import LoopbackWorld

MODES = in_ways("all_reduce", "reduce_scatter", "overlap")
NORM_TYPES = [1.0, 3.0, math.inf]


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7)).to(dtype)


def loss_of(model, step, rank, dtype):
    inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64).to(dtype)
    return (model(inputs) * (1 + step)).square().mean()


def run_ranks(size, program, *, dtype=torch.float32, switches, **fields):
    """Call ``program(rank, ddp, optimizer)`` on each rank."""

    def optimizer_of(ddp):
        return DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, **fields)

    return run_wrapped(size, net(dtype), program, optimizer_of, bucket_size=300, **switches)


def weights_of(ddp):
    ddp.finish_param_sync()
    return torch.cat([param.detach().flatten() for param in ddp.module.parameters()])


@pytest.mark.pairs
@MODES
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("is_by_hand", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_clipping_by_another_norm_is_that_of_plain_torch(size, is_by_hand, norm_type, switches):
    clip, num_steps, dtype = {1.0: 5.0, 3.0: 0.3, math.inf: 0.05}[norm_type], 4, torch.float64

    def program(rank, ddp, optimizer):
        norms = []
        for step in range(num_steps):
            loss_of(ddp, step, rank, dtype).backward()
            norms += [float(optimizer.clip_grad_norm_(clip, norm_type))] if is_by_hand else []
            result = optimizer.step()
            norms += [] if is_by_hand else [result.grad_norm]
            optimizer.zero_grad()
        return norms, weights_of(ddp)

    fields = {} if is_by_hand else {"clip_grad": clip, "norm_type": norm_type}
    found = run_ranks(size, program, dtype=dtype, switches=switches, **fields)

    model, expected = net(dtype), []
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        sum(loss_of(model, step, rank, dtype) / size for rank in range(size)).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type)))
        plain.step()
        plain.zero_grad()
    assert sum(norm > clip for norm in expected) >= 2  # clipping bites
    for norms, weights in found:
        assert norms == pytest.approx(expected, rel=1e-7)
        torch.testing.assert_close(
            weights, torch.cat([param.detach().flatten() for param in model.parameters()]), rtol=1e-6, atol=1e-9
        )


@MODES
@pytest.mark.parametrize("norm_type", [2.0, *NORM_TYPES])
def test_a_nan_on_one_rank_updates_nobody_whatever_the_norm(norm_type, switches):
    def program(rank, ddp, optimizer):
        before, results = weights_of(ddp), []
        for factor in (math.nan if rank == 1 else 1.0, 1.0):
            (loss_of(ddp, 0, rank, torch.float32) * factor).backward()
            results.append(optimizer.step())
            optimizer.zero_grad()
            results[-1] = results[-1], torch.equal(weights_of(ddp), before)
        return results

    switches = {**switches, "nonfinite_gradients": "allow"}
    for (skipped, is_same), (stepped, is_still_same) in run_ranks(3, program, switches=switches, norm_type=norm_type):
        assert (skipped.updated, is_same) == (False, True)
        assert not math.isfinite(skipped.grad_norm)
        assert "not finite" in skipped.reason
        assert (stepped.updated, is_still_same) == (True, False)


@MODES
def test_a_norm_above_the_threshold_skips_the_step_on_all_ranks_and_the_next_one_is_right(switches):
    def train(rank, ddp, optimizer, steps):
        results = []
        for step in steps:
            loss_of(ddp, step, rank, torch.float32).backward()
            results.append(optimizer.step())
            optimizer.zero_grad()
        return results, weights_of(ddp)

    def norms_of(steps, **fields):
        found = run_ranks(2, lambda *args: train(*args, steps), switches=switches, **fields)
        assert found[0][0] == found[1][0] or not all(result.updated for result in found[0][0])
        return found[0]

    (small, large, _), _ = norms_of([0, 4, 1])
    limit = (small.grad_norm + large.grad_norm) / 2
    (first, skipped, last), weights = norms_of([0, 4, 1], grad_norm_skip_threshold=limit, returns_grad_norm=False)
    _, expected = norms_of([0, 1])

    assert small.grad_norm < limit < large.grad_norm
    assert (first.updated, skipped.updated, last.updated) == (True, False, True)
    assert skipped.grad_norm == large.grad_norm
    assert skipped.reason == f"the gradient norm {large.grad_norm:g} is above grad_norm_skip_threshold={limit:g}"
    assert torch.equal(weights, expected)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_zero_counts_once_and_padding_does_not(size, dtype, switches):
    """Sizes are no multiples of 64, so there are gaps between parameters, which hold zeros."""

    def program(rank, ddp, optimizer):
        found = []
        for num_used in (40, 13):  # of 40 columns of the first weight; the second step has other zeros
            ddp.zero_grad()
            first, second = ddp.module
            (first.weight[:, :num_used].sum() + first.bias.sum() * 0 + second.weight.sum() + second.bias[:3].sum()).backward()
            found.append(optimizer.step().num_zeros)
        return found

    found = run_ranks(size, program, dtype=dtype, switches=switches, returns_num_zeros=True, returns_grad_norm=False)

    # The first bias has 30 zeros, the second 7 - 3; then 30 rows of the weight have 40 - 13 each.
    assert found == [[34, 34 + 30 * 27]] * size


@MODES
def test_a_result_has_no_zeros_that_nobody_has_asked_for(switches):
    def program(rank, ddp, optimizer):
        loss_of(ddp, 0, rank, torch.float32).backward()
        return optimizer.step().num_zeros

    assert run_ranks(2, program, switches=switches) == [None] * 2


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("norm_type", (1.0, 3.0)),
        ("grad_norm_skip_threshold", (1.0, 2.0)),
        ("returns_num_zeros", (True, False)),
        ("returns_grad_norm", (True, False)),
    ],
)
def test_ranks_that_differ_are_told(field, values):
    world, models = LoopbackWorld(2), [net() for _ in range(2)]

    def play(rank):
        ddp = DistributedDataParallel(models[rank], communicator=world.communicator(rank))
        with pytest.raises(LayoutMismatchError, match=field):
            DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, **{field: values[rank]})

    world.run(play)


WRONG = [{"norm_type": 0.5}, {"norm_type": math.nan}, {"grad_norm_skip_threshold": 0.0}, {"grad_norm_skip_threshold": True}]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_what_is_no_norm_and_no_threshold_is_refused(fields):
    ddp = DistributedDataParallel(net(), communicator=LoopbackWorld(1).communicator(0))

    with pytest.raises(ConfigError, match=f"{next(iter(fields))} must be a number"):
        DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, **fields)


def test_a_rebuild_keeps_all_of_it():
    def program(rank, ddp, optimizer):
        ddp.rebuild()
        loss_of(ddp, 0, rank, torch.float32).backward()
        result = optimizer.step()
        return result.grad_norm, result.num_zeros

    fields = {"norm_type": math.inf, "returns_num_zeros": True}
    (largest, zeros), _ = run_ranks(2, program, switches=WAYS["reduce_scatter"], **fields)

    model = net()
    sum(loss_of(model, 0, rank, torch.float32) / 2 for rank in range(2)).backward()
    assert largest == pytest.approx(max(float(param.grad.abs().max()) for param in model.parameters()))
    assert zeros == 0
