"""Against torch's own DistributedDataParallel with the same optimizer: who moves over must get the same training.

With AdamW, as most people train, and with SGD, which unlike AdamW shows the scale of gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cells import assert_none
from odd_model import OddModel, loss_of, tokens_of
from pool import FOUR_AT_NIGHT, TWO_AT_NIGHT, Rank

import megabucket as mb

pytestmark = pytest.mark.dist

STEPS = 5


class Pictures(torch.nn.Module):
    """Channels-last convolutions with running statistics, which are module buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # No bias before the normalization: its exact gradient is 0, and Adam would scale mere rounding errors up.
        self.first = torch.nn.Conv2d(3, 8, 3, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.relu(self.norm(self.first(pictures)))).mean((2, 3))


def pictures_loss(model: torch.nn.Module, step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + microbatch)
    pictures = torch.randn(2, 3, 7, 7, generator=generator).to(memory_format=torch.channels_last)
    return (model(pictures) - torch.randn(2, 4, generator=generator)).square().mean()


def tokens_loss(model: torch.nn.Module, step: int, rank: int, microbatch: int) -> torch.Tensor:
    return loss_of(model, tokens_of(step, rank, microbatch))


@dataclass(frozen=True)
class Case:
    ranks: int
    reduce_scatters: bool
    microbatches: int
    model: str
    optimizer: str

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    @property
    def loss(self) -> Callable[[torch.nn.Module, int, int, int], torch.Tensor]:
        return pictures_loss if self.model == "pictures" else tokens_loss

    def make_model(self) -> torch.nn.Module:
        return Pictures(seed=3) if self.model == "pictures" else OddModel("float32", seed=3)


def train(rank: Rank, case: Case, wrapped: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        for microbatch in range(case.microbatches - 1):
            with wrapped.no_sync():
                case.loss(wrapped, step, rank.index, microbatch).backward()
        case.loss(wrapped, step, rank.index, case.microbatches - 1).backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_differences(rank: Rank, cases: list[Case]) -> list[float]:
    return [largest_difference(rank, case) for case in cases]


def largest_difference(rank: Rank, case: Case) -> float:
    theirs = case.make_model()
    wrapped = torch.nn.parallel.DistributedDataParallel(theirs, process_group=rank.group)
    train(rank, case, wrapped, case.make_optimizer(wrapped))

    ours = case.make_model()
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=case.reduce_scatters, bucket_size=100)
    ddp = mb.DistributedDataParallel(ours, config, process_group=rank.group)
    optimizer = case.make_optimizer(ddp)
    train(rank, case, ddp, mb.DistributedOptimizer(optimizer, ddp) if case.reduce_scatters else optimizer)

    # Torch copies module buffers from rank 0 in every forward; we leave running statistics to each rank.
    states = [model.state_dict() if rank.index == 0 else dict(model.named_parameters()) for model in (ours, theirs)]
    pairs = zip(*(state.values() for state in states), strict=True)
    return float(torch.stack([(a - b).detach().abs().max() for a, b in pairs if a.numel()]).max())


@pytest.mark.parametrize("ranks", [TWO_AT_NIGHT, 3, FOUR_AT_NIGHT])
def test_weights_after_five_steps_equal_those_of_torch_ddp_within_1e_6(pool, ranks):
    cases = [
        Case(ranks, reduce_scatters, microbatches, model, optimizer)
        for reduce_scatters, microbatches, model, optimizer in itertools.product(
            (False, True), (1, 3), ("odd", "pictures"), ("AdamW", "SGD")
        )
    ]

    by_rank = pool.run(largest_differences, cases, ranks=ranks)

    print(f"largest difference: {max(map(max, by_rank)):.1e}")
    assert_none(
        [
            f"{case}, rank {rank}: {difference}"
            for rank, differences in enumerate(by_rank)
            for case, difference in zip(cases, differences, strict=True)
            if not difference <= 1e-6
        ]
    )


def differing_from_torch(rank: Rank, num_microbatches: int, dtype: str) -> list[str]:
    """Return the weights that differ from torch DDP's in any bit, by name. The buckets are alike: one, without padding."""
    case = Case(rank.size, False, num_microbatches, "odd", "SGD")

    def model() -> torch.nn.Module:
        return OddModel(dtype, seed=3)

    theirs, ours = model(), model()
    # Without this torch orders gradients anew after the first step. Its first bucket is in the order of registration.
    wrapped = torch.nn.parallel.DistributedDataParallel(theirs, process_group=rank.group, find_unused_parameters=True)
    train(rank, case, wrapped, case.make_optimizer(wrapped))
    order = [name for name, param in ours.named_parameters() if param.requires_grad]
    config = mb.DistributedDataParallelConfig(
        bucket_size=None, layout="megatron", grad_reduce_in_fp32=False, bucket_order=order
    )
    ddp = mb.DistributedDataParallel(ours, config, process_group=rank.group)
    train(rank, case, ddp, case.make_optimizer(ddp))
    return [name for name, param in ours.named_parameters() if not torch.equal(param, theirs.get_parameter(name))]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_the_same_bucket_the_bits_are_those_of_torch_ddp(pool, ranks, num_microbatches, dtype):
    assert pool.run(differing_from_torch, num_microbatches, dtype, ranks=ranks) == [[]] * ranks
