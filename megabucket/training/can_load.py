"""Would ``megabucket train`` load this checkpoint: the run is built on this process alone, and nothing is read into it."""

from __future__ import annotations

import torch

from megabucket.checkpoint.capture import TrainingParts
from megabucket.checkpoint.restore import mismatches
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.config.run import RunConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.optim import DistributedOptimizer
from megabucket.training.optimizer import make_optimizer
from megabucket.training.task import initial_model, trainable_model


def load_problems(config: RunConfig, stored: StoredCheckpoint, *, cast: bool) -> list[str]:
    """Return everything in which a checkpoint and the run of a config differ; nothing, if it can be loaded.

    Neither the corpus nor other ranks are needed: a checkpoint loads on any number of ranks, or on none.

    Raises:
        ConfigError: the config has no model that can be trained, or cannot be honoured.
    """
    module = initial_model(config, trainable_model(config), torch.device("cpu"))
    model = DistributedDataParallel(module, config.ddp)
    try:
        torch_optimizer = make_optimizer(config.optimizer, model.parameters())
        optimizer = DistributedOptimizer(torch_optimizer, model, clip_grad=config.optimizer.clip_grad)
        return mismatches(stored, TrainingParts(model, optimizer), cast=cast)
    finally:
        model.detach()
