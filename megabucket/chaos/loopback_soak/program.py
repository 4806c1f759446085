"""What every rank of a soaked world does, and what may become of it. Plain data: the same seed gives the same programs.

A world runs episodes. In an episode each rank plays blocks, one after the other; an exception ends the block and not the rank,
as in a training loop that catches what a step raises. Blocks are no barriers: ranks wait for one another in collectives only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabucket.chaos.loopback_soak.acts import Act


class Rerun(enum.Enum):
    """Whether a layer runs under activation checkpointing."""

    NONE = "none"
    REENTRANT = "reentrant"
    NON_REENTRANT = "non-reentrant"


class Trouble(enum.Enum):
    """Where in a forward or in its backward something raises."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TENSOR_HOOK = "tensor hook"
    PARAM_HOOK = "parameter hook"
    LOSS = "loss"  # in the backward of the loss, before it reaches the module


@dataclass(frozen=True, slots=True)
class Use:
    """One layer in one forward. The gradient of each of its parameters is ``factor`` times the parameter's pattern."""

    layer: int
    factor: float
    rerun: Rerun = Rerun.NONE


@dataclass(frozen=True, slots=True)
class Call:
    """One forward of the module."""

    uses: tuple[Use, ...]
    trouble: Trouble | None = None
    at: int = 0
    """Which of ``uses`` raises."""
    text: str = ""
    interrupts: bool = False
    """Whether what is raised is a ``KeyboardInterrupt`` instead of a ``ValueError``."""
    is_direct: bool = False
    """Whether the inner module is called instead of the wrapper."""
    rounds: bool = False
    """Whether the module computes in float16, so its output is not a whole number."""

    @property
    def is_exact(self) -> bool:
        """Whether the output can be compared with whole numbers."""
        return not self.rounds and all(abs(use.factor) < 2.0**20 for use in self.uses)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer: elements of its own parameters, and whose first parameter it shares (-1: nobody's)."""

    numels: tuple[int, ...]
    shares_with: int = -1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The module of a world."""

    layers: tuple[LayerSpec, ...]
    mixes_dtypes: bool
    """Whether every second parameter is float64, which makes a buffer of its own."""
    output: str
    """``tensor``, ``tuple`` or ``dict``."""

    @property
    def numels(self) -> Mapping[str, int]:
        """Elements by parameter name, in order of registration; the last one is frozen."""
        named = {
            f"layers.{index}.p{position}": numel
            for index, layer in enumerate(self.layers)
            for position, numel in enumerate(layer.numels)
        }
        return named | {"frozen": 5}

    def params_of(self, layer: int) -> tuple[str, ...]:
        """Return the names of the parameters a layer computes with."""
        spec = self.layers[layer]
        own = tuple(f"layers.{layer}.p{position}" for position in range(len(spec.numels)))
        return own if spec.shares_with < 0 else (*own, f"layers.{spec.shares_with}.p0")


class Clearing(enum.Enum):
    """How the training loop clears gradients."""

    WRAPPER = "ddp.zero_grad()"
    OPTIMIZER = "optimizer.zero_grad()"
    OPTIMIZER_ZEROS = "optimizer.zero_grad(set_to_none=False)"
    BUFFER = "ddp.zero_grad_buffer()"


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """One world: ranks, config, module, and habits of the training loop."""

    seed: int
    num_ranks: int
    switches: Mapping[str, Any]
    model: ModelSpec
    momentum: float
    wraps_optimizer: bool
    """Whether the optimizer is a ``DistributedOptimizer``."""
    returns_grad_norm: bool
    """Whether that one computes the norm also where nothing needs it."""
    clearing: Clearing
    clears_first: bool
    """Whether gradients are cleared at the start of a step, or at its end."""
    numbers_steps: bool
    takes_turns: bool
    """Whether one rank runs at a time, so that everything happens in an order that the seed decides."""
    completion: str
    """When collectives complete: ``immediate``, or ``manual``: at random moments."""

    @property
    def is_sharded(self) -> bool:
        """Whether gradients are reduce-scattered."""
        return bool(self.switches.get("use_distributed_optimizer", False))

    @property
    def is_explicit(self) -> bool:
        """Whether the loop calls ``finish_grad_sync``."""
        return bool(self.switches.get("finish", "auto") == "explicit")

    @property
    def averages(self) -> bool:
        """Whether gradients are reduced to their mean, or to their sum."""
        return bool(self.switches.get("grad_reduction", "mean") == "mean")

    def switch(self, name: str, default: Any) -> Any:
        """Return what the config says."""
        return self.switches.get(name, default)

    @property
    def notices_unused(self) -> bool:
        """Whether a parameter without a gradient is an error."""
        return bool(self.switch("unused_parameters", "error") == "error")

    @property
    def fence_act(self) -> str:
        """The call out of which a rank that has done nothing wrong raises what all ranks agreed on."""
        if self.is_explicit:
            return "Finish"
        return "Update" if self.is_sharded else "Backward"


@dataclass(frozen=True, slots=True)
class Block:
    """Calls of one rank up to the first exception; ``is_guarded``: inside ``with ddp.step():``."""

    acts: tuple[Act, ...] = ()
    is_guarded: bool = False


class Ending(enum.Enum):
    """How a block ends on a rank."""

    FINE = "no error, and every number it saw is right"
    AGREED = "the error that all ranks agreed on"
    OWN = "the exception of this rank"
    REFUSED = "an error of this rank's call, of a stated class"


@dataclass(frozen=True, slots=True)
class Want:
    """What one block of one rank must end in."""

    ending: Ending = Ending.FINE
    error: str = ""
    """Class name, for ``OWN`` and ``REFUSED``."""
    text: str = ""
    """What the text of that error contains."""
    at: str = ""
    """The act that raises; empty where it may be any."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The error that all ranks agree on: class, fields and pieces of its text."""

    error: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Expected values; a ``frozenset`` means that the value, or each of its items, is in it."""
    pieces: tuple[str, ...] = ()
    is_last_error: bool = True
    """Whether it becomes ``ddp.last_error``."""
    later_by: int = 0
    """Steps that were whole between the beginning of the blocks that end in it, and it."""
    at: str = ""
    """The act out of which ranks that did nothing wrong raise it, if it is not the usual one of the world."""

    def loosened(self) -> Agreed:
        """Return the same for a step in which other ranks are at fault, too: what depends on them is left out."""
        kept = {name: value for name, value in self.fields.items() if name in ("rank", "phase", "cause")}
        return replace(self, fields=kept)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way in which an episode may end: what each block of each rank ends in, and the error behind ``AGREED``."""

    wants: tuple[tuple[Want, ...], ...]
    agreed: Agreed | None = None
    spoils_weights: bool = False
    """Whether weights are unknown until they are restored."""
    skips: str = ""
    """A piece of the reason why nobody updates (``nonfinite_gradients="skip_step"``)."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What happens next: programs by rank, and the ways in which it may end, the most likely first."""

    kind: str
    programs: tuple[tuple[Block, ...], ...]
    outcomes: tuple[Outcome, ...]
    place: str = ""

    @property
    def num_steps(self) -> int:
        """Training steps: blocks in which some rank does more than look."""
        depth = max(len(blocks) for blocks in self.programs)
        return sum(
            any(act.is_work for blocks in self.programs if index < len(blocks) for act in blocks[index].acts)
            for index in range(depth)
        )
