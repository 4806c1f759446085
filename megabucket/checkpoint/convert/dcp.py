"""To and from ``torch.distributed.checkpoint``: canonical tensors under the names that torch's own state dicts have.

FSDP2, plain torch and torch's converters read the files, on any number of ranks; files that these write are read here.

That format runs code: its metadata, and every value that is no tensor, are pickles. It verifies nothing: most flipped bits
go unnoticed. So convert only files whose origin you trust; ``save_checkpoint`` is for a run's own checkpoints.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import api, filesystem, metadata, planner, state_dict_loader, state_dict_saver

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.capture import (
    Prefix,
    TrainingParts,
    capture,
    kind_of,
    optimizer_values,
    state_name,
    values_of_state,
)
from megabucket.checkpoint.file_system import check_regular
from megabucket.checkpoint.format import Dims, Json, Piece, Snapshot, TensorInfo
from megabucket.checkpoint.ranks import GroupRanks, together
from megabucket.checkpoint.restore import LoadedCheckpoint, restore
from megabucket.checkpoint.stored import Stored
from megabucket.checkpoint.values import decode
from megabucket.comm import ForwardingCommunicator, ProcessGroupCommunicator
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointError, ConfigError, name_list
from megabucket.layout.identity import canonical_name
from megabucket.optim.param_state import KNOWN_NUMBERS, MAIN_PARAM
from megabucket.optim.state_dict import NUMBER_TYPES, StateEntry, describe_number, entry_from_json, number_in

_VALUES_KEY: Final = "megabucket.values"
_GROUPS_PREFIX: Final = "optim.param_groups."
_CPU: Final = torch.device("cpu")


def save_dcp(
    path: Path | str,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    data_position: Any = None,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of ``torch.distributed.checkpoint``. A collective call, between two steps.

    It holds ``{"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}``; each rank writes
    its shards as boxes of whole tensors. In addition, plain values as text.

    Args:
        path: a directory that is empty or does not exist: that format cannot replace a checkpoint safely.

    Raises:
        CheckpointError: the directory is not empty, on some rank, or torch cannot write.
        ConfigError: the wrapper's ranks are no process group, or do not all hold the same whole parameters.
        MegabucketError: as ``save_checkpoint``.
    """
    ranks = GroupRanks(ddp, "saving a checkpoint")
    group = together(ranks, "target", lambda: _check_target(Path(path), ddp))
    snapshot = capture(TrainingParts(ddp, optimizer), data_position=data_position, extras=extras, with_rng=False)
    state_dict = _nested(snapshot, ddp.module)
    with _torchs_errors(path, "write"):
        state_dict_saver.save(state_dict, checkpoint_id=str(path), process_group=group, no_dist=ranks.size == 1)


def _check_target(path: Path, ddp: DistributedDataParallel) -> Any:
    _check_one_group(ddp)
    if path.exists() and any(path.iterdir()):
        raise CheckpointError(
            f"{path} is not empty. torch.distributed.checkpoint overwrites in place, and a crash would leave neither the old "
            "nor the new checkpoint: write into a directory of its own."
        )
    communicator = ddp.communicator
    while isinstance(communicator, ForwardingCommunicator):
        communicator = communicator.inner
    if isinstance(communicator, ProcessGroupCommunicator):
        return communicator.process_group
    if communicator.size > 1:
        raise ConfigError(f"torch.distributed.checkpoint needs a process group, and this wrapper has {communicator!r}")
    return None


def _check_one_group(ddp: DistributedDataParallel) -> None:
    """Refuse a wrapper whose ranks hold different parameters, or parts of larger ones.

    Raises:
        ConfigError: it is one.
    """
    shapes = {name: tuple(param.shape) for name, param in ddp.module.named_parameters()}
    others = [name for name, own in ddp.identities.items() if (own.global_name, own.global_shape) != (name, shapes.get(name))]
    if others or not ddp.ranks.has_same_params:
        raise ConfigError(
            "torch.distributed.checkpoint is for wrappers whose ranks all hold the same whole parameters under their local "
            f"names. This one has the groups {name_list(list(ddp.ranks.by_name))}, and {len(others)} parameters of other names "
            "or shapes in the whole model. save_checkpoint and load_checkpoint take such wrappers."
        )


