"""What is probed in torch is there in this torch, and missing things are no errors."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megabucket.comm.torch import backend_of, existence_of, store_of, timeout_s_of


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7.5))
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_gloo_group_is_told_with_its_time_limit_and_store(group):
    assert backend_of(group, torch.device("cpu")).name == "gloo"
    assert backend_of(group, torch.device("meta")).name == ""
    assert timeout_s_of(group) == 7.5
    store_of(group).set("a", "b")


def test_a_subgroup_has_its_own_time_limit(group):
    assert timeout_s_of(dist.new_group([0], timeout=timedelta(seconds=3))) == 3.0


def test_a_group_exists_until_it_is_destroyed_and_another_default_group_is_another():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    default, subgroup = existence_of(dist.group.WORLD), existence_of(dist.new_group([0]))
    assert (default(), subgroup()) == (True, True)

    dist.destroy_process_group()
    assert (default(), subgroup()) == (False, False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert (default(), subgroup()) == (False, False)
    dist.destroy_process_group()
