"""Load a checkpoint into a training run: check and read all of it, and only then change the run, on all ranks or on none."""

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
    VALUES_VERSION,
    Prefix,
    TrainingParts,
    WholeModel,
    inner_of,
    kind_of,
    members_by_name,
    model_summary,
    state_name,
)
from megabucket.checkpoint.format import Piece, TensorInfo
from megabucket.checkpoint.ranks import GroupRanks, gather_results, together
from megabucket.checkpoint.stored import Stored, find_difference
from megabucket.checkpoint.values import UNREADABLE, Find, capture_rng, decode, restore_rng
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointMismatchError, name_list
from megabucket.layout.identity import ParamIdentity
from megabucket.layout.shards import shard_slices
from megabucket.optim import DistributedOptimizer
from megabucket.optim.param_state import NUMBERS_OF
from megabucket.optim.shards import MAIN, MainShard, WholeShard, main_dtype
from megabucket.optim.state_dict import (
    Description,
    StateEntry,
    WholeState,
    entry_from_json,
    number_in,
    set_groups,
)

Restore = Callable[[Any], Any]
"""Sets the state of an object that can also be set back: ``load_state_dict``, say."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingLoad:
    """A load that is under way."""

    stored: Stored
    wanted: list[Piece] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Targets and their new values."""
    states: list[tuple[Restore, Any, Any]] = field(default_factory=list)
    """Objects that may refuse a state: their setter, the state they have, the new one."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """Calls that follow, in this order; none of them can fail."""

    def want(
        self, name: str, like: torch.Tensor, start: int, values: torch.Tensor, identity: ParamIdentity | None = None
    ) -> None:
        """Request a range of a stored tensor, in the memory order of ``like``, in the dtype of ``values``.

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
        """Request a stored tensor and return its memory: in the shape, memory order and place of ``like``."""
        values = torch.empty(like.numel(), dtype=dtype or like.dtype, device=like.device)
        self.want(name, like, 0, values, identity)
        return in_shape(values, tuple(like.shape), order_of(like))

    def want_stored(self, name: str) -> torch.Tensor:
        """Request a whole tensor as it is stored, and return its memory, on the CPU."""
        info = self.stored.tensors[name]
        piece = empty_piece(info)
        self.wanted.append(piece)
        return in_shape(piece.values, info.shape, info.order)

    def read(self) -> None:
        """Read everything that was requested."""
        # Whether dtypes may change was checked before; the reader still checks the values that are narrowed.
        self.stored.read(self.wanted, cast=True)


