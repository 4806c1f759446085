"""Settings, sweeps, scaling and the ladder, as Python values."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from timing_cases import AFFINE_LINKS, flat, ring, workloads

from examples.ladder_counts import ladder
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec
from megabucket.planning import RunConfig, load_config
from megabucket.planning.memory import memory_by_mode
from megabucket.planning.setting import Setting, outlook_of, scaling, setting_of, sizes_to_sweep
from megabucket.planning.workload import TensorWork, Workload
from megabucket.trace import CollectiveKind
from megabucket.units import MIB

RS = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)


@settings(max_examples=60)
@given(workloads(), AFFINE_LINKS, st.sampled_from([DistributedDataParallelConfig(), RS]))
def test_the_figures_of_a_setting_agree_with_each_other(workload, link, ddp):
    outlook = outlook_of(Setting(workload, link, ddp, dp_size=4))
    out = outlook.to_dict()

    assert out["lower_bound_s"] <= out["optimal"]["step_s"] * (1 + 1e-9) + 1e-12
    assert out["optimal"]["step_s"] <= outlook.best.step_s * (1 + 1e-9) + 1e-12
    assert outlook.best.step_s <= min(row["step_s"] for row in out["rows"]) * (1 + 1e-9) + 1e-12
    assert out["optimal"]["buckets"] <= len(workload.tensors)
    assert out["optimal"]["cuts"][-1] == workload.tensors[workload.order[-1]].name
    for row in out["rows"]:
        assert row["step_s"] == pytest.approx(out["compute_s"] + row["exposed_s"], rel=1e-9, abs=1e-9)


def test_what_follows_the_buckets_depends_on_mode_fence_and_ranks():
    workload, specs = Workload((TensorWork("a", 8),)), (ParamSpec("a", (8,)),)

    def kinds(dp_size, has_grad_norm=True, **fields):
        config, more = DistributedDataParallelConfig(**fields), {"specs": specs, "has_grad_norm": has_grad_norm}
        setting = Setting(workload, flat(1.0, 0.0), config, dp_size=dp_size, **more)
        return [size for _, size in setting.step_collectives]

    assert kinds(2) == [48]
    assert kinds(2, use_distributed_optimizer=True) == [48, 8]
    assert kinds(2, use_distributed_optimizer=True, has_grad_norm=False) == [48]
    assert kinds(2, fence=False) == []
    assert kinds(1, use_distributed_optimizer=True) == []
    assert Setting(workload, flat(1.0, 0.0), RS, dp_size=2).step_collectives == ()


def test_one_group_of_all_buckets_goes_out_after_backward():
    workload = Workload((TensorWork("a", 1, 1.0), TensorWork("b", 1, 1.0)))
    single = Setting(
        workload,
        flat(1.0, 0.0),
        DistributedDataParallelConfig(bucket_groups="single"),
        dp_size=2,
    )

    assert not single.overlap_grad_reduce
    assert single.step_s(single.plan_of_size(1)) == 2.0 + 2 * 1.0


def test_experts_are_reduced_over_their_own_ranks():
    specs = (ParamSpec("dense", (8,)), ParamSpec("expert", (8,), group="expert"))
    workload = Workload((TensorWork("dense", 8), TensorWork("expert", 8)))
    sizes = {"group_sizes": {"expert": 2}, "specs": specs}
    setting = Setting(workload, ring(1.0, 1e9), DistributedDataParallelConfig(), dp_size=8, **sizes)

    trace = setting.traces(setting.plan_of_size(None), num_steps=1)[0]

    assert [(record.label, record.num_ranks) for record in trace.collectives] == [
        ("bucket 0", 2),
        ("bucket 1", 8),
        ("step collective 0", 8),
    ]
    assert setting.on(64).expert_dp_size == 16


THREE_GROUPS = """
model:
  kind: params
  params:
    - {name: dense, shape: [256]}
    - {name: expert, shape: [256], group: expert}
    - {name: vision, shape: [256], group: vision}
