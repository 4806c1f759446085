"""Kinds of fault that users make by changing a wrapped model, and calls in the wrong order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from megabucket.chaos.cell import Cell, Mode
from megabucket.chaos.expectation import AnyOf, Expectation, Recovery, named
from megabucket.chaos.fault import Fault, Here
from megabucket.chaos.kind import FEW, PAIRS, SHARDED, Kind, not_in_torch
from megabucket.chaos.model import WIDTH, ChaosModel
from megabucket.chaos.recipe import Recipe

_LAYER = "1"
_NAME = f"layers.{_LAYER}.weight"
_NOT_DETECTABLE = not_in_torch("torch DDP has no such call or attribute")


def _layer(here: Here) -> torch.nn.Module:
    return here.model.layers[_LAYER]


def _freeze(here: Here) -> None:
    here.model.get_parameter(_NAME).requires_grad_(False)


def _unfreeze(here: Here) -> None:
    here.model.get_parameter(_NAME).requires_grad_(True)


def _replace(here: Here) -> None:
    here.keepsake = here.model.get_parameter(_NAME)
    _layer(here).weight = torch.nn.Parameter(here.model.get_parameter(_NAME).detach().clone())


def _add(here: Here) -> None:
    here.model.register_parameter("extra", torch.nn.Parameter(torch.ones(WIDTH)))


def _to_bfloat16(here: Here) -> None:
    here.model.bfloat16()


def _to_float64(here: Here) -> None:
    here.model.to(torch.float64)


def _assign_data(here: Here) -> None:
    param = here.model.get_parameter(_NAME)
    param.data = param.data.clone()


def _replace_main_grad(here: Here) -> None:
    param = here.model.get_parameter(_NAME)
    param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]


def _rebuild_in_float32(here: Here) -> None:
    """Do what the text advises for a model that was moved, and load the values of the last good step."""
    here.model.float()
    here.ddp.rebuild()
    here.reload()


def _rebuild_as_it_is(here: Here) -> None:
    """Accept the change: from now on the oracle trains what the model is now."""
    here.ddp.rebuild()
    here.oracle.follow(here.model)


def _undo_freeze(here: Here) -> None:
    if here.is_culprit:
        _unfreeze(here)


def _undo_unfreeze(here: Here) -> None:
    if here.is_culprit:
        _freeze(here)


def _remove_extra(here: Here) -> None:
    if "extra" in dict(here.model.named_parameters()):
        del here.model.extra


def _rebuild_with_new_param(here: Here) -> None:
    if here.cell.combo.mode is Mode.REDUCE_SCATTER:
        here.optimizer.add_param_group({"params": [here.model.get_parameter(_NAME)]})
    here.ddp.rebuild()
    here.reload()


def _put_back(here: Here) -> None:
    if here.is_culprit:
        _layer(here).weight = here.keepsake


class ModelChange(Fault):
    """A change of the wrapped model between two steps; the place says which, and whether one rank makes it or all do."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        who, _, self._what = cell.place.partition("-")
        self.is_armed_on_all = who == "all"

    def expect(self) -> Expectation:
        """Return the error that names the parameter."""
        errors, fields, texts = _ERRORS[self._what]
        # Where every rank has changed its model, the first one is named.
        fields = {**fields, "rank": 0 if self.is_armed_on_all else self.cell.culprit}
        return named(errors, fields=fields, texts=texts, recovery=Recovery.FIX)

    def build(self, rank: int) -> ChaosModel:  # noqa: ARG002
        """Build a model with a frozen parameter where that is to be unfrozen."""
        model = ChaosModel()
        if self._what == "unfreeze":
            model.get_parameter(_NAME).requires_grad_(False)
        return model

    def arm(self, here: Here) -> None:
        """Change the model."""
        if self.is_at_fault(here.rank):
            here.announce()
            _CHANGES[self._what](here)

    def recover(self, here: Here) -> None:
        """Undo the change, or accept it."""
        fixes = _FIXES_ON_ALL if self.is_armed_on_all else _FIXES_ON_ONE
        fixes[self._what](here)


_CHANGES: Final[Mapping[str, Callable[[Here], None]]] = {
    "freeze": _freeze,
    "unfreeze": _unfreeze,
    "replace": _replace,
    "add": _add,
    "bfloat16": _to_bfloat16,
    "float64": _to_float64,
    "data": _assign_data,
    "main-grad": _replace_main_grad,
}
_ERRORS: Final[Mapping[str, tuple[str | tuple[str, ...], dict[str, object], tuple[str, ...]]]] = {
    "freeze": ("TrainabilityChangedError", {"frozen": (_NAME,), "unfrozen": ()}, ()),
    "unfreeze": ("TrainabilityChangedError", {"frozen": (), "unfrozen": (_NAME,)}, ()),
    "replace": ("ParametersChangedError", {"replaced": (_NAME,)}, ()),
    "add": ("ParametersChangedError", {"added": ("extra",)}, ()),
    "bfloat16": ("StorageMovedError", {}, ("bfloat16", "layers.0.weight")),
    "float64": ("StorageMovedError", {}, ("float64", "layers.0.weight")),
    "data": ("StorageMovedError", {"params": (_NAME,)}, ()),
    "main-grad": ("DetachedGradError", {"params": (_NAME,)}, ()),
}
_FIXES_ON_ALL: Final[Mapping[str, Callable[[Here], None]]] = {
    "freeze": _rebuild_as_it_is,
    "unfreeze": _rebuild_as_it_is,
    "replace": _rebuild_with_new_param,
    "add": _remove_extra,
    "bfloat16": _rebuild_in_float32,
    "float64": _rebuild_in_float32,
    "data": _rebuild_as_it_is,
    "main-grad": _rebuild_as_it_is,
}
_FIXES_ON_ONE: Final[Mapping[str, Callable[[Here], None]]] = {
    **_FIXES_ON_ALL,
    "freeze": _undo_freeze,
    "unfreeze": _undo_unfreeze,
    "replace": _put_back,
}


