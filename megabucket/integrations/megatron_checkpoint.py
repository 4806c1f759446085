"""Optimizer state for Megatron's ``dist_checkpointing`` in its format ``fully_reshardable``: whole tensors by parameter name.

A parameter ``w`` is stored as ``optimizer.state.param.w`` (in float32), ``optimizer.state.exp_avg.w`` and
``optimizer.state.exp_avg_sq.w``, cut over ranks as the model cuts ``w``. The common part has the groups, with one step count.
Megatron has an optimizer of dense parameters and another of experts; here one may have both.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, extract_sharded_tensors_and_factories

from megabucket import optim
from megabucket.ddp.groups import DENSE
from megabucket.errors import CheckpointMismatchError, ConfigError, name_list
from megabucket.optim.param_state import MAIN_PARAM
from megabucket.optim.state_dict import join, split

_TYPE: Final = "fully_reshardable"
_KEYS: Final = ("param", "exp_avg", "exp_avg_sq")
_MARKS: Final = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
"""By these the format tells groups apart, and by whether they are of experts; with the values of an ordinary group."""
_FUSED: Final = {"bias_correction": True}
"""Hyperparameters of Apex's and Transformer Engine's Adam that torch's does not have."""
_NO_HYPERPARAMETERS: Final = frozenset({"params", "param_names", "is_expert_parallel", "step"})

Optimizers = Sequence[optim.DistributedOptimizer]
"""One for each model chunk."""
Tree = Mapping[Any, Any]
"""A state dict of Megatron's."""


