"""Gradients that are computed outside autograd and assigned to ``param.grad``, as torch's zero-bubble schedules do."""

import copy

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.errors import LateGradientError
from megabucket.testing import LoopbackWorld

NUM_RANKS, NUM_STEPS = 2, 4
MODES = [
    pytest.param({"use_distributed_optimizer": True}, id="reduce-scatter"),
    pytest.param({"finish": "explicit"}, id="all-reduce, explicit"),
    pytest.param({}, id="all-reduce"),
]


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3)).to(dtype)


def loss_of(model, step, microbatch, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(8, 6, generator=generator).to(dtype)).float().square().mean()


def assign(params, grads):
    """Add gradients as ``torch.distributed.pipelining._backward.stage_backward_weight`` does."""
    for param, grad in zip(params, grads, strict=True):
        if param.grad is None:
            param.grad = grad
        else:
            param.grad += grad


def run_microbatch(ddp, loss, *, by_autograd):
    with ddp.no_sync():
        if by_autograd:
            loss.backward()
            return
        params = list(ddp.module.parameters())
        assign(params, torch.autograd.grad(loss, params))
    ddp.sync.take_assigned()


def trained(fields, by_autograd, *, dtype=torch.float32, clear=lambda ddp, _: ddp.zero_grad()):
    """Return the weights of each rank. ``by_autograd`` says it of each microbatch."""
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    models = [make_model(dtype) for _ in range(NUM_RANKS)]

    def program(rank):
        config = DistributedDataParallelConfig(bucket_size=40, **fields)
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if fields.get("use_distributed_optimizer"):
            optimizer = DistributedOptimizer(optimizer, ddp)
        for step in range(NUM_STEPS):
            for microbatch, says in enumerate(by_autograd):
                run_microbatch(ddp, loss_of(ddp, step, microbatch, rank), by_autograd=says)
            ddp.start_grad_sync()
            ddp.finish_grad_sync()
            optimizer.step()
            clear(ddp, optimizer)
        return [param.detach().clone() for param in ddp.module.parameters()]

    return world.run(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_autograd", [(False,), (False, False, False), (True, False, True), (False, True)], ids=str)
@pytest.mark.parametrize("fields", MODES)
def test_training_is_bit_by_bit_that_with_autograd(fields, by_autograd, dtype):
    found = trained(fields, by_autograd, dtype=dtype)
    expected = trained(fields, [True] * len(by_autograd), dtype=dtype)

    for weights, others in zip(found, expected, strict=True):
        assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize(
    "clear",
    [
        pytest.param(lambda _, optimizer: optimizer.zero_grad(), id="by torch"),
        pytest.param(lambda _, optimizer: optimizer.zero_grad(set_to_none=False), id="to zeros by torch"),
        pytest.param(lambda *_: None, id="not at all"),
    ],
)
@pytest.mark.parametrize("by_autograd", [(False,), (False, True)], ids=str)
def test_gradients_that_are_cleared_by_torch_or_kept_count_as_in_torch(clear, by_autograd):
    found = trained({}, by_autograd, clear=clear)

    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        for microbatch in range(len(by_autograd)):
            (sum(loss_of(plain, step, microbatch, rank) for rank in range(NUM_RANKS)) / NUM_RANKS).backward()
        optimizer.step()
        clear(None, optimizer)
    for weights in found:
        for value, reference in zip(weights, plain.parameters(), strict=True):
            assert torch.allclose(value, reference, atol=1e-5)


def test_a_gradient_after_the_launch_is_named_on_all_ranks():
    world = LoopbackWorld(NUM_RANKS, timeout_s=20)
    models = [copy.deepcopy(make_model()) for _ in range(NUM_RANKS)]

    def program(rank):
        config = DistributedDataParallelConfig(finish="explicit", bucket_size=40)
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        run_microbatch(ddp, loss_of(ddp, 0, 0, rank), by_autograd=False)
        ddp.start_grad_sync()
        if rank == 1:
            ddp.module[0].bias.grad = torch.ones(10)
            ddp.sync.take_assigned()
        else:
            ddp.sync.counters.num_microbatches += 1  # as many as on rank 1
        with pytest.raises(LateGradientError, match=r"0\.bias") as caught:
            ddp.finish_grad_sync()
        return str(caught.value)

    assert len(set(world.run(program))) == 1
