"""All parameters of a wrapper are frozen for a loss of another one, as those of a discriminator are for the generator's."""

import copy

import pytest
import torch
from torch.nn.functional import softplus

from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import TrainabilityChangedError
from megabucket.optim import DistributedOptimizer
from megabucket.testing import LoopbackWorld

NUM_STEPS, NUM_RANKS, SAMPLES = 4, 2, 6
# Where the discriminator becomes trainable again, and where its gradients are cleared.
HABITS = ("before the generator steps", "after the generator has stepped", "cleared before its own loss")


def halves():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)


def adam(params):
    return torch.optim.Adam(params, lr=1e-2)


def samples(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 8, generator=generator)


def train(parts, optimizers, rank, size, habit):
    """Train on this rank's part of the samples."""
    (maker, judge), (of_maker, of_judge) = parts, optimizers
    for step in range(NUM_STEPS):
        noise, real = (tensor.chunk(size)[rank] for tensor in samples(step))
        judge.requires_grad_(False)
        softplus(-judge(maker(noise))).mean().backward()
        if habit != HABITS[1]:
            judge.requires_grad_(True)
        of_maker.step()
        of_maker.zero_grad()
        judge.requires_grad_(True)
        if habit == HABITS[2]:
            of_judge.zero_grad()
        (softplus(-judge(real)).mean() + softplus(judge(maker(noise).detach())).mean()).backward()
        of_judge.step()
        of_judge.zero_grad()
    return [value.clone() for part in parts for value in part.state_dict().values()]


def take_step(model, optimizer, inputs):
    model(inputs).sum().backward()
    optimizer.step()


class Wrapped:
    """The two halves on every rank, each in a wrapper and with an optimizer of its own."""

    def __init__(self, **switches):
        self.world, self.config = LoopbackWorld(NUM_RANKS, timeout_s=30), DistributedDataParallelConfig(**switches)
        self.originals = halves()

    def run(self, program):
        return self.world.run(lambda rank: program(rank, *self._made(rank)))

    def _made(self, rank):
        communicator = self.world.communicator(rank)
        parts = copy.deepcopy(self.originals)
        parts = [DistributedDataParallel(part, self.config, communicator=communicator) for part in parts]
        optimizers = [adam(part.parameters()) for part in parts]
        if self.config.use_distributed_optimizer:
            optimizers = [DistributedOptimizer(one, part) for one, part in zip(optimizers, parts, strict=True)]
        return parts, optimizers


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("unused", ["error", "zero", "skip"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_discriminator_that_is_trainable_when_its_optimizer_steps_has_not_changed(sharded, unused, habit):
    parts = halves()
    expected = train(parts, [adam(part.parameters()) for part in parts], 0, 1, habit)

    wrapped = Wrapped(use_distributed_optimizer=sharded, unused_parameters=unused)
    for found in wrapped.run(lambda rank, *made: train(*made, rank, NUM_RANKS, habit)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks_that_freeze", [(0, 1), (1,)])
@pytest.mark.parametrize("sharded", [False, True])
def test_one_that_is_frozen_when_its_optimizer_steps_is_an_error_on_all_ranks(sharded, ranks_that_freeze):
    def play(rank, parts, optimizers):
        (_, judge), (_, optimizer) = parts, optimizers
        inputs = torch.ones(2, 8, requires_grad=True)
        for _ in range(2):  # with reduced gradients of the step before, and without
            judge.requires_grad_(rank not in ranks_that_freeze)
            with pytest.raises(TrainabilityChangedError, match="check_model_changes=False") as caught:
                take_step(judge, optimizer, inputs)
            judge.requires_grad_(True)
            optimizer.zero_grad()
            take_step(judge, optimizer, inputs)
        return str(caught.value), [value.tolist() for value in judge.state_dict().values()]

    first, second = Wrapped(use_distributed_optimizer=sharded).run(play)

    assert first == second
    assert f"rank {ranks_that_freeze[0]} has frozen 'weight', 'bias'" in first[0]
