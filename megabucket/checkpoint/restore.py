"""A checkpoint into a training run: checked as a whole, read beside it, and only then put into it, on all ranks or on none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from megabucket.buffer import ParamAndGradBuffer, dtype_name, dtype_named
from megabucket.checkpoint.canonical import GlobalNames, empty_piece, in_shape, info_of, order_of
from megabucket.checkpoint.capture import (
    LOCAL_PREFIX,
    MAIN_PREFIX,
    MODEL_PREFIX,
    STATE_PREFIX,
    VALUES_VERSION,
    TrainingParts,
    WholeModel,
    inner_of,
    members_by_name,
    model_summary,
    settle,
    state_name,
)
from megabucket.checkpoint.format import Json, Piece, TensorInfo
from megabucket.checkpoint.ranks import GroupRanks, gather_results, together
from megabucket.checkpoint.stored import Stored, find_difference
from megabucket.checkpoint.values import RNG_PREFIX, UNREADABLE, capture_rng, decode, restore_rng
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointMismatchError, name_list
from megabucket.layout.identity import ParamIdentity
from megabucket.layout.shards import shard_slices
from megabucket.optim import DistributedOptimizer
from megabucket.optim.shards import MainShard
from megabucket.optim.state_dict import Description, StateEntry, WholeState, entry_from_json, main_dtype, number_in, set_groups

Restore = Callable[[Any], Any]
"""Puts a state into something that can be put back: ``load_state_dict``, say."""


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """A load that is under way."""

    stored: Stored
    wanted: list[Piece] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Targets, and what is to be copied there."""
    states: list[tuple[Restore, Any, Any]] = field(default_factory=list)
    """What may refuse its new state: how it is set, the state it has, the one it gets."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """What else is to be done then, in this order; nothing that could fail."""

    def want(
        self, name: str, like: torch.Tensor, start: int, values: torch.Tensor, identity: ParamIdentity | None = None
    ) -> None:
        """Want a range of a stored tensor, in the order in which ``like`` lies in memory, in the dtype of ``values``.

        Args:
            start: counted from the beginning of ``like``.
            identity: of the parameter that ``like`` is or belongs to; it says which part of the stored tensor ``like`` is.
        """
        if values.numel():
            info = info_of(name, like, values.dtype, identity)
            self.wanted.append(Piece(info, start, start + values.numel(), values.detach()))

    def want_like(
        self, name: str, like: torch.Tensor, dtype: torch.dtype | None = None, identity: ParamIdentity | None = None
    ) -> torch.Tensor:
        """Want all that is here of a tensor, and return what it will be: in the shape, memory order and place of ``like``."""
        values = torch.empty(like.numel(), dtype=dtype or like.dtype, device=like.device)
        self.want(name, like, 0, values, identity)
        return in_shape(values, tuple(like.shape), order_of(like))

    def want_stored(self, name: str) -> torch.Tensor:
        """Want a whole tensor as it is stored, and return what it will be, on the CPU."""
        info = self.stored.tensors[name]
        piece = empty_piece(info, 0, info.numel)
        if info.numel:
            self.wanted.append(piece)
        return in_shape(piece.values, info.shape, info.order)

    def read(self) -> None:
        """Read everything that is wanted."""
        # Which dtypes may change is checked before; of a tensor that is narrowed the reader still checks the values.
        self.stored.read(self.wanted, cast=True)


def source_of(tensors: Mapping[str, TensorInfo], name: str, dtype: torch.dtype) -> str:
    """Return the stored tensor from which a weight comes that is kept in a dtype here.

    A main parameter is what its 16-bit weight was rounded from, so it is the better source for what is wider than the weight.
    """
    weight, main = tensors.get(f"{MODEL_PREFIX}{name}"), tensors.get(f"{MAIN_PREFIX}{name}")
    wanted = dtype_name(dtype)
    takes_main = main is not None and main.dtype == wanted and (weight is None or weight.dtype != wanted)
    return f"{MAIN_PREFIX if takes_main else MODEL_PREFIX}{name}"


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What a load has found beside what it has put into the run."""

    path: str
    step: int
    world_size: int
    """How many ranks wrote it."""
    data_position: Any
    extras: dict[str, Any]
    rng_restored: bool
    """Whether each rank goes on with its own random numbers: with another number of ranks there is no way to."""


