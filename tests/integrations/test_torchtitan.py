"""torchtitan's own model, plan and train step on tp 2 x dp 2, against one process and its own ``fully_shard``: by night.

torchtitan is in no environment of ours, because it asks for far more than a train step needs. To run these tests::

    pip install --no-deps --target TITAN torchtitan==0.3.0 spmd_types==0.2.3 tyro typeguard docstring-parser shtab \\
        torch_checkpointing torchdata einops
    PYTHONPATH=TITAN python -m pytest tests/integrations/test_torchtitan.py

What is replaced for a CPU is listed in ``titan_ranks.py``. Distances are the largest difference of any weight from one process,
over the largest change of any weight, after 12 steps.
"""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: the head of this file says how")

pytestmark = [pytest.mark.dist, pytest.mark.nightly, pytest.mark.timeout(600)]

CLIP = 0.2


@pytest.fixture(scope="module")
def said(tmp_path_factory, run_ranks):
    return run_ranks("titan_ranks.py", tmp_path_factory.mktemp("titan"), ranks=4)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("how", ["sharded", "all-reduce", "fully_shard"])
def test_a_run_of_torchtitan_ends_with_the_weights_of_one_process(said, how, microbatches):
    assert said[f"{how}, {microbatches}"]["distance"] <= 1e-4


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("how", ["sharded", "all-reduce"])
def test_the_norm_of_the_whole_model_is_clipped(said, how, microbatches):
    found = said[f"{how}, {microbatches}"]

    assert found["smallest norm"] > 2 * CLIP
    assert found["norms"] <= 1e-6


def test_a_run_goes_on_from_torchs_state_dict_api_as_if_it_had_not_stopped(said):
    assert said["resumed"] == 0.0


def test_muon_is_refused_for_matrices_that_are_cut_unless_it_works_on_pieces(said):
    assert "layers.0.attention" in said["Muon"]
    assert "works_on_pieces" in said["Muon"]
    assert said["Muon on pieces"] > 0.01
