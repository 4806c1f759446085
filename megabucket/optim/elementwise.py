"""Tests whether an optimizer updates each element independently of the others, as flat shards require.

Of torch's own classes it is known. Of others neither the class nor the name tells. So copies of the optimizer step on the same
small tensors, once as whole parameters and once cut into flat shards, and the results are compared. The optimizer itself, its
parameters and state, and the random number generators are not changed.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import torch

from megabucket.errors import ConfigError
from megabucket.optim.state_dict import AS_PLAIN, is_per_element
from megabucket.optim.twin import unhooked_step

_KNOWN: Final = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Classes that are elementwise in every torch from 2.11 on. A subclass is tried."""

_SHAPES: Final = ((12,), (8, 6), (4, 3, 2, 2), (140, 130))
"""Of whole parameters. The last is large: some optimizers treat only large matrices by rows and columns."""
_NUMELS: Final = tuple(map(prod, _SHAPES))
_SHARD_COUNTS: Final = (1, 2, 5)
_GRAD_SCALES: Final = (1.0, 30.0, 0.3)
"""By step. A sudden large gradient triggers clipping inside an optimizer."""
_TOLERANCE: Final = 1e-4
"""Relative to the largest update: fused kernels round the last elements of a tensor in another way."""
_OVERRIDDEN: Final = {"lr": 0.01, "weight_decay": 0.1}
"""A warmup may begin at a learning rate of 0, which changes nothing; some optimizers are layer-wise only with weight decay."""
_IN_NO_COMPARISON: Final = frozenset({"params", "param_names", "initial_lr", *_OVERRIDDEN})


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of one element depends on others. ``optimizer.is_elementwise`` replaces the trial.

    Raises:
        ConfigError: the trial or ``is_elementwise`` says that it does, or the trial fails and there is no ``is_elementwise``;
            or the optimizer requires a closure, or keeps float32 copies of the parameters itself.
    """
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind}.step() requires a closure and calls it many times, and a DistributedOptimizer steps on one set of "
            f"gradients, which all ranks have agreed on. Use {AS_PLAIN.format(kind)}"
        )
    if getattr(optimizer, "master_weights", None) is True:
        raise ConfigError(
            f"{kind}(master_weights=True) keeps float32 copies of the parameters, and so does a DistributedOptimizer, which "
            "steps on its own: the two would drift apart. Leave master_weights out."
        )
    declared = getattr(optimizer, "is_elementwise", True if type(optimizer) in _KNOWN else None)
    if declared:
        return
    reason = "it declares is_elementwise = False" if declared is not None else find_obstacle(optimizer)
    if reason:
        raise ConfigError(
            f"{kind} cannot step on flat shards cut across parameters, as a DistributedOptimizer does: {reason}. Use an "
            f"elementwise optimizer (Adam, AdamW, SGD, Lion, ...), or {AS_PLAIN.format(kind)} If it does update each element "
            "by itself, declare it: optimizer.is_elementwise = True."
        )


def find_obstacle(optimizer: torch.optim.Optimizer) -> str:
    """Return why the optimizer, which holds whole parameters, cannot step on flat shards; empty if it can."""
    if not any(group["params"] for group in optimizer.param_groups):
        return ""
    device = next(param.device for group in optimizer.param_groups for param in group["params"])
    try:
        with _same_random_numbers(device), torch.no_grad():
            before, grads = _values(device), [_values(device, step=step) for step in range(len(_GRAD_SCALES))]
            wholes = _results(optimizer, before, grads, _whole)
            for num_shards in _SHARD_COUNTS:
                shards = [_results(optimizer, before, grads, _shard(num_shards, index)) for index in range(num_shards)]
                for whole, cut in zip(wholes, map(torch.cat, zip(*shards, strict=True)), strict=True):
                    if obstacle := _difference(before, whole, cut, num_shards):
                        return obstacle
    except Exception as error:  # whatever the code of an optimizer raises
        return f"a copy of it could not be tried on small tensors ({type(error).__name__}: {error})"
    return ""


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leave the generators of host and device as they were."""
    host = torch.default_generator.clone_state()  # not get_rng_state(): see checkpoint/values.py
    of_device = None if device.type == "cpu" else torch.get_device_module(device)
    before = None if of_device is None else of_device.get_rng_state(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(host.get_state())
        if of_device is not None:
            of_device.set_rng_state(before, device)


def _values(device: torch.device, *, step: int | None = None) -> torch.Tensor:
    """Return the values of all parameters, or their gradients in one step: 1D, float32, no two of them alike."""
    at = torch.arange(sum(_NUMELS), dtype=torch.float32, device=device)
    if step is None:
        return torch.sin(0.7 * at) * (1 + 3 * at / len(at))
    # Larger from tensor to tensor: with equal maxima, a bound that depends on the largest gradient would be equal everywhere.
    return torch.cos(1.3 * at + step) * (0.01 + at / len(at)) * _GRAD_SCALES[step]


def _whole(flat: torch.Tensor) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split(_NUMELS), _SHAPES, strict=True)]


