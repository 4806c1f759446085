"""The program as a user starts it: torchrun, two ranks, gloo.

Starting a launcher and two interpreters takes longer than what they do then, so ranks are forked where two tests would start
the same program. Each way of calling it is under torchrun once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import run_launched
from train_ranks import train

RANKS = 2

pytestmark = pytest.mark.dist


@pytest.fixture
def config_path(config_file, tmp_path):
    return config_file(
        model={"num_layers": 2},
        train={"steps": 5, "num_microbatches": 1, "log_path": str(tmp_path / "log.jsonl")},
    )


def torchrun(*arguments, timeout_s=150):
    """Run the command line on two ranks; warnings are errors in them, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [*command, "-m", "examples.bytegpt", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def forked(directory, *arguments, num_ranks=RANKS):
    """Run the same on ranks that are forked, two if not said otherwise."""
    return run_launched(train, (arguments,), directory / "said", num_ranks=num_ranks, warnings_are_errors=True)


FENCE_BYTES = 6 * 8  # int64
NORM_BYTES = 8  # float64


# Per step: one all-reduce per bucket and the fence; or a reduce-scatter and an all-gather per bucket, the fence and the norm.
@pytest.mark.parametrize(
    ("overrides", "collectives_per_bucket", "others_bytes", "is_forked"),
    [
        (["mode=all_reduce"], 1, [FENCE_BYTES], True),
        (["mode=reduce_scatter"], 2, [FENCE_BYTES, NORM_BYTES], True),
        pytest.param(
            ["mode=reduce_scatter", "ddp.overlap_param_gather=true", "ddp.step_traces=true"],
            2,
            [FENCE_BYTES, NORM_BYTES],
            False,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["all-reduce", "reduce-scatter", "gather in forward"],
)
def test_two_ranks_end_where_torch_ddp_ends_and_log_every_collective(
    config_path, tmp_path, overrides, collectives_per_bucket, others_bytes, is_forked
):
    arguments = ["-c", str(config_path), *overrides, "--compare", "torch-ddp", "--json"]

    result = forked(tmp_path, *arguments) if is_forked else torchrun(*arguments)

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["comparison"]["max_abs_difference"] < 1e-5
    assert report["comparison"]["reference"] == "torch DDP + AdamW, float32 parameters"

    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in log]
    assert kinds == ["run", "evaluation", *["step"] * 5, "evaluation", "summary", "comparison"]
    num_buckets = log[0]["num_buckets"]
    assert num_buckets > 3
    for step in (line for line in log if line["kind"] == "step"):
        assert step["updated"]
        assert step["num_collectives"] == collectives_per_bucket * num_buckets + len(others_bytes)
        assert 0 <= step["exposed_s"] <= step["step_s"]
        assert ("launches" in step) == ("ddp.step_traces=true" in overrides)
        assert "launches" not in step or len(step["launches"]) == step["num_collectives"]
        assert step["comm_s"] > 0
    # All-reduce and reduce-scatter + all-gather of S bytes both send S on two ranks; fence and norm are all-reduced.
    padded_bytes = 4 * round(log[0]["num_params"] / (1 - log[0]["padding_fraction"]))
    assert log[2]["wire_bytes"] == padded_bytes + sum(others_bytes)


def test_shards_inside_two_replicas_end_where_torch_ddp_ends_and_send_their_part_to_the_other_replica(config_path, tmp_path):
    arguments = ["-c", str(config_path), "mode=reduce_scatter", "num_distributed_optimizer_instances=2"]

    result = forked(tmp_path, *arguments, "--compare", "torch-ddp", "--json", num_ranks=4)

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["comparison"]["max_abs_difference"] < 1e-5
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    padded_bytes = 4 * round(log[0]["num_params"] / (1 - log[0]["padding_fraction"]))
    # Reduce-scatter and all-gather of S bytes between two shards send S, and the all-reduce of half of it over two replicas
    # half of S. Fence and norm: docs/parallel-groups.md.
    assert log[2]["wire_bytes"] == pytest.approx(1.5 * padded_bytes, abs=4 * FENCE_BYTES)


def test_replicas_that_do_not_divide_the_ranks_are_refused(config_path, tmp_path):
    arguments = ["-c", str(config_path), "mode=reduce_scatter", "num_distributed_optimizer_instances=3"]

    result = forked(tmp_path, *arguments)

    assert result.returncode == 2
    assert "num_distributed_optimizer_instances=3 does not divide the ranks of dense: 2" in result.stderr


@pytest.mark.nightly
def test_the_closing_table_is_printed_once_and_talk_goes_to_stderr(config_path, tmp_path):
    result = forked(tmp_path, "-c", str(config_path), "mode=reduce_scatter")

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("held-out bits/byte") == 1
    assert "step 5/5" in result.stderr
    assert "SHA-256" in result.stderr
    assert "SHA-256" not in result.stdout


def test_an_error_is_one_text_per_rank_without_a_traceback_and_nobody_hangs(config_path):
    result = torchrun("-c", str(config_path), "data.corpus=/missing", timeout_s=60)

    assert result.returncode != 0
    assert "error: the corpus directory '/missing' does not exist" in result.stderr
    assert "examples/bytegpt" not in result.stderr  # no traceback of ours


def test_the_difference_to_torch_ddp_is_printed_under_the_tables(config_path, tmp_path):
    # The sum of two numbers and half of it round the same in every order, so two ranks leave nothing to differ.
    result = forked(tmp_path, "-c", str(config_path), "mode=reduce_scatter", "--compare", "torch-ddp")

    assert result.returncode == 0, result.stderr
    assert "compared with torch DDP + AdamW, float32 parameters" in result.stdout
    assert "largest weight difference: 0: all weights are equal" in result.stdout


@pytest.mark.parametrize("mode", ["reduce_scatter", pytest.param("all_reduce", marks=pytest.mark.nightly)])
def test_muon_beside_adamw_ends_where_it_ends_under_torch_ddp(config_path, tmp_path, mode):
    result = forked(tmp_path, "-c", str(config_path), f"mode={mode}", "--optimizer", "muon", "--compare", "torch-ddp")

    assert result.returncode == 0, result.stderr
    assert "compared with torch DDP + Muon + AdamW, float32 parameters" in result.stdout
    assert "largest weight difference: 0: all weights are equal" in result.stdout


# A thread of a group that outlives it may abort the process at exit, seldom enough to pass every other test.
LIST_THREADS = """
import os, sys
from pathlib import Path

from examples.bytegpt.config import load_demo_config
from megabucket.measure.ranks import joined_ranks
from examples.bytegpt.train import run_training
from examples.bytegpt.report import Progress

with joined_ranks(os.environ) as ranks:
    run_training(load_demo_config(sys.argv[1], []), ranks, progress=Progress(), compares=True)
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
sys.stdout.write(f"left behind: {[name for name in names if 'gloo' in name]}\\n")
"""


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc, which only Linux has")
def test_no_thread_of_the_process_group_is_left_behind(config_path, tmp_path):
    script = tmp_path / "list_threads.py"
    script.write_text(LIST_THREADS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]

    result = subprocess.run(
        [*command, str(script), str(config_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["left behind: []"] * RANKS
