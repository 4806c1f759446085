"""To and from ``torch.distributed.checkpoint``: canonical tensors under the names that torch's own state dicts have.

What is written here, FSDP2, plain torch and torch's converters read, on any number of ranks; what they write is read here.

That format runs code: its metadata, and every value that is no tensor, are pickles. It verifies nothing: of flipped bits most
are read without a word. So convert only files whose origin you trust; a run is kept by ``save_checkpoint``.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import canonical_name
from megabucket.checkpoint.capture import (
    MAIN_PREFIX,
    MODEL_PREFIX,
    STATE_PREFIX,
    TrainingParts,
    capture,
    inner_of,
    optimizer_values,
    state_name,
    values_of_state,
)
from megabucket.checkpoint.file_system import check_regular
from megabucket.checkpoint.format import Json, Piece, Snapshot, TensorInfo
from megabucket.checkpoint.ranks import GroupRanks, check_one_group, together
from megabucket.checkpoint.restore import LoadedCheckpoint, restore
from megabucket.checkpoint.stored import Stored
from megabucket.checkpoint.values import decode
from megabucket.comm import ProcessGroupCommunicator, SameHostCommunicator
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointError, ConfigError
from megabucket.optim.state_dict import KNOWN_NUMBERS, NUMBER_TYPES, StateEntry, describe_number, entry_from_json, number_in

_VALUES_KEY: Final = "megabucket.values"
_GROUPS_PREFIX: Final = "optim.param_groups."


def save_dcp(
    path: Path | str,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    data_position: Any = None,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of ``torch.distributed.checkpoint``. A collective call, between two steps.

    What ``{"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}`` asks for is there: each rank writes
    its shards as boxes of whole tensors. Beside it, main parameters under ``optim.main.`` and plain values as text.

    Args:
        path: a directory that is empty or not there: that format cannot replace a checkpoint safely.

    Raises:
        CheckpointError: the directory holds something, on some rank, or torch cannot write.
        ConfigError: the wrapper's ranks are no process group, or do not all hold the same whole parameters.
        MegabucketError: as ``save_checkpoint``.
    """
    ranks = GroupRanks(ddp, "saving a checkpoint")
    group = together(ranks, lambda: _check_target(Path(path), ddp))
    snapshot = capture(TrainingParts(ddp, optimizer), data_position=data_position, extras=extras, with_rng=False)
    state_dict = _nested(snapshot, ddp.module)
    with _torchs_errors(path, "write"):
        save(state_dict, checkpoint_id=str(path), process_group=group, no_dist=ranks.size == 1)


def _check_target(path: Path, ddp: DistributedDataParallel) -> Any:
    check_one_group(ddp, "torch.distributed.checkpoint")
    if path.exists() and any(path.iterdir()):
        raise CheckpointError(
            f"{path} is not empty. torch.distributed.checkpoint overwrites in place, and a crash would leave neither the old "
            "nor the new checkpoint: write into a directory of its own."
        )
    communicator = ddp.communicator
    if isinstance(communicator, ProcessGroupCommunicator | SameHostCommunicator):
        return communicator.process_group
    if communicator.size > 1:
        raise ConfigError(f"torch.distributed.checkpoint needs a process group, and this wrapper has {communicator!r}")
    return None


def _nested(snapshot: Snapshot, module: torch.nn.Module) -> dict[str, Any]:
    """Return a snapshot as the nested dict of which torch makes flat names."""
    by_name: dict[str, list[Piece]] = {}
    for piece in snapshot.pieces:
        if not piece.info.name.startswith("local."):
            by_name.setdefault(piece.info.name, []).append(piece)
    for alias, name in _aliases(module).items():
        if f"{MODEL_PREFIX}{name}" in by_name:  # torch's state dicts have a tied weight under all its names
            by_name[f"{MODEL_PREFIX}{alias}"] = by_name[f"{MODEL_PREFIX}{name}"]
    tree: dict[str, Any] = {}
    for name, pieces in by_name.items():
        _put(tree, name, FlatRange(pieces))
    optimizer: Any = snapshot.values["optimizer"]
    if optimizer:
        for name, key, number in _numbers(optimizer["state"]):
            _put(tree, state_name(name, key), number)
        _put(tree, "optim.param_groups", [_param_group(group) for group in optimizer["groups"]])
    _put(tree, _VALUES_KEY, json.dumps(snapshot.values))
    return tree


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Put a value where torch's state dicts have it: below ``model`` and ``optim``, by whole parameter names."""
    path = [name]
    if name.startswith(STATE_PREFIX):
        param, _, key = name.removeprefix(STATE_PREFIX).rpartition(".")
        path = ["optim", "state", param, key]
    elif name.startswith((MODEL_PREFIX, "optim.", "megabucket.")):
        path = name.split(".", 2 if name.startswith(MAIN_PREFIX) else 1)
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _numbers(state: Any) -> Iterator[tuple[str, str, Any]]:
    """Return parameter, key and value of what is kept per parameter."""
    for one in state:
        for entry in map(entry_from_json, one["entries"]):
            if entry.kind in ("number", "tensor"):
                yield from ((name, entry.key, number_in(entry, torch.device("cpu"))) for name in one["params"])