def source_of(tensors: Mapping[str, TensorInfo], name: str, dtype: torch.dtype) -> str:
    """Return the stored tensor from which a weight of a dtype is loaded.

    A 16-bit weight was rounded from its main parameter, so that is the better source for a wider weight.
    """
    weight, main = tensors.get(f"{Prefix.MODEL}{name}"), tensors.get(f"{Prefix.MAIN}{name}")
    wanted = dtype_name(dtype)
    takes_main = main is not None and main.dtype == wanted and (weight is None or weight.dtype != wanted)
    return f"{Prefix.MAIN if takes_main else Prefix.MODEL}{name}"


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The parts of a loaded checkpoint that the caller puts to use."""

    path: str
    step: int
    world_size: int
    """How many ranks wrote it."""
    data_position: Any
    extras: dict[str, Any]
    rng_restored: bool
    """Whether each rank continues with its own random numbers: only with the number of ranks that wrote them."""


@torch.inference_mode(False)
def restore(stored: Stored, parts: TrainingParts, *, cast: bool = False, with_rng: bool = True) -> LoadedCheckpoint:
    """Load a checkpoint into a run. A collective call, between two steps.

    Raises:
        CheckpointMismatchError: it does not fit; the text names every difference. As with all other errors, model,
            optimizer, schedulers and random numbers are unchanged, on every rank.
        LayoutError: some part of the model is on no rank, or claimed by several.
        CheckpointInvalidError: a file is damaged.
        PhaseError: a step is open on some rank.
        CheckpointError: something else failed on some rank.
    """
    ranks = GroupRanks(parts.ddp, "loading a checkpoint")
    names, pending = GlobalNames(parts.ddp), PendingLoad(stored)
    model = WholeModel.of(gather_results(ranks, "model", lambda: model_summary(parts, names, "loading a checkpoint")))
    together(ranks, "differences", lambda: _refuse(stored, _mismatches(stored, parts, names, model, cast=cast)))
    found = together(ranks, "values", lambda: _read(pending, parts, names, with_rng=with_rng))
    touched: list[tuple[Restore, Any]] = []

    def set_states() -> None:
        for set_state, before, state in pending.states:
            touched.append((set_state, before))
            set_state(state)

    try:
        together(ranks, "states", set_states)
        with parts.ddp.sync.call("loading a checkpoint: writing") as call, torch.no_grad():
            call.open()
            for target, values in pending.copies:
                target.copy_(values)
            parts.ddp.note_written()
            for act in pending.finish:
                act()
    except BaseException:
        for set_state, before in reversed(touched):
            with suppress(Exception):  # an object that cannot take its own state back has failed before
                set_state(before)
        raise
    return found


def _refuse(stored: Stored, problems: list[str]) -> None:
    if problems:
        raise CheckpointMismatchError(path=str(stored.path), problems=problems)


def _read(pending: PendingLoad, parts: TrainingParts, names: GlobalNames, *, with_rng: bool) -> LoadedCheckpoint:
    """Read everything that this rank needs, beside the run."""
    stored, ranks = pending.stored, names.ranks
    values: Any = stored.values
    _stage_model(pending, parts.ddp, names)
    states: list[tuple[Restore, Any, Any]] = [
        (module.set_extra_state, module.get_extra_state(), values["module_extra_state"][name])
        for name, module in names.stateful.items()
    ]
    if parts.optimizer is not None:
        optimizer_load = _OptimizerLoad.of(pending, parts.optimizer, names)
        if isinstance(parts.optimizer, DistributedOptimizer):
            optimizer_load.into_shards(parts.optimizer)
        else:
            optimizer_load.into_plain(parts.optimizer)
        states += [(of.load_state_dict, of.state_dict(), values["stateful"][name]) for name, of in parts.stateful.items()]
    for set_state, before, value in states:
        pending.states.append((set_state, copy.deepcopy(before), decode(value, pending.want_stored)))
    has_rng = with_rng and parts.optimizer is not None and values["rng_ranks"] == ranks.size
    if has_rng:
        device, prefix = parts.ddp.param_and_grad_buffers[0].param_data.device, f"{Prefix.RNG}{ranks.rank}."
        rng = {name.removeprefix(prefix): pending.want_stored(name) for name in stored.tensors if name.startswith(prefix)}
        pending.states.append((partial(restore_rng, device=device), capture_rng(device), rng))
    position, extras = (decode(values[key], pending.want_stored) for key in ("data_position", "extras"))
    pending.read()
    return LoadedCheckpoint(str(stored.path), stored.step, stored.world_size, position, extras, has_rng)


# Differences between a checkpoint and a run


def mismatches(stored: Stored, parts: TrainingParts, *, cast: bool) -> list[str]:
    """Return every difference between a checkpoint and a run; nothing, if it can be restored. Local, and changes nothing.

    Where ranks hold different parameters, tensors that only other ranks could load are not checked.

    Raises:
        OptimizerParametersError: the optimizer has parameters that are not the module's.
    """
    names, model = GlobalNames(parts.ddp), None
    if parts.ddp.ranks.has_same_params:
        groups = members_by_name(parts.optimizer, names)
        model = WholeModel(groups, {*names.params.values(), *names.buffers}, dict.fromkeys(names.stateful))
    return _mismatches(stored, parts, names, model, cast=cast)


def _mismatches(stored: Stored, parts: TrainingParts, names: GlobalNames, model: WholeModel | None, *, cast: bool) -> list[str]:
    try:
        return _find_mismatches(stored, parts, names, model, cast=cast)
    except UNREADABLE as error:  # a seal does not prove that values make sense
        return [f"its values cannot be read: {type(error).__name__}: {error}"]


def _find_mismatches(
    stored: Stored, parts: TrainingParts, names: GlobalNames, model: WholeModel | None, *, cast: bool
) -> list[str]:
    values: Any = stored.values
    if values.get("version") != VALUES_VERSION:
        return [f"its values are of version {values.get('version')!r}, and this one reads version {VALUES_VERSION}"]
    here = [(f"{Prefix.MODEL}{o.global_name}", o.global_shape, p.dtype) for p, o in names.identities.items() if not p.is_meta]
    here += [(_source_of_buffer(stored, names, name), buffer.shape, buffer.dtype) for name, buffer in names.buffers.items()]
    differences = [find_difference(stored.tensors, *one, cast=cast) for one in here]
    problems = [difference for difference in differences if difference is not None]
    problems += [
        f"{name!r} is in the checkpoint and not in the model"
        for name in stored.tensors
        if model is not None and name.startswith(Prefix.MODEL) and name.removeprefix(Prefix.MODEL) not in model.names
    ]
    plain = [values["data_position"], values["extras"], *values["module_extra_state"].values()]
    if parts.optimizer is not None:
        plain += values["stateful"].values()
        problems += _optimizer_problems(stored, parts.optimizer, names, model, cast=cast)
        problems += _name_problems(set(values["stateful"]), set(parts.stateful), "of the training run")
    for value in plain:
        decode(value, _without_values(stored))
    extra_state, own = set(values["module_extra_state"]), set(names.stateful)
    elsewhere = extra_state - own if model is None else model.modules.keys() - own
    return problems + _name_problems(extra_state - elsewhere, own, "that module.get_extra_state() gives")


def _name_problems(there: set[str], here: set[str], what: str) -> list[str]:
    return [
        *(f"the checkpoint has the state {what} called {name!r}, and nothing here takes it" for name in sorted(there - here)),
        *(f"the checkpoint has no state {what} called {name!r}" for name in sorted(here - there)),
    ]


def _optimizer_problems(
    stored: Stored, optimizer: torch.optim.Optimizer, names: GlobalNames, model: WholeModel | None, *, cast: bool
) -> list[str]:
    there = StoredOptimizer.of(stored)
    if there is None:
        return ["the checkpoint has no optimizer state; load it with optimizer=None to take the weights only"]
    kind = kind_of(optimizer)
    problems = [] if kind == there.kind else [f"the optimizer was {there.kind} and is {kind}"]
    needed = [NUMBERS_OF.get(type(inner), frozenset()) for inner in inner_of(optimizer) for _ in inner.param_groups]
    problems += there.problems(needed)
    for index, (of_group, own_group) in enumerate(zip(there.groups, optimizer.param_groups, strict=False)):
        for key, encoded in of_group["hyperparameters"].items():
            value, own_value = decode(encoded, _without_values(stored)), own_group.get(key)
            if not _is_alike(value, own_value):
                problems.append(f"{key!r} of group {index} is {value!r:.100} in the checkpoint and {own_value!r:.100} here")
    members = [group["params"] for group in there.groups]
    problems += _group_problems(members, members_by_name(optimizer, names), members if model is None else model.groups)
    computes_in_main = isinstance(optimizer, DistributedOptimizer)
    uncut = optimizer.sharding.uncut if isinstance(optimizer, DistributedOptimizer) else set(names.params)
    for param, own in names.identities.items():
        name, dtype = own.global_name, main_dtype(param.dtype) if computes_in_main else param.dtype
        for entry in there.state.get(name, ()):
            if entry.kind == "elements" or (entry.kind == "other" and param in uncut):
                wanted, shape = there.dtype_of(name, entry.dtype, dtype), entry.shape or own.global_shape
                found = find_difference(stored.tensors, state_name(name, entry.key), shape, wanted, cast=cast)
                problems += [found] if found else []
            elif entry.kind in ("other", "plain") and param not in uncut:
                problems.append(
                    f"{entry.key!r} of {name!r} is neither one value per element nor a number, which flat shards cannot hold"
                )
    return problems


def _without_values(stored: Stored) -> Find:
    """Return a function that finds a tensor of a checkpoint, and reads nothing of it."""
    return lambda name: torch.empty(stored.tensors[name].shape, dtype=torch.float32, device="meta")


def _is_alike(there: Any, here: Any) -> bool:
    """Return whether a hyperparameter can replace another: a number a number, in a tensor or not; a switch any value."""
    if isinstance(here, tuple | list):
        return isinstance(there, tuple | list) and len(there) == len(here) and all(map(_is_alike, there, here))
    return not _is_number(here) or _is_number(there)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _group_problems(
    there: Sequence[Sequence[str]], here: Sequence[Sequence[str]], everywhere: Sequence[Collection[str]]
) -> list[str]:
    problems = []
    if len(there) != len(here):
        problems.append(f"the checkpoint has {len(there)} parameter groups, the optimizer has {len(here)}")
    for index, (names, own, of_all) in enumerate(zip_longest(there, here, everywhere, fillvalue=())):
        if missing := sorted(set(own) - set(names)):
            problems.append(f"group {index} of the optimizer has {name_list(missing)}, that of the checkpoint has not")
        if unknown := sorted(set(names) - set(of_all)):
            problems.append(f"group {index} of the checkpoint has {name_list(unknown)}, that of the optimizer has not")
    return problems


# Weights and module buffers


def _source_of_buffer(stored: Stored, names: GlobalNames, name: str) -> str:
    """Return the stored tensor for a module buffer: this rank's own, if the same number of ranks wrote the checkpoint."""
    local = f"{Prefix.LOCAL}{names.ranks.rank}.{name}"
    is_own = local in stored.tensors and stored.world_size == names.ranks.size
    return local if is_own else f"{Prefix.MODEL}{name}"


