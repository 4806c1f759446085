"""Ranks of a loopback world that train parameters of all shapes, some of them updated whole."""

import torch
from optim_ranks import run_wrapped
from whole_stand_ins import Tensors, make

from megabucket import DistributedOptimizer


def run_ranks(size, name, program, *, dtype=torch.float32, sharded=True, bucket_size=64, model=None, options=None, **config):
    """Call ``program(rank, ddp, optimizer)`` on each rank, with the optimizers of a name."""

    def optimizer_of(ddp):
        return DistributedOptimizer(make(name, ddp.module), ddp, **(options or {}))

    config = {"use_distributed_optimizer": sharded, "bucket_size": bucket_size, **config}
    return run_wrapped(size, model or Tensors(dtype), program, optimizer_of, **config)
