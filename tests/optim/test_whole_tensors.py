"""Optimizers that update whole tensors, several on one wrapper: on shards as after an all-reduce, bit by bit.

Two references: the same optimizers in all-reduce mode with the same buckets, and plain torch on exact gradients.
"""

import pytest
import torch
from whole_ranks import run_ranks
from whole_stand_ins import OPTIMIZERS
from whole_training import PULL, Alone, assert_same, schedulers_of, train

CLIP = 50.0
"""The norms of these gradients are between 300 and 900."""

NAMES = pytest.mark.parametrize("name", OPTIMIZERS)
PRECISIONS = {
    "float32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, True),
    "bfloat16, 16-bit gradients": (torch.bfloat16, False),
}
PLANS = [(2, 20), (3, 64), (4, 10**6)]
"""Ranks and bucket sizes: a bucket per parameter, some parameters in each, all in one."""

CELLS = [
    pytest.param(precision, *plan, id=f"{precision}, {plan}", marks=[] if shift == 0 else pytest.mark.nightly)
    for shift in range(3)
    for precision, plan in zip(PRECISIONS, PLANS[shift:] + PLANS[:shift], strict=True)
]


def scheduled(rank, ddp, optimizer):
    schedulers = schedulers_of(optimizer.torch_optimizers)
    return train(ddp, optimizer, range(4), rank, schedulers=schedulers, microbatches=2, pull=PULL), optimizer.state_dict()


@NAMES
@pytest.mark.parametrize(("precision", "size", "bucket_size"), CELLS)
def test_shards_train_as_an_all_reduce_does(name, precision, size, bucket_size):
    dtype, in_fp32 = PRECISIONS[precision]
    fields = {"dtype": dtype, "bucket_size": bucket_size, "grad_reduce_in_fp32": in_fp32, "options": {"clip_grad": CLIP}}

    sharded = run_ranks(size, name, scheduled, **fields, overlap_param_gather=True)
    reduced = run_ranks(size, name, scheduled, **fields, sharded=False)

    assert all(norm > 2 * CLIP for norm, _ in reduced[0][0])
    for found in (*sharded, *reduced[1:]):
        assert_same(found, reduced[0])


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_clipped", [False, True], ids=["", "clipped"])
def test_shards_train_as_plain_torch_does(name, dtype, is_clipped):
    def program(rank, ddp, optimizer):
        schedulers = schedulers_of(optimizer.torch_optimizers)
        return train(ddp, optimizer, range(4), rank, schedulers=schedulers, microbatches=2)

    found = run_ranks(4, name, program, dtype=dtype, options={"clip_grad": CLIP if is_clipped else 0.0})

    norms = [norm for norm, _ in found[0]]
    alone = Alone(name, 4, dtype).train(
        range(4), microbatches=2, clip=lambda step: CLIP / (norms[step] + 1e-6) if is_clipped else 1.0, schedules=True
    )
    for of_rank in found:
        assert_same([weights for _, weights in of_rank], alone)
