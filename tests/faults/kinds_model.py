"""Kinds of fault that users make when wrapping a model, by changing a wrapped one, and by calls in the wrong order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .acts import Act, Acts, Do, before
from .cells import FEW, GRIDS, OURS_SHARDED, PAIRS, RIGHT, SHARDED, TWO, Cell, Fault, Form, Here, Kind, Recovery, named
from .model import WIDTH, FaultModel, FoldedLinear

_LAYER = "1"
_NAME = f"layers.{_LAYER}.weight"
_LAST = "layers.3"
_NO_TORCH = "torch DDP has no such call or attribute"

# Wrapping #


def _with(change: Callable[[FaultModel], object]) -> Callable[[], FaultModel]:
    """Return what builds a model and changes it."""

    def build() -> FaultModel:
        model = FaultModel()
        change(model)
        return model

    return build


def _add(model: FaultModel) -> None:
    model.register_parameter("extra", torch.nn.Parameter(torch.ones(WIDTH)))


def _freeze(model: FaultModel, name: str = f"{_LAST}.weight") -> None:
    model.get_parameter(name).requires_grad_(False)


def _tie(model: FaultModel) -> None:
    model.layers["3"].weight = model.layers["2"].weight


def _expand(model: FaultModel) -> None:
    model.layers["3"].bias = torch.nn.Parameter(torch.zeros(1).expand(WIDTH))


def _with_buffer(numel: int) -> Callable[[], FaultModel]:
    return _with(lambda model: model.register_buffer("running", torch.zeros(numel)))


_MODELS: Mapping[str, tuple[Callable[[], FaultModel], Callable[[], FaultModel], str]] = {
    # place: what the others wrap, what the rank at fault wraps, what the text must name
    "shape": (FaultModel, lambda: FaultModel(odd_layer=torch.nn.Linear(WIDTH, WIDTH + 1)), f"{_LAST}.weight"),
    "same-numel": (FaultModel, lambda: FaultModel(odd_layer=FoldedLinear()), f"{_LAST}.weight"),
    "order": (FaultModel, lambda: FaultModel(registration=(0, 2, 1, 3)), "layers.1.weight"),
    "float64": (FaultModel, lambda: FaultModel().double(), "float64"),
    "bf16-fp16": (lambda: FaultModel().bfloat16(), lambda: FaultModel().half(), "bfloat16"),
    "one-more": (FaultModel, _with(_add), "extra"),
    "frozen": (FaultModel, _with(_freeze), "frozen"),
    "tied": (FaultModel, _with(_tie), f"{_LAST}.weight"),
    "buffer-shape": (_with_buffer(4), _with_buffer(8), "running"),
    "buffer-missing": (_with_buffer(4), FaultModel, "running"),
}


def _other_model(cell: Cell) -> Fault:
    usual, other, text = _MODELS[cell.place]
    return Fault(named("LayoutMismatchError", at_wrap=True, texts=(text,)), build=usual, own_build=other)


def _other_config(cell: Cell) -> Fault:
    others: dict[str, Any] = {
        "bucket_size": 1_000,
        "use_distributed_optimizer": not cell.combo.is_sharded,
        "overlap_grad_reduce": not cell.combo.overlaps,
        "unused_parameters": "zero",
        "nonfinite_gradients": "skip_step",
        "grad_reduction": "sum",
    }
    expect = named("LayoutMismatchError", at_wrap=True, texts=(f"config {cell.place}",))
    if cell.combo.form is Form.REPLICAS and cell.place == "use_distributed_optimizer":
        # Without shards there are no replicas of them, which the rank at fault hears first.
        expect = named(("LayoutMismatchError", "ConfigError", "PeerFailedError"), at_wrap=True, same_text=False)
    return Fault(expect, own_config={cell.place: others[cell.place]})


def _unwrappable(cell: Cell) -> Fault:
    """Wrap a model that cannot be wrapped, on one rank or on all."""
    who, what = cell.place.split("-")
    error, build = {
        "expanded": ("UnsupportedParameterError", _with(_expand)),
        "frozen": ("NoTrainableParametersError", _with(lambda model: model.requires_grad_(False))),
        "wrapped": ("AlreadyWrappedError", FaultModel),
    }[what]
    if who == "all":
        expect = named(error, at_wrap=True)
    else:
        fields = {"rank": cell.culprit, "phase": "wrap"}
        errors = ("PeerFailedError", "LayoutMismatchError")
        expect = named(errors, at_wrap=True, fields=fields, texts=(error,), own_error=(error,))
    return Fault(expect, own_build=build, wraps_twice=what == "wrapped", on_all=who == "all")


# Changes of a wrapped model #


def _replace(here: Here) -> None:
    here.keepsake = here.model.get_parameter(_NAME)
    here.model.layers[_LAYER].weight = torch.nn.Parameter(here.model.get_parameter(_NAME).detach().clone())


def _move(here: Here) -> None:
    param = here.model.get_parameter(_NAME)
    param.data = param.data.clone()


def _replace_main_grad(here: Here) -> None:
    param = here.model.get_parameter(_NAME)
    param.main_grad = torch.zeros_like(param)


def _rebuild_in_float32(here: Here) -> None:
    """Do what the text advises for a model that was moved, and load the values of the last good step."""
    here.model.float()
    here.ddp.rebuild()
    here.reload()


def _rebuild(here: Here) -> None:
    """Accept the change: from now on the oracle trains what the model is now."""
    here.ddp.rebuild()
    here.oracle.follow(here.model)


def _rebuild_with_new_param(here: Here) -> None:
    if here.cell.combo.is_sharded:
        here.optimizer.add_param_group({"params": [here.model.get_parameter(_NAME)]})
    here.ddp.rebuild()
    here.reload()


def _remove_extra(here: Here) -> None:
    if "extra" in dict(here.model.named_parameters()):
        del here.model.extra


def _set_trained(here: Here, value: bool) -> None:
    here.model.get_parameter(_NAME).requires_grad_(value)


def _on_culprit(undo: Callable[[Here], object]) -> Callable[[Here], None]:
    return lambda here: undo(here) and None if here.is_culprit else None


def _put_back(here: Here) -> None:
    here.model.layers[_LAYER].weight = here.keepsake


_CHANGES: Mapping[str, tuple[Callable[[Here], object], Any, Mapping[str, Any], tuple[str, ...], Callable[[Here], None]]] = {
    # what is done, error, its fields, what its text says, and what repairs it on all ranks
    "freeze": (
        lambda here: _set_trained(here, False),
        "TrainabilityChangedError",
        {"frozen": (_NAME,), "unfrozen": ()},
        (),
        _rebuild,
    ),
    "unfreeze": (
        lambda here: _set_trained(here, True),
        "TrainabilityChangedError",
        {"frozen": (), "unfrozen": (_NAME,)},
        (),
        _rebuild,
    ),
    "replace": (_replace, "ParametersChangedError", {"replaced": (_NAME,)}, (), _rebuild_with_new_param),
    "add": (lambda here: _add(here.model), "ParametersChangedError", {"added": ("extra",)}, (), _remove_extra),
    "bfloat16": (
        lambda here: here.model.bfloat16(),
        "StorageMovedError",
        {},
        ("bfloat16", "layers.0.weight"),
        _rebuild_in_float32,
    ),
    "float64": (lambda here: here.model.double(), "StorageMovedError", {}, ("float64", "layers.0.weight"), _rebuild_in_float32),
    "data": (_move, "StorageMovedError", {"params": (_NAME,)}, (), _rebuild),
    "main-grad": (_replace_main_grad, "DetachedGradError", {"params": (_NAME,)}, (), _rebuild),
}
_UNDO_ON_ONE: Mapping[str, Callable[[Here], None]] = {
    "freeze": _on_culprit(lambda here: _set_trained(here, True)),
    "unfreeze": _on_culprit(lambda here: _set_trained(here, False)),
    "replace": _on_culprit(_put_back),
}


def _model_change(cell: Cell) -> Fault:
    who, _, what = cell.place.partition("-")
    change, errors, fields, texts, repair = _CHANGES[what]
    on_all = who == "all"

    def arm(here: Here) -> None:
        if on_all or here.is_culprit:
            here.announce()
            change(here)

    return Fault(
        # Where every rank has changed its model, the first one is named.
        named(errors, fields={**fields, "rank": 0 if on_all else cell.culprit}, texts=texts, recovery=Recovery.FIX),
        arm=arm,
        on_all=on_all,
        recover=repair if on_all else _UNDO_ON_ONE.get(what, repair),
        build=_with(lambda model: _freeze(model, _NAME)) if what == "unfreeze" else FaultModel,
    )


def _rebuilds(cell: Cell) -> Fault:
    """Change the model on all ranks and rebuild before anything comes of it; or rebuild where a step is open."""

    def rebuild(here: Here) -> None:
        if cell.place != "open-step":
            change, *_ = _CHANGES[cell.place]
            change(here)
        if cell.place == "replace" and here.cell.combo.is_sharded:
            here.optimizer.add_param_group({"params": [here.model.get_parameter(_NAME)]})
        _rebuild(here)
        here.optimizer = here.remake_optimizer()
        here.oracle.restart_from(here.oracle.snapshot())

    def arm(here: Here) -> None:
        here.announce()
        if cell.place != "open-step":
            rebuild(here)

    def drop(acts: Acts) -> Acts:
        """Drop the gradients of a backward by a rebuild, and run the step once more; the oracle reads the zero_grad()."""
        return (*acts[:2], Act(Do.RUN, value=lambda here: here.ddp.rebuild()), Act(Do.ZERO, value="ddp"), *acts)

    return Fault(RIGHT, arm=arm, edit=drop if cell.place == "open-step" else None, on_all=True)


# Values and calls #


def _bit_flip(cell: Cell) -> Fault:
    """Flip one bit of one weight of one rank; the ranks compare their replicas."""

    def arm(here: Here) -> None:
        if here.is_culprit:
            here.announce()
            param = here.model.get_parameter(_NAME)
            here.ddp.finish_param_sync()
            with torch.no_grad():
                bits = param.detach().clone().view(torch.int32)
                bits[0, 0] ^= 1 << 20
                param.copy_(bits.view(torch.float32))
        here.points["start"] = here.ddp.check_replicas

    return Fault(named("ReplicasDivergedError", is_agreed=False, recovery=Recovery.RELOAD), arm=arm)


def _load_by_assigning(here: Here) -> None:
    values = {name: value.clone() for name, value in here.model.state_dict().items()}
    here.model.load_state_dict(values, assign=True)


def _wrong_call(cell: Cell) -> Fault:
    """Call on every rank what cannot give the right result; errors name the rank that is told, so texts differ."""

    def arm(here: Here) -> None:
        here.announce()
        if cell.place == "load-assign":
            here.points["start"] = lambda: _load_by_assigning(here)
        else:
            right, here.optimizer = here.optimizer, torch.optim.SGD(here.model.parameters(), lr=0.1)
            here.step_stack.callback(setattr, here, "optimizer", right)

    error = "PhaseError" if cell.place == "load-assign" else "PlainOptimizerError"
    return Fault(named(error, same_text=False, is_agreed=False), arm=arm, on_all=True)


def _weights_loaded(cell: Cell) -> Fault:
    """Load weights on one rank; nobody can know that they are the same ones."""
    texts = ("loads of weights (load_state_dict(), by submodule)",)
    load = Act(Do.RUN, value=lambda here: here.ddp.load_state_dict(here.ddp.state_dict()))
    return Fault(
        named("ReplicasDivergedError", texts=texts, recovery=Recovery.RELOAD), edit=lambda acts: before(acts, Do.FORWARD, load)
    )


def _other_rate(cell: Cell) -> Fault:
    """Update with half the learning rate on one rank."""

    def arm(here: Here) -> None:
        if here.is_culprit:
            here.announce()
            group = here.optimizer.param_groups[0]
            here.step_stack.callback(group.__setitem__, "lr", group["lr"])
            group["lr"] /= 2

    return Fault(named("HyperparameterMismatchError", fields={"what": "lr of group 0"}), arm=arm)


_NOT_WRAPPED_TWICE = {"wrapped": "torch DDP allows a module to be wrapped twice"}
_NOT_IN_TORCH = ("use_distributed_optimizer", "overlap_grad_reduce", "nonfinite_gradients", "grad_reduction")

MODEL_KINDS = (
    Kind(
        "other-model",
        "Refused when wrapping, with the first entries that differ; no rank is wrapped.",
        _other_model,
        places=tuple(_MODELS),
        combos=(*PAIRS, *GRIDS),
        soaks=False,
    ),
    Kind(
        "other-config",
        "Refused when wrapping, with the field and both values.",
        _other_config,
        places=("bucket_size", "unused_parameters", *_NOT_IN_TORCH),
        combos=(*FEW, *GRIDS),
        not_in_torch=dict.fromkeys(_NOT_IN_TORCH, "torch DDP has no such setting"),
        soaks=False,
    ),
    Kind(
        "unwrappable",
        "A model that cannot be wrapped on one rank is named on all of them.",
        _unwrappable,
        places=tuple(f"{who}-{what}" for what in ("expanded", "frozen", "wrapped") for who in ("one", "all")),
        combos=FEW,
        not_in_torch=_NOT_WRAPPED_TWICE,
        soaks=False,
    ),
    Kind(
        "model-change",
        "The error names rank and parameter in the step after the change; undoing it or rebuild() makes the next step right.",
        _model_change,
        places=tuple(f"{who}-{what}" for what in _CHANGES for who in ("one", "all")),
        combos=FEW,
        not_in_torch={"main-grad": _NO_TORCH},
        soaks=False,
    ),
    Kind(
        "rebuild",
        "Right: a change of all ranks that rebuild at once, and a rebuild that drops an open step.",
        _rebuilds,
        places=("freeze", "replace", "data", "open-step"),
        combos=PAIRS,
        not_in_torch=_NO_TORCH,
        soaks=False,
    ),
    Kind(
        "bit-flip",
        "check_replicas() names the ranks that differ; loading the last good weights makes the next step right.",
        _bit_flip,
        combos=PAIRS,
        not_in_torch="torch DDP has no check of its replicas",
    ),
    Kind(
        "load-assign",
        "A load that would replace the parameters is refused on every rank; the next step is right.",
        _wrong_call,
        places=("load-assign",),
        combos=PAIRS,
    ),
    Kind(
        "plain-optimizer",
        "A plain optimizer on scattered gradients is refused on every rank; the next step is right.",
        _wrong_call,
        places=("plain-optimizer",),
        combos=SHARDED,
        not_in_torch="with torch DDP every optimizer sees whole gradients",
    ),
    Kind("weights-loaded", "Weights that one rank has loaded are named.", _weights_loaded, combos=TWO),
    Kind(
        "other-rate",
        "A rank that would update its shard with another learning rate is named, and nobody updates.",
        _other_rate,
        combos=(*SHARDED, *OURS_SHARDED),
        not_in_torch="torch compares no hyperparameters",
    ),
)
