"""Data files, from tensors to the disk: cut to size, written and hashed in one pass.

A file is the unit of verification: who needs one element of it reads and hashes all of it. So files are bounded; pieces that
fit into one stay whole, and larger ones are cut. Hashing, writing and waiting for the disk let other threads run, so a few
files at a time overlap all three. Knows nothing of other ranks, of commits or of names of checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Final, TypeAlias

import torch

from megabucket.buffer import dtype_name
from megabucket.checkpoint.file_system import FileSystem, num_file_threads, write_file
from megabucket.checkpoint.format import ITEM_BYTES, Json, Snapshot, StoredFile, TensorInfo, encode_header
from megabucket.checkpoint.ranks import Ranks
from megabucket.units import MIB

DEFAULT_FILE_BYTES: Final = 64 * MIB
_EMPTY_HEADER_BYTES: Final = 64
# Small enough that what was hashed is still in the cache when it is written, large enough that calls cost nothing.
_CHUNK_BYTES: Final = MIB

Range: TypeAlias = tuple[TensorInfo, int, int]
"""The elements from a start to a stop of a tensor."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start:stop`` of a tensor, as they lie in a file.

    Args:
        piece: position in this rank's pieces that holds them.
    """

    info: TensorInfo
    start: int
    stop: int
    piece: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether this is all of a block, row-major, so that it can have its name and shape in the file."""
        info = self.info
        return self.stop - self.start == info.numel and info.order == tuple(range(len(info.shape)))

    @property
    def key(self) -> str:
        """The name of this part in the file."""
        return self.info.key if self.is_whole else f"{self.info.key}[{self.start}:{self.stop}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this part in the file."""
        return self.info.shape if self.is_whole else (self.stop - self.start,)

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return (self.stop - self.start) * ITEM_BYTES[self.info.dtype]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file to write, and what goes into it, in this order."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What one process puts into a checkpoint.

    Args:
        values: everything that is not a tensor; the same on every rank.
        num_writers: of how many ranks the files are.
        write: writes the files into a directory and returns what they are when they are on the disk, in their order.
    """

    values: Mapping[str, Json]
    num_writers: int
    files: Sequence[DataFile]
    write: Callable[[FileSystem, Path], list[StoredFile]]

    @property
    def bytes_bound(self) -> int:
        """No less than what the files take."""
        return sum(part.num_bytes + header_bound(part.key, part.shape) for file in self.files for part in file.parts)


# Cut


def files_of_rank(rank: int, ranges: Sequence[Range], max_file_bytes: int) -> list[DataFile]:
    """Return the files that ``rank`` writes for its ranges; see ``cut_into_files``."""
    cut = cut_into_files(ranges, max_file_bytes)
    return [DataFile(f"rank-{rank:05d}-{index:05d}.safetensors", parts) for index, parts in enumerate(cut)]


def cut_into_files(ranges: Sequence[Range], max_file_bytes: int) -> list[tuple[Part, ...]]:
    """Return the parts of each file, with the widest dtypes first so that all values are aligned.

    Raises:
        ValueError: ``max_file_bytes`` is too small for one element with its entry in the header.

    >>> info = TensorInfo("w", "float32", (100,), (0,))
    >>> [[part.key for part in file] for file in cut_into_files([(info, 0, 100)], 400)]
    [['w[0:57]'], ['w[57:100]']]
    """
    files: list[tuple[Part, ...]] = []
    parts: list[Part] = []
    keys: set[str] = set()
    room = max_file_bytes - _EMPTY_HEADER_BYTES
    for index in sorted(range(len(ranges)), key=lambda index: -ITEM_BYTES[ranges[index][0].dtype]):
        for part in _parts_that_fit(index, *ranges[index], max_file_bytes - _EMPTY_HEADER_BYTES):
            key, needed = part.key, part.num_bytes + header_bound(part.key, part.shape)
            if parts and (needed > room or key in keys):
                files.append(tuple(parts))
                parts, keys, room = [], set(), max_file_bytes - _EMPTY_HEADER_BYTES
            parts.append(part)
            keys.add(key)
            room -= needed
    return [*files, tuple(parts)] if parts else files


def header_bound(key: str, shape: Sequence[int]) -> int:
    """Return no less than what one more tensor adds to a header."""
    fields = '"dtype":"F8_E4M3","shape":"data_offsets":[,]{,,},'  # and two offsets of at most 20 digits
    return len(encode_basestring_ascii(key)) + len(str(list(shape))) + len(fields) + 42


def _parts_that_fit(index: int, info: TensorInfo, start: int, stop: int, room: int) -> Iterator[Part]:
    """Cut one piece into parts that each fit into an empty file, as few as possible."""
    whole = Part(info, start, stop, index)
    if whole.num_bytes + header_bound(whole.key, whole.shape) <= room:
        yield whole
        return
    # A key with the largest numbers that can occur bounds the keys of all parts.
    step = (room - header_bound(f"{info.key}[{stop}:{stop}]", (stop,))) // ITEM_BYTES[info.dtype]
    if step < 1:
        raise ValueError(f"max_file_bytes is {room + _EMPTY_HEADER_BYTES}, too few for one element of {info.name!r:.200}")
    for begin in range(start, stop, step):
        yield Part(info, begin, min(begin + step, stop), index)


# Write


def content_of(snapshot: Snapshot, ranks: Ranks, max_file_bytes: int) -> Content:
    """Return what this rank writes for its snapshot.

    Raises:
        ValueError: pieces that are not what they say, or that no file can hold.
    """
    pieces = snapshot.pieces
    for piece in pieces:
        values, named = piece.values, f"{piece.info.name!r} {piece.start}:{piece.stop}"
        if values.dim() != 1 or values.numel() != piece.stop - piece.start or not values.is_contiguous():
            raise ValueError(f"{named} has values of shape {tuple(values.shape)}, stride {values.stride()}")
        if dtype_name(values.dtype) != piece.info.dtype:
            raise ValueError(f"{named} says {piece.info.dtype} and has {values.dtype}")
    files = files_of_rank(ranks.rank, [(piece.info, piece.start, piece.stop) for piece in pieces], max_file_bytes)

    def values_of(part: Part) -> torch.Tensor:
        piece = pieces[part.piece]
        return piece.values[part.start - piece.start : part.stop - piece.start]

    return Content(snapshot.values, ranks.size, files, partial(write_files, files, values_of))


def write_files(
    files: Sequence[DataFile], values_of: Callable[[Part], torch.Tensor], file_system: FileSystem, directory: Path
) -> list[StoredFile]:
    """Write files, and return what they are when they are on the disk; after a failure the rest is not begun."""

    def write(file: DataFile) -> StoredFile:
        header = encode_header([(part.key, part.info.dtype, part.shape) for part in file.parts])
        digest = hashlib.sha256()

        def hashed() -> Iterator[memoryview]:
            for chunk in _chunks(header, map(values_of, file.parts)):
                digest.update(chunk)
                yield chunk

        num_bytes = write_file(file_system, directory / file.name, hashed())
        return StoredFile(file.name, num_bytes, digest.hexdigest())

    with ThreadPoolExecutor(num_file_threads(), "megabucket-save") as pool:
        return list(pool.map(write, files))


def _chunks(header: bytes, values: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Give header and values in chunks: small tensors together, large ones in slices of their own memory."""
    gathered = bytearray(header)
    for of_part in values:
        view = of_part.detach().cpu().view(torch.uint8).numpy().data
        if len(gathered) + len(view) > _CHUNK_BYTES:
            yield memoryview(gathered)
            gathered = bytearray()
        if len(view) <= _CHUNK_BYTES:
            gathered += view
        else:
            yield from (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))
    yield memoryview(gathered)
