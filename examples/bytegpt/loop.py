"""``run_training``: the demo's program, from a config to its closing figures.

Puts the parts together and holds no arithmetic of its own. All ranks call it; only the first one writes and shows.
"""

from __future__ import annotations

import platform
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import megabucket as mb
from examples.bytegpt.compare import Comparison, check_comparable, check_same_run, compare_with_torch
from examples.bytegpt.config import DemoConfig
from examples.bytegpt.corpus import describe_corpus
from examples.bytegpt.metrics import MetricsLog, jsonable
from examples.bytegpt.progress import SilentView
from examples.bytegpt.resume import describe_start, resume, signing_key
from examples.bytegpt.saving import RunSaver
from examples.bytegpt.signals import StopSignals
from examples.bytegpt.steps import StepLoop, Trainee
from examples.bytegpt.summary import Setup, Summary
from examples.bytegpt.task import Task, group_of, make_optimizer, make_task, trainable_model
from megabucket.measure.ranks import Launch, joined_ranks
from megabucket.planning.memory import exchange_memory, rank_memory
from megabucket.trace import StepTrace, write_chrome_trace


@dataclass(frozen=True, slots=True)
class Stopped:
    """A run that a signal has ended after a step, saved."""

    signal: str
    """``SIGTERM`` or ``SIGINT``, of the first rank that got one."""
    rank: int
    """That rank."""
    step: int
    """How many steps are done, and saved."""
    folder: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a finished run has to say."""

    summary: Summary | None
    """``None``: a signal has ended the run, or there was nothing left to train."""
    comparison: Comparison | None = None
    stopped: Stopped | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON."""
        summary, (comparison, stopped) = self.summary, (each and asdict(each) for each in (self.comparison, self.stopped))
        data: dict[str, Any] = jsonable(
            {"summary": summary and summary.to_dict(), "comparison": comparison, "stopped": stopped}
        )
        return data


def run_training(config: DemoConfig, *, launch: Launch, view: SilentView, compares: bool = False) -> Report:
    """Train as ``config`` says and return the figures. Every process of the run calls it.

    Args:
        config: all sections.
        launch: which process this is.
        view: what is shown; silent on all ranks but the first.
        compares: train the same task with torch's own wrapper afterwards.

    Raises:
        ConfigError: the config has no model that can be trained, cannot be honoured, or does not go on with the checkpoint.
        CorpusError: the corpus cannot be read, or the ranks read different bytes.
        CheckpointError: a checkpoint cannot be read or written.
    """
    model, train = trainable_model(config), config.program.train
    if compares:
        check_comparable(config)
    log_path = Path(train.log_path) if train.log_path is not None and launch.rank == 0 else None
    with closing(MetricsLog(log_path, keeps_lines=True)) as log, joined_ranks(launch, config.fabric) as ranks:
        return _train(make_task(config, model, ranks), view, log, compares=compares)


def _train(task: Task, view: SilentView, log: MetricsLog, *, compares: bool) -> Report:
    # A function of its own: when the process group ends, no frame holds a wrapper any more, whose groups are its own.
    view.note(describe_corpus(task.corpus))
    run, num_steps = _Run(task, view, log), task.config.program.train.steps
    if compares:
        check_same_run(run.start, num_steps=num_steps)
    if run.start.step == num_steps:
        view.note(f"{run.start.checkpoint} is of the last step: there is nothing left to train")
        run.model.detach()
        return Report(None)
    report = run.train()
    if report.summary is None:
        return report
    log.write("summary", report.summary.to_dict())
    # Training ends here: the weights get storages of their own and the buffers go.
    weights = {name: weight.detach() for name, weight in run.model.detach().state_dict().items()}
    if not compares:
        return report
    comparison = compare_with_torch(task, report.summary, weights, view, resumed_at=run.start.step)
    log.write("comparison", asdict(comparison))
    return Report(report.summary, comparison)


