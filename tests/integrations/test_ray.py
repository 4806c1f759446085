"""``megabucket`` on two workers of Ray Train against torch DDP from Ray's ``prepare_model``: ``make frameworks``.

Distances are between weights after 8 steps.
"""

import subprocess
import sys

import pytest

import megabucket as mb

pytest.importorskip("ray.train.torch", reason="ray is not installed: make frameworks installs it")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]  # starts processes, and is not in the gate

MODES = ["sharded", "all-reduced"]


@pytest.fixture(scope="module")
def said(tmp_path_factory, run_ranks):
    return run_ranks("ray_workers.py", tmp_path_factory.mktemp("ray"))


@pytest.mark.parametrize("how", MODES)
def test_every_step_on_workers_has_the_loss_of_torch_ddp(said, how):
    for found, reference in said[f"{how}: losses"]:
        assert found == reference
        assert len(set(found)) == 8


@pytest.mark.parametrize("how", MODES)
def test_the_weights_on_all_workers_are_those_of_torch_ddp(said, how):
    assert said["moved"] > 0.01
    assert said[f"{how}: weights"] == [0.0, 0.0]


def test_after_a_lost_worker_both_go_on_from_the_storage_and_end_as_without_a_loss(said):
    assert said["checkpoint"] == "broken/step-3"
    assert said["resumed from"] == [3, 3]
    assert said["resumed: weights"] == [0.0, 0.0]


def test_one_process_goes_on_with_what_two_workers_have_saved(said):
    first, distance = said["resumed alone"]

    assert first == 3
    assert distance <= 1e-6


def test_the_demo_on_workers_is_gone_on_with_by_a_second_call(tmp_path):
    def run(steps: int) -> str:
        command = [sys.executable, "-m", "examples.cluster.ray_train", "--storage", str(tmp_path), f"train.steps={steps}"]
        small = ["train.eval_batches=1", "optimizer.final_lr_fraction=1.0", "model.num_layers=1"]
        done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    first, second = run(2), run(4)

    assert "going on from step" not in first
    assert "going on from step 2 of 4" in second
    assert mb.open_checkpoint(tmp_path / "bytegpt" / "checkpoints").step == 4
