"""The state of a training run, by name: the part that one rank writes.

Nothing is gathered and no value is copied: pieces are views of the run's tensors, so they must be written, or copied to the
host, before the next step.

Two kinds of optimizers have the same state. A plain torch optimizer holds whole parameters on every rank; a
``DistributedOptimizer`` holds flat shards, and each rank writes its own. Numbers per parameter (step counts) and
hyperparameters go into JSON, grouped, because most parameters share them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Final, Protocol

import torch

from megabucket.buffer import dtype_name, view_like
from megabucket.checkpoint.canonical import GlobalNames, info_of, split_evenly, whole_piece
from megabucket.checkpoint.format import Box, Json, Piece, Snapshot, block_problem
from megabucket.checkpoint.ranks import GroupRanks, gather_results, together
from megabucket.checkpoint.values import Keep, capture_rng, encode
from megabucket.comm import Accelerator, Communicator
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.replicas import checksum
from megabucket.errors import LayoutError, OptimizerParametersError
from megabucket.layout.identity import ParamIdentity
from megabucket.optim import DistributedOptimizer
from megabucket.optim.sharding import Sharding
from megabucket.optim.shards import MAIN, StatePiece, WholeShard, main_dtype
from megabucket.optim.state_dict import (
    Description,
    StateEntry,
    WholeState,
    describe_entry,
    merge_descriptions,
)

VALUES_VERSION: Final = 1
_SHOWN: Final = 5


class Prefix:
    """Prefixes of tensor names."""

    MODEL: Final = "model."
    MAIN: Final = "optim.main."
    STATE: Final = "optim.state."
    EXTRA: Final = "extra."
    RUN: Final = "run."
    LOCAL: Final = "local."
    """Before a rank and the name of a module buffer that differs from that of the first rank."""
    RNG: Final = "rng."
    """Before a rank and a generator. Each rank has its own, so they are loaded only by the same number of ranks."""


class Stateful(Protocol):
    """An object with a state dict of plain values: a scheduler, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Set the state."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingParts:
    """The parts of a training run that a checkpoint holds.

    Args:
        optimizer: a ``DistributedOptimizer``, or a plain one over the parameters of the wrapped module (all-reduce only); None
            where only weights matter.
        scaler: a ``torch.amp.GradScaler`` or the like.
        schedulers: one, several, or several by name.
    """

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer | None = None
    scaler: Stateful | None = None
    schedulers: Any = None

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Scaler and schedulers, by the name of their state."""
        named = self.schedulers
        if isinstance(named, Sequence):
            named = dict(enumerate(named))
        elif not isinstance(named, Mapping):
            named = {} if named is None else {0: named}
        found = {f"scheduler {name}": scheduler for name, scheduler in named.items()}
        return found if self.scaler is None else {"scaler": self.scaler, **found}


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The model of all ranks of a wrapper together, by global name."""

    groups: Sequence[Sequence[str]]
    """The parameters in each group of the optimizer."""
    names: Collection[str]
    """Parameters and module buffers."""
    modules: Mapping[str, Json]
    """Module extra state, from the lowest rank holding the module."""

    @classmethod
    def of(cls, by_rank: Sequence[Mapping[str, Any]]) -> WholeModel:
        """Build from every rank's ``model_summary``.

        Raises:
            LayoutError: some part of the model is on no rank, or on several that do not know of each other.
        """
        claims: dict[str, list[tuple[int, Box, tuple[int, ...]]]] = {}
        for rank, summary in enumerate(by_rank):
            for name, offset, shape, whole in summary["params"]:
                box = tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
                claims.setdefault(name, []).append((rank, box, tuple(whole)))
        problems = []
        for name, blocks in claims.items():
            ranks, boxes, shapes = zip(*blocks, strict=True)
            problem = f"are of wholes of different shapes: {shapes}" if len({*shapes}) > 1 else block_problem(boxes, shapes[0])
            problems += [f"the blocks of {name!r} on ranks {', '.join(map(str, ranks))} {problem}"] if problem else []
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise LayoutError(
                f"the ranks that agree on steps do not hold each part of the model once: {'; '.join(problems[:_SHOWN])}{more}. "
                "A checkpoint would lack it, or keep one of two. Let identity= give each part its own global_name or place, "
                "copies= the ranks that hold the same, and step_group= contain all that hold parts."
            )
        lists = zip_longest(*(summary["groups"] for summary in by_rank), fillvalue=())
        groups = [list(dict.fromkeys(chain.from_iterable(of_ranks))) for of_ranks in lists]
        modules = {name: state for summary in reversed(by_rank) for name, state in summary["modules"].items()}
        return cls(groups, {*claims, *chain.from_iterable(summary["buffers"] for summary in by_rank)}, modules)


