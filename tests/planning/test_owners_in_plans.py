"""Optimizers that update whole tensors, in plans: operations, bytes that travel, memory, and the simulated step."""

import json

import pytest
from hypothesis import given
from typer.testing import CliRunner

from megabucket.cli.main import app
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec, build_layout, newton_schulz_flop, plan_exchange, plan_owners
from megabucket.planning.architecture import param_specs as specs_of
from megabucket.planning.cuts import BucketPlan, plan_of_layout
from megabucket.planning.links import FlatLink
from megabucket.planning.memory import memory_by_mode, rank_memory
from megabucket.planning.owners import (
    RankTraffic,
    describe_owners,
    owned_flop,
    owner_exchange_bytes,
    rank_traffic,
)
from megabucket.planning.run_config import load_config
from megabucket.planning.setting import outlook_of, setting_of
from megabucket.planning.simulate import FENCE, GRAD_NORM, Mode, simulate_step_s, simulate_steps
from megabucket.planning.workload import TensorWork, Workload, hidden_matrices
from megabucket.testing import OwnerInput, dp_sizes, layout_inputs, owner_inputs, param_specs
from megabucket.trace import CollectiveKind, Lane

SMALL = layout_inputs(specs=param_specs(max_params=8, max_numel=3_000), dp_size=dp_sizes(max_size=16))
CASES = owner_inputs(inputs=SMALL).map(OwnerInput.build)


def llama_8b(dp_size, **ddp):
    specs = specs_of(load_config("llama3-8b").model)
    layout = build_layout(specs, DistributedDataParallelConfig(**ddp), dp_size=dp_size)
    return layout, plan_owners(layout, hidden_matrices(specs))


# The figures of a model of 8 B #


def test_all_updates_of_8b_on_one_rank_take_1665_ms_at_400_tflops():
    _, plan = llama_8b(1)

    # 32 layers: query and output 4096^2, key and value 1024 x 4096, gate, up and down 4096 x 14336; 5 (4 m^2 n + 2 m^3) each.
    layer = 2 * 5 * 6 * 4096**3 + 2 * 5 * (4 * 1024**2 * 4096 + 2 * 1024**3) + 3 * 5 * (4 * 4096**2 * 14336 + 2 * 4096**3)
    assert sum(tensor.cost for tensor in plan.tensors) == 32 * layer
    assert 32 * layer / 400e12 == pytest.approx(1.665, abs=5e-4)


@pytest.mark.parametrize(("dp_size", "update_ms"), [(8, 208), (64, 27.5), (1024, 13.7)])
def test_owners_of_8b_share_the_update(dp_size, update_ms):
    _, plan = llama_8b(dp_size)

    assert owned_flop(plan) / 400e12 * 1e3 == pytest.approx(update_ms, rel=0.005)


@pytest.mark.parametrize(("dp_size", "share"), [(8, 0.081), (64, 0.011), (1024, 0.0055)])
def test_the_busiest_rank_of_8b_sends_little_more(dp_size, share):
    layout, plan = llama_8b(dp_size)
    (buffer,) = layout.buffers

    traffic = rank_traffic(buffer, plan.owner_of)

    # Of the matrices alone: reduce-scatter in float32 and gather in bfloat16; 2 bytes per element to owners and 2 back.
    numel = sum(each.owned for each in traffic)
    busiest_numel = max(max(each.held, each.owned) - each.kept for each in traffic)
    assert 4 * busiest_numel / (6 * numel * (dp_size - 1) / dp_size) == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("dp_size", [8, 64])
