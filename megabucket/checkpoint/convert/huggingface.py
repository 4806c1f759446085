"""Weights as Hugging Face libraries keep them: safetensors files and, for several, an index; from a checkpoint and into one.

Reads and writes file by file, without a model and without other ranks: the memory peak is one file. These files carry no
digests: damage that their header does not show is not found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megabucket.buffer import dtype_named
from megabucket.checkpoint.canonical import whole_piece
from megabucket.checkpoint.capture import Prefix, values_of_state
from megabucket.checkpoint.file_system import check_regular
from megabucket.checkpoint.format import Piece, Snapshot
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.restore import PendingLoad, source_of
from megabucket.checkpoint.save import SaveSettings, save_snapshot
from megabucket.checkpoint.stored import Stored
from megabucket.errors import ConfigError

DEFAULT_FILE_BYTES: Final = 5 * 10**9
FILE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"


def export_weights(
    stored: Stored, directory: Path | str, *, dtype: torch.dtype | None = None, max_file_bytes: int = DEFAULT_FILE_BYTES
) -> list[Path]:
    """Write the weights and module buffers of a checkpoint, and return the files.

    One file is called ``model.safetensors``; several get numbers, and an index that maps weights to files. A tied weight
    is there once, under its first name, as ``transformers`` itself saves it. Files of an earlier export are replaced once all
    files of this one are written, under names that end in ``.tmp``.

    Args:
        stored: from ``megabucket.open_checkpoint``.
        dtype: convert floating-point tensors to it, from the main parameters where they are closer to it.
        max_file_bytes: a file is closed before it exceeds this; a larger tensor has one of its own.

    Raises:
        CheckpointInvalidError: a file of the checkpoint is damaged.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, torch.dtype]] = [{}]
    room = max_file_bytes
    for name, info in sorted(stored.tensors.items()):
        if name.startswith(Prefix.MODEL):
            there = dtype_named(info.dtype)
            wanted = dtype if dtype is not None and there.is_floating_point else there
            num_bytes = info.numel * wanted.itemsize
            if files[-1] and num_bytes > room:
                files.append({})
                room = max_file_bytes
            files[-1][name.removeprefix(Prefix.MODEL)] = wanted
            room -= num_bytes
    names = [FILE_NAME]
    if len(files) > 1:
        names = [f"model-{index + 1:05d}-of-{len(files):05d}.safetensors" for index in range(len(files))]
    total_bytes = 0
    for name, chosen in zip(names, files, strict=True):
        pending = PendingLoad(stored)
        tensors = {}
        for weight, wanted in chosen.items():
            like = torch.empty(stored.tensors[f"{Prefix.MODEL}{weight}"].shape, dtype=wanted, device="cpu")
            tensors[weight] = pending.want_like(source_of(stored.tensors, weight, wanted), like)
        pending.read()
        # transformers loads a file only if it names the framework
        save_file(tensors, directory / f"{name}.tmp", metadata={"format": "pt"})
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        weight_map = {weight: name for name, chosen in zip(names, files, strict=True) for weight in chosen}
        names.append(INDEX_NAME)
        text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
        (directory / f"{INDEX_NAME}.tmp").write_text(text + "\n", encoding="utf-8")
    paths = [(directory / f"{name}.tmp").replace(directory / name) for name in names]
    for stale in [directory / FILE_NAME, *directory.glob("model-*-of-*.safetensors"), directory / INDEX_NAME]:
        if stale not in paths:  # a reader would load it
            stale.unlink(missing_ok=True)
    return paths


def import_weights(source: Path | str, root: Path | str, *, step: int = 0, settings: SaveSettings | None = None) -> Path:
    """Write the weights of a safetensors file, or of a directory of them, as a checkpoint, and return its directory.

    It has no optimizer state: load it with ``optimizer=None``. Files are mapped into memory, not read into it.

    Args:
        source: a file, or a directory with ``model.safetensors`` or an index that names the files.

    Raises:
        ConfigError: a file cannot be read, is no safetensors file, or lacks a tensor that the index promises.
        CheckpointNotSavedError: the checkpoint cannot be written.
    """
    pieces = [piece for path, names in _files(Path(source)).items() for piece in _pieces(path, names)]
    return save_snapshot(root, step, Snapshot(pieces, values_of_state()), AloneRanks(), settings)


def _files(source: Path) -> dict[Path, list[str]]:
    """Return the files, and the tensors that an index says are in each."""
    if not source.is_dir():
        return {source: []}
    index = source / INDEX_NAME
    if not index.exists():
        return {source / FILE_NAME: []}
    found: dict[str, list[str]] = {}
    try:
        check_regular(index)
        for tensor, name in json.loads(index.read_bytes())["weight_map"].items():
            found.setdefault(name, []).append(tensor)
        elsewhere = [name for name in found if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: no index of safetensors files: {error}") from None
    if elsewhere:
        raise ConfigError(f"{index}: {elsewhere[0]!r} is no name of a file beside it")
    if not found:
        raise ConfigError(f"{index}: it names no tensor")
    return {source / name: tensors for name, tensors in found.items()}


def _pieces(path: Path, names: list[str]) -> Iterator[Piece]:
    try:
        check_regular(path)
        with safe_open(path, "pt") as file:
            for name in names or file.keys():
                yield whole_piece(f"{Prefix.MODEL}{name}", file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: no safetensors file: {error}") from None
