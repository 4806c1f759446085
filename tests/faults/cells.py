"""The words of the table: where a fault happens (``Cell``), what goes wrong (``Fault``), what must come (``Expectation``)."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from megabucket.errors import ReplicasDivergedError

from .acts import Acts, make_step
from .model import EXPERT, DelayedLinear, FaultModel

if TYPE_CHECKING:
    from .oracle import Oracle

HEALTHY_STEPS = 2
"""Steps before the first fault."""
STEPS_AFTER = 6
"""Steps behind the step of the fault. Its error may come one step later; five more are compared after that."""
BOOM = "boom on purpose"


class Mode(str, enum.Enum):
    """Who owns the optimizer state."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"


class Form(str, enum.Enum):
    """How the program is built. All but the first use the ``DistributedOptimizer`` in both modes."""

    PLAIN = ""  # one wrapper, one group, and with all-reduce a plain optimizer
    GROUPS = "groups"  # the last layer is an expert, which every second rank holds
    REPLICAS = "replicas"  # sharded over pairs, replicated across them
    COPIES = "copies"  # pairs of tensor-parallel ranks hold copies of all parameters; the norm is taken over all ranks
    CHAINED = "chained"  # a wrapper around each half of the model, and a ChainedOptimizer
    SCALER = "scaler"  # with DynamicGradScaler
    AMP = "amp"  # with torch.amp.GradScaler
    CLOSURE = "closure"  # forward and backward run in the closure of step()
    DELAYED = "delayed"  # the gradient of one weight comes after backward, by grad_ready()


