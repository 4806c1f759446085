"""Everything a training run needs to go on, by name: what one rank of it writes.

Nothing is gathered and no value is copied: pieces are views of where the values live, so they must be written, or copied to the
host, before the next step.

Two kinds of optimizers give the same state. A plain torch optimizer holds whole parameters, and every rank has all of it; a
``DistributedOptimizer`` holds flat shards, of which each rank gives its own. What is no value per element (step counts,
hyperparameters) goes into JSON, grouped, because it is the same for most parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from megabucket.buffer import dtype_name, view_like
from megabucket.checkpoint.canonical import canonical_name, info_of, named_buffers, split_evenly, whole_piece
from megabucket.checkpoint.format import Json, Piece, Snapshot
from megabucket.checkpoint.ranks import GroupRanks, tell, together
from megabucket.checkpoint.values import RNG_PREFIX, capture_rng, encode
from megabucket.comm import Accelerator
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.replicas import checksum
from megabucket.errors import OptimizerParametersError, PeerFailedError
from megabucket.optim import DistributedOptimizer
from megabucket.optim.shards import MainShard
from megabucket.optim.state_dict import (
    KNOWN_NUMBERS,
    NUMBER_TYPES,
    Description,
    StateEntry,
    describe_number,
    describe_shards,
    main_dtype,
    merge_descriptions,
)

MODEL_PREFIX: Final = "model."
MAIN_PREFIX: Final = "optim.main."
STATE_PREFIX: Final = "optim.state."


EXTRA_PREFIX: Final = "extra."
RUN_PREFIX: Final = "run."
LOCAL_PREFIX: Final = "local."
"""Before a rank and the name of a module buffer, which differs from that of the first rank."""
VALUES_VERSION: Final = 1


class Stateful(Protocol):
    """What has a state dict of plain values: a scheduler, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take it."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingParts:
    """What is trained, and what else a run consists of.

    Args:
        optimizer: a ``DistributedOptimizer``, or a plain one over the parameters of the wrapped module (all-reduce only); None
            where only weights matter.
        scaler: a ``torch.amp.GradScaler`` or the like.
        schedulers: by a name of the caller's choice.
    """

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer | None = None
    scaler: Stateful | None = None
    schedulers: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Scaler and schedulers by the name under which their state is kept."""
        found: dict[str, Stateful] = {f"scheduler {name}": scheduler for name, scheduler in self.schedulers.items()}
        return found if self.scaler is None else {"scaler": self.scaler, **found}


def name_schedulers(schedulers: Any) -> dict[str, Stateful]:
    """Return schedulers by name: given as one, as several, or by name already."""
    if schedulers is None:
        return {}
    if isinstance(schedulers, Mapping):
        return dict(schedulers)
    if isinstance(schedulers, Sequence):
        return {str(index): scheduler for index, scheduler in enumerate(schedulers)}
    return {"0": schedulers}


def capture(
    parts: TrainingParts, *, data_position: Any = None, extras: Mapping[str, Any] | None = None, with_rng: bool = True
) -> Snapshot:
    """Return what this rank writes; see ``take``. A collective call, between two steps.

    Raises:
        PhaseError: a step is open on some rank.
        OptimizerParametersError: some optimizer state cannot be told apart by parameter, or belongs to none.
        ConfigError: something is no plain value.
        CheckpointError: what else failed on some rank.
    """
    told = tell_state(parts)
    return together(told.ranks, lambda: take(parts, told, data_position=data_position, extras=extras, with_rng=with_rng))


@dataclass(frozen=True, slots=True, eq=False)
class ToldState:
    """What ranks must have told one another before each can take its part."""

    ranks: GroupRanks
    described: Sequence[Any]
    """What the shards of each rank hold, by rank."""
    differing: Sequence[str]
    """Names of the module buffers that are not the same on all ranks: running statistics, which every rank has of its own."""


def tell_state(parts: TrainingParts) -> ToldState:
    """Make sure that every rank is between two steps, and return what ``take`` needs. A collective call.

    Raises:
        PhaseError: a step is open on some rank.
        OptimizerParametersError: some optimizer state cannot be told apart by parameter, alike on all ranks.
        PeerFailedError: it cannot on some rank.
        CheckpointError: what else failed on some rank.
    """
    ranks = GroupRanks.of(parts.ddp, "saving a checkpoint")
    unfit: list[OptimizerParametersError] = []
    by_rank = tell(ranks, lambda: _state_to_tell(parts, ranks, unfit))
    texts = [told["unfit"] for told in by_rank]
    if any(texts):
        if unfit and len(set(texts)) == 1:
            raise unfit[0]
        rank = next(rank for rank, text in enumerate(texts) if text)
        raise PeerFailedError(step=0, rank=rank, phase="save_checkpoint()", cause=texts[rank]) from next(iter(unfit), None)
    sums = zip(*(told["buffers"] for told in by_rank), strict=True)
    names = list(named_buffers(parts.ddp.module)) if ranks.size > 1 else []
    differing = [name for name, of_ranks in zip(names, sums, strict=True) if len(set(of_ranks)) > 1]
    return ToldState(ranks, [told["described"] for told in by_rank], differing)


def _state_to_tell(parts: TrainingParts, ranks: GroupRanks, unfit: list[OptimizerParametersError]) -> dict[str, Any]:
    settle(parts, "saving a checkpoint")
    described: list[Any] = []
    if isinstance(parts.optimizer, DistributedOptimizer):
        try:
            described = describe_shards(parts.optimizer.sharding.shards, parts.optimizer.state)
        except OptimizerParametersError as error:
            unfit.append(error)
    buffers = named_buffers(parts.ddp.module).values() if ranks.size > 1 else ()  # alone, nobody has others
    return {
        "described": described,
        "buffers": [checksum(buffer) if buffer.numel() else 0 for buffer in buffers],
        "unfit": "".join(f"{type(error).__name__}: {error}" for error in unfit),
    }


def settle(parts: TrainingParts, operation: str) -> None:
    """Make sure that no step is open and that every value may be read.

    Raises:
        PhaseError: a step is open.
    """
    if isinstance(parts.optimizer, DistributedOptimizer):
        parts.optimizer.sharding.settle(operation)
    else:
        parts.ddp.sync.check_between_steps(operation)
        parts.ddp.finish_param_sync()


def take(
    parts: TrainingParts,
    told: ToldState,
    *,
    data_position: Any = None,
    extras: Mapping[str, Any] | None = None,
    with_rng: bool = True,
) -> Snapshot:
    """Return what this rank writes. No collective; nothing of the run may have changed since ``tell_state``.

    Model values are split over the ranks, shards of the optimizer are written by those who own them, module buffers by the
    first rank; where other ranks hold others (running statistics), they write theirs, too.

    Args:
        data_position: plain values that say which data comes next; the same on every rank.
        extras: plain values and tensors by name; the same on every rank.

    Raises:
        OptimizerParametersError: some optimizer state belongs to no parameter, or ranks hold different numbers for one.
        ConfigError: something is no plain value.
    """
    module, ranks = parts.ddp.module, told.ranks
    if isinstance(parts.optimizer, DistributedOptimizer):
        held = hold_shards(parts.optimizer, module, told.described)
    else:
        held = HeldState(names=_names_in(module)) if parts.optimizer is None else hold_plain(parts.optimizer, module)
    shared = {f"{MODEL_PREFIX}{name}": param.detach() for param, name in held.names.items() if not param.is_meta}
    shared |= held.shared
    keep = shared.__setitem__
    values = {
        **values_of_state(held.values or None),
        "stateful": {name: encode(item.state_dict(), f"{RUN_PREFIX}{name}", keep) for name, item in parts.stateful.items()},
        "module_extra_state": {
            name: encode(submodule.get_extra_state(), f"{RUN_PREFIX}module.{name}", keep)
            for name, submodule in with_extra_state(module).items()
        },
        "data_position": encode(data_position, f"{RUN_PREFIX}data_position", keep),
        "extras": {str(name): encode(value, f"{EXTRA_PREFIX}{name}", keep) for name, value in (extras or {}).items()},
        "rng_ranks": ranks.size if with_rng else 0,
    }
    pieces: list[Piece] = [*held.own, *split_evenly(shared, rank=ranks.rank, size=ranks.size)]
    for name, buffer in named_buffers(module).items():
        if ranks.rank == 0:
            pieces.append(whole_piece(f"{MODEL_PREFIX}{name}", buffer))
        elif name in told.differing:
            pieces.append(whole_piece(f"{LOCAL_PREFIX}{ranks.rank}.{name}", buffer))
    if with_rng:
        device = parts.ddp.param_and_grad_buffers[0].param_data.device
        pieces += [whole_piece(f"{RNG_PREFIX}{ranks.rank}.{what}", state) for what, state in capture_rng(device).items()]
    return Snapshot(pieces, values)


def values_of_state(optimizer: Json = None) -> dict[str, Json]:
    """Return what a checkpoint has beside its tensors where nothing of a run is known but weights and an optimizer's state."""
    return {
        "version": VALUES_VERSION,
        "optimizer": optimizer,
        "stateful": {},
        "module_extra_state": {},
        "data_position": None,
        "extras": {},
        "rng_ranks": 0,
    }


