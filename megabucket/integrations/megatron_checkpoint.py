"""Optimizer state for Megatron's ``dist_checkpointing`` in its format ``fully_reshardable``: whole tensors by parameter name.

A parameter ``w`` is stored as ``optimizer.state.param.w`` (in float32), ``optimizer.state.exp_avg.w`` and
``optimizer.state.exp_avg_sq.w``, cut over ranks as the model cuts ``w``. The common part has the groups, with one step count.
Megatron has an optimizer of dense parameters and another of experts; here one may have both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, extract_sharded_tensors_and_factories

from megabucket import optim
from megabucket.errors import CheckpointMismatchError, ConfigError, name_list
from megabucket.optim.param_state import MAIN_PARAM

_TYPE: Final = "fully_reshardable"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_KEYS: Final = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
"""What tells groups apart in the format, with the values of an ordinary group. A group of experts is another one."""
_FUSED: Final = {"bias_correction": True}
"""Hyperparameters of Apex's and Transformer Engine's Adam that torch's does not have."""
_NO_HYPERPARAMETERS: Final = frozenset({"params", "param_names", "is_expert_parallel", "step"})
_INSTEAD: Final = "megabucket.save_checkpoint(path, ddp.wrapper, optimizer.optimizer, step=...)"

Optimizers = Sequence[optim.DistributedOptimizer]
"""One for each model chunk."""


class _Group(NamedTuple):
    """The trainable parameters of one kind in one group of an optimizer, and what the format knows the group by."""

    key: tuple[Any, ...]
    is_expert: bool
    group: dict[str, Any]
    params: dict[torch.nn.Parameter, str]
    """By parameter, its name."""


def sharded_state(
    optimizers: Optimizers,
    model_state: Mapping[str, Any],
    common: Mapping[str, Any],
    *,
    is_loading: bool,
    metadata: Mapping[str, Any],
) -> dict[Any, Any]:
    """Return the state to save, or tensors to load into. To save is a collective call.

    Args:
        model_state: the ``sharded_state_dict()`` of the model.
        common: further state, the same on all ranks.
        metadata: Megatron's, of the format.

    Raises:
        ConfigError: the format, the optimizer or its groups are not supported, or ``model_state`` lacks a parameter.
        MegabucketError: what ``state_dict()`` raises.
    """
    _check_format(metadata, is_loading=is_loading)
    _check_class(optimizers)
    place_of = {place.data: place for place in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    groups = list(_groups_of(optimizers))
    if missing := [name for one in groups for param, name in one.params.items() if param not in place_of]:
        raise ConfigError(
            f"the sharded state of the model lacks {name_list(missing)}: pass sharded_state_dict() of the model, with the "
            "parameters themselves as data."
        )
    state = {} if is_loading else _state_of(optimizers)
    steps = {int(state.get(param, {}).get("step", 0)) for one in groups for param in one.params}
    if len(steps) > 1:
        raise ConfigError(f"parameters have taken {sorted(steps)} steps: Megatron's format has one count for all of them.")
    parts: list[dict[str, Any]] = []
    for is_expert in sorted({one.is_expert for one in groups}):
        found = dict[tuple[Any, ...], dict[str, Any]]()
        tensors = list[dict[str, Any]]()
        for one in (one for one in groups if one.is_expert == is_expert):
            own = dict(zip(_KEYS, one.key, strict=True)) | _FUSED | _hyperparameters(one.group)
            own |= {"is_expert_parallel": is_expert, "step": max(steps, default=0)}
            if found.setdefault(one.key, own) != own:
                raise ConfigError(
                    f"two groups of the optimizer have the same {', '.join(_KEYS)} {one.key}, by which Megatron's format tells "
                    'groups apart, but other hyperparameters. Write other values into one: group["wd_mult"] = 0.0, say.'
                )
            for param in one.params:
                values = _tensors_of(param, state.get(param, {}), is_loading=is_loading)
                place = place_of[param]
                tensors.append(
                    {key: make_sharded_optimizer_tensor(place, of, f"optimizer.state.{key}") for key, of in values.items()}
                )
        part = {"optimizer": {"param_groups": list(found.values())}, "param_state": dict(enumerate(tensors)), **common}
        parts.append({**part, "param_state_sharding_type": _TYPE})
    if len(parts) == 1:
        return parts[0]
    for number, part in enumerate(parts if not metadata.get("chained_optim_avoid_prefix") else ()):
        add_prefix_for_sharding(part, f"chained_{number}.")
    return dict(enumerate(parts))


def whole_states(optimizers: Optimizers, loaded: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Return what was loaded into ``sharded_state`` in the format of ``state_dict()``, for each optimizer. A collective call.

    Raises:
        CheckpointMismatchError: it lacks values, has other groups, or does not belong to the weights that are in the model now;
            the text names all differences.
        PeerFailedError: it does not fit on another rank.
    """
    with optimizers[0].ddp.sync.call("load_state_dict() of a checkpoint of Megatron"):
        groups, problems = list(_groups_of(optimizers)), list[str]()
        kinds = sorted({one.is_expert for one in groups})
        parts = [loaded] if len(kinds) == 1 else [loaded.get(number, {}) for number in range(len(kinds))]
        saved = [group for part in parts for group in part.get("optimizer", {}).get("param_groups", ())]
        settings = _settings_from(saved, groups, problems)
        steps = {group.get("step") for group in saved}
        if len(steps) != 1 or None in steps:
            problems.append(f"its groups have the step counts {sorted(map(str, steps))}, and not one")
        state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        for kind, part in zip(kinds, parts, strict=True):
            params = chain.from_iterable(one.params.items() for one in groups if one.is_expert == kind)
            for index, (param, name) in enumerate(params):
                values = (part.get("param_state") or {}).get(index, {})
                if lacking := {"param", *_MOMENTS} - values.keys():
                    problems.append(f"it lacks {', '.join(sorted(lacking))} of {name!r}")
                elif not torch.equal(values["param"].to(param.device, param.dtype), param.detach()):
                    problems.append(
                        f"its main parameter of {name!r} does not round to the weight in the model, which is loaded first"
                    )
                main = {} if param.dtype == torch.float32 else {MAIN_PARAM: values.get("param")}
                state[param] = {**{key: values.get(key) for key in _MOMENTS}, **main}
        if problems:
            raise CheckpointMismatchError(path="the checkpoint of Megatron", problems=problems)
    count = float(steps.pop())
    found = []
    for optimizer in optimizers:
        index_of = {param: index for index, param in enumerate(_params_of(optimizer))}
        of_index = {
            index_of[param]: {"step": torch.tensor(count, dtype=torch.float32, device="cpu"), **of}
            for param, of in state.items()
            if param in index_of
        }
        own = [
            {**group, **settings.get(id(group), {}), "params": [index_of[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        found.append({"state": of_index, "param_groups": own})
    return found


def scaler_state(scaler: optim.ConstantGradScaler) -> dict[str, Any]:
    """Return the state of a loss scaler as Megatron's has it: the scale is a tensor."""
    return {key: torch.tensor([value]) if key == "scale" else value for key, value in scaler.state_dict().items()}


def _settings_from(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[_Group], problems: list[str]
) -> dict[int, dict[str, Any]]:
    """Return the saved hyperparameters of each group, by its ``id``; add to the problems where there is not one value."""
    there, found = dict[tuple[Any, ...], dict[str, Any]](), dict[int, dict[str, Any]]()
    for group in saved:
        key = (bool(group.get("is_expert_parallel")), *_key_of(group))
        if there.setdefault(key, _hyperparameters(group)) != _hyperparameters(group):
            problems.append(f"two of its groups have the same {', '.join(_KEYS)} {key[1:]}, and other hyperparameters")
    for one in groups:
        of_group = there.get((one.is_expert, *one.key))
        if of_group is None:
            others = [key[1:] for key in there if key[0] == one.is_expert]
            problems.append(
                f"it has no group {'of experts' if one.is_expert else 'of dense parameters'} with {', '.join(_KEYS)} {one.key} "
                f"for {name_list(list(one.params.values()))}; it has {others}"
            )
            continue
        own = {key: value for key, value in of_group.items() if key in one.group}
        if found.setdefault(id(one.group), own) != own:
            problems.append("its experts have other hyperparameters than its dense parameters, and one group here has both")
    return found


def _groups_of(optimizers: Optimizers) -> Iterator[_Group]:
    for optimizer in optimizers:
        names = optimizer.ddp.param_names
        for group in optimizer.param_groups:
            own = {param: names[param] for param in group["params"] if param in names}
            # An empty group has parameters on other ranks; one with frozen parameters alone is in no checkpoint.
            kinds = {_is_expert(param) for param in own} if group["params"] else {bool(group.get("is_expert_parallel"))}
            for kind in sorted(kinds):
                params = {param: name for param, name in own.items() if _is_expert(param) == kind}
                yield _Group(_key_of(group), kind, group, params)


def _key_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key, ordinary) for key, ordinary in _KEYS.items())


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NO_HYPERPARAMETERS}


