"""Shards inside replicas (``num_distributed_optimizer_instances``) in plan, memory, simulation and report."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing_cases import AFFINE_LINKS, plan_of, ring, workloads
from typer.testing import CliRunner

from megabucket.cli.main import app
from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec
from megabucket.planning import RunConfig
from megabucket.planning.links import MeasuredLink, ReplicatedLink, TwoLevelLink
from megabucket.planning.memory import memory_by_mode
from megabucket.planning.partition import optimal_plan
from megabucket.planning.setting import Setting, outlook_of
from megabucket.planning.simulate import Mode, simulate_step_s
from megabucket.planning.workload import TensorWork, Workload
from megabucket.report import collect
from megabucket.testing.strategies import dp_sizes, param_specs
from megabucket.trace import CollectiveKind

RS = DistributedDataParallelConfig(use_distributed_optimizer=True)
SPECS = (ParamSpec("a", (128,)), ParamSpec("b", (256,)), ParamSpec("e", (256,), group="expert"))
RUN = {
    "model": {"kind": "params", "params": [{"name": "a", "shape": [128]}, {"name": "b", "shape": [256]}]},
    "ddp": {"use_distributed_optimizer": True, "bucket_size": 1},
    "num_distributed_optimizer_instances": 2,
}


def test_a_step_sends_what_the_grid_of_shards_and_replicas_needs():
    """8 ranks, 2 replicas of 4 shards; experts on 4 ranks, 2 replicas of 2 shards. Rings: S (n-1)/n, all-reduce twice that."""
    workload = Workload(tuple(TensorWork(spec.name, spec.numel) for spec in SPECS))
    setting = Setting(workload, ring(1.0, 1e9), RS, 8, SPECS, {"expert": 4}, num_instances=2)

    (trace,) = setting.traces(setting.plan_of_size(1), num_steps=1)

    dense, expert = 256 * 4, 256 * 4  # bytes; b and e alone, then a
    assert [(record.label, record.kind.value, record.num_ranks, record.wire_bytes) for record in trace.collectives] == [
        ("bucket 0", "reduce_scatter", 2, expert / 2),
        ("bucket 0 over replicas", "all_reduce", 2, expert / 2),
        ("bucket 1", "reduce_scatter", 4, dense * 3 / 4),
        ("bucket 1 over replicas", "all_reduce", 2, dense / 4),
        ("bucket 2", "reduce_scatter", 4, dense / 2 * 3 / 4),
        ("bucket 2 over replicas", "all_reduce", 2, dense / 2 / 4),
        ("step collective 0", "all_reduce", 8, 2 * 48 * 7 / 8),
        ("step collective 1", "all_reduce", 8, 2 * 8 * 7 / 8),
        ("param gather 2", "all_gather", 4, dense / 2 * 3 / 4),
        ("param gather 1", "all_gather", 4, dense * 3 / 4),
        ("param gather 0", "all_gather", 2, expert / 2),
    ]


def test_the_all_reduce_of_a_bucket_follows_its_reduce_scatter():
    """A ring of 4 takes 3 s for latency in a reduce-scatter, one of 2 takes 2 s for an all-reduce; two buckets."""
    workload = Workload((TensorWork("a", 4, 1.0), TensorWork("b", 4, 1.0)))
    setting = Setting(workload, ring(1.0, 1e300), RS, 8, num_instances=2)

    (trace,) = setting.traces(setting.plan_of_size(1), num_steps=1)

    comm = [(each.label, each.start_s, each.stop_s) for each in trace.intervals if each.lane.value == "comm"]
    assert comm[:4] == [
        ("bucket 0", 1.0, 4.0),
        ("bucket 0 over replicas", 4.0, 6.0),
        ("bucket 1", 6.0, 9.0),
        ("bucket 1 over replicas", 9.0, 11.0),
    ]


@settings(max_examples=60)
@given(workloads(max_tensors=6), AFFINE_LINKS, st.sampled_from([2, 4]), st.booleans())
def test_no_plan_on_a_grid_is_shorter_than_the_optimal_one(workload, link, num_instances, overlaps):
    grid = ReplicatedLink(link=link, num_instances=num_instances)
    choices = {"num_ranks": 4, "mode": Mode.REDUCE_SCATTER, "overlap_param_gather": overlaps}

    step_s = simulate_step_s(workload, optimal_plan(workload, grid, **choices), grid, **choices)

    cuts = itertools.product([False, True], repeat=len(workload.tensors) - 1)
    shortest_s = min(simulate_step_s(workload, plan_of(workload, each), grid, **choices) for each in cuts)
    assert step_s == pytest.approx(shortest_s, rel=1e-9, abs=1e-9)


def test_over_a_table_no_plan_on_a_grid_is_below_the_bound_nor_above_the_optimal_one_of_the_sweep():
    """A table that is nearly flat and then steep: its fitted line lies above some of its points."""
    points = ((1e3, 1e-3), (1e6, 1.1e-3), (1e8, 1e-1))
    kinds = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
    link = MeasuredLink.of({(kind, "float32"): points for kind in kinds}, num_ranks=2)
    workload = Workload(tuple(TensorWork(f"t{index}", 10_000, 1e-5, 1e-5) for index in range(24)))
    setting = Setting(workload, link, RS, 4, num_instances=2)

    outlook = outlook_of(setting)

    assert outlook.lower_bound_s <= outlook.optimal.step_s <= outlook.best.step_s * (1 + 1e-9)


def test_replicas_of_a_shard_lie_in_other_nodes_where_a_replica_fills_one():
    """Nodes of 8: with 8 shards the replicas are one in each node, with 4 shards two."""
    inside, between = ring(1.0, 1e300), ring(10.0, 1e300)
    grid = ReplicatedLink(link=TwoLevelLink(inside=inside, between=between, ranks_per_node=8), num_instances=4)

    assert grid.over_replicas_s(8.0, 8) == 2 * 3 * 10.0
    assert grid.over_replicas_s(8.0, 4) == 2 * 1 * 1.0 + 2 * 1 * 10.0
    assert grid.affine(CollectiveKind.REDUCE_SCATTER, 8).latency_s == 7 * 1.0 + 2 * 3 * 10.0


@settings(max_examples=60)
@given(specs=param_specs(), shards=dp_sizes(max_size=16), num_instances=st.integers(1, 8))
def test_a_rank_holds_what_it_holds_in_one_replica_alone(specs, shards, num_instances):
    """Replicas change nothing but the fence, which a rank alone does not have; all-reduced gradients know no shards."""
    on_grid = memory_by_mode(specs, RS, dp_size=shards * num_instances, num_instances=num_instances)
    alone, plain = (memory_by_mode(specs, RS, dp_size=size) for size in (shards, shards * num_instances))

    fence_bytes = 48 if shards == 1 < num_instances else 0
    assert on_grid["reduce_scatter"].total_bytes == alone["reduce_scatter"].total_bytes + fence_bytes
    assert on_grid["all_reduce"] == plain["all_reduce"]


def test_plan_and_report_cut_for_the_ranks_of_one_replica(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({**RUN, "link": {"latency_s": 1e-3, "seconds_per_byte": 1e-9}}))
    rate = {"tokens_per_microbatch": 100, "flops_per_s": 1e9}

    planned = CliRunner().invoke(app, ["plan", "-c", str(config), "--dp-size", "8", "--json"])
    run = RunConfig.model_validate({**RUN, "link": {"latency_s": 1e-3, "seconds_per_byte": 1e-9}, "workload": rate})
    figures = collect(run, dp_size=8)

    assert {bucket["num_shards"] for bucket in json.loads(planned.stdout)["buckets"]} == {4}
    assert {row["num_shards"] for row in figures.buckets} == {4}
    assert figures.to_dict()["num_instances"] == 2
    assert [row["num_ranks"] for row in figures.scaling] == [2**exponent for exponent in range(13)]  # also those fewer than 2


@pytest.mark.parametrize(
    ("changes", "dp_size", "text"),
    [
        ({}, 3, "does not divide the ranks of dense: 3"),
        ({"ddp": {}}, 4, "only with ddp.use_distributed_optimizer=True"),
    ],
)
def test_instances_that_make_no_grid_are_refused(tmp_path, changes, dp_size, text):
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({**RUN, **changes}))

    result = CliRunner().invoke(app, ["plan", "-c", str(config), "--dp-size", str(dp_size)])

    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
