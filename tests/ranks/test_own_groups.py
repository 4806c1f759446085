"""The groups that a wrapper makes for itself beside the one it was given."""

import gc
import resource
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megabucket.comm.torch
from megabucket import DistributedDataParallel, DistributedDataParallelConfig
from megabucket.comm.torch import groups_like, timeout_s_of

pytestmark = pytest.mark.dist


def gloo_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("pt_gloo") for name in names)


def own_groups(rank):
    given = rank.group
    made = groups_like(given, ["first", "second"], 7.0)
    sums = []
    for group in made:
        values = torch.tensor([float(given.rank())])
        group.allreduce([values]).wait()
        sums.append(values.item())
    same_rank = all((group.rank(), group.size()) == (given.rank(), given.size()) for group in made)
    return sums, same_rank, [timeout_s_of(group) for group in made], [str(group.group_name) for group in made]


def test_they_have_the_ranks_of_the_given_group_and_a_time_limit_of_their_own(pool):
    for sums, same_rank, limits_s, names in pool.run(own_groups, ranks=3):
        assert sums == [3.0, 3.0]
        assert same_rank
        assert limits_s == [7.0, 7.0]
        assert names == ["first", "second"]


def keep_what_was_detached(rank, keeps):
    gc.collect()
    before = gloo_threads()
    kept = []
    for _ in range(3):
        wrapper = DistributedDataParallel(torch.nn.Linear(2, 2), DistributedDataParallelConfig(), process_group=rank.group)
        during = gloo_threads()
        wrapper(torch.ones(1, 2)).sum().backward()
        wrapper.detach()
        kept += [wrapper] * keeps
        del wrapper
        gc.collect()
    return before, during, gloo_threads()


@pytest.mark.parametrize("keeps", [False, True])
def test_detach_ends_them_also_where_somebody_keeps_the_wrapper(pool, keeps):
    for before, during, after in pool.run(keep_what_was_detached, keeps, ranks=2):
        assert during > before
        assert after == before


def wrap_in_vain(rank, fault):
    """Wrap where a rank cannot make its groups; return every rank's error, and whether all can wrap afterwards."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank.index == 1 and fault == "no descriptors":
        taken = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 2, limit[1]))
    with ExitStack() as stack:
        if fault == "store":
            stack.enter_context(patch.object(megabucket.comm.torch, "groups_like", failing_store))
        try:
            DistributedDataParallel(torch.nn.Linear(2, 2), process_group=rank.group)
            error = None
        except Exception as failure:
            error = failure
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    dist.barrier(rank.group)
    again = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=rank.group)
    again(torch.ones(1, 2)).sum().backward()
    again.detach()
    return type(error).__name__, str(error)


def failing_store(*_):
    raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.\nmore lines of C++")


def test_a_process_without_descriptors_for_them_is_named_on_all_ranks(pool):
    (first, second) = pool.run(wrap_in_vain, "no descriptors", ranks=2)

    assert first == second
    kind, text = first
    assert kind == "PeerFailedError"
    assert "rank 1 failed in wrap: it has 2 file descriptors left, and a wrapper of 2 ranks opens up to 18" in text


def test_a_store_that_fails_meanwhile_is_an_error_of_ours_on_every_rank(pool):
    for kind, text in pool.run(wrap_in_vain, "store", ranks=2):
        assert kind == "PeerLostError"
        assert "the store of the process group has failed: Failed to recv, got 0 bytes" in text
