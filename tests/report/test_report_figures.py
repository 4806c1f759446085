"""The figures of a report: against the simulator called by hand, and against what is owned element by element."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import book, model_run, report, small, tensors, zero

from megabucket.errors import ConfigError
from megabucket.layout import shard_slices
from megabucket.planning import RunConfig
from megabucket.planning.advice import SIMULATED
from megabucket.planning.setting import setting_of
from megabucket.planning.simulate import Mode, simulate_step_s
from megabucket.report.collect import OWNERS_SHOWN, bucket_rows
from megabucket.testing import model_layouts


def test_the_sweep_of_the_book_is_output_15_5_2():
    sizes = [300_000, 600_000, 1_500_000, 4_000_000, 10_000_000, 25_000_000, 50_000_000, 76_400_000]

    figures = report(book(sweep={"bucket_numel": sizes}), dp_size=8)

    steps_s = [row.step_s for row in figures.outlook.rows]
    assert [round(step_s * 1e3, 1) for step_s in steps_s] == [142.9, 126.6, 121.6, 121.6, 121.6, 141.4, 165.7, 165.7]
    assert round(figures.outlook.no_overlap_s * 1e3, 1) == 234.3
    assert round(figures.setting.workload.compute_s * 1e3, 1) == 91.7
    assert figures.plan("optimal").step_s == pytest.approx(figures.outlook.lower_bound_s)


def test_the_best_size_is_the_largest_of_those_that_tie():
    figures = report(book(sweep={"bucket_numel": [1_500_000, 10_000_000, 4_000_000]}))

    assert figures.plan("uniform").row.bucket_numel == 10_000_000


@pytest.mark.parametrize("dp_size", [1, 2, 64])
def test_plans_are_ordered_by_what_they_can_choose(dp_size):
    figures = report(zero(), dp_size=dp_size)
    tolerance = 1 + 1e-9

    uniform, optimal = figures.plan("uniform"), figures.plan("optimal")
    assert figures.outlook.lower_bound_s <= optimal.step_s * tolerance
    assert optimal.step_s <= uniform.step_s * tolerance
    assert uniform.step_s == min(row.step_s for row in figures.outlook.rows)
    for plan in figures.plans:
        assert plan.row.exposed_s == pytest.approx(plan.step_s - figures.setting.workload.compute_s)


def test_the_config_s_plan_is_its_layout_with_padding():
    figures = report(zero(), dp_size=4)

    plan = figures.configured
    assert plan.key == "config"
    assert plan.row.bucket_numel == 1000
    # forward 1000, 300, 0, 5000, 128. From the end: 128 + 5000 close at 5128, rounded up to 41 * 128; then 0, 300 and 1000.
    assert [row["numel"] for row in figures.buckets] == [5248, 1408]
    assert [row["padding_numel"] for row in figures.buckets] == [120, 108]
    assert plan.plan.grad_bytes == (5248 * 4, 1408 * 4)
    workload, link = figures.setting.workload, figures.setting.link
    step_s = simulate_step_s(workload, plan.plan, link, num_ranks=4, mode=Mode.REDUCE_SCATTER, overlap_param_gather=True)
    assert plan.step_s == step_s


def test_without_sizes_in_the_config_its_plan_is_the_default():
    figures = report(small())

    assert [plan.key for plan in figures.plans] == ["default", "uniform", "optimal", "fewest"]
    assert figures.configured.row.bucket_numel == 40_000_000


def test_bytes_on_the_wire_are_the_workload_s_where_there_is_no_model():
    run = small(workload={"tensors": tensors(256), "bytes_per_element": 1, "param_bytes_per_element": 2})

    assert report(run).configured.plan.grad_bytes == (256,)
    assert report(run).configured.plan.param_bytes == (512,)


def test_a_model_says_dtypes_and_owners():
    figures = report(model_run(), dp_size=4)

    assert {row["buffer"] for row in figures.buckets} == {"dense/bfloat16->float32"}
    row = figures.buckets[0]
    assert row["grad_bytes"] == row["numel"] * 4
    assert row["owners"][0]["first_rank"] == 0
    assert row["owners"][-1]["last_rank"] == 3


def test_a_workload_of_another_model_is_refused():
    model = {"kind": "params", "params": [{"name": "other", "shape": [3]}]}

    with pytest.raises(ConfigError, match="is from another model"):
        report(small(model=model))


def test_a_config_without_a_link_is_refused():
    with pytest.raises(ConfigError, match="link is required"):
        report(RunConfig.model_validate({"workload": {"tensors": tensors(1)}}))


def test_a_measured_link_answers_for_its_own_ranks_only():
    table = {"kind": "table", "num_ranks": 4, "tables": [{"operation": "all_reduce", "points": [[1, 1e-5], [1000, 2e-5]]}]}

    figures = report(small(link=table), dp_size=4)

    assert [row["num_ranks"] for row in figures.scaling] == [1, 4]
    assert len(figures.memory) == 13
    assert any("says nothing about 8" in gap for gap in figures.scaling_gaps)
    with pytest.raises(ConfigError, match="measured on 4 ranks"):
        report(small(link=table), dp_size=8)


def test_scaling_and_memory_go_to_4096_ranks_and_hold_the_asked_number():
    figures = report(zero(), dp_size=48)

    ranks = [row["num_ranks"] for row in figures.scaling]
    assert ranks == sorted({*(2**power for power in range(13)), 48})
    efficiencies = [(row["config"]["efficiency"], row["optimal"]["efficiency"]) for row in figures.scaling]
    assert efficiencies[0] == (1.0, 1.0)
    for config, optimal in efficiencies[1:]:
        assert 0 < config <= optimal * (1 + 1e-9) <= 1 + 1e-9
    here = next(row for row in figures.scaling if row["num_ranks"] == 48)
    assert here["config"]["step_s"] == figures.configured.step_s
    assert here["optimal"]["step_s"] == figures.plan("optimal").step_s


def test_memory_is_sharded_in_reduce_scatter_mode_only():
    rows = {row["dp_size"]: row for row in report(small(1024)).memory}

    assert {rows[n]["all_reduce"]["moment_bytes"] for n in (1, 8)} == {1024 * 4 * 2}
    assert [rows[n]["reduce_scatter"]["moment_bytes"] for n in (1, 8)] == [1024 * 4 * 2, 1024]


@settings(max_examples=150)
@given(layout=model_layouts(dp_size=st.integers(1, 9)))
def test_owners_are_who_owns_the_elements(layout):
    by_key = {str(buffer.key): buffer for buffer in layout.buffers}

    for row in bucket_rows(layout, is_sharded=True):
        buffer, owners = by_key[row["buffer"]], row["owners"]
        if not owners:
            assert buffer.num_shards == 1 or row["numel"] == 0
            continue
        assert owners[0]["first_rank"] == 0
        assert owners[-1]["last_rank"] == buffer.num_shards - 1
        assert len(owners) <= OWNERS_SHOWN + 1
        for before, after in pairwise(owners[:OWNERS_SHOWN]):
            assert after["first_rank"] == before["last_rank"] + 1
        for owner in owners:
            for rank in range(owner["first_rank"], owner["last_rank"] + 1):
                pieces = shard_slices(buffer, bucket=row["bucket"], rank=rank)
                names = (pieces[0].param, pieces[-1].param, len(pieces)) if pieces else ("", "", 0)
                assert names == (owner["first_param"], owner["last_param"], owner["num_params"])


def test_experts_keep_their_share_of_the_ranks():
    setting = setting_of(small(), dp_size=16, expert_dp_size=4)

    assert [setting.on(n).expert_dp_size for n in (1, 4, 64)] == [1, 1, 16]


def test_all_figures_are_strict_json():
    figures = report(zero(), dp_size=4)

    data = json.loads(json.dumps(figures.to_dict(), allow_nan=False))

    assert data["schema"] == "megabucket.report"
    assert {plan["key"]: plan["step_s"] for plan in data["plans"]} == {plan.key: plan.step_s for plan in figures.plans}
    assert tuple(data["plans"][-1]["cuts"]) == tuple(figures.plans[-1].plan.cut_names(figures.setting.workload))
    assert [bucket["padding_numel"] for bucket in data["buckets"]] == [120, 108]
    assert data["memory"][0]["reduce_scatter"]["parameter_bytes"] == 6428 * 4


def test_the_first_sentence_says_what_to_do():
    # default 40 M elements: 55.68 + 2 * 1.4 + 72.58 ms; the optimal cuts end at the lower bound
    offered, kept = report(book(), dp_size=8), report(book(ddp={"bucket_size": 10_000_000}), dp_size=8)

    change = "Use ddp.bucket_size=17780452 (3 buckets) instead of the default buckets (2)"
    assert offered.summary[0] == f"{change}: saves 9.48 ms of 131.06 ms a step (7.23%), simulated."
    assert kept.summary[0].startswith("Keep this config's buckets: ")
    assert kept.summary[-1] == SIMULATED


def test_a_long_computation_says_what_it_does():
    told = []

    report(small(), note=told.append)

    assert told[0] == "comparing bucket sizes"
    assert told[-1] == "the layout"