def test_a_rank_sends_about_a_share_of_the_matrices_twice(dp_size):
    layout, plan = llama_8b(dp_size, grad_reduce_in_fp32=False)

    (dense,) = describe_owners(layout, plan.owner_of)

    # (e_g + e_p) N / R, but a rank keeps about one part in R of what it owns; ranks are not quite equal.
    expected_bytes = (2 + 2) * dense.numel / dp_size * (dp_size - 1) / dp_size
    assert dense.sent_bytes == pytest.approx(expected_bytes, rel=0.1)
    assert dense.received_bytes == pytest.approx(expected_bytes, rel=0.1)
    assert dense.num_tensors == 224
    assert dense.reduce_gather_bytes == layout.numel * 4 * (dp_size - 1) / dp_size


# What travels #


@given(case=CASES)
def test_what_a_rank_holds_and_owns_is_the_sum_of_its_exchanges(case):
    layout, plan = case
    owner_of = plan.owner_of

    for buffer in layout.buffers:
        for rank, traffic in enumerate(rank_traffic(buffer, owner_of)):
            parts = [plan_exchange(buffer, bucket, owner_of, rank=rank) for bucket in buffer.buckets]
            parts = [part for part in parts if part is not None]
            held, owned = sum(sum(part.held_numels) for part in parts), sum(sum(part.owned_numels) for part in parts)
            assert traffic == RankTraffic(held, owned, sum(part.held_numels[rank] for part in parts))


def test_the_plan_of_buckets_has_the_exchange_of_the_rank_with_most():
    # Buckets of one matrix each, of 4,096 and 1,024 elements; shards of 2,048 and 512 on two ranks.
    specs = [ParamSpec("small", (32, 32)), ParamSpec("large", (64, 64), "bfloat16")]
    layout = build_layout(specs, DistributedDataParallelConfig(), dp_size=2)
    workload = Workload(tuple(TensorWork(spec.name, spec.numel) for spec in specs))

    plan = plan_of_layout(workload, layout, {"small", "large"})

    # Rank 0 owns the large one, rank 1 the small one: each sends and receives a half of both, and float32 is the most.
    assert plan_owners(layout, {"small", "large"}).owner_of == {"large": 0, "small": 1}
    assert plan.to_owner_bytes == (2_048 * 4, 512 * 4)
    assert plan.from_owner_bytes == (2_048 * 2, 512 * 4)
    assert plan_of_layout(workload, layout).to_owner_bytes is None


def test_ranks_of_smaller_groups_repeat_over_those_of_the_largest():
    specs = [ParamSpec("a", (8, 8)), ParamSpec("b", (8, 8)), ParamSpec("c", (8, 8), group="expert")]
    layout = build_layout(specs, DistributedDataParallelConfig(), dp_size=2, group_sizes={"expert": 1})

    plan = plan_owners(layout, {"a", "b", "c"})

    assert owned_flop(plan) == 2 * newton_schulz_flop((8, 8))


# Which parameters #


def test_muon_updates_the_matrices_between_embedding_and_output_projection():
    run = load_config("llama3-8b", ["optimizer.name=muon"])
    specs = specs_of(run.model)

    whole = run.optimizer.whole_params(specs)

    assert {spec.name for spec in specs} - whole == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        *(f"model.layers.{i}.{norm}_layernorm.weight" for i in range(32) for norm in ("input", "post_attention")),
    }
    assert load_config("llama3-8b").optimizer.whole_params(specs) == frozenset()


# Memory #

# b [0, 64) and a [64, 128) in one bucket of 128, two shards of 64: rank 0 owns b, rank 1 owns a.
SPECS = [ParamSpec("a", (8, 8), "bfloat16"), ParamSpec("b", (8, 8), "bfloat16")]


def test_main_values_and_momentum_are_at_the_owner_alone():
    layout = build_layout([*SPECS, ParamSpec("norm", (10,), "bfloat16")], DistributedDataParallelConfig(), dp_size=2)
    owners = plan_owners(layout, {"a", "b"})

    first, second = (rank_memory(layout, rank=rank, is_sharded=True, owners=owners) for rank in range(2))

    # norm [0, 10), b [64, 128), a [128, 192): shards of 128. Each rank owns one matrix, rank 0 also the norm, with AdamW.
    assert (first.main_parameter_bytes, second.main_parameter_bytes) == ((64 + 10) * 4, 64 * 4)
    assert (first.moment_bytes, second.moment_bytes) == (64 * 4 + 10 * 8, 64 * 4)
    assert (first.main_gradient_bytes, first.optimizer_padding_bytes) == (0, 0)
    assert first.parameter_bytes == second.parameter_bytes == 138 * 2