@dataclass(frozen=True, slots=True)
class Combo:
    """How ranks are set up."""

    mode: Mode
    overlaps: bool
    num_ranks: int
    is_explicit: bool = False
    """Whether the loop calls ``finish_grad_sync()`` itself (``finish="explicit"``)."""
    form: Form = Form.PLAIN
    has_owners: bool = False
    """Whether weights are updated whole by Muon, each by its owner, and AdamW steps on the rest."""

    @property
    def updates_jointly(self) -> bool:
        """Whether an update needs collectives, so that ranks agree on it."""
        return self.is_sharded or self.form in (Form.GROUPS, Form.COPIES)

    @property
    def is_sharded(self) -> bool:
        """Whether gradients are reduce-scattered."""
        return self.mode is Mode.REDUCE_SCATTER

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the loop steps a ``DistributedOptimizer``."""
        return self.is_sharded or self.form is not Form.PLAIN or self.has_owners

    def data_rank(self, rank: int) -> int:
        """Return whose batches a rank reads: tensor-parallel ranks read the same ones."""
        return rank // 2 if self.form is Form.COPIES else rank

    def holds_same(self, rank: int, other: int, param: str) -> bool:
        """Return whether two ranks hold the same parameter of that name."""
        return self.form is not Form.GROUPS or not param.startswith(EXPERT) or rank % 2 == other % 2

    @property
    def waits_in_step(self) -> bool:
        """Whether ranks meet in the optimizer's step, and not at the end of backward or in ``finish_grad_sync()``."""
        return self.is_sharded and not self.is_explicit

    def __str__(self) -> str:
        overlap = "overlap" if self.overlaps else "no-overlap"
        form = f"/{self.form.value}" if self.form.value else ""
        return (
            f"{self.mode.value}/{overlap}/{self.num_ranks}{form}" + "/explicit" * self.is_explicit + "/owners" * self.has_owners
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of fault at a place, on ranks that are set up in one way."""

    kind: str
    place: str
    combo: Combo
    seed: int = 0
    is_torch: bool = False
    """Whether the ranks train with torch DDP instead of megabucket."""
    at_rank: int = -1

    @property
    def culprit(self) -> int:
        """The rank at fault: the one that was asked for, else the last or the first one, so that both are tried."""
        return self.at_rank if self.at_rank >= 0 else (self.combo.num_ranks - 1) * self.combo.overlaps

    @property
    def name(self) -> str:
        """Kind, place and combination as one word."""
        return f"{self.kind}/{self.place}/{self.combo}"


class Outcome(enum.Enum):
    """How the step of the fault must end."""

    RIGHT = "no error anywhere, gradients and weights as the oracle's"
    SKIPPED = "no error anywhere, no weight changed on any rank"
    NAMED = "an error on every live rank"


class Recovery(enum.Enum):
    """What a careful user does after the error, before the next step."""

    NOTHING = "nothing"
    FIX = "what the error text says, for this fault: undo the change, or rebuild"
    RELOAD = "load the last good weights on every rank"
    OVER = "nothing can go on: every further call raises on every live rank"
    STOP = "the program ends, and asks nothing more of this wrapper: it is another one that is broken"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of several values of a field."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must be seen on the ranks.

    Attributes:
        errors: classes of which every live rank must raise one; that of a base class stands for all that are derived from it.
        fields: attributes of the error; ``AnyOf`` for one of several values.
        texts: what the text must contain.
        own_error: what the rank at fault may show instead, for instance its own exception; an empty one is no error.
        later_by: how many steps after the fault the error comes.
        culprit_later_by: the same for the rank at fault where that is another; all meet after it, as after a checkpoint.
        at_wrap: the error comes out of the wrapper's constructor.
        same_text: all ranks must show the same text.
        is_agreed: ``ddp.last_error`` must be the same error; not where a call is refused.
        lost: ranks that are gone and need not report.
        within_s: longest time from the fault to the last rank's report.
        child_error: class that a forked child, or another thread, must report.
        signal_within_s: longest time from a signal to its handler.
        warning: what some rank's warnings must contain.
        otherwise: in what else the step may end.
    """

    outcome: Outcome
    errors: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    own_error: tuple[str, ...] = ()
    later_by: int = 0
    culprit_later_by: int | None = None
    at_wrap: bool = False
    same_text: bool = True
    is_agreed: bool = True
    lost: tuple[int, ...] = ()
    within_s: float = 3.0
    recovery: Recovery = Recovery.NOTHING
    child_error: str = ""
    signal_within_s: float = 0.0
    warning: str = ""
    otherwise: tuple[Expectation, ...] = ()

    def steps_late(self, *, is_culprit: bool) -> int:
        """Return how many steps after the fault a rank has its error."""
        return self.later_by if self.culprit_later_by is None or not is_culprit else self.culprit_later_by

    def alternatives(self) -> tuple[Expectation, ...]:
        """Return all in which the step may end, this one first."""
        return (replace(self, otherwise=()), *self.otherwise)

    def on_chain(self) -> Expectation:
        """Return what is expected of a chain, where the first part that fails lets the others fail, each with its own text."""
        otherwise = tuple(one.on_chain() for one in self.otherwise)
        fields = {name: value for name, value in self.fields.items() if name == "step"}
        return replace(self, fields=fields, texts=(), same_text=False, is_agreed=False, otherwise=otherwise)


RIGHT = Expectation(Outcome.RIGHT)
SKIPPED = Expectation(Outcome.SKIPPED)


def named(error: str | tuple[str, ...], **details: Any) -> Expectation:
    """Return the expectation of an error on every live rank; see ``Expectation`` for the details."""
    return Expectation(Outcome.NAMED, errors=(error,) if isinstance(error, str) else error, **details)


class FaultError(RuntimeError):
    """What is raised on purpose."""

    def __init__(self) -> None:
        super().__init__(BOOM)


@dataclass
class Here:
    """A rank in the middle of its training: what a fault may touch."""

    cell: Cell
    rank: int
    send: Callable[..., None]
    """Report something: ``send(kind, **values)``."""
    model: FaultModel
    ddp: Any
    optimizer: Any
    """What the loop steps."""
    oracle: Oracle
    remake_optimizer: Callable[[], Any]
    step_stack: ExitStack = field(default_factory=ExitStack)
    """Is closed when the step of the fault is over."""
    points: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What happens at named points of the step."""
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
        """Do what was armed for a point of the step, once."""
        action = self.points.pop(point, None)
        if action is not None:
            action()

    def reload(self) -> None:
        """Load the last good weights on this rank and make a new optimizer, here and in the oracle."""
        self.ddp.load_state_dict(self.snapshot)
        if self.cell.combo.form is Form.CHAINED:
            with suppress(ReplicasDivergedError):  # each part has an error of its own
                self.remake_optimizer()
        self.optimizer = self.remake_optimizer()
        self.oracle.restart_from(self.snapshot)

    def forget(self) -> None:
        """Take down what the step of the fault has set up."""
        self.step_stack.close()
        self.step_stack = ExitStack()
        self.points.clear()
        self.on_collective.clear()
        for layer in self.model.layers.values():
            if isinstance(layer, DelayedLinear):
                layer.waiting.clear()


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a cell. All but what is called with ``Here`` is pure: the oracle of each rank asks about all ranks.

    Attributes:
        edit: turns the healthy acts of a rank at fault into those of its fault.
        edits_all: what every rank does in every step; ``edits_step``: in the step of the fault.
        arm: called on every rank at the beginning of the step of the fault, for what cannot be said in acts.
        recover: done on every live rank after the error, for ``Recovery.FIX``.
        config: fields of the config of every rank.
        own_config: of the ranks at fault, besides.
        build: makes the model; ``own_build`` that of the ranks at fault.
        before_wrap: called on the ranks at fault with their ``send``.
        around: called with the new wrapper; what it raises is an error of wrapping.
        ends: how the program of a rank at fault ends after its error: nothing is called any more.
    """

    expect: Expectation = RIGHT
    edit: Callable[[Acts], Acts] | None = None
    edits_all: Callable[[Acts], Acts] | None = None
    edits_step: Callable[[Acts], Acts] | None = None
    arm: Callable[[Here], None] | None = None
    recover: Callable[[Here], None] | None = None
    on_all: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    own_config: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], FaultModel] = FaultModel
    own_build: Callable[[], FaultModel] | None = None
    before_wrap: Callable[[int, Callable[..., None]], None] | None = None
    around: Callable[[Any], object] | None = None
    ends: Callable[[Here], object] | None = None
    wraps_twice: bool = False
    uses_block: bool = False
    group_timeout_s: float = 12.0

    def is_at_fault(self, cell: Cell, rank: int) -> bool:
        """Return whether something goes wrong on ``rank``."""
        return self.on_all or rank == cell.culprit

    def acts(self, cell: Cell, rank: int, step: int, *, is_faulty: bool) -> Acts:
        """Return what a rank does in a step."""
        acts = make_step(step, is_explicit=cell.combo.is_explicit)
        if self.edits_all is not None:
            acts = self.edits_all(acts)
        if is_faulty and self.edits_step is not None:
            acts = self.edits_step(acts)
        return self.edit(acts) if is_faulty and self.edit is not None and self.is_at_fault(cell, rank) else acts


