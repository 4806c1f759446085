"""Steps of training, the same for our wrapper and for torch's, so that comparing them compares only them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from examples.bytegpt.metrics import MetricsLog, StepMetrics
from examples.bytegpt.model import next_byte_loss
from examples.bytegpt.progress import SilentView
from examples.bytegpt.saving import RunSaver
from examples.bytegpt.summary import Totals
from examples.bytegpt.task import NATS_PER_BIT, Task, set_learning_rate
from examples.bytegpt.windows import Batch
from megabucket import StepResult
from megabucket.trace import StepTrace, step_figures

_TRACED: Final = (
    "compute_s",
    "comm_s",
    "exposed_s",
    "overlap_fraction",
    "num_collectives",
    "payload_bytes",
    "wire_bytes",
    "launches",
)


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """A wrapped model with its optimizer, as the loop sees them."""

    title: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    """Its learning rate is set and its gradients are cleared."""
    no_sync: Callable[[], AbstractContextManager[None]]
    """Context for all but the last microbatch of a step."""
    step: Callable[[], StepResult]
    """Clip and update."""
    whole_step: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context for a whole step, in which a fault of one rank is told to all."""
    last_trace: Callable[[], StepTrace | None] = lambda: None
    """What the step that has just ended did, if the wrapper notes it."""


def train_step(trainee: Trainee, microbatches: Sequence[Batch]) -> tuple[float, StepResult]:
    """Run one step; return this rank's mean loss in bits per byte, before the update, and what the optimizer did.

    The loss of each microbatch is divided by their number, so the gradient is that of the mean over all of them.
    """
    losses = []
    for index, (inputs, targets) in enumerate(microbatches, start=1):
        # Around forward too: torch's own DDP decides there whether the backward is reduced. Ours decides in backward.
        with nullcontext() if index == len(microbatches) else trainee.no_sync():
            loss = next_byte_loss(trainee.model, inputs, targets) / len(microbatches)
            loss.backward()
        losses.append(loss.detach())
    result = trainee.step()
    trainee.optimizer.zero_grad()
    return float(torch.stack(losses).sum()) / NATS_PER_BIT, result


class StepLoop:
    """All steps of one trainee: runs them, shows and logs each, keeps the totals.

    Args:
        task: data and schedule.
        trainee: who is trained.
        view: what is shown.
        log: what is written.
    """

    def __init__(self, task: Task, trainee: Trainee, *, view: SilentView, log: MetricsLog) -> None:
        self.num_steps_done = 0
        """Steps of the whole run, those before this loop included."""
        self.totals = Totals()
        self._task, self._trainee, self._view, self._log = task, trainee, view, log

    def run(self, first_step: int = 0, saver: RunSaver | None = None) -> float:
        """Run all steps, or as many as ``saver`` lets it; return their wall time in seconds, saves included.

        Args:
            first_step: how many steps were done before.
            saver: saves between steps, and knows when the run is to end; ``None`` trains and nothing else.
        """
        num_steps, self.num_steps_done = self._task.config.program.train.steps, first_step
        self._view.start(num_steps, self._trainee.title)
        started_s = time.perf_counter()
        try:
            for step in range(first_step, num_steps):
                metrics = self._run_step(step)
                # Logged before it is saved: whoever is killed later goes on behind the steps that the checkpoint holds.
                self.num_steps_done = step + 1
                self.totals.add(metrics)
                self._log.write_step(metrics)
                self._view.show(metrics)
                if saver is not None and saver.ends_after(step + 1, is_last=step + 1 == num_steps):
                    break
            return time.perf_counter() - started_s
        finally:
            self._view.stop()

    def _run_step(self, step: int) -> StepMetrics:
        start_s = time.perf_counter()
        rate = self._task.learning_rate(step)
        set_learning_rate(self._trainee.optimizer, rate)
        with self._trainee.whole_step():
            bits, result = train_step(self._trainee, self._task.microbatches(step))
        step_s = time.perf_counter() - start_s
        return StepMetrics(
            step=step,
            bits_per_byte=bits,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            updated=result.updated,
            reason=result.reason,
            step_s=step_s,
            tokens_per_s=self._task.num_tokens_per_step / step_s,
            **self._traced(),
        )

    def _traced(self) -> dict[str, Any]:
        trace = self._trainee.last_trace()
        if trace is None:
            return {}
        figures = step_figures(trace) | ({} if self._task.config.ddp.step_traces else {"launches": None})
        return {name: figures[name] for name in _TRACED}
