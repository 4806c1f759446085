"""``run_training``: the program behind ``megabucket train``, from a config to its closing figures.

Puts the parts together and holds no arithmetic of its own. All ranks call it; only the first one writes and shows.
"""

from __future__ import annotations

import platform
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megabucket import __version__
from megabucket.config.run import RunConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.optim import DistributedOptimizer
from megabucket.planning.memory import exchange_memory, rank_memory
from megabucket.trace import StepRecorder, StepTrace, write_chrome_trace
from megabucket.training.compare import Comparison, Outcome, check_comparable, compare_with_torch
from megabucket.training.host import PeakMemory, loopback_bytes
from megabucket.training.launch import Launch, Ranks, joined_ranks
from megabucket.training.metrics import MetricsLog, jsonable
from megabucket.training.optimizer import group_of, make_optimizer, num_moments
from megabucket.training.progress import View
from megabucket.training.steps import StepLoop, Trainee
from megabucket.training.summary import Measured, Setup, Summary
from megabucket.training.task import Task, describe_corpus, make_task, trainable_model


@dataclass(frozen=True, slots=True)
class Report:
    """What a finished run has to say."""

    summary: Summary
    comparison: Comparison | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON."""
        compared = None if self.comparison is None else self.comparison.to_dict()
        data: dict[str, Any] = jsonable({"summary": self.summary.to_dict(), "comparison": compared})
        return data


def run_training(config: RunConfig, *, launch: Launch, view: View, compares: bool = False) -> Report:
    """Train as ``config`` says and return the figures. Every process of the run calls it.

    Args:
        config: all sections.
        launch: which process this is.
        view: what is shown; silent on all ranks but the first.
        compares: train the same task with torch's own wrapper afterwards.

    Raises:
        ConfigError: the config has no model that can be trained, or cannot be honoured.
        CorpusError: the corpus cannot be read, or the ranks read different bytes.
    """
    model = trainable_model(config)
    if compares:
        check_comparable(config)
    log_path = Path(config.train.log_path) if config.train.log_path is not None and launch.rank == 0 else None
    with closing(MetricsLog(log_path)) as log, joined_ranks(launch, config.fabric) as ranks:
        task = make_task(config, model, ranks)
        view.note(describe_corpus(task.corpus))
        summary, outcome = _train_ours(task, view, log)
        log.write("summary", summary.to_dict())
        comparison = compare_with_torch(task, outcome, view) if compares else None
        if comparison is not None:
            log.write("comparison", comparison.to_dict())
    return Report(summary, comparison)


def _train_ours(task: Task, view: View, log: MetricsLog) -> tuple[Summary, Outcome]:
    config, ranks = task.config, task.ranks
    peak = PeakMemory.from_now(ranks.device)
    recorder = StepRecorder(rank=ranks.rank)
    model = DistributedDataParallel(task.build_model(), config.ddp, recorder=recorder)
    optimizer = DistributedOptimizer(
        make_optimizer(config.optimizer, model.parameters()), model, clip_grad=config.optimizer.clip_grad
    )
    setup = _describe_setup(task, model)
    log.write("run", _describe_run(task, setup))
    before = _evaluate(task, model, log, step=0)
    trainee = Trainee(
        "train",
        model,
        optimizer,
        model.no_sync,
        optimizer.step,
        whole_step=model.step,
        last_trace=lambda: model.last_step_trace,
    )
    loop = StepLoop(task, trainee, recorder=recorder, view=view, log=log)
    sent_before = _loopback(ranks)
    train_s = loop.run()
    sent_after = _loopback(ranks)
    after = _evaluate(task, model, log, step=loop.totals.num_steps)
    measured = Measured(
        held_out_bits_before=before,
        held_out_bits_after=after,
        train_s=train_s,
        loopback_bytes=None if sent_before is None or sent_after is None else sent_after - sent_before,
        peak_growth_bytes=peak.growth_bytes(),
        peak_source=peak.source,
    )
    _write_trace(task, loop.last_trace)
    summary = Summary(setup, measured, loop.totals, task.num_tokens_per_step)
    # Training ends here: the weights get storages of their own and the buffers go.
    weights = {name: weight.detach() for name, weight in model.detach().state_dict().items()}
    return summary, Outcome(weights, after, loop.totals.last_bits_per_byte, summary.steps_per_s)


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
