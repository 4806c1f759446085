"""``check_for_large_grads``: gradients that are ten times as large as ever before are named, before they are reduced."""

import logging
import math

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig
from megabucket.testing import LoopbackWorld

SIZE = 2


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))


def warnings_of(caplog, steps, **fields):
    """Give both parameters of rank 1 gradients of these sizes, step after step, and rank 0 those of 1; return the warnings."""
    world, models = LoopbackWorld(SIZE), [Two() for _ in range(SIZE)]
    config = DistributedDataParallelConfig(**{"bucket_size": 1000, **fields})

    def program(rank):
        ddp = DistributedDataParallel(models[rank], config, communicator=world.communicator(rank))
        for small, large in steps:
            (ddp.module.small.sum() * (small if rank else 1) + ddp.module.large.sum() * (large if rank else 1)).backward()
            ddp.finish_grad_sync()
            ddp.zero_grad()

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megabucket"):
        world.run(program)
    return [record.message for record in caplog.records if "before they are reduced" in record.message]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_large_gradient_is_named_with_rank_bucket_and_parameter(caplog, is_sharded):
    steps = [(1, 1)] * 100 + [(1, 9), (1, 1000)]  # sqrt(3 + 4 * 9**2) is below 10 * sqrt(7)

    (found,) = warnings_of(caplog, steps, check_for_large_grads=True, use_distributed_optimizer=is_sharded)

    assert "bucket 0 on rank 1 have a norm of 2e+03" in found
    assert "at most 2.65" in found  # sqrt(7)
    assert "The largest is 'large' with 2e+03" in found


def test_the_first_hundred_steps_and_what_is_not_finite_are_not_compared(caplog):
    steps = [(1, 1)] * 98 + [(1, math.inf), (1, 1000), (1, 1), (1, math.nan), (1, 5000)]

    assert warnings_of(caplog, steps, check_for_large_grads=True, nonfinite_gradients="allow") == []


def test_nothing_is_compared_by_default(caplog):
    assert warnings_of(caplog, [(1, 1)] * 100 + [(1, 1000)]) == []


def test_a_bucket_without_gradients_is_not_compared(caplog):
    assert warnings_of(caplog, [(0, 0)] * 103, check_for_large_grads=True) == []
