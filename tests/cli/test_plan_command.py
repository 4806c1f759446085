"""``megabucket plan``: the table, the JSON, the exit codes, and that it needs no torch and little time."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from megabucket.cli.main import app
from megabucket.layout import build_layout
from megabucket.planning import load_config, param_specs

PARAMS = """
model:
  kind: params
  params:
    - {name: embedding, shape: [100]}
    - {name: block, shape: [300]}
    - {name: expert, shape: [10], group: expert, dtype: bfloat16}
    - {name: head, shape: [100]}
ddp:
  bucket_size: 200
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(PARAMS)
    return str(path)


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_table_has_a_line_per_bucket_and_the_totals(config):
    result = invoke("-c", config, "--dp-size", 8)

    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[-8:] == [
        # head at [0, 100), block at [128, 428), rounded up to 512; then embedding; the expert has its own buffer
        "buffer dense/float32->float32: 2 buckets cut for 8 ranks",
        "bucket  params  elements  padding, %  gradients, bytes  padding-only ranks  from ... to",
        "     0       2       512      21.875          2.00 KiB                   1  head ... block",
        "     1       1       128      21.875             512 B                   1  embedding",
        "",
        "buffer expert/bfloat16->float32: 1 bucket cut for 8 ranks",
        "bucket  params  elements  padding, %  gradients, bytes  padding-only ranks  from ... to",
        "     0       1       128      92.188             512 B                   7  expert",
    ]
    assert lines[lines.index("") + 1 :][:4] == [  # after the advice
        "4 parameters, 510 elements (510)",
        "3 buckets in 2 buffers",
        "padding 258 elements (33.5938%)",
        "gradients 3.00 KiB, parameters 2.75 KiB",
    ]
    assert "in 3 buckets some ranks own only padding and have nothing to update" in result.stdout


NARROW = {"COLUMNS": "80"}


