"""What a training program's steps compute, tensor by tensor: a ``Workload`` and the facts of how it was measured.

``profile_workload`` measures with hooks around a program's own loop, which runs as it is; nothing is sent, changed or waited
for. ``profile_program`` takes the steps of a ``TrainingProgram`` itself.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import Self

import megabucket
from megabucket.buffer import dtype_name
from megabucket.comm import Accelerator, Communicator, LocalCommunicator, exchange
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import resolve_grad_dtype
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, PhaseError
from megabucket.layout import ParamSpec
from megabucket.measure.profile_hooks import ProfileHooks
from megabucket.measure.profile_steps import WorkloadProfile, reduce_steps
from megabucket.measure.program import Trainee, TrainingProgram, WorkloadFunction
from megabucket.measure.ranks import Launch, Note, check_writable, joined_ranks, silent
from megabucket.optim import DistributedOptimizer
from megabucket.planning.run_config import RunConfig
from megabucket.planning.workload import model_fingerprint
from megabucket.units import dtype_bytes

WhichRank = Literal["slowest", "median"]


class WorkloadProfiler:
    """Measures the steps of a training program. A context manager; see ``profile_workload``.

    Args:
        model: what is trained: a plain module, or ``DistributedDataParallel`` of this package or of torch around it.
        optimizer: whose steps count; when not given, those of every optimizer that holds parameters of a plain module, and
            those of any optimizer for our wrapper, because its optimizer holds shards.
        warmup_steps: steps at the start that do not count.
        config: decides the gradients' dtype on the wire for a plain module.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        warmup_steps: int = 1,
        config: DistributedDataParallelConfig | None = None,
    ) -> None:
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be an integer >= 0, got {warmup_steps!r}")
        is_wrapped = isinstance(model, DistributedDataParallel)
        wrappers = (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
        self._module: torch.nn.Module = model.module if isinstance(model, wrappers) else model
        self._config = model.ddp_config if isinstance(model, DistributedDataParallel) else config
        self._optimizer = optimizer.torch_optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer
        self._takes_any_optimizer = is_wrapped and optimizer is None
        self._warmup_steps = warmup_steps
        self._params = {name: param for name, param in self._module.named_parameters() if param.requires_grad}
        if not self._params:
            raise ConfigError(f"{type(self._module).__name__} has no trainable parameter, so there is nothing to profile")
        self._hooks: ProfileHooks | None = None

    def start(self) -> None:
        """Put the hooks on the model, forgetting what was measured before."""
        self.stop()
        self._hooks = ProfileHooks(self._module, self._params, counts_optimizer=self._counts)

    def stop(self) -> None:
        """Take the hooks off. What was measured stays."""
        if self._hooks is not None:
            self._hooks.remove()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def end_step(self) -> None:
        """Say that a step is over, for loops whose optimizer is none of torch's. A callback for the end of a step."""
        self._started.learn()
        self._started.notes.end_step()

    def optimizer_step(self) -> AbstractContextManager[None]:
        """Return a context whose whole time counts as the optimizer's, instead of what torch's optimizers take inside."""
        return self._started.notes.optimizer()

    def handing_over(self) -> AbstractContextManager[None]:
        """Return a context for handing gradients to collectives outside of backward, where training does it within."""
        return self._started.notes.handing_over()

    def profile(self) -> WorkloadProfile:
        """Return the workload of this process's steps.

        Raises:
            PhaseError: no step was seen besides those that warm up.
        """
        steps, params = self._started.steps(), self._params
        if steps and len(steps) <= self._warmup_steps:
            raise PhaseError(
                f"only {len(steps)} step(s) were profiled, and {self._warmup_steps} do not count (warmup_steps); run "
                "more steps inside the context."
            )
        specs = [ParamSpec(name, tuple(param.shape), dtype_name(param.dtype)) for name, param in params.items()]
        numels = Counter[str]()
        for spec in specs:
            numels[spec.dtype] += spec.numel
        ((commonest, _),) = numels.most_common(1)
        grad_dtype = resolve_grad_dtype(self._config or DistributedDataParallelConfig(), commonest)
        reduced = reduce_steps(
            steps[self._warmup_steps :],
            specs,
            module_params=self._started.module_params,
            grad_bytes=dtype_bytes(grad_dtype),
            param_bytes=dtype_bytes(commonest),
        )
        device = next(iter(params.values())).device
        accelerator = Accelerator.of(device)
        facts = {
            "megabucket": megabucket.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": f"{device.type} ({platform.machine()})" if accelerator is None else accelerator.name,
            "num_threads": torch.get_num_threads(),
            "model_fingerprint": model_fingerprint(specs),
        }
        return WorkloadProfile(reduced.workload, {**facts, **reduced.facts})

    def write(
        self, path: str | Path, *, communicator: Communicator | None = None, which_rank: WhichRank = "slowest"
    ) -> WorkloadProfile:
        """Write the workload, as ``WorkloadProfile.write`` does, and return it.

        Args:
            communicator: of all ranks, for instance ``ddp.communicator``: every rank calls, the profile of one of them is
                taken, and the first rank writes. ``None``: this process writes its own.
            which_rank: whose profile is taken: steps are as slow as the slowest rank, unless that one was disturbed.

        Raises:
            PhaseError: no step was seen besides those that warm up.
            ConfigError: the file cannot be written.
        """
        profile = self.profile()
        if communicator is not None and communicator.size > 1:
            device = next(iter(self._params.values())).device
            payload = json.dumps(profile.to_dict()).encode()
            answers = exchange(communicator, payload, device=device, label="workload")
            profile = choose_rank([WorkloadProfile.from_dict(json.loads(answer)) for answer in answers], which_rank)
        if communicator is None or communicator.rank == 0:
            profile.write(path)
        return profile

    @property
    def _started(self) -> ProfileHooks:
        if self._hooks is None:
            raise PhaseError("profiling has not begun: use the profiler as a context manager, or call start()")
        return self._hooks

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._optimizer is not None:
            return optimizer is self._optimizer
        if self._takes_any_optimizer:
            return True
        known = set(map(id, self._params.values()))
        return any(id(param) in known for group in optimizer.param_groups for param in group["params"])


profile_workload = WorkloadProfiler
"""The profiler as a function would be called::

    with megabucket.profile_workload(model) as profile:
        for batch in batches:
            train_step(model, batch)
    profile.write("workload.json")
"""


class ProfileCallback:
    """Profiles the first steps of a run from a callback at the end of each, writes the workload, and is gone.

    Hooks are on the model from construction until enough steps were seen; from then on a call costs nothing.

    Args:
        profiler: what measures.
        path: where the workload goes.
        steps: steps that count, after those that warm up.
        communicator: see ``WorkloadProfiler.write``.
    """

    def __init__(
        self, profiler: WorkloadProfiler, path: str | Path, *, steps: int = 10, communicator: Communicator | None = None
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"steps must be an integer >= 1, got {steps!r}")
        self.result: WorkloadProfile | None = None
        """What was written; ``None`` until then."""
        self._profiler, self._path, self._communicator = profiler, path, communicator
        self._num_left = steps + profiler._warmup_steps
        profiler.start()

    def __call__(self, *_: Any, **__: Any) -> None:
        """End a step. Takes and ignores whatever a trainer passes to its callbacks."""
        if self.result is not None:
            return
        self._profiler.end_step()
        self._num_left -= 1
        if self._num_left == 0:
            self._profiler.stop()
            self.result = self._profiler.write(self._path, communicator=self._communicator)


def choose_rank(profiles: Sequence[WorkloadProfile], which: WhichRank) -> WorkloadProfile:
    """Return the profile of one rank, as a whole, with all ranks' step times among its facts.

    Args:
        profiles: by rank.
        which: the rank with the longest computation, or the middle one; of two middle ones the slower.
    """
    by_time = sorted(range(len(profiles)), key=lambda rank: profiles[rank].workload.compute_s)
    rank = by_time[-1] if which == "slowest" else by_time[len(by_time) // 2]
    facts = {
        **profiles[rank].facts,
        "rank": rank,
        "which_rank": which,
        "compute_s_of_ranks": [profile.workload.compute_s for profile in profiles],
    }
    return WorkloadProfile(profiles[rank].workload, facts)


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
    workload: WorkloadFunction,
    config: RunConfig,
    plan: ProfilePlan,
    *,
    launch: Launch,
    out: Path | None = None,
    note: Note = silent,
) -> WorkloadProfile:
    """Return what the steps of a workload compute; the same on every rank. Every process of the run calls it.

    Args:
        out: a file; looked at before anything is measured, and written by the first rank after everything.
        note: called on the first rank with what happens next.

    Raises:
        ConfigError: the config cannot be honoured, or the file cannot be written.
    """
    with joined_ranks(launch, note=note) as ranks:
        check_writable(ranks, [] if out is None else [out])
        own = profile_steps(workload(config, ranks), config.ddp, plan, note=ranks.note)
        profile = choose_rank(ranks.gather(own), plan.which_rank)
        if out is not None and ranks.rank == 0:
            profile.write(out)
    return profile


def profile_steps(
    program: TrainingProgram,
    config: DistributedDataParallelConfig,
    plan: ProfilePlan,
    *,
    counts_launches: bool = True,
    note: Note = silent,
) -> WorkloadProfile:
    """Return the workload of this rank's steps, with nothing sent.

    Each rank takes its steps alone, at the same time as the others, so they share the machine as they do in training. Buffers,
    hooks, checks and optimizer are those of training; gradients are handed over after backward, so that no collective is in the
    way, and what that takes is counted where training does it, in backward.

    Args:
        counts_launches: whether handing gradients over is counted in backward; not, when it is measured by bucket elsewhere.
    """
    quiet = config.model_copy(update={"overlap_param_gather": False, "step_traces": False})
    trainee = Trainee(program, quiet, LocalCommunicator())
    with WorkloadProfiler(trainee.ddp, optimizer=trainee.optimizer, warmup_steps=plan.num_warmup_steps) as profiler:
        num_steps = plan.num_warmup_steps + plan.num_steps
        for step in range(num_steps):
            note(f"step {step + 1} of {num_steps}")
            trainee.accumulate(program.num_microbatches)
            with profiler.handing_over() if counts_launches else nullcontext():
                trainee.ddp.start_grad_sync()
            with profiler.optimizer_step():
                trainee.update()
            profiler.end_step()
    profile = profiler.profile()
    trainee.ddp.detach()
    return profile