def restore(stored: Stored, parts: TrainingParts, *, cast: bool = False, with_rng: bool = True) -> LoadedCheckpoint:
    """Put a checkpoint into a run and return what else it holds. A collective call, between two steps.

    Raises:
        CheckpointMismatchError: it does not fit; the text names everything that does not. As with all other errors, model,
            optimizer, schedulers and random numbers are as they were, on every rank.
        LayoutError: some part of the model is on no rank, or claimed by several.
        CheckpointInvalidError: a file is not what was written.
        PhaseError: a step is open on some rank.
        CheckpointError: what else failed on some rank.
    """
    ranks = GroupRanks(parts.ddp, "loading a checkpoint")
    names, staging = GlobalNames(parts.ddp), Staging(stored)
    model = WholeModel.of(gather_results(ranks, lambda: _between_steps(parts, names)))
    together(ranks, lambda: _refuse(stored, _mismatches(stored, parts, names, model, cast=cast)))
    found = together(ranks, lambda: _read(staging, parts, names, with_rng=with_rng))
    undo: list[Callable[[], Any]] = []
    try:
        together(ranks, lambda: _set_states(staging, undo))
    except BaseException:
        for put_back in reversed(undo):
            with suppress(Exception):  # what cannot take its own state back has failed before
                put_back()
        raise
    _commit(parts, staging)
    return found


def _between_steps(parts: TrainingParts, names: GlobalNames) -> dict[str, Any]:
    settle(parts, "loading a checkpoint")
    return model_summary(parts, names)


def mismatches(stored: Stored, parts: TrainingParts, *, cast: bool) -> list[str]:
    """Return everything in which a checkpoint and a run differ; nothing, if it can be restored. Local, and changes nothing.

    Where ranks hold different parameters, what only other ranks could take is not looked at.

    Raises:
        OptimizerParametersError: the optimizer has parameters that are not the module's.
    """
    names, model = GlobalNames(parts.ddp), None
    if parts.ddp.ranks.has_same_params:
        groups = members_by_name(parts.optimizer, names)
        model = WholeModel(groups, {*names.params.values(), *names.buffers}, dict.fromkeys(names.stateful))
    return _mismatches(stored, parts, names, model, cast=cast)


def _mismatches(stored: Stored, parts: TrainingParts, names: GlobalNames, model: WholeModel | None, *, cast: bool) -> list[str]:
    values: Any = stored.values
    if values.get("version") != VALUES_VERSION:
        return [f"its values are of version {values.get('version')!r}, and this one reads version {VALUES_VERSION}"]
    members = members_by_name(parts.optimizer, names)
    try:
        for key in ("stateful", "module_extra_state", "extras", "data_position"):
            decode(values[key], _find_in(stored))
        problems = check_model(stored, names, model, cast=cast)
        if parts.optimizer is not None:
            problems += check_optimizer(stored, parts.optimizer, members, names, model, cast=cast)
            problems += _name_problems(set(values["stateful"]), set(parts.stateful), "of the training run")
        extra_state, here = set(values["module_extra_state"]), set(names.stateful)
    except UNREADABLE as error:  # sealed, but by other means
        return [f"what the checkpoint says beside its tensors cannot be read: {type(error).__name__}: {error}"]
    elsewhere = extra_state - here if model is None else model.modules.keys() - here
    return problems + _name_problems(extra_state - elsewhere, here, "that module.get_extra_state() gives")


