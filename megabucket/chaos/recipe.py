"""``Recipe``: what one rank does in one step, as data, so that the oracle can do the same on its own."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

NUM_LAYERS: Final = 4
HEALTHY_STEPS: Final = 2
"""Steps of a cell before the fault, which is in the step of this index."""
NUM_STEPS: Final = 7
"""Steps of a cell in all."""


class Edit(enum.Enum):
    """What happens to a gradient before it is accumulated."""

    NAN = "nan"
    INF = "inf"
    HUGE = "huge"


@dataclass(frozen=True, slots=True)
class GradEdit:
    """A gradient that one rank changes on its way into the buffer."""

    param: str
    edit: Edit


class Ending(enum.Enum):
    """How a rank ends its step."""

    STEP = "optimizer.step()"
    DROP = "zero_grad() without optimizer.step()"
    ABORT = "ddp.abort_step()"
    SKIP = "nothing: the batch is left out"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One rank's step. The defaults are a healthy one."""

    batch: int
    """Which batch is trained on; all ranks of a healthy step have the same number and different data."""
    layers: tuple[int, ...] = tuple(range(NUM_LAYERS))
    """The layers of the model in the order in which they run; one left out is not used."""
    num_microbatches: int = 1
    num_synced: int = 1
    """How many of the last backwards run outside ``no_sync()``."""
    no_sync_depth: int = 1
    """How many ``no_sync()`` contexts the other backwards run in."""
    forwards_in_no_sync: bool = False
    """Whether every forward runs inside ``no_sync()``, also where its backward does not."""
    calls_inner_module: bool = False
    """Whether forward is called on the module inside the wrapper."""
    zeroes_in_place: bool = False
    """Whether gradients are set to zero at the end instead of to ``None``."""
    num_idle_forwards: int = 0
    """Training forwards before the first microbatch whose outputs nobody differentiates."""
    num_repeats: int = 0
    """Backwards through the last microbatch's graph after its first one (``retain_graph=True``)."""
    checkpointed: tuple[int, ...] = ()
    """Layers that run inside reentrant activation checkpointing."""
    edits: tuple[GradEdit, ...] = ()
    ending: Ending = Ending.STEP
    step_number: int | None = None
    """What the rank assigns to ``ddp.step_number``, if anything."""
