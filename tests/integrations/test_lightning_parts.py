"""Several sharded optimizers in manual optimization, against Lightning's own DDP, on two gloo ranks: ``make frameworks``.

Distances are the largest difference of any weight, or value of an optimizer's state, after 12 steps.
"""

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: make frameworks installs it")

pytestmark = [pytest.mark.dist, pytest.mark.nightly, pytest.mark.timeout(600)]

OPTIMIZERS = {
    "Muon and AdamW": ["Muon", "AdamW"],
    "GAN": ["Adam", "Adam"],
    "GAN, toggled": ["Adam", "Adam"],
    "GAN, cleared after each step": ["Adam", "Adam"],
    "GAN, clipped": ["Adam", "Adam"],
    "GAN in bf16": ["Adam", "Adam"],
    "GAN, scaled": ["Adam", "Adam"],
}
CLIPPED = ("Muon and AdamW", "GAN, clipped", "GAN in bf16")  # by a norm that is summed up in another order
HOW = [
    (case, how)
    for case in OPTIMIZERS
    for how in ("sharded", "overlap", "all-reduce")
    if (case, how) != ("GAN, scaled", "all-reduce")
]


@pytest.fixture(scope="module")
def said(tmp_path_factory, run_ranks):
    return run_ranks("lightning_parts_ranks.py", tmp_path_factory.mktemp("lightning"), ranks=2)


@pytest.mark.parametrize(("case", "how"), HOW)
def test_optimizers_that_step_one_by_one_end_with_the_weights_and_state_of_torch_ddp(said, case, how):
    found = said[f"{case}, {how}"]
    tolerance = 1e-6 if case in CLIPPED and how != "all-reduce" else 0.0

    assert found["moved"] > 0.01
    assert found["distance"] <= tolerance
    assert found["state"] <= tolerance
    assert found["rates"]
    assert found["scales"]


@pytest.mark.parametrize(("case", "how"), HOW)
def test_after_fit_there_is_a_plain_module_with_the_optimizers_of_the_user(said, case, how):
    assert said[f"{case}, {how}"]["is plain"] == [True, True]
    assert said[f"{case}, {how}"]["optimizers"] == OPTIMIZERS[case]


@pytest.mark.parametrize("case", ["Muon and AdamW", "GAN", "GAN, cleared after each step"])
@pytest.mark.parametrize("first", ["ddp", "sharded"])
@pytest.mark.parametrize("second", ["to ddp", "to sharded"])
def test_checkpoints_of_fit_go_from_each_strategy_to_each(said, case, first, second):
    assert said[f"{case}, {first} {second}"] <= 1e-6


@pytest.mark.parametrize("case", ["Muon and AdamW", "GAN", "GAN, cleared after each step"])
@pytest.mark.parametrize("first", ["ddp", "sharded"])
def test_a_run_goes_on_from_what_was_saved_after_fit(said, case, first):
    assert said[f"{case}, {first} after fit"] <= 1e-6


@pytest.mark.parametrize("how", ["sharded", "all-reduce"])
def test_fabric_sets_up_a_module_with_several_optimizers(said, how):
    distance, *is_plain = said[f"Fabric, {how}"]

    assert distance <= (1e-6 if how == "sharded" else 0.0)
    assert is_plain == [True, True]


def test_what_is_not_supported_is_refused_by_name(said):
    one_by_one, incomplete = said["refusals"]

    assert "fabric.setup(model, first, second)" in one_by_one
    assert "'net.2.weight', 'net.2.bias'" in incomplete
