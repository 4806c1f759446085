"""State of parameters that are updated whole: saved, loaded, rebuilt, read and written. Gradients are exact, so bits must agree."""

import contextlib
import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from whole_ranks import Alone, assert_same, run_ranks, seed_of, weights_of
from whole_stand_ins import OPTIMIZERS, SHAPES, Tensors, make, split

from megabucket import DistributedOptimizer, load_checkpoint, save_checkpoint
from megabucket.errors import ConfigError, OptimizerParametersError

NAMES = pytest.mark.parametrize("name", OPTIMIZERS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZE = 4
"""Of the ranks whose gradients make a step, whoever takes it."""
TARGETS = [
    {"size": 1, "bucket_size": 10**6},
    {"size": 2, "bucket_size": 20},
    {"size": 4, "bucket_size": 150},
    {"size": 2, "sharded": False},
]
SOURCE = {"size": 4, "bucket_size": 64}


def exact(ddp, optimizer, steps, rank, size):
    """Train on the gradients of all four ranks of a step, on any number of ranks; return the weights after each step."""
    found = []
    for step in steps:
        shares = range(SIZE // size * rank, SIZE // size * (rank + 1))
        for share in shares:
            with contextlib.nullcontext() if share == shares[-1] else ddp.no_sync():
                (ddp(seed_of(step, share)) / SIZE).backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp.finish_param_sync()
        found.append(weights_of(ddp.module))
    return found


def run(name, dtype, program, *, size, **fields):
    """Call ``program(train, ddp, optimizer)`` on each rank; ``train(steps)`` is ``exact``."""

    def play(rank, ddp, optimizer):
        return program(lambda steps: exact(ddp, optimizer, steps, rank, size), ddp, optimizer)

    return run_ranks(size, name, play, dtype=dtype, grad_reduction="sum", **fields)


def begin(name, dtype, save, **fields):
    def program(train, ddp, optimizer):
        train(range(3))
        return save(ddp, optimizer)

    return run(name, dtype, program, **fields)[0]


def resume(name, dtype, load, **fields):
    def program(train, ddp, optimizer):
        train([7])  # other weights and state, which the load must replace
        load(ddp, optimizer)
        return train(range(3, 6))

    return run(name, dtype, program, **fields)


@NAMES
@DTYPES
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_checkpoint_resumes_with_other_buckets_owners_and_ranks(name, dtype, target, tmp_path):
    begin(name, dtype, lambda ddp, optimizer: save_checkpoint(tmp_path, ddp, optimizer, step=3), **SOURCE)

    found = resume(name, dtype, lambda ddp, optimizer: load_checkpoint(tmp_path, ddp, optimizer), **target)

    alone = Alone(name, SIZE, dtype).train(range(6))[3:]
    for of_rank in found:
        assert_same(of_rank, alone)


@NAMES
@DTYPES
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_state_dict_resumes_with_other_buckets_owners_and_ranks(name, dtype, target):
    model, state = begin(name, dtype, lambda ddp, opt: (copy.deepcopy(ddp.state_dict()), opt.state_dict()), **SOURCE)

    def load(ddp, optimizer):
        ddp.load_state_dict(model)
        optimizer.load_state_dict(copy.deepcopy(state))

    found = resume(name, dtype, load, **target)

    alone = Alone(name, SIZE, dtype).train(range(6))[3:]
    for of_rank in found:
        assert_same(of_rank, alone)


@NAMES
@DTYPES
def test_state_of_an_all_reduced_run_resumes_on_owners(name, dtype, tmp_path):
    source = {**SOURCE, "sharded": False}
    begin(name, dtype, lambda ddp, optimizer: save_checkpoint(tmp_path, ddp, optimizer, step=3), **source)

    found = resume(name, dtype, lambda ddp, optimizer: load_checkpoint(tmp_path, ddp, optimizer), size=4, bucket_size=150)

    alone = Alone(name, SIZE, dtype).train(range(6))[3:]
    for of_rank in found:
        assert_same(of_rank, alone)


@NAMES
@DTYPES
def test_a_rebuild_keeps_everything(name, dtype):
    def program(train, ddp, optimizer):
        found = train(range(2))
        ddp.rebuild(ddp.ddp_config.model_copy(update={"bucket_size": 150}))  # other owners
        found += train(range(2, 4))
        ddp.rebuild()
        return found + train(range(4, 6))

    alone = Alone(name, SIZE, dtype).train(range(6))
    for of_rank in run(name, dtype, program, **SOURCE):
        assert_same(of_rank, alone)
