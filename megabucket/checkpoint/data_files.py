"""Data files, from tensors to the disk: cut to size, written and hashed in one pass.

A file is the unit of verification: to read one element, all of its file is read and hashed. So files are bounded; a piece that
fits into one file stays whole, and a larger one is cut. Hashing, writing and waiting for the disk release the GIL, so a few
files at a time overlap all three. Knows nothing of other ranks, of commits or of names of checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from megabucket.buffer import dtype_name
from megabucket.checkpoint.file_system import NUM_FILE_THREADS, FileSystem
from megabucket.checkpoint.format import ITEM_BYTES, Json, Piece, Snapshot, StoredFile, encode_header
from megabucket.checkpoint.ranks import Ranks
from megabucket.units import MIB

DEFAULT_FILE_BYTES: Final = 64 * MIB
HEADER_BYTES: Final = 512
"""More than a piece usually adds to a header."""
# Small enough that a hashed chunk is still in the cache when it is written, large enough that calls cost nothing.
_CHUNK_BYTES: Final = MIB


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The part of a checkpoint that one process writes.

    Args:
        values: everything that is not a tensor; the same on every rank.
        num_writers: how many ranks the files are written for.
        files: the pieces in each file, by its name.
        make: returns the pieces with their values when their file is about to be written; left out, they have them already.
    """

    values: Mapping[str, Json]
    num_writers: int
    files: Mapping[str, Sequence[Piece]]
    make: Callable[[Sequence[Piece]], Sequence[Piece]] = list

    @property
    def num_bytes(self) -> int:
        """The approximate size of the files."""
        return sum(piece.num_bytes + HEADER_BYTES for pieces in self.files.values() for piece in pieces)

    def write(self, file_system: FileSystem, directory: Path) -> list[StoredFile]:
        """Write the files, and return them when they are on the disk; after a failure the rest is not started."""

        def write(name: str) -> StoredFile:
            pieces, digest = self.make(self.files[name]), hashlib.sha256()

            def hashed() -> Iterator[memoryview]:
                for chunk in _chunks(encode_header(pieces), (piece.values for piece in pieces)):
                    digest.update(chunk)
                    yield chunk

            num_bytes = file_system.write_file(directory / name, hashed())
            return StoredFile(name, num_bytes, digest.hexdigest())

        with ThreadPoolExecutor(NUM_FILE_THREADS, "megabucket-save") as pool:
            return list(pool.map(write, self.files))


def content_of(snapshot: Snapshot, ranks: Ranks, max_file_bytes: int) -> Content:
    """Return the files that this rank writes for its snapshot.

    Raises:
        ValueError: a piece has a dtype that no file can hold, or other values than it says.
    """
    for piece in snapshot.pieces:
        values, dtype = piece.values, piece.info.dtype
        is_flat = values.shape == (piece.stop - piece.start,) and values.is_contiguous()
        if not is_flat or dtype_name(values.dtype) != dtype or dtype not in ITEM_BYTES:
            raise ValueError(
                f"{piece.info.name!r} {piece.start}:{piece.stop} of {dtype} has values of shape {tuple(values.shape)}, stride "
                f"{values.stride()}, {values.dtype}; a file can hold flat values of {', '.join(ITEM_BYTES)}"
            )
    return Content(snapshot.values, ranks.size, cut_into_files(ranks.rank, snapshot.pieces, max_file_bytes))


def cut_into_files(writer: int, pieces: Iterable[Piece], max_file_bytes: int) -> dict[str, list[Piece]]:
    """Return the pieces of each file that a rank writes, with the widest dtypes first so that all values are aligned.

    Args:
        max_file_bytes: bound on the values in a file, unless one element is larger.
    """
    files: list[list[Piece]] = []
    keys: set[str] = set()
    room = 0
    for piece in sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.info.dtype]):
        step = max(1, max_file_bytes // ITEM_BYTES[piece.info.dtype])
        for start in range(piece.start, max(piece.stop, piece.start + 1), step):
            stop = min(start + step, piece.stop)
            part = Piece(piece.info, start, stop, piece.values[start - piece.start : stop - piece.start])
            if not files or part.num_bytes > room or part.key in keys:
                files.append([])
                keys, room = set(), max_file_bytes
            files[-1].append(part)
            keys.add(part.key)
            room -= part.num_bytes
    return {f"rank-{writer:05d}-{index:05d}.safetensors": parts for index, parts in enumerate(files)}


def _chunks(header: bytes, values: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Yield header and values in chunks: small tensors together, large ones in slices of their own memory."""
    gathered = bytearray(header)
    for of_piece in values:
        view = of_piece.detach().cpu().view(torch.uint8).numpy().data
        if len(gathered) + len(view) > _CHUNK_BYTES:
            yield memoryview(gathered)
            gathered = bytearray()
        if len(view) <= _CHUNK_BYTES:
            gathered += view
        else:
            yield from (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))
    yield memoryview(gathered)
