"""Twenty steps of twelve torch optimizers against torch DDP with the same optimizer, bit by bit.

Two ranks: sums over more depend on their order. Fused kernels are in ``test_optimizers_on_ranks.py``.
"""

from __future__ import annotations

import pytest
import torch
from cells import assert_none
from odd_model import OddModel, flat, loss_of, tokens_of, trainable
from pool import Rank
from test_optimizers_on_ranks import OPTIMIZERS

import megabucket as mb

pytestmark = pytest.mark.dist

STEPS = 20
NAMES = [name for name in OPTIMIZERS if "," not in name or name == "SGD, momentum"]
WAYS = {
    "torch": None,
    "all_reduce": {},
    "reduce_scatter": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}


def train(rank: Rank, name: str, switches: dict[str, bool] | None) -> torch.Tensor:
    """Return the weights after all steps: 1D."""
    model = OddModel("float32", seed=0)
    make = OPTIMIZERS[name]
    if switches is None:
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=rank.group)
        optimizer = make(ddp.parameters())
    else:
        config = mb.DistributedDataParallelConfig(bucket_size=200, **switches)
        ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
        optimizer = mb.DistributedOptimizer(make(ddp.parameters()), ddp)
    for step in range(STEPS):
        loss_of(ddp, tokens_of(step, rank.index, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if switches is not None:
        ddp.finish_param_sync()
    return flat(trainable(model)).clone()


def train_all(rank: Rank) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {way: train(rank, name, switches) for way, switches in WAYS.items()} for name in NAMES}


def test_weights_after_twenty_steps_are_those_of_torch_ddp(pool):
    before = flat(trainable(OddModel("float32", seed=0)))
    failures = []
    for rank, of_rank in enumerate(pool.run(train_all, ranks=2)):
        for name, by_way in of_rank.items():
            expected = by_way["torch"]
            moved = float((expected - before).abs().max())
            for way, weights in by_way.items():
                off = float((weights - expected).abs().max())
                if not (off == 0 and moved > 1e-3):
                    failures.append(f"{name}, {way}, rank {rank}: off by {off:.2g}, moved by {moved:.2g}")
    assert len(NAMES) == 12
    assert_none(failures)
