"""A training that ended in values that are not finite does not look like a success."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.bytegpt.__main__ import app

CONFIG = Path(__file__).parents[2] / "configs" / "bytegpt.yaml"
TINY = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.sequence_length=16"]
SHORT = ["train.steps=3", "train.eval_batches=1", "train.microbatch_size=1", "train.log_path=null"]


DIVERGING = ["optimizer.lr=1e30", "optimizer.warmup_steps=0"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_gradient_that_is_not_finite_ends_the_training_with_the_code_for_numbers():
    result = CliRunner().invoke(app, ["-c", str(CONFIG), *TINY, *SHORT, *DIVERGING])

    assert result.exit_code == 4
    assert "error: step 1: the gradient of " in result.stderr
    assert "training diverged" not in result.stderr


@pytest.mark.parametrize("policy", ["allow", "skip_step"])
def test_where_such_steps_are_left_out_a_diverged_training_still_exits_with_that_code(policy):
    options = [*DIVERGING, f"ddp.nonfinite_gradients={policy}"]
    result = CliRunner().invoke(app, ["-c", str(CONFIG), *TINY, *SHORT, *options])

    assert result.exit_code == 4
    assert "error: training diverged: the held-out loss is not finite at its end" in result.stderr
