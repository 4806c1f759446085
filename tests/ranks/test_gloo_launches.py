"""How batches are launched on gloo: see docs/decisions/gloo.md."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from pool import Rank

from megabucket.comm import AllGather, AllReduce, Broadcast, Liveness, ProcessGroupCommunicator
from megabucket.comm.communicator import RankState
from megabucket.testing import ListRecorder

pytestmark = pytest.mark.dist


def gather_two(rank: Rank) -> tuple[int, list[float]]:
    """Launch a batch of two gathers; return how many collectives torch was asked for, and what came out."""
    communicator = ProcessGroupCommunicator(rank.group)
    fulls = [torch.zeros(2 * rank.size) for _ in range(2)]
    shards = [full[2 * rank.index : 2 * rank.index + 2] for full in fulls]
    for number, shard in enumerate(shards):
        shard.fill_(10 * number + rank.index)
    batch = communicator.prepare([AllGather(full, shard) for full, shard in zip(fulls, shards, strict=True)])
    communicator.launch(batch, label="gather").wait()
    return len(batch.plan.starts), torch.cat(fulls).tolist()


def gather(rank: Rank, dtype: torch.dtype, prepared: bool) -> torch.Tensor:
    communicator = ProcessGroupCommunicator(rank.group)
    full = torch.zeros(3 * rank.size, dtype=dtype)
    own = full[3 * rank.index : 3 * rank.index + 3]
    own.fill_(True if dtype == torch.bool else rank.index + 1)
    own[0] = 0
    calls = [AllGather(full, own)]
    if prepared:
        calls = communicator.prepare(calls)
        full.zero_()  # twice with the same call: its second result is what counts
        communicator.launch(calls, label="gather").wait()
        own.fill_(True if dtype == torch.bool else rank.index + 1)
        own[0] = 0
    communicator.launch(calls, label="gather").wait()
    return full


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_gather_is_what_the_ranks_hold_in_their_order(pool, ranks, dtype, prepared):
    row = [[0, index + 1, index + 1] for index in range(ranks)]
    expected = torch.tensor(row).flatten().to(dtype)

    for full in pool.run(gather, dtype, prepared, ranks=ranks):
        assert torch.equal(full, expected)


def test_gathers_of_a_batch_are_launched_one_by_one(pool):
    assert pool.run(gather_two, ranks=2) == [(2, [0.0, 0.0, 1.0, 1.0, 10.0, 10.0, 11.0, 11.0])] * 2


def reduce_two(rank: Rank) -> tuple[int, list[float]]:
    communicator = ProcessGroupCommunicator(rank.group)
    tensors = [torch.full((2,), 10.0 * number + rank.index) for number in range(2)]
    batch = communicator.prepare([AllReduce(tensor) for tensor in tensors])
    communicator.launch(batch, label="reduce").wait()
    return len(batch.plan.starts), torch.cat(tensors).tolist()


def test_reductions_of_a_batch_are_coalesced(pool):
    assert pool.run(reduce_two, ranks=2) == [(1, [1.0, 1.0, 21.0, 21.0])] * 2


def launch_unprepared(rank: Rank, records: bool) -> list[int]:
    """Return, per kind of call, after how many of 100 launches a thread of gloo still held a tensor."""
    state = RankState(ListRecorder() if records else None)
    communicator = ProcessGroupCommunicator(rank.group, state=state)
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(5.0)  # so that a thread of gloo that needs Python's lock is late
    num_held = [0, 0, 0]
    try:
        for _ in range(100):
            tensor, full = torch.ones(10), torch.ones(10 * rank.size)
            calls = (AllReduce(tensor), Broadcast(tensor), AllGather(full, full.data.view(rank.size, -1)[rank.index]))
            for kind, call in enumerate(calls):
                communicator.launch([call], label="passing").wait()
                num_held[kind] += tensor._use_count() > 1 or full._use_count() > 1  # type: ignore[attr-defined]
    finally:
        sys.setswitchinterval(switch_interval_s)
    return num_held


@pytest.mark.parametrize("records", [False, True])
def test_nobody_holds_the_tensors_of_a_call_that_was_waited_for(pool, records):
    """At the end of a program, a thread that lets go of them too late takes the process with it."""
    assert pool.run(launch_unprepared, records, ranks=2) == [[0, 0, 0]] * 2


def wait_for_a_late_rank(rank: Rank) -> list[int]:
    """Return how often C++ still held the tensors when the waits were over, one rank coming after several slices."""
    communicator = ProcessGroupCommunicator(rank.group, liveness=Liveness(heartbeat_s=0.1, dead_after_s=20.0))
    held = []
    for _ in range(3):
        if rank.index == 1:
            time.sleep(0.3)
        tensor = torch.ones(10)
        communicator.launch([AllReduce(tensor)], label="passing").wait()
        held.append(tensor._use_count() - 1)  # type: ignore[attr-defined]
    communicator.close()
    return held


def test_nobody_holds_the_tensors_either_when_the_wait_took_long(pool):
    assert pool.run(wait_for_a_late_rank, ranks=2) == [[0, 0, 0]] * 2