def _refuse(stored: Stored, problems: list[str]) -> None:
    if problems:
        raise CheckpointMismatchError(path=str(stored.path), problems=problems)


def _find_in(stored: Stored) -> Callable[[str], torch.Tensor]:
    """Return what says whether a tensor is there, and reads nothing of it."""
    return lambda name: torch.empty(stored.tensors[name].shape, device="meta")


def _name_problems(there: set[str], here: set[str], what: str) -> list[str]:
    return [
        *(f"the checkpoint has the state {what} called {name!r}, and nothing here takes it" for name in sorted(there - here)),
        *(f"the checkpoint has no state {what} called {name!r}" for name in sorted(here - there)),
    ]


def _read(staging: Staging, parts: TrainingParts, names: GlobalNames, *, with_rng: bool) -> LoadedCheckpoint:
    """Read all that this rank takes, beside the run."""
    stored, ranks = staging.stored, names.ranks
    values: Any = stored.values
    stage_model(staging, parts.ddp, names)
    states: list[tuple[Restore, Any, Any]] = []
    if parts.optimizer is not None:
        stage_optimizer(staging, parts.optimizer, names)
        for name, value in values["stateful"].items():
            item = parts.stateful[name]
            states.append((item.load_state_dict, item.state_dict(), value))
    for name, module in names.stateful.items():
        states.append((module.set_extra_state, module.get_extra_state(), values["module_extra_state"][name]))
    for take, before, value in states:
        staging.states.append((take, copy.deepcopy(before), decode(value, staging.want_stored)))
    has_rng = with_rng and parts.optimizer is not None and values["rng_ranks"] == ranks.size
    if has_rng:
        device, prefix = parts.ddp.param_and_grad_buffers[0].param_data.device, f"{RNG_PREFIX}{ranks.rank}."
        rng = {name.removeprefix(prefix): staging.want_stored(name) for name in stored.tensors if name.startswith(prefix)}
        staging.states.append((partial(restore_rng, device=device), capture_rng(device), rng))
    position, extras = decode(values["data_position"], staging.want_stored), decode(values["extras"], staging.want_stored)
    staging.read()
    return LoadedCheckpoint(str(stored.path), stored.step, stored.world_size, position, extras, has_rng)


def _set_states(staging: Staging, undo: list[Callable[[], Any]]) -> None:
    """Load what can refuse its new state, and can take its own back."""
    for take, before, state in staging.states:
        undo.append(partial(take, before))
        take(state)


@torch.no_grad()
def _commit(parts: TrainingParts, staging: Staging) -> None:
    for target, values in staging.copies:
        target.copy_(values)
    parts.ddp.num_value_changes += 1
    for act in staging.finish:
        act()


# Weights and module buffers


def check_model(stored: Stored, names: GlobalNames, model: WholeModel | None, *, cast: bool) -> list[str]:
    """Return everything in which the stored model and that of this rank differ.

    Args:
        model: what all ranks hold; None where nobody has asked them.
    """
    shapes = {own.global_name: own.global_shape for param, own in names.identities.items() if not param.is_meta}
    dtypes = {own.global_name: param.dtype for param, own in names.identities.items()}
    here = [(f"{MODEL_PREFIX}{name}", shape, dtypes[name]) for name, shape in shapes.items()]
    here += [(_source_of_buffer(stored, names, name), buffer.shape, buffer.dtype) for name, buffer in names.buffers.items()]
    differences = [find_difference(stored.tensors, *one, cast=cast) for one in here]
    unknown = [
        f"{name!r} is in the checkpoint and not in the model"
        for name in stored.tensors
        if model is not None and name.startswith(MODEL_PREFIX) and name.removeprefix(MODEL_PREFIX) not in model.names
    ]
    return [difference for difference in differences if difference is not None] + unknown