def model_summary(parts: TrainingParts, names: GlobalNames, operation: str) -> dict[str, Any]:
    """Return this rank's part of the model as plain values. Shared parts are reported by the first rank that has them.

    Afterwards every value can be read without waiting for other ranks.

    Raises:
        PhaseError: a step is open.
        OptimizerParametersError: the optimizer has parameters that are not the module's.
    """
    if isinstance(parts.optimizer, DistributedOptimizer):
        parts.optimizer.sharding.settle(operation)
    else:
        parts.ddp.sync.check_between_steps(operation)
    parts.ddp.finish_param_sync()
    parts.ddp.communicator.wait_for(parts.ddp.param_and_grad_buffers[0].param_data.device, label=operation)
    claims = {
        own.global_name: [own.global_name, own.offset, list(param.shape), own.global_shape]
        for param, own in names.identities.items()
        if parts.ddp.ranks.is_first(own)
    }
    return {
        "params": list(claims.values()),
        "groups": [[name for name in group if name in claims] for group in members_by_name(parts.optimizer, names)],
        "buffers": dict.fromkeys(names.buffers, 0),
        "modules": dict.fromkeys(names.stateful),
    }


def capture(
    parts: TrainingParts, *, data_position: Any = None, extras: Mapping[str, Any] | None = None, with_rng: bool = True
) -> Snapshot:
    """Return the part of a checkpoint that this rank writes. A collective call, between two steps.

    Raises:
        MegabucketError: as ``RunState`` and its ``snapshot``, on every rank.
    """
    state = RunState(parts)
    return together(
        state.ranks, "values", lambda: state.snapshot(data_position=data_position, extras=extras, with_rng=with_rng)
    )


