"""State that an optimizer brings along is cut like its parameters, and training goes on where it was."""

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.testing import LoopbackWorld

MODES = pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])


def conv_model():
    """Odd sizes, a channels-last weight, a scalar and an empty parameter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.Flatten(), torch.nn.Linear(20, 3))
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)
    model.scale = torch.nn.Parameter(torch.tensor(1.5))
    model.empty = torch.nn.Parameter(torch.empty(0))
    return model


def loss(model, seed):
    x = torch.randn(2, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    return (model(x) * model.scale).square().sum() + model.empty.sum()


def train(model, optimizer, seeds):
    for seed in seeds:
        loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()


BUILDERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


@MODES
@pytest.mark.parametrize("num_steps_before", [0, 3])
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_training_goes_on_bitwise_as_without_wrapping(build, num_steps_before, sharded):
    plain, wrapped = conv_model(), conv_model()
    plain_optimizer, torch_optimizer = build(plain.parameters()), build(wrapped.parameters())
    for model, optimizer in ((plain, plain_optimizer), (wrapped, torch_optimizer)):
        train(model, optimizer, range(num_steps_before))

    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=40)
    distributed = DistributedOptimizer(torch_optimizer, DistributedDataParallel(wrapped, config))
    train(plain, plain_optimizer, range(10, 13))
    train(wrapped, distributed, range(10, 13))

    for (name, expected), found in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(expected, found), name


@MODES
def test_every_rank_takes_the_pieces_that_belong_to_its_shards(sharded):
    plain = conv_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, plain_optimizer, range(3))
    models = [conv_model() for _ in range(3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3))
    world = LoopbackWorld(3)
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=40)

    def go_on(rank):
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        distributed = DistributedOptimizer(optimizers[rank], ddp)
        train(ddp.module, distributed, range(10, 13))  # the same data everywhere: the mean is what each rank has

    train(plain, plain_optimizer, range(10, 13))
    world.run(go_on)

    for model in models:
        for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
def test_numbers_per_parameter_are_not_mistaken_for_the_state_of_scalars(kind):
    def scalars():
        model = torch.nn.Module()
        model.a, model.b = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.tensor(2.0))
        return model

    plain, wrapped = scalars(), scalars()
    optimizers = [kind(model.parameters(), lr=0.1) for model in (plain, wrapped)]
    for step in range(4):
        if step == 2:
            optimizers[1] = DistributedOptimizer(optimizers[1], DistributedDataParallel(wrapped))
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            (model.a * 3 + model.b**2).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert (wrapped.a.item(), wrapped.b.item()) == (plain.a.item(), plain.b.item())


def test_state_of_a_16_bit_model_becomes_float32():
    model = conv_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()

    distributed = DistributedOptimizer(optimizer, DistributedDataParallel(model))

    moments = [distributed.state[param]["momentum_buffer"] for param in model.parameters()]
    assert all(moment.dtype is torch.float32 for moment in moments)
    assert all(torch.equal(moment, torch.ones_like(param)) for moment, param in zip(moments, model.parameters(), strict=True))


class TestParametersWhoseStatesDiffer:
    """They get shards of their own, in one group or in several, and train on as without wrapping."""

    @staticmethod
    def two_vectors():
        model = torch.nn.Module()
        model.a, model.b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        return model, torch.optim.AdamW([model.a, model.b], lr=0.1)

    @staticmethod
    def step_on(optimizer, *params):
        for param in params:
            param.grad = torch.arange(1.0, 4.0)
        optimizer.step()
        optimizer.zero_grad()

    @MODES
    @pytest.mark.parametrize("both_before", [0, 1], ids=["state for one only", "different step counts"])
    def test_training_goes_on_bitwise_as_without_wrapping(self, both_before, sharded):
        (plain, plain_optimizer), (wrapped, torch_optimizer) = self.two_vectors(), self.two_vectors()
        for model, optimizer in ((plain, plain_optimizer), (wrapped, torch_optimizer)):
            for _ in range(both_before):
                self.step_on(optimizer, model.a, model.b)
            self.step_on(optimizer, model.a)

        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        distributed = DistributedOptimizer(torch_optimizer, DistributedDataParallel(wrapped, config))
        for model, optimizer in ((plain, plain_optimizer), (wrapped, distributed)):
            for _ in range(2):
                (model.a * 2 + model.b * model.b).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        assert torch.equal(plain.a, wrapped.a)
        assert torch.equal(plain.b, wrapped.b)
        by_step = sorted(distributed.state[shard]["step"].item() for shard in distributed.param_groups[0]["params"])
        assert by_step == [both_before + 2, both_before + 3]

    def test_in_groups_of_their_own_they_may_differ(self):
        model, _ = self.two_vectors()
        optimizer = torch.optim.AdamW([{"params": [model.a]}, {"params": [model.b]}])
        model.a.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()

        distributed = DistributedOptimizer(optimizer, DistributedDataParallel(model))

        (with_state,), (without,) = (group["params"] for group in distributed.param_groups)
        assert distributed.state[with_state]["step"] == 1
        assert without not in distributed.state