_BOTH = (True, False)
EVERY = tuple(Combo(mode, overlaps, num_ranks) for mode in Mode for overlaps in _BOTH for num_ranks in (2, 3, 4))
PAIRS = (
    Combo(Mode.ALL_REDUCE, True, 2),
    Combo(Mode.ALL_REDUCE, False, 3),
    Combo(Mode.ALL_REDUCE, True, 4),
    Combo(Mode.REDUCE_SCATTER, True, 3),
    Combo(Mode.REDUCE_SCATTER, False, 2),
    Combo(Mode.REDUCE_SCATTER, False, 4),
)
"""Combinations in which each mode meets each number of ranks, and each overlap setting."""
FEW = (Combo(Mode.ALL_REDUCE, True, 2), Combo(Mode.ALL_REDUCE, False, 3), Combo(Mode.REDUCE_SCATTER, True, 3))
"""For what hardly depends on them."""
SHARDED = tuple(combo for combo in EVERY if combo.is_sharded)
EXPLICIT = tuple(Combo(mode, True, 2, is_explicit=True) for mode in Mode)
TWO = (Combo(Mode.ALL_REDUCE, True, 2), Combo(Mode.REDUCE_SCATTER, True, 2))


def in_forms(*forms: Form) -> tuple[Combo, ...]:
    """Return each form in each mode that it has. Some are about groups among four ranks."""
    combos = []
    for form in forms or tuple(Form)[1:]:
        num_ranks = 4 if form in (Form.GROUPS, Form.REPLICAS, Form.COPIES) else 2
        for mode in Mode:
            is_explicit = form is Form.DELAYED and mode is Mode.ALL_REDUCE  # which such gradients need there
            overlaps = mode is Mode.ALL_REDUCE or form in (Form.GROUPS, Form.COPIES, Form.SCALER, Form.CLOSURE)
            if not (form is Form.REPLICAS and mode is Mode.ALL_REDUCE):
                combos.append(Combo(mode, overlaps, num_ranks, is_explicit, form))
    return tuple(combos)


FORMS = in_forms()
GRIDS = in_forms(Form.GROUPS, Form.REPLICAS, Form.COPIES)
SCALED = in_forms(Form.SCALER, Form.AMP)
OURS_SHARDED = tuple(combo for combo in FORMS if combo.is_sharded)
OWNERS = (
    Combo(Mode.REDUCE_SCATTER, True, 2, has_owners=True),
    Combo(Mode.REDUCE_SCATTER, True, 3, has_owners=True),
    Combo(Mode.REDUCE_SCATTER, False, 4, has_owners=True),
)
"""Each weight has an owner. Without overlap all are in one bucket, and some are cut by the shards."""
OWNERS_IN_GROUPS = (
    Combo(Mode.REDUCE_SCATTER, True, 4, form=Form.GROUPS, has_owners=True),
    Combo(Mode.REDUCE_SCATTER, False, 4, form=Form.REPLICAS, has_owners=True),
)
"""The same inside the groups of experts, and of shards with replicas."""
OWNERS_IN_FORMS = tuple(replace(combo, has_owners=True) for combo in in_forms(Form.CHAINED, Form.AMP) if combo.is_sharded)
"""The same under a chain, whose second part fails, and with a loss scaler."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table.

    Attributes:
        says: what must happen, in one sentence.
        fault: what goes wrong at a place.
        combos: with which combinations it is run.
        needs_processes: whether it means nothing to threads of one process.
        not_in_torch: why it is not run with torch DDP: always, or at some places.
        soaks: whether it may happen again and again in one set of ranks.
    """

    name: str
    says: str
    fault: Callable[[Cell], Fault]
    places: tuple[str, ...] = ("step",)
    combos: tuple[Combo, ...] = EVERY
    needs_processes: bool = False
    not_in_torch: str | Mapping[str, str] = ""
    soaks: bool = True

    def cells(self) -> list[Cell]:
        """Return the cells of the kind, with megabucket."""
        return [Cell(self.name, place, combo) for place in self.places for combo in self.combos]

    def why_not(self, cell: Cell) -> str:
        """Return why a cell is not run with torch DDP; empty if it is."""
        if not cell.combo.overlaps or cell.combo.is_explicit:
            return "torch DDP always overlaps, and waits by itself"
        if cell.combo.form is not Form.PLAIN:
            return "the program is built of our parts"
        if isinstance(self.not_in_torch, str):
            return self.not_in_torch
        return next((why for end, why in self.not_in_torch.items() if cell.place.endswith(end)), "")
