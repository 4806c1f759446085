"""Weights from safetensors files, as Hugging Face libraries write them, into a checkpoint of weights alone.

The files carry no digests: what is damaged in a way their header does not show is taken as it is.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from megabucket.buffer import dtype_named
from megabucket.checkpoint.capture import MODEL_PREFIX, values_of_state
from megabucket.checkpoint.doors.huggingface import INDEX_NAME
from megabucket.checkpoint.header import Entry, decode_header
from megabucket.checkpoint.pieces import Piece, Snapshot, TensorInfo
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import SaveSettings, save_now
from megabucket.checkpoint.strict_json import parse_strict
from megabucket.errors import ConfigError

_MAX_INDEX_BYTES = 64 * 1024 * 1024


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
    for path in _files(Path(source)):
        for piece in _pieces(path):
            if piece.info.name in pieces:
                raise ConfigError(f"{path}: {piece.info.name.removeprefix(MODEL_PREFIX)!r} is in another file, too")
            pieces[piece.info.name] = piece
    snapshot = Snapshot([pieces[name] for name in sorted(pieces)], values_of_state())
    return save_now(Path(root), step, snapshot, AloneRanks(), settings or SaveSettings())


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    index = source / INDEX_NAME
    if not index.exists():
        return [source / "model.safetensors"]
    try:
        with index.open("rb") as file:
            found = parse_strict(file.read(_MAX_INDEX_BYTES), allow_negative=True)
        names = sorted(set(found["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: no index of safetensors files: {error}") from None
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong:
        raise ConfigError(f"{index}: {wrong[0]!r:.200} is no name of a file beside it")
    return [source / name for name in names]


def _pieces(path: Path) -> Iterator[Piece]:
    try:
        with path.open("rb") as file:
            # Private: nothing of it is ever written back. It is closed when no tensor looks into it any more.
            contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        entries = decode_header(memoryview(contents), len(contents))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no safetensors file: {error}") from None
    for name, entry in entries.items():
        info = TensorInfo(f"{MODEL_PREFIX}{name}", entry.dtype, entry.shape, tuple(range(len(entry.shape))))
        yield Piece(info, 0, info.numel, _flat(contents, entry, info))


def _flat(contents: mmap.mmap, entry: Entry, info: TensorInfo) -> torch.Tensor:
    dtype = dtype_named(info.dtype)
    if info.numel == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(contents, dtype=torch.uint8, count=entry.stop_byte - entry.start_byte, offset=entry.start_byte)
    return (raw if entry.start_byte % dtype.itemsize == 0 else raw.clone()).view(dtype)
