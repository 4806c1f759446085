"""Wrapped models on every rank of a loopback world: what the tests of this folder start from."""

import copy

import torch

from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.optim import DistributedOptimizer
from megabucket.testing import LoopbackWorld


class Ranks:
    """One wrapped copy of ``model`` per rank. ``run`` plays the ranks in threads, so they may wait for one another.

    ``prepare(rank, module)`` may change a copy before it is wrapped.
    """

    def __init__(self, size, model, *, completion="immediate", prepare=None, **switches):
        self.world = LoopbackWorld(size, completion=completion, timeout_s=30)
        self.modules = [copy.deepcopy(model) for _ in range(size)]
        for rank, module in enumerate(self.modules):
            if prepare is not None:
                prepare(rank, module)
        config = DistributedDataParallelConfig(**switches)

        def wrap(rank):
            return DistributedDataParallel(self.modules[rank], config, communicator=self.world.communicator(rank))

        self.ddps = self.world.run(wrap)
        self.num_launched_by_wrapping = len(self.world.schedule(0))

    def run(self, program):
        """Call ``program(rank, ddp)`` on every rank."""
        return self.world.run(lambda rank: program(rank, self.ddps[rank]))

    def schedule(self, rank=0):
        """What a rank has launched since it was wrapped, by label."""
        return self._labels(rank)[self.num_launched_by_wrapping :]

    def launched_by_wrapping(self, rank=0):
        """What a rank has launched while it was wrapped, by label."""
        return self._labels(rank)[: self.num_launched_by_wrapping]

    def _labels(self, rank):
        return [text.split(" [")[0] for text in self.world.schedule(rank)]


class Weights(torch.nn.Module):
    """Named vectors of 100 elements. The forward of ``uses`` multiplies each named one by a factor and sums up.

    The gradient of a vector is the sum of its factors, in every element: integers, so reductions are exact.
    """

    def __init__(self, names="abcd", dtype=torch.float32):
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(100, dtype=dtype)))

    def forward(self, **factors):
        return sum((getattr(self, name) * factor).sum() for name, factor in factors.items())


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(_, x):
        return x * 1

    @staticmethod
    def backward(*_):
        raise ValueError("boom")


def optimizer_of(ddp):
    """A plain optimizer on all-reduced gradients, a distributed one on shards."""
    sgd = torch.optim.SGD(ddp.parameters(), lr=1.0)
    return DistributedOptimizer(sgd, ddp) if ddp.ddp_config.use_distributed_optimizer else sgd


def grads(module):
    """The gradient of each vector of ``Weights`` by name: its value if all elements agree, None without one."""
    found = {}
    for name, param in module.named_parameters():
        values = set() if param.grad is None else set(param.grad.flatten().tolist())
        assert len(values) <= 1, f"{name}: {sorted(values)[:5]}"
        found[name] = values.pop() if values else None
    return found


def main_grads(module):
    """The same of ``main_grad``."""
    return {name: param.main_grad[0].item() for name, param in module.named_parameters()}
