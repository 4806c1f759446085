"""How batches are launched on gloo. Why gathers go out one by one: docs/decisions/gloo-coalesced-gather.md."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Rank

from megabucket.comm import AllGather, AllReduce, ProcessGroupCommunicator

pytestmark = pytest.mark.dist


def gather_two(rank: Rank) -> tuple[int, list[float]]:
    """Launch a batch of two gathers; return how often torch was asked to coalesce, and what came out."""
    communicator = ProcessGroupCommunicator(rank.group)
    fulls = [torch.zeros(2 * rank.size) for _ in range(2)]
    shards = [full[2 * rank.index : 2 * rank.index + 2] for full in fulls]
    for number, shard in enumerate(shards):
        shard.fill_(10 * number + rank.index)
    calls = [AllGather(full, shard) for full, shard in zip(fulls, shards, strict=True)]
    with mock.patch.object(dist, "_coalescing_manager", wraps=dist._coalescing_manager) as manager:
        communicator.launch(calls, label="gather").wait()
        num_coalesced = manager.call_count
    return num_coalesced, torch.cat(fulls).tolist()


def test_gathers_of_a_batch_are_launched_one_by_one(pool):
    assert pool.run(gather_two, ranks=2) == [(0, [0.0, 0.0, 1.0, 1.0, 10.0, 10.0, 11.0, 11.0])] * 2


def reduce_two(rank: Rank) -> tuple[int, list[float]]:
    communicator = ProcessGroupCommunicator(rank.group)
    tensors = [torch.full((2,), 10.0 * number + rank.index) for number in range(2)]
    with mock.patch.object(dist, "_coalescing_manager", wraps=dist._coalescing_manager) as manager:
        communicator.launch([AllReduce(tensor) for tensor in tensors], label="reduce").wait()
        num_coalesced = manager.call_count
    return num_coalesced, torch.cat(tensors).tolist()


def test_reductions_of_a_batch_are_coalesced(pool):
    assert pool.run(reduce_two, ranks=2) == [(1, [1.0, 1.0, 21.0, 21.0])] * 2
