"""What users do to a wrapped module, and how it is undone."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megabucket.chaos.loopback_soak.acts import Act
from megabucket.chaos.loopback_soak.model import pattern

if TYPE_CHECKING:
    from megabucket.chaos.loopback_soak.player import Player


class Change(enum.Enum):
    """A change of the module after wrapping."""

    FROZEN = "frozen"
    UNFROZEN = "unfrozen"
    HALF = "half"
    MOVED = "moved"
    REPLACED = "replaced"
    ADDED = "added"
    MAIN_GRAD = "main_grad replaced"


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """One parameter as it was."""

    param: torch.nn.Parameter
    data: torch.Tensor
    main_grad: torch.Tensor | None
    main_grad_data: torch.Tensor | None
    """Where ``main_grad`` looks: converting a module also converts gradients that are shown as ``param.grad``."""
    is_trained: bool


def _before(param: torch.nn.Parameter) -> Before:
    main_grad: torch.Tensor | None = getattr(param, "main_grad", None)
    return Before(param, param.data, main_grad, None if main_grad is None else main_grad.data, param.requires_grad)


@dataclass(frozen=True)
class Break(Act):
    """Change the module of this rank."""

    change: Change
    param: str
    """Which parameter; the last one of the model (frozen) for ``UNFROZEN``."""

    is_work = False

    def play(self, rank: Player) -> None:
        """Change it, and remember what was there."""
        rank.ddp.finish_param_sync()
        module = rank.module
        rank.before = {name: _before(param) for name, param in module.named_parameters()}
        owner, _, name = self.param.rpartition(".")
        param: Any = module.get_parameter(self.param)
        if self.change is Change.HALF:
            module.half()
        elif self.change is Change.MOVED:
            param.data = param.data.clone()
        elif self.change is Change.REPLACED:
            setattr(module.get_submodule(owner), name, torch.nn.Parameter(param.detach().clone()))
        elif self.change is Change.ADDED:
            module.register_parameter("added", torch.nn.Parameter(pattern(3)))
        elif self.change is Change.MAIN_GRAD:
            param.main_grad = torch.zeros_like(param.main_grad)
        else:
            param.requires_grad_(self.change is Change.UNFROZEN)


@dataclass(frozen=True)
class Repair(Act):
    """Undo the change."""

    is_work = False

    def play(self, rank: Player) -> None:
        """Put everything back where it was."""
        for name, before in rank.before.items():
            owner, _, last = name.rpartition(".")
            setattr(rank.module.get_submodule(owner), last, before.param)
            before.param.data = before.data
            before.param.requires_grad_(before.is_trained)
            if before.main_grad is not None and before.main_grad_data is not None:
                before.main_grad.data = before.main_grad_data
                before.param.main_grad = before.main_grad  # type: ignore[attr-defined]
        rank.module.register_parameter("added", None)
        del rank.module.added


@dataclass(frozen=True)
class SetTrained(Act):
    """Freeze or unfreeze a parameter for good; ``Rebuild`` follows on every rank."""

    param: str
    value: bool
    is_work = False

    def play(self, rank: Player) -> None:
        """Set ``requires_grad``."""
        rank.module.get_parameter(self.param).requires_grad_(self.value)


@dataclass(frozen=True)
class Replace(Act):
    """Put another parameter with the same values in the place of one; ``Rebuild`` follows on every rank."""

    param: str
    is_work = False

    def play(self, rank: Player) -> None:
        """Replace it, and tell the optimizer, which knows nothing about the new one's momentum."""
        rank.ddp.finish_param_sync()
        owner, _, name = self.param.rpartition(".")
        param = torch.nn.Parameter(rank.module.get_parameter(self.param).detach().clone())
        setattr(rank.module.get_submodule(owner), name, param)
        rank.optimizer.add_param_group({"params": [param]})


@dataclass(frozen=True)
class Move(Act):
    """Give a parameter memory of its own, with the same values; ``Rebuild`` follows on every rank."""

    param: str
    is_work = False

    def play(self, rank: Player) -> None:
        """Assign ``param.data``."""
        rank.ddp.finish_param_sync()
        param = rank.module.get_parameter(self.param)
        param.data = param.data.clone()
