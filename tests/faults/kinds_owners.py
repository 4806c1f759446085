"""Kinds of fault where weights are updated whole, each by its owner: on the way there, in the update, and on the way back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megabucket.optim import DistributedOptimizer

from .acts import Act, Do, before
from .cells import OWNERS, OWNERS_IN_FORMS, OWNERS_IN_GROUPS, Cell, Fault, FaultError, Form, Here, Kind, Recovery, named
from .kinds_process import NOTICE_DEAD_S, NOTICE_FROZEN_S, QUICK, lost
from .model import LEARNING_RATE, FaultModel, muon_and_adamw
from .trip import boom, die_by, freeze, install

_ALL = (*OWNERS, *OWNERS_IN_GROUPS)
_BOOM = str(FaultError())
_PLACES = ("to-owners", "owner", "return")
_HOOKS = ("muon-before", "muon-after", "adamw-before", "adamw-after")


def _ends(cell: Cell) -> Fault:
    """Kill or stop a rank for good."""
    action = die_by(signal.SIGKILL) if cell.kind == "owner-killed" else freeze
    within_s = NOTICE_DEAD_S if cell.kind == "owner-killed" else NOTICE_FROZEN_S
    config = {} if cell.kind == "owner-killed" else QUICK
    return Fault(
        lost(cell, within_s), arm=lambda here: install(here, cell.place, action) if here.is_culprit else None, config=config
    )


def _fails(cell: Cell) -> Fault:
    """Raise in the update of one rank: behind its first matrix, or in a hook of one of the optimizers."""
    is_owner = cell.place == "owner"
    own = "UpdateFailedError" if is_owner else "FaultError"
    texts = (f"rank {cell.culprit} stopped in optimizer.step()", f"{own}: ", _BOOM)
    if is_owner:
        texts = (*texts, "OwnedMuon has failed to update 'layers.", ".weight'")
    # A rank that needs nothing of the one at fault may find out in its next forward.
    expect = named("WrapperBrokenError", own_error=(own,), texts=texts, later_by=1, recovery=Recovery.OVER)
    return Fault(expect, arm=lambda here: install(here, cell.place, boom) if here.is_culprit else None)


def _not_finite(cell: Cell) -> Fault:
    """Let an owner return nan: equal on all ranks, whose next gradients are not finite."""

    def arm(here: Here) -> None:
        if here.is_culprit:
            muon = here.optimizer.torch_optimizers[0]

            def spoil(param: torch.Tensor) -> None:
                here.announce()
                param.fill_(torch.nan)

            here.step_stack.callback(setattr, muon, "on_update", muon.on_update)
            muon.on_update = spoil

    return Fault(named("NonFiniteGradientError", later_by=1, recovery=Recovery.RELOAD), arm=arm)


def _odd_state(cell: Cell) -> Fault:
    """Ask for the state while that of one owner cannot travel."""
    value: Any = threading.Lock() if cell.place == "lock" else _Odd()

    def ask(here: Here) -> None:
        here.announce()
        states = [here.optimizer.state[param] for param in here.model.parameters() if param.dim() == 2]
        own = next((state for state in states if state), None) if here.is_culprit else None
        if own is not None:
            own["odd"] = value
        try:
            here.optimizer.state_dict()
        finally:
            if own is not None:
                del own["odd"]

    expect = named("PeerFailedError", own_error=("OptimizerParametersError",), texts=("'odd'", "layers."), is_agreed=False)
    return Fault(expect, edit=lambda acts: before(acts, Do.FORWARD, Act(Do.RUN, value=ask)), on_all=True)


class _Odd:
    """A value of which only this program knows."""


def _sgd_of(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LEARNING_RATE)


def _of_dim(model: FaultModel, dim: int) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == dim]


def _declared_elementwise(model: FaultModel) -> list[torch.optim.Optimizer]:
    muon, adamw = muon_and_adamw(model)
    muon.update_kind = "elementwise"
    return [muon, adamw]


def _one_to_adamw(model: FaultModel) -> list[torch.optim.Optimizer]:
    muon, adamw = muon_and_adamw(model)
    adamw.add_param_group({"params": [muon.param_groups[0]["params"].pop()]})
    return [muon, adamw]


_OTHERS: Mapping[str, Callable[[FaultModel], list[torch.optim.Optimizer]]] = {
    "class": lambda model: [_sgd_of(_of_dim(model, 2)), torch.optim.AdamW(_of_dim(model, 1), lr=LEARNING_RATE)],
    "update-kind": _declared_elementwise,
    "order": lambda model: muon_and_adamw(model)[::-1],
    "params": _one_to_adamw,
    "number": lambda model: [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)],
}


def _differ(cell: Cell) -> Fault:
    """Give one rank other optimizers than the rest."""

    def around(ddp: Any) -> None:
        rank = ddp.ranks.step.rank
        make = _OTHERS[cell.place] if rank == cell.culprit else muon_and_adamw
        DistributedOptimizer(make(ddp.module), ddp)

    same_text = cell.combo.form is Form.PLAIN
    return Fault(named("LayoutMismatchError", at_wrap=True, same_text=same_text), around=around)


_NO_TORCH = "torch DDP has no owners"


def _kind(name: str, says: str, fault: Callable[[Cell], Fault], **details: Any) -> Kind:
    return Kind(name, says, fault, not_in_torch=_NO_TORCH, soaks=False, **details)


OWNER_KINDS = (
    _kind(
        "owner-killed",
        "A rank killed on the way to the owners, in its update or on the way back: as SIGKILL.",
        _ends,
        places=_PLACES,
        combos=_ALL,
        needs_processes=True,
    ),
    _kind("owner-stopped", "The same, stopped: as SIGSTOP.", _ends, places=_PLACES, combos=OWNERS[1:], needs_processes=True),
    _kind(
        "owner-fails",
        "An exception in the update of one owner: named with rank, parameter and cause, and broken on all.",
        _fails,
        places=("owner",),
        combos=(*_ALL, *OWNERS_IN_FORMS),
    ),
    _kind(
        "owner-hook",
        "An exception in a hook around one of the optimizers: named with rank and cause, and broken on all.",
        _fails,
        places=_HOOKS,
        combos=(OWNERS[1], OWNERS_IN_GROUPS[0]),
    ),
    _kind(
        "owner-nan",
        "An owner that returns nan: equal on all ranks, and named in the next step.",
        _not_finite,
        combos=OWNERS[:2],
    ),
    _kind(
        "odd-state",
        "State of an owner that cannot travel: state_dict() names rank, parameter and entry; the next step is right.",
        _odd_state,
        places=("lock", "unknown-class"),
        combos=OWNERS,
    ),
    _kind(
        "optimizers-differ",
        "Other optimizers on one rank: one error on all ranks where they are wrapped.",
        _differ,
        places=tuple(_OTHERS),
        combos=_ALL,
    ),
)
