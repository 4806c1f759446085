"""``megabucket.integrations.transformers`` against torch DDP under Trainer and accelerate, on two ranks: ``make frameworks``.

Distances of weights after 12 steps are in units of how far the reference has moved.
"""

import math

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: make frameworks installs it")
pytest.importorskip("transformers", reason="transformers is not installed: make frameworks installs it")

pytestmark = [pytest.mark.dist, pytest.mark.nightly, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
CLIP = 0.05  # of hugging_face_ranks.py
HOW = ["sharded", "all-reduce", "overlap"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hugging_face")


@pytest.fixture(scope="module")
def said(folder, run_ranks):
    return run_ranks("hugging_face_ranks.py", folder, ranks=2)


@pytest.fixture(scope="module")
def said_by_one_rank(said, folder, run_ranks):
    return run_ranks("hugging_face_ranks.py", folder, ranks=1)  # after two ranks have saved


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_trainer_ends_with_the_weights_and_logs_of_torch_ddp(said, how, precision, accumulate):
    norms, reference_norms = said[f"norms {how} {precision} {accumulate}"]
    losses, reference_losses = said[f"losses {how} {precision} {accumulate}"]

    assert said[f"{how} {precision} {accumulate}"] <= TOLERANCE
    assert len(norms) == len(losses) == 12
    assert norms == pytest.approx(reference_norms, rel=1e-5)
    assert losses == pytest.approx(reference_losses, rel=1e-5)
    assert min(norms) > 2 * CLIP


def test_without_clipping_weights_are_equal_bit_by_bit_and_the_norm_is_logged(said):
    norms, reference = said["norms without clipping"]

    assert said["without clipping"] == 0.0
    assert norms == pytest.approx(reference, rel=1e-5)
    assert said["what clipping changes"] > 100 * TOLERANCE


def test_train_may_be_called_again(said):
    assert said["trained again without clipping"] == 0.0


def test_a_trainer_goes_on_from_its_checkpoint_bit_by_bit(said):
    assert said["resumed"] == 0.0


def test_checkpoints_go_to_trainer_and_back(said):
    assert said["resumed by Trainer"] <= TOLERANCE
    assert said["resumed from Trainer"] <= TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2], ids=["two to one", "one to two"])
def test_checkpoints_go_on_with_another_number_of_ranks(said, said_by_one_rank, folder, run_ranks, ranks):
    found = said_by_one_rank if ranks == 1 else run_ranks("hugging_face_ranks.py", folder, ranks=2)

    assert found["resumed"] <= TOLERANCE
    assert found["accelerate resumed"] <= TOLERANCE


def test_a_trainer_goes_on_while_it_accumulates_or_scales_losses(said):
    assert said["resumed accumulating"] == 0.0
    assert said["resumed fp16"] == 0.0


def test_from_pretrained_gives_the_trained_model_with_its_tied_weights(said):
    assert said["from_pretrained"] == [True, True]
    assert 0 < said["evaluated"] < 10


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_with_accelerate_ends_with_the_weights_and_norms_of_torch_ddp(said, how, precision, accumulate):
    norms, reference = said[f"norms {how} accelerate {precision} {accumulate}"]

    assert said[f"{how} accelerate {precision} {accumulate}"] <= TOLERANCE
    assert len(norms) == 12
    assert norms == pytest.approx(reference, rel=1e-5)
    assert min(norms) > 2 * CLIP


@pytest.mark.parametrize("case", ["scaled", "accelerate scaled"])
def test_losses_are_scaled_and_unscaled_gradients_clipped(said, case):
    distance, norms, expected_norms, scale, expected_scale = said[case]
    finite = [index for index, norm in enumerate(expected_norms) if math.isfinite(norm)]

    assert distance <= TOLERANCE
    assert scale == expected_scale
    assert 6 <= len(finite) < 12  # some steps overflow
    assert [index for index, norm in enumerate(norms) if math.isfinite(norm)] == finite
    assert [norms[index] for index in finite] == pytest.approx([expected_norms[index] for index in finite], rel=1e-5)


def test_one_rank_accumulates_too(said_by_one_rank):
    assert said_by_one_rank["accumulated on one rank"] <= TOLERANCE


def test_save_state_and_load_state_hold_the_state_of_all_ranks_and_tied_weights(said):
    assert said["accelerate resumed"] == [0.0, 6]


def test_what_is_not_supported_is_refused_by_name(said):
    part, order, arguments = said["refusals"]

    assert "18 of the model are missing" in part
    assert "prepare(model, optimizer, ...) together" in order
    assert "ddp_bucket_cap_mb: these are arguments of torch DDP" in arguments
