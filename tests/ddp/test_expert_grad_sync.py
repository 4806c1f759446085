"""Gradients of experts after a sync: the 73 cases of Megatron's ``test_grad_sync_with_expert_parallel`` (at d98e8a64).

64 of them are ``test_grad_sync``: ep x etp x mode x overlap x AVG x instances, of which 16 skip, because instances need the
distributed optimizer. Here the 48 others run with a mean, by division and by AVG, and 24 more with a sum; what skips there is
refused here (test_instances.py). The other 9 put 2 ** rank into three kinds of expert layers on three topologies, to tell
which ranks were summed; 3 of them need weights that are gathered (GTP), which are not ours. Buffers do not see the kind of a
layer, so each topology runs once for each mode, with and without overlap. Two more, of separate buffers, come from another
file.
"""

import itertools

import pytest
import torch
from grids import Grid, cut, of_expert

from megabucket import DistributedDataParallel, DistributedDataParallelConfig
from megabucket.ddp.groups import ParallelGroups, ReductionGroup

MEANS = {"mean": {}, "AVG": {"average_in_collective": True}, "sum": {"grad_reduction": "sum"}}
BOTH = [False, True]


class Layers(torch.nn.Module):
    """Dense layers and experts, each in a bucket of which every rank owns elements. With ``etp`` above 1 experts are cut."""

    def __init__(self, etp=1):
        super().__init__()
        self.dense = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
        self.experts = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        for name, param in self.experts.named_parameters():
            of_expert(param)
            if etp > 1 and name.endswith("weight"):
                cut(param, 0)

    def give(self, dense, expert):
        """Bring each gradient the same value: of dense parameters, of experts."""
        factors = {self.dense: dense, self.experts: expert}
        sum(param.sum() * factor for part, factor in factors.items() for param in part.parameters()).backward()


def wrap(grid, rank, instances=1, **config):
    """Wrap with all groups cut into instances, as Megatron's partial data-parallel groups are."""
    config = DistributedDataParallelConfig(**{"bucket_size": 100, **config})
    given = grid.groups(rank, norm_group=None)
    if instances > 1:
        groups = {name: ReductionGroup(*levels[rank]) for name, levels in grid.levels.items()}
        given = ParallelGroups(groups, copies=given.copies, step_group=given.step_group)
    return DistributedDataParallel(Layers(grid.etp), config, groups=given)


def with_levels(grid, instances):
    """Add, by group and rank, the ranks that hold the other shards and those that hold the same one."""
    grid.levels = {}
    for name in ("dense", "expert"):
        inside, over = {}, {}
        for members in {grid.of(rank, name).members for rank in range(grid.size)}:
            size = len(members) // instances
            parts = [members[first : first + size] for first in range(0, len(members), size)]
            for ranks in parts:
                inside |= grid.world.subgroup(ranks)
            for ranks in zip(*parts, strict=True):
                over |= grid.world.subgroup(ranks)
        grid.levels[name] = {rank: (inside[rank], over[rank]) for rank in inside}
    return grid


def reduced(ddp):
    """By group, the values of the reduced gradients that this rank has."""
    found = {}
    for group in ddp.bucket_groups:
        for bucket, shard in itertools.zip_longest(group.buckets, group.grad_shards):
            values = bucket.grad_data if shard is None else shard
            start = bucket.layout.start + (0 if shard is None else group.communicator.rank * shard.numel())
            slots = [bucket.buffer.layout.params[name] for name in bucket.layout.params]
            for slot in slots:
                own = values[max(slot.start - start, 0) : max(slot.stop - start, 0)]
                found.setdefault(bucket.buffer.layout.key.group, set()).update(own.tolist())
    return found