def _source_of_buffer(stored: Stored, names: GlobalNames, name: str) -> str:
    """Return the stored tensor that a module buffer comes from: this rank's own, where as many ranks have written it."""
    local = f"{LOCAL_PREFIX}{names.ranks.rank}.{name}"
    is_own = local in stored.tensors and stored.world_size == names.ranks.size
    return local if is_own else f"{MODEL_PREFIX}{name}"


def stage_model(staging: Staging, ddp: DistributedDataParallel, names: GlobalNames) -> None:
    """Want all weights and module buffers."""
    is_sharded, sharded = ddp.ddp_config.use_distributed_optimizer, set(ddp.param_names)
    for buffer in ddp.param_and_grad_buffers if is_sharded else ():
        _stage_param_shards(staging, ddp, names, buffer)
    for param, own in names.identities.items():
        if not param.is_meta and not (is_sharded and param in sharded):
            source = source_of(staging.stored.tensors, own.global_name, param.dtype)
            staging.copies.append((param.detach(), staging.want_like(source, param, identity=own)))
    for name, running in names.buffers.items():
        source = _source_of_buffer(staging.stored, names, name)
        staging.copies.append((running.detach(), staging.want_like(source, running)))
    if is_sharded:
        staging.finish.append(lambda: _gather(ddp))


def _stage_param_shards(staging: Staging, ddp: DistributedDataParallel, names: GlobalNames, buffer: ParamAndGradBuffer) -> None:
    layout = buffer.layout
    rank = ddp.ranks.by_name[layout.key.group].communicator.rank
    for bucket in layout.buckets:
        span = layout.shard_span(bucket=bucket.index, rank=rank)
        target = buffer.param_data[span.start : span.stop]
        values = target.clone()  # with the padding, which stays
        for piece in shard_slices(layout, bucket=bucket.index, rank=rank):
            identity = names.of(piece.param)
            source = source_of(staging.stored.tensors, identity.global_name, values.dtype)
            own = values[piece.in_shard.start : piece.in_shard.stop]
            staging.want(source, buffer.params[piece.param], piece.in_param.start, own, identity)
        staging.copies.append((target, values))


def _gather(ddp: DistributedDataParallel) -> None:
    for group in ddp.bucket_groups:
        group.mark_params_stale()
    ddp.start_param_sync(force_sync=True)


