"""``run_training``: the demo's program, from a config to its closing figures. All ranks call it; only rank 0 prints."""

from __future__ import annotations

import platform
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megabucket as mb
from examples.bytegpt.checkpoints import RunSaver, resume
from examples.bytegpt.compare import Comparison, check_comparable, compare_with_torch
from examples.bytegpt.config import DemoConfig
from examples.bytegpt.report import MetricsLog, Progress, summarize
from examples.bytegpt.steps import StepLoop, Trainee
from examples.bytegpt.task import Task, make_optimizers, make_task, trainable_model
from megabucket.errors import ConfigError
from megabucket.measure.ranks import Ranks
from megabucket.planning.run_config import shard_counts


@dataclass(frozen=True, slots=True)
class Stopped:
    """A run that a signal ended after a step, with a checkpoint."""

    signal: str
    """``SIGTERM`` or ``SIGINT``, of the first rank that received one."""
    rank: int
    """That rank."""
    step: int
    """Number of steps that are done and saved."""
    folder: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    summary: dict[str, Any] | None = None
    """``None`` if a signal ended the run, or if nothing was left to train."""
    comparison: Comparison | None = None
    stopped: Stopped | None = None


def run_training(config: DemoConfig, ranks: Ranks, *, progress: Progress, compares: bool = False) -> Report:
    """Train as ``config`` says and return the figures. Every rank calls it.

    Args:
        config: all sections.
        progress: shows something on the first rank only.
        compares: train the same task with torch's own wrapper afterwards.

    Raises:
        ConfigError: the config has no model that can be trained, cannot be honoured, or does not go on with the checkpoint.
        CorpusError: the corpus cannot be read, or the ranks read different bytes.
        CheckpointError: a checkpoint cannot be read or written.
    """
    model, log_path = trainable_model(config), config.program.train.log_path
    if compares:
        check_comparable(config)
    path = Path(log_path) if log_path is not None and ranks.rank == 0 else None
    with closing(MetricsLog(path)) as log:
        return _train(make_task(config, model, ranks), progress, log, compares=compares)


def _train(task: Task, progress: Progress, log: MetricsLog, *, compares: bool) -> Report:
    config, program = task.config, task.config.program
    progress.note(task.corpus.describe())
    ddp = config.ddp.model_copy(update={"step_traces": True})
    model = mb.DistributedDataParallel(task.build_model(), ddp, process_group=_replicas_of_shards(task))
    torch_optimizers = make_optimizers(program.optimizer, dict(model.named_parameters()))
    optimizer = mb.DistributedOptimizer(torch_optimizers, model, clip_grad=program.optimizer.clip_grad)

    setup, start = _describe_setup(task, model), resume(task, model, optimizer)
    if start.checkpoint is None:
        log.start_anew()
        log.write("run", _describe_run(task) | setup)
    else:
        log.write("resume", asdict(start) | _describe_run(task) | setup)
        saved = f"{start.checkpoint}, saved by {start.saved_by_ranks} rank(s)"
        progress.note(f"going on from step {start.step} of {program.train.steps}: {saved}")
    if start.step == program.train.steps:
        model.detach()
        if compares:
            raise ConfigError(f"{start.checkpoint} is of the last step, so there is nothing to train and to compare")
        progress.note(f"{start.checkpoint} is of the last step: there is nothing left to train")
        return Report()

    def evaluate(step: int) -> float:
        bits = task.held_out_bits(model)
        log.write("evaluation", {"step": step, "held_out_bits_per_byte": bits})
        return bits

    trainee = Trainee(
        "train",
        model,
        torch_optimizers,
        optimizer.zero_grad,
        model.no_sync,
        optimizer.step,
        model.step,
        lambda: model.last_step_trace,
    )
    loop = StepLoop(task, trainee, progress=progress, log=log)
    saver = None if program.checkpoint.folder is None else RunSaver(task, model, optimizer, start, log)
    with nullcontext() if saver is None else saver.noting_signals():
        before = evaluate(start.step)
        train_s = loop.run(start.step) if saver is None else loop.run(start.step, ends_after=saver.ends_after)
        # Gathered from all ranks, so no rank leaves before all have saved.
        signals = task.ranks.gather([] if saver is None else saver.signals)
    num_steps_done = start.step + int(loop.totals["num_steps"])
    if found := [(names[0], rank) for rank, names in enumerate(signals) if names]:
        stopped = Stopped(*found[0], num_steps_done, str(program.checkpoint.folder))
        log.write("stop", asdict(stopped))
        done = f"step {num_steps_done} of {program.train.steps} is done and saved in {stopped.folder}"
        progress.note(f"{stopped.signal} on rank {stopped.rank}: {done}; go on with --resume auto")
        model.detach()
        return Report(stopped=stopped)

    totals = summarize(loop.totals, train_s, tokens_per_step=task.num_tokens_per_step)
    summary = {**setup, "held_out_bits_before": before, "held_out_bits_after": evaluate(num_steps_done), **totals}
    log.write("summary", summary)
    # Training ends here: the weights get storages of their own and the buffers are freed.
    weights = {name: weight.detach() for name, weight in model.detach().state_dict().items()}
    if not compares:
        return Report(summary)
    comparison = compare_with_torch(task, summary, weights, progress)
    log.write("comparison", asdict(comparison))
    return Report(summary, comparison)


def _replicas_of_shards(task: Task) -> DeviceMesh | None:
    """Return the ranks as a mesh (replicate, shard), whose rows are neighbours; ``None``: one replica of all ranks."""
    num_instances, num_ranks = task.config.num_distributed_optimizer_instances, task.ranks.num_ranks
    if num_instances == 1:
        return None
    num_shards = shard_counts(num_ranks, {}, num_instances)["dense"]
    return init_device_mesh(task.ranks.device.type, (num_instances, num_shards), mesh_dim_names=("replicate", "shard"))


def _describe_setup(task: Task, model: mb.DistributedDataParallel) -> dict[str, Any]:
    """Return the model, the ranks and the buckets."""
    ddp, layout, ranks = task.config.ddp, model.layout, task.ranks
    num_params = sum(buffer.params_numel for buffer in layout.buffers)
    return {
        "mode": "reduce_scatter" if ddp.use_distributed_optimizer else "all_reduce",
        "backend": ranks.backend,
        "num_ranks": ranks.num_ranks,
        "num_params": num_params,
        "param_dtype": task.model.dtype,
        "num_buffers": len(layout.buffers),
        "num_buckets": layout.num_buckets,
        "padding_fraction": 1 - num_params / layout.numel,
        "layout_fingerprint": layout.fingerprint,
    }


def _describe_run(task: Task) -> dict[str, Any]:
    versions = {"megabucket": mb.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**versions, "config": task.config.model_dump(mode="json"), "corpus": task.corpus.describe().splitlines()}