def _nested(snapshot: Snapshot, module: torch.nn.Module) -> dict[str, Any]:
    """Return a snapshot as the nested dict from which torch makes flat names."""
    by_name: dict[str, list[Piece]] = {}
    for piece in snapshot.pieces:
        if not piece.info.name.startswith("local."):
            by_name.setdefault(piece.info.name, []).append(piece)
    for alias, name in _aliases(module).items():
        if f"{Prefix.MODEL}{name}" in by_name:  # torch's state dicts have a tied weight under all its names
            by_name[f"{Prefix.MODEL}{alias}"] = by_name[f"{Prefix.MODEL}{name}"]
    tree: dict[str, Any] = {_VALUES_KEY: json.dumps(snapshot.values)}
    for name, pieces in by_name.items():
        _put(tree, name, FlatRange(pieces))
    optimizer: Any = snapshot.values["optimizer"]
    if optimizer:
        for name, number in _numbers(optimizer["state"]):
            _put(tree, name, number)
        tree.setdefault("optim", {})["param_groups"] = [
            {"params": group["params"], **{key: decode(value) for key, value in group["hyperparameters"].items()}}
            for group in optimizer["groups"]
        ]
    return tree


def _numbers(state: Any) -> Iterator[tuple[str, Any]]:
    """Return name and value of each number that is kept per parameter."""
    for one in state:
        for entry in map(entry_from_json, one["entries"]):
            if entry.kind in ("number", "tensor"):
                yield from ((state_name(name, entry.key), number_in(entry, _CPU)) for name in one["params"])


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Put a value where torch's state dicts have it: below ``model`` and ``optim``, by whole parameter names."""
    path, name = [name], _with_main_in_state(name)
    if name.startswith(Prefix.STATE):
        path = ["optim", "state", *_param_and_key(name)]
    elif name.startswith(Prefix.MODEL):
        path = name.split(".", 1)
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _with_main_in_state(name: str) -> str:
    """Return the name of a tensor where main values are in the state of their parameter, as in ``state_dict()``."""
    if not name.startswith(Prefix.MAIN):
        return name
    return state_name(name.removeprefix(Prefix.MAIN), MAIN_PARAM)


