"""``megabucket simulate``: the textbook's figures, the JSON others rely on, the table, the trace, and bad input."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megabucket.cli.main import app

ROOT = Path(__file__).parents[2]
BOOK = str(ROOT / "configs/studies/output-15-5-2.yaml")

# Output 15.5.2: millions of elements, milliseconds of a step.
OUTPUT_15_5_2 = {0.3: 142.9, 0.6: 126.6, 1.5: 121.6, 4.0: 121.6, 10.0: 121.6, 25.0: 141.4, 50.0: 165.7, 76.4: 165.7}

SMALL = """
link: {latency_s: 1.0, seconds_per_byte: 0.25}
workload:
  bytes_per_element: 2
  tensors:
    - {name: first, numel: 2, backward_s: 4.0}
    - {name: middle, numel: 4, backward_s: 2.0}
    - {name: last, numel: 2, backward_s: 1.0}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "run.yaml").write_text(text)
        return "run.yaml"

    return write


def invoke(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def figures(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_the_eight_rows_and_both_baselines_of_output_15_5_2():
    out = figures("-c", BOOK)

    assert {row["bucket_numel"] / 1e6: round(row["step_s"] * 1e3, 1) for row in out["rows"]} == OUTPUT_15_5_2
    assert round(out["no_overlap_s"] * 1e3, 1) == 234.3
    assert round(out["backward_s"] * 1e3, 1) == 91.7
    speedups = [round(out["no_overlap_s"] / row["step_s"], 2) for row in out["rows"]]
    assert speedups == [1.64, 1.85, 1.93, 1.93, 1.93, 1.66, 1.41, 1.41]


def test_the_json_has_the_pinned_keys_and_counts(config):
    out = figures("-c", config(SMALL), "sweep.bucket_numel=[6,2,100]")

    # last ready at 1 (4 bytes), middle at 3 (8 bytes), first at 7 (4 bytes); 1 + 0.25 * bytes: 2, 3, 2 s.
    assert out["backward_s"] == 7.0
    assert out["no_overlap_s"] == 7 + 2 + 3 + 2
    assert out["rows"] == [
        {"bucket_numel": 6, "buckets": 2, "step_s": 9.0, "exposed_s": 2.0},  # 3 + 4 = 7, then 7 + 2
        {"bucket_numel": 2, "buckets": 3, "step_s": 9.0, "exposed_s": 2.0},  # 1 + 2, 3 + 3, 7 + 2
        {"bucket_numel": 100, "buckets": 1, "step_s": 12.0, "exposed_s": 5.0},  # 7 + 1 + 4
    ]
    assert out["optimal"] == {"step_s": 9.0, "exposed_s": 2.0, "buckets": 2, "cuts": ["middle", "first"]}
    assert out["lower_bound_s"] == 9.0


def test_without_sizes_a_sweep_goes_from_the_smallest_tensor_to_one_bucket(config):
    out = figures("-c", config(SMALL))

    sizes = [row["bucket_numel"] for row in out["rows"]]
    assert (sizes[0], sizes[-1]) == (2, 8)
    assert sizes == sorted(set(sizes))
    assert out["rows"][-1]["buckets"] == 1


def test_reduce_scatter_mode_gathers_and_exposes_what_it_adds(config):
    text = SMALL.replace("link:", "mode: reduce_scatter\nlink:")

    out = figures("-c", config(text), "sweep.bucket_numel=[100]", "workload.param_bytes_per_element=4")

    # 7 + (1 + 0.25 * 16) reduce-scatter, then the gather of 32 bytes.
    assert out["mode"] == "reduce_scatter"
    assert out["rows"][0]["step_s"] == 7 + 5 + 9
    assert out["rows"][0]["exposed_s"] == 14.0


MODEL = """
model: {kind: params, params: [{name: a, shape: [100]}, {name: b, shape: [300]}, {name: c, shape: [100]}]}
workload: {tokens_per_microbatch: 1000, flops_per_s: 1e6}
link: {latency_s: 0.1, seconds_per_byte: 1e-3}
"""


def test_with_a_model_buckets_are_padded_and_the_fence_counts(config):
    out = figures("-c", config(MODEL), "--dp-size", 4, "sweep.bucket_numel=[1000]")

    # a, b, c from the end: 100 at 0, 300 at 128, 100 at 448, ends at 548, rounded up to lcm(4, 128): 640 elements of 4 bytes.
    one_bucket = 0.1 + 1e-3 * 4 * 640
    fence = 0.1 + 1e-3 * 48  # six integers of 8 bytes
    compute = 6 * 500 * 1000 / 1e6
    assert out["rows"][0]["step_s"] == pytest.approx(compute + one_bucket + fence)
    assert out["default"]["bucket_numel"] == 40_000_000
    assert out["default"]["step_s"] == out["rows"][0]["step_s"]
    assert out["configured"] is None


def test_the_optimal_cuts_of_a_model_are_taken_by_its_config(config):
    out = figures("-c", config(MODEL), "--dp-size", 4)
    cuts = out["optimal"]["cuts"]

    again = figures("-c", config(MODEL), "--dp-size", 4, f"ddp.bucket_cuts=[{','.join(cuts)}]")

    assert 1 < len(cuts) < 4
    assert again["configured"]["step_s"] == out["optimal"]["step_s"]
    assert again["configured"]["buckets"] == out["optimal"]["buckets"]


def test_buffers_of_two_dtypes_are_each_cut_where_the_optimal_plan_cuts(config):
    shapes = ", ".join(f"{{name: p{i}, shape: [200], dtype: {'bfloat16' if i % 2 else 'float32'}}}" for i in range(6))
    text = MODEL.replace(MODEL.splitlines()[1], f"model: {{kind: params, params: [{shapes}]}}")

    out = figures("-c", config(text), "--dp-size", 2, "link.latency_s=0.001")

    assert out["optimal"]["buckets"] >= 4
    assert out["optimal"]["step_s"] <= out["rows"][-1]["step_s"]


def test_a_ring_scales_from_1_to_4096_ranks(config):
    text = MODEL.replace("{latency_s: 0.1, seconds_per_byte: 1e-3}", "{kind: ring, latency_s: 1e-3, bytes_per_s: 1e4}")

    out = figures("-c", config(text), "--dp-size", 8)

    ranks = [row["num_ranks"] for row in out["scaling"]]
    efficiencies = [row["efficiency"] for row in out["scaling"]]
    assert ranks == [2**exponent for exponent in range(13)]
    assert efficiencies[0] == 1.0
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(efficiencies))
    at_8 = next(row for row in out["scaling"] if row["num_ranks"] == 8)
    assert at_8["step_s"] == out["optimal"]["step_s"]
    assert at_8["efficiency"] == pytest.approx(out["compute_s"] / at_8["step_s"])


def test_a_two_level_link_leaves_out_ranks_that_fill_no_nodes_and_a_table_does_not_scale(config):
    level = "{latency_s: 0, bytes_per_s: 1e5}"
    two = f"{{kind: two_level, ranks_per_node: 12, inside: {level}, between: {level}}}"
    table = "{kind: table, num_ranks: 8, tables: [{operation: all_reduce, points: [[0, 0.1], [1000, 1.1]]}]}"
    flat = "{latency_s: 0.1, seconds_per_byte: 1e-3}"

    assert [row["num_ranks"] for row in figures("-c", config(MODEL.replace(flat, two)), "--dp-size", 24)["scaling"]] == [
        1,
        2,
        4,
        8,
    ]
    measured = figures("-c", config(MODEL.replace(flat, table)))
    assert measured["dp_size"] == 8
    assert measured["scaling"] == []


def test_the_table_fits_80_columns_and_marks_the_best_size():
    result = invoke("-c", BOOK)

    assert result.exit_code == 0
    table = result.stdout[result.stdout.index("elements  buckets") :]
    assert max(map(len, table.splitlines())) <= 80
    (best,) = [line for line in result.stdout.splitlines() if line.endswith("best size") and "as the" not in line]
    assert best.split()[:4] == ["10.00", "M", "4", "121.6"]  # the largest of three that tie


NO_OPTIMIZER = "optimizer 0.0 ms (workload.optimizer_s is not given)"


@pytest.mark.parametrize("sizes", ["2,6,7,8,100", "2,6,100,8,7"])
def test_sizes_that_give_equal_buckets_are_one_row(config, sizes):
    lines = invoke("-c", config(SMALL), f"sweep.bucket_numel=[{sizes}]").stdout.splitlines()

    # All three tensors, the last two, and one bucket.
    rows = [line.split() for line in lines[lines.index("") + 1 :]]
    assert [row[:2] for row in rows if row and row[0].isdecimal()] == [["2", "3"], ["6", "2"], ["100", "1"]]
    assert [line for line in lines if line.endswith("from 7 on")] != []


@pytest.mark.parametrize(
    ("text", "arguments", "assumed"),
    [
        (SMALL, [], f"times of the tensors (run.yaml), {NO_OPTIMIZER}"),
        (SMALL, ["workload.optimizer_s=0.5"], "times of the tensors (run.yaml), optimizer 500.0 ms (command line)"),
        (
            MODEL,
            ["workload.flops_per_s=2e12"],
            f"1,000 tokens per rank and microbatch (run.yaml) at 2 TFLOP/s (command line), {NO_OPTIMIZER}",
        ),
        (
            MODEL,
            ["workload={path: w.json}"],
            "times of w.json (command line), optimizer 250.0 ms (w.json)",
        ),
    ],
)
def test_what_is_assumed_is_said_with_its_origin(config, tmp_path, text, arguments, assumed):
    tensors = [{"name": name, "numel": numel, "backward_s": 1.0} for name, numel in (("a", 100), ("b", 300), ("c", 100))]
    (tmp_path / "w.json").write_text(json.dumps({"tensors": tensors, "optimizer_s": 0.25}))

    result = invoke("-c", config(text), "--dp-size", 4, *arguments)

    assert f"assumed: {assumed}" in " ".join(result.stdout.split())


def test_the_optimizer_is_not_said_to_run_for_each_microbatch(config):
    changed = SMALL.replace("backward_s: 4.0", "backward_s: 4.0, forward_s: 1.0")

    lines = invoke("-c", config(changed), "workload.num_microbatches=3", "workload.optimizer_s=0.5").stdout.splitlines()

    assert "compute 24,500.0 ms: 3 x (forward 1,000.0 + backward 7,000.0) + optimizer 500.0" in lines


def test_names_are_escaped_and_cuts_are_printed_as_a_config(config):
    text = SMALL.replace("name: middle", 'name: "mid\\u202edle\\u001b[31m"')

    result = invoke("-c", config(text), "--cuts")
    assert "\u202e" not in result.stdout
    assert "\x1b" not in result.stdout

    for text, cuts in ((MODEL, ["c", "b", "a"]), (SMALL, ["middle", "first"])):
        printed = invoke("-c", config(text), "--dp-size", 4, "--cuts").stdout
        assert yaml.safe_load(printed[printed.rindex("ddp:") :]) == {"ddp": {"bucket_cuts": cuts}}


def test_a_trace_of_two_steps_of_the_best_plan_is_written(config, tmp_path):
    result = invoke("-c", config(SMALL), "--trace", tmp_path / "deep" / "trace.json")

    events = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    assert result.exit_code == 0
    assert "trace.json" in result.stderr
    assert {event["name"] for event in events if event["ph"] == "X"} == {"step 0", "step 1", "backward", "bucket 0", "bucket 1"}


@pytest.mark.parametrize(
    ("text", "arguments", "problem"),
    [
        ("workload: {tensors: [{name: a, numel: 1}]}", [], "link is required"),
        ("link: {latency_s: 1, seconds_per_byte: 1}", [], "there is nothing to simulate"),
        (SMALL, ["link.latency_s=-1"], "link.latency_s: should be greater than or equal to 0"),
        (SMALL, ["link.latency_s=.nan"], "link.latency_s: should be a finite number"),
        (SMALL, ["workload.tensors=[]"], "at least 1 item"),
        (SMALL, ["workload.tensors=[{name: a, numel: 1, backward_s: -2}]"], "backward_s: should be greater than or equal to 0"),
        (SMALL, ["link={kind: ring, latency_s: 0, bytes_per_s: 1}"], "give --dp-size"),
        (SMALL, ["workload.path=missing.json", "workload.tensors=null"], "missing.json: cannot be read"),
        (SMALL + MODEL.splitlines()[1], ["--dp-size", "2"], "from another model"),
        (SMALL, ["link.path=run.yaml", "link.latency_s=null"], "link.latency_s: unknown key"),
    ],
)
def test_bad_input_is_refused_with_code_2_and_what_to_do(config, text, arguments, problem):
    result = invoke("-c", config(text), *arguments)

    assert result.exit_code == 2
    assert problem in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["plan"], ["simulate", "link=h100-cluster-400g"]])
def test_gpt_3_175b_on_1024_ranks_is_answered_without_torch(command):
    name, *overrides = command
    arguments = [name, "-c", "gpt3-175b", *overrides, "--dp-size", "1024", "--json"]
    code = (
        "import sys\nfrom megabucket.cli.main import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dp_size"] == 1024
