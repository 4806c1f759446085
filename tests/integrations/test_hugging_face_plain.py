"""Torch's own optimizers under megabucket without shards, against torch DDP under Trainer and accelerate, on two gloo ranks.

``make frameworks`` runs it. Weights after 12 steps are equal bit by bit.
"""

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: make frameworks installs it")
pytest.importorskip("transformers", reason="transformers is not installed: make frameworks installs it")

pytestmark = [pytest.mark.dist, pytest.mark.nightly, pytest.mark.timeout(600)]

TRAINERS = {"Adafactor": "Adafactor", "Adafactor, accumulating in bf16": "Adafactor", "AdamW, scaled": "AdamW"}


@pytest.fixture(scope="module")
def said(tmp_path_factory, run_ranks):
    return run_ranks("hugging_face_plain_ranks.py", tmp_path_factory.mktemp("hugging_face"), ranks=2)


@pytest.mark.parametrize("case", TRAINERS)
def test_a_trainer_ends_with_the_weights_and_norms_of_torch_ddp(said, case):
    assert said[case] == [0.0, True, TRAINERS[case]]


@pytest.mark.parametrize("way", ["resumed", "resumed by Trainer", "resumed from Trainer"])
def test_checkpoints_go_to_trainer_and_back(said, way):
    assert said[f"Adafactor {way}"] == 0.0


@pytest.mark.parametrize("mode", ["sharded", "without shards"])
def test_a_schedule_free_optimizer_is_switched_by_the_trainer_and_evaluates_as_under_torch_ddp(said, mode):
    assert said[f"schedule-free {mode}"] == [0.0, True, 3]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accelerate_steps_and_clips_by_value_with_several_optimizers_prepared_in_any_order(said, accumulate):
    assert said[f"Muon and AdamW {accumulate}"] == 0.0


def test_accelerate_goes_on_from_its_state(said):
    assert said["Muon and AdamW resumed"] == 0.0


def test_accelerate_scales_losses_with_several_optimizers(said):
    assert said["Muon and AdamW scaled"] == [0.0, True]
