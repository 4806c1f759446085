"""HSDP by host against shards over all ranks: both predictions are those of simulations, and the advice follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from megabucket.cli.main import app
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec
from megabucket.planning import load_config
from megabucket.planning.by_host import HostAdvice, advise_by_host, advise_run_by_host
from megabucket.planning.links import MeasuredLink, ReplicatedLink, RingLink, TwoLevelLink, read_link, write_link
from megabucket.planning.memory import memory_by_mode
from megabucket.planning.setting import Setting, setting_of
from megabucket.planning.simulate import Mode
from megabucket.planning.workload import TensorWork, Workload
from megabucket.trace import CollectiveKind

SPECS = tuple(ParamSpec(f"w{index}", (1000, 1000)) for index in range(4))
WORKLOAD = Workload(tuple(TensorWork(spec.name, spec.numel, 1e-3, 1e-3) for spec in SPECS))
SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1_000_000)
FAST = RingLink(latency_s=0.0, bytes_per_s=1e12)
SLOW = RingLink(latency_s=0.0, bytes_per_s=1e9)
HOSTS = TwoLevelLink(inside=FAST, between=SLOW, ranks_per_node=2)
KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)


def measured(seconds_per_byte):
    """Return a link whose flat collectives of four ranks on two hosts take so long."""
    points = {(kind, "float32"): [(size, size * seconds_per_byte) for size in (1000, 10_000_000)] for kind in KINDS}
    return MeasuredLink.of(points, num_ranks=4).model_copy(update={"hosts": HOSTS})


def setting(link=None, ddp=SHARDED, **fields):
    return Setting(WORKLOAD, link or measured(1e-8), ddp, 4, SPECS, **fields)


class TestLink:
    def test_replicas_inside_hosts_use_the_fitted_levels_and_all_ranks_the_table(self):
        grid = ReplicatedLink(link=measured(1e-8), num_instances=2)

        # A reduce-scatter of 8 MB among 2 ranks of a host sends 4 MB at 1e12 B/s; the all-reduce of the shard 4 MB at 1e9 B/s.
        assert grid.collective_s(CollectiveKind.REDUCE_SCATTER, 8e6, 2) == pytest.approx(4e-6 + 4e-3)
        assert grid.collective_s(CollectiveKind.ALL_GATHER, 8e6, 2) == pytest.approx(4e-6)
        assert grid.collective_s(CollectiveKind.ALL_REDUCE, 8e6, 2) == pytest.approx(8e6 * 1e-8)
        assert grid.affine(CollectiveKind.REDUCE_SCATTER, 2)(8e6) == pytest.approx(4e-6 + 4e-3)
        assert grid.least(CollectiveKind.REDUCE_SCATTER, 2, "float32", 8e6)(8e6) == pytest.approx(4e-6 + 4e-3)

    def test_without_levels_a_table_says_nothing_about_replicas(self):
        link = measured(1e-8).model_copy(update={"hosts": None})

        with pytest.raises(ConfigError, match="measured on 4 ranks and says nothing about 2"):
            ReplicatedLink(link=link, num_instances=2).collective_s(CollectiveKind.REDUCE_SCATTER, 8e6, 2)

    def test_the_file_keeps_the_levels(self, tmp_path):
        write_link(tmp_path / "link.yaml", measured(1e-8))

        assert read_link(tmp_path / "link.yaml") == measured(1e-8)


class TestAdvice:
    def test_both_predictions_are_the_simulated_steps(self):
        advice = advise_by_host(setting())

        by_host = replace(setting(), num_instances=2)
        assert advice.flat_s == setting().step_s(setting().configured_plan)
        assert advice.by_host_s == by_host.step_s(by_host.configured_plan)
        assert (advice.num_hosts, advice.ranks_per_host, advice.is_by_host) == (2, 2, False)

    def test_slow_flat_collectives_make_it_faster_by_host_and_quick_ones_slower(self):
        slow, quick = advise_by_host(setting(measured(1e-8))), advise_by_host(setting(measured(1e-12)))

        assert slow.is_faster_by_host
        assert slow.sentences[0].startswith(f"HSDP by host would be faster by {slow.gain:.1%} of a step: wrap with ")
        assert 'init_device_mesh(device_type, (2, 2), mesh_dim_names=("replicate", "shard"))' in slow.sentences[0]
        assert quick.gain < -0.01
        assert quick.sentences[0] == f"HSDP by host would be slower by {-quick.gain:.1%} of a step: keep shards over all ranks."

    def test_a_config_that_is_by_host_already_is_told_to_keep_it_or_to_drop_it(self):
        slow, quick = (advise_by_host(setting(measured(rate), num_instances=2)) for rate in (1e-8, 1e-12))

        assert slow.sentences[0].endswith(": keep num_distributed_optimizer_instances=2.")
        assert quick.sentences[0].endswith(": drop num_distributed_optimizer_instances=2.")

    def test_less_than_a_percent_is_no_difference(self):
        advice = HostAdvice(2, 2, Mode.REDUCE_SCATTER, is_by_host=False, flat_s=1.0, by_host_s=1.009)

        assert advice.sentences[0] == "HSDP by host takes as long: keep shards over all ranks."
        assert not replace(advice, by_host_s=0.991).is_faster_by_host
        assert replace(advice, by_host_s=0.989).is_faster_by_host

    def test_without_shards_it_is_compared_with_the_all_reduce(self):
        plain = DistributedDataParallelConfig(bucket_size=1_000_000)

        advice = advise_by_host(setting(ddp=plain), moments_per_element=2)

        assert advice.flat_s == setting(ddp=plain).step_s(setting(ddp=plain).configured_plan)
        assert advice.more_bytes < 0
        assert "with all-reduce over all ranks." in advice.sentences[1]

    def test_memory_is_that_of_the_plan(self):
        advice = advise_by_host(setting(), moments_per_element=2)

        flat, by_host = (memory_by_mode(SPECS, SHARDED, dp_size=4, num_instances=each)["reduce_scatter"] for each in (1, 2))
        assert advice.more_bytes == by_host.total_bytes - flat.total_bytes
        # Main values are the parameters themselves in float32; two moments of 4 bytes of a half instead of a quarter.
        assert advice.more_bytes == pytest.approx(4_000_000 * 8 / 4, rel=1e-3)  # padding apart

    @pytest.mark.parametrize(
        "other",
        [
            {"link": RingLink(latency_s=0, bytes_per_s=1e9)},
            {"dp_size": 2},
            {"dp_size": 5},
            {"link": TwoLevelLink(inside=FAST, between=SLOW, ranks_per_node=1)},
            {"group_sizes": {"expert": 1}},
        ],
        ids=["a link without hosts", "one host", "part of a host", "one rank a host", "experts on fewer ranks than hosts"],
    )
    def test_there_is_no_advice_where_there_can_be_no_replicas_by_host(self, other):
        given = {"link": HOSTS, **other}

        assert advise_by_host(replace(setting(), **given)) is None

    def test_a_shipped_link_of_nodes_is_enough(self):
        run = load_config("llama3-8b", ["link=h100-cluster-400g"])

        advice = advise_run_by_host(run, dp_size=64)

        assert advice == advise_by_host(setting_of(run, dp_size=64), moments_per_element=2)
        assert (advice.num_hosts, advice.ranks_per_host) == (8, 8)
        assert advise_run_by_host(load_config("llama3-8b"), dp_size=64) is None


@pytest.mark.parametrize("command", ["plan", "report"])
def test_the_commands_print_both_predictions(command, tmp_path):
    arguments = [command, "-c", "gpt2-124m", "link=h100-cluster-400g", "--dp-size", "16"]
    arguments += ["--out", str(tmp_path / "report.html")] if command == "report" else []

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "1000"})

    assert result.exit_code == 0, result.output
    advice = advise_run_by_host(load_config("gpt2-124m", ["link=h100-cluster-400g"]), dp_size=16)
    assert "\n".join(advice.sentences) in result.stdout
