"""``make bench``: a run whose systems differ fails, and the command line works on real ranks, whatever peers are absent."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from peers.figures import LossesDifferError, check_losses, loss_differences, paired
from peers.registry import SYSTEMS

ROOT = Path(__file__).parents[2]


def test_ratios_are_of_steps_on_the_same_batch_and_above_one_for_the_faster():
    assert paired([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])["median"] == 2.0  # of 2, 3 and 1; the medians' ratio would be 4 / 3


def losses(**of_systems: list[float]) -> dict[str, float]:
    return loss_differences({name: [{"losses": values}] for name, values in of_systems.items()}, "ddp")


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


def run(folder: Path, *arguments: str):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'benchmarks'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "peers", "--models", "tiny", "--turns", "1", "--warmups", "1", "--folder", str(folder)]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    path = folder / "bench.json"
    return done, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.dist
@pytest.mark.nightly
def test_steps_of_those_who_are_there_and_reasons_of_those_who_are_not(tmp_path):
    systems = ["none", "ddp", "megatron", "deepspeed-1", "mb-ar", "mb-rs-both", "mb-rs-cuts"]

    done, found = run(tmp_path, "--parts", "steps", "--links", "loopback,timing", "--systems", ",".join(systems))

    assert done.returncode == 0, done.stderr
    assert found["problems"] == []
    loopback, timing = found["cells"]
    for name, package in (("megatron", "megatron"), ("deepspeed-1", "deepspeed")):
        if find_spec(package) is None:
            assert package in loopback["absent"][name]
    ran = {"none", "ddp", "mb-ar", "mb-rs-both"}
    assert ran | {"megatron", "deepspeed-1"} == set(loopback["systems"]) | set(loopback["absent"])
    assert ran | {"mb-rs-cuts"} <= set(timing["systems"])  # cuts are planned for links with two numbers
    assert loopback["systems"]["mb-ar"]["loss_difference"] <= 1e-5 < loopback["systems"]["none"]["loss_difference"]
    assert timing["systems"]["mb-ar"]["loss_difference"] is None
    gradients = 4 * loopback["numel"]
    assert loopback["systems"]["ddp"]["counts"]["all_reduce"] == {"calls": 1.0, "bytes": float(gradients)}
    assert loopback["systems"]["none"]["counts"]["all"] == {"calls": 0, "bytes": 0}
    assert timing["systems"]["ddp"]["counts"]["allreduce"] == {"calls": 1.0, "bytes": float(gradients)}
    assert timing["bounds_s"]["reduce_scatter"]["median"] > 0
    assert timing["systems"]["mb-rs-cuts"]["over_bound"]["median"] > 0.5
    assert timing["systems"]["ddp"]["over_bound"] is None
    page = (tmp_path / "bench.md").read_text()
    for cell in found["cells"]:  # which one it is depends on the machine
        running = [name for name in ("ddp", "megatron", "deepspeed-1") if name in cell["systems"]]
        best = min(running, key=lambda name: cell["systems"][name]["step_s"]["median"])
        assert cell["best_peer"] == best
        assert f"| {SYSTEMS[best].title} (best peer) |" in page


@pytest.mark.dist
@pytest.mark.nightly
def test_memory_and_hooks(tmp_path):
    done, found = run(
        tmp_path, "--parts", "memory,hooks", "--systems", "none,mb-rs", "--hook-models", "sums-1500", "--steps", "2"
    )

    assert done.returncode == 0, done.stderr
    (memory,), (hooks,) = found["memory"], found["hooks"]
    numel = memory["rows"]["none"]["numel"]
    above = memory["rows"]["none"]["peak_bytes"] - memory["baseline"]["peak_bytes"]
    assert memory["rows"]["none"]["held_bytes"] == 16 * numel + above
    assert memory["rows"]["mb-rs"]["formula_bytes"] > 12 * numel  # 8 + 8 / 2 bytes per parameter, and padding
    assert hooks["num_params"] == 1500
    assert set(hooks["extra_us"]) == {"mb-rs"}


@pytest.mark.dist
@pytest.mark.nightly
def test_systems_that_differ_fail_the_run(tmp_path):
    done, found = run(tmp_path, "--parts", "steps", "--links", "loopback", "--systems", "none,ddp", "--tolerance", "1")

    assert done.returncode == 1
    assert "would say nothing" in found["problems"][0]
    assert "PROBLEM" in done.stderr
