"""The timing model: against a simulator that does one thing after the other, and theorems about any step."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing_cases import AFFINE_LINKS, CHOICES, LINKS, flat, plans, run_step_by_step, single_plan, workloads

from megabucket.errors import ConfigError
from megabucket.planning.cuts import BucketPlan, per_tensor_plan
from megabucket.planning.simulate import FENCE, GRAD_NORM, Mode, simulate_step_s, simulate_steps
from megabucket.planning.workload import TensorWork, Workload
from megabucket.trace import CollectiveKind, Lane
from megabucket.trace.step_trace import length_s

EXTRAS = st.sampled_from([(), (FENCE,), (FENCE, GRAD_NORM)])
CASES = workloads().flatmap(lambda workload: st.tuples(st.just(workload), plans(workload)))

# 2 s of forward and 4 s of backward, 6 and 3 elements; a collective takes 1 s and 0.25 s per element.
TWO = Workload((TensorWork("first", 6, 3.0, 1.5), TensorWork("head", 3, 1.0, 0.5)), optimizer_s=0.5)
LINK = flat(1.0, 0.0625)


def spans_of(trace, lane):
    return [(part.label, part.start_s, part.stop_s) for part in trace.intervals if part.lane is lane]


@settings(max_examples=80)
@given(CASES, LINKS, CHOICES, EXTRAS)
def test_every_step_takes_what_a_thread_and_a_network_card_take(case, link, choices, extras):
    workload, plan = case

    traces = simulate_steps(workload, plan, link, num_ranks=4, num_steps=3, step_collectives=extras, **choices)

    expected = run_step_by_step(workload, plan, link, num_ranks=4, step_collectives=extras, **choices)
    assert [trace.duration_s for trace in traces] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=80)
@given(CASES, LINKS, CHOICES, EXTRAS)
def test_the_fast_path_gives_the_duration_of_the_steady_state(case, link, choices, extras):
    workload, plan = case

    step_s = simulate_step_s(workload, plan, link, num_ranks=4, step_collectives=extras, **choices)

    traces = simulate_steps(workload, plan, link, num_ranks=4, num_steps=3, step_collectives=extras, **choices)
    assert [trace.duration_s for trace in traces[1:]] == pytest.approx([step_s] * 2, rel=1e-9, abs=1e-9)


@settings(max_examples=80)
@given(CASES, LINKS, CHOICES)
def test_a_thread_computes_or_waits_and_the_lane_sends_one_thing_at_a_time(case, link, choices):
    workload, plan = case

    for trace in simulate_steps(workload, plan, link, num_ranks=4, num_steps=2, **choices):
        compute, wait, comm = (spans_of(trace, lane) for lane in (Lane.COMPUTE, Lane.WAIT, Lane.COMM))
        assert trace.compute_s == pytest.approx(workload.compute_s, rel=1e-9, abs=1e-9)
        assert trace.compute_s + trace.exposed_s == pytest.approx(trace.duration_s, rel=1e-9, abs=1e-9)
        thread = sorted(span[1:] for span in compute + wait)
        assert all(stop <= start + 1e-9 for (_, stop), (start, _) in itertools.pairwise(thread))
        card = sorted(span[1:] for span in comm)
        assert all(stop <= start + 1e-9 for (_, stop), (start, _) in itertools.pairwise(card))
        assert all(trace.start_s <= start <= stop <= trace.stop_s + 1e-9 for _, start, stop in compute + wait + comm)
        # Waiting without anything on the lane would be waiting for nothing.
        waiting = [(start, stop) for _, start, stop in wait]
        sending = [(start, stop) for _, start, stop in comm]
        assert length_s(waiting) == pytest.approx(trace.exposed_s, rel=1e-9, abs=1e-9)
        assert length_s(waiting, outside=sending) == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=80)
@given(CASES, LINKS, CHOICES)
def test_each_bucket_with_bytes_is_one_collective_of_all_its_bytes(case, link, choices):
    workload, plan = case

    trace = simulate_steps(workload, plan, link, num_ranks=4, **choices)[-1]

    reduced = [r for r in trace.collectives if r.kind is not CollectiveKind.ALL_GATHER]
    gathered = [r for r in trace.collectives if r.kind is CollectiveKind.ALL_GATHER]
    assert len(reduced) == plan.num_collectives(workload)
    assert sum(record.payload_bytes for record in reduced) == 4 * workload.numel
    is_sharded = choices["mode"] is Mode.REDUCE_SCATTER
    assert sum(record.payload_bytes for record in gathered) == workload.param_bytes_per_element * workload.numel * is_sharded


@settings(max_examples=80)
@given(CASES, LINKS)
def test_without_overlap_a_step_is_the_sum_of_its_parts(case, link):
    workload, plan = case

    step_s = simulate_step_s(workload, plan, link, num_ranks=4, mode=Mode.ALL_REDUCE, overlap_grad_reduce=False)

    sizes = [size for size in plan.grad_sizes_bytes(workload) if size]
    costs = [link.collective_s(CollectiveKind.ALL_REDUCE, size, 4) for size in sizes]
    assert step_s == pytest.approx(workload.compute_s + sum(costs), rel=1e-9, abs=1e-9)


@settings(max_examples=80)
@given(CASES, LINKS)
def test_overlap_never_makes_a_step_longer(case, link):
    workload, plan = case

    def step_s(reduce, gather):
        choices = {"overlap_grad_reduce": reduce, "overlap_param_gather": gather}
        return simulate_step_s(workload, plan, link, num_ranks=4, mode=Mode.REDUCE_SCATTER, **choices)

    assert step_s(True, True) <= step_s(True, False) + 1e-9
    assert step_s(True, False) <= step_s(False, False) + 1e-9


@settings(max_examples=80)
@given(CASES, st.tuples(AFFINE_LINKS, st.floats(1, 10)), CHOICES)
def test_a_step_is_no_shorter_on_a_slower_link(case, link_and_factor, choices):
    (workload, plan), (link, factor) = case, link_and_factor
    reduce, gather = CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER
    affine = {kind: link.affine(kind, 4) for kind in (reduce, gather)}

    later = flat(factor * affine[reduce].latency_s, affine[reduce].seconds_per_byte)
    narrower = flat(affine[reduce].latency_s, factor * affine[reduce].seconds_per_byte)
    base = flat(*affine[reduce])
    step_s = [simulate_step_s(workload, plan, each, num_ranks=4, **choices) for each in (base, later, narrower)]

    assert step_s[0] <= step_s[1] + 1e-9
    assert step_s[0] <= step_s[2] + 1e-9


@settings(max_examples=80)
@given(workloads(), LINKS, CHOICES, st.integers(1, 4))
def test_another_microbatch_adds_its_compute_and_sends_nothing(workload, link, choices, more):
    plan = per_tensor_plan(workload)
    fields = {name: getattr(workload, name) for name in ("tensors", "param_bytes_per_element", "optimizer_s", "ready_order")}
    longer = Workload(num_microbatches=workload.num_microbatches + more, **fields)

    step_s = [simulate_step_s(each, plan, link, num_ranks=4, **choices) for each in (workload, longer)]

    assert step_s[1] - step_s[0] == pytest.approx(more * (workload.forward_s + workload.backward_s), abs=1e-9)


def test_buckets_go_out_while_backward_runs_and_the_last_one_is_waited_for():
    trace = simulate_steps(TWO, per_tensor_plan(TWO), LINK, num_ranks=2, mode=Mode.ALL_REDUCE)[0]

    # Forward 2 s. Backward: head ready at 3, first at 6. Costs 1 + 0.25 * 3 = 1.75 and 1 + 0.25 * 6 = 2.5.
    assert spans_of(trace, Lane.COMM) == [("bucket 0", 3.0, 4.75), ("bucket 1", 6.0, 8.5)]
    assert spans_of(trace, Lane.COMPUTE) == [("forward", 0.0, 2.0), ("backward", 2.0, 6.0), ("optimizer", 8.5, 9.0)]
    assert spans_of(trace, Lane.WAIT) == [("bucket 1", 6.0, 8.5)]
    assert trace.overlap_fraction == pytest.approx(1.75 / 4.25)


def test_overlapped_gathers_lie_in_the_next_step_and_forward_waits_where_it_needs_them():
    steps = simulate_steps(
        TWO, per_tensor_plan(TWO), LINK, num_ranks=2, mode=Mode.REDUCE_SCATTER, overlap_param_gather=True, num_steps=2
    )

    start = steps[1].start_s
    # Gathers in reverse bucket order: bucket 1 (first) is there after 2.5 s, bucket 0 (head) 1.75 s later; first computes 1.5.
    assert spans_of(steps[1], Lane.COMM)[:2] == [
        ("param gather 1", start, start + 2.5),
        ("param gather 0", start + 2.5, start + 4.25),
    ]
    assert spans_of(steps[1], Lane.WAIT)[:2] == [
        ("param gather 1", start, start + 2.5),
        ("param gather 0", start + 4.0, start + 4.25),
    ]
    assert [record.label for record in steps[0].collectives] == ["bucket 0", "bucket 1", "param gather 1", "param gather 0"]
    assert spans_of(steps[0], Lane.COMM) == [("bucket 0", 3.0, 4.75), ("bucket 1", 6.0, 8.5)]


def test_gathers_without_overlap_end_the_step():
    trace = simulate_steps(TWO, single_plan(TWO), LINK, num_ranks=2, mode=Mode.REDUCE_SCATTER, num_steps=1)[0]

    assert spans_of(trace, Lane.COMM) == [("bucket 0", 6.0, 9.25), ("param gather 0", 9.75, 13.0)]
    assert trace.stop_s == 13.0


def test_a_bucket_of_tensors_without_elements_sends_nothing():
    workload = Workload((TensorWork("empty", 0, 1.0), TensorWork("full", 4, 1.0)))

    trace = simulate_steps(workload, per_tensor_plan(workload), LINK, num_ranks=2, mode=Mode.ALL_REDUCE)[-1]

    assert [record.label for record in trace.collectives] == ["bucket 0"]
    assert trace.duration_s == 3.0  # full: ready at 1, sent until 3; empty: ready at 2, nothing to send


def test_the_plan_may_say_what_its_buckets_send_and_on_how_many_ranks():
    workload = Workload((TensorWork("a", 1, 1.0), TensorWork("b", 1, 1.0)))
    plan = BucketPlan(((1,), (0,)), grad_bytes=(64, 128), param_bytes=(32, 64), num_ranks=(4, 2))

    trace = simulate_steps(workload, plan, LINK, num_ranks=4, mode=Mode.REDUCE_SCATTER)[-1]

    found = [(record.label, record.payload_bytes, record.num_ranks) for record in trace.collectives]
    assert found == [("bucket 0", 64, 4), ("bucket 1", 128, 2), ("param gather 1", 64, 2), ("param gather 0", 32, 4)]


@pytest.mark.parametrize(
    ("buckets", "text"),
    [
        (((0,),), "each of the workload's 2 tensors once"),
        (((0, 1), (1,)), "each of the workload's 2 tensors once"),
        (((0, 2),), "each of the workload's 2 tensors once"),
        (((0, 1), ()), "without tensors"),
    ],
)
def test_a_plan_of_something_else_is_refused(buckets, text):
    with pytest.raises(ConfigError, match=text):
        simulate_step_s(TWO, BucketPlan(buckets), LINK, num_ranks=2, mode=Mode.ALL_REDUCE)


@pytest.mark.parametrize("num_steps", [0, -1, True, 1.5])
def test_a_number_of_steps_that_is_none_is_refused(num_steps):
    with pytest.raises(ConfigError, match="num_steps"):
        simulate_steps(TWO, single_plan(TWO), LINK, num_ranks=2, mode=Mode.ALL_REDUCE, num_steps=num_steps)


@pytest.mark.parametrize("num_ranks", [0, -2])
def test_a_number_of_ranks_that_is_none_is_refused(num_ranks):
    with pytest.raises(ConfigError, match="num_ranks"):
        simulate_step_s(TWO, single_plan(TWO), LINK, num_ranks=num_ranks, mode=Mode.ALL_REDUCE)


def test_planning_needs_no_torch():
    modules = ["simulate", "partition", "setting", "candidates", "workload"]
    imports = "; ".join(f"import megabucket.planning.{each}" for each in modules)
    code = f"import sys; {imports}; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
