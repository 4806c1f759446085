"""Host costs from phases of two plans: what was put in comes out, and nothing is ever negative."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.comm import LocalCommunicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.measure.host import Phases, PhaseTimes, host_costs, optimizer_s, time_phases
from megabucket.optim import DistributedOptimizer
from megabucket.planning.links import FlatLink

COST = st.floats(0, 1e-2)
LINK = FlatLink(latency_s=1e-4, seconds_per_byte=1e-9)
FENCE_S = 1e-4 + 48e-9


def phases_of(num_buckets, *, launch, per_byte, finish, update, gather, small, optimizer, num_bytes=1000):
    """The phases of one plan on a host with known costs, in reduce-scatter mode."""
    return Phases(
        launch_s=num_buckets * launch + num_bytes * per_byte,
        finish_s=num_buckets * finish + FENCE_S + small,
        step_s=num_buckets * update + optimizer + 2 * (FENCE_S + small),
        gather_s=num_buckets * gather,
    )


KNOWN = st.fixed_dictionaries(
    {**dict.fromkeys(("launch", "finish", "update", "gather", "small", "optimizer"), COST), "per_byte": st.floats(0, 1e-6)}
)


@given(KNOWN, st.integers(1, 3), st.integers(1, 50))
def test_known_costs_are_found_from_two_plans(known, few_count, more):
    few, many = (
        PhaseTimes(phases_of(count, **known), phases_of(count, **known), count, 1000) for count in (few_count, few_count + more)
    )

    host = host_costs(few, many, LINK, num_ranks=2, is_sharded=True, wake_s=5e-5)
    found_s = optimizer_s(few, many, host, LINK, num_ranks=2, is_sharded=True)

    names = ("launch", "per_byte", "finish", "update", "gather", "small")
    found = (host.launch_s, host.launch_s_per_byte, host.finish_s, host.update_s, host.gather_finish_s, host.step_collective_s)
    assert found == pytest.approx([known[name] for name in names], rel=1e-6, abs=1e-9)
    assert found_s == pytest.approx(known["optimizer"], rel=1e-6, abs=1e-9)
    assert host.wake_s == 5e-5


@given(st.lists(COST, min_size=16, max_size=16), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_whatever_noise_was_measured_no_cost_is_negative(times, few_count, many_count, is_sharded):
    few = PhaseTimes(Phases(*times[:4]), Phases(*times[4:8]), few_count, 8)
    many = PhaseTimes(Phases(*times[8:12]), Phases(*times[12:]), many_count, 8)

    host = host_costs(few, many, LINK, num_ranks=2, is_sharded=is_sharded, wake_s=0.0)  # refuses negative numbers

    assert optimizer_s(few, many, host, LINK, num_ranks=2, is_sharded=is_sharded) >= 0
    assert is_sharded or (host.update_s, host.gather_finish_s) == (0.0, 0.0)


@pytest.mark.parametrize("size", [1, 10**6])
def test_phases_and_waits_of_a_real_wrapper_are_measured_and_leave_it_able_to_train(size):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=size)
    communicator = LocalCommunicator()
    ddp = DistributedDataParallel(model, config, communicator=communicator)
    optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)

    times = time_phases(ddp, optimizer, lambda: ddp(torch.ones(1, 8)).sum().backward(), repetitions=2)

    assert times.num_buckets == (4 if size == 1 else 1)
    assert times.grad_bytes == sum(buffer.grad_data.nbytes for buffer in ddp.param_and_grad_buffers)
    assert min(times.typical.launch_s, times.typical.finish_s, times.typical.step_s) > 0
    assert times.least.step_s <= times.typical.step_s
    before = ddp.module[0].bias.detach().clone()
    ddp(torch.ones(1, 8)).sum().backward()
    assert optimizer.step().updated
    ddp.finish_param_sync()
    assert not torch.equal(before, ddp.module[0].bias)
    ddp.detach()
