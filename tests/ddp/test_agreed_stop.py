"""One rank is asked to stop, and all leave their loops after the same step."""

import pytest
import torch
from loop_ranks import Ranks, Weights

from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp import AgreedStop, DistributedDataParallel
from megabucket.errors import PeerFailedError

SIZES = [1, 2, 3]


def steps_until_stop(ranks, *, asked_before, limit=30):
    """How many steps each rank makes; ``asked_before[rank]`` is the step before which a rank is asked."""

    def program(rank, ddp):
        stop = AgreedStop(ddp)
        for step in range(limit):
            if asked_before.get(rank) == step:
                stop.request()
            ddp(a=1, b=1, c=1, d=1).backward()
            ddp.zero_grad()
            if stop.poll():
                return step + 1
        return limit

    return ranks.run(program)


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_stop_after_the_step_in_which_the_last_one_was_asked(size):
    assert steps_until_stop(Ranks(size, Weights()), asked_before={size - 1: 3}) == [4] * size


def test_it_costs_no_collective():
    quiet, asked = Ranks(2, Weights()), Ranks(2, Weights())

    steps_until_stop(quiet, asked_before={}, limit=4)
    steps_until_stop(asked, asked_before={1: 3})

    assert quiet.schedule(0) == asked.schedule(0) == asked.schedule(1)


@pytest.mark.parametrize("size", [2, 3])
def test_without_a_fence_the_ranks_ask_each_other(size):
    ranks = Ranks(size, Weights(), fence=False)

    assert steps_until_stop(ranks, asked_before={0: 5}) == [6] * size
    assert ranks.schedule(1).count("stop") == 6


def test_a_rank_alone_needs_neither_a_fence_nor_others():
    ddp = DistributedDataParallel(Weights(), DistributedDataParallelConfig(fence=False))
    stop = AgreedStop(ddp)
    found = []
    for step in range(3):
        if step == 1:
            stop.request()
        ddp(a=1, b=1, c=1, d=1).backward()
        ddp.zero_grad()
        found.append(stop.poll())

    assert found == [False, True, True]


def test_a_fault_is_louder_and_the_wish_is_heard_after_the_next_step():
    ranks = Ranks(2, Weights())

    def fail_or_train(rank, ddp):
        if rank == 1:
            raise ValueError("boom")
        ddp(a=1, b=1, c=1, d=1).backward()

    def program(rank, ddp):
        stop = AgreedStop(ddp)
        if rank == 0:
            stop.request()
        with pytest.raises(PeerFailedError), ddp.step():
            fail_or_train(rank, ddp)
        after_the_fault = stop.poll()
        ddp(a=1, b=1, c=1, d=1).backward()
        ddp.zero_grad()
        return after_the_fault, stop.poll()

    assert ranks.run(program) == [(False, True)] * 2


def test_a_step_that_nobody_takes_carries_it_too():
    ranks = Ranks(2, Weights(), nonfinite_gradients="skip_step")

    def program(rank, ddp):
        stop = AgreedStop(ddp)
        if rank == 0:
            stop.request()
        ddp(a=torch.nan if rank == 1 else 1, b=1, c=1, d=1).backward()
        ddp.zero_grad()
        return stop.poll()

    assert ranks.run(program) == [True] * 2
