import pytest
from pydantic import ValidationError

from examples.bytegpt.config import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig


def test_numbers_may_be_written_as_yaml_reads_them():
    config = OptimizerConfig(lr="3e-4", betas=[0.9, 0], eps=1, clip_grad=1)

    assert (config.lr, config.betas, config.eps, config.clip_grad) == (3e-4, (0.9, 0.0), 1.0, 1.0)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        (OptimizerConfig, {"lr": 0}),
        (OptimizerConfig, {"lr": float("nan")}),
        (OptimizerConfig, {"lr": float("inf")}),
        (OptimizerConfig, {"lr": True}),
        (OptimizerConfig, {"lr": "fast"}),
        (OptimizerConfig, {"betas": [0.9, 1.0]}),
        (OptimizerConfig, {"betas": [0.9]}),
        (OptimizerConfig, {"clip_grad": -1.0}),
        (OptimizerConfig, {"final_lr_fraction": 1.5}),
        (OptimizerConfig, {"warmup_steps": -1}),
        (OptimizerConfig, {"name": "adamww"}),
        (OptimizerConfig, {"muon_lr": 0}),
        (OptimizerConfig, {"learning_rate": 0.1}),
        (DataConfig, {"held_out_every": 1}),
        (DataConfig, {"corpus": ""}),
        (TrainConfig, {"steps": 0}),
        (TrainConfig, {"steps": True}),
        (TrainConfig, {"num_microbatches": 1.5}),
        (TrainConfig, {"seed": -1}),
        (TrainConfig, {"param_dtype": "float16"}),
        (TrainConfig, {"log_path": ""}),
        (CheckpointConfig, {"folder": ""}),
        (CheckpointConfig, {"every_steps": 0}),
        (CheckpointConfig, {"keep_last": 0}),
        (CheckpointConfig, {"resume": ""}),
        (CheckpointConfig, {"resume": True}),
        (CheckpointConfig, {"resume": -1}),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(section, fields):
    with pytest.raises(ValidationError):
        section(**fields)


def test_momentum_of_an_optimizer_that_has_none_is_refused_by_both_names():
    with pytest.raises(ValidationError, match=r"momentum=0\.9 is read by name='sgd' only, but name='adamw'"):
        OptimizerConfig(momentum=0.9)


@pytest.mark.parametrize("resume", ["auto", 120])
def test_there_must_be_a_folder_to_resume_from(resume):
    with pytest.raises(ValidationError, match=f"resume={resume} looks into the folder of this run"):
        CheckpointConfig(resume=resume)