class RunState:
    """The state of this rank's part of a run, and the reports of all ranks. Made by all ranks, between two steps.

    Raises:
        PhaseError: a step is open on some rank.
        LayoutError: some part of the model is on no rank, or claimed by several.
        OptimizerParametersError: some optimizer state cannot be told apart by parameter, or belongs to none.
        CheckpointError: something else failed on some rank.
    """

    def __init__(self, parts: TrainingParts) -> None:
        self._parts, self._names = parts, GlobalNames(parts.ddp)
        self.ranks = GroupRanks(parts.ddp, "saving a checkpoint")
        self._own: list[Piece] = []
        """Pieces of this rank alone."""
        self._shared: dict[Communicator, list[Piece]] = {}
        """Pieces that all ranks of a communicator have."""
        self._modules: dict[str, Json] = {}
        """Extra state of modules."""
        self._of_modules: dict[str, list[Piece]] = {}
        """The tensors in it."""
        self._described: list[tuple[Sequence[str], list[StateEntry], bool]] = []
        """Parameters, the entries of their optimizer state, and whether this rank has only a part of them."""
        self._computed_in: dict[str, str] = {}
        self._by_rank = gather_results(self.ranks, "model", self._summary)
        self._model = WholeModel.of(self._by_rank)

    def _summary(self) -> dict[str, Any]:
        summary, names = model_summary(self._parts, self._names, "saving a checkpoint"), self._names
        for param, own in names.identities.items():
            if not param.is_meta:
                self._share(f"{Prefix.MODEL}{own.global_name}", param.detach(), own)
        for name, module in names.stateful.items():
            tensors: dict[str, torch.Tensor] = {}
            self._modules[name] = encode(module.get_extra_state(), f"{Prefix.RUN}module.{name}", tensors.__setitem__)
            self._of_modules[name] = [whole_piece(*item) for item in tensors.items()]
        if isinstance(self._parts.optimizer, DistributedOptimizer):
            self._hold_whole(self._parts.optimizer.sharding.state_of_others)
            self._hold_shards(self._parts.optimizer.sharding)
        elif self._parts.optimizer is not None:
            self._hold_whole(WholeState(self._parts.optimizer.state))
        if self.ranks.size > 1:
            summary["buffers"] = {name: checksum(buffer) if buffer.numel() else 0 for name, buffer in names.buffers.items()}
        claimed = {name for name, *_ in summary["params"]}
        return {
            **summary,
            "modules": self._modules,
            "described": [
                # Each rank reports its own shards; the first one also the state that all ranks hold whole.
                (of if is_part else [name for name in of if name in claimed], entries)
                for of, entries, is_part in self._described
            ],
            "computed_in": {name: dtype for name, dtype in self._computed_in.items() if name in claimed},
        }

    def snapshot(
        self, *, data_position: Any = None, extras: Mapping[str, Any] | None = None, with_rng: bool = True
    ) -> Snapshot:
        """Return the part that this rank writes. Not collective; the run may not have changed since this was made.

        Ranks split the model's values among them, and write their own shards of the optimizer. The first rank writes module
        buffers; a rank whose buffers differ (running statistics) writes them as well.

        Args:
            data_position: plain values that say which data comes next; the same on every rank.
            extras: plain values and tensors by name; the same on every rank.

        Raises:
            OptimizerParametersError: ranks hold different numbers for one parameter.
            ConfigError: a value cannot be saved.
        """
        parts, by_rank, rank, keep = self._parts, self._by_rank, self.ranks.rank, self._share
        optimizer = None
        if parts.optimizer is not None:
            groups = list(zip(self._model.groups, parts.optimizer.param_groups, strict=True))
            own = [(of, entries) for of, entries, _ in self._described]
            described = merge_descriptions([*(summary["described"] for summary in by_rank), own])
            computed_in = {name: dtype for summary in by_rank for name, dtype in summary["computed_in"].items()}
            optimizer = optimizer_values(kind_of(parts.optimizer), groups, described, computed_in, keep)
        values = {
            **values_of_state(optimizer),
            "stateful": {name: encode(of.state_dict(), f"{Prefix.RUN}{name}", keep) for name, of in parts.stateful.items()},
            "module_extra_state": {**self._model.modules, **self._modules},  # ranks that differ have different values
            "data_position": encode(data_position, f"{Prefix.RUN}data_position", keep),
            "extras": {str(name): encode(value, f"{Prefix.EXTRA}{name}", keep) for name, value in (extras or {}).items()},
            "rng_ranks": self.ranks.size if with_rng else 0,
        }
        pieces: list[Piece] = [*self._own]
        for communicator, shared in self._shared.items():
            pieces += split_evenly(shared, rank=communicator.rank, size=communicator.size)
        for name, of_module in self._of_modules.items():
            pieces += of_module if self._is_first_with("modules", name) else []
        for name, buffer in self._names.buffers.items():
            if self._is_first_with("buffers", name):
                pieces.append(whole_piece(f"{Prefix.MODEL}{name}", buffer))
            elif len({summary["buffers"][name] for summary in by_rank if name in summary["buffers"]}) > 1:
                pieces.append(whole_piece(f"{Prefix.LOCAL}{rank}.{name}", buffer))
        if with_rng:
            states = capture_rng(parts.ddp.param_and_grad_buffers[0].param_data.device)
            pieces += [whole_piece(f"{Prefix.RNG}{rank}.{name}", state) for name, state in states.items()]
        return Snapshot(pieces, values)

    def _is_first_with(self, kind: str, name: str) -> bool:
        """Return whether this is the lowest rank with a module buffer, or with a module that has extra state."""
        return not any(name in summary[kind] for summary in self._by_rank[: self.ranks.rank])

    def _share(
        self, name: str, tensor: torch.Tensor, identity: ParamIdentity | None = None, shape: torch.Size | None = None
    ) -> None:
        """Add a tensor that every rank holds, or with an identity every rank of its reduction group: they split the writing.

        Args:
            identity: of the parameter that it belongs to.
            shape: of this rank's part of the parameter; ``None``: that of the tensor.
        """
        ranks = self._parts.ddp.ranks
        if identity is None or ranks.writes(identity):
            among = ranks.step if identity is None else ranks.by_name[identity.group].communicator
            if identity is not None and shape is not None:
                identity = _identity_of_state(name, tensor, identity, shape)
            self._shared.setdefault(among, []).append(whole_piece(name, tensor, identity))

    def _hold_shards(self, sharding: Sharding) -> None:
        names, is_part = self._names, sharding.holder.is_sharded
        for piece in sharding.flat_pieces():
            self._hold_piece(piece, is_part=is_part)
        for shard in sharding.whole_shards:
            self._hold_uncut(shard, sharding.state_of(shard))
        for buffer in sharding.holder.buffers:  # also parameters of which this rank owns nothing
            dtype_here = dtype_name(main_dtype(buffer.param_data.dtype))
            self._computed_in |= {names.of(name).global_name: dtype_here for name in buffer.params}
        for params, entries in sharding.describe():
            self._described.append(([names.of(name).global_name for name in params], entries, is_part))

    def _hold_uncut(self, shard: WholeShard, state: Mapping[str, Any]) -> None:
        """Add the state of a parameter that is updated whole: by its owner, or shared by all ranks that update it."""
        own, param = self._names.of(shard.name), shard.main.detach()
        keep = partial(self._keep_alone if shard.is_received else self._share, identity=own, shape=param.shape)
        entries = [_entry(own.global_name, key, value, param, keep) for key, value in state.items()]
        self._described.append(([own.global_name], entries, shard.is_received))
        if shard.has_own_values:
            keep(f"{Prefix.MAIN}{own.global_name}", param)

    def _keep_alone(self, name: str, tensor: torch.Tensor, identity: ParamIdentity, shape: torch.Size) -> None:
        """Add a tensor that this rank alone of its reduction group holds. Arguments as of ``_share``."""
        if self._parts.ddp.ranks.writes(identity):
            self._own.append(whole_piece(name, tensor, _identity_of_state(name, tensor, identity, shape)))

    def _hold_piece(self, piece: StatePiece, *, is_part: bool) -> None:
        like, values, own = piece.like, piece.values, self._names.of(piece.param)
        name = f"{Prefix.MAIN}{own.global_name}" if piece.key is MAIN else state_name(own.global_name, piece.key)
        if not is_part:
            self._share(name, view_like(values, 0, like.shape, like.stride()), own)
        elif self._parts.ddp.ranks.writes(own):
            info = info_of(name, like, values.dtype, own)
            self._own.append(Piece(info, piece.in_param.start, piece.in_param.stop, values))

    def _hold_whole(self, whole: WholeState) -> None:
        """Add the state of whole parameters."""
        names = self._names
        for param, of_param in whole.values.items():
            if isinstance(param, torch.Tensor) and of_param:
                own = names.identities[param]
                keep = partial(self._share, identity=own, shape=param.shape)
                entries = [_entry(own.global_name, key, value, param, keep) for key, value in of_param.items()]
                self._described.append(([own.global_name], entries, False))
        for param, main in whole.main_values.items():
            self._share(f"{Prefix.MAIN}{names.params[param]}", main, names.identities[param])
        self._computed_in |= {names.params[of]: dtype_name(dtype) for of, dtype in whole.dtypes.items() if of in names.params}


