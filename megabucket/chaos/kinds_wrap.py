"""Kinds of fault when wrapping: ranks with different models or configs, and models that cannot be wrapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from megabucket.chaos.cell import Cell, Mode
from megabucket.chaos.expectation import Expectation, named
from megabucket.chaos.fault import Fault
from megabucket.chaos.kind import FEW, PAIRS, Kind
from megabucket.chaos.model import WIDTH, ChaosModel, FoldedLinear

_LAST = "layers.3"


def _other_shape() -> ChaosModel:
    return ChaosModel(odd_layer=torch.nn.Linear(WIDTH, WIDTH + 1))


def _other_order() -> ChaosModel:
    return ChaosModel(registration=(0, 2, 1, 3))


def _one_more() -> ChaosModel:
    model = ChaosModel()
    model.extra = torch.nn.Parameter(torch.ones(WIDTH))
    return model


def _one_frozen() -> ChaosModel:
    model = ChaosModel()
    model.layers["3"].weight.requires_grad_(False)
    return model


def _with_buffer(numel: int) -> ChaosModel:
    model = ChaosModel()
    model.register_buffer("running", torch.zeros(numel))
    return model


def _tied() -> ChaosModel:
    model = ChaosModel()
    model.layers["3"].weight = model.layers["2"].weight
    return model


_MODELS: Final[Mapping[str, tuple[Callable[[], ChaosModel], Callable[[], ChaosModel], str]]] = {
    # place: what the others wrap, what the rank at fault wraps, what the text must name
    "shape": (ChaosModel, _other_shape, f"{_LAST}.weight"),
    "same-numel": (ChaosModel, lambda: ChaosModel(odd_layer=FoldedLinear()), f"{_LAST}.weight"),
    "order": (ChaosModel, _other_order, "layers.1.weight"),
    "float64": (ChaosModel, lambda: ChaosModel().double(), "float64"),
    "bf16-fp16": (lambda: ChaosModel().bfloat16(), lambda: ChaosModel().half(), "bfloat16"),
    "one-more": (ChaosModel, _one_more, "extra"),
    "frozen": (ChaosModel, _one_frozen, "frozen"),
    "tied": (ChaosModel, _tied, f"{_LAST}.weight"),
    "buffer-shape": (lambda: _with_buffer(4), lambda: _with_buffer(8), "running"),
    "buffer-missing": (lambda: _with_buffer(4), ChaosModel, "running"),
}


class OtherModel(Fault):
    """The rank at fault wraps another model."""

    def expect(self) -> Expectation:
        """Return a refusal that names the first entry that differs."""
        return named("LayoutMismatchError", at_wrap=True, texts=(_MODELS[self.cell.place][2],))

    def build(self, rank: int) -> ChaosModel:
        """Build one of the two models."""
        usual, other, _ = _MODELS[self.cell.place]
        return other() if self.is_at_fault(rank) else usual()


class OtherConfig(Fault):
    """The rank at fault has another value of one config field, which is the place."""

    def expect(self) -> Expectation:
        """Return a refusal that names the field."""
        return named("LayoutMismatchError", at_wrap=True, texts=(f"config {self.cell.place}",))

    def config(self, rank: int) -> Mapping[str, Any]:
        """Change the field."""
        if not self.is_at_fault(rank):
            return {}
        combo = self.cell.combo
        others: dict[str, Any] = {
            "bucket_size": 1_000,
            "use_distributed_optimizer": combo.mode is Mode.ALL_REDUCE,
            "overlap_grad_reduce": not combo.overlaps,
            "unused_parameters": "zero",
            "nonfinite_gradients": "skip_step",
            "grad_reduction": "sum",
        }
        changed = {self.cell.place: others[self.cell.place]}
        # Gathering during forward is refused where these two are off, which would be another error than the one looked for.
        return {**changed, "overlap_param_gather": False} if "overlap_param_gather" not in changed else changed


class Unwrappable(Fault):
    """A model that cannot be wrapped, on one rank or on all."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.is_armed_on_all = cell.place.startswith("all")
        self._what = cell.place.partition("-")[2]

    def expect(self) -> Expectation:
        """Return the error itself where all ranks have it, else one that names the rank."""
        errors = {
            "expanded": "UnsupportedParameterError",
            "frozen": "NoTrainableParametersError",
            "wrapped": "AlreadyWrappedError",
        }
        error = errors[self._what]
        if self.is_armed_on_all:
            return named(error, at_wrap=True)
        return named(
            ("PeerFailedError", "LayoutMismatchError"),
            at_wrap=True,
            fields={"rank": self.cell.culprit, "phase": "wrap"},
            texts=(error,),
            own_error=(error,),
        )

    def build(self, rank: int) -> ChaosModel:
        """Build the model."""
        model = ChaosModel()
        if not self.is_at_fault(rank):
            return model
        if self._what == "expanded":
            model.layers["3"].bias = torch.nn.Parameter(torch.zeros(1).expand(WIDTH))
        elif self._what == "frozen":
            model.requires_grad_(False)
        return model

    @property
    def wraps_twice(self) -> bool:
        """Whether the rank at fault wraps its model once before, over a group of its own."""
        return self._what == "wrapped"


WRAP_KINDS = (
    Kind(
        "other-model",
        "Refused when wrapping, with the first entries that differ; no rank is wrapped.",
        OtherModel,
        places=tuple(_MODELS),
        combos=PAIRS,
    ),
    Kind(
        "other-config",
        "Refused when wrapping, with the field and both values.",
        OtherConfig,
        places=(
            "bucket_size",
            "use_distributed_optimizer",
            "overlap_grad_reduce",
            "unused_parameters",
            "nonfinite_gradients",
            "grad_reduction",
        ),
        combos=FEW,
        torch_skip=lambda cell: "" if cell.place in ("bucket_size", "unused_parameters") else "torch DDP has no such setting",
    ),
    Kind(
        "unwrappable",
        "A model that cannot be wrapped on one rank is named on all of them.",
        Unwrappable,
        places=("one-expanded", "all-expanded", "one-frozen", "all-frozen", "one-wrapped", "all-wrapped"),
        combos=FEW,
        torch_skip=lambda cell: "torch DDP allows a module to be wrapped twice" if cell.place.endswith("wrapped") else "",
    ),
)
