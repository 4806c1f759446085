"""Float8 layers of torchao, emulated, under megabucket and under torch DDP, on two gloo ranks.

``make frameworks`` runs it. Weights after 12 steps are equal bit by bit, whatever the recipe. The clip of torch DDP has its
factor in double precision: clip_grad_norm_ rounds it to float32, and float8 makes 6 % of the last bit of a weight.
"""

import pytest

pytest.importorskip("torchao", reason="torchao is not installed: make frameworks installs it")

pytestmark = [pytest.mark.dist, pytest.mark.nightly, pytest.mark.timeout(600)]

WAYS = ["reduce-scatter", "reduce-scatter without overlap", "all-reduce"]
CASES = ["tensorwise", "tensorwise, accumulating", "rowwise", "rowwise, accumulating in bf16", "rowwise_with_gw_hp"]


@pytest.fixture(scope="module")
def said(tmp_path_factory, run_ranks):
    return run_ranks("float8_ranks.py", tmp_path_factory.mktemp("float8"), ranks=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_float8_layers_end_with_the_weights_of_torch_ddp(said, case, way):
    assert said[case][way] == [0.0, 0.0]


def test_compiled_float8_layers_end_with_the_weights_of_torch_ddp(said):
    assert said["compiled"]["reduce-scatter"] == [0.0, 0.0]


@pytest.mark.parametrize("way", WAYS)
def test_clipped_float8_layers_end_with_the_norms_and_weights_of_torch_ddp(said, way):
    of_weights, of_norms = said["clipped"][way]

    assert of_norms <= 1e-6
    assert of_weights <= 1e-4


def test_weights_made_for_the_gather_of_fsdp2_are_refused_by_name(said):
    assert (
        "'0.weight' cannot live in a parameter and gradient buffer: it is a WeightWithDynamicFloat8CastTensor"
        in said["refusal"]
    )
