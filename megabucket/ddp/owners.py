"""Data-parallel wrappers of other libraries, inside a wrapped module or around it: second owners of the same gradients.

They are recognised by the names of their classes, so that none is imported. Those inside are found when wrapping. Those around
are found when they take the module as a submodule, or when they are on the call stack of the first training forward: one that
was made before is in no tree that begins at the module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import FrameType
from typing import Final

import torch
from torch.nn.modules.module import _global_module_registration_hooks, register_module_module_registration_hook

from megabucket.ddp.hooks import shared_hook_in
from megabucket.errors import ForeignWrapperError

_UNWRAP: Final = "Keep one of the two: wrap the plain module, which the other one has as `.module`, or leave this wrapper out."
_FSDP1: Final = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_FSDP: Final = "FSDP (FullyShardedDataParallel or fully_shard())"
_WITHOUT_FSDP: Final = (
    "Build the model anew without it, because FSDP has replaced the parameters: use_distributed_optimizer=True takes its place."
)
_REMEDIES: Final = {
    "torch.nn.parallel.distributed.DistributedDataParallel": (
        f"{_UNWRAP} To reduce different parts of one model, name the other parts to torch's: it leaves out the parameters in "
        "the attribute _ddp_params_and_buffers_to_ignore of its module."
    ),
    "torch.nn.parallel.data_parallel.DataParallel": f"{_UNWRAP} One process per device replaces it.",
    "torch.distributed._composable.replicate.DDP": "Leave replicate() out: this wrapper takes its place.",
    _FSDP1: _WITHOUT_FSDP,
    "deepspeed.runtime.engine.DeepSpeedEngine": f"{_UNWRAP} docs/migrate/deepspeed.md has what its settings are called here.",
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": _UNWRAP,
    "apex.parallel.distributed.DistributedDataParallel": _UNWRAP,
    "fairscale.nn.data_parallel.sharded_ddp.ShardedDataParallel": _UNWRAP,
}
"""Wrappers by class, each with what to do."""
_AROUND: Final = "around this module"


def _kind_of(value: object) -> str | None:
    """Return the class of ``value``, or the base of it, that is a wrapper of another library.

    An adapter's wrapper, which may be one for ``isinstance``, has none of its buffers.
    """
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__)
    found = next((name for name in names if name in _REMEDIES or name.startswith("megabucket.integrations.")), None)
    return found if found in _REMEDIES else None


def _owned_by(owner: torch.nn.Module, child: torch.nn.Module | None = None) -> Iterable[torch.nn.Parameter]:
    """Return the parameters whose gradients a wrapper owns.

    Args:
        child: a module that it is about to hold.
    """
    # torch DDP has lists of those that it does not ignore. Without the private lists: all of them, ignored ones included.
    # From its dict, because FSDP and DeepSpeed look unknown attributes up in a module that they may not have yet.
    lists = (vars(owner).get(name, ()) for name in ("_module_parameters", "_delay_all_reduce_params"))
    known = [param for params in lists for param in params]
    return known or [*owner.parameters(), *(() if child is None else child.parameters())]


def find_owner(module: torch.nn.Module, params: Mapping[str, torch.nn.Parameter]) -> ForeignWrapperError | None:
    """Return an error about the first wrapper of another library in ``module`` that owns some of ``params``, or ``None``.

    Args:
        params: trainable, by name.
    """
    return OwnerGuard(module, params).find_inside()


class OwnerGuard:
    """Refuses a wrapper of another library that owns parameters of ours, until it is removed or garbage collected.

    Args:
        params: the parameters in the buffers, by name.
    """

    def __init__(self, module: torch.nn.Module, params: Mapping[str, torch.nn.Parameter]) -> None:
        self._module = module
        self._names = {param: name for name, param in params.items()}
        # FSDP replaces parameters, so they are found by the modules that held them.
        self._homes = {
            part: names
            for part in module.modules()
            if (names := [self._names[param] for param in part._parameters.values() if param in self._names])
        }
        self._has_passed = False

    def watch(self) -> None:
        """Refuse wrappers that are made from now on."""
        shared_hook_in(_global_module_registration_hooks, register_module_module_registration_hook).add(self.check_new)

    def remove(self) -> None:
        """Stop watching."""
        self._names, self._homes = {}, {}

    def find_inside(self) -> ForeignWrapperError | None:
        """Return an error about the first one in the module."""
        for path, part in self._module.named_modules():
            where = f"at {path!r} inside this module" if path else "which is this module itself"
            if part in self._homes and is_in_fsdp(part):
                return _error(_FSDP, where, self._homes[part], _WITHOUT_FSDP)
            if (error := self._refusal_of(part, where)) is not None:
                return error
        return None

    def _refusal_of(self, owner: torch.nn.Module, where: str) -> ForeignWrapperError | None:
        kind = _kind_of(owner)
        if kind is None or kind == _FSDP1:  # FSDP has marked the modules that it does not ignore
            return None
        names = self._names_of(_owned_by(owner))
        return _error(kind, where, names, _REMEDIES[kind]) if names else None

    def check_new(self, owner: torch.nn.Module, _: str, child: torch.nn.Module | None) -> None:
        """Refuse that a wrapper takes a module with parameters of ours.

        Raises:
            ForeignWrapperError: it does.
        """
        if child is None or not self._names or (kind := _kind_of(owner)) is None:
            return
        names = self._names_of(_owned_by(owner, child))
        if kind == _FSDP1:
            names = [name for part in child.modules() if is_in_fsdp(part) for name in self._homes.get(part, ())]
        if names:
            raise _error(kind, _AROUND, names, _REMEDIES[kind])

    def check_forward(self) -> None:
        """Refuse the first training forward if a wrapper calls the module, or has replaced its parameters.

        Raises:
            ForeignWrapperError: there is one.
        """
        if self._has_passed:
            return
        found = chain([self.find_inside()], (self._refusal_of(caller, _AROUND) for caller in _callers()))
        for error in filter(None, found):
            raise error
        self._has_passed = True

    def _names_of(self, params: Iterable[torch.nn.Parameter]) -> list[str]:
        return [self._names[param] for param in params if param in self._names]


def is_in_fsdp(part: torch.nn.Module) -> bool:
    """Return whether FSDP has taken the parameters of a module; both kinds set this mark, for the compiler."""
    return bool(vars(part).get("_is_fsdp_managed_module"))


def _callers() -> Iterator[torch.nn.Module]:
    """Yield the modules that are being called in this thread, the innermost first."""
    # No other frames are looked into: before Python 3.13 that keeps their variables alive as long as they run.
    call = torch.nn.Module.__call__.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is call:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _error(owner: str, where: str, params: Iterable[str], remedy: str) -> ForeignWrapperError:
    return ForeignWrapperError(owner=owner, where=where, params=list(params), remedy=remedy)
