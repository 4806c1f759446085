"""``megabucket explain``: every derived value with its reason."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from megabucket.cli.main import app


def invoke(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def test_each_value_is_printed_with_its_reason():
    result = invoke("-c", "llama3-8b", "--dp-size", 64)

    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        "bfloat16 parameters on 64 ranks",
        "field value reason",
        "grad_dtype float32 grad_reduce_in_fp32=True: bfloat16 gradients are accumulated and reduced in float32",
        "bucket_size 64,000,000 default: max(40_000_000, 1_000_000 * dp_size=64)",
        "buffer_order reversed no bucket_order: registration reversed, roughly the order of backward",
        "padded True layout='stable': the same padded layout whatever is switched on",
        "start_multiple 64 padded: a parameter starts at a multiple of 64",
        "bucket_end_multiple 128 padded: lcm(dp_size=64, 128), so that shards are equal",
        "collective reduce_scatter use_distributed_optimizer=True: a rank needs its shard only",
        "reduce_op sum average_in_collective=False: the mean is a scaled sum",
        "gradient_scale 0.015625 grad_reduction='mean': 1 / dp_size=64, each gradient is multiplied by it before the sum",
        "finished_by optimizer step finish='auto' with reduce-scatter: DistributedOptimizer.step() waits for the gradients",
        "overlaps_backward True overlap_grad_reduce=True: a bucket is launched as soon as its gradients are complete",
    ]


def test_a_reason_that_does_not_fit_goes_on_below_itself():
    result = CliRunner().invoke(app, ["explain", "-c", "llama3-8b", "--dp-size", "64"], env={"COLUMNS": "80"})

    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    start = next(number for number, line in enumerate(lines) if line.startswith("  finished_by"))
    assert lines[start : start + 3] == [
        "  finished_by          optimizer step  finish='auto' with reduce-scatter:",
        "                                       DistributedOptimizer.step() waits for the",
        "                                       gradients",
    ]


MOE = """
model:
  kind: params
  params: [{name: w, shape: [8]}, {name: e, shape: [8], group: expert}, {name: f, shape: [8], group: every}]
group_sizes: {expert: 2}
"""


def test_ranks_and_divisor_of_reduction_groups_are_printed(tmp_path):
    path = tmp_path / "moe.yaml"
    path.write_text(MOE)

    lines = [" ".join(line.split()) for line in invoke("-c", path, "--dp-size", 8).stdout.splitlines()]
    sums = json.loads(invoke("-c", path, "--dp-size", 8, "--json", "ddp.grad_reduction=sum").stdout)["groups"]

    mean = "grad_reduction='mean': ranks of dense=8, for every group without a divisor of its own"
    assert lines[-5:] == [
        "reduction groups",
        "name ranks divided by reason",
        f"dense 8 8 {mean}",
        f"every 8 8 {mean}",
        f"expert 2 8 {mean}",
    ]
    assert [(group["name"], group["num_ranks"], group["divisor"]) for group in sums] == [
        ("dense", 8, 1),
        ("every", 8, 1),
        ("expert", 2, 1),
    ]


def test_a_plan_of_cuts_is_explained(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {kind: params, params: [{name: a, shape: [4]}, {name: b, shape: [4]}]}\n"
        "ddp: {bucket_cuts: [a], bucket_order: [a, b]}"
    )

    values = json.loads(invoke("-c", path, "--dp-size", 2, "--json").stdout)["answers"][0]["values"]

    assert values["bucket_size"] == {"value": None, "reason": "bucket_cuts: 1 named parameter closes a bucket"}
    assert values["buffer_order"] == {"value": "recorded", "reason": "bucket_order: 2 parameters, the first gradient first"}
    assert values["overlaps_backward"]["value"] is True


def test_the_json_holds_values_and_reasons():
    result = invoke("-c", "gpt2-124m", "--dp-size", 8, "--json")

    data = json.loads(result.stdout)
    assert data["dp_size"] == 8
    (answer,) = data["answers"]
    assert answer["param_dtype"] == "float32"
    assert answer["values"]["bucket_size"] == {
        "value": 6_553_600,  # 25 * 2**20 / 4
        "reason": "bucket_cap_mb=25 MiB of gradients at 4 bytes per element",
    }


def test_a_model_of_two_dtypes_gets_two_answers(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {kind: params, dtype: bfloat16, params: [{name: a, shape: [4]}, {name: b, shape: [4], dtype: float64}]}"
    )

    answers = json.loads(invoke("-c", path, "--dp-size", 2, "--json").stdout)["answers"]

    assert [(answer["param_dtype"], answer["values"]["grad_dtype"]["value"]) for answer in answers] == [
        ("bfloat16", "float32"),
        ("float64", "float64"),
    ]
    assert answers[0]["values"]["overlaps_backward"]["value"] is True  # two buffers are two buckets


def test_without_a_model_what_depends_on_it_is_unknown(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("ddp: {num_buckets: 4}")

    result = invoke("-c", path)

    assert result.exit_code == 0
    assert "num_buckets=4: total elements // 4, known once there is a model" in result.stdout


def test_a_wrong_value_is_one_message_and_exit_code_2():
    result = invoke("-c", "llama3-8b", "ddp.finish=now")

    assert result.exit_code == 2
    assert result.stderr == ("error: command line, 'ddp.finish=now': ddp.finish: should be 'auto' or 'explicit' (got 'now')\n")
