"""``run_training``: the program behind ``megabucket train``, from a config to its closing figures.

Puts the parts together and holds no arithmetic of its own. All ranks call it; only the first one writes and shows.
"""

from __future__ import annotations

import platform
import signal
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megabucket import __version__
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError
from megabucket.optim import DistributedOptimizer
from megabucket.planning.memory import exchange_memory, rank_memory
from megabucket.planning.run_config import RunConfig
from megabucket.trace import StepRecorder, StepTrace, write_chrome_trace
from megabucket.training.compare import Comparison, Outcome, check_comparable, check_same_run, compare_with_torch
from megabucket.training.host import PeakMemory, loopback_bytes
from megabucket.training.launch import Launch, Ranks, joined_ranks
from megabucket.training.metrics import MetricsLog, jsonable
from megabucket.training.optimizer import group_of, make_optimizer, num_moments
from megabucket.training.progress import View
from megabucket.training.resume import describe_start, resume, signing_key
from megabucket.training.saving import RunSaver
from megabucket.training.signals import StopSignals
from megabucket.training.steps import StepLoop, Trainee
from megabucket.training.summary import Measured, Setup, Summary
from megabucket.training.task import Task, describe_corpus, make_task, trainable_model


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
        data: dict[str, Any] = jsonable(
            {
                "summary": None if self.summary is None else self.summary.to_dict(),
                "comparison": None if self.comparison is None else self.comparison.to_dict(),
                "stopped": None if self.stopped is None else asdict(self.stopped),
            }
        )
        return data


def run_training(config: RunConfig, *, launch: Launch, view: View, compares: bool = False) -> Report:
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
    model = trainable_model(config)
    if compares:
        check_comparable(config)
    log_path = Path(config.train.log_path) if config.train.log_path is not None and launch.rank == 0 else None
    log = MetricsLog(log_path, keeps_lines=True)
    with closing(log), joined_ranks(launch, config.fabric) as ranks:
        task = make_task(config, model, ranks)
        view.note(describe_corpus(task.corpus))
        run = _Run(task, view, log)
        if run.start.step == config.train.steps:
            return _nothing_left(run, compares=compares)
        if compares:
            check_same_run(run.start)
        report, outcome = run.train()
        if report.summary is None or outcome is None:
            return report
        log.write("summary", report.summary.to_dict())
        if not compares:
            return report
        comparison = compare_with_torch(task, outcome, view, resumed_at=run.start.step)
        log.write("comparison", comparison.to_dict())
        return Report(report.summary, comparison)


def _nothing_left(run: _Run, *, compares: bool) -> Report:
    if compares:
        raise ConfigError(
            f"{run.start.checkpoint} is of the last step, so there is nothing to train and to compare; drop --compare, raise "
            "train.steps, or begin anew in another checkpoint.folder"
        )
    run.view.note(f"{run.start.checkpoint} is of the last step: there is nothing left to train")
    run.model.detach()
    return Report(None)