def _is_expert(param: torch.Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def _params_of(optimizer: optim.DistributedOptimizer) -> list[torch.nn.Parameter]:
    """Return the parameters in the order of their indices in ``state_dict()``."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _state_of(optimizers: Optimizers) -> dict[torch.Tensor, Mapping[str, Any]]:
    found: dict[torch.Tensor, Mapping[str, Any]] = {}
    for optimizer in optimizers:
        optimizer.ddp.finish_param_sync()  # the caller may have asked the module, and not its wrapper, for the model's state
        state = optimizer.state_dict()["state"]
        found |= {param: state[index] for index, param in enumerate(_params_of(optimizer)) if index in state}
    return found


def _tensors_of(param: torch.nn.Parameter, state: Mapping[str, Any], *, is_loading: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of one parameter to save, of which those that are not there yet are zero, or to load into."""
    found = {} if is_loading else {"param": state.get(MAIN_PARAM, param.detach()).float(), **state}
    return {
        key: found[key] if key in found else torch.zeros(param.shape, dtype=torch.float32, device="cpu")
        for key in ("param", *_MOMENTS)
    }


def _check_format(metadata: Mapping[str, Any], *, is_loading: bool) -> None:
    found = metadata.get("distrib_optim_sharding_type", _TYPE)
    if found != _TYPE:
        raise ConfigError(
            f"distrib_optim_sharding_type={found!r}: of Megatron's formats, {_TYPE!r} alone stores state by parameter name; "
            "others depend on Megatron's buffers. Save with it (--dist-ckpt-optim-fully-reshardable of Megatron-LM); a "
            "checkpoint in another format is converted by Megatron: load it there, and save it again."
        )
    if not is_loading and metadata.get("distrib_optim_fully_reshardable_mem_efficient"):
        raise ConfigError(
            "distrib_optim_fully_reshardable_mem_efficient=True: here each rank has the whole state while it saves. Leave it "
            f"out, or use {_INSTEAD}, which gathers nothing."
        )


def _check_class(optimizers: Optimizers) -> None:
    for given in chain.from_iterable(optimizer.torch_optimizers for optimizer in optimizers):
        if not isinstance(given, torch.optim.Adam | torch.optim.AdamW) or any(group["amsgrad"] for group in given.param_groups):
            raise ConfigError(
                f"{type(given).__name__}: Megatron's format has the state of Adam and AdamW without amsgrad, and no other. Use "
                f"{_INSTEAD}."
            )
