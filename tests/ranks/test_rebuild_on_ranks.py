"""``ddp.rebuild()`` on gloo: the module changes, and training goes on as plain torch does in one process.

Gradients are integers and independent of the weights, so their sums are exact and the weights must agree bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Rank

import megabucket as mb

pytestmark = pytest.mark.dist

NUMELS = {"a": 100, "b": 300, "c": 7, "d": 1}


class Vectors(torch.nn.Module):
    """Named vectors; the gradient of each trainable one is the factor it is multiplied by."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in NUMELS:
            self.register_parameter(name, new_param(name, 0, dtype))

    def forward(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        trained = ((name, param) for name, param in self.named_parameters() if param.requires_grad)
        total = torch.zeros(())
        for name, param in trained:
            total = total + (param.float() * factors[name]).sum()
        return total


def new_param(name: str, seed: int, dtype: torch.dtype) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(100 * seed + ord(name))
    return torch.nn.Parameter(torch.randn(NUMELS[name], generator=generator).to(dtype))


def factors_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: 12.0 * torch.randint(-5, 6, (numel,), generator=generator) for name, numel in NUMELS.items()}


AddParam = Callable[[torch.nn.Parameter], None]


def change(model: torch.nn.Module, phase: int, add: AddParam, dtype: torch.dtype) -> None:
    """Change a module before one of the four stretches of training; ``add`` gives a parameter to the optimizer."""
    if phase == 1:
        model.b.requires_grad_(False)
    elif phase == 2:
        model.c = new_param("c", 1, dtype)
        add(model.c)
    elif phase == 3:
        model.b.requires_grad_(True)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def train(rank: Rank, driver: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Return the weights after each stretch of training."""
    model, seen = Vectors(dtype), []
    sharded = driver == "reduce-scatter"
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_param_gather=sharded, bucket_size=128)
    ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if driver != "all-reduce and plain AdamW":
        optimizer = mb.DistributedOptimizer(optimizer, ddp)
    for phase in range(4):
        change(model, phase, lambda param: optimizer.add_param_group({"params": [param]}), dtype)
        ddp.rebuild()
        for step in (2 * phase, 2 * phase + 1):
            ddp(factors_of(step, rank.index)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        ddp.check_replicas()
        seen.append(weights(model))
    ddp.detach()
    return seen


def train_alone(size: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """The same with plain torch on float32 copies, rounded to ``dtype`` after each step."""
    model, seen = Vectors(dtype).float(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for phase in range(4):
        change(model, phase, lambda param: optimizer.add_param_group({"params": [param]}), torch.float32)
        if phase == 2:  # the replacement begins as what the 16-bit model holds
            model.c.data = new_param("c", 1, dtype).detach().float()
        for step in (2 * phase, 2 * phase + 1):
            for name, param in model.named_parameters():
                mean = sum(factors_of(step, rank)[name] for rank in range(size)) / size
                param.grad = mean if param.requires_grad else None
            optimizer.step()
        seen.append([value.to(dtype) for value in weights(model)])
    return seen


DRIVERS = ["reduce-scatter", "all-reduce", "all-reduce and plain AdamW"]


@pytest.mark.parametrize(("ranks", "driver"), [*itertools.product([2], DRIVERS), (3, "reduce-scatter")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_freezing_replacing_and_unfreezing_is_plain_torch_bit_by_bit(pool, ranks, driver, dtype):
    if dtype is torch.bfloat16 and driver == "all-reduce and plain AdamW":
        pytest.skip("plain AdamW cannot mix bfloat16 parameters with float32 gradients")

    for by_phase in pool.run(train, driver, dtype, ranks=ranks):
        for phase, (found, expected) in enumerate(zip(by_phase, train_alone(ranks, dtype), strict=True)):
            for name, one, other in zip(NUMELS, found, expected, strict=True):
                assert torch.equal(one, other), f"{name} after phase {phase}"
