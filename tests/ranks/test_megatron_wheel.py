"""Experts as Megatron trains them: layouts, norms and weights equal the megatron-core wheel's to the bit, on four ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_ranks import NUM_RANKS, Moe, groups_of, loss_of, own_experts, tokens_of
from pool import Rank

import megabucket as mb
from megabucket.ddp.groups import ParallelGroups
from megabucket.layout import BufferKey
from megabucket.testing import assert_sound, read_megatron_layout

pytestmark = [pytest.mark.dist, pytest.mark.nightly]  # Megatron takes its time to import, on each rank

STEPS = 8
LEARNING_RATE = 3e-3
BUCKET_NUMEL = 400
CLIP = 0.1

Places = dict[tuple[BufferKey, int, int], dict[str, tuple[int, ...]]]
Outcome = tuple[list[float], dict[str, torch.Tensor], Places]


def thresholds() -> list[float]:
    """Return what to clip at: in every other step less than half of the norm."""
    return [CLIP if step % 2 else 0.0 for step in range(STEPS)]


def model_of(rank: Rank, expert_parallel: int, dtype: torch.dtype) -> tuple[torch.nn.Module, list[dist.ProcessGroup]]:
    exchanging, same = groups_of(rank.index, expert_parallel)
    return Moe(own_experts(rank.index, expert_parallel), exchanging).to(dtype), [exchanging, same]


def backward(ddp: Any, rank: Rank, step: int, num_microbatches: int) -> None:
    for number in range(num_microbatches - 1):
        with ddp.no_sync():
            loss_of(ddp, tokens_of(rank.index, 100 * number + step)).backward()
    loss_of(ddp, tokens_of(rank.index, step)).backward()


def train_ours(rank: Rank, expert_parallel: int, dtype: torch.dtype, num_microbatches: int, fields: dict[str, Any]) -> Outcome:
    model, groups = model_of(rank, expert_parallel, dtype)
    config = mb.DistributedDataParallelConfig(bucket_size=BUCKET_NUMEL, layout="megatron", unused_parameters="zero", **fields)
    ddp = mb.DistributedDataParallel(model, config, groups=ParallelGroups({"dense": rank.group, "expert": groups[1]}))
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE), ddp)
    norms = []
    for step, threshold in enumerate(thresholds()):
        backward(ddp, rank, step, num_microbatches)
        optimizer.clip_grad = threshold
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    layout = ddp.layout
    ddp.detach()
    return norms, {name: param.detach().clone() for name, param in model.named_parameters()}, places_in(layout)


def places_in(layout: mb.ModelLayout) -> Places:
    return {
        (buffer.key, bucket.start, bucket.stop): {name: buffer.params[name][:3] for name in bucket.params}
        for buffer in layout.buffers
        for bucket in buffer.buckets
    }


def train_megatron(
    rank: Rank, expert_parallel: int, dtype: torch.dtype, num_microbatches: int, fields: dict[str, Any]
) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, and those about what it calls
        return train_with_megatron(rank, expert_parallel, dtype, num_microbatches, fields)


def train_with_megatron(
    rank: Rank, expert_parallel: int, dtype: torch.dtype, num_microbatches: int, fields: dict[str, Any]
) -> Outcome:
    from megatron_side import MegatronSide  # takes seconds

    model, _ = model_of(rank, expert_parallel, dtype)
    names = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True, **fields}
    side = MegatronSide(
        model,
        expert_parallel=expert_parallel,
        learning_rate=LEARNING_RATE,
        is_sharded=names.pop("use_distributed_optimizer", False),
        bucket_size=BUCKET_NUMEL,
        **names,
    )
    norms = []
    for step, threshold in enumerate(thresholds()):
        backward(side.ddp, rank, step, num_microbatches)
        norms.append(side.step(threshold))
    if names.get("overlap_param_gather"):
        side.ddp.start_param_sync(force_sync=True)
    layout = read_megatron_layout(side.ddp)
    assert_sound(layout)
    places = places_in(layout)
    side.close()
    return norms, {name: param.detach().clone() for name, param in model.named_parameters()}, places


SHARDED = {"use_distributed_optimizer": True}
BLOCKING = {"overlap_grad_reduce": False}


@pytest.mark.parametrize(
    ("expert_parallel", "dtype", "num_microbatches", "fields"),
    [
        (2, torch.float32, 1, {}),
        (2, torch.float32, 2, SHARDED),
        (2, torch.float32, 1, SHARDED | BLOCKING),
        (2, torch.bfloat16, 1, SHARDED),
        (4, torch.float32, 1, SHARDED | {"overlap_param_gather": True}),
        (4, torch.float32, 2, BLOCKING),
        (4, torch.bfloat16, 1, {}),
    ],
    ids=str,
)
def test_experts_end_with_the_bits_of_megatron(pool, expert_parallel, dtype, num_microbatches, fields):
    arguments = (expert_parallel, dtype, num_microbatches, fields)

    ours = pool.run(train_ours, *arguments, ranks=NUM_RANKS)
    theirs = pool.run(train_megatron, *arguments, ranks=NUM_RANKS)

    for (norms, weights, places), (their_norms, their_weights, their_places) in zip(ours, theirs, strict=True):
        assert places == their_places
        assert norms == their_norms
        assert min(norms) > 2 * CLIP
        assert weights.keys() == their_weights.keys()
        assert [name for name in weights if not torch.equal(weights[name], their_weights[name])] == []
