"""Optimizer state out of a checkpoint, by parameter name: into flat shards of any layout, or into a plain optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import canonical_name
from megabucket.checkpoint.format import Json
from megabucket.checkpoint.optim_state import MAIN_PREFIX, members_by_name, members_of, state_name
from megabucket.checkpoint.staging import Staging, Stored, find_difference, source_of
from megabucket.checkpoint.values import decode
from megabucket.errors import name_list
from megabucket.optim import DistributedOptimizer
from megabucket.optim.shards import MainShard
from megabucket.optim.state_dict import Description, StateEntry, WholeState, entry_from_json, main_dtype, number_in, set_groups


@dataclass(frozen=True, slots=True, eq=False)
class StoredOptimizer:
    """What a checkpoint says of an optimizer."""

    kind: str
    groups: list[list[str]]
    """Names of the parameters of each group."""
    group_of: dict[str, int]
    """The group of each parameter."""
    hyperparameters: list[dict[str, Json]]
    state: dict[str, Description]
    """What is kept for each parameter that has state."""
    computed_in: dict[str, str]
    """What dtype it was computed in, where it was another than the parameter's."""

    @classmethod
    def read(cls, values: Any) -> StoredOptimizer:
        """Return it, from the values of a checkpoint."""
        groups = [list(group["params"]) for group in values["groups"]]
        return cls(
            values["class"],
            groups,
            {name: index for index, group in enumerate(groups) for name in group},
            [dict(group["hyperparameters"]) for group in values["groups"]],
            {name: tuple(map(entry_from_json, one["entries"])) for one in values["state"] for name in one["params"]},
            {name: dtype for dtype, names in values["computed_in"].items() for name in names},
        )

    def dtype_of(self, name: str, entry: StateEntry, stored: Stored, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of values per element here, where the optimizer computes in ``dtype``.

        What had the dtype it was computed in there has so here; what an optimizer has chosen for itself stays.
        """
        weight = stored.tensors.get(f"model.{name}")
        computed_in = self.computed_in.get(name) or (weight.dtype if weight is not None else entry.dtype)
        return dtype if entry.dtype == computed_in else dtype_named(entry.dtype)


def check_optimizer(stored: Stored, optimizer: torch.optim.Optimizer, module: torch.nn.Module, *, cast: bool) -> list[str]:
    """Return everything in which the stored optimizer and this one differ.

    Raises:
        OptimizerParametersError: a parameter is not the module's.
    """
    if not stored.values.get("optimizer"):
        return ["the checkpoint has no optimizer state; load it with optimizer=None to take the weights only"]
    try:
        there = StoredOptimizer.read(stored.values["optimizer"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:  # somebody has written and sealed it by other means
        return [f"what the checkpoint says of its optimizer cannot be read: {type(error).__name__}: {error}"]
    inner = optimizer.torch_optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer
    members, names = members_by_name(members_of(optimizer), module)
    problems = [] if type(inner).__name__ == there.kind else [f"the optimizer was {there.kind} and is {type(inner).__name__}"]
    problems += _group_problems(there.groups, members)
    computes_in_main = isinstance(optimizer, DistributedOptimizer)
    for param, name in names.items():
        dtype = main_dtype(param.dtype) if computes_in_main else param.dtype
        for entry in there.state.get(name, ()):
            if entry.kind == "elements":
                tensor = state_name(name, entry.key)
                wanted = there.dtype_of(name, entry, stored, dtype)
                found = find_difference(stored.tensors.get(tensor), tensor, param, wanted, cast=cast)
                problems += [found] if found else []
            elif entry.kind in ("other", "plain") and computes_in_main:
                problems.append(
                    f"{entry.key!r} of {name!r} is neither one value per element nor a number, which a DistributedOptimizer "
                    "cannot hold"
                )
    return problems


def _group_problems(there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> list[str]:
    problems = []
    if len(there) != len(here):
        problems.append(f"the checkpoint has {len(there)} parameter groups, the optimizer has {len(here)}")
    for index, (names, own) in enumerate(zip_longest(there, here, fillvalue=())):
        missing, unknown = sorted(set(own) - set(names)), sorted(set(names) - set(own))
        problems += [f"group {index} of the optimizer has {name_list(missing)}, that of the checkpoint has not"] * bool(missing)
        problems += [f"group {index} of the checkpoint has {name_list(unknown)}, that of the optimizer has not"] * bool(unknown)
    return problems


def stage_optimizer(staging: Staging, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Want all of an optimizer's state."""
    there = StoredOptimizer.read(staging.stored.values["optimizer"])
    # What the checkpoint does not know of, an option of a later torch, say, stays as it is.
    groups = [
        {**_without_params(own), **{key: decode(value, staging.want_stored) for key, value in of_group.items()}}
        for own, of_group in zip(optimizer.param_groups, there.hyperparameters, strict=True)
    ]
    if isinstance(optimizer, DistributedOptimizer):
        _stage_shards(staging, optimizer, there, groups)
        return
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for param, name in members_by_name(members_of(optimizer), module)[1].items():
        if name in there.state:
            state[param] = _stage_whole(staging, there, name, param, param.dtype)

    def finish() -> None:
        for param in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
            del optimizer.state[param]
        optimizer.state.update(state)
        set_groups(optimizer, groups)

    staging.finish.append(finish)


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _stage_shards(
    staging: Staging, optimizer: DistributedOptimizer, there: StoredOptimizer, groups: Sequence[dict[str, Any]]
) -> None:
    sharding = optimizer.sharding
    signature_of = {
        name: (there.state.get(canonical_name(name)), there.computed_in.get(canonical_name(name)))
        for name in optimizer.ddp.param_names.values()
    }
    state = {shard: _stage_shard(staging, there, shard, groups[shard.run.group]) for shard in sharding.plan_load(signature_of)}
    others = _stage_others(staging, optimizer, there)

    def finish() -> None:
        sharding.take_loaded(state, groups, others)
        optimizer.note_values_are_loaded()

    staging.finish.append(finish)


def _stage_shard(staging: Staging, there: StoredOptimizer, shard: MainShard, group: Mapping[str, Any]) -> dict[str, Any]:
    """Want one shard's main values and state; return the state."""
    first = canonical_name(shard.run.params[0])
    state: dict[str, Any] = {}
    for entry in there.state.get(first, ()):
        if entry.kind == "elements":
            dtype = there.dtype_of(first, entry, staging.stored, shard.main.dtype)
            state[entry.key] = torch.zeros_like(shard.main, dtype=dtype, requires_grad=False)  # gaps stay zero
        else:
            state[entry.key] = _number(entry, shard.main.device, group)
    for piece in shard.pieces():
        like, name = shard.buffer.slots[piece.param].view, canonical_name(piece.param)
        keys = [entry.key for entry in there.state.get(name, ()) if entry.kind == "elements"]
        flats = {state_name(name, key): state[key] for key in keys}
        if shard.has_own_values:
            flats[source_of(staging.stored.tensors, name, shard.main.dtype)] = shard.main.detach()
        for source, values in flats.items():
            staging.want(source, like, piece.in_param.start, values[piece.in_run.start : piece.in_run.stop])
    return state


def _stage_others(staging: Staging, optimizer: DistributedOptimizer, there: StoredOptimizer) -> WholeState:
    """Want the state of parameters without a shard: frozen ones, which may be unfrozen later."""
    members, names = members_by_name(optimizer.sharding.members, optimizer.ddp.module)
    in_groups = {name for group in members for name in group}
    values: dict[torch.Tensor, dict[str, Any]] = {}
    mains: dict[torch.Tensor, torch.Tensor] = {}
    dtypes: dict[torch.Tensor, torch.dtype] = {}
    for param, name in names.items():
        if param in optimizer.ddp.param_names or name not in in_groups:
            continue
        dtypes[param] = dtype_named(there.computed_in.get(name, dtype_name(param.dtype)))
        if name in there.state:
            dtypes[param] = main_dtype(param.dtype)
            values[param] = _stage_whole(staging, there, name, param, dtypes[param])
        if f"{MAIN_PREFIX}{name}" in staging.stored.tensors and main_dtype(param.dtype) != param.dtype:
            mains[param] = staging.want_like(f"{MAIN_PREFIX}{name}", param, main_dtype(param.dtype))
    return WholeState(values, mains, dtypes)


def _stage_whole(
    staging: Staging, there: StoredOptimizer, name: str, param: torch.Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """Want the state of one whole parameter and return it."""
    hyperparameters = there.hyperparameters[there.group_of[name]]
    state: dict[str, Any] = {}
    for entry in there.state[name]:
        if entry.kind == "elements":
            wanted = there.dtype_of(name, entry, staging.stored, dtype)
            state[entry.key] = staging.want_like(state_name(name, entry.key), param, wanted)
        elif entry.kind == "other":
            state[entry.key] = staging.want_stored(state_name(name, entry.key)).to(param.device)
        elif entry.kind == "plain":
            state[entry.key] = decode(json.loads(entry.number[1]), staging.want_stored)
        else:
            state[entry.key] = _number(entry, param.device, hyperparameters)
    return state


def _number(entry: StateEntry, device: torch.device, group: Mapping[str, Any]) -> Any:
    """Return a number where the optimizer wants it. Step counts are on the device only for kernels that count there."""
    number = number_in(entry, device)
    if entry.key == "step" and isinstance(number, torch.Tensor) and not (group.get("capturable") or group.get("fused")):
        return number.cpu()
    return number