link: {kind: ring, latency_s: 1, bytes_per_s: 1.0e+9}
workload: {tokens_per_microbatch: 1, flops_per_s: 1}
group_sizes: {vision: 4}
mode: reduce_scatter
"""


def test_each_named_group_has_its_own_ranks_in_plans_figures_and_memory(tmp_path):
    (tmp_path / "run.yaml").write_text(THREE_GROUPS)
    run = load_config(tmp_path / "run.yaml", ["ddp.fence=false"])

    setting = setting_of(run, dp_size=16, expert_dp_size=2)

    trace = setting.traces(setting.plan_of_size(None), num_steps=1)[0]
    ranks = {record.label: record.num_ranks for record in trace.collectives if record.label.startswith("bucket")}
    assert sorted(ranks.values()) == [2, 4, 16]
    assert setting.on(8).group_sizes == {"vision": 2, "expert": 1}
    # A ring of n ranks takes n - 1 s for each way, besides bytes that take no time to speak of.
    assert setting.no_overlap_s - setting.workload.compute_s == pytest.approx(2 * (1 + 3 + 15) + 2 * 15, abs=0.1)
    memory = memory_by_mode(setting.specs, run.ddp, dp_size=16, group_sizes=setting.group_sizes)["reduce_scatter"]
    assert memory.moment_bytes == 8 * (256 // 16 + 256 // 4 + 256 // 2)


OVERTAKING = Workload(  # the bucket of t1 is closed, and sent, while the one that begins with t2 waits for t0
    (TensorWork("t0", 0, 0.0, 0.0), TensorWork("t1", 1, 0.0, 0.0), TensorWork("t2", 0, 1e-3, 0.0)), ready_order=(0, 1, 2)
)


@settings(max_examples=60)
@example(OVERTAKING, flat(0.0, 1e-3), False, ["dense", "a", *["dense"] * 5], {"a": 2, "b": 4})
@given(
    workloads(),
    AFFINE_LINKS,
    st.booleans(),
    st.lists(st.sampled_from(["dense", "a", "b"]), min_size=7, max_size=7),
    st.sampled_from([{}, {"a": 2, "b": 4}]),
)
def test_no_cuts_are_below_the_bound_where_groups_have_buffers_of_their_own(workload, link, is_sharded, groups, sizes):
    specs = tuple(
        ParamSpec(each.name, (each.numel,), group=group) for each, group in zip(workload.tensors, groups, strict=False)
    )
    ddp = DistributedDataParallelConfig(
        layout="megatron", fence=False, use_distributed_optimizer=is_sharded, overlap_param_gather=is_sharded
    )
    setting = Setting(workload, link, ddp, 8, specs, sizes, has_grad_norm=False)

    for plan in (setting.optimal_plan, setting.plan_of_size(20), setting.plan_of_size(None)):
        assert setting.lower_bound_s <= setting.step_s(plan) * (1 + 1e-9) + 1e-12


def test_a_size_for_a_group_without_parameters_is_refused_by_name(tmp_path):
    (tmp_path / "run.yaml").write_text(THREE_GROUPS)
    run = load_config(tmp_path / "run.yaml", ["group_sizes.vison=4"])

    with pytest.raises(
        ConfigError, match="group_sizes has 'vison', but the parameters of the model are of 'dense', 'expert', 'vision'"
    ):
        setting_of(run, dp_size=16)


def test_efficiency_is_that_of_one_rank_alone_over_that_of_many():
    # All-reduce of 400 bytes on a ring of 100 bytes/s: 8 (n-1)/n s after 10 s of backward.
    workload = Workload((TensorWork("a", 100, 10.0),))
    setting = Setting(workload, ring(0.0, 100.0), DistributedDataParallelConfig(), dp_size=2)

    rows = scaling(setting, ranks=(1, 2, 4))

    assert [(row.num_ranks, row.step_s) for row in rows] == [(1, 10.0), (2, 14.0), (4, 16.0)]
    assert [row.efficiency for row in rows] == pytest.approx([1.0, 10 / 14, 10 / 16])


@settings(max_examples=100)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.integers(2, 30))
def test_a_sweep_goes_from_the_smallest_tensor_to_one_bucket(numels, count):
    workload = Workload(tuple(TensorWork(f"t{i}", numel) for i, numel in enumerate(numels)))

    sizes = sizes_to_sweep(workload, count=count)

    assert 1 <= len(sizes) <= count
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max(sum(numels), 1)
    assert sizes[0] == min([numel for numel in numels if numel] or [1]) or len(sizes) == 1


@settings(max_examples=60)
@given(workloads(), AFFINE_LINKS, st.booleans(), st.lists(st.booleans(), min_size=6, max_size=6))
def test_no_cuts_of_a_layout_are_shorter_whatever_order_gradients_come_in(workload, link, is_recorded, is_cut):
    names = [tensor.name for tensor in workload.tensors]
    order = tuple(names[index] for index in workload.order) if is_recorded else None
    # Unpadded, so that a cut costs what it costs in the search.
    fields = {"layout": "megatron", "fence": False, "bucket_order": order}
    specs = tuple(ParamSpec(tensor.name, (tensor.numel,)) for tensor in workload.tensors)
    setting = Setting(workload, link, DistributedDataParallelConfig(**fields), dp_size=4, specs=specs)
    cuts = tuple(name for name, cut in zip(names, is_cut, strict=False) if cut)

    other = Setting(workload, link, DistributedDataParallelConfig(**fields, bucket_cuts=cuts), dp_size=4, specs=specs)

    assert setting.lower_bound_s <= setting.step_s(setting.optimal_plan) * (1 + 1e-9) + 1e-12
    assert setting.step_s(setting.optimal_plan) <= other.step_s(other.configured_plan) * (1 + 1e-9) + 1e-12


def test_an_empty_bucket_holds_up_those_behind_it_like_any_other():
    """Here a cut right after a tensor without elements, whose turn in backward comes last."""
    tensors = (TensorWork("first", 1), TensorWork("empty", 0, backward_s=1.0))
    workload = Workload(tensors, ready_order=(0, 1))
    specs = (ParamSpec("first", (1,)), ParamSpec("empty", (0,)))
    config = DistributedDataParallelConfig(layout="megatron", fence=False, bucket_cuts=("empty",))

    setting = Setting(workload, flat(0.0, 1.0), config, dp_size=4, specs=specs)

    assert [len(bucket) for bucket in setting.configured_plan.buckets] == [1, 1]
    assert setting.step_s(setting.configured_plan) == setting.traces(setting.configured_plan)[-1].duration_s == 5.0
    assert setting.step_s(setting.optimal_plan) == 5.0


def test_a_config_without_a_link_is_refused():
    with pytest.raises(ConfigError, match="link is required"):
        setting_of(RunConfig())


# The ladder #


def count_calls(sizes_bytes, first_cap, cap):
    """Count what hooks would send: fill a bucket, send it when it is full, and send the rest."""
    calls, filled, limit = 0, 0, first_cap
    for size in sizes_bytes:
        filled += size
        if filled >= limit:
            calls, filled, limit = calls + 1, 0, cap
    return calls + (filled > 0)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 10 * MIB), min_size=1, max_size=40), st.integers(1, 5))
def test_the_ladder_counts_what_hooks_would_send(numels, num_microbatches):
    rungs = ladder(numels, bytes_per_element=4, num_microbatches=num_microbatches)

    backwards = [4 * numel for numel in reversed(numels)]
    ours, torch = count_calls(backwards, 25 * MIB, 25 * MIB), count_calls(backwards, MIB, 25 * MIB)
    assert [rung.collectives_per_sync for rung in rungs] == [*[len(numels)] * 4, ours, torch]
    assert [rung.syncs_per_step for rung in rungs] == [num_microbatches, 1, 1, 1, 1, num_microbatches]
    assert [rung.overlaps for rung in rungs] == [False, False, False, True, True, True]


def test_a_given_cap_holds_for_the_first_bucket_of_torch_ddp_too():
    numels = [MIB // 4] * 6  # 1 MiB each

    given, default = ladder(numels, bucket_cap_bytes=3 * MIB)[5], ladder(numels)[5]

    assert given.collectives_per_sync == 2  # 3 + 3
    assert default.collectives_per_sync == 2  # 1 + 5, below 25 MiB


def test_a_ladder_without_tensors_is_refused():
    with pytest.raises(ConfigError, match="at least one tensor"):
        ladder([])


def test_simulated_collectives_are_those_of_the_ladder():
    numels = [4, 9, 2, 9, 1]
    workload = Workload(tuple(TensorWork(f"t{i}", numel) for i, numel in enumerate(numels)), bytes_per_element=4)
    setting = Setting(workload, flat(1.0, 0.0), DistributedDataParallelConfig(), dp_size=2)

    buckets = ladder(numels, bytes_per_element=4, bucket_cap_bytes=40)[4].collectives_per_sync

    trace = setting.traces(setting.plan_of_size(10), num_steps=1)[0]
    assert sum(record.kind is CollectiveKind.ALL_REDUCE for record in trace.collectives) == buckets == 3