def test_float32_parameters_are_held_once():
    layout = build_layout([ParamSpec("a", (8, 8))], DistributedDataParallelConfig(), dp_size=2)
    owners = plan_owners(layout, {"a"})

    owner = rank_memory(layout, rank=owners.owner_of["a"], is_sharded=True, owners=owners)

    assert (owner.main_parameter_bytes, owner.moment_bytes) == (0, 64 * 4)


def test_without_shards_every_rank_holds_the_momentum_of_all():
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=False)

    memory = memory_by_mode(SPECS, config, dp_size=2, whole_params={"a", "b"})

    everywhere, owner = memory["all_reduce"], memory["reduce_scatter"]
    assert (everywhere.main_parameter_bytes, everywhere.main_gradient_bytes, everywhere.moment_bytes) == (512, 512, 512)
    assert (owner.main_parameter_bytes, owner.main_gradient_bytes, owner.moment_bytes) == (256, 0, 256)


@pytest.mark.parametrize(
    ("dtype", "ddp", "exchange_bytes"),
    [
        # 30 held, 50 owned. To send and to receive: 80 elements of gradients.
        ("float32", {}, max(80 * 4, 50 * 4 + 80 * 4)),
        ("bfloat16", {}, max(80 * 4, 50 * 4 + 80 * 2)),
        ("bfloat16", {"grad_reduce_in_fp32": False}, max(80 * 2, 50 * 2 + 50 * 4 + 80 * 2)),
        ("float64", {}, max(80 * 8, 50 * 8 + 80 * 8)),
    ],
)
def test_the_buffers_of_an_exchange(dtype, ddp, exchange_bytes):
    layout = build_layout([ParamSpec("a", (8, 8), dtype)], DistributedDataParallelConfig(**ddp), dp_size=2)

    assert owner_exchange_bytes([(layout.buffers[0], RankTraffic(held=30, owned=50, kept=10))]) == exchange_bytes


# The simulated step #

WORK = Workload((TensorWork("a", 1_000, 1.0, 1.0), TensorWork("b", 1_000, 1.0, 1.0)), optimizer_s=0.5)
PLAN = BucketPlan(((1,), (0,)), to_owner_bytes=(1_000, 2_000), from_owner_bytes=(0, 3_000))
LINK = FlatLink(latency_s=0.0, seconds_per_byte=1e-3)
MORE = {"step_collectives": (FENCE, GRAD_NORM), "owner_update_s": 7.0}


def test_a_step_goes_to_the_owners_after_the_fence_and_returns_before_the_gather():
    (_, trace) = simulate_steps(WORK, PLAN, LINK, num_ranks=2, mode=Mode.REDUCE_SCATTER, **MORE)

    lane = [(span.label, span.duration_s) for span in trace.intervals if span.lane is Lane.COMM]
    assert [label for label, _ in lane] == [
        "bucket 0",
        "bucket 1",
        "step collective 0",
        "owner exchange 0",
        "owner exchange 1",
        "step collective 1",
        "owner return 1",
        "param gather 1",
        "param gather 0",
    ]
    assert dict(lane)["owner exchange 1"] == pytest.approx(2.0)  # 2,000 bytes
    assert dict(lane)["owner return 1"] == pytest.approx(3.0)
    computed = [span.label for span in trace.intervals if span.lane is Lane.COMPUTE]
    assert computed[-2:] == ["optimizer", "owner update"]


