"""``megabucket.integrations.lightning`` against Lightning's own DDP, on two gloo ranks: ``make frameworks``.

Distances of weights after 12 steps are in units of how far the reference has moved.
"""

import itertools

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: make frameworks installs it")

pytestmark = [pytest.mark.dist, pytest.mark.nightly, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
CASES = [(precision, accumulate) for precision in ("32-true", "bf16-mixed") for accumulate in (1, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def said(folder, run_ranks):
    return run_ranks("lightning_ranks.py", folder, ranks=2)


@pytest.fixture(scope="module")
def said_by_one_rank(said, folder, run_ranks):
    return run_ranks("lightning_ranks.py", folder, ranks=1)  # after two ranks have saved


@pytest.mark.parametrize("how", ["megabucket", "all-reduce", "overlap"])
@pytest.mark.parametrize(("precision", "accumulate"), CASES)
def test_a_trainer_ends_with_the_weights_of_torch_ddp(said, how, precision, accumulate):
    assert said[f"{how} {precision} {accumulate}"] <= TOLERANCE


def test_clipping_bites_in_every_step_and_is_by_the_norm_of_all_ranks(said):
    assert said["smallest norm"] > 2 * 0.05  # CLIP of lightning_ranks.py
    assert said["what clipping changes"] > 100 * TOLERANCE


def test_fp16_ends_with_the_weights_of_torch_ddp_and_the_same_scales(said):
    found, reference = said["scales"]

    assert said["fp16"] <= TOLERANCE
    assert found == reference
    assert min(found) < found[0]  # some steps have overflowed
    assert any(later > earlier for earlier, later in itertools.pairwise(found))


def test_fabric_scales_losses_and_clips_what_was_unscaled(said):
    norms, reference = said["fabric norms fp16"]

    assert said["fabric fp16"] <= TOLERANCE
    assert norms == pytest.approx(reference, rel=1e-5)


def test_manual_optimization_accumulates_and_clips_as_under_torch_ddp(said):
    assert said["manual"] <= TOLERANCE


def test_a_run_goes_on_from_a_checkpoint_that_was_saved_after_fit(said):
    assert said["half is no whole"] > 100 * TOLERANCE
    assert said["resumed"] == 0.0


def test_checkpoints_go_to_torch_ddp_and_back(said):
    assert said["resumed by ddp"] <= TOLERANCE
    assert said["resumed from ddp"] <= TOLERANCE


def test_a_run_goes_on_from_a_checkpoint_of_a_callback_during_fit(said):
    assert said["resumed from one of fit"] == 0.0


def test_a_run_in_fp16_goes_on_with_its_scale(said):
    distance, scales, expected = said["fp16 resumed"]

    assert distance == 0.0
    assert scales == expected
    assert len(scales) == 6


@pytest.mark.parametrize("ranks", [1, 2], ids=["two to one", "one to two"])
def test_checkpoints_go_on_with_another_number_of_ranks(said, said_by_one_rank, folder, run_ranks, ranks):
    found = said_by_one_rank if ranks == 1 else run_ranks("lightning_ranks.py", folder, ranks=2)
    distance, num_steps = found["fabric resumed"]

    assert found["resumed"] <= TOLERANCE
    assert distance <= TOLERANCE
    assert num_steps == 6


def test_in_bf16_alone_the_update_stays_float32_and_ends_nearer_to_float32_than_torch_ddp(said):
    distance, of_torch = said["bf16-true"]

    assert distance < 0.05
    assert distance < of_torch / 2


def test_after_fit_module_and_optimizer_are_plain_ones(said):
    assert said["plain after fit"] == [True, True, True]


@pytest.mark.parametrize(("precision", "accumulate"), CASES)
def test_fabric_ends_with_the_weights_and_norms_of_torch_ddp(said, precision, accumulate):
    norms, reference = said[f"fabric norms {precision} {accumulate}"]

    assert said[f"fabric {precision} {accumulate}"] <= TOLERANCE
    assert len(norms) == 12
    assert norms == pytest.approx(reference, rel=1e-5)
    assert min(norms) > 2 * 0.05


def test_fabric_goes_on_from_its_checkpoint_with_clipping_and_schedule_bit_by_bit(said):
    assert said["fabric resumed"] == [0.0, 6]


def test_what_is_not_supported_is_refused_by_name(said):
    arguments, hooks, by_value = said["refusals"]

    assert "bucket_cap_mb: these are arguments of torch DDP" in arguments
    assert "ddp_comm_hook, ddp_comm_state: these are arguments of torch DDP" in hooks
    assert "clipped by norm only" in by_value
    assert "DistributedDataParallelConfig(use_distributed_optimizer=False)" in by_value


def test_a_failure_on_one_rank_ends_fit_on_all_and_leaves_plain_modules(said):
    assert said["failure on one rank"] == [[["PeerFailedError", True], ["ValueError", True]]] * 2  # sharded, or not
