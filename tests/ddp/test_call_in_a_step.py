"""One rank makes a collective call after its backward, while the other one ends the step."""

import pytest
import torch
from loop_ranks import Ranks, Weights, optimizer_of

import megabucket as mb
from megabucket.errors import CallMismatchError, ReplicasDivergedError
from megabucket.testing import LoopbackWorld

STEPS, CALLS_IN = 5, 2


def train(world, rank, *, sharded):
    """Return the error of each step of a loop in which rank 1 calls ``check_replicas()`` before its update of one step."""
    torch.manual_seed(0)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, num_buckets=2)
    ddp = mb.DistributedDataParallel(torch.nn.Linear(4, 4), config, communicator=world.communicator(rank))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if sharded:
        optimizer = mb.DistributedOptimizer(optimizer, ddp)
    found = []
    while len(found) < STEPS - (not sharded and rank == 1):  # rank 0 meets the call at the end of its next step
        error = None
        try:
            ddp(torch.ones(1, 4)).sum().backward()
            if rank == 1 and len(found) == CALLS_IN:
                ddp.check_replicas()
            optimizer.step()
        except mb.errors.MegabucketError as caught:
            error = type(caught)
        optimizer.zero_grad()
        found.append(error)
    if sharded:
        ddp.check_replicas()
    return found


@pytest.mark.parametrize("sharded", [True, False])
def test_both_ranks_learn_it_and_the_next_step_is_right_or_a_missed_update_is_named(sharded):
    world = LoopbackWorld(2)

    first, second = world.run(lambda rank: train(world, rank, sharded=sharded))

    kind = CallMismatchError if sharded else ReplicasDivergedError  # with whole parameters rank 0 has updated already
    at = CALLS_IN + (not sharded)
    assert first == [kind if step == at else None for step in range(STEPS)]
    assert second == [kind if step == CALLS_IN else None for step in range(len(second))]


@pytest.mark.parametrize("has_finished", [False, True], ids=["before the sync", "after the sync"])
def test_a_step_that_meets_a_call_of_another_rank_is_counted_once_on_all(has_finished):
    ranks = Ranks(2, Weights("ab"), use_distributed_optimizer=True, bucket_size=1)

    def run(rank, ddp):
        optimizer = optimizer_of(ddp)
        ddp(a=1.0, b=1.0).backward()
        if has_finished:
            ddp.finish_grad_sync()
        with pytest.raises(CallMismatchError):
            (ddp.check_replicas if rank == 1 else optimizer.step)()
        ddp.zero_grad()
        return str(ddp.last_error).split(":")[0], ddp.sync.step

    assert ranks.run(run) == [("step 0", 1)] * 2
