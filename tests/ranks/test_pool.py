"""The pool itself: a test tool that lies would hide everything else."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from pool import Rank, RankFailedError, WorkerPool

pytestmark = pytest.mark.dist


def sum_of_ranks(rank: Rank) -> tuple[int, int, float]:
    value = torch.tensor([1.0 + rank.index])
    dist.all_reduce(value, group=rank.group)
    return rank.index, rank.size, value.item()


def warn_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        warnings.warn("look here", stacklevel=1)


def hang_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        time.sleep(600)


def die_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        os._exit(3)


@pytest.fixture(scope="module")
def doomed_pool():
    pool = WorkerPool("forkserver")
    yield pool
    pool.kill()


def test_a_failure_shows_the_traceback_of_its_rank_and_a_warning_is_one(doomed_pool):
    with pytest.raises(RankFailedError, match="--- rank 1 ---") as caught:
        doomed_pool.run(warn_on_rank_1, ranks=2)

    assert "in warn_on_rank_1" in str(caught.value)
    assert "UserWarning: look here" in str(caught.value)
    assert isinstance(caught.value.errors[1], UserWarning)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (hang_on_rank_1, TimeoutError, r"hang_on_rank_1: no answer from ranks \[1\] within 1 s"),
        (die_on_rank_1, RankFailedError, "--- rank 1 ---\nthe process died"),
    ],
)
def test_a_rank_that_hangs_or_dies_ends_all_processes_and_the_next_call_starts_others(doomed_pool, function, error, text):
    doomed_pool.run(sum_of_ranks, ranks=1)

    with pytest.raises(error, match=text):
        doomed_pool.run(function, ranks=2, timeout_s=1)

    assert doomed_pool.process_ids == []
    assert doomed_pool.run(sum_of_ranks, ranks=2) == [(0, 2, 3.0), (1, 2, 3.0)]
