"""The groups that a wrapper makes for itself beside the one it was given."""

import gc
from pathlib import Path

import pytest
import torch

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