def _stage_model(pending: PendingLoad, ddp: DistributedDataParallel, names: GlobalNames) -> None:
    """Request all weights and module buffers."""
    sharded = set(ddp.param_names) if ddp.ddp_config.use_distributed_optimizer else set()
    for buffer in ddp.param_and_grad_buffers if sharded else ():
        _stage_param_shards(pending, ddp, names, buffer)
    for param, own in names.identities.items():
        if not param.is_meta and param not in sharded:
            source = source_of(pending.stored.tensors, own.global_name, param.dtype)
            pending.copies.append((param.detach(), pending.want_like(source, param, identity=own)))
    for name, running in names.buffers.items():
        source = _source_of_buffer(pending.stored, names, name)
        pending.copies.append((running.detach(), pending.want_like(source, running)))
    if sharded:
        pending.finish.append(lambda: _gather(ddp))


def _stage_param_shards(
    pending: PendingLoad, ddp: DistributedDataParallel, names: GlobalNames, buffer: ParamAndGradBuffer
) -> None:
    layout = buffer.layout
    rank = ddp.ranks.by_name[layout.key.group].communicator.rank
    for bucket in layout.buckets:
        span = layout.shard_span(bucket=bucket.index, rank=rank)
        target = buffer.param_data[span.start : span.stop]
        values = target.clone()  # with the padding, which stays
        for piece in shard_slices(layout, bucket=bucket.index, rank=rank):
            identity = names.of(piece.param)
            source = source_of(pending.stored.tensors, identity.global_name, values.dtype)
            own = values[piece.in_shard.start : piece.in_shard.stop]
            pending.want(source, buffer.params[piece.param], piece.in_param.start, own, identity)
        pending.copies.append((target, values))


