"""Training steps, the same for our wrapper and for torch's, so that a comparison compares only the wrappers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from examples.bytegpt.data import Batch
from examples.bytegpt.model import next_byte_loss
from examples.bytegpt.report import MetricsLog, Progress, totals_of
from examples.bytegpt.task import NATS_PER_BIT, Task
from megabucket import StepResult
from megabucket.report import step_figures
from megabucket.trace import StepTrace


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """A wrapped model with its optimizer."""

    title: str
    model: torch.nn.Module
    torch_optimizers: Sequence[torch.optim.Optimizer]
    """Their learning rates are set."""
    zero_grad: Callable[[], None]
    """Clear the gradients."""
    no_sync: Callable[[], AbstractContextManager[None]]
    """Context for all but the last microbatch of a step."""
    step: Callable[[], StepResult]
    """Clip and update."""
    whole_step: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context for a whole step; a fault of one rank inside reaches all ranks."""
    last_trace: Callable[[], StepTrace | None] = lambda: None
    """The trace of the last step, if the wrapper records one."""


def train_step(trainee: Trainee, microbatches: Sequence[Batch]) -> tuple[float, StepResult]:
    """Run one step; return this rank's mean loss in bits per byte before the update, and the optimizer's result.

    The loss of each microbatch is divided by their number, so the gradient is that of the mean over all of them.
    """
    losses = []
    for index, (inputs, targets) in enumerate(microbatches, start=1):
        # Includes the forward: torch's DDP decides there whether backward reduces. Ours decides in backward.
        with nullcontext() if index == len(microbatches) else trainee.no_sync():
            loss = next_byte_loss(trainee.model, inputs, targets) / len(microbatches)
            loss.backward()
        losses.append(loss.detach())
    result = trainee.step()
    trainee.zero_grad()
    return float(torch.stack(losses).sum()) / NATS_PER_BIT, result


class StepLoop:
    """All steps of one trainee: runs them, shows and logs each, keeps the totals."""

    def __init__(self, task: Task, trainee: Trainee, *, progress: Progress, log: MetricsLog) -> None:
        self.totals: Counter[str] = Counter()
        self._task, self._trainee, self._progress, self._log = task, trainee, progress, log

    def run(self, first_step: int = 0, *, ends_after: Callable[[int], bool] = lambda _: False) -> float:
        """Run steps to the last one of the task, or to an earlier end; return their wall time in seconds.

        Args:
            first_step: number of steps done before.
            ends_after: takes the number of steps that are done; returns whether the run ends here.
        """
        num_steps, started_s = self._task.config.program.train.steps, time.perf_counter()
        for step in range(first_step, num_steps):
            figures = self._run_step(step)
            # Logged before it is saved: after a kill the log has all steps that the checkpoint has.
            self.totals.update(totals_of(figures))
            self._log.write("step", figures)
            self._progress.show(self._trainee.title, figures, num_steps=num_steps)
            if ends_after(step + 1):
                break
        return time.perf_counter() - started_s

    def _run_step(self, step: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        rate = self._task.learning_rate(step)
        for optimizer in self._trainee.torch_optimizers:
            of_kind = self._task.learning_rate(step, kind=type(optimizer))
            for group in optimizer.param_groups:
                group["lr"] = of_kind
        with self._trainee.whole_step():
            bits, result = train_step(self._trainee, self._task.microbatches(step))
        step_s = time.perf_counter() - start_s
        trace = self._trainee.last_trace()
        traced = {} if trace is None else step_figures(trace)
        if not self._task.config.ddp.step_traces:
            traced.pop("launches", None)
        return {
            **traced,
            "step": step,
            "bits_per_byte": bits,
            "learning_rate": rate,
            "grad_norm": result.grad_norm,
            "updated": result.updated,
            "reason": result.reason,
            "step_s": step_s,
            "tokens_per_s": self._task.num_tokens_per_step / step_s,
        }
