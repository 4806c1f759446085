"""The benchmark from its command line, on real ranks with a tiny model: everything runs, whatever peers are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'benchmarks'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "peers", "--models", "tiny", "--turns", "1", "--warmups", "1", "--folder", str(folder)]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    path = folder / "bench.json"
    return done, json.loads(path.read_text()) if path.exists() else None


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
    assert (tmp_path / "bench.html").stat().st_size > 10_000
    assert "| torch DDP (best peer) |" in (tmp_path / "bench.md").read_text()


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


def test_systems_that_differ_fail_the_run(tmp_path):
    done, found = run(tmp_path, "--parts", "steps", "--links", "loopback", "--systems", "none,ddp", "--tolerance", "1")

    assert done.returncode == 1
    assert "would say nothing" in found["problems"][0]
    assert "PROBLEM" in done.stderr