# Optimizers


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

    def problems(self, stored: Stored) -> list[str]:
        """Return the values per element that no parameter would get.

        Raises:
            ValueError: a number of the state is none; or another of ``UNREADABLE``.
        """
        known, below = set(), []
        for name, description in self.state.items():
            for entry in description:
                known.add(state_name(name, entry.key))
                if entry.kind == "plain":
                    decode(json.loads(entry.number[1]), _find_in(stored))
                    below.append(f"{state_name(name, entry.key)}.")
                elif entry.kind not in ("elements", "other"):
                    number_in(entry, torch.device("cpu"))
        return [
            f"{name!r} is in the checkpoint, and its optimizer knows nothing of it"
            for name in stored.tensors
            if name.startswith(STATE_PREFIX) and name not in known and not name.startswith(tuple(below))
        ]

    def dtype_of(self, name: str, entry: StateEntry, stored: Stored, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of values per element here, where the optimizer computes in ``dtype``.

        What had the dtype it was computed in there has so here; what an optimizer has chosen for itself stays.
        """
        weight = stored.tensors.get(f"model.{name}")
        computed_in = self.computed_in.get(name) or (weight.dtype if weight is not None else entry.dtype)
        return dtype if entry.dtype == computed_in else dtype_named(entry.dtype)


def check_optimizer(
    stored: Stored,
    optimizer: torch.optim.Optimizer,
    members: Sequence[Sequence[str]],
    names: GlobalNames,
    model: WholeModel | None,
    *,
    cast: bool,
) -> list[str]:
    """Return everything in which the stored optimizer and this one differ.

    Args:
        members: the parameters in each group of this one, by name.
        model: what all ranks hold; None where nobody has asked them.

    Raises:
        ValueError: what the checkpoint says of it cannot be read; or another of ``UNREADABLE``.
    """
    if not stored.values.get("optimizer"):
        return ["the checkpoint has no optimizer state; load it with optimizer=None to take the weights only"]
    there = StoredOptimizer.read(stored.values["optimizer"])
    hyperparameters = [
        {key: decode(value, _find_in(stored)) for key, value in group.items()} for group in there.hyperparameters
    ]
    kind = type(inner_of(optimizer)).__name__
    problems = there.problems(stored)
    problems += [] if kind == there.kind else [f"the optimizer was {there.kind} and is {kind}"]
    problems += [
        f"{key!r} of group {index} is {value!r:.100} in the checkpoint and {own[key]!r:.100} here"
        for index, (of_group, own) in enumerate(zip(hyperparameters, optimizer.param_groups, strict=False))
        for key, value in of_group.items()
        if not _is_alike(value, own.get(key))
    ]
    problems += _group_problems(there.groups, members, there.groups if model is None else model.groups)
    computes_in_main = isinstance(optimizer, DistributedOptimizer)
    for param, own in names.identities.items():
        name, dtype = own.global_name, main_dtype(param.dtype) if computes_in_main else param.dtype
        for entry in there.state.get(name, ()):
            if entry.kind == "elements":
                wanted = there.dtype_of(name, entry, stored, dtype)
                found = find_difference(stored.tensors, state_name(name, entry.key), own.global_shape, wanted, cast=cast)
                problems += [found] if found else []
            elif entry.kind in ("other", "plain") and computes_in_main:
                problems.append(
                    f"{entry.key!r} of {name!r} is neither one value per element nor a number, which a DistributedOptimizer "
                    "cannot hold"
                )
    return problems


def _is_alike(there: Any, here: Any) -> bool:
    """Whether a hyperparameter can take the place of another: a number that of a number, in a tensor or not; a switch any."""
    if isinstance(here, tuple | list):
        return isinstance(there, tuple | list) and len(there) == len(here) and all(map(_is_alike, there, here))
    return not _is_number(here) or _is_number(there)


def _is_number(value: Any) -> bool:
    return (
        value.numel() == 1
        if isinstance(value, torch.Tensor)
        else isinstance(value, int | float) and not isinstance(value, bool)
    )


def _group_problems(
    there: Sequence[Sequence[str]], here: Sequence[Sequence[str]], everywhere: Sequence[Collection[str]]
) -> list[str]:
    problems = []
    if len(there) != len(here):
        problems.append(f"the checkpoint has {len(there)} parameter groups, the optimizer has {len(here)}")
    for index, (names, own, of_all) in enumerate(zip_longest(there, here, everywhere, fillvalue=())):
        missing, unknown = sorted(set(own) - set(names)), sorted(set(names) - set(of_all))
        problems += [f"group {index} of the optimizer has {name_list(missing)}, that of the checkpoint has not"] * bool(missing)
        problems += [f"group {index} of the checkpoint has {name_list(unknown)}, that of the optimizer has not"] * bool(unknown)
    return problems


def stage_optimizer(staging: Staging, optimizer: torch.optim.Optimizer, names: GlobalNames) -> None:
    """Want all of an optimizer's state."""
    there = StoredOptimizer.read(staging.stored.values["optimizer"])
    # What the checkpoint does not know of, an option of a later torch, say, stays as it is.
    groups = [
        {**_without_params(own), **{key: decode(value, staging.want_stored) for key, value in of_group.items()}}
        for own, of_group in zip(optimizer.param_groups, there.hyperparameters, strict=True)
    ]
    if isinstance(optimizer, DistributedOptimizer):
        _stage_shards(staging, optimizer, names, there, groups)
        return
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for param, own in names.identities.items():
        if own.global_name in there.state:
            state[param] = _stage_whole(staging, there, own, param, param.dtype)

    def finish() -> None:
        for param in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
            del optimizer.state[param]
        optimizer.state.update(state)
        set_groups(optimizer, groups)

    staging.finish.append(finish)


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _stage_shards(
    staging: Staging,
    optimizer: DistributedOptimizer,
    names: GlobalNames,
    there: StoredOptimizer,
    groups: Sequence[dict[str, Any]],
) -> None:
    sharding = optimizer.sharding
    signature_of = {
        name: (there.state.get(names.params[param]), there.computed_in.get(names.params[param]))
        for param, name in optimizer.ddp.param_names.items()
    }
    shards = sharding.plan_load(signature_of)
    state = {shard: _stage_shard(staging, names, there, shard, groups[shard.segment.group]) for shard in shards}
    others = _stage_others(staging, optimizer, names, there)
    staging.finish.append(partial(sharding.take_loaded, state, groups, others))


def _stage_shard(
    staging: Staging, names: GlobalNames, there: StoredOptimizer, shard: MainShard, group: Mapping[str, Any]
) -> dict[str, Any]:
    """Want one shard's main values and state; return the state."""
    first = names.of(shard.segment.params[0]).global_name
    state: dict[str, Any] = {}
    for entry in there.state.get(first, ()):
        if entry.kind == "elements":
            dtype = there.dtype_of(first, entry, staging.stored, shard.main.dtype)
            state[entry.key] = torch.zeros_like(shard.main, dtype=dtype, requires_grad=False)  # gaps stay zero
        else:
            state[entry.key] = _number(entry, shard.main.device, group)
    for piece in shard.pieces():
        like, own = shard.buffer.slots[piece.param].view, names.of(piece.param)
        keys = [entry.key for entry in there.state.get(own.global_name, ()) if entry.kind == "elements"]
        flats = {state_name(own.global_name, key): state[key] for key in keys}
        if shard.has_own_values:
            flats[source_of(staging.stored.tensors, own.global_name, shard.main.dtype)] = shard.main.detach()
        for source, values in flats.items():
            staging.want(source, like, piece.in_param.start, values[piece.in_segment.start : piece.in_segment.stop], own)
    return state


def _stage_others(staging: Staging, optimizer: DistributedOptimizer, names: GlobalNames, there: StoredOptimizer) -> WholeState:
    """Want the state of parameters without a shard: frozen ones, which may be unfrozen later."""
    in_groups = {param for group in optimizer.sharding.members.by_group() for param in group}
    values: dict[torch.Tensor, dict[str, Any]] = {}
    mains: dict[torch.Tensor, torch.Tensor] = {}
    dtypes: dict[torch.Tensor, torch.dtype] = {}
    for param, own in names.identities.items():
        if param in optimizer.ddp.param_names or param not in in_groups:
            continue
        name = own.global_name
        dtypes[param] = dtype_named(there.computed_in.get(name, dtype_name(param.dtype)))
        if name in there.state:
            dtypes[param] = main_dtype(param.dtype)
            values[param] = _stage_whole(staging, there, own, param, dtypes[param])
        if f"{MAIN_PREFIX}{name}" in staging.stored.tensors and main_dtype(param.dtype) != param.dtype:
            mains[param] = staging.want_like(f"{MAIN_PREFIX}{name}", param, main_dtype(param.dtype), own)
    return WholeState(values, mains, dtypes)


def _stage_whole(
    staging: Staging, there: StoredOptimizer, own: ParamIdentity, param: torch.Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """Want the state of one whole parameter and return it."""
    name = own.global_name
    hyperparameters = there.hyperparameters[there.group_of[name]]
    state: dict[str, Any] = {}
    for entry in there.state[name]:
        if entry.kind == "elements":
            wanted = there.dtype_of(name, entry, staging.stored, dtype)
            state[entry.key] = staging.want_like(state_name(name, entry.key), param, wanted, own)
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
