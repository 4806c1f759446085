"""Predictions with host costs: each cost does what its name says, and the search for a host never ends worse for it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing_cases import flat, ring, single_plan

from megabucket.errors import ConfigError
from megabucket.planning.cuts import BucketPlan, per_tensor_plan, uniform_plan
from megabucket.planning.partition import optimal_plan
from megabucket.planning.simulate import FENCE, GRAD_NORM, HostCosts, Mode, simulate_step_s
from megabucket.planning.workload import TensorWork, Workload

SECONDS = st.floats(0, 1)
FIELDS = ("launch_s", "launch_s_per_byte", "finish_s", "update_s", "gather_finish_s", "wake_s", "step_collective_s")


@st.composite
def workloads(draw):
    sizes = draw(st.lists(st.tuples(st.integers(0, 50), SECONDS, SECONDS), min_size=1, max_size=8))
    tensors = tuple(TensorWork(f"t{i}", *row) for i, row in enumerate(sizes))
    order = draw(st.none() | st.permutations(range(len(tensors))).map(tuple))
    return Workload(tensors, optimizer_s=draw(SECONDS), num_microbatches=draw(st.integers(1, 3)), ready_order=order)


def plans(workload):
    """Any partition of the tensors, contiguous or not."""
    count = len(workload.tensors)

    def cut(order, ends):
        bounds = sorted({0, count, *ends})
        return BucketPlan(tuple(tuple(order[a:b]) for a, b in itertools.pairwise(bounds)))

    return st.builds(cut, st.permutations(range(count)), st.lists(st.integers(0, count)))


LINKS = st.builds(flat, SECONDS, SECONDS) | st.builds(ring, SECONDS, st.floats(1, 1e3))
SETTINGS = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(2, 5),
        "mode": st.sampled_from(Mode),
        "overlap_grad_reduce": st.booleans(),
        "overlap_param_gather": st.booleans(),
        "step_collectives": st.sampled_from([(), (FENCE,), (FENCE, GRAD_NORM)]),
    }
)
HOSTS = st.builds(HostCosts, **dict.fromkeys(FIELDS, SECONDS))


@given(st.data(), workloads(), LINKS, SETTINGS, HOSTS, st.sampled_from(FIELDS), st.floats(0, 1))
def test_no_host_cost_makes_a_step_shorter(data, workload, link, setting, host, name, more_s):
    plan = data.draw(plans(workload))
    dearer = HostCosts(**{**host.to_dict(), name: getattr(host, name) + more_s})

    before_s = simulate_step_s(workload, plan, link, host=host, **setting)

    # A wait that is over before its thread comes saves that thread the late waking, so only there time may be gained.
    slack_s = 0.0 if host.wake_s == 0 and name != "wake_s" else len(plan.buckets) * 2 * dearer.wake_s
    assert simulate_step_s(workload, plan, link, host=dearer, **setting) >= before_s - slack_s - 1e-9


@pytest.mark.parametrize(
    ("host", "mode", "added_s"),
    [
        # Three buckets of 10 elements (40 bytes), a free link: what the thread pays is what the step pays.
        (HostCosts(launch_s=0.1), Mode.ALL_REDUCE, 0.3),
        (HostCosts(launch_s_per_byte=0.01), Mode.ALL_REDUCE, 1.2),
        (HostCosts(finish_s=0.1), Mode.ALL_REDUCE, 0.3),
        (HostCosts(step_collective_s=0.1), Mode.ALL_REDUCE, 0.2),
        (HostCosts(gather_finish_s=0.1), Mode.ALL_REDUCE, 0.0),
        (HostCosts(gather_finish_s=0.1), Mode.REDUCE_SCATTER, 0.3),
        (HostCosts(update_s=0.1), Mode.REDUCE_SCATTER, 0.3),
    ],
)
def test_each_cost_is_paid_as_often_as_its_name_says(host, mode, added_s):
    workload = Workload(tuple(TensorWork(f"t{i}", 10, 1.0, 1.0) for i in range(3)))
    setting = {"num_ranks": 2, "mode": mode, "overlap_param_gather": True, "step_collectives": (FENCE, GRAD_NORM)}

    step_s = simulate_step_s(workload, per_tensor_plan(workload), flat(0.0, 0.0), host=host, **setting)

    assert step_s == pytest.approx(6.0 + added_s)


def test_a_thread_that_waits_wakes_late_and_one_that_does_not_wait_does_not():
    workload = Workload((TensorWork("a", 10, 1.0), TensorWork("b", 10, 1.0)))
    host = HostCosts(wake_s=0.25)

    def step_s(latency_s):
        link = flat(latency_s, 0.0)
        return simulate_step_s(workload, single_plan(workload), link, num_ranks=2, mode=Mode.ALL_REDUCE, host=host)

    assert step_s(0.0) == 2.0
    assert step_s(1.0) == 3.25


def test_buckets_that_hide_nothing_more_are_not_cut():
    """All collectives are hidden but the last, so what each further bucket costs the thread that computes is what counts."""
    workload = Workload(tuple(TensorWork(f"p{i}", 1000, 1e-3, 1e-3) for i in range(40)))
    link, host = flat(0.0, 2.5e-7), HostCosts(launch_s=1e-4, update_s=1e-4)
    setting = {"num_ranks": 2, "mode": Mode.ALL_REDUCE}

    dearer = flat(link.latency_s + host.launch_s, link.seconds_per_byte)
    searched, hosted = optimal_plan(workload, dearer, **setting), optimal_plan(workload, link, host=host, **setting)

    assert len(hosted.buckets) < len(searched.buckets)
    searched_s, hosted_s = (simulate_step_s(workload, plan, link, host=host, **setting) for plan in (searched, hosted))
    assert hosted_s < searched_s


@given(workloads(), st.builds(HostCosts, **dict.fromkeys(FIELDS, SECONDS)), SECONDS, SECONDS, st.sampled_from(Mode))
def test_the_plan_for_a_host_is_no_worse_than_that_of_the_search_alone(workload, host, latency_s, seconds_per_byte, mode):
    link = flat(latency_s, seconds_per_byte)
    setting = {"num_ranks": 2, "mode": mode, "overlap_param_gather": mode is Mode.REDUCE_SCATTER}

    hosted, searched = optimal_plan(workload, link, host=host, **setting), optimal_plan(workload, link, **setting)

    hosted_s, searched_s = (simulate_step_s(workload, plan, link, host=host, **setting) for plan in (hosted, searched))
    assert hosted_s <= searched_s
    assert sorted(index for bucket in hosted.buckets for index in bucket) == list(range(len(workload.tensors)))


def test_a_plan_of_another_workload_is_refused():
    workload = Workload((TensorWork("a", 10), TensorWork("b", 10)))
    other = Workload((TensorWork("a", 10),))

    with pytest.raises(ConfigError, match="plan"):
        simulate_step_s(workload, uniform_plan(other, 1), flat(0.0, 0.0), num_ranks=2, mode=Mode.ALL_REDUCE)
