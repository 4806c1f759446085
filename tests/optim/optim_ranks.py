"""Models that several tests of this folder train, and ranks to train them on."""

import copy

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig
from megabucket.testing import LoopbackWorld

WAYS = {
    "all_reduce": {},
    "all_reduce, explicit": {"finish": "explicit"},
    "reduce_scatter": {"use_distributed_optimizer": True},
    "overlap": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "explicit": {"use_distributed_optimizer": True, "finish": "explicit"},
    "no fence": {"use_distributed_optimizer": True, "fence": False},
}


def in_ways(*names):
    """A test for each of some ways to reduce and to gather."""
    return pytest.mark.parametrize("switches", [WAYS[name] for name in names], ids=names)


def run_wrapped(size, model, program, optimizer_of, **switches):
    """Wrap a copy of ``model`` on each rank of a loopback world; call ``program(rank, ddp, optimizer_of(ddp))`` there."""
    world, models = LoopbackWorld(size, timeout_s=30), [copy.deepcopy(model) for _ in range(size)]
    config = DistributedDataParallelConfig(**switches)

    def play(rank):
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        return program(rank, ddp, optimizer_of(ddp))

    return world.run(play)


class Net(torch.nn.Module):
    """Two layers that are the same everywhere."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        for value, param in enumerate(self.parameters()):
            torch.nn.init.constant_(param, 0.1 * (value + 1))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def odd_model():
    """Layers whose gradients depend on everything; a tied weight, a frozen layer, a scalar and an empty parameter."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(7, 5)
    model.body = torch.nn.Linear(5, 5)
    model.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
    model.scale = torch.nn.Parameter(torch.tensor(1.5))
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    model.head = torch.nn.Linear(5, 7, bias=False)
    model.head.weight = model.embed.weight
    return model


def odd_loss(model, seed):
    tokens = torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(seed))
    hidden = model.frozen(torch.tanh(model.body(model.embed(tokens)))) * model.scale
    return torch.nn.functional.cross_entropy(model.head(hidden), tokens) + model.empty.sum()
