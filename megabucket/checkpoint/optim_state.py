"""What an optimizer holds, by parameter name: ready to be saved, whoever steps on what.

Two kinds of optimizers give the same state. A plain torch optimizer holds whole parameters, and every rank has all of it; a
``DistributedOptimizer`` holds flat shards, of which each rank gives its own, where nothing is gathered. What is no value per
element (step counts, hyperparameters) goes into JSON, grouped, because it is the same for most parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from megabucket.buffer import dtype_name, view_like
from megabucket.checkpoint.canonical import canonical_name, info_of
from megabucket.checkpoint.format import Json, Piece
from megabucket.checkpoint.values import encode
from megabucket.errors import OptimizerParametersError
from megabucket.optim import DistributedOptimizer
from megabucket.optim.shards import MainShard
from megabucket.optim.state_dict import (
    KNOWN_NUMBERS,
    NUMBER_TYPES,
    Description,
    ShardHolder,
    StateEntry,
    describe_number,
    describe_runs,
    main_dtype,
    merge_descriptions,
)

MODEL_PREFIX: Final = "model."
MAIN_PREFIX: Final = "optim.main."
STATE_PREFIX: Final = "optim.state."


@dataclass(frozen=True, slots=True, eq=False)
class HeldState:
    """One rank's view of an optimizer's state."""

    own: list[Piece] = field(default_factory=list)
    """What only this rank has."""
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    """What every rank has, whole, by name."""
    values: dict[str, Json] = field(default_factory=dict)
    names: Mapping[torch.Tensor, str] = field(default_factory=dict)
    """What the parameters of the module are called."""


def state_name(param: str, key: str) -> str:
    """Return the name of the values per element that an optimizer keeps for a parameter under a key."""
    return f"{STATE_PREFIX}{param}.{key}"


def members_by_name(
    members: Sequence[Sequence[torch.Tensor]], module: torch.nn.Module
) -> tuple[list[list[str]], dict[torch.Tensor, str]]:
    """Return the names of the parameters of each group, and the name of each parameter.

    Raises:
        OptimizerParametersError: a parameter is not the module's.
    """
    names = _names_in(module)
    foreign = [
        f"group {index}, parameter {position}, shape {tuple(param.shape)}"
        for index, group in enumerate(members)
        for position, param in enumerate(group)
        if param not in names
    ]
    if foreign:
        raise OptimizerParametersError(
            problem="a checkpoint keeps state by the names of the wrapped module, and the optimizer has parameters that are "
            "not in it",
            params=foreign,
            remedy="Put them into the wrapped module, or into an optimizer of their own.",
        )
    return [[names[param] for param in group] for group in members], names


def _names_in(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {param: canonical_name(name) for name, param in module.named_parameters()}


def members_of(optimizer: torch.optim.Optimizer) -> Sequence[Sequence[torch.Tensor]]:
    """Return the whole parameters of each group."""
    if isinstance(optimizer, DistributedOptimizer):
        return optimizer.sharding.members
    return [group["params"] for group in optimizer.param_groups]


def hold_nothing(module: torch.nn.Module) -> HeldState:
    """Return the state of no optimizer."""
    return HeldState(names=_names_in(module))


def hold_plain(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> HeldState:
    """Return the state of an optimizer over whole parameters.

    Raises:
        OptimizerParametersError: a parameter is not the module's.
        ConfigError: some state is of a kind that no file can hold.
    """
    groups, names = members_by_name(members_of(optimizer), module)
    held = HeldState(names=names)
    described = _hold_whole(optimizer.state, names, held.shared)
    named = list(zip(groups, optimizer.param_groups, strict=True))
    held.values.update(optimizer_values(type(optimizer).__name__, named, described, {}, held.shared.__setitem__))
    return held


def describe_shards(optimizer: DistributedOptimizer) -> list[Any]:
    """Return what this rank's shards hold, for ``hold_shards`` of all ranks; it may travel as JSON.

    Raises:
        OptimizerParametersError: some state is neither one value per element nor one number.
    """
    sharding = optimizer.sharding
    return describe_runs(sharding.shards, optimizer.state, sharding.holder, _names_of(sharding.holder))


def _names_of(holder: ShardHolder) -> list[list[str]]:
    return [list(buffer.layout.params) for buffer in holder.buffers]


def hold_shards(
    optimizer: DistributedOptimizer,
    module: torch.nn.Module,
    described: Sequence[Any],
) -> HeldState:
    """Return the state of a distributed optimizer: this rank's shards where they are sharded.

    Args:
        described: what ``describe_shards`` has returned on every rank.

    Raises:
        OptimizerParametersError: a parameter is not the module's, or ranks hold different numbers for one parameter.
        ConfigError: a hyperparameter is of a kind that no file can hold.
    """
    sharding = optimizer.sharding
    groups, names = members_by_name(sharding.members, module)
    others = sharding.state_of_others
    held = HeldState(names=names)
    by_name = _hold_whole(others.values, names, held.shared)
    held.shared.update({f"{MAIN_PREFIX}{names[param]}": main for param, main in others.main_values.items()})
    computed_in = {names[param]: dtype_name(dtype) for param, dtype in others.dtypes.items() if param in names}
    # Where nothing is sharded, each rank speaks for itself: that they differ, the digest of all values shows.
    by_rank = described if sharding.holder.is_sharded else [described[sharding.holder.communicator.rank]]
    for of_buffer in merge_descriptions(by_rank, _names_of(sharding.holder)):
        by_name.update({canonical_name(name): description for name, description in of_buffer.items()})
    for shard in sharding.shards:
        state = optimizer.state.get(shard.main) or {}
        _hold_shard(shard, state, held, is_sharded=sharding.holder.is_sharded)
    for buffer in sharding.holder.buffers:
        # All ranks say the same, also of parameters that they own nothing of.
        dtype = dtype_name(main_dtype(buffer.param_data.dtype))
        computed_in.update({canonical_name(name): dtype for name in buffer.params})
    kind, named = type(optimizer.torch_optimizer).__name__, list(zip(groups, optimizer.param_groups, strict=True))
    held.values.update(optimizer_values(kind, named, by_name, computed_in, held.shared.__setitem__))
    return held


def _hold_shard(shard: MainShard, state: Mapping[str, Any], held: HeldState, *, is_sharded: bool) -> None:
    flats = {key: value.detach() for key, value in state.items() if is_per_element(key, value, shard.main)}
    for piece in shard.pieces():
        like, name = shard.buffer.slots[piece.param].view, canonical_name(piece.param)
        of_param = {state_name(name, key): flat for key, flat in flats.items()}
        if shard.has_own_values:
            of_param[f"{MAIN_PREFIX}{name}"] = shard.main.detach()
        for tensor_name, flat in of_param.items():
            if is_sharded:
                info, own = info_of(tensor_name, like, flat.dtype), flat[piece.in_run.start : piece.in_run.stop]
                held.own.append(Piece(info, piece.in_param.start, piece.in_param.stop, own))
            else:
                held.shared[tensor_name] = view_like(flat, piece.in_run.start, like.shape, like.stride())


def is_per_element(key: str, value: Any, like: torch.Tensor) -> bool:
    """Return whether an optimizer keeps one value per element under a key."""
    return isinstance(value, torch.Tensor) and value.shape == like.shape and key not in KNOWN_NUMBERS


def _hold_whole(
    state: Mapping[Any, Mapping[str, Any]], names: Mapping[torch.Tensor, str], shared: dict[str, torch.Tensor]
) -> dict[str, Description]:
    """Return what is held for whole parameters, by name; the tensors of it go into ``shared``."""
    described: dict[str, Description] = {}
    for param, of_param in state.items():
        if isinstance(param, torch.Tensor) and of_param:
            name = names[param]
            described[name] = tuple(_hold_entry(name, key, value, param, shared) for key, value in of_param.items())
    return described


def _hold_entry(name: str, key: str, value: Any, param: torch.Tensor, shared: dict[str, torch.Tensor]) -> StateEntry:
    tensor_name = state_name(name, key)
    if is_per_element(key, value, param):
        shared[tensor_name] = value
        return StateEntry(key, "elements", dtype_name(value.dtype))
    if type(value).__name__ in NUMBER_TYPES or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return describe_number(key, value, param.device)
    if isinstance(value, torch.Tensor):
        shared[tensor_name] = value
        return StateEntry(key, "other", dtype_name(value.dtype), shape=tuple(value.shape))
    return StateEntry(key, "plain", number=("json", json.dumps(encode(value, tensor_name, shared.__setitem__))))


def optimizer_values(
    kind: str,
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    described: Mapping[str, Description],
    computed_in: Mapping[str, str],
    keep: Callable[[str, torch.Tensor], None],
) -> dict[str, Json]:
    """Return what a checkpoint says of an optimizer beside its tensors.

    Args:
        kind: the name of its class.
        groups: the names of the parameters of each group, and its hyperparameters.
        described: what is kept for each parameter.
        computed_in: what dtype each parameter is stepped in, where it is not its own.
        keep: called with every tensor among the hyperparameters.

    Raises:
        ConfigError: a hyperparameter is of a kind that no file can hold.
    """
    return {
        "class": kind,
        "groups": [
            {
                "params": list(names),
                "hyperparameters": {
                    key: encode(value, f"optim.group.{index}.{key}", keep) for key, value in group.items() if key != "params"
                },
            }
            for index, (names, group) in enumerate(groups)
        ],
        "state": [
            {"params": names, "entries": [[*entry[:4], list(entry.shape), list(entry.number)] for entry in description]}
            for description, names in _grouped(described.items())
        ],
        "computed_in": dict(_grouped((name, dtype) for name, dtype in computed_in.items())),
    }


def _grouped(items: Iterable[tuple[str, Any]]) -> list[tuple[Any, list[str]]]:
    """Return names by value, which most of them share."""
    names_of: dict[Any, list[str]] = {}
    for name, value in sorted(items, key=lambda item: item[0]):
        names_of.setdefault(value, []).append(name)
    return list(names_of.items())