def sharded_state(
    optimizers: Optimizers, model_state: Tree, common: Tree, *, is_loading: bool, metadata: Mapping[str, Any]
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
    names = _names(optimizers)
    params = _params(optimizers, names)
    place_of = {place.data: place for place in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    _check(optimizers, metadata, is_loading=is_loading)
    if missing := [names[param] for param in params.values() if param not in place_of]:
        raise ConfigError(f"the model's sharded_state_dict() lacks {name_list(missing)}, or has copies instead of parameters")
    state = {}
    if not is_loading:
        for optimizer in optimizers:
            optimizer.ddp.finish_param_sync()  # the caller may have asked the module, and not its wrapper
        state = join([optimizer.state_dict() for optimizer in optimizers])["state"]
    steps = {int(state.get(index, {}).get("step", 0)) for index in params}
    if len(steps) > 1:
        raise ConfigError(f"parameters have taken {sorted(steps)} steps, and Megatron's format has one count for all of them")
    groups = _groups_to_save(optimizers, {"step": max(steps, default=0)})
    parts: list[dict[str, Any]] = []
    for kind in sorted({mark[0] for mark in groups}):
        tensors = {
            index: {
                key: make_sharded_optimizer_tensor(place_of[param], values, f"optimizer.state.{key}")
                for key, values in _tensors(param, state.get(index, {}), is_loading=is_loading).items()
            }
            for index, param in params.items()
            if _is_expert(param) == kind
        }
        of_kind = {"param_groups": [group for mark, group in groups.items() if mark[0] == kind]}
        parts.append({"optimizer": of_kind, "param_state": tensors, "param_state_sharding_type": _TYPE, **common})
    if len(parts) == 1:
        return parts[0]
    for number, part in enumerate(parts if not metadata.get("chained_optim_avoid_prefix") else ()):
        add_prefix_for_sharding(part, f"chained_{number}.")
    return dict(enumerate(parts))


def whole_states(optimizers: Optimizers, loaded: Tree) -> list[Mapping[str, Any]]:
    """Return what was loaded into ``sharded_state`` in the format of ``state_dict()``, for each optimizer. A collective call.

    Raises:
        CheckpointMismatchError: it lacks values, has other groups, or does not belong to the weights that are in the model now;
            the text names all differences.
        ConfigError: the model is cut over other ranks than those of its data parallelism.
        PeerFailedError: it does not fit on another rank.
    """
    _check_is_whole(optimizers)
    with optimizers[0].ddp.sync.call("load_state_dict()"):
        names, problems, state = _names(optimizers), list[str](), dict[int, dict[str, torch.Tensor]]()
        parts = [loaded] if "param_state" in loaded else [part for key, part in loaded.items() if isinstance(key, int)]
        saved = [group for part in parts for group in part.get("optimizer", {}).get("param_groups", ())]
        groups = _groups_from(saved, optimizers, problems)
        steps = {int(group["step"]) for group in saved if group.get("step") is not None}
        if len(steps) != 1:
            problems.append(f"its groups have the step counts {sorted(steps)}, and not one")
        tensors = {index: of for part in parts for index, of in part.get("param_state", {}).items()}
        for index, param in _params(optimizers, names).items():
            values = tensors.get(index, {})
            if lacking := [key for key in _KEYS if key not in values]:
                problems.append(f"it lacks {', '.join(lacking)} of {names[param]!r}")
            elif not torch.equal(values["param"].to(param.device, param.dtype), param.detach()):
                problems.append(f"its main parameter of {names[param]!r} does not round to the weight that is in the model")
            elif not problems:
                moments = {key: values[key] for key in _KEYS[1:]}
                main = {} if param.dtype == torch.float32 else {MAIN_PARAM: values["param"]}
                state[index] = {"step": torch.full((), float(max(steps)), dtype=torch.float32, device="cpu"), **moments, **main}
        if problems:
            raise CheckpointMismatchError(path="the checkpoint of Megatron", problems=problems)
    return split({"state": state, "param_groups": groups}, optimizers)


def _groups_to_save(optimizers: Optimizers, count: Tree) -> dict[tuple[Any, ...], dict[str, Any]]:
    found, names = dict[tuple[Any, ...], dict[str, Any]](), _names(optimizers)
    for group in _groups(optimizers):
        for mark in _marks(group, names):
            own = {**_MARKS, **_FUSED, **_hyperparameters(group), "is_expert_parallel": mark[0], **count}
            if found.setdefault(mark, own) != own:
                raise ConfigError(
                    f"two groups have other hyperparameters and the same {_text(mark)}, by which Megatron's format tells them "
                    'apart. Write other values into one of them: group["wd_mult"] = 0.0, for instance.'
                )
    return found


def _groups_from(saved: Iterable[Tree], optimizers: Optimizers, problems: list[str]) -> list[dict[str, Any]]:
    """Return the groups with saved hyperparameters; add to the problems where there is not one value of each."""
    names, there = _names(optimizers), dict[tuple[Any, ...], dict[str, Any]]()
    for group in saved:
        mark = _mark(group, is_expert=bool(group.get("is_expert_parallel")))
        if there.setdefault(mark, _hyperparameters(group)) != _hyperparameters(group):
            problems.append(f"two of its groups have other hyperparameters and the same {_text(mark)}")
    found, first = list[dict[str, Any]](), 0
    for group in _groups(optimizers):
        marks = _marks(group, names)
        problems += [f"it has no group with {_text(mark)}; it has {list(there)}" for mark in marks if mark not in there]
        of_kinds = [{key: value for key, value in there.get(mark, {}).items() if key in group} for mark in marks]
        if any(own != of_kinds[0] for own in of_kinds):
            problems.append("its experts have other hyperparameters than its dense parameters, and one group here has both")
        indices = list(range(first, first := first + len(group["params"])))
        found.append({**group, **dict(*of_kinds[:1]), "params": indices})
    return found


def _names(optimizers: Optimizers) -> dict[torch.Tensor, str]:
    return {param: name for optimizer in optimizers for param, name in optimizer.ddp.param_names.items()}


def _groups(optimizers: Optimizers) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _params(optimizers: Optimizers, names: Container[torch.Tensor]) -> dict[int, torch.nn.Parameter]:
    """Return the trainable parameters, by their indices in the state of all optimizers together."""
    params = chain.from_iterable(group["params"] for group in _groups(optimizers))
    return {index: param for index, param in enumerate(params) if param in names}


def _marks(group: Tree, names: Container[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Return what tells a group apart: once for dense parameters, and once for experts."""
    kinds = {_is_expert(param) for param in group["params"] if param in names}
    if not group["params"]:  # on this rank
        kinds = {bool(group.get("is_expert_parallel"))}
    return [_mark(group, is_expert=kind) for kind in sorted(kinds)]


def _mark(group: Tree, *, is_expert: bool) -> tuple[Any, ...]:
    return (is_expert, *(group.get(key, ordinary) for key, ordinary in _MARKS.items()))


def _text(mark: tuple[Any, ...]) -> str:
    return f"is_expert_parallel, {', '.join(_MARKS)} {mark}"


def _is_expert(param: torch.Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def _hyperparameters(group: Tree) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NO_HYPERPARAMETERS}


def _tensors(param: torch.nn.Parameter, state: Tree, *, is_loading: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of one parameter to save, of which those that are not there yet are zero, or to load into."""
    found = {} if is_loading else {"param": state.get(MAIN_PARAM, param.detach()).float(), **state}
    return {key: found[key] if key in found else torch.zeros(param.shape, dtype=torch.float32, device="cpu") for key in _KEYS}


def _check_is_whole(optimizers: Optimizers) -> None:
    """Refuse chunks, and models that more ranks hold than those of data parallelism.

    Raises:
        ConfigError: the optimizers are of such a model.
    """
    ranks = optimizers[0].ddp.ranks
    num_alike = math.prod(one.size for one in ranks.by_name[DENSE].communicators)
    if len(optimizers) > 1 or ranks.step.size > num_alike:
        raise ConfigError(
            f"{len(optimizers)} model chunks on {ranks.step.size} ranks, of which {num_alike} share the dense parameters: with "
            "tensor or pipeline parallelism this format has not been compared with Megatron's. Use "
            "megabucket.save_checkpoint() and load_checkpoint(), one for each of optimizer.parts."
        )


def _check(optimizers: Optimizers, metadata: Mapping[str, Any], *, is_loading: bool) -> None:
    found, gathers = metadata.get("distrib_optim_sharding_type", _TYPE), "distrib_optim_fully_reshardable_mem_efficient"
    if found != _TYPE:
        raise ConfigError(
            f"distrib_optim_sharding_type={found!r}: of Megatron's formats {_TYPE!r} alone has state by parameter name. Save "
            "in it (--dist-ckpt-optim-fully-reshardable of Megatron-LM); Megatron loads another format, and saves in this one."
        )
    if not is_loading and metadata.get(gathers):
        raise ConfigError(f"{gathers}=True: each rank gathers the whole state; megabucket.save_checkpoint() gathers none")
    _check_is_whole(optimizers)
    for given in chain.from_iterable(optimizer.torch_optimizers for optimizer in optimizers):
        if not isinstance(given, torch.optim.Adam | torch.optim.AdamW) or any(group["amsgrad"] for group in given.param_groups):
            raise ConfigError(f"{type(given).__name__}: the format is Adam's without amsgrad; use megabucket.save_checkpoint()")
