"""``Fault``: what goes wrong in a cell, and ``Here``: the rank it goes wrong in.

A fault says what each rank builds, how it is configured and which recipe it follows in the step of the fault; that part is
pure, because the oracle on every rank asks for all ranks. What cannot be said as a recipe is armed in the rank itself: hooks,
signals, changes of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megabucket.chaos.cell import Cell
from megabucket.chaos.expectation import RIGHT, Expectation, Recovery
from megabucket.chaos.model import ChaosModel
from megabucket.chaos.recipe import Recipe

if TYPE_CHECKING:
    from megabucket.chaos.oracle import Oracle

BOOM = "boom on purpose"


class ChaosError(RuntimeError):
    """What is raised on purpose."""

    def __init__(self) -> None:
        super().__init__(BOOM)


@dataclass
class Here:
    """A rank in the middle of its training: what a fault may touch."""

    cell: Cell
    rank: int
    send: Callable[..., None]
    """Tell the supervisor something: ``send(kind, **values)``."""
    model: ChaosModel
    ddp: Any
    optimizer: Any
    """What the loop steps."""
    oracle: Oracle
    remake_optimizer: Callable[[], Any]
    """Return a new optimizer over the wrapped model."""
    step_stack: ExitStack = field(default_factory=ExitStack)
    """Is closed when the step of the fault is over."""
    points: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What happens at named points of the training loop."""
    on_collective: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What happens when a collective whose label begins so is launched."""
    keepsake: Any = None
    """What a fault has taken away and may put back."""
    snapshot: dict[str, torch.Tensor] = field(default_factory=dict)
    """The weights before the step of the fault."""

    @property
    def num_ranks(self) -> int:
        """How many ranks train."""
        return self.cell.combo.num_ranks

    @property
    def is_culprit(self) -> bool:
        """Whether this rank is at fault."""
        return self.rank == self.cell.culprit

    def announce(self) -> None:
        """Note the time of the fault. Called as late as possible, and before what may end the process."""
        self.send("fault", at_s=time.monotonic())

    def reach(self, point: str) -> None:
        """Do what was armed for a point of the loop, once."""
        action = self.points.pop(point, None)
        if action is not None:
            action()

    def reload(self) -> None:
        """Load the last good weights on this rank and make a new optimizer, here and in the oracle."""
        self.ddp.load_state_dict(self.snapshot)
        self.optimizer = self.remake_optimizer()
        self.oracle.restart_from(self.snapshot)

    def forget(self) -> None:
        """Take down what the step of the fault has set up."""
        self.step_stack.close()
        self.step_stack = ExitStack()
        self.points.clear()
        self.on_collective.clear()


class Fault:
    """A healthy run; kinds override what they need."""

    uses_step_block = False
    """Whether the loop runs every step inside ``with ddp.step():``."""
    group_timeout_s = 12.0
    """Time limit of the process group that megabucket trains with."""
    is_armed_on_all = False
    """Whether every rank is at fault."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    # Pure: asked on every rank about every rank #

    def expect(self) -> Expectation:
        """Return what must be seen with megabucket."""
        return RIGHT

    def config(self, rank: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Return fields of the config in which ``rank`` differs from the harness's own."""
        return {}

    def build(self, rank: int) -> ChaosModel:  # noqa: ARG002
        """Return the model that ``rank`` wraps."""
        return ChaosModel()

    def healthy(self, rank: int, batch: int) -> Recipe:  # noqa: ARG002
        """Return what ``rank`` does in every other step."""
        return Recipe(batch)

    def faulty(self, rank: int, batch: int) -> Recipe:
        """Return what ``rank`` does in the step of the fault."""
        return self.healthy(rank, batch)

    def num_agreements(self) -> int:
        """Return how often the ranks agree in the step of the fault where nothing stops them: once per gradient sync."""
        return 1

    def is_at_fault(self, rank: int) -> bool:
        """Return whether something goes wrong on ``rank``."""
        return self.is_armed_on_all or rank == self.cell.culprit

    # In the rank #

    def before_wrap(self, rank: int, send: Callable[..., None]) -> None:
        """Do what must happen before the wrapper is built."""

    def arm(self, here: Here) -> None:
        """Set the fault up at the beginning of its step; called on every rank."""

    def recover(self, here: Here) -> None:
        """Do after the error what its text says; called on every live rank."""
        if self.expect().recovery is Recovery.RELOAD:
            here.reload()
