"""The state of whole parameters in the format of ``torch.optim``: what ``state_dict`` gives and ``load_state_dict`` takes.

Torch's own code packs and unpacks it, with the hooks of the optimizer and whatever its class does there, on a shell that holds
whole parameters while the optimizer itself holds flat shards. Beside torch's two keys there is a third, which torch ignores:
main parameters, and what the optimizer computed in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from megabucket.buffer.views import dtype_name, dtype_named
from megabucket.errors import CheckpointMismatchError
from megabucket.optim.shards import main_dtype
from megabucket.optim.whole_state import KNOWN_NUMBERS, WholeState

OWN_KEY: Final = "megabucket"
_MAIN_PARAMS: Final = "main_params"
_COMPUTED_IN: Final = "computed_in"
_SOURCE: Final = "the dict given to load_state_dict()"

Members = Sequence[Sequence[torch.nn.Parameter]]
"""The parameters of each group."""


@dataclass(frozen=True, slots=True, eq=False)
class Unpacked:
    """What a ``state_dict`` holds, by parameter."""

    whole: WholeState
    groups: list[dict[str, Any]]
    """Hyperparameters by group, without ``params``."""


def pack(optimizer: torch.optim.Optimizer, members: Members, whole: WholeState) -> dict[str, Any]:
    """Return what ``optimizer.state_dict()`` would be if it held whole parameters."""
    groups = [{**group, "params": list(of_group)} for group, of_group in zip(optimizer.param_groups, members, strict=True)]
    state = defaultdict(dict, {key: value for key, value in whole.values.items() if value or not isinstance(key, torch.Tensor)})
    packed: dict[str, Any] = _shell(optimizer, groups, state).state_dict()
    index_of = _indices(members)
    packed[OWN_KEY] = {
        _COMPUTED_IN: {index: dtype_name(whole.dtypes.get(param, param.dtype)) for param, index in index_of.items()},
        _MAIN_PARAMS: {index_of[param]: values for param, values in whole.main_values.items() if param in index_of},
    }
    return packed


def unpack(
    optimizer: torch.optim.Optimizer, members: Members, names: Mapping[torch.Tensor, str], state_dict: Mapping[str, Any]
) -> Unpacked:
    """Return what a ``state_dict`` of this library or of plain torch holds. Changes nothing.

    Args:
        names: of the parameters, for texts.

    Raises:
        CheckpointMismatchError: it is not of an optimizer over these parameters; the text names all that does not fit.
    """
    _check(_group_problems(members, state_dict))
    # Torch converts floating state to the dtype of the parameter, which for 16-bit ones is not what a shard computes in. It
    # leaves state of integer "parameters" as it is; these have no memory.
    stand_ins = [[_stand_in(param) for param in of_group] for of_group in members]
    groups = [{**group, "params": of_group} for group, of_group in zip(optimizer.param_groups, stand_ins, strict=True)]
    shell = _shell(optimizer, groups, defaultdict(dict))
    shell.load_state_dict(dict(state_dict))
    param_of = {
        stand_in: param
        for of_group, of_params in zip(stand_ins, members, strict=True)
        for stand_in, param in zip(of_group, of_params, strict=True)
    }
    values = {param_of.get(key, key): value for key, value in shell.state.items()}
    own = state_dict.get(OWN_KEY) or {}
    param_at = {index: param for param, index in _indices(members).items()}
    mains = {param_at[index]: main for index, main in own.get(_MAIN_PARAMS, {}).items() if index in param_at}
    _check(_shape_problems(values, mains, names))
    computed_in = {param_at[index]: dtype_named(name) for index, name in own.get(_COMPUTED_IN, {}).items() if index in param_at}
    dtypes = {param: main_dtype(param.dtype) for param in param_at.values()}
    for param, dtype in dtypes.items():
        if param in values:
            values[param] = {
                key: value if key in KNOWN_NUMBERS else _follow(value, param, computed_in.get(param), dtype)
                for key, value in values[param].items()
            }
    hyperparameters = [{key: value for key, value in group.items() if key != "params"} for group in shell.param_groups]
    return Unpacked(WholeState(values, mains, dtypes), hyperparameters)


def set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give the groups of an optimizer other hyperparameters; whoever holds a group (a scheduler, say) keeps holding it."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        params = group["params"]
        group.clear()
        group.update(values)
        group["params"] = params


def _shell(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, with the same hooks, that holds other parameters."""
    shell = object.__new__(type(optimizer))
    shell.__dict__.update(optimizer.__dict__)
    shell.param_groups, shell.state = groups, state  # type: ignore[assignment]
    return shell


def _stand_in(param: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int8, device=param.device).expand(param.shape or (1,))


def _indices(members: Members) -> dict[torch.Tensor, int]:
    return {param: index for index, param in enumerate(param for of_group in members for param in of_group)}


def _follow(value: Any, param: torch.Tensor, computed_in: torch.dtype | None, dtype: torch.dtype) -> Any:
    """Return values that have the dtype their optimizer computed in, in the dtype this one computes in.

    What plain torch gives says nothing about that, and torch takes all floating state to follow the parameter.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    follows = value.dtype == computed_in if computed_in is not None else value.shape == param.shape
    return value.to(dtype) if follows else value


def _group_problems(members: Members, state_dict: Any) -> list[str]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        return [f"it is no state_dict of an optimizer ({type(state_dict).__name__} without 'state' and 'param_groups')"]
    groups = state_dict["param_groups"]
    if len(groups) != len(members):
        return [f"it has {len(groups)} parameter groups, the optimizer has {len(members)}"]
    return [
        f"group {index} has {len(saved['params'])} parameters there and {len(own)} here"
        for index, (saved, own) in enumerate(zip(groups, members, strict=True))
        if len(saved["params"]) != len(own)
    ]


def _shape_problems(
    values: Mapping[Any, Any], mains: Mapping[torch.Tensor, torch.Tensor], names: Mapping[torch.Tensor, str]
) -> list[str]:
    held = [
        (param, key, value)
        for param, of_param in values.items()
        if isinstance(param, torch.Tensor) and isinstance(of_param, Mapping)
        for key, value in of_param.items()
        if isinstance(value, torch.Tensor) and (value.numel() != 1 or key not in KNOWN_NUMBERS)
    ]
    held += [(param, "main parameter", value) for param, value in mains.items()]
    return [
        f"{key} of {names.get(param, '?')!r} has shape {tuple(value.shape)} there and {tuple(param.shape)} here"
        for param, key, value in held
        if value.shape != param.shape and not (value.numel() == 1 and key != "main parameter")
    ]


def _check(problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointMismatchError(path=_SOURCE, problems=problems)
