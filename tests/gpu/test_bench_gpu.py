"""The benchmark for a GPU: it refuses where there is none, and the same code runs small on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "benchmarks" / "gpu.py"


def run(*arguments, hides_devices=True):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if hides_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, env=environment, timeout=250
    )


def test_without_a_gpu_it_says_so_and_measures_nothing():
    result = run()

    assert result.returncode == 1
    assert "finds no CUDA device here, so there is nothing to measure and no figure is made up" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cpu"], "on a CPU the models are too large; add --tiny"),
        (["--device", "cpu", "--tiny", "gtp"], "unknown sections: gtp"),
    ],
    ids=["not tiny", "unknown section"],
)
def test_what_it_cannot_do_is_named(arguments, text):
    result = run(*arguments)

    assert result.returncode != 0
    assert text in result.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_the_same_code_runs_small_on_a_cpu(tmp_path):
    path = tmp_path / "gpu.json"

    result = run("--device", "cpu", "--tiny", "--repetitions", "2", "--json", str(path))

    assert result.returncode == 0, result.stderr
    assert "DIFFER" not in result.stdout
    found = json.loads(path.read_text())
    assert found["device"] == "CPU: these times mean nothing"
    assert {"passes", "weight_grads", "GPT", "Many small tensors"} < set(found)
    for title in ("GPT", "Many small tensors"):
        rows = found[title]
        measured = [name for name, row in rows.items() if not isinstance(row, str)]
        assert {"bare torch", "torch DDP"} < set(measured)
        assert [name for name in measured if name.startswith("megabucket")] == [
            name for name in rows if name.startswith("megabucket")
        ]
        assert all(len(rows[name]["seconds"]["system"]) == 2 for name in measured)
