"""``TrainingProgram``: a training program in parts, so that its steps can run and be measured with any bucket plan.

The function behind ``--workload package.module:function`` returns one. It is called once for each wrapper, with the same
arguments on every rank, and needs no wrapper itself::

    def workload(config: RunConfig, ranks: Ranks) -> TrainingProgram:
        model = MyModel().to(ranks.device)

        def losses(model):
            for batch in my_batches(ranks.rank):
                yield my_loss(model(batch))

        return TrainingProgram(model, torch.optim.AdamW(model.parameters()), losses)
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import torch

from megabucket.buffer import dtype_name
from megabucket.checkpoint.capture import TrainingParts
from megabucket.checkpoint.restore import mismatches
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.checkpoint.values import UNREADABLE, decode
from megabucket.comm import Communicator, LocalCommunicator
from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, printable
from megabucket.layout import ParamSpec
from megabucket.measure.ranks import Ranks
from megabucket.optim import DistributedOptimizer
from megabucket.planning.architecture import param_specs
from megabucket.planning.load import load_run
from megabucket.planning.run_config import RunConfig
from megabucket.planning.workload import TensorWork, Workload, check_workload_matches, model_fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class TrainingProgram:
    """A program before it is wrapped."""

    model: torch.nn.Module
    """On its device, with its initial weights, not wrapped."""
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    """Of any torch class, over parameters of ``model``; or several that together have all of them."""
    losses: Callable[[torch.nn.Module], Iterator[torch.Tensor]]
    """Takes the wrapped model and yields the loss of one microbatch after the other, each ready for ``backward()``. Called
    again when it ends, so one epoch is enough."""
    num_microbatches: int = 1
    """Losses in a step."""
    clip_grad: float = 0.0
    """Global norm to clip gradients to; 0: no clipping."""
    check_resume: Callable[[int, Any], Sequence[str]] = lambda *_: ()
    """Takes a checkpoint's step and its ``data_position``, and returns reasons not to resume from it."""


class WorkloadFunction(Protocol):
    """Makes a program. The annotation of ``config`` is the class that reads it: ``RunConfig`` or a subclass."""

    def __call__(self, config: Any, ranks: Ranks) -> TrainingProgram:
        """Return the program, with the same initial weights and the same number of microbatches on every rank."""
        ...


def load_workload(name: str | None) -> WorkloadFunction:
    """Import the function that ``package.module:function`` names.

    Raises:
        ConfigError: there is none, or it does not take ``(config, ranks)``.
    """
    problem, cause = "is not given", None
    if name is not None and ":" not in name:
        problem = "names no function: presets and config.json say which parameters a model has, not how it computes"
    elif name is not None:
        try:
            function: WorkloadFunction = pkgutil.resolve_name(name)
            inspect.signature(function).bind("config", "ranks")
        except Exception as error:  # the user's own code runs here, so anything can happen
            problem, cause = f"cannot be used: {type(error).__name__}: {printable(str(error))}", error
        else:
            return function
    raise ConfigError(
        f"--workload{'' if name is None else ' ' + printable(name)} {problem}. Steps are measured in a program of yours: give "
        "package.module:function, a function of (config, ranks) that returns a TrainingProgram with model, optimizer and "
        "losses, in this directory or on PYTHONPATH; python -c 'help(\"megabucket.measure.program\")' shows one"
    ) from cause


def load_workload_config(workload: WorkloadFunction, path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Read a config with the class that the workload's annotation names.

    Raises:
        ConfigError: anything wrong with the file, an override or a value, or the annotations cannot be read.
    """
    try:
        schema = get_type_hints(workload).get("config", RunConfig)
    except Exception as error:  # annotations are the user's own code
        raise ConfigError(
            f"--workload: the annotations of the function cannot be read: {type(error).__name__}: {printable(str(error))}. "
            "Give a plain function, and import what its annotations name at run time, not under TYPE_CHECKING"
        ) from error
    is_known = isinstance(schema, type) and issubclass(schema, RunConfig)
    config: RunConfig = load_run(path, overrides, schema if is_known else RunConfig)
    return config


def make_program(workload: WorkloadFunction, config: RunConfig, ranks: Ranks) -> TrainingProgram:
    """Return the program of a workload, whose model is that of the config if the config describes one.

    Raises:
        ConfigError: the workload gives no program, or one with another model.
    """
    program = workload(config, ranks)
    if not isinstance(program, TrainingProgram) or program.num_microbatches < 1:
        raise ConfigError(f"the workload gave {printable(repr(program), 100)}, not a TrainingProgram with microbatches")
    if config.model is not None:
        specs = trainable_specs(program.model)
        given = Workload(tuple(TensorWork(spec.name, spec.numel) for spec in specs))
        check_workload_matches(given, param_specs(config.model), fingerprint=model_fingerprint(specs))
    return program


def trainable_specs(module: torch.nn.Module) -> tuple[ParamSpec, ...]:
    """Return the trainable parameters of a module in registration order."""
    return tuple(
        ParamSpec(name, tuple(param.shape), dtype_name(param.dtype))
        for name, param in module.named_parameters()
        if param.requires_grad
    )


class Trainee:
    """A program with wrapper and optimizer, ready to run steps."""

    def __init__(
        self, program: TrainingProgram, config: DistributedDataParallelConfig, communicator: Communicator | None = None
    ) -> None:
        self.ddp = DistributedDataParallel(program.model, config, communicator=communicator)
        self.optimizer = DistributedOptimizer(program.optimizer, self.ddp, clip_grad=program.clip_grad)
        self.program = program
        self._losses: Iterator[torch.Tensor] = iter(())

    def backward(self) -> None:
        """Run forward and backward of the next microbatch."""
        loss = next(self._losses, None)
        if loss is None:
            self._losses = self.program.losses(self.ddp)
            loss = next(self._losses, None)
        if loss is None:
            raise ConfigError("the workload yields no loss, so there is nothing to measure; check its data")
        loss.backward()

    def accumulate(self, num_microbatches: int) -> None:
        """Run microbatches that send nothing."""
        for _ in range(num_microbatches):
            with self.ddp.no_sync():
                self.backward()

    def step(self) -> None:
        """Take one training step."""
        with self.ddp.step():
            self.accumulate(self.program.num_microbatches - 1)
            self.backward()
            self.update()

    def update(self) -> None:
        """Step on the gradients and clear them."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def load_problems(workload: WorkloadFunction, config: RunConfig, stored: StoredCheckpoint, *, cast: bool) -> list[str]:
    """Return every reason why a program cannot resume from a checkpoint. Nothing is loaded into the program.

    Raises:
        ConfigError: the config cannot be honoured.
    """
    trainee = Trainee(make_program(workload, config, Ranks()), config.ddp, LocalCommunicator())
    try:
        problems = mismatches(stored, TrainingParts(trainee.ddp, trainee.optimizer), cast=cast)
    finally:
        trainee.ddp.detach()
    try:
        position = decode(stored.values.get("data_position"))
    except UNREADABLE:  # with tensors in it, which are not read; what makes no sense is among the problems
        position = None
    return [*problems, *trainee.program.check_resume(stored.step, position)]
