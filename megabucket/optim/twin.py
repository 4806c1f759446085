"""The torch optimizer behind a ``DistributedOptimizer``: one of the same class and attributes, over other tensors.

The given optimizer keeps its groups, with whole parameters, and nothing in it is replaced. Its twin has groups and state of its
own over the tensors that this rank updates. Before each step the twin takes over hyperparameters and attributes, and afterwards
the given one gets back what the step has written to them (schedule-free optimizers count in their groups).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from megabucket.errors import ConfigError

Step = Callable[[torch.optim.Optimizer], object]
"""A method of an optimizer's class."""

_OWN: Final = frozenset({"param_groups", "state", "step", "__getstate__", "_opt_called"})
"""Attributes that the two do not share; hooks are further ones."""


def shell_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, attributes and hooks over other parameters."""
    shell = object.__new__(type(optimizer))
    shell.__dict__.update(optimizer.__dict__)
    shell.param_groups, shell.state = groups, state  # type: ignore[assignment]
    return shell


def twin_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and attributes, without hooks, over other parameters."""
    twin = shell_of(optimizer, groups, state)
    for name in [name for name in vars(twin) if name in _OWN - {"param_groups", "state"}]:
        del vars(twin)[name]
    vars(twin).update({name: OrderedDict() for name in vars(twin) if name.startswith("_optimizer_")})
    return twin


def unhooked_step(optimizer: torch.optim.Optimizer) -> Step:
    """Return the ``step`` of the class, without the function of torch around it that calls hooks."""
    step: Any = type(optimizer).step
    is_wrapped = getattr(step, "hooked", False) and step.__globals__["__name__"] == torch.optim.Optimizer.__module__
    return step.__wrapped__ if is_wrapped else step  # type: ignore[no-any-return]


def check_can_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose twin would fail, or step in another way than the optimizer itself.

    Raises:
        ConfigError: its ``step`` was replaced on the object, and not by a learning rate scheduler, which only notes the call;
            or it has an option with which torch's own step fails on such parameters.
    """
    kind = type(optimizer).__name__
    patched: Any = vars(optimizer).get("step")
    if getattr(patched, "_wrapped_by_lr_sched", False):
        patched = patched.__wrapped__
    if patched is not None and patched is not type(optimizer).step:
        raise ConfigError(
            f"step() of this {kind} was replaced by {getattr(patched, '__qualname__', patched)!r}, which would not be "
            f"called: a DistributedOptimizer steps the class {kind} on flat tensors. Put the code into a subclass, or into a "
            "hook (register_step_pre_hook, register_step_post_hook)."
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(
                f"group {index} of the {kind} has differentiable=True, with which torch cannot update the parameters of a "
                "module: it refuses to change a leaf in place while it records gradients. Leave it out."
            )
        if group.get("capturable") and any(param.device.type == "cpu" for param in group["params"][:1]):
            raise ConfigError(
                f"group {index} of the {kind} has capturable=True, which torch has for accelerators only, and its parameters "
                "are on the CPU. Leave it out, or set it to False after loading state of a run on a GPU."
            )


def carry(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy attributes and hyperparameters: to the twin before its step, and back after it."""
    own = vars(target)
    for name, value in vars(source).items():
        if name not in _OWN and not name.startswith("_optimizer_"):
            own[name] = value
    # Groups that were added since the twin was made have no trainable parameters in it.
    for group, other in zip(source.param_groups, target.param_groups, strict=False):
        params = other["params"]
        other.update(group)
        other["params"] = params
    # State under keys that are no parameters.
    for key in list(target.state):
        if not isinstance(key, torch.Tensor):
            del target.state[key]
    for key, value in source.state.items():
        if not isinstance(key, torch.Tensor):
            target.state[key] = value