def _param_and_key(name: str) -> tuple[str, str]:
    """Return the parameter and the key of optimizer state."""
    param, _, key = name.removeprefix(Prefix.STATE).rpartition(".")
    return param, key


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters, with the first name of each."""
    first = {id(param): canonical_name(name) for name, param in module.named_parameters()}
    every = {canonical_name(name): first[id(param)] for name, param in module.named_parameters(remove_duplicate=False)}
    return {name: of_first for name, of_first in every.items() if name != of_first}


def load_dcp(
    path: Path | str,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    trusted: bool,
    cast: bool = False,
) -> LoadedCheckpoint:
    """Load a checkpoint of ``torch.distributed.checkpoint`` into a run. A collective call, between two steps.

    It takes a checkpoint of ``save_dcp``, or any with the names of torch's state dicts under ``model`` and ``optim``.

    Args:
        trusted: reading the files runs code that they contain. Say ``True`` only of files that nobody else could have written.
        cast: convert floating-point tensors to the dtypes of this run.

    Raises:
        ConfigError: ``trusted`` is not ``True``, or the ranks do not all hold the same whole parameters.
        MegabucketError: as ``load_checkpoint``; nothing was changed.
    """
    if trusted is not True:
        raise ConfigError(
            f"reading {path} would run code that its files contain: torch.distributed.checkpoint pickles its metadata. Pass "
            "trusted=True if nobody else could have written them; files of save_checkpoint need no trust."
        )
    parts = TrainingParts(ddp, optimizer)
    stored = together(GroupRanks(ddp, "loading a checkpoint"), "manifest", lambda: _open(Path(path), parts))
    return restore(stored, parts, cast=cast)


class _StoredDcp(Stored):
    """A checkpoint of ``torch.distributed.checkpoint``, read like one of this library."""

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:  # noqa: ARG002 - that format always converts
        """Fill the values of pieces; each rank reads for itself."""
        by_name: dict[str, list[Piece]] = {}
        for piece in wanted:
            by_name.setdefault(piece.info.name, []).append(piece)
        while by_name:
            # A range that is wanted twice cannot be told apart in one call.
            _load({_with_main_in_state(name): FlatRange([pieces.pop()]) for name, pieces in by_name.items()}, self.path)
            by_name = {name: pieces for name, pieces in by_name.items() if pieces}


def _open(path: Path, parts: TrainingParts) -> _StoredDcp:
    _check_one_group(parts.ddp)
    if not (path / ".metadata").exists():
        raise CheckpointError(f"{path}: it is no checkpoint of torch.distributed.checkpoint: .metadata is missing")
    try:
        for file in path.iterdir():
            check_regular(file)
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be read: {error}") from None
    tensors = {}
    read: dict[str, Any] = {}
    aliases = {f"{Prefix.MODEL}{name}" for name in _aliases(parts.ddp.module)}
    for name, found in filesystem.FileSystemReader(str(path)).read_metadata().state_dict_metadata.items():
        if not isinstance(found, metadata.TensorStorageMetadata):
            read[name] = None
        elif name not in aliases:
            shape = tuple(found.size)
            if name.startswith(Prefix.STATE) and _param_and_key(name)[1] == MAIN_PARAM:
                name = f"{Prefix.MAIN}{_param_and_key(name)[0]}"  # noqa: PLW2901 - as in a checkpoint of this library
            tensors[name] = TensorInfo(name, dtype_name(found.properties.dtype), shape, tuple(range(len(shape))))
    _load(read, path)
    if _VALUES_KEY in read:
        values = {**json.loads(read[_VALUES_KEY]), "rng_ranks": 0, "stateful": {}}
    else:
        values = values_of_state(_optimizer_values(path, parts, tensors, read))
    return _StoredDcp(path, 0, 0, tensors, values)


def _load(state_dict: dict[str, Any], path: Path) -> None:
    """Fill a state dict, on this rank alone.

    Raises:
        CheckpointError: torch cannot read a file.
    """
    with _torchs_errors(path, "read"):
        state_dict_loader.load(state_dict, checkpoint_id=str(path), no_dist=True)


@contextmanager
def _torchs_errors(path: Path | str, verb: str) -> Iterator[None]:
    """Replace torch's error, a BaseException, by one that is reported to the other ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process needs no group
        try:
            yield
        except api.CheckpointException as error:
            cause = next((cause for cause, _ in error.failures.values()), error)
            raise CheckpointError(f"{path}: torch cannot {verb} it: {type(cause).__name__}: {cause}") from error


def _optimizer_values(
    path: Path, parts: TrainingParts, tensors: Mapping[str, TensorInfo], plain: Mapping[str, Any]
) -> dict[str, Json] | None:
    """Return the groups and numbers in torch's optimizer state dict, as ``capture`` would write them."""
    groups: dict[int, dict[str, Any]] = {}
    for name, value in plain.items():
        if name.startswith(_GROUPS_PREFIX):
            index, _, key = name.removeprefix(_GROUPS_PREFIX).partition(".")
            groups.setdefault(int(index), {})[key] = value
    if not groups or parts.optimizer is None:
        return None
    shapes = {canonical_name(name): tuple(param.shape) for name, param in parts.ddp.module.named_parameters()}
    state: dict[str, dict[str, StateEntry]] = {}
    numbers: dict[str, Any] = {}
    for name, info in tensors.items():
        if name.startswith(Prefix.STATE):
            param, key = _param_and_key(name)
            state.setdefault(param, {})[key] = StateEntry(key, "elements", info.dtype)
            if info.numel == 1 and (key in KNOWN_NUMBERS or info.shape != shapes.get(param)):
                numbers[name] = torch.empty(info.shape, dtype=dtype_named(info.dtype), device="cpu")
    _load(numbers, path)
    numbers |= {name: value for name, value in plain.items() if type(value).__name__ in NUMBER_TYPES}
    for name, value in numbers.items():
        if name.startswith(Prefix.STATE):
            param, key = _param_and_key(name)
            state.setdefault(param, {})[key] = describe_number(key, value, _CPU)
    named = [([canonical_name(name) for name in group["params"]], group) for _, group in sorted(groups.items())]
    described = {param: tuple(entry for _, entry in sorted(of.items())) for param, of in state.items()}
    # Torch does not save the class of an optimizer. The tensors among hyperparameters have one element, and become plain.
    return optimizer_values(kind_of(parts.optimizer), named, described, {}, lambda _name, _tensor: None)