def _identity_of_state(name: str, tensor: torch.Tensor, identity: ParamIdentity, shape: torch.Size) -> ParamIdentity:
    """Return the place of a tensor in the state of a parameter: that of the parameter, or a whole of its own.

    Args:
        shape: of this rank's part of the parameter.

    Raises:
        OptimizerParametersError: the tensor is of another shape, and belongs to a piece of a parameter.
    """
    if tensor.shape == shape:
        return identity
    if identity.global_shape != tuple(shape):
        raise OptimizerParametersError(
            problem="state of a parameter that is cut over ranks is neither one number nor one value per element, so a "
            "checkpoint cannot say which part of the whole it is",
            params=[f"{name}: shape {tuple(tensor.shape)} for {tuple(shape)} of {identity.global_shape}"],
            remedy="Give such parameters to an elementwise optimizer, or save without the optimizer (optimizer=None).",
        )
    return replace(identity, offset=(0,) * tensor.dim(), global_shape=tuple(tensor.shape))


def _entry(name: str, key: str, value: Any, param: torch.Tensor, keep: Keep) -> StateEntry:
    tensor_name, entry = state_name(name, key), describe_entry(key, value, param)
    if isinstance(value, torch.Tensor) and (entry is None or entry.kind == "elements"):
        keep(tensor_name, value)
    if entry is not None:
        return entry
    if isinstance(value, torch.Tensor):
        return StateEntry(key, "other", dtype_name(value.dtype), shape=tuple(value.shape))
    return StateEntry(key, "plain", number=("json", json.dumps(encode(value, tensor_name, keep))))