class _Run:
    """Our side of a run, from the wrapped model with new weights or those of a checkpoint to the closing figures."""

    def __init__(self, task: Task, view: SilentView, log: MetricsLog) -> None:
        config, optimizer = task.config, task.config.program.optimizer
        self.task, self.view, self.log = task, view, log
        self.model = mb.DistributedDataParallel(task.build_model(), config.ddp.model_copy(update={"step_traces": True}))
        self.optimizer = mb.DistributedOptimizer(
            make_optimizer(optimizer, self.model.parameters()), self.model, clip_grad=optimizer.clip_grad
        )
        self.setup = _describe_setup(task, self.model)
        self._key = signing_key(task)
        self.start = resume(task, self.model, self.optimizer, key=self._key)
        self._log_start()

    def _log_start(self) -> None:
        """Say where the run begins: a log that goes on gets one line about it."""
        start, described = self.start, _describe_run(self.task, self.setup)
        if start.checkpoint is None:
            self.log.start_anew()
        if not self.log.has_lines:
            self.log.write("run", described)
        if start.checkpoint is not None:
            self.log.write("resume", {**asdict(start), **described})
            for line in describe_start(start, self.task):
                self.view.note(line)

    def train(self) -> Report:
        """Run the steps that are left. A signal ends them after one of them, and leaves a checkpoint and no figures."""
        task, model, optimizer = self.task, self.model, self.optimizer
        saver, signals = None, StopSignals(lambda: None)
        if task.config.program.checkpoint.folder is not None:
            saver = RunSaver(task, model, optimizer, start=self.start, view=self.view, log=self.log, key=self._key)
            signals = StopSignals(saver.stop.request)
        last_trace = lambda: model.last_step_trace  # noqa: E731
        trainee = Trainee("train", model, optimizer, model.no_sync, optimizer.step, model.step, last_trace)
        loop = StepLoop(task, trainee, view=self.view, log=self.log)
        with signals.caught() if saver is not None else nullcontext():
            before = self._evaluate(self.start.step)
            train_s = loop.run(self.start.step, saver)
            stopped = None if saver is None else self._stopped(signals.first and signals.first.name, loop.num_steps_done)
        if stopped is not None:
            return Report(None, stopped=stopped)
        after = self._evaluate(loop.num_steps_done)
        _write_trace(task, model.last_step_trace)
        return Report(Summary(self.setup, loop.totals, before, after, train_s, task.num_tokens_per_step))

    def _evaluate(self, step: int) -> float:
        bits = self.task.held_out_bits(self.model)
        self.log.write("evaluation", {"step": step, "held_out_bits_per_byte": bits})
        return bits

    def _stopped(self, own: str | None, step: int) -> Stopped | None:
        """Return what has ended the run: the same on every rank, and no rank goes before all have saved."""
        found = [(name, rank) for rank, name in enumerate(self.task.ranks.gather(own)) if name is not None]
        if not found:
            return None
        program = self.task.config.program
        stopped = Stopped(*found[0], step, str(program.checkpoint.folder))
        self.log.write("stop", asdict(stopped))
        self.view.note(
            f"{stopped.signal} on rank {stopped.rank}: step {step} of {program.train.steps} is done and saved in "
            f"{stopped.folder}; go on with --resume auto"
        )
        self.model.detach()
        return stopped


def _describe_setup(task: Task, model: mb.DistributedDataParallel) -> Setup:
    ddp, optimizer, layout = task.config.ddp, task.config.program.optimizer, model.layout
    numel = sum(buffer.params_numel for buffer in layout.buffers)
    memory = rank_memory(
        layout,
        rank=task.ranks.rank,
        is_sharded=ddp.use_distributed_optimizer,
        moments_per_element=optimizer.moments_per_element,
        has_fence=ddp.fence and task.ranks.num_ranks > 1,
        group_of={name: group_of(optimizer, param) for param, name in model.param_names.items()},
    )
    if ddp.use_distributed_optimizer and task.ranks.backend == "gloo" and not ddp.reduce_in_place:
        memory += exchange_memory(layout)
    return Setup(
        mode="reduce_scatter" if ddp.use_distributed_optimizer else "all_reduce",
        backend=task.ranks.backend,
        num_ranks=task.ranks.num_ranks,
        num_params=numel,
        param_dtype=task.model.dtype,
        num_buffers=len(layout.buffers),
        num_buckets=layout.num_buckets,
        padding_fraction=1 - numel / layout.numel,
        layout_fingerprint=layout.fingerprint,
        computed_memory=memory,
    )


def _describe_run(task: Task, setup: Setup) -> dict[str, Any]:
    corpus = {
        name: {"num_files": part.num_files, "num_bytes": part.num_bytes, "sha256": part.sha256}
        for name, part in (("train", task.corpus.train), ("held_out", task.corpus.held_out))
    }
    versions = {"megabucket": mb.__version__, "torch": torch.__version__, "python": platform.python_version()}
    config = task.config.model_dump(mode="json")
    return {**versions, "config": config, "corpus": {"name": task.corpus.name, **corpus}, **asdict(setup)}


def _write_trace(task: Task, last_trace: StepTrace | None) -> None:
    path = task.config.program.train.trace_path
    if path is not None:
        traces = [trace for trace in task.ranks.gather(last_trace) if trace is not None]
        if task.ranks.rank == 0:
            write_chrome_trace(Path(path), traces)
