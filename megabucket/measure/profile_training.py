"""The program behind ``megabucket profile``: steps of the training program with nothing sent, measured tensor by tensor.

Each rank takes its steps alone, at the same time as the others, so they share the machine as they do in training. Buffers,
hooks, checks and optimizer are those of training; gradients are handed over after backward, so that no collective is in the
way, and what that takes is counted where training does it, in backward.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from megabucket.comm import LocalCommunicator
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError
from megabucket.measure.out_file import why_not_writable
from megabucket.measure.profile import WhichRank, WorkloadProfile, WorkloadProfiler, choose_rank
from megabucket.optim import DistributedOptimizer
from megabucket.planning.run_config import RunConfig
from megabucket.training.bytegpt import next_byte_loss
from megabucket.training.launch import Launch, joined_ranks
from megabucket.training.optimizer import make_optimizer, set_learning_rate
from megabucket.training.task import Task, make_task, trainable_model


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """How long to measure, and whose figures count.

    Raises:
        ConfigError: a number is out of range.
    """

    num_steps: int = 10
    num_warmup_steps: int = 3
    which_rank: WhichRank = "slowest"

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.num_warmup_steps < 1:
            raise ConfigError(
                f"at least one step must count and one must warm up, got steps={self.num_steps} and "
                f"warmup={self.num_warmup_steps}"
            )


def profile_training(config: RunConfig, plan: ProfilePlan, *, launch: Launch, out: Path | None = None) -> WorkloadProfile:
    """Return the workload of ``config``'s training steps; the same on every rank. Every process of the run calls it.

    Args:
        out: a file; looked at before anything is measured, and written by the first rank after everything.

    Raises:
        ConfigError: the config has no model that can be trained, or cannot be honoured, or the file cannot be written.
        CorpusError: the corpus cannot be read, or the ranks read different bytes.
    """
    model = trainable_model(config)
    with joined_ranks(launch) as ranks:
        problem = ranks.gather(why_not_writable(out) if out is not None and ranks.rank == 0 else "")[0]
        if problem:
            raise ConfigError(problem)
        task = make_task(config, model, ranks)
        own = profile_task(task, plan)
        profile = choose_rank([WorkloadProfile.from_dict(data) for data in ranks.gather(own.to_dict())], plan.which_rank)
        if out is not None and ranks.rank == 0:
            profile.write(out)
    return profile


def profile_task(task: Task, plan: ProfilePlan, *, counts_launches: bool = True) -> WorkloadProfile:
    """Return the workload of this rank's steps.

    Args:
        counts_launches: whether handing gradients over is counted in backward; not, when it is measured by bucket elsewhere.
    """
    config = task.config.ddp.model_copy(update={"overlap_param_gather": False, "step_traces": False})
    ddp = DistributedDataParallel(task.build_model(), config, communicator=LocalCommunicator())
    torch_optimizer = make_optimizer(task.config.optimizer, ddp.parameters())
    optimizer = DistributedOptimizer(torch_optimizer, ddp, clip_grad=task.config.optimizer.clip_grad)
    with WorkloadProfiler(ddp, optimizer=optimizer, warmup_steps=plan.num_warmup_steps) as profiler:
        for step in range(plan.num_warmup_steps + plan.num_steps):
            set_learning_rate(optimizer, task.learning_rate(step))
            microbatches = task.microbatches(step)
            for inputs, targets in microbatches:
                with ddp.no_sync():
                    (next_byte_loss(ddp, inputs, targets) / len(microbatches)).backward()
            with profiler.handing_over() if counts_launches else nullcontext():
                ddp.start_grad_sync()
            with profiler.optimizer_step():
                optimizer.step()
                optimizer.zero_grad()
            profiler.end_step()
    profile = profiler.profile()
    ddp.detach()
    return profile
