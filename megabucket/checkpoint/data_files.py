"""One rank's data files: written and hashed in one pass over the values.

Owns the way from tensors to bytes on the disk; knows nothing of other ranks, of commits or of names of checkpoints.
Hashing, writing and waiting for the disk let other threads run, so a few files at a time overlap all three.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megabucket.buffer import dtype_name
from megabucket.checkpoint.cut import FileCutter, Part
from megabucket.checkpoint.file_system import FileSystem, num_file_threads, write_all
from megabucket.checkpoint.header import encode_header
from megabucket.checkpoint.manifest import StoredFile
from megabucket.checkpoint.pieces import Json, Piece, Snapshot
from megabucket.units import MIB

# Small enough that what was hashed is still in the cache when it is written, large enough that calls cost nothing.
_CHUNK_BYTES = MIB


class FileFailedError(Exception):
    """What went wrong with which file; for votes, never for users."""

    def __init__(self, path: Path, cause: Exception) -> None:
        self.path, self.cause = path, cause
        super().__init__(str(cause))


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file to write, and what goes into it, in this order."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What one rank puts into a checkpoint.

    Args:
        values: everything that is not a tensor; the same on every rank.
        write: writes the files into a directory and returns what they are when they are on the disk, in their order;
            raises ``FileFailedError``.
        num_writers: of how many ranks the files are.
        bytes_bound: no less than what the files take.
    """

    values: Mapping[str, Json]
    files: Sequence[DataFile]
    write: Callable[[FileSystem, Path], list[StoredFile]]
    num_writers: int
    bytes_bound: int


def content_of(snapshot: Snapshot, *, rank: int, size: int, cutter: FileCutter) -> Content:
    """Return what ``rank`` of ``size`` writes for its snapshot.

    Raises:
        ValueError: pieces that are not what they say, or that no file can hold.
    """
    pieces = snapshot.pieces
    _check_values(pieces)
    cut = cutter.cut([(piece.info, piece.start, piece.stop) for piece in pieces])
    files = [DataFile(file_name(rank, index), parts) for index, parts in enumerate(cut)]
    return Content(snapshot.values, files, partial(_write_files, files, pieces), size, cutter.bytes_bound)


def file_name(rank: int, index: int) -> str:
    """Return the name of the ``index``-th file of ``rank``."""
    return f"rank-{rank:05d}-{index:05d}.safetensors"


def _check_values(pieces: Sequence[Piece]) -> None:
    """Raise ``ValueError`` for a piece whose values are not what it says."""
    for piece in pieces:
        values = piece.values
        if values.dim() != 1 or values.numel() != piece.stop - piece.start or not values.is_contiguous():
            raise ValueError(f"{_named(piece)} has values of shape {tuple(values.shape)}, stride {values.stride()}")
        if dtype_name(values.dtype) != piece.info.dtype:
            raise ValueError(f"{_named(piece)} says {piece.info.dtype} and has {values.dtype}")


def _named(piece: Piece) -> str:
    return f"{piece.info.name!r} {piece.start}:{piece.stop}"


def _write_files(
    files: Sequence[DataFile], pieces: Sequence[Piece], file_system: FileSystem, directory: Path
) -> list[StoredFile]:
    """Write all files of this rank; after a failure those that had not begun are left out."""
    gave_up = threading.Event()

    def write(file: DataFile) -> StoredFile | None:
        if gave_up.is_set():
            return None
        path = directory / file.name
        try:
            return _write_file(file_system, path, file.parts, pieces)
        except Exception as error:
            gave_up.set()
            raise FileFailedError(path, error) from error

    if len(files) <= 1:
        written = [write(file) for file in files]
    else:
        with ThreadPoolExecutor(min(num_file_threads(), len(files)), "megabucket-save") as pool:
            written = list(pool.map(write, files))
    return [file for file in written if file is not None]


def _write_file(file_system: FileSystem, path: Path, parts: Sequence[Part], pieces: Sequence[Piece]) -> StoredFile:
    header = encode_header([(part.key, part.info.dtype, part.shape) for part in parts])
    digest, num_bytes = hashlib.sha256(), 0
    descriptor = file_system.create(path)
    try:
        for chunk in _chunks(header, parts, pieces):
            digest.update(chunk)
            write_all(file_system, descriptor, chunk)
            num_bytes += len(chunk)
        file_system.sync(descriptor)
    finally:
        file_system.close(descriptor)
    return StoredFile(path.name, num_bytes, digest.hexdigest())


def _chunks(header: bytes, parts: Sequence[Part], pieces: Sequence[Piece]) -> Iterator[memoryview]:
    """Give header and values in chunks: small tensors together, large ones in slices of their own memory."""
    gathered = bytearray(header)
    for part in parts:
        piece = pieces[part.piece]
        view = _bytes_of(piece.values[part.start - piece.start : part.stop - piece.start])
        if len(gathered) + len(view) <= _CHUNK_BYTES:
            gathered += view
            continue
        yield memoryview(gathered)
        gathered = bytearray()
        if len(view) <= _CHUNK_BYTES:
            gathered += view
            continue
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]
    yield memoryview(gathered)


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the memory of 1D values, as it is on a CPU, copied from elsewhere."""
    return values.detach().cpu().view(torch.uint8).numpy().data
