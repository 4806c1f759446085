"""Several sharded optimizers of one model with accelerate, against torch DDP, on two gloo ranks: ``make frameworks``.

Distances of weights after 12 steps are in units of how far the reference has moved.
"""

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: make frameworks installs it")
pytest.importorskip("transformers", reason="transformers is not installed: make frameworks installs it")

pytestmark = [pytest.mark.dist, pytest.mark.nightly, pytest.mark.timeout(600)]

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def said(tmp_path_factory, run_ranks):
    return run_ranks("hugging_face_parts_ranks.py", tmp_path_factory.mktemp("hugging_face"), ranks=2)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("how", ["sharded", "overlap", "all-reduce"])
def test_muon_and_adamw_prepared_in_any_order_end_with_the_weights_of_torch_ddp(said, how, accumulate):
    assert said[f"{accumulate} {how}"] == 0.0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("how", ["sharded", "overlap", "all-reduce"])
@pytest.mark.parametrize("clip", ["clipped", "clipped by part"])
def test_they_clip_by_the_norm_of_the_model_or_of_one_optimizer(said, clip, how, accumulate):
    assert said[f"{clip} {accumulate} {how}"] <= (0.0 if how == "all-reduce" else TOLERANCE)


@pytest.mark.parametrize("case", ["scaled", "scaled clipped"])
def test_losses_are_scaled(said, case):
    assert max(said[case]) <= TOLERANCE


def test_steps_that_overflow_are_skipped(said):
    scale, is_finite = said["overflowing"]

    assert scale < 2.0**20  # of hugging_face_ranks.py
    assert is_finite


@pytest.mark.parametrize("first", ["torch", "sharded"])
@pytest.mark.parametrize("second", ["torch", "sharded"])
def test_states_go_from_each_to_each(said, first, second):
    assert said[f"{first} to {second}"] == 0.0


def test_what_is_not_supported_is_refused_by_name(said):
    incomplete, part = said["refusals"]

    assert "'model.layers.0.self_attn.v_proj.weight'" in incomplete
    assert "or all parameters of one optimizer" in part