# Flat ranges as boxes: that format stores boxes of tensors, so a flat range becomes a few boxes, each a view of the values.


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[tuple[Dims, Dims]]:
    """Return boxes that cover the elements ``start:stop`` of a row-major tensor, each once, in flat order.

    A box is its offsets and its sizes; its elements follow one another in the flat order. At most ``2 * dimensions - 1`` of
    them (one, for a tensor without dimensions or elements).

    >>> boxes_of((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if math.prod(shape) == 0 or not shape:
        return [((0,) * len(shape), tuple(shape))]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes: list[tuple[Dims, Dims]] = []
    while start < stop:
        index = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        # The slowest dimension of which a whole slice begins here and ends within the range; of the last one any does.
        dim = next(dim for dim, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        count = min((stop - start) // strides[dim], shape[dim] - index[dim])
        boxes.append((index, (*(1 for _ in shape[:dim]), count, *shape[dim + 1 :])))
        start += count * strides[dim]
    return boxes


def _parts_of(piece: Piece) -> dict[torch.Size, torch.Tensor]:
    """Return the values of each box of a piece, in the tensor's own dimensions, by the offsets of the box."""
    order, parts, position = list(piece.info.order), {}, 0
    back = [order.index(dim) for dim in range(len(order))]
    # Flat in memory order: boxes of the tensor with its dimensions in that order.
    for offsets, sizes in boxes_of([piece.info.shape[dim] for dim in order], piece.start, piece.stop):
        numel = math.prod(sizes)
        values = piece.values.detach()[position : position + numel].view(sizes)
        parts[torch.Size(offsets[dim] for dim in back)] = values.permute(back)
        position += numel
    return parts


class FlatRange(torch.Tensor):
    """Pieces of one tensor, with the tensor's shape and without memory of its own. It can only be saved or loaded.

    Args:
        pieces: of the same tensor; they do not overlap.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _parts: dict[torch.Size, torch.Tensor]

    def __new__(cls, pieces: Sequence[Piece]) -> FlatRange:  # noqa: PYI034 - Python 3.10 has no Self
        """Make a tensor without memory."""
        info, values = pieces[0].info, pieces[0].values
        made = torch.Tensor._make_wrapper_subclass(cls, info.shape, dtype=values.dtype, device=values.device)
        made._parts = {offsets: part for piece in pieces for offsets, part in _parts_of(piece).items()}
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse to compute.

        Raises:
            TypeError: always, except for ``detach``, which torch calls before it saves.
        """
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} on a FlatRange, which stands for a part of a tensor and can only be saved or loaded")

    # The protocol of torch.distributed._checkpointable #

    def __create_write_items__(self, fqn: str, _: object) -> list[planner.WriteItem]:
        """Return its boxes, to be written."""
        properties = metadata.TensorProperties(dtype=self.dtype)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        """Return its boxes, to be read."""
        return [metadata.ChunkStorageMetadata(offsets=offsets, sizes=part.shape) for offsets, part in self._parts.items()]

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> torch.Tensor:
        """Return the values of one box."""
        return self._parts[index.offset]  # type: ignore[index]
