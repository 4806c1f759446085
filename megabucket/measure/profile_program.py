"""The program behind ``megabucket profile``: steps of a workload with nothing sent, measured tensor by tensor.

Each rank takes its steps alone, at the same time as the others, so they share the machine as they do in training. Buffers,
hooks, checks and optimizer are those of training; gradients are handed over after backward, so that no collective is in the
way, and what that takes is counted where training does it, in backward.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from megabucket.comm import LocalCommunicator
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.measure.out_file import check_writable
from megabucket.measure.profile import WhichRank, WorkloadProfile, WorkloadProfiler, choose_rank
from megabucket.measure.program import Trainee, TrainingProgram, WorkloadFunction
from megabucket.measure.ranks import Launch, joined_ranks
from megabucket.planning.run_config import RunConfig


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


def profile_program(
    workload: WorkloadFunction, config: RunConfig, plan: ProfilePlan, *, launch: Launch, out: Path | None = None
) -> WorkloadProfile:
    """Return what the steps of a workload compute; the same on every rank. Every process of the run calls it.

    Args:
        out: a file; looked at before anything is measured, and written by the first rank after everything.

    Raises:
        ConfigError: the config cannot be honoured, or the file cannot be written.
    """
    with joined_ranks(launch) as ranks:
        check_writable(ranks, [] if out is None else [out])
        own = profile_steps(workload(config, ranks), config.ddp, plan)
        profile = choose_rank([WorkloadProfile.from_dict(data) for data in ranks.gather(own.to_dict())], plan.which_rank)
        if out is not None and ranks.rank == 0:
            profile.write(out)
    return profile


def profile_steps(
    program: TrainingProgram, config: DistributedDataParallelConfig, plan: ProfilePlan, *, counts_launches: bool = True
) -> WorkloadProfile:
    """Return the workload of this rank's steps.

    Args:
        counts_launches: whether handing gradients over is counted in backward; not, when it is measured by bucket elsewhere.
    """
    quiet = config.model_copy(update={"overlap_param_gather": False, "step_traces": False})
    trainee = Trainee(program, quiet, LocalCommunicator())
    with WorkloadProfiler(trainee.ddp, optimizer=trainee.optimizer, warmup_steps=plan.num_warmup_steps) as profiler:
        for _ in range(plan.num_warmup_steps + plan.num_steps):
            trainee.accumulate(program.num_microbatches)
            with profiler.handing_over() if counts_launches else nullcontext():
                trainee.ddp.start_grad_sync()
            with profiler.optimizer_step():
                trainee.update()
            profiler.end_step()
    profile = profiler.profile()
    trainee.ddp.detach()
    return profile
