"""Steps of training, the same for our wrapper and for torch's, so that comparing them compares only them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from megabucket.optim import StepResult
from megabucket.trace import Interval, Lane, Recorder, StepRecorder, StepTrace
from megabucket.trace.step_log import launch_figures
from megabucket.training.bytegpt import next_byte_loss
from megabucket.training.metrics import MetricsLog, StepOutcome, step_metrics
from megabucket.training.optimizer import set_learning_rate
from megabucket.training.progress import View
from megabucket.training.summary import Totals
from megabucket.training.task import NATS_PER_BIT, Task
from megabucket.training.windows import Batch


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
    """The wrapper's own trace of the step that has just ended, if it makes one."""


class BetweenSteps(Protocol):
    """What a loop does between two steps besides training; called alike on all ranks."""

    def wants_stop(self) -> bool:
        """Return whether the run ends here; asked after each step."""
        ...

    def is_due(self, num_steps: int) -> bool:
        """Return whether a run that has done so many steps is saved now."""
        ...

    def settle(self) -> None:
        """Wait for what the last step has left under way."""
        ...

    def poll(self) -> None:
        """Go on with what runs in the background."""
        ...

    def save(self, num_steps: int) -> None:
        """Save, or begin to."""
        ...

    def save_last(self, num_steps: int) -> None:
        """Save unless that is done, and wait until it is."""
        ...


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


class StepLoop:
    """All steps of one trainee: runs them, shows and logs each, keeps the totals.

    Args:
        task: data and schedule.
        trainee: who is trained.
        recorder: the one the trainee's communicator writes to.
        view: what is shown.
        log: what is written.
    """

    def __init__(self, task: Task, trainee: Trainee, *, recorder: StepRecorder, view: View, log: MetricsLog) -> None:
        self.num_steps_done = 0
        """Steps of the whole run, those before this loop included."""
        self.totals = Totals()
        self.last_trace: StepTrace | None = None
        self._task = task
        self._trainee = trainee
        self._recorder = recorder
        self._view = view
        self._log = log
        # Of steps whose trace is not complete yet: at most two.
        self._outcomes: list[StepOutcome] = []

    def run(self, first_step: int = 0, between: BetweenSteps | None = None) -> float:
        """Run all steps, or as many as ``between`` lets it; return their wall time in seconds, with what happens between them.

        Args:
            first_step: how many steps were done before.
            between: what is done between steps; ``None`` trains and nothing else.
        """
        num_steps, self.num_steps_done = self._task.config.train.steps, first_step
        self._view.start(num_steps, self._trainee.title)
        started_s = time.perf_counter()
        try:
            self._recorder.begin(started_s, step=first_step)
            for step in range(first_step, num_steps):
                self._outcomes.append(self._run_step(step))
                self._take(self._recorder.end_step(time.perf_counter()))
                self.num_steps_done = step + 1
                if between is not None and self._ends_between(between, is_last=step + 1 == num_steps):
                    break
            stopped_s = time.perf_counter()
            self._take(self._recorder.flush())
        finally:
            self._view.stop()
        return stopped_s - started_s

    def _ends_between(self, between: BetweenSteps, *, is_last: bool) -> bool:
        """Do what is due after a step; return whether the run ends before its last one."""
        wants_stop = between.wants_stop()
        if not (wants_stop or is_last or between.is_due(self.num_steps_done)):
            between.poll()
            return False
        # The log tells of all steps that the checkpoint holds before that is there: who is killed later goes on behind them.
        between.settle()
        self._take(self._recorder.flush())
        if wants_stop or is_last:
            between.save_last(self.num_steps_done)
        else:
            between.save(self.num_steps_done)
        self._recorder.begin(time.perf_counter())
        return wants_stop

    def _run_step(self, step: int) -> StepOutcome:
        rate = self._task.learning_rate(step)
        set_learning_rate(self._trainee.optimizer, rate)
        with self._trainee.whole_step():
            bits, result = train_step(self._trainee, self._task.microbatches(step), self._recorder)
        trace = self._trainee.last_trace()
        return StepOutcome(
            bits_per_byte=bits,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            updated=result.updated,
            reason=result.reason,
            num_tokens=self._task.num_tokens_per_step,
            launches=None if trace is None else launch_figures(trace),
        )

    def _take(self, trace: StepTrace | None) -> None:
        """Account for a step whose trace is complete, which is the oldest one not accounted for."""
        if trace is None:
            return
        metrics = step_metrics(self._outcomes.pop(0), trace)
        self.totals.add(metrics)
        self._log.write_step(metrics)
        self._view.show(metrics)
        self.last_trace = trace


@contextmanager
def recorded(recorder: Recorder, label: str) -> Iterator[None]:
    """Record the time inside as COMPUTE of the calling thread."""
    start_s = time.perf_counter()
    yield
    recorder.record_interval(Interval(Lane.COMPUTE, label, start_s, time.perf_counter()))