class BitFlip(Fault):
    """One bit of one weight of one rank flips; the ranks compare their replicas."""

    def expect(self) -> Expectation:
        """Return the divergence, found by the check."""
        return named("ReplicasDivergedError", is_agreed=False, recovery=Recovery.RELOAD)

    def arm(self, here: Here) -> None:
        """Flip the bit and check, in place of what the step would do first."""
        if here.is_culprit:
            here.announce()
            param = here.model.get_parameter(_NAME)
            with torch.no_grad():
                bits = param.detach().clone().view(torch.int32)
                bits[0, 0] ^= 1 << 20
                param.copy_(bits.view(torch.float32))
        here.points["start"] = here.ddp.check_replicas


class WrongCall(Fault):
    """Calls in an order, or of a kind, that cannot give the right result; on every rank."""

    is_armed_on_all = True

    def expect(self) -> Expectation:
        """Return the error of the call; these name the rank that is told, so texts differ."""
        errors = {
            "all-in-no-sync": "UnreducedGradientsError",
            "plain-optimizer": "PlainOptimizerError",
            "load-assign": "PhaseError",
        }
        return named(errors[self.cell.place], same_text=False, is_agreed=False)

    def faulty(self, rank: int, batch: int) -> Recipe:  # noqa: ARG002
        """Run the only backward inside ``no_sync()`` where that is the fault."""
        return Recipe(batch, num_synced=0 if self.cell.place == "all-in-no-sync" else 1)

    def arm(self, here: Here) -> None:
        """Step with the wrong optimizer where that is the fault."""
        here.announce()
        if self.cell.place == "load-assign":
            here.points["start"] = lambda: _load_by_assigning(here)
        if self.cell.place == "plain-optimizer":
            right = here.optimizer
            here.optimizer = torch.optim.SGD(here.model.parameters(), lr=0.1)
            here.step_stack.callback(setattr, here, "optimizer", right)


def _load_by_assigning(here: Here) -> None:
    values = {name: value.clone() for name, value in here.model.state_dict().items()}
    here.model.load_state_dict(values, assign=True)


class OtherSchedule(Fault):
    """One rank sets ``force_all_reduce`` for a step."""

    def expect(self) -> Expectation:
        """Return the mismatch."""
        flags = tuple(int(self.is_at_fault(rank)) for rank in range(self.cell.combo.num_ranks))
        return named("ScheduleMismatchError", fields={"by_rank": AnyOf((flags, tuple(map(bool, flags))))})

    def arm(self, here: Here) -> None:
        """Set the switch for this step."""
        if here.is_culprit:
            here.announce()
            here.ddp.force_all_reduce = True
            here.step_stack.callback(setattr, here.ddp, "force_all_reduce", False)


class OtherRate(Fault):
    """One rank updates with half the learning rate in one step."""

    def expect(self) -> Expectation:
        """Return the mismatch, before anybody updates."""
        return named("HyperparameterMismatchError", fields={"what": "lr of group 0"})

    def arm(self, here: Here) -> None:
        """Change the rate for this step."""
        if here.is_culprit:
            here.announce()
            (group,) = here.optimizer.param_groups
            here.step_stack.callback(group.__setitem__, "lr", group["lr"])
            group["lr"] /= 2


_CHANGE_PLACES = tuple(f"{who}-{what}" for what in _CHANGES for who in ("one", "all"))

MODEL_KINDS = (
    Kind(
        "model-change",
        "The error names rank and parameter in the step after the change; undoing it or rebuild() makes the next step right.",
        ModelChange,
        places=_CHANGE_PLACES,
        combos=FEW,
        torch_skip=lambda cell: _NOT_DETECTABLE(cell) if cell.place.endswith("main-grad") else "",
    ),
    Kind(
        "bit-flip",
        "check_replicas() names the ranks that differ; loading the last good weights makes the next step right.",
        BitFlip,
        combos=PAIRS,
        torch_skip=not_in_torch("torch DDP has no check of its replicas"),
    ),
    Kind(
        "wrong-call",
        "A call that cannot give the right result is refused on every rank; the next step is right.",
        WrongCall,
        places=("all-in-no-sync", "load-assign"),
        combos=PAIRS,
    ),
    Kind(
        "plain-optimizer",
        "A plain optimizer on scattered gradients is refused on every rank; the next step is right.",
        WrongCall,
        places=("plain-optimizer",),
        combos=SHARDED,
        torch_skip=not_in_torch("with torch DDP every optimizer sees whole gradients"),
    ),
    Kind(
        "other-schedule",
        "A rank that asks for another way of reducing is named.",
        OtherSchedule,
        combos=PAIRS,
        torch_skip=_NOT_DETECTABLE,
    ),
    Kind(
        "other-rate",
        "A rank that would update its shard with another learning rate is named, and nobody updates.",
        OtherRate,
        combos=SHARDED,
        torch_skip=not_in_torch("torch compares no hyperparameters"),
    ),
)