def with_extra_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the submodules that add something to their ``state_dict`` beside tensors, by name."""
    base = torch.nn.Module.get_extra_state
    return {canonical_name(name): sub for name, sub in module.named_modules() if type(sub).get_extra_state is not base}


def to_host(snapshot: Snapshot, reuse: Sequence[torch.Tensor] = ()) -> Snapshot:
    """Return a snapshot with values of its own in host memory, which training cannot change any more.

    Args:
        reuse: values of an earlier copy that nobody needs: those that fit their places are written again, so that a run that
            saves the same again takes no new memory.
    """
    theirs = [piece.values for piece in snapshot.pieces]
    own = list(reuse) if len(reuse) == len(theirs) else [torch.empty(0)] * len(theirs)
    for index, values in enumerate(theirs):
        if own[index].dtype is not values.dtype or own[index].numel() != values.numel():
            accelerator = Accelerator.of(values.device)
            make = torch.empty if accelerator is None else accelerator.pinned
            own[index] = make(values.shape, dtype=values.dtype)
    if own:
        torch._foreach_copy_(own, theirs, non_blocking=True)
    for accelerator in {values.device: Accelerator.of(values.device) for values in theirs}.values():
        if accelerator is not None:
            accelerator.record().synchronize()  # once for all copies, which go to pinned memory
    pieces = [Piece(piece.info, piece.start, piece.stop, mine) for piece, mine in zip(snapshot.pieces, own, strict=True)]
    return Snapshot(pieces, snapshot.values)


# Optimizers


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
        return optimizer.sharding.members.by_group()
    return [group["params"] for group in optimizer.param_groups]


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
    groups, names = members_by_name(sharding.members.by_group(), module)
    others = sharding.state_of_others
    held = HeldState(names=names)
    by_name = _hold_whole(others.values, names, held.shared)
    held.shared.update({f"{MAIN_PREFIX}{names[param]}": main for param, main in others.main_values.items()})
    computed_in = {names[param]: dtype_name(dtype) for param, dtype in others.dtypes.items() if param in names}
    # Where nothing is sharded, each rank speaks for itself: that they differ, the digest of all values shows.
    by_rank = described if sharding.holder.is_sharded else [described[sharding.holder.communicator.rank]]
    by_name.update({canonical_name(name): description for name, description in merge_descriptions(by_rank).items()})
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