def _shard(num_shards: int, index: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    return lambda flat: [flat.tensor_split(num_shards)[index]]


def _results(
    optimizer: torch.optim.Optimizer,
    before: torch.Tensor,
    grads: Sequence[torch.Tensor],
    cut: Callable[[torch.Tensor], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Step once with each of ``grads`` on values, cut by ``cut``; return the updated values for each kind of group, 1D."""
    tried = _copy_of(optimizer, cut(before))
    # A schedule-free optimizer steps in this mode only, and loops may switch it when everything is wrapped.
    getattr(tried, "train", lambda: None)()
    step = unhooked_step(tried)  # hooks for all optimizers of the process need not see copies
    for grad_values in grads:
        for group in tried.param_groups:
            for param, grad in zip(group["params"], cut(grad_values), strict=True):
                param.grad = grad.clone()
        step(tried)
    return [torch.cat([param.detach().flatten() for param in group["params"]]) for group in tried.param_groups]


def _copy_of(optimizer: torch.optim.Optimizer, values: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return a copy over other tensors, with one group of each kind and no hooks. The constructor is not called."""
    tried = type(optimizer).__new__(type(optimizer))
    state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer): tried, id(optimizer.state): state}
    for group in optimizer.param_groups:
        # Other attributes may refer to the parameters: in the copy they refer to empty ones.
        memo |= {id(param): torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")) for param in group["params"]}
    own = {key: value for key, value in vars(optimizer).items() if key != "step" and not key.startswith("_optimizer_")}
    tried.__setstate__(copy.deepcopy(own, memo))
    kinds: dict[str, dict[str, Any]] = {}
    for group, copied in zip(optimizer.param_groups, tried.param_groups, strict=True):
        kind = repr(sorted((key, value) for key, value in group.items() if key not in _IN_NO_COMPARISON))
        if kind in kinds or not group["params"]:
            continue
        kinds[kind] = copied
        copied["params"] = [torch.nn.Parameter(value.clone()) for value in values]
        copied.pop("param_names", None)
        for key, value in _OVERRIDDEN.items():
            old = copied.get(key)
            if isinstance(old, torch.Tensor):
                copied[key] = torch.full_like(old, value)
            elif isinstance(old, int | float):
                copied[key] = value
        # Parameters have state already if the constructor initializes it, or after steps before wrapping.
        like = next((param for param in group["params"] if param.numel() and optimizer.state.get(param)), None)
        if like is not None:
            for param in copied["params"]:
                state[param] = {key: _state_like(key, value, like, param) for key, value in optimizer.state[like].items()}
    tried.param_groups[:] = kinds.values()
    return tried


def _state_like(key: str, value: Any, of: torch.Tensor, param: torch.Tensor) -> Any:
    """Return an entry of the state of a small parameter, like that of the parameter ``of`` of the user."""
    if is_per_element(key, value, of):
        return torch.full_like(param, float(value.flatten()[0]))
    return copy.deepcopy(value)


def _difference(before: torch.Tensor, whole: torch.Tensor, cut: torch.Tensor, num_shards: int) -> str:
    """Return how the values of whole and of cut parameters differ after all steps; empty if they agree.

    Args:
        before: the values before the first step.
    """
    if torch.equal(whole, before):
        return f"{len(_GRAD_SCALES)} steps of a copy of it on small tensors changed nothing, so there is nothing to compare"
    for shape, old, ours, theirs in zip(_SHAPES, *(flat.split(_NUMELS) for flat in (before, whole, cut)), strict=True):
        moved, off = float((ours - old).abs().max()), float((ours - theirs).abs().max())
        if not off <= _TOLERANCE * moved:  # nan included
            return (
                f"on small tensors its update of one element depends on others (a parameter of shape {shape} becomes another "
                f"when it is cut over {num_shards} rank{'s' * (num_shards > 1)}: off by {off:.2g}, updated by {moved:.2g})"
            )
    return ""
