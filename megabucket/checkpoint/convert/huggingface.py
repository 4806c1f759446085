"""Weights as Hugging Face libraries keep them, safetensors files and, for several, an index: out of a checkpoint and into one.

Reads and writes file by file, without a model and without other ranks: the memory peak is one file. These files carry no
digests: what is damaged in a way their header does not show is taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megabucket.buffer import dtype_named
from megabucket.checkpoint.canonical import whole_piece
from megabucket.checkpoint.capture import MODEL_PREFIX, values_of_state
from megabucket.checkpoint.file_system import check_regular
from megabucket.checkpoint.format import ITEM_BYTES, Piece, Snapshot
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.restore import Staging, source_of
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.checkpoint.stored import Stored
from megabucket.errors import ConfigError

DEFAULT_FILE_BYTES: Final = 5 * 10**9
INDEX_NAME: Final = "model.safetensors.index.json"


def export_weights(
    stored: Stored,
    directory: Path | str,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    rename: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the weights and module buffers of a checkpoint, and return the files.

    One file is called ``model.safetensors``; several get numbers, and an index that says which weight is where. A tied weight
    is there once, under its first name, as ``transformers`` itself saves it. Files of an earlier export are replaced when all
    of this one were written under names that end in ``.tmp``.

    Args:
        stored: from ``megabucket.open_checkpoint``.
        dtype: convert floating-point tensors to it, from the main parameters where they are closer to it.
        max_file_bytes: a file is closed before it exceeds this; a larger tensor has one of its own.
        rename: names to be changed, without ``model.``.

    Raises:
        ConfigError: two tensors would have the same name.
        CheckpointInvalidError: a file of the checkpoint is not what was written.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    names = _renamed(stored, rename or {})
    files = list(_plan_files(stored, names, dtype, max_file_bytes))
    weight_map: dict[str, str] = {}
    written: list[tuple[Path, Path]] = []
    total_bytes = 0
    for index, chosen in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        staging = Staging(stored)
        tensors = {names[source]: _want(staging, source, dtype) for source in chosen}
        staging.read()
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        temporary = directory / f"{name}.tmp"
        save_file(tensors, temporary, metadata={"format": "pt"})
        written.append((temporary, directory / name))
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if len(files) > 1:
        text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
        temporary = directory / f"{INDEX_NAME}.tmp"
        temporary.write_text(text + "\n", encoding="utf-8")
        written.append((temporary, directory / INDEX_NAME))
    for temporary, path in written:
        temporary.replace(path)
    paths = [path for _, path in written]
    for stale in [*directory.glob("model.safetensors"), *directory.glob("model-*-of-*.safetensors"), directory / INDEX_NAME]:
        if stale not in paths:  # a reader would take it, or some of it
            stale.unlink(missing_ok=True)
    return paths


def _renamed(stored: Stored, rename: Mapping[str, str]) -> dict[str, str]:
    """Return the name in the export of each tensor of the model, by its name without ``model.``."""
    own = [name.removeprefix(MODEL_PREFIX) for name in stored.tensors if name.startswith(MODEL_PREFIX)]
    names = {name: rename.get(name, name) for name in own}
    if len(set(names.values())) < len(names):
        twice = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
        raise ConfigError(f"several tensors would be exported under one name: {', '.join(twice[:5])}")
    return names


def _want(staging: Staging, name: str, dtype: torch.dtype | None) -> torch.Tensor:
    info = staging.stored.tensors[f"{MODEL_PREFIX}{name}"]
    own = dtype_named(info.dtype)
    if dtype is None or dtype == own or not own.is_floating_point:
        return staging.want_stored(f"{MODEL_PREFIX}{name}")
    like = torch.empty(info.shape, dtype=dtype)
    return staging.want_like(source_of(staging.stored.tensors, name, dtype), like)


def _plan_files(
    stored: Stored, names: Mapping[str, str], dtype: torch.dtype | None, max_file_bytes: int
) -> Iterator[list[str]]:
    """Return which tensors go into which file, in the order of their names."""
    chosen: list[str] = []
    num_bytes = 0
    for name in sorted(names):
        info = stored.tensors[f"{MODEL_PREFIX}{name}"]
        is_converted = dtype is not None and dtype_named(info.dtype).is_floating_point
        item_bytes = dtype.itemsize if is_converted and dtype is not None else ITEM_BYTES[info.dtype]
        if chosen and num_bytes + info.numel * item_bytes > max_file_bytes:
            yield chosen
            chosen, num_bytes = [], 0
        chosen.append(name)
        num_bytes += info.numel * item_bytes
    yield chosen


def import_weights(source: Path | str, root: Path | str, *, step: int = 0, settings: SaveSettings | None = None) -> Path:
    """Write the weights of a safetensors file, or of a directory of them, as a checkpoint, and return its directory.

    It has no optimizer state: load it with ``optimizer=None``. Files are mapped into memory, not read into it.

    Args:
        source: a file, or a directory with ``model.safetensors`` or an index that names the files.

    Raises:
        ConfigError: a file cannot be read, is no safetensors file, or has a tensor that another has, too.
        CheckpointNotSavedError: the checkpoint cannot be written.
    """
    pieces: dict[str, Piece] = {}
    for path, names in _files(Path(source)).items():
        found = {piece.info.name: piece for piece in _pieces(path)}
        for name in sorted(found.keys() & pieces.keys()):
            raise ConfigError(f"{path}: {name.removeprefix(MODEL_PREFIX)!r} is in another file, too")
        for name in names:
            if f"{MODEL_PREFIX}{name}" not in found:
                raise ConfigError(f"{path}: {name!r} is not in it, and {INDEX_NAME} says so")
        pieces |= found
    snapshot = Snapshot([pieces[name] for name in sorted(pieces)], values_of_state())
    return save_snapshot(root, step, snapshot, AloneRanks(), settings)


def _files(source: Path) -> dict[Path, list[str]]:
    """Return the files, and the tensors that an index says are in each."""
    if not source.is_dir():
        return {source: []}
    index = source / INDEX_NAME
    if not index.exists():
        return {source / "model.safetensors": []}
    check_regular(index, ConfigError)
    found: dict[str, list[str]] = {}
    try:
        for tensor, name in json.loads(index.read_bytes())["weight_map"].items():
            found.setdefault(name, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: no index of safetensors files: {error}") from None
    wrong = [name for name in found if not isinstance(name, str) or Path(name).name != name]
    if wrong:
        raise ConfigError(f"{index}: {wrong[0]!r:.200} is no name of a file beside it")
    return {source / name: found[name] for name in sorted(found)}


def _pieces(path: Path) -> Iterator[Piece]:
    check_regular(path, ConfigError)
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                yield whole_piece(f"{MODEL_PREFIX}{name}", file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: no safetensors file: {error}") from None