def values_of_state(optimizer: Json = None) -> dict[str, Json]:
    """Return the values of a checkpoint with nothing but weights and an optimizer's state."""
    return {
        "version": VALUES_VERSION,
        "optimizer": optimizer,
        "stateful": {},
        "module_extra_state": {},
        "data_position": None,
        "extras": {},
        "rng_ranks": 0,
    }


@torch.inference_mode(False)
def to_host(snapshot: Snapshot, reuse: Sequence[torch.Tensor] = ()) -> Snapshot:
    """Return a copy of a snapshot in host memory, so that training can go on.

    Args:
        reuse: memory of an earlier copy, written again where it fits, so that repeated saves of a run take no new memory.
    """
    theirs = [piece.values for piece in snapshot.pieces]
    own = list(reuse) if len(reuse) == len(theirs) else [torch.empty(0, dtype=torch.float32, device="cpu")] * len(theirs)
    for index, values in enumerate(theirs):
        if own[index].dtype is not values.dtype or own[index].numel() != values.numel():
            accelerator = Accelerator.of(values.device)
            own[index] = torch.empty_like(values) if accelerator is None else accelerator.pinned(values.shape, values.dtype)
    if own:
        torch._foreach_copy_(own, theirs, non_blocking=True)
    for accelerator in {values.device: Accelerator.of(values.device) for values in theirs}.values():
        if accelerator is not None:
            accelerator.record().synchronize()  # once for all copies, which go to pinned memory
    pieces = [Piece(piece.info, piece.start, piece.stop, mine) for piece, mine in zip(snapshot.pieces, own, strict=True)]
    return Snapshot(pieces, snapshot.values)


def state_name(param: str, key: str) -> str:
    """Return the name of the values per element that an optimizer keeps for a parameter under a key."""
    return f"{Prefix.STATE}{param}.{key}"


def inner_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the torch optimizers in a ``DistributedOptimizer``, or the plain one itself."""
    return optimizer.torch_optimizers if isinstance(optimizer, DistributedOptimizer) else (optimizer,)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the names of the classes of ``inner_of``."""
    return " + ".join(type(one).__name__ for one in inner_of(optimizer))


def members_by_name(optimizer: torch.optim.Optimizer | None, names: GlobalNames) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises:
        OptimizerParametersError: a parameter is not the module's.
    """
    groups: Sequence[Sequence[torch.Tensor]] = []
    if optimizer is not None:
        groups = [group["params"] for group in optimizer.param_groups]
    foreign = [
        f"group {index}, parameter {position}, shape {tuple(param.shape)}"
        for index, members in enumerate(groups)
        for position, param in enumerate(members)
        if param not in names.params
    ]
    if foreign:
        raise OptimizerParametersError(
            problem="a checkpoint keeps state by the names of the wrapped module, and the optimizer has parameters that are "
            "not in it",
            params=foreign,
            remedy="Put them into the wrapped module, or into an optimizer of their own.",
        )
    return [[names.params[param] for param in members] for members in groups]


def optimizer_values(
    kind: str,
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    described: Mapping[str, Description],
    computed_in: Mapping[str, str],
    keep: Callable[[str, torch.Tensor], None],
) -> dict[str, Json]:
    """Return the values of a checkpoint that describe an optimizer.

    Args:
        kind: the name of its class.
        groups: the names of the parameters of each group, and its hyperparameters.
        described: the entries of each parameter's state.
        computed_in: the dtype that a parameter is stepped in, if it is not the parameter's.
        keep: called with every tensor among the hyperparameters.

    Raises:
        ConfigError: a hyperparameter cannot be saved.
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