def _gather(ddp: DistributedDataParallel) -> None:
    for group in ddp.bucket_groups:
        group.mark_params_stale()
    ddp.start_param_sync(force_sync=True)


# Optimizers


@dataclass(frozen=True, slots=True, eq=False)
class StoredOptimizer:
    """The values of a checkpoint that describe its optimizer."""

    stored: Stored
    kind: str
    groups: list[dict[str, Any]]
    """The names of the parameters and the hyperparameters of each group."""
    state: dict[str, Description]
    """The entries of each parameter that has state."""
    computed_in: dict[str, str]
    """The dtype that a parameter is stepped in, if it is not the parameter's."""

    @classmethod
    def of(cls, stored: Stored) -> StoredOptimizer | None:
        """Return the stored optimizer, or None."""
        values: Any = stored.values["optimizer"]
        if not values:
            return None
        state = {name: tuple(map(entry_from_json, one["entries"])) for one in values["state"] for name in one["params"]}
        computed_in = {name: dtype for dtype, names in values["computed_in"].items() for name in names}
        return cls(stored, values["class"], values["groups"], state, computed_in)

    def problems(self, needed: Sequence[Collection[str]]) -> list[str]:
        """Return the stored state that no parameter would get, and the numbers that are missing.

        Args:
            needed: by group, keys of the numbers of every parameter that has state.

        Raises:
            ValueError: an entry is not the number that it should be; or another of ``UNREADABLE``.
        """
        known, plain = set(), []
        for name, description in self.state.items():
            for entry in description:
                known.add(state_name(name, entry.key))
                if entry.kind == "plain":
                    plain.append(f"{state_name(name, entry.key)}.")
                    decode(json.loads(entry.number[1]), _without_values(self.stored))
                elif entry.kind in ("number", "tensor"):
                    number_in(entry, torch.device("cpu"))
        lacking: dict[str, list[str]] = {}
        for group, keys in zip(self.groups, needed, strict=False):
            for key in keys:
                found = [(name, [entry.key for entry in self.state.get(name, ())]) for name in group["params"]]
                lacking.setdefault(key, []).extend(name for name, own in found if own and key not in own)
        return [
            *(
                f"{name!r} is in the checkpoint, and its optimizer does not know it"
                for name in self.stored.tensors
                if name.startswith(Prefix.STATE) and name not in known and not name.startswith(tuple(plain))
            ),
            *(f"{key!r} of {name_list(names)} is not in the checkpoint" for key, names in sorted(lacking.items()) if names),
        ]

    def dtype_of(self, name: str, stored: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of state here, where the optimizer computes in ``dtype``.

        State in the dtype that the optimizer computed in follows that dtype; other keeps the dtype that it chose for it.

        Args:
            name: of the parameter.
            stored: the dtype of its state in the checkpoint.
        """
        weight = self.stored.tensors.get(f"{Prefix.MODEL}{name}")
        computed_in = self.computed_in.get(name) or (weight.dtype if weight is not None else stored)
        return dtype if stored == computed_in else dtype_named(stored)


@dataclass(frozen=True, slots=True, eq=False)
class _OptimizerLoad:
    """Requests the state of an optimizer.

    Args:
        there: the optimizer of the checkpoint.
        groups: the hyperparameters of each group, as they will be.
    """

    pending: PendingLoad
    names: GlobalNames
    there: StoredOptimizer
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, pending: PendingLoad, optimizer: torch.optim.Optimizer, names: GlobalNames) -> _OptimizerLoad:
        """Prepare to request the state, and decode the hyperparameters of the checkpoint."""
        there = StoredOptimizer.of(pending.stored)
        assert there is not None  # noqa: S101 - else the checkpoint was refused
        groups = []
        for own, of_group in zip(optimizer.param_groups, there.groups, strict=True):
            hyperparameters = {key: decode(value, pending.want_stored) for key, value in of_group["hyperparameters"].items()}
            # One that the checkpoint lacks, an option of a later torch, say, stays.
            groups.append({key: value for key, value in {**own, **hyperparameters}.items() if key != "params"})
        return cls(pending, names, there, groups)

    def into_plain(self, optimizer: torch.optim.Optimizer) -> None:
        """Request all state of an optimizer over whole parameters."""
        members = zip([group["params"] for group in optimizer.param_groups], self.groups, strict=True)
        state: dict[torch.Tensor, dict[str, Any]] = {
            param: self._whole(param, param.dtype, group)
            for params, group in members
            for param in params
            if self.names.params[param] in self.there.state
        }

        def finish() -> None:
            for param in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
                del optimizer.state[param]
            optimizer.state.update(state)
            set_groups(optimizer.param_groups, self.groups)

        self.pending.finish.append(finish)

    def into_shards(self, optimizer: DistributedOptimizer) -> None:
        """Request the state of this rank's shards, and of parameters without a shard."""
        sharding, there, params = optimizer.sharding, self.there, self.names.params
        signature_of = {
            name: (there.state.get(params[param]), there.computed_in.get(params[param]))
            for param, name in optimizer.ddp.param_names.items()
        }
        state = {shard: self._shard(shard) for shard in sharding.plan_load(signature_of)}
        self.pending.finish.append(partial(sharding.take_loaded, state, self.groups, self._others(optimizer)))

    def _shard(self, shard: MainShard) -> dict[str, Any]:
        """Request one shard's main values and state; return the state."""
        pending, group = self.pending, self.groups[shard.segment.group]
        first = self.names.of(shard.segment.params[0]).global_name
        if isinstance(shard, WholeShard):
            for piece in shard.pieces(shard.own_values):
                name = source_of(pending.stored.tensors, first, piece.values.dtype)
                pending.want(name, piece.like, 0, piece.values, self.names.of(shard.name))
            has_state = first in self.there.state
            return self._whole(shard.buffer.params[shard.name], shard.dtype, group) if has_state else {}
        state: dict[str, Any] = {}
        flats: dict[str, torch.Tensor] = {}
        for entry in self.there.state.get(first, ()):
            if entry.kind == "elements":
                dtype = self.there.dtype_of(first, entry.dtype, shard.main.dtype)
                state[entry.key] = flats[entry.key] = torch.zeros_like(shard.main, dtype=dtype, requires_grad=False)
            else:
                state[entry.key] = _number(entry, shard.main.device, group)
        for piece in shard.pieces({**flats, **shard.own_values}):  # the gaps between them stay zero
            own = self.names.of(piece.param)
            if piece.key is MAIN:
                name = source_of(pending.stored.tensors, own.global_name, piece.values.dtype)
            else:
                name = state_name(own.global_name, piece.key)
            pending.want(name, piece.like, piece.in_param.start, piece.values, own)
        return state

    def _others(self, optimizer: DistributedOptimizer) -> WholeState:
        """Request the state of parameters without a shard: frozen ones, which may be unfrozen later."""
        there, tensors = self.there, self.pending.stored.tensors
        values: dict[torch.Tensor, dict[str, Any]] = {}
        mains: dict[torch.Tensor, torch.Tensor] = {}
        dtypes: dict[torch.Tensor, torch.dtype] = {}
        members = zip([group["params"] for group in optimizer.param_groups], self.groups, strict=True)
        for param, group in ((param, group) for params, group in members for param in params):
            if param in optimizer.ddp.param_names:
                continue
            name, dtype = self.names.params[param], main_dtype(param.dtype)
            dtypes[param] = dtype_named(there.computed_in.get(name, dtype_name(param.dtype)))
            if name in there.state:
                dtypes[param] = dtype
                values[param] = self._whole(param, dtype, group)
            if f"{Prefix.MAIN}{name}" in tensors and dtype != param.dtype:
                mains[param] = self.pending.want_like(f"{Prefix.MAIN}{name}", param, dtype, self.names.identities[param])
        return WholeState(values, mains, dtypes)

    def _whole(self, param: torch.Tensor, dtype: torch.dtype, group: Mapping[str, Any]) -> dict[str, Any]:
        """Request the state of one whole parameter and return it."""
        pending, own = self.pending, self.names.identities[param]
        state: dict[str, Any] = {}
        for entry in self.there.state[own.global_name]:
            name = state_name(own.global_name, entry.key)
            value: Any
            if entry.kind == "elements":
                value = pending.want_like(name, param, self.there.dtype_of(own.global_name, entry.dtype, dtype), own)
            elif entry.kind == "other":
                value = self._whole_entry(name, param, own.global_name, dtype)
            elif entry.kind == "plain":
                find = partial(self._whole_entry, param=param, of=own.global_name, dtype=dtype)
                value = decode(json.loads(entry.number[1]), find)
            else:
                value = _number(entry, param.device, group)
            state[entry.key] = value
        return state

    def _whole_entry(self, name: str, param: torch.Tensor, of: str, dtype: torch.dtype) -> torch.Tensor:
        """Request a tensor of any shape in the state of a whole parameter and return it, on the device of the parameter."""
        stored = self.pending.want_stored(name)
        wanted = self.there.dtype_of(of, self.pending.stored.tensors[name].dtype, dtype)
        if param.device == stored.device and wanted == stored.dtype:
            return stored
        value = torch.empty_like(stored, dtype=wanted, device=param.device)
        self.pending.copies.append((value, stored))
        return value


def _number(entry: StateEntry, device: torch.device, group: Mapping[str, Any]) -> Any:
    """Return a number where the optimizer wants it. Step counts are on the device only for kernels that count there."""
    number = number_in(entry, device)
    if entry.key == "step" and isinstance(number, torch.Tensor) and not (group.get("capturable") or group.get("fused")):
        return number.cpu()
    return number
