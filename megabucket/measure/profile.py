"""Measures what a training program's steps compute, tensor by tensor: a ``Workload`` and the facts of its measurement.

``profile_workload`` puts hooks around a program's own loop, which runs as it is; nothing is sent, changed or waited for.
``profile_program`` runs the steps of a ``TrainingProgram``. On a GPU a moment is an event in the device's queue, read when
profiling is over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from megabucket.comm import Accelerator, Communicator, LocalCommunicator, exchange
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, PhaseError
from megabucket.measure.profile_steps import Event, EventKind, Step, WorkloadProfile, reduce_steps, split_steps
from megabucket.measure.program import Trainee, TrainingProgram, WorkloadFunction, make_program, trainable_specs
from megabucket.measure.ranks import Note, Ranks, check_writable, machine_facts, silent
from megabucket.planning.run_config import RunConfig
from megabucket.planning.workload import model_fingerprint, wire_bytes
from megabucket.trace.clock import HostClock, Stamp

WhichRank = Literal["slowest", "median"]


class WorkloadProfiler:
    """Measures the steps of a training program. A context manager; see ``profile_workload``.

    Args:
        model: the trained model: a plain module, or ``DistributedDataParallel`` of this package or of torch around it.
        optimizer: the optimizer whose steps count. Default: for a plain module every optimizer that holds its parameters, and
            for our wrapper any optimizer, because its optimizer holds shards.
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
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be 0 or more, got {warmup_steps}")
        self._takes_any_optimizer = False
        if isinstance(model, DistributedDataParallel):
            config, self._takes_any_optimizer = model.ddp_config, optimizer is None
        wrappers = (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
        self._module: torch.nn.Module = model.module if isinstance(model, wrappers) else model
        self._config = config or DistributedDataParallelConfig()
        self._optimizer = optimizer
        self.warmup_steps = warmup_steps
        self._params = {name: param for name, param in self._module.named_parameters() if param.requires_grad}
        if not self._params:
            raise ConfigError(f"{type(self._module).__name__} has no trainable parameter, so there is nothing to profile")
        self._device = next(iter(self._params.values())).device
        self._accelerator = Accelerator.of(self._device)
        self._clock = HostClock() if self._accelerator is None else self._accelerator.clock()
        self._moments: list[tuple[EventKind, Stamp, int]] = []
        self._in_forward = False
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Put the hooks on the model and forget earlier measurements."""
        self.stop()
        self._moments = []
        self._handles = [
            register_optimizer_step_pre_hook(partial(self._on_optimizer, EventKind.OPTIMIZER)),
            register_optimizer_step_post_hook(partial(self._on_optimizer, EventKind.OPTIMIZER_END)),
            self._module.register_forward_hook(self._after_forward, always_call=True),
        ]
        for index, module in enumerate(self._module.modules()):
            self._handles.append(module.register_forward_pre_hook(partial(self._on_call, index), prepend=True))
        for index, param in enumerate(self._params.values()):
            self._handles.append(param.register_post_accumulate_grad_hook(partial(self._on_grad, index)))

    def stop(self) -> None:
        """Take the hooks off and keep the measurements."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def end_step(self) -> None:
        """End a step, in loops whose optimizer is not torch's. Can be a callback for the end of a step."""
        self._note(EventKind.STEP_END)

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Count the whole time of the context as the optimizer's, instead of the steps of torch optimizers inside."""
        self._note(EventKind.OPTIMIZER)
        try:
            yield
        finally:
            self._note(EventKind.OPTIMIZER_END)

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Hand gradients to collectives outside of backward, where training does it within."""
        self._note(EventKind.HANDING_OVER)
        yield
        self._note(EventKind.HANDED_OVER)

    def profile(self) -> WorkloadProfile:
        """Return the workload of this process's steps.

        Raises:
            PhaseError: there are no steps besides those that warm up.
        """
        steps = self._steps()
        if steps and len(steps) <= self.warmup_steps:
            raise PhaseError(
                f"only {len(steps)} step(s) were profiled, and {self.warmup_steps} do not count (warmup_steps); run more steps "
                "inside the context."
            )
        specs = trainable_specs(self._module)
        owners, wire = _owners(self._module, self._params), wire_bytes(specs, self._config)
        reduced = reduce_steps(steps[self.warmup_steps :], specs, owners=owners, wire=wire)
        facts = {
            **machine_facts(self._device),
            "num_threads": torch.get_num_threads(),
            "model_fingerprint": model_fingerprint(specs),
            **reduced.facts,
        }
        return WorkloadProfile(reduced.workload, facts)

    def write(
        self, path: str | Path, *, communicator: Communicator | None = None, which_rank: WhichRank = "slowest"
    ) -> WorkloadProfile:
        """Write the workload, as ``WorkloadProfile.write`` does, and return it.

        Args:
            communicator: of all ranks, for instance ``ddp.communicator``. Every rank calls, and the first one writes the
                profile of one of them. ``None``: this process writes its own.
            which_rank: whose profile is written: steps are as slow as the slowest rank, unless that one was disturbed.

        Raises:
            PhaseError: there are no steps besides those that warm up.
            ConfigError: the file cannot be written.
        """
        profile = self.profile()
        if communicator is not None and communicator.size > 1:
            payload = json.dumps(profile.to_dict()).encode()
            answers = exchange(communicator, payload, device=self._device, label="workload")
            profile = choose_rank([WorkloadProfile.from_dict(json.loads(answer)) for answer in answers], which_rank)
        if communicator is None or communicator.rank == 0:
            profile.write(path)
        return profile

    def _steps(self) -> list[Step]:
        """Return the recorded steps. On a device this waits for it."""
        if self._accelerator is not None:
            self._accelerator.synchronize()
        return split_steps(Event(kind, self._clock.seconds(stamp) or 0.0, index) for kind, stamp, index in self._moments)

    # Hooks #

    def _note(self, kind: EventKind, index: int = -1) -> None:
        self._moments.append((kind, self._clock.stamp(), index))

    def _on_call(self, index: int, module: torch.nn.Module, _: Any) -> None:
        # A module that activation checkpointing runs again inside a backward is part of that backward.
        if torch._C._current_graph_task_id() >= 0:
            return
        if module is self._module:
            self._in_forward = torch.is_grad_enabled()
        # Reentrant checkpointing switches gradients off inside a training forward.
        if self._in_forward or torch.is_grad_enabled():
            self._note(EventKind.CALLED, index)

    def _after_forward(self, *_: Any) -> None:
        if self._in_forward and torch._C._current_graph_task_id() < 0:
            self._in_forward = False
            self._note(EventKind.FORWARD_END)

    def _on_grad(self, index: int, _: torch.Tensor) -> None:
        self._note(EventKind.READY, index)

    def _on_optimizer(self, kind: EventKind, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._counts(optimizer):
            self._note(kind)

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._optimizer is not None:
            return optimizer is self._optimizer
        known = set(self._params.values())
        return self._takes_any_optimizer or any(not known.isdisjoint(group["params"]) for group in optimizer.param_groups)


profile_workload = WorkloadProfiler
"""The profiler under the name of a function::

    with megabucket.profile_workload(model) as profile:
        for batch in batches:
            train_step(model, batch)
    profile.write("workload.json")
"""


class ProfileCallback:
    """Profiles the first steps of a run from a callback at the end of each, writes the workload, and takes its hooks off.

    Args:
        profiler: its hooks are on the model from now until enough steps are recorded.
        path: the file.
        steps: steps that count, after those that warm up.
        communicator: see ``WorkloadProfiler.write``.
    """

    def __init__(
        self, profiler: WorkloadProfiler, path: str | Path, *, steps: int = 10, communicator: Communicator | None = None
    ) -> None:
        self.result: WorkloadProfile | None = None
        """The written profile; ``None`` until then."""
        self._profiler, self._path, self._communicator = profiler, path, communicator
        self._num_left = steps + profiler.warmup_steps
        profiler.start()

    def __call__(self, *_: Any, **__: Any) -> None:
        """End a step. Ignores all arguments, so any trainer can call it."""
        if self.result is not None:
            return
        self._profiler.end_step()
        self._num_left -= 1
        if self._num_left <= 0:
            self._profiler.stop()
            self.result = self._profiler.write(self._path, communicator=self._communicator)


def _owners(module: torch.nn.Module, params: Mapping[str, torch.nn.Parameter]) -> list[list[list[int]]]:
    """Return for each parameter the modules that hold it, from the owner outwards; several such chains if it is tied."""
    index_of = {submodule: index for index, submodule in enumerate(module.modules())}
    chains: dict[torch.nn.Parameter, list[list[int]]] = {param: [] for param in params.values()}
    for name, param in module.named_parameters(remove_duplicate=False):
        if param in chains:
            path = name.split(".")[:-1]
            outwards = (module.get_submodule(".".join(path[:length])) for length in range(len(path), -1, -1))
            chains[param].append([index_of[submodule] for submodule in outwards])
    return list(chains.values())


def choose_rank(profiles: Sequence[WorkloadProfile], which: WhichRank) -> WorkloadProfile:
    """Return the profile of one rank as a whole, with all ranks' step times among its facts.

    Args:
        profiles: by rank.
        which: the rank with the longest computation, or the middle one; of two middle ones the slower.
    """
    seconds = [profile.workload.compute_s for profile in profiles]
    by_time = sorted(range(len(profiles)), key=seconds.__getitem__)
    rank = by_time[-1] if which == "slowest" else by_time[len(by_time) // 2]
    facts = {**profiles[rank].facts, "rank": rank, "which_rank": which, "compute_s_of_ranks": seconds}
    return WorkloadProfile(profiles[rank].workload, facts)


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """How many steps to measure, and whose profile counts."""

    num_steps: int = 10
    num_warmup_steps: int = 3
    which_rank: WhichRank = "slowest"


def profile_program(
    workload: WorkloadFunction, config: RunConfig, plan: ProfilePlan, *, ranks: Ranks, out: Path | None = None
) -> WorkloadProfile:
    """Return the profile of a workload's steps; the same on every rank. Every rank calls it.

    Args:
        out: the file that the first rank writes; checked before the measurement.

    Raises:
        ConfigError: the config cannot be honoured, or the file cannot be written.
    """
    check_writable(ranks, [] if out is None else [out])
    own = profile_steps(make_program(workload, config, ranks), config.ddp, plan, note=ranks.note)
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

    All ranks run their steps alone but at the same time, so they share the machine as in training. Buffers, hooks, checks and
    optimizer are those of training. Gradients are handed over after backward, so that no collective disturbs it; the time
    counts in backward, where training does it.

    Args:
        counts_launches: count handing gradients over in backward; false if it is measured by bucket elsewhere.
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