@pytest.mark.parametrize(("is_sharded", "num_instances"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("reduction", MEANS)
@pytest.mark.parametrize("overlaps", BOTH)
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2])
def test_an_expert_that_saw_the_tokens_of_ep_x_etp_ranks_ends_with_the_gradient_of_dense_parameters(
    ep, etp, overlaps, reduction, is_sharded, num_instances
):
    """On 8 ranks: the expert's gradient ep * etp, summed over 8 / (ep * etp) ranks, is 8, as is the sum of 8 ones."""
    grid = with_levels(Grid(1, 8, ep=ep, etp=etp), num_instances)
    config = {"use_distributed_optimizer": is_sharded, "overlap_grad_reduce": overlaps, **MEANS[reduction]}

    def program(rank):
        ddp = wrap(grid, rank, num_instances, **config)
        ddp.module.give(1.0, float(ep * etp))
        ddp.finish_grad_sync()
        return reduced(ddp)

    expected = {8.0 if reduction == "sum" else 1.0}
    assert grid.run(program) == [{"dense": expected, "expert": expected}] * 8


@pytest.mark.parametrize("is_sharded", BOTH)
@pytest.mark.parametrize("overlaps", BOTH)
def test_what_a_hook_of_an_expert_leaves_is_summed(overlaps, is_sharded):
    """The hook is registered after wrapping, on rank 3 only: 1 + 1 of ranks 1 and 3 becomes 1 + 5."""
    grid = Grid(1, 4, ep=2)

    def times_five(param):
        param.grad = param.grad * 5

    def program(rank):
        ddp = wrap(grid, rank, grad_reduction="sum", overlap_grad_reduce=overlaps, use_distributed_optimizer=is_sharded)
        if rank == 3:
            for param in ddp.module.experts.parameters():
                param.register_post_accumulate_grad_hook(times_five)
        for _ in range(2):  # buckets of the second step are launched as they become ready
            ddp.zero_grad()
            ddp.module.give(1.0, 1.0)
            ddp.finish_grad_sync()
        return reduced(ddp)

    results = grid.run(program)

    assert results == [{"dense": {4.0}, "expert": {6.0 if rank % 2 else 2.0}} for rank in range(4)]


@pytest.mark.parametrize("is_sharded", BOTH)
@pytest.mark.parametrize("overlaps", BOTH)
@pytest.mark.parametrize(("tp", "etp"), [(2, 1), (1, 2)])
def test_the_gradient_of_an_expert_is_summed_over_its_own_ranks(tp, etp, overlaps, is_sharded):
    """2 ** rank: every set of ranks has a sum of its own."""
    grid = Grid(tp, 4 // tp, etp=etp)

    def program(rank):
        ddp = wrap(grid, rank, grad_reduction="sum", overlap_grad_reduce=overlaps, use_distributed_optimizer=is_sharded)
        ddp.module.give(2.0**rank, 2.0**rank)
        ddp.finish_grad_sync()
        return reduced(ddp)

    results = grid.run(program)

    for rank, found in enumerate(results):
        ranks = {name: grid.of(rank, name).members for name in ("dense", "expert")}
        assert ranks["dense"] != ranks["expert"]
        assert found == {name: {float(sum(2**other for other in members))} for name, members in ranks.items()}


@pytest.mark.parametrize("is_sharded", BOTH)
def test_experts_and_dense_parameters_lie_in_separate_buffers(is_sharded):
    grid = Grid(1, 4, ep=2)

    ddp = grid.run(lambda rank: wrap(grid, rank, use_distributed_optimizer=is_sharded))[0]

    dense, expert = ddp.layout.buffers
    assert set(dense.params) == {name for name, _ in ddp.module.named_parameters() if name.startswith("dense.")}
    assert set(expert.params) == {name for name, _ in ddp.module.named_parameters() if name.startswith("experts.")}
    assert [min(slot.start for slot in buffer.params.values()) for buffer in (dense, expert)] == [0, 0]
    assert [buffer.num_shards for buffer in (dense, expert)] == [4, 2]
    assert all(bucket.numel % buffer.num_shards == 0 for buffer in (dense, expert) for bucket in buffer.buckets)