class _Run:
    """Our side of a run, from the wrapped model with new weights or those of a checkpoint to the closing figures."""

    def __init__(self, task: Task, view: View, log: MetricsLog) -> None:
        config = task.config
        self.task, self.view, self.log = task, view, log
        self.peak = PeakMemory.from_now(task.ranks.device)
        self.recorder = StepRecorder(rank=task.ranks.rank)
        self.model = DistributedDataParallel(task.build_model(), config.ddp, recorder=self.recorder)
        self.optimizer = DistributedOptimizer(
            make_optimizer(config.optimizer, self.model.parameters()), self.model, clip_grad=config.optimizer.clip_grad
        )
        self.setup = _describe_setup(task, self.model)
        self._key = signing_key(task, self.model)
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

    def train(self) -> tuple[Report, Outcome | None]:
        """Run the steps that are left. A signal ends them after one of them, and leaves a checkpoint and no figures."""
        task, ranks, model, optimizer = self.task, self.task.ranks, self.model, self.optimizer
        saver, signals = None, StopSignals(lambda: None)
        if task.config.checkpoint.folder is not None:
            saver = RunSaver(task, model, optimizer, start=self.start, view=self.view, log=self.log, key=self._key)
            signals = StopSignals(saver.stop.request)
        trainee = Trainee(
            "train",
            model,
            optimizer,
            model.no_sync,
            optimizer.step,
            whole_step=model.step,
            last_trace=lambda: model.last_step_trace,
        )
        loop = StepLoop(task, trainee, recorder=self.recorder, view=self.view, log=self.log)
        with signals.caught() if saver is not None else nullcontext():
            before = _evaluate(task, model, self.log, step=self.start.step)
            sent_before = _loopback(ranks)
            train_s = loop.run(self.start.step, saver)
            sent_after = _loopback(ranks)
            stopped = None if saver is None else self._stopped(signals.first, loop.num_steps_done)
        if stopped is not None:
            return Report(None, stopped=stopped), None
        after = _evaluate(task, model, self.log, step=loop.num_steps_done)
        measured = Measured(
            held_out_bits_before=before,
            held_out_bits_after=after,
            train_s=train_s,
            loopback_bytes=None if sent_before is None or sent_after is None else sent_after - sent_before,
            peak_growth_bytes=self.peak.growth_bytes(),
            peak_source=self.peak.source,
        )
        _write_trace(task, loop.last_trace)
        summary = Summary(self.setup, measured, loop.totals, task.num_tokens_per_step)
        # Training ends here: the weights get storages of their own and the buffers go.
        weights = {name: weight.detach() for name, weight in model.detach().state_dict().items()}
        return Report(summary), Outcome(weights, after, loop.totals.last_bits_per_byte, summary.steps_per_s)

    def _stopped(self, own: signal.Signals | None, step: int) -> Stopped | None:
        """Return what has ended the run: the same on every rank, and no rank goes before all have saved."""
        told = self.task.ranks.gather(None if own is None else own.name)
        found = [(name, rank) for rank, name in enumerate(told) if name is not None]
        if not found:
            return None
        stopped = Stopped(*found[0], step, str(self.task.config.checkpoint.folder))
        self.log.write("stop", asdict(stopped))
        self.view.note(
            f"{stopped.signal} on rank {stopped.rank}: step {step} of {self.task.config.train.steps} is done and saved in "
            f"{stopped.folder}; go on with --resume auto"
        )
        self.model.detach()
        return stopped


def _describe_setup(task: Task, model: DistributedDataParallel) -> Setup:
    is_sharded = task.config.ddp.use_distributed_optimizer
    layout = model.layout
    numel = sum(buffer.params_numel for buffer in layout.buffers)
    memory = rank_memory(
        layout,
        rank=task.ranks.rank,
        is_sharded=is_sharded,
        moments_per_element=num_moments(task.config.optimizer),
        has_fence=task.config.ddp.fence and task.ranks.num_ranks > 1,
        group_of={name: group_of(task.config.optimizer, param) for param, name in model.param_names.items()},
    )
    if is_sharded and task.ranks.backend == "gloo" and not task.config.ddp.reduce_in_place:
        memory += exchange_memory(layout)
    return Setup(
        mode="reduce_scatter" if is_sharded else "all_reduce",
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
    train, held_out = task.corpus.train, task.corpus.held_out
    return {
        "megabucket": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "config": task.config.model_dump(mode="json"),
        "corpus": {
            "name": task.corpus.name,
            "train": {"num_files": train.num_files, "num_bytes": train.num_bytes, "sha256": train.sha256},
            "held_out": {"num_files": held_out.num_files, "num_bytes": held_out.num_bytes, "sha256": held_out.sha256},
        },
        **asdict(setup),
    }


def _evaluate(task: Task, model: torch.nn.Module, log: MetricsLog, *, step: int) -> float:
    bits = task.held_out_bits(model)
    log.write("evaluation", {"step": step, "held_out_bits_per_byte": bits})
    return bits


def _loopback(ranks: Ranks) -> int | None:
    """Return the loopback counter where all traffic of the run goes over it."""
    return loopback_bytes() if ranks.backend == "gloo" and ranks.are_on_one_host else None


def _write_trace(task: Task, last_trace: StepTrace | None) -> None:
    path = task.config.train.trace_path
    if path is None:
        return
    traces = [trace for trace in task.ranks.gather(last_trace) if trace is not None]
    if task.ranks.rank == 0:
        write_chrome_trace(Path(path), traces)
