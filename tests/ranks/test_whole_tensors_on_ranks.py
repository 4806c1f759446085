"""Optimizers that update whole tensors, several on one wrapper, over gloo: as plain torch in one process, bit by bit.

Gradients are exact, so the sums of any back-end agree. The norms are those of the ranks, which must be equal in both modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import pytest
import torch
from pool import Rank
from whole_stand_ins import OPTIMIZERS, Tensors, make
from whole_training import Alone, assert_same, schedulers_of, train

import megabucket as mb
from megabucket.checkpoint.convert.dcp import load_dcp, save_dcp

pytestmark = pytest.mark.dist

STEPS, MICROBATCHES, CLIP = 4, 2, 50.0
PRECISIONS = {"float32": (torch.float32, True), "bfloat16": (torch.bfloat16, True), "16-bit gradients": (torch.bfloat16, False)}
BUCKETS = {2: 20, 3: 64, 4: 10**6}


@dataclass(frozen=True)
class Case:
    optimizers: str
    precision: str
    sharded: bool
    clip_grad: float

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision][0]


def train_cases(rank: Rank, cases: list[Case]) -> list[Any]:
    return [train_case(rank, case) for case in cases]


def train_case(rank: Rank, case: Case) -> Any:
    config = mb.DistributedDataParallelConfig(
        use_distributed_optimizer=case.sharded,
        overlap_param_gather=case.sharded,
        grad_reduce_in_fp32=PRECISIONS[case.precision][1],
        bucket_size=BUCKETS[rank.size],
    )
    ddp = mb.DistributedDataParallel(Tensors(case.dtype), config, process_group=rank.group)
    optimizer = mb.DistributedOptimizer(make(case.optimizers, ddp.module), ddp, clip_grad=case.clip_grad)
    schedulers = schedulers_of(optimizer.torch_optimizers)
    found = train(ddp, optimizer, range(STEPS), rank.index, schedulers=schedulers, microbatches=MICROBATCHES)
    return found, optimizer.state_dict()["state"]


ALL = list(product(OPTIMIZERS, PRECISIONS))
SOME = list(zip(OPTIMIZERS, cycle(PRECISIONS), strict=False))
"""Each list of optimizers in one precision."""


@pytest.mark.parametrize(
    ("ranks", "clip_grad", "pairs"),
    [
        pytest.param(3, CLIP, SOME, id="three ranks, clipped"),
        *(
            pytest.param(ranks, clip, ALL, id=f"all, {ranks} ranks, clip_grad={clip}", marks=pytest.mark.nightly)
            for ranks, clip in product((2, 3, 4), (0.0, CLIP))
        ),
    ],
)
def test_several_optimizers_over_gloo_train_as_plain_torch_does(
    pool: Any, ranks: int, clip_grad: float, pairs: list[tuple[str, str]]
) -> None:
    modes = (True, False) if pairs is ALL else (True,)
    cases = [Case(name, precision, sharded, clip_grad) for name, precision in pairs for sharded in modes]

    by_rank = pool.run(train_cases, cases, ranks=ranks, timeout_s=120)

    for index, (name, precision) in enumerate(pairs):
        found = [case for of_rank in by_rank for case in of_rank[len(modes) * index : len(modes) * (index + 1)]]
        (steps, _), *others = found
        norms = [norm for norm, _ in steps]
        alone = Alone(name, ranks, PRECISIONS[precision][0]).train(
            range(STEPS),
            microbatches=MICROBATCHES,
            clip=lambda step, norms=norms: min(1.0, CLIP / (norms[step] + 1e-6)) if clip_grad else 1.0,
            schedules=True,
        )
        assert min(norms) > 2 * CLIP
        assert_same([weights for _, weights in steps], alone, f"{name}, {precision}")
        for other in others:
            assert_same(other, found[0], f"{name}, {precision}")


def resume(rank: Rank, path: str, name: str, bucket_size: int, sharded: bool, num_before: int) -> Any:
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=bucket_size)
    ddp = mb.DistributedDataParallel(Tensors(torch.bfloat16), config, process_group=rank.group)
    optimizer = mb.DistributedOptimizer(make(name, ddp.module), ddp)
    if num_before:
        train(ddp, optimizer, range(num_before), rank.index)
        mb.save_checkpoint(path, ddp, optimizer, step=num_before)
    else:
        mb.load_checkpoint(path, ddp, optimizer)
    return [weights for _, weights in train(ddp, optimizer, [9], 0)]


@pytest.mark.parametrize("name", ["Muon, AdamW", pytest.param("SOAP", marks=pytest.mark.nightly)])
def test_a_checkpoint_over_gloo_resumes_on_other_ranks_with_other_owners(pool: Any, name: str, tmp_path: Any) -> None:
    # In the last step all ranks have the gradient of rank 0, so its mean is that of any number of ranks.
    first, *_ = pool.run(resume, str(tmp_path), name, 20, True, 3, ranks=3)

    for ranks, bucket_size, sharded in [(1, 64, True), (2, 10**6, True), (2, 64, False)]:
        for found in pool.run(resume, str(tmp_path), name, bucket_size, sharded, 0, ranks=ranks):
            assert_same(found, first)


def through_dcp(rank: Rank, path: str, name: str, bucket_size: int, is_first: bool) -> Any:
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=bucket_size)
    ddp = mb.DistributedDataParallel(Tensors(torch.float32), config, process_group=rank.group)
    optimizer = mb.DistributedOptimizer(make(name, ddp.module), ddp)
    if is_first:
        train(ddp, optimizer, range(3), rank.index)
        save_dcp(path, ddp, optimizer)
    else:
        load_dcp(path, ddp, optimizer, trusted=True)
    return [weights for _, weights in train(ddp, optimizer, [9], 0)]


@pytest.mark.parametrize("name", ["Muon, AdamW", pytest.param("Adafactor", marks=pytest.mark.nightly)])
def test_owners_write_their_part_of_a_checkpoint_of_torch_distributed(pool: Any, name: str, tmp_path: Any) -> None:
    first, *_ = pool.run(through_dcp, str(tmp_path), name, 20, True, ranks=3)

    for found in pool.run(through_dcp, str(tmp_path), name, 150, False, ranks=2):
        assert_same(found, first)
