"""Torch's own optimizers under megabucket without shards, against Lightning's DDP: bit by bit, on two gloo ranks.

``make frameworks`` runs it. Distances are the largest difference of any weight after 12 steps, or 24 evaluations.
"""

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: make frameworks installs it")

pytestmark = [pytest.mark.dist, pytest.mark.nightly, pytest.mark.timeout(600)]

OPTIMIZERS = {
    "LBFGS": ["LBFGS"],
    "Adafactor": ["Adafactor"],
    "Adafactor, accumulating": ["Adafactor"],
    "AdamW, clipped by norm": ["AdamW"],
    "AdamW, clipped by value": ["AdamW"],
    "AdamW, accumulating in bf16": ["AdamW"],
    "Muon and AdamW": ["Muon", "AdamW"],
    "GAN": ["Adam", "Adam"],
    "GAN, toggled": ["Adam", "Adam"],
    "GAN, finding unused": ["Adam", "Adam"],
    "GAN, toggled, finding unused": ["Adam", "Adam"],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory, run_ranks):
    return run_ranks("lightning_plain_ranks.py", tmp_path_factory.mktemp("lightning"), ranks=2)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_of_the_user_end_with_the_weights_of_torch_ddp(said, case):
    assert said[case]["distance"] == 0.0
    assert said[case]["moved"] > 0.01


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_after_fit_there_is_a_plain_module_and_the_optimizers_hold_its_parameters(said, case):
    assert said[case]["is plain"] == [True, True]
    assert said[case]["optimizers"] == OPTIMIZERS[case]
    assert said[case]["holds the parameters"]


def test_clipping_changes_the_result(said):
    moved = {said[f"AdamW, clipped by {kind}"]["moved"] for kind in ("norm", "value")}

    assert len(moved) == 2


def test_a_torch_scaler_has_the_same_scales_and_weights(said):
    found, reference = said["fp16"]["scales"]

    assert said["fp16"]["distance"] == 0.0
    assert found == reference
    assert min(found) < found[0]  # some steps have overflowed


@pytest.mark.parametrize("first", ["ddp", "megabucket"])
@pytest.mark.parametrize("second", ["ddp", "megabucket"])
def test_checkpoints_with_two_optimizers_go_from_each_strategy_to_each(said, first, second):
    assert said[f"{first} to {second}"] == 0.0


@pytest.mark.parametrize("case", ["GAN", "Muon and AdamW", "LBFGS"])
def test_fabric_ends_with_the_weights_of_torch_ddp_and_plain_modules(said, case):
    assert said[f"Fabric, {case}"] == [0.0, True, True]


def test_fabric_goes_on_from_its_checkpoint(said):
    assert said["Fabric, GAN resumed"] == 0.0


@pytest.mark.parametrize("mode", ["sharded", "without shards"])
@pytest.mark.parametrize("callback", ["Unfreezing", "UnfreezingByHand"])
def test_parameters_that_a_callback_unfreezes_are_trained_as_in_one_process(said, callback, mode):
    distance = said[f"{callback} {mode}"]

    assert isinstance(distance, float), distance
    assert distance <= 1e-6