def _param_group(group: Any) -> dict[str, Any]:
    return {"params": list(group["params"]), **{key: decode(value) for key, value in group["hyperparameters"].items()}}


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
    """Put a checkpoint of ``torch.distributed.checkpoint`` into a run. A collective call, between two steps.

    One that ``save_dcp`` wrote, or anybody's with the names of torch's state dicts under ``model`` and ``optim``.

    Args:
        trusted: reading the files runs code that they contain. Say ``True`` only of files that nobody else could have written.
        cast: floating-point tensors may be converted to what they are here.

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
    stored = together(GroupRanks(ddp, "loading a checkpoint"), lambda: _open(Path(path), parts))
    return restore(stored, parts, cast=cast)


class _StoredDcp(Stored):
    """A checkpoint of ``torch.distributed.checkpoint``, as one of this library."""

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:  # noqa: ARG002 - that format always converts
        """Fill the values of pieces; each rank reads for itself."""
        by_name: dict[str, list[Piece]] = {}
        for piece in wanted:
            by_name.setdefault(piece.info.name, []).append(piece)
        while by_name:
            # A range that is wanted twice cannot be told apart in one go.
            ranges: dict[str, Any] = {name: FlatRange([pieces.pop()]) for name, pieces in by_name.items()}
            _load(ranges, self.path)
            by_name = {name: pieces for name, pieces in by_name.items() if pieces}


def _open(path: Path, parts: TrainingParts) -> _StoredDcp:
    check_one_group(parts.ddp, "torch.distributed.checkpoint")
    if not (path / ".metadata").exists():
        raise CheckpointError(f"{path}: it is no checkpoint of torch.distributed.checkpoint: .metadata is missing")
    for file in path.iterdir():
        check_regular(file, CheckpointError)
    metadata = FileSystemReader(str(path)).read_metadata()
    tensors, plain = {}, []
    aliases = {f"{MODEL_PREFIX}{name}" for name in _aliases(parts.ddp.module)}
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, BytesStorageMetadata):
            plain.append(name)
        elif isinstance(found, TensorStorageMetadata) and name not in aliases:
            shape = tuple(found.size)
            tensors[name] = TensorInfo(name, dtype_name(found.properties.dtype), shape, tuple(range(len(shape))))
    read: dict[str, Any] = dict.fromkeys(plain)
    _load(read, path)
    if _VALUES_KEY in read:
        values = {**json.loads(read[_VALUES_KEY]), "rng_ranks": 0, "stateful": {}}
        return _StoredDcp(path, 0, 0, tensors, values)
    return _StoredDcp(path, 0, 0, tensors, values_of_state(_optimizer_values(path, parts, tensors, read)))


def _load(state_dict: dict[str, Any], path: Path) -> None:
    """Fill a state dict, on this rank alone.

    Raises:
        CheckpointError: torch cannot read a file.
    """
    with _torchs_errors(path, "read"):
        load(state_dict, checkpoint_id=str(path), no_dist=True)


@contextmanager
def _torchs_errors(path: Path | str, verb: str) -> Iterator[None]:
    """Make an error of ours of torch's, a BaseException, of which the other ranks would never learn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process needs no group
        try:
            yield
        except CheckpointException as error:
            cause = next((cause for cause, _ in error.failures.values()), error)
            raise CheckpointError(f"{path}: torch cannot {verb} it: {type(cause).__name__}: {cause}") from error


