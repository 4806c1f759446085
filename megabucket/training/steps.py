"""One training step and one evaluation, the same for our wrapper and for torch's, so that comparing them compares only them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megabucket.optim import StepResult
from megabucket.trace import Interval, Lane, Recorder
from megabucket.training.bytegpt import next_byte_loss
from megabucket.training.launch import Ranks
from megabucket.training.windows import Windows

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets of one microbatch."""

NATS_PER_BIT: Final = math.log(2)


@dataclass(frozen=True, slots=True)
class Trainee:
    """A wrapped model with its optimizer, as the loop sees them."""

    model: torch.nn.Module
    no_sync: Callable[[], AbstractContextManager[None]]
    """Context for all but the last microbatch of a step."""
    optimizer: torch.optim.Optimizer
    """Whose learning rate is set, and whose gradients are cleared."""
    step: Callable[[], StepResult]
    """Clip and update."""


def train_step(trainee: Trainee, microbatches: Sequence[Batch], recorder: Recorder) -> tuple[float, StepResult]:
    """Run one step; return this rank's mean loss in bits per byte, before the update, and what the optimizer did.

    The loss of each microbatch is divided by their number, so the gradient is that of the mean over all of them.
    """
    losses = []
    for index, (inputs, targets) in enumerate(microbatches):
        is_last_microbatch = index == len(microbatches) - 1
        # Around forward too: torch's own DDP decides there whether the backward is reduced. Ours decides in backward.
        with nullcontext() if is_last_microbatch else trainee.no_sync():
            with recorded(recorder, "forward"):
                loss = next_byte_loss(trainee.model, inputs, targets) / len(microbatches)
            with recorded(recorder, "backward"):
                loss.backward()
        losses.append(loss.detach())
    with recorded(recorder, "optimizer"):
        result = trainee.step()
        trainee.optimizer.zero_grad()
    return float(torch.stack(losses).sum()) / NATS_PER_BIT, result


@torch.no_grad()
def held_out_bits(
    model: torch.nn.Module, windows: Windows, starts: npt.NDArray[np.int64], *, batch_size: int, ranks: Ranks
) -> float:
    """Return bits per byte of the windows at ``starts``, shared out among the ranks. All ranks must call it.

    Args:
        model: the module itself or a wrapper around it.
        windows: of held-out bytes.
        starts: of all ranks; their number is a multiple of ``batch_size`` times the number of ranks.
        batch_size: windows per forward.
        ranks: who takes part.
    """
    own = starts[ranks.rank :: ranks.num_ranks]
    batches = [windows.batch(own[first : first + batch_size]) for first in range(0, len(own), batch_size)]
    nats = [float(next_byte_loss(model, inputs, targets)) for inputs, targets in batches]
    return sum(ranks.gather(sum(nats) / len(nats))) / ranks.num_ranks / NATS_PER_BIT


@contextmanager
def recorded(recorder: Recorder, label: str) -> Iterator[None]:
    """Record the time inside as COMPUTE of the calling thread."""
    start_s = time.perf_counter()
    yield
    recorder.record_interval(Interval(Lane.COMPUTE, label, start_s, time.perf_counter()))
