"""``profile_workload``: what a training program's steps compute, tensor by tensor, measured with hooks around its own loop.

The program runs as it is; nothing is sent, changed or waited for. What comes out is a ``Workload`` and the facts of how it was
measured, in one JSON file.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import Self

import megabucket
from megabucket.buffer import dtype_name
from megabucket.comm import Communicator, exchange
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.config.resolve import resolve_grad_dtype
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, PhaseError
from megabucket.layout import ParamSpec
from megabucket.measure.profile_events import EventKind, ModelFacts, Reduction, reduce_steps, split_steps
from megabucket.measure.profile_hooks import ProfileHooks
from megabucket.optim import DistributedOptimizer
from megabucket.planning.inputs import write_workload
from megabucket.planning.workload import Workload
from megabucket.planning.workload_match import model_fingerprint
from megabucket.units import dtype_bytes

WhichRank = Literal["slowest", "median"]


@dataclass(frozen=True)
class WorkloadProfile:
    """A measured workload and the facts of its measurement."""

    workload: Workload
    facts: Mapping[str, Any]
    """Plain data: versions, device, model fingerprint, how many steps, what the hooks cost."""

    def to_dict(self) -> dict[str, Any]:
        """Return the workload as ``Workload.to_dict`` gives it, with the facts beside it under ``facts``."""
        return {**self.workload.to_dict(), "facts": dict(self.facts)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> WorkloadProfile:
        """Read what ``to_dict`` wrote.

        Raises:
            ConfigError: not such data.
        """
        facts = data.get("facts", {})
        if not isinstance(facts, Mapping):
            raise ConfigError(f"workload.facts must be a mapping, got {type(facts).__name__}")
        return WorkloadProfile(Workload.from_dict(data), facts)

    def write(self, path: str | Path) -> None:
        """Write JSON, making the directory.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            write_workload(Path(path), self.workload, facts=self.facts)
        except OSError as error:
            raise ConfigError(f"the workload {str(path)!r} cannot be written: {error.strerror}") from error


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
        self._reduction: Reduction | None = None
        self._facts: dict[str, Any] = {}

    def start(self) -> None:
        """Put the hooks on the model, forgetting what was measured before."""
        self.stop()
        self._reduction = None
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
        self._started.note(EventKind.STEP_END)

    def optimizer_step(self) -> AbstractContextManager[None]:
        """Return a context whose whole time counts as the optimizer's, instead of what torch's optimizers take inside."""
        return self._started.span(EventKind.OPTIMIZER, EventKind.OPTIMIZER_END)

    def handing_over(self) -> AbstractContextManager[None]:
        """Return a context for handing gradients to collectives outside of backward, where training does it within."""
        return self._started.span(EventKind.BUCKETS, EventKind.BUCKETS_END)

    @property
    def num_steps(self) -> int:
        """Steps that have ended, the ones that warm up included."""
        return 0 if self._hooks is None else sum(step.has_ended for step in split_steps(self._hooks.events()))

    def profile(self) -> WorkloadProfile:
        """Return the workload of this process's steps.

        Raises:
            PhaseError: no step was seen besides those that warm up.
        """
        if self._reduction is None:
            self._reduce()
        if self._reduction is None:
            raise PhaseError("nothing was profiled")
        return WorkloadProfile(self._reduction.workload, self._facts)

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

    def _reduce(self) -> None:
        hooks = self._started
        steps = split_steps(hooks.events())
        if steps and len(steps) <= self._warmup_steps:
            raise PhaseError(
                f"only {len(steps)} step(s) were profiled, and {self._warmup_steps} do not count (warmup_steps); run "
                "more steps inside the context."
            )
        device = next(iter(self._params.values())).device
        facts = ModelFacts(
            specs=tuple(ParamSpec(name, tuple(param.shape), dtype_name(param.dtype)) for name, param in self._params.items()),
            module_params=tuple(hooks.module_params),
            grad_bytes=self._grad_bytes(),
            param_bytes=dtype_bytes(self._commonest_dtype()),
        )
        self._reduction = reduce_steps(steps[self._warmup_steps :], facts)
        self._facts = _describe(self._reduction, facts, device)

    def _commonest_dtype(self) -> str:
        numels: dict[str, int] = {}
        for param in self._params.values():
            name = dtype_name(param.dtype)
            numels[name] = numels.get(name, 0) + param.numel()
        return max(numels, key=lambda name: numels[name])

    def _grad_bytes(self) -> int:
        config = self._config if self._config is not None else DistributedDataParallelConfig()
        return dtype_bytes(resolve_grad_dtype(config, self._commonest_dtype()))


def profile_workload(
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    warmup_steps: int = 1,
    config: DistributedDataParallelConfig | None = None,
) -> WorkloadProfiler:
    """Return a context manager that measures the training steps taken inside it; the arguments are ``WorkloadProfiler``'s.

    ::

        with megabucket.profile_workload(model) as profile:
            for batch in batches:
                train_step(model, batch)
        profile.write("workload.json")

    Raises:
        ConfigError: the model has nothing to train.
    """
    return WorkloadProfiler(model, optimizer=optimizer, warmup_steps=warmup_steps, config=config)


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


def _describe(reduction: Reduction, facts: ModelFacts, device: torch.device) -> dict[str, Any]:
    steps_s = sorted(reduction.step_compute_s)
    return {
        "megabucket": megabucket.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})",
        "num_threads": torch.get_num_threads(),
        "model_fingerprint": model_fingerprint(facts.specs),
        "num_steps": reduction.num_steps,
        "num_microbatches_seen": reduction.num_microbatches_seen,
        "step_compute_s": {"min": steps_s[0], "median": steps_s[len(steps_s) // 2], "max": steps_s[-1]},
        "forward_s": reduction.workload.forward_s,
        "backward_s": reduction.workload.backward_s,
        "is_forward_in_registration_order": reduction.is_forward_in_order,
        "unused": list(reduction.unused),
        "handing_over_s_in_backward": reduction.handing_over_s,
    }
