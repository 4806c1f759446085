"""A mixture of experts that exchanges tokens, on four gloo ranks: saved with experts over two, resumed over four and one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_ranks import Moe, groups_of, loss_of, own_experts, tokens_of
from pool import Rank, WorkerPool

import megabucket as mb

pytestmark = pytest.mark.dist

STEPS = 4  # of each stretch
RATE = 3e-3


def train(rank: Rank, root: str, expert_parallel: int, sharded: bool, first: int, last: int) -> dict[str, torch.Tensor]:
    """Go on from the checkpoint of step ``first``, save at ``last``, and return the weights of this rank."""
    exchanging, same = groups_of(rank.index, expert_parallel)
    torch.manual_seed(first)
    model = Moe(own_experts(rank.index, expert_parallel), exchanging)
    config = mb.DistributedDataParallelConfig(bucket_size=400, use_distributed_optimizer=sharded)
    ddp = mb.DistributedDataParallel(model, config, groups=mb.ParallelGroups({"dense": rank.group, "expert": same}))
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=RATE), ddp, clip_grad=0.5)
    if first:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(torch.nan)
        assert mb.load_checkpoint(root, ddp, optimizer).step == first
    for step in range(first, last):
        loss_of(ddp, tokens_of(rank.index, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with mb.Checkpointer(root, ddp, optimizer, asynchronous=True, keep_last=None) as checkpointer:
        checkpointer.save(last)
    ddp.check_replicas()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    ddp.detach()
    return weights


def test_experts_are_spread_anew_and_train_on_as_if_they_had_not_been(pool: WorkerPool, tmp_path: Any) -> None:
    never_interrupted = pool.run(train, str(tmp_path / "never"), 2, True, 0, 3 * STEPS, ranks=4)
    expected = {name: value for weights in never_interrupted for name, value in weights.items()}

    results = [
        pool.run(train, str(tmp_path / "run"), expert_parallel, sharded, index * STEPS, (index + 1) * STEPS, ranks=4)
        for index, (expert_parallel, sharded) in enumerate([(2, True), (4, False), (1, True)])
    ]

    initial = dict(Moe().named_parameters())
    assert results[-1][0].keys() == expected.keys()
    for name, value in results[-1][0].items():
        moved = (expected[name] - initial[name]).abs().max()
        assert (value - expected[name]).abs().max() <= 1e-4 * moved, name


def test_the_same_ranks_resume_bit_by_bit(pool: WorkerPool, tmp_path: Any) -> None:
    never_interrupted = pool.run(train, str(tmp_path / "never"), 2, True, 0, 2 * STEPS, ranks=4)

    pool.run(train, str(tmp_path / "run"), 2, True, 0, STEPS, ranks=4)
    resumed = pool.run(train, str(tmp_path / "run"), 2, True, STEPS, 2 * STEPS, ranks=4)

    for expected, found in zip(never_interrupted, resumed, strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)
