"""``megabucket profile`` over the demo: alone and under torchrun."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from examples.bytegpt.config import load_demo_config
from examples.bytegpt.workload import workload as demo
from megabucket.cli.main import app
from megabucket.measure.profile import ProfilePlan, profile_program
from megabucket.measure.ranks import Ranks
from megabucket.planning.architecture import param_specs
from megabucket.planning.workload import check_workload_matches, workload_from_dict

DEMO = ("--workload", "examples.bytegpt.workload:workload")


@pytest.fixture
def config_path(config_file):
    return config_file()


def check_is_of(config_path, data):
    workload = workload_from_dict(data)
    config = load_demo_config(config_path, [])
    check_workload_matches(workload, param_specs(config.model), fingerprint=data["facts"]["model_fingerprint"])
    assert workload.num_microbatches == config.program.train.num_microbatches == 2
    assert min(workload.forward_s, workload.backward_s, workload.optimizer_s) > 0
    # Backward reaches the embeddings last.
    assert workload.tensors[workload.order[-1]].name.endswith("embedding.weight")
    assert data["facts"]["unused"] == []
    assert data["facts"]["is_forward_in_registration_order"]
    return workload


@pytest.mark.parametrize("mode", ["all_reduce", "reduce_scatter"])
def test_one_process_writes_a_workload_of_the_model_that_is_trained(config_path, tmp_path, mode):
    out = tmp_path / "new" / "workload.json"
    arguments = ["profile", *DEMO, "-c", str(config_path), f"mode={mode}", "--out", str(out), "--steps", "3", "--warmup", "1"]

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    workload = check_is_of(config_path, data)
    assert (data["facts"]["num_steps"], data["facts"]["num_microbatches_seen"]) == (3, 6)
    assert f"wrote {out}: {len(workload.tensors)} tensors" in result.stdout
    assert "rank 0 is the slowest one" in result.stdout


@pytest.mark.dist
@pytest.mark.nightly
def test_two_ranks_write_one_workload(config_path, tmp_path):
    out = tmp_path / "workload.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megabucket"]
    options = ["--out", str(out), "--steps", "2", "--warmup", "1", "--rank", "median", "--json"]

    result = subprocess.run(
        [*command, "profile", *DEMO, "-c", str(config_path), *options],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert data == json.loads(out.read_text())
    check_is_of(config_path, data)
    assert len(data["facts"]["compute_s_of_ranks"]) == 2
    assert data["facts"]["which_rank"] == "median"


def test_sixteen_bit_parameters_send_four_bytes_per_gradient_and_two_per_parameter(tiny_run):
    config = tiny_run(model={"dtype": "bfloat16"})

    workload = profile_program(demo, config, ProfilePlan(num_steps=1, num_warmup_steps=1), ranks=Ranks()).workload

    assert (workload.bytes_per_element, workload.param_bytes_per_element) == (4, 2)


@pytest.mark.parametrize("option", ["--steps", "--warmup"])
def test_a_profile_without_steps_is_refused(option):
    result = CliRunner().invoke(app, ["profile", *DEMO, option, "0"])

    assert result.exit_code == 2
    assert option in result.stderr


def test_a_model_that_cannot_be_trained_here_is_one_message_and_exit_code_2(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {kind: params, params: [{name: a, shape: [4]}]}")

    result = CliRunner().invoke(app, ["profile", *DEMO, "-c", str(path), "--out", str(tmp_path / "w.json")])

    assert result.exit_code == 2
    assert "training needs a model of kind 'gpt'" in result.stderr


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(config_path, tmp_path):
    (tmp_path / "taken").write_text("")

    result = CliRunner().invoke(
        app, ["profile", *DEMO, "-c", str(config_path), "--out", str(tmp_path / "taken" / "workload.json")]
    )

    assert result.exit_code == 2
    assert "workload.json: cannot be written: " in result.stderr
