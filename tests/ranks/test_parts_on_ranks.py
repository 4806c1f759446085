"""The parts of an optimizer beside torch DDP and plain optimizers on gloo: a GAN, and two optimizers on one backward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pool import Rank
from torch.nn.functional import softplus

import megabucket as mb

pytestmark = pytest.mark.dist

STEPS = 4
ATOL = 1e-6


class Gan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
        self.judge = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.GELU(), torch.nn.Linear(6, 1))

    def forward(self, loss: str, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        of_maker = softplus(-self.judge(self.maker(noise))).mean()
        if loss == "of maker":
            return of_maker
        of_judge = softplus(-self.judge(real)).mean() + softplus(self.judge(self.maker(noise).detach())).mean()
        return of_judge if loss == "of judge" else of_maker + of_judge


@dataclass(frozen=True)
class Case:
    """``alternates``: each optimizer steps on a backward of its own, with the other half frozen if ``toggles``."""

    alternates: bool
    toggles: bool
    sharded: bool
    overlaps: bool = False
    muon: bool = False


CASES = [
    Case(alternates, toggles, sharded, overlaps, muon)
    for alternates, toggles, (sharded, overlaps), muon in itertools.product(
        (True, False), (True, False), ((False, False), (True, False), (True, True)), (True, False)
    )
    if alternates or not toggles
]


def optimizers_of(case: Case, model: Gan) -> list[torch.optim.Optimizer]:
    if case.muon and not case.alternates:
        matrices = [param for param in model.parameters() if param.ndim == 2]
        vectors = [param for param in model.parameters() if param.ndim < 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.Adam(vectors, lr=0.01)]
    return [torch.optim.Adam(half.parameters(), lr=0.01, betas=(0.5, 0.9)) for half in (model.maker, model.judge)]


def batch(rank: Rank, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank.index)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def train(case: Case, rank: Rank, ddp: Any, model: Gan, optimizers: Any) -> list[list[torch.Tensor]]:
    found = []
    halves = (model.maker, model.judge)
    for step in range(STEPS):
        if case.alternates:
            for optimizer, other, loss in zip(optimizers, halves[::-1], ("of maker", "of judge"), strict=True):
                other.requires_grad_(not case.toggles)
                for one in optimizers:
                    one.zero_grad()
                ddp(loss, *batch(rank, step)).backward()
                optimizer.step()
                other.requires_grad_(True)
        else:
            ddp("both", *batch(rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if isinstance(ddp, mb.DistributedDataParallel):
            ddp.finish_param_sync()
        found.append([param.detach().clone() for param in model.parameters()])
    return found


def compare(rank: Rank, cases: list[Case]) -> list[float]:
    found = []
    for case in cases:
        theirs, ours = Gan(), Gan()
        reference = torch.nn.parallel.DistributedDataParallel(theirs, process_group=rank.group, find_unused_parameters=True)
        expected = train(case, rank, reference, theirs, optimizers_of(case, theirs))
        config = mb.DistributedDataParallelConfig(
            use_distributed_optimizer=case.sharded,
            overlap_param_gather=case.overlaps,
            unused_parameters="skip",
            bucket_size=40,
        )
        ddp = mb.DistributedDataParallel(ours, config, process_group=rank.group)
        parts = mb.DistributedOptimizer(optimizers_of(case, ours), ddp).parts
        weights = train(case, rank, ddp, ours, parts)
        ddp.detach()
        pairs = zip(itertools.chain(*weights), itertools.chain(*expected), strict=True)
        found.append(max(float((one - other).abs().max()) for one, other in pairs))
    return found


def test_parts_end_with_the_weights_of_torch_ddp_that_finds_unused_parameters(pool):
    for found in pool.run(compare, CASES, ranks=2):
        assert {case: distance for case, distance in zip(CASES, found, strict=True) if distance > ATOL} == {}
