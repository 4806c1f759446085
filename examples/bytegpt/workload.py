"""The demo as a workload: ``megabucket tune | profile | checkpoint can-load --workload examples.bytegpt.workload:workload``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import torch

from examples.bytegpt.checkpoints import BATCH_FACT, CORPUS_FACT, config_facts, fact_changes, saved_facts
from examples.bytegpt.config import DemoConfig
from examples.bytegpt.model import next_byte_loss
from examples.bytegpt.task import initial_model, make_optimizers, make_task, trainable_model
from megabucket.measure.program import TrainingProgram
from megabucket.measure.ranks import Ranks


def workload(config: DemoConfig, ranks: Ranks) -> TrainingProgram:
    """Return the demo without its loop. The corpus is read with the first loss."""
    program, sizes = config.program, trainable_model(config)
    model = initial_model(config, sizes, ranks.device)

    def losses(wrapped: torch.nn.Module) -> Iterator[torch.Tensor]:
        task = make_task(config, sizes, ranks)
        for step in count():
            for inputs, targets in task.microbatches(step):
                yield next_byte_loss(wrapped, inputs, targets) / program.train.num_microbatches

    return TrainingProgram(
        model,
        make_optimizers(program.optimizer, dict(model.named_parameters())),
        losses,
        num_microbatches=program.train.num_microbatches,
        clip_grad=program.optimizer.clip_grad,
        check_resume=partial(_check_resume, config),
    )


def _check_resume(config: DemoConfig, step: int, position: Any) -> list[str]:
    """Return the differences from the saved run that need neither corpus nor other ranks."""
    train, saved = config.program.train, saved_facts(position)
    late = [f"it is of step {step}, and train.steps={train.steps} ends before"] if step > train.steps else []
    batch, of_rank = saved.pop(BATCH_FACT, None), train.microbatch_size * train.num_microbatches
    saved.pop(CORPUS_FACT, None)
    changes = fact_changes(saved, config_facts(config, trainable_model(config)))
    if isinstance(batch, int) and batch % of_rank:
        changes.append(f"{BATCH_FACT}: {batch} in the checkpoint, {of_rank} times the number of ranks now")
    return late + changes