@pytest.mark.parametrize("config", ["gpt2-124m", "llama3-70b", "mixtral-8x7b"])
@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(config, columns):
    arguments = ["plan", "-c", config, "--dp-size", "8"]

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})

    answer = json.loads(invoke(*arguments[1:], "--json").stdout)
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines if answer["fingerprint"] not in line) <= columns
    for bucket in (*answer["buckets"][:5], *answer["buckets"][-5:]):
        assert any(f" {bucket['numel']:,} " in line for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_names_are_whole(columns):
    result = CliRunner().invoke(app, ["plan", "-c", "smollm2-360m", "--dp-size", "8"], env={"COLUMNS": str(columns)})

    assert "model.layers.27.mlp.down_proj.weight" in result.stdout


def test_names_have_their_own_lines_where_they_do_not_fit_beside_the_numbers(tmp_path):
    path = tmp_path / "run.yaml"
    long_name = "n" * 70
    params = [{"name": name, "shape": [1]} for name in ("first", long_name, "end")]
    path.write_text(json.dumps({"model": {"kind": "params", "params": params}}))

    short = CliRunner().invoke(app, ["plan", "-c", str(path)], env=NARROW).stdout.splitlines()
    split = CliRunner().invoke(app, ["plan", "-c", str(path), "ddp.bucket_size=1"], env=NARROW).stdout.splitlines()

    assert short[-2:] == [
        "bucket  params  elements  padding, %  gradients, bytes  from ... to",
        "     0       3       256      98.828          1.00 KiB  end ... first",
    ]
    assert split[split.index("buffer dense/float32->float32: 3 buckets cut for 1 rank") + 1 :][:6] == [
        "bucket  params  elements  padding, %  gradients, bytes",
        "        from ... to",
        "     0       1       128      99.219             512 B",
        "        end",
        "     1       1       128      99.219             512 B",
        "        " + long_name,
    ]


def test_the_memory_of_a_rank_is_shown_for_both_modes(config):
    result = invoke("-c", config, "mode=reduce_scatter", "optimizer.name=adam", "--dp-size", 2, "--activation-gib", 0.5)

    # Owned by rank 0 of 2: 256 elements of the first bucket (100 + 128 of parameters), 64 of the second, 10 of the expert's.
    lines = result.stdout.splitlines()
    start = lines.index("memory of the first of 2 ranks, DistributedOptimizer with adam")
    assert lines[start + 1 : start + 12] == [
        "                     all_reduce, bytes  reduce_scatter, bytes *",
        "  parameters                  1.97 KiB                 1.97 KiB",  # 500 * 4 + 10 * 2
        "  gradients                   1.99 KiB                 1.99 KiB",  # 510 * 4
        "  padding                     1.79 KiB                 1.79 KiB",  # (512 - 400 + 128 - 100) * 8 + 118 * 6
        "  main parameters                 40 B                     40 B",  # 10 * 4
        "  moments                     3.98 KiB                 2.36 KiB",  # 510 * 8 and (100 + 128 + 64 + 10) * 8
        "  optimizer padding              224 B                    224 B",  # the gap of 28 before block, 8 bytes each
        "  scratch                         82 B                     82 B",  # 48 + 8 + 3 * 4 + 3 * 4 + 2
        "  activations               512.00 MiB               512.00 MiB",
        "  total                     512.01 MiB               512.01 MiB",
        "  * the mode of this config",
    ]


def test_the_json_has_the_memory_of_both_modes_in_bytes(config):
    plan = json.loads(invoke("-c", config, "--dp-size", 2, "--json").stdout)

    assert plan["mode"] == "all_reduce"
    assert set(plan["memory"]) == {"all_reduce", "reduce_scatter"}
    assert plan["memory"]["all_reduce"]["moment_bytes"] == 510 * 8
    assert plan["memory"]["reduce_scatter"]["moment_bytes"] == (100 + 128 + 64 + 10) * 8
    for memory in plan["memory"].values():
        assert memory.pop("total_bytes") == sum(memory.values())


def test_activations_below_zero_are_wrong_usage(config):
    assert invoke("-c", config, "--activation-gib", -1).exit_code == 2


def test_the_json_holds_the_same_numbers(config):
    result = invoke("-c", config, "--dp-size", 8, "--json")

    plan = json.loads(result.stdout)
    assert plan["dp_size"] == 8
    assert plan["totals"]["numel"] == 768
    assert plan["totals"]["params_numel"] == 510
    assert [bucket["numel"] for bucket in plan["buckets"]] == [512, 128, 128]
    assert [bucket["num_padding_only_ranks"] for bucket in plan["buckets"]] == [1, 1, 7]
    assert plan["buckets"][0] == {
        "buffer": "dense/float32->float32",
        "bucket": 0,
        "first_param": "head",
        "last_param": "block",
        "num_params": 2,
        "params_numel": 400,
        "numel": 512,
        "grad_bytes": 2_048,
        "num_shards": 8,
        "num_padding_only_ranks": 1,
        "closed_by": "size",
        "padding_fraction": 0.21875,
    }


def test_the_fingerprint_is_the_layout_s(config):
    plan = json.loads(invoke("-c", config, "--dp-size", 4, "--expert-dp-size", 2, "--json").stdout)

    run = load_config(config)
    layout = build_layout(param_specs(run.model), run.ddp, dp_size=4, group_sizes={"expert": 2})
    assert plan["fingerprint"] == layout.fingerprint


def test_overrides_change_the_plan(config):
    plan = json.loads(invoke("-c", config, "ddp.bucket_size=1", "--json").stdout)

    assert [bucket["first_param"] for bucket in plan["buckets"]] == ["head", "block", "embedding", "expert"]


def test_cuts_by_name_are_said_to_be_such(config):
    result = invoke(
        "-c", config, "ddp.bucket_size=null", "ddp.bucket_cuts=[head]", "ddp.bucket_order=[head,expert,embedding,block]"
    )

    lines = result.stdout.splitlines()
    start = lines.index("buffer dense/float32->float32: 2 buckets cut for 1 rank, at named parameters")
    assert [line.split()[-1] for line in lines[start + 2 : start + 4]] == ["head", "block"]
    assert "buffer expert/bfloat16->float32: 1 bucket cut for 1 rank" in lines


def test_expert_buckets_are_cut_for_their_own_group(config):
    plan = json.loads(invoke("-c", config, "--dp-size", 8, "--expert-dp-size", 2, "--json").stdout)

    assert {bucket["buffer"]: bucket["num_shards"] for bucket in plan["buckets"]} == {
        "dense/float32->float32": 8,
        "expert/bfloat16->float32": 2,
    }


def test_many_buckets_are_cut_in_the_middle_unless_all_are_asked_for():
    arguments = ("-c", "gpt2-124m", "ddp.bucket_cap_mb=null", "ddp.bucket_size=1")

    short, full = invoke(*arguments), invoke(*arguments, "--all")

    assert "138 more, see --all" in short.stdout  # 148 buckets of one parameter, ten shown
    assert "blocks.5.mlp.up.bias" not in short.stdout
    assert "see --all" not in full.stdout
    assert "blocks.5.mlp.up.bias" in full.stdout


def test_too_much_padding_is_a_finding(config):
    result = invoke("-c", config, "--dp-size", 8, "--max-padding", 0.1)

    assert result.exit_code == 1
    assert result.stderr == "error: padding is 33.5938% of the buffers, more than --max-padding 10.0000%\n"
    assert "fingerprint" in result.stdout  # the answer is printed all the same


def test_padding_at_the_limit_is_no_finding(config):
    assert invoke("-c", config, "--dp-size", 8, "--max-padding", 0.34).exit_code == 0


def test_control_characters_and_markup_of_names_are_printed_as_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text('model: {kind: params, params: [{name: "a\\x1b[2J\\nb", shape: [1]}, {name: "[red]c[/red]", shape: [1]}]}')

    result = invoke("-c", path)

    assert "[red]c[/red] ... a\\x1b[2J\\nb" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "",
            [],
            (
                "error: run.yaml: model is required to plan; give a preset (-c gpt2-124m), a config.json of Hugging Face, "
                "module:callable, or a YAML file with a model section\n"
            ),
        ),
        ("ddp: {bucket_size: 0}", [], "error: run.yaml:1: ddp.bucket_size: should be greater than 0 (got 0)\n"),
        (
            "a: 1\na: 2",
            [],
            "error: run.yaml:2: not valid YAML: the key 'a' is given twice, first in line 1; keep one of them\n",
        ),
        (
            PARAMS,
            ["ddp.bucket_sise=4"],
            "error: command line, 'ddp.bucket_sise=4': ddp.bucket_sise: unknown key 'bucket_sise'; ",
        ),
        (PARAMS, ["ddp.bucket_size=null", "ddp.num_buckets=999"], "error: num_buckets=999 is more than the 510 elements there"),
        (PARAMS.replace("block", "head"), [], "error: the same parameter is given twice: 'head'. "),
    ],
)
def test_what_cannot_be_planned_is_one_message_and_exit_code_2(tmp_path, text, overrides, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)

    result = invoke("-c", path, *overrides)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.replace(f"{tmp_path}/", "").startswith(message)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["-c", "x.yaml", "--dp-size", "0"], ["-c", "x.yaml", "--max-padding", "2"], ["--what"]]
)
def test_wrong_usage_has_exit_code_2(arguments):
    assert invoke(*arguments).exit_code == 2


def test_a_missing_file_is_named():
    result = invoke("-c", "missing.yaml")

    assert result.exit_code == 2
    assert result.stderr == "error: missing.yaml: cannot be read: No such file or directory\n"


def test_a_70b_model_is_planned_without_torch():
    code = (
        "import sys; from megabucket.cli.main import app\n"
        "try: app(['plan', '-c', 'llama3-70b', '--dp-size', '512'])\n"
        "except SystemExit as stop: print('exit', stop.code, 'torch' in sys.modules)"
    )

    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    wall_s = time.perf_counter() - start

    print(f"planned in {wall_s:.2f} s; the aim is below 2 s")
    assert "723 parameters, 70,553,706,496 elements (70.55 G)" in result.stdout
    assert result.stdout.splitlines()[-1] == "exit 0 False"


def test_the_package_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "megabucket", "plan", "-c", "gpt2-124m", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert json.loads(result.stdout)["totals"]["params_numel"] == 124_439_808
