"""Optimal cuts: against all plans there are, against uniform sizes, and the bound beside them."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing_cases import AFFINE_LINKS, CHOICES, FLAT, LINKS, MEASURED, TIMES, flat, plan_of, ring, single_plan, workloads

from megabucket.errors import ConfigError
from megabucket.planning import load_config, param_specs
from megabucket.planning.cuts import uniform_plan
from megabucket.planning.links import Affine, MeasuredLink, read_link
from megabucket.planning.partition import (
    Side,
    fewest_buckets_plan,
    finish_times,
    lower_bound_s,
    optimal_plan,
    shortest_cuts,
)
from megabucket.planning.setting import workload_of
from megabucket.planning.simulate import Mode, simulate_step_s
from megabucket.planning.workload import TensorWork, Workload
from megabucket.trace import CollectiveKind


def all_plans(workload):
    for cuts in itertools.product([False, True], repeat=len(workload.tensors) - 1):
        yield plan_of(workload, cuts)


@settings(max_examples=100)
@given(workloads(max_tensors=6), AFFINE_LINKS, CHOICES)
def test_no_plan_of_all_there_are_is_shorter(workload, link, choices):
    plan = optimal_plan(workload, link, num_ranks=4, **choices)

    step_s = simulate_step_s(workload, plan, link, num_ranks=4, **choices)
    shortest_s = min(simulate_step_s(workload, each, link, num_ranks=4, **choices) for each in all_plans(workload))
    assert step_s == pytest.approx(shortest_s, rel=1e-9, abs=1e-9)


@settings(max_examples=100)
@given(workloads(max_tensors=7), AFFINE_LINKS, CHOICES, st.sampled_from([0.001, 0.01, 0.1, 0.5]))
def test_no_plan_of_all_there_are_has_fewer_buckets_and_keeps_the_slack(workload, link, choices, fraction):
    steps = [(simulate_step_s(workload, each, link, num_ranks=4, **choices), each) for each in all_plans(workload)]
    shortest_s = min(step_s for step_s, _ in steps)
    slack_s = shortest_s * fraction

    plan = fewest_buckets_plan(workload, link, slack_s, num_ranks=4, **choices)

    assert simulate_step_s(workload, plan, link, num_ranks=4, **choices) <= shortest_s + slack_s * (1 + 1e-6) + 1e-9
    # With a side for the gathers as well, 1/64 of the slack is left out.
    near_s = shortest_s + slack_s * 0.98 - 1e-9
    fewest = min(each.num_collectives(workload) for step_s, each in steps if step_s <= near_s or step_s == shortest_s)
    assert plan.num_collectives(workload) <= fewest


@settings(max_examples=100)
@given(workloads(max_tensors=12), LINKS, CHOICES)
def test_no_plan_is_below_the_bound(workload, link, choices):
    bound_s = lower_bound_s(workload, link, num_ranks=4, **choices)

    plan = optimal_plan(workload, link, num_ranks=4, **choices)
    assert bound_s <= simulate_step_s(workload, plan, link, num_ranks=4, **choices) * (1 + 1e-9)
    assert bound_s >= workload.compute_s * (1 - 1e-9)


@settings(max_examples=100)
@given(workloads(max_tensors=30), AFFINE_LINKS, CHOICES, st.integers(1, 200))
def test_no_uniform_size_is_shorter(workload, link, choices, bucket_numel):
    plan = optimal_plan(workload, link, num_ranks=4, **choices)

    uniform_s = simulate_step_s(workload, uniform_plan(workload, bucket_numel), link, num_ranks=4, **choices)
    assert simulate_step_s(workload, plan, link, num_ranks=4, **choices) <= uniform_s * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(("model", "exact_s"), [("gpt2-124m", 0.733990), ("smollm2-360m", 1.434800)])
def test_a_measured_table_costs_less_than_one_percent_of_a_step(model, exact_s):
    """The seconds of a search that knew every cut, which took quadratic time."""
    run, link = load_config(model), read_link("gloo-loopback")
    workload = workload_of(run, param_specs(run.model))
    choices = {"num_ranks": 2, "mode": Mode.REDUCE_SCATTER, "overlap_param_gather": True}

    plan = optimal_plan(workload, link, **choices)

    assert simulate_step_s(workload, plan, link, **choices) <= exact_s * 1.01


# The searches by themselves, against plain enumeration of the recurrence, up to 12 items #


@st.composite
def sides(draw, count):
    due = list(itertools.accumulate(draw(st.lists(TIMES, min_size=count, max_size=count))))
    return Side(tuple(due), due[-1])


@st.composite
def problems(draw, num_sides):
    numels = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    elements = tuple(itertools.accumulate(numels, initial=0))
    costs = tuple(Affine(draw(TIMES), draw(st.integers(0, 50)) / 1000) for _ in range(num_sides))
    return elements, tuple(draw(sides(len(numels))) for _ in range(num_sides)), costs


def finishes(cuts, elements, due_s, cost):
    """Return the finish of each bucket: the recurrence for given cuts, ``cost`` a function of elements."""
    finish, start, ends = 0.0, 0, []
    for cut in cuts:
        finish = max(finish, due_s[cut - 1]) + cost(elements[cut] - elements[start])
        start = cut
        ends.append(finish)
    return ends


def total(cuts, elements, sides_, functions):
    pairs = zip(sides_, functions, strict=True)
    return sum(max(finishes(cuts, elements, side.due_s, cost)[-1], side.floor_s) for side, cost in pairs)


def all_cuts(count):
    for inner in itertools.product([False, True], repeat=count - 1):
        yield tuple(position for position, cut in enumerate([*inner, True], start=1) if cut)


def lines(costs):
    return [lambda numel, cost=cost: cost.latency_s + cost.seconds_per_byte * numel for cost in costs]


@settings(max_examples=60)
@given(problems(1))
def test_one_side_gets_the_earliest_finish_with_the_fewest_buckets(problem):
    elements, (side,), (cost,) = problem
    every = {cuts: total(cuts, elements, (side,), lines((cost,))) for cuts in all_cuts(len(elements) - 1)}
    shortest = min(every.values())

    cuts = shortest_cuts(elements, (side,), (cost,))

    assert every[cuts] == pytest.approx(shortest, rel=1e-11)
    assert len(cuts) == min(len(each) for each, value in every.items() if value <= shortest * (1 + 1e-13))


@settings(max_examples=60)
@given(problems(1))
def test_the_queue_gives_the_earliest_finish_of_every_prefix(problem):
    elements, (side,), (cost,) = problem
    (line,) = lines((cost,))
    expected = [0.0]
    for stop in range(1, len(elements)):
        starts = [max(expected[start], side.due_s[stop - 1]) + line(elements[stop] - elements[start]) for start in range(stop)]
        expected.append(min(starts))

    assert finish_times(elements, side.due_s, cost) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=40)
@given(problems(2))
def test_two_sides_get_the_smallest_sum(problem):
    elements, both, costs = problem
    functions = lines(costs)
    shortest = min(total(cuts, elements, both, functions) for cuts in all_cuts(len(elements) - 1))

    by_line = shortest_cuts(elements, both, costs)

    assert total(by_line, elements, both, functions) == pytest.approx(shortest, rel=1e-10)


@settings(max_examples=60)
@given(workloads(max_tensors=12), MEASURED, CHOICES)
def test_a_table_gets_a_plan_no_longer_than_one_bucket_or_one_for_each_tensor(workload, link, choices):
    plan = optimal_plan(workload, link, num_ranks=4, **choices)

    step_s = simulate_step_s(workload, plan, link, num_ranks=4, **choices)
    for other in (single_plan(workload), uniform_plan(workload, 1)):
        assert step_s <= simulate_step_s(workload, other, link, num_ranks=4, **choices) * (1 + 1e-9) + 1e-9


@settings(max_examples=60)
@given(workloads(max_tensors=8), FLAT, CHOICES)
def test_a_table_of_a_straight_line_is_cut_as_that_line_is(workload, flat, choices):
    most_bytes = 4 * workload.numel + 8
    points = tuple((size, flat.latency_s + flat.seconds_per_byte * size) for size in (0, most_bytes // 2, most_bytes))
    table = MeasuredLink.of({(kind, "float32"): points for kind in CollectiveKind}, num_ranks=4)

    plans = [optimal_plan(workload, link, num_ranks=4, **choices) for link in (flat, table)]

    line_s, table_s = (simulate_step_s(workload, plan, flat, num_ranks=4, **choices) for plan in plans)
    assert table_s == pytest.approx(line_s, rel=1e-9, abs=1e-9)


# Larger models #


def large(count, seed=0):
    """A model with tensors of very different sizes and times that are not quite proportional to them."""
    rng = random.Random(seed)
    numels = [int(10 ** rng.uniform(3, 7.5)) for _ in range(count)]
    weights = [numel * rng.uniform(0.5, 1.5) for numel in numels]
    scale = 1 / sum(weights)
    rows = zip(numels, weights, strict=True)
    return Workload(tuple(TensorWork(f"t{i}", n, w * scale, w * scale / 2) for i, (n, w) in enumerate(rows)))


@pytest.mark.parametrize("latency_s", [1e-5, 1e-3, 2e-2])
@pytest.mark.parametrize("share", [0.3, 0.9, 3.0])
def test_both_modes_of_2000_tensors_lie_between_the_bound_and_every_uniform_size(share, latency_s):
    workload = large(2_000)
    link = flat(latency_s, share / (4 * workload.numel))

    for choices in ({"mode": Mode.ALL_REDUCE}, {"mode": Mode.REDUCE_SCATTER, "overlap_param_gather": True}):
        plan = optimal_plan(workload, link, num_ranks=2, **choices)
        step_s = simulate_step_s(workload, plan, link, num_ranks=2, **choices)
        sizes = [workload.numel // 2**exponent for exponent in range(12)]
        uniform_s = min(simulate_step_s(workload, uniform_plan(workload, size), link, num_ranks=2, **choices) for size in sizes)
        assert lower_bound_s(workload, link, num_ranks=2, **choices) <= step_s * (1 + 1e-9)
        assert step_s <= uniform_s * (1 + 1e-9)


def test_a_table_that_is_no_line_is_cut_better_than_into_any_uniform_size():
    workload = large(300)
    points = tuple((2.0**k, 2e-3 + 2.0**k * 1.1 / (4 * workload.numel) * (1.05 if k % 4 else 0.95)) for k in range(10, 34, 2))
    link = MeasuredLink.of({(kind, "float32"): points for kind in CollectiveKind}, num_ranks=2)
    choices = {"mode": Mode.REDUCE_SCATTER, "overlap_param_gather": True}

    plan = optimal_plan(workload, link, num_ranks=2, **choices)

    step_s = simulate_step_s(workload, plan, link, num_ranks=2, **choices)
    sizes = [workload.numel // 2**exponent for exponent in range(10)]
    uniform_s = min(simulate_step_s(workload, uniform_plan(workload, size), link, num_ranks=2, **choices) for size in sizes)
    assert lower_bound_s(workload, link, num_ranks=2, **choices) <= step_s
    assert step_s <= uniform_s


def test_100_000_tensors_are_cut_optimally_in_both_modes():
    workload = large(100_000)
    link = flat(1e-3, 0.9 / (4 * workload.numel))

    one, two = (
        optimal_plan(workload, link, num_ranks=2, mode=mode, overlap_param_gather=mode is Mode.REDUCE_SCATTER) for mode in Mode
    )

    for plan, mode in ((one, Mode.ALL_REDUCE), (two, Mode.REDUCE_SCATTER)):
        choices = {"mode": mode, "overlap_param_gather": mode is Mode.REDUCE_SCATTER}
        step_s = simulate_step_s(workload, plan, link, num_ranks=2, **choices)
        assert lower_bound_s(workload, link, num_ranks=2, **choices) <= step_s * (1 + 1e-9)
        assert step_s <= simulate_step_s(workload, uniform_plan(workload, 10**9), link, num_ranks=2, **choices)


# Corners #


def test_a_model_without_elements_is_one_bucket_that_sends_nothing():
    workload = Workload((TensorWork("a", 0, 1.0), TensorWork("b", 0, 2.0)))

    plan = optimal_plan(workload, flat(1.0, 1.0), num_ranks=2, mode=Mode.ALL_REDUCE)

    assert plan.num_collectives(workload) == 0
    assert simulate_step_s(workload, plan, flat(1.0, 1.0), num_ranks=2, mode=Mode.ALL_REDUCE) == 3.0


def test_a_free_link_gets_one_bucket_and_a_free_launch_gets_small_ones_where_that_helps():
    workload = Workload(tuple(TensorWork(f"t{i}", 10, 1.0) for i in range(4)))

    free = optimal_plan(workload, ring(0.0, 1e12), num_ranks=1, mode=Mode.ALL_REDUCE)
    busy = optimal_plan(workload, flat(0.0, 0.05), num_ranks=2, mode=Mode.ALL_REDUCE)

    assert len(free.buckets) == 1  # one rank sends in no time
    # 2 s per tensor, busy from the first gradient on: sends 1 to 3, 3 to 5, and by then the other two are ready.
    assert [len(bucket) for bucket in busy.buckets] == [1, 1, 2]


def test_the_cuts_of_an_expensive_launch_are_few_and_their_last_bucket_is_small():
    workload = Workload(tuple(TensorWork(f"t{i}", 10, 1.0) for i in range(6)))

    plan = optimal_plan(workload, flat(1.5, 0.01), num_ranks=2, mode=Mode.ALL_REDUCE)

    # By hand: 6 s of backward, then at least one bucket: 1.5 + 0.4. With two, the first must be done by then: 3 tensors are
    # ready at 3 and done at 3 + 1.5 + 1.2 = 5.7, 4 would be done at 4 + 1.5 + 1.6 = 7.1. So 6 + 1.5 + 3 * 0.4 = 8.7.
    assert simulate_step_s(workload, plan, flat(1.5, 0.01), num_ranks=2, mode=Mode.ALL_REDUCE) == pytest.approx(8.7)


def test_a_link_that_does_not_know_the_operation_says_so():
    link = MeasuredLink.of({(CollectiveKind.ALL_REDUCE, "float32"): ((0, 0.0), (8, 1.0))}, num_ranks=2)

    with pytest.raises(ConfigError, match="no table for reduce_scatter"):
        optimal_plan(Workload((TensorWork("a", 1),)), link, num_ranks=2, mode=Mode.REDUCE_SCATTER)


def test_affine_cuts_need_no_numpy():
    code = (
        "import sys; from megabucket.planning.partition import *; from megabucket.planning.links import FlatLink\n"
        "from megabucket.planning.workload import TensorWork\n"
        "workload = Workload((TensorWork('a', 3, 1.0), TensorWork('b', 4, 1.0)))\n"
        "optimal_plan(workload, FlatLink(latency_s=0.1, seconds_per_byte=0.1), num_ranks=2, mode=Mode.REDUCE_SCATTER)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@settings(max_examples=60)
@given(workloads(max_tensors=8), AFFINE_LINKS)
def test_in_all_reduce_mode_the_gather_side_counts_for_nothing(workload, link):
    plans = [
        optimal_plan(workload, link, num_ranks=4, mode=Mode.ALL_REDUCE, overlap_param_gather=gather) for gather in (False, True)
    ]

    assert plans[0] == plans[1]