def test_owners_add_their_exchange_their_update_and_their_return():
    options = {"num_ranks": 2, "mode": Mode.REDUCE_SCATTER, "step_collectives": MORE["step_collectives"]}

    plain = simulate_step_s(WORK, BucketPlan(((1,), (0,))), LINK, **options)
    owned = simulate_step_s(WORK, PLAN, LINK, **options, owner_update_s=7.0)

    assert owned - plain == pytest.approx(1.0 + 2.0 + 7.0 + 3.0)


def test_the_launches_of_a_step_have_the_all_to_alls():
    trace, _ = simulate_steps(WORK, PLAN, LINK, num_ranks=2, mode=Mode.REDUCE_SCATTER, **MORE)

    found = [(each.label, each.payload_bytes) for each in trace.collectives if each.kind is CollectiveKind.ALL_TO_ALL]
    assert found == [("owner exchange 0", 1_000), ("owner exchange 1", 2_000), ("owner return 1", 3_000)]


RUN = [
    "link={latency_s: 1.0e-4, seconds_per_byte: 1.0e-11}",
    "workload={tokens_per_microbatch: 8192, flops_per_s: 4.0e14}",
    "optimizer.name=muon",
]


@pytest.mark.parametrize(("mode", "update_s"), [("reduce_scatter", 0.2081), ("all_reduce", 1.6647)])
def test_an_outlook_adds_the_update_of_whole_tensors_to_the_compute(mode, update_s):
    setting = setting_of(load_config("llama3-8b", [*RUN, f"mode={mode}"]), dp_size=8)

    outlook = outlook_of(setting, [100_000_000], has_scaling=False)

    assert outlook.to_dict()["owner_update_s"] == pytest.approx(update_s, rel=1e-3)
    assert setting.compute_s == pytest.approx(setting.workload.compute_s + update_s, rel=1e-3)
    assert outlook.lower_bound_s <= min(outlook.optimal.step_s, outlook.rows[0].step_s)
    assert (outlook.optimal.plan.to_owner_bytes is None) == (mode == "all_reduce")


def test_a_slower_rate_makes_the_update_longer():
    run = load_config("llama3-8b", [*RUN, "mode=reduce_scatter", "optimizer.flops_per_s=1.0e14"])

    assert setting_of(run, dp_size=8).owner_update_s == pytest.approx(4 * 0.2081, rel=1e-3)


def test_muon_without_a_model_is_refused():
    run = load_config(None, [RUN[0], "workload.tensors=[{name: a, numel: 4}]", "optimizer.name=muon"])

    with pytest.raises(ConfigError, match=r"optimizer\.name=muon needs a model section"):
        setting_of(run, dp_size=8)


# Commands #


def answer(*args):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_commands_show_the_owners(command):
    args = (command, "-c", "llama3-8b", "mode=reduce_scatter", "optimizer.name=muon", "--dp-size", "64")

    text, (dense,) = answer(*args), json.loads(answer(*args, "--json"))["owners"]

    assert "owners of the tensors that muon updates whole" in text
    assert (dense["group"], dense["num_ranks"], dense["num_tensors"]) == ("dense", 64, 224)
    assert dense["busiest_flop"] == dense["least_flop"]
    assert dense["sent_fraction"] == pytest.approx(dense["sent_bytes"] / dense["reduce_gather_bytes"])


def test_without_shards_or_whole_tensors_there_are_no_owners():
    for override in ("mode=all_reduce", "optimizer.name=adamw"):
        args = ("plan", "-c", "gpt2-124m", "mode=reduce_scatter", "optimizer.name=muon", override, "--json")
        assert json.loads(answer(*args))["owners"] == []


def test_a_plan_with_owners_shows_the_memory_of_the_busiest():
    text = answer("plan", "-c", "gpt2-124m", "mode=reduce_scatter", "optimizer.name=muon", "--dp-size", "8")

    assert "memory of the busiest owner of 8 ranks, DistributedOptimizer with muon" in text
