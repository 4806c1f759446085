"""From samples to figures: medians, pairs, and the check that all systems computed the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from bench_cases import samples
from peers import registry
from peers.counting import full_bytes
from peers.figures import (
    LossesDifferError,
    check_losses,
    extra_us,
    loss_differences,
    over_bound,
    paired,
    slowest_steps,
    spread,
    system_figures,
    with_ratios,
)
from peers.links import link_cases
from peers.models import MODELS
from peers.options import read_options
from peers.registry import SYSTEMS
from peers.result import write_json


def test_a_spread_lies_between_neighbours_on_a_line():
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "low": 2.0, "high": 4.0, "quiet": 1.4}  # 1 + 0.4 * (2 - 1)
    assert spread([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0, "quiet": 7.0}


def test_a_step_takes_as_long_as_on_its_slowest_rank():
    assert slowest_steps([samples(1.0, 4.0), samples(2.0, 3.0)]) == [2.0, 4.0]


def test_ratios_are_of_steps_on_the_same_batch_and_above_one_for_the_faster():
    assert paired([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])["median"] == 2.0  # of 2, 3 and 1; the medians' ratio would be 4 / 3


def test_a_step_is_compared_with_the_bound_of_its_own_turn():
    over = over_bound([4.0, 6.0, 5.5], [2.0, 4.0, 5.0])

    assert over["median"] == 1.5  # of 2, 1.5 and 1.1; the medians' ratio would be 5.5 / 4
    assert over["quiet"] == pytest.approx(4.3 / 2.4)  # 10th percentiles of both
    assert over_bound([4.0, 6.0], [4.0])["high"] == 1.375  # one bound for all: 1 and 1.5


def test_cpu_time_and_faults_are_means_over_ranks_and_bytes_are_counted_once():
    busy = {**samples(1.0), "turn_cpu_s": [0.75, 0.85], "turn_faults": [30.0, 50.0]}

    figures = system_figures([samples(1.0), busy])

    assert figures["cpu_s"]["median"] == pytest.approx(0.55)  # turns of (0.25 + 0.75) / 2 and (0.35 + 0.85) / 2
    assert figures["faults"]["median"] == 30.0  # 20 and 40
    assert figures["wire_bytes"]["median"] == 2e6  # both ranks read the same counter
    assert figures["parts_s"] == {"forward": 0.25, "backward": 0.25, "sync": 0.25, "optimizer": 0.25}


def test_the_best_peer_is_the_one_with_the_shortest_median():
    systems = {
        name: system_figures([samples(*steps)]) for name, steps in {"ddp": (4, 4), "zero": (3, 3), "mb-rs": (2, 1)}.items()
    }

    found = with_ratios(systems, ("ddp", "zero", "fsdp2"))

    assert found["best_peer"] == "zero"
    assert found["systems"]["mb-rs"]["to_best"]["median"] == 2.25  # of 3 / 2 and 3 / 1
    assert found["systems"]["mb-rs"]["to_ddp"]["median"] == 3.0  # of 4 / 2 and 4 / 1


def test_without_peers_there_is_nothing_to_compare_with():
    found = with_ratios({"mb-rs": system_figures([samples(1.0)])}, ("ddp",))

    assert found["best_peer"] is None
    assert found["systems"]["mb-rs"]["to_best"] is None


def test_what_a_wrapper_adds_is_a_paired_difference_per_parameter():
    extra = extra_us([(3e-3, 2e-3), (9e-3, 2e-3), (4e-3, 2e-3)], [(1e-3, 1e-3), (5e-3, 1e-3), (2e-3, 1e-3)], num_params=1000)

    assert extra["median"] == pytest.approx(2.0)  # of 2, 4 and 2 us
    assert extra["cpu"] == pytest.approx(1.0)


def losses(**of_systems: list[float]) -> dict[str, float]:
    return loss_differences({name: [samples(1.0, losses=tuple(values))] for name, values in of_systems.items()}, "ddp")


def test_equal_losses_pass():
    differences = losses(none=[2.0, 1.4], ddp=[2.0, 1.5], ours=[2.0, 1.500001])

    check_losses(differences, limit="none", tolerance=1e-5, ranks=2)

    assert differences["none"] == pytest.approx(0.1 / 1.5)


@pytest.mark.parametrize("wrong", [1.6, math.nan, math.inf])
def test_one_wrong_loss_of_one_step_fails(wrong):
    differences = losses(none=[2.0, 1.4], ddp=[2.0, 1.5], ours=[wrong, 1.5])

    with pytest.raises(LossesDifferError, match="ours by"):
        check_losses(differences, limit="none", tolerance=1e-5, ranks=2)


def test_a_run_that_could_not_see_a_fault_fails():
    differences = losses(none=[2.0, 1.50001], ddp=[2.0, 1.5])

    with pytest.raises(LossesDifferError, match="would say nothing"):
        check_losses(differences, limit="none", tolerance=1e-5, ranks=2)
    check_losses(differences, limit="none", tolerance=1e-5, ranks=1)  # alone there is nothing to synchronize


def test_a_gather_counts_as_what_all_ranks_get():
    assert full_bytes("all_gather", [[10, 2]], ["float"], ranks=4) == 320
    assert full_bytes("all_reduce", [[10], [5]], ["long int", "c10::BFloat16"], ranks=4) == 90
    assert full_bytes("barrier", [], [], ranks=4) == 0


def test_models_are_what_the_tables_call_them():
    sizes = {}
    for name, case in MODELS.items():
        params = list(case.module().parameters())
        sizes[name] = (round(sum(param.numel() for param in params) / 1e6, 2), len(params))

    assert sizes == {
        "gpt": (10.84, 77),
        "tensors": (15.89, 1500),
        "dominant": (10.68, 15),
        "moe": (4.84, 143),
        "tiny": (0.02, 29),
        "sums-1500": (0.02, 1500),
        "sums-20000": (0.32, 20000),
    }


def test_ranks_have_different_batches_and_systems_the_same():
    case = MODELS["gpt"]

    assert case.batch(3, 0).equal(case.batch(3, 0))
    assert not case.batch(3, 0).equal(case.batch(3, 1))


def test_every_system_is_built_where_the_list_says():
    for name, case in SYSTEMS.items():
        module, _, function = case.where.partition(":")
        source = (Path(registry.__file__).parent / f"{module}.py").read_text()
        assert f"\ndef {function}(" in source, name


def test_a_fabric_has_a_cell_for_each_latency_and_bandwidth():
    names = [link.name for link in link_cases(["loopback", "timing"], [20.0, 500.0], [0.2, 2.0])]

    assert names == [
        "loopback",
        *(f"timing, {latency} us, {bandwidth} GB/s" for bandwidth in ("0.2", "2") for latency in (20, 500)),
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--systems", "ddp,apex"], "unknown systems: apex"),
        (["--models", ""], "unknown models: none given"),
        (["--turns", "0"], "must be 1 or more"),
        (["--links", "gloo"], "unknown links: gloo"),
    ],
)
def test_a_wrong_argument_is_named(arguments, says, capsys):
    with pytest.raises(SystemExit):
        read_options(arguments)

    assert says in capsys.readouterr().err


def test_a_result_without_a_figure_is_still_json(tmp_path):
    path = tmp_path / "one.json"

    write_json(path, {"a": [1.5, math.inf], "b": {"c": math.nan, 3: (True, None)}})

    assert json.loads(path.read_text()) == {"a": [1.5, None], "b": {"c": None, "3": [True, None]}}
    assert [found.name for found in tmp_path.iterdir()] == ["one.json"]