def _optimizer_values(
    path: Path, parts: TrainingParts, tensors: Mapping[str, TensorInfo], plain: Mapping[str, Any]
) -> dict[str, Json] | None:
    """Return what torch's optimizer state dict says beside values per element, as ``capture`` would say it."""
    groups: dict[int, dict[str, Any]] = {}
    for name, value in plain.items():
        if name.startswith(_GROUPS_PREFIX):
            index, _, key = name.removeprefix(_GROUPS_PREFIX).partition(".")
            groups.setdefault(int(index), {})[key] = value
    if not groups or parts.optimizer is None:
        return None
    shapes = {canonical_name(name): tuple(param.shape) for name, param in parts.ddp.module.named_parameters()}
    held: dict[str, dict[str, StateEntry]] = {}
    numbers: dict[str, torch.Tensor] = {}
    for name, info in tensors.items():
        if name.startswith(STATE_PREFIX):
            param, _, key = name.removeprefix(STATE_PREFIX).rpartition(".")
            held.setdefault(param, {})[key] = StateEntry(key, "elements", info.dtype)
            if info.numel == 1 and (key in KNOWN_NUMBERS or info.shape != shapes.get(param)):
                numbers[name] = torch.empty(info.shape, dtype=dtype_named(info.dtype))
    _load(numbers, path)
    found = {**numbers, **{name: value for name, value in plain.items() if name.startswith(STATE_PREFIX)}}
    for name, value in found.items():
        param, _, key = name.removeprefix(STATE_PREFIX).rpartition(".")
        if isinstance(value, torch.Tensor) or type(value).__name__ in NUMBER_TYPES:
            held.setdefault(param, {})[key] = describe_number(key, value, torch.device("cpu"))
    named = [([canonical_name(name) for name in group["params"]], group) for _, group in sorted(groups.items())]
    described = {param: tuple(entry for _, entry in sorted(of.items())) for param, of in held.items()}
    # Torch does not say of which class its state is. The tensors among hyperparameters have one element, and become plain.
    return optimizer_values(type(inner_of(parts.optimizer)).__name__, named, described, {}, lambda _name, _tensor: None)


# Flat ranges as boxes: that format stores boxes of tensors, so a flat range becomes a few, each a view of the values.


class Box(NamedTuple):
    """A box of a tensor: its elements follow one another in the flat order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return boxes that cover the elements ``start:stop`` of a row-major tensor, each once, in flat order.

    At most ``2 * dimensions - 1`` of them (one, for a tensor without dimensions or elements).

    >>> [(box.offsets, box.sizes) for box in boxes_of((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if math.prod(shape) == 0 or not shape:
        return [Box((0,) * len(shape), tuple(shape))]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes = []
    while start < stop:
        index = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        # The slowest dimension of which a whole slice begins here and ends within the range; of the last one any does.
        dim = next(dim for dim, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        count = min((stop - start) // strides[dim], shape[dim] - index[dim])
        boxes.append(Box(index, (*(1 for _ in shape[:dim]), count, *shape[dim + 1 :])))
        start += count * strides[dim]
    return boxes


class _Part(NamedTuple):
    """A box of the tensor, in its own dimensions, and its values."""

    offsets: torch.Size
    values: torch.Tensor


def _parts_of(piece: Piece) -> list[_Part]:
    order, parts, position = list(piece.info.order), [], 0
    back = [order.index(dim) for dim in range(len(order))]
    # Flat in memory order: boxes of the tensor with its dimensions in that order.
    for box in boxes_of([piece.info.shape[dim] for dim in order], piece.start, piece.stop):
        numel = math.prod(box.sizes)
        values = piece.values.detach()[position : position + numel].view(box.sizes).permute(back)
        parts.append(_Part(torch.Size(box.offsets[dim] for dim in back), values))
        position += numel
    return parts


class FlatRange(torch.Tensor):
    """Pieces of one tensor, of the tensor's shape and without memory of its own: only good to be saved or loaded.

    Args:
        pieces: of the same tensor; they do not overlap.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _parts: list[_Part]

    def __new__(cls, pieces: Sequence[Piece]) -> FlatRange:  # noqa: PYI034 - Python 3.10 has no Self
        """Make a tensor without memory."""
        info, values = pieces[0].info, pieces[0].values
        made = torch.Tensor._make_wrapper_subclass(cls, info.shape, dtype=values.dtype, device=values.device)
        made._parts = [part for piece in pieces for part in _parts_of(piece)]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse to compute.

        Raises:
            TypeError: always, but for being looked at.
        """
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} on a FlatRange, which stands for a part of a tensor and is only good to be saved or loaded")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatRange({len(self._parts)} boxes of {tuple(self.shape)}, {self.dtype})"

    def _properties(self) -> TensorProperties:
        return TensorProperties(dtype=self.dtype)

    # The protocol of torch.distributed._checkpointable #

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return what is to be written of it."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, part.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=part.offsets, sizes=part.values.shape),
                    properties=self._properties(),
                    size=self.shape,
                ),
            )
            for part in self._parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return which boxes of it are wanted."""
        return [ChunkStorageMetadata(offsets=part.offsets, sizes=part.values.shape) for part in self._parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of one box."""
        return next(part.values for part in self._parts if part.offsets == index.offset)
