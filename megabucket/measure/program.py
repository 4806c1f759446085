"""Would ``megabucket train`` load this checkpoint: the run is built on this process alone, and nothing is read into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megabucket.checkpoint.capture import TrainingParts
from megabucket.checkpoint.plain_values import decode
from megabucket.checkpoint.restore import mismatches
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.ddp import DistributedDataParallel
from megabucket.optim import DistributedOptimizer
from megabucket.planning.model_config import GptConfig
from megabucket.planning.run_config import RunConfig
from megabucket.training.optimizer import make_optimizer
from megabucket.training.resume import BATCH_FACT, CORPUS_FACT, NOT_OURS, config_facts, fact_changes, saved_facts
from megabucket.training.task import initial_model, trainable_model


@dataclass(frozen=True, slots=True)
class LoadFindings:
    """What differs between a checkpoint and the run of a config.

    Args:
        problems: everything that keeps ``megabucket train`` from going on from it; nothing, if it can.
        changes: what differs and is allowed to, by ``checkpoint.changes``.
    """

    problems: tuple[str, ...]
    changes: tuple[str, ...]


def load_findings(config: RunConfig, stored: StoredCheckpoint, *, cast: bool) -> LoadFindings:
    """Return everything in which a checkpoint and the run of a config differ.

    Neither the corpus nor other ranks are needed: a checkpoint loads on any number of ranks, or on none.

    Raises:
        ConfigError: the config has no model that can be trained, or cannot be honoured.
    """
    sizes = trainable_model(config)
    module = initial_model(config, sizes, torch.device("cpu"))
    model = DistributedDataParallel(module, config.ddp)
    try:
        torch_optimizer = make_optimizer(config.optimizer, model.parameters())
        optimizer = DistributedOptimizer(torch_optimizer, model, clip_grad=config.optimizer.clip_grad)
        problems = mismatches(stored, TrainingParts(model, optimizer), cast=cast)
    finally:
        model.detach()
    if stored.step > config.train.steps:
        problems.append(f"it is of step {stored.step}, and train.steps={config.train.steps} ends before")
    changes = _changes(config, sizes, stored)
    if config.checkpoint.changes == "refuse":
        return LoadFindings((*problems, *changes), ())
    return LoadFindings(tuple(problems), tuple(changes))


def _changes(config: RunConfig, sizes: GptConfig, stored: StoredCheckpoint) -> list[str]:
    """Return in what the config differs from that of the saved run, as far as that can be told without corpus and ranks."""
    try:
        saved = saved_facts(decode(stored.values.get("data_position"), {}))
    except (ValueError, KeyError, TypeError):  # a position with tensors in it, or of another program
        saved = None
    if saved is None:
        return [NOT_OURS]
    facts = config_facts(config, sizes)
    there = {name: value for name, value in saved.items() if name not in {CORPUS_FACT, BATCH_FACT}}
    changes = fact_changes(there, facts)
    batch, of_rank = saved.get(BATCH_FACT), config.train.microbatch_size * config.train.num_microbatches
    if isinstance(batch, int) and batch % of_rank:
        changes.append(f"{BATCH_FACT}: {batch} in the checkpoint, {of_rank} times the number of ranks now")
    return changes
