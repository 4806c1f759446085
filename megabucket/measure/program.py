"""``TrainingProgram``: a training program taken apart, so that its steps can be run in any bucket plan and measured.

The function behind ``--workload package.module:function`` returns one. It is called once for each wrapper that is needed, with
the same arguments on every rank, and knows nothing of wrappers::

    def workload(config: RunConfig, ranks: Ranks) -> TrainingProgram:
        model = MyModel().to(ranks.device)

        def losses(model):
            for batch in my_batches(ranks.rank):
                yield my_loss(model(batch))

        return TrainingProgram(model, torch.optim.AdamW(model.parameters()), losses)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import torch

from megabucket.checkpoint.capture import TrainingParts
from megabucket.checkpoint.restore import mismatches
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.checkpoint.values import decode
from megabucket.comm import Communicator, LocalCommunicator
from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, printable
from megabucket.measure.ranks import Ranks
from megabucket.optim import DistributedOptimizer
from megabucket.planning.load import load_run
from megabucket.planning.run_config import RunConfig


@dataclass(frozen=True, slots=True, eq=False)
class TrainingProgram:
    """A program before it is wrapped."""

    model: torch.nn.Module
    """With its first weights, on its device, bare: whoever measures wraps it."""
    optimizer: torch.optim.Optimizer
    """Of any class of torch's, over parameters of ``model``."""
    losses: Callable[[torch.nn.Module], Iterator[torch.Tensor]]
    """Given the model to call, which is the wrapper, yields the loss of one microbatch after the other, each ready for
    ``backward()``. Where it ends it is called again, so one epoch will do."""
    num_microbatches: int = 1
    """Losses in a step."""
    clip_grad: float = 0.0
    """Global norm that gradients are clipped to; 0: they are not."""
    check_resume: Callable[[int, Any], Sequence[str]] = lambda *_: ()
    """What speaks against going on at a step with what a checkpoint of it says of the data (``data_position``)."""


class WorkloadFunction(Protocol):
    """Makes a program. The annotation of ``config`` says with which class the config is read: ``RunConfig`` or a subclass."""

    def __call__(self, config: Any, ranks: Ranks) -> TrainingProgram:
        """Return the program, with the same initial weights and the same number of microbatches on every rank."""
        ...


def load_workload(name: str) -> WorkloadFunction:
    """Import the function that ``package.module:function`` names.

    Raises:
        ConfigError: there is none.
    """
    module_name, _, attribute = name.partition(":")
    try:
        function: WorkloadFunction = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        # The user's own code runs here, so anything can happen; its traceback stays attached as the cause.
        raise ConfigError(
            f"--workload {printable(name)} cannot be imported: {type(error).__name__}: {printable(str(error))}. Give "
            "package.module:function, and check that Python finds the package (PYTHONPATH)."
        ) from error
    return function


def load_workload_config(workload: WorkloadFunction, path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Read a config with the class that the workload asks for.

    Raises:
        ConfigError: anything wrong with the file, an override or a value.
    """
    schema = get_type_hints(workload).get("config", RunConfig)
    is_known = isinstance(schema, type) and issubclass(schema, RunConfig)
    config: RunConfig = load_run(path, overrides, schema if is_known else RunConfig)
    return config


class Trainee:
    """A program with wrapper and optimizer, for whoever takes its steps."""

    def __init__(
        self, program: TrainingProgram, config: DistributedDataParallelConfig, communicator: Communicator | None = None
    ) -> None:
        if not isinstance(program, TrainingProgram) or program.num_microbatches < 1:
            raise ConfigError(f"the workload gave {printable(repr(program), 100)}, not a TrainingProgram with microbatches")
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
    """Return everything that keeps a program from going on from a checkpoint. Nothing is read into the program.

    Raises:
        ConfigError: the config cannot be honoured.
    """
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device("cpu"), backend="none")
    trainee = Trainee(workload(config, ranks), config.ddp, LocalCommunicator())
    try:
        problems = mismatches(stored, TrainingParts(trainee.ddp, trainee.optimizer), cast=cast)
    finally:
        trainee.ddp.detach()
    try:
        position = decode(stored.values.get("data_position"))
    except LookupError:  # with tensors in it, which are not read
        position = None
    return [*problems, *trainee.program.check_resume(stored.step, position)]
