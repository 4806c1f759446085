"""Write a checkpoint again for another number of ranks or another file size, without a model and in little memory.

Any number of ranks can load any checkpoint; what this gains is that each of ``num_writers`` ranks then finds what it needs
in few files. Source files are read once, verified, and their parts put to their places in the new files, which are hashed
when they are complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megabucket.checkpoint.cut import Part, bytes_bound, cut_into_files
from megabucket.checkpoint.data_files import Content, DataFile, FileFailedError, file_name
from megabucket.checkpoint.dtypes import ITEM_BYTES
from megabucket.checkpoint.file_system import FileSystem, num_file_threads, write_all
from megabucket.checkpoint.header import encode_header
from megabucket.checkpoint.manifest import StoredFile
from megabucket.checkpoint.pieces import TensorInfo
from megabucket.checkpoint.plan import Copy, WantedRange
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import SaveSettings, save_content
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.units import MIB

_CHUNK_BYTES = MIB


def reshard(source: StoredCheckpoint, root: Path | str, *, num_writers: int, settings: SaveSettings) -> Path:
    """Write what ``source`` holds into ``root`` as ``num_writers`` ranks would have, and return its directory.

    Args:
        num_writers: each gets an equal share of the bytes, in the order of the names of tensors.

    Raises:
        ValueError: ``num_writers`` is not at least 1.
        CheckpointNotSavedError: it cannot be written, or a file of ``source`` is not what was written.
    """
    if num_writers < 1:
        raise ValueError(f"num_writers is {num_writers}; at least one rank must write")
    return save_content(
        Path(root),
        source.step,
        lambda: _content(source, num_writers, settings.max_file_bytes),
        AloneRanks(),
        settings,
    )


def _content(source: StoredCheckpoint, num_writers: int, max_file_bytes: int) -> Content:
    files = [
        DataFile(file_name(writer, index), parts)
        for writer, ranges in enumerate(_shares(source.tensors, num_writers))
        for index, parts in enumerate(cut_into_files(ranges, max_file_bytes))
    ]
    return Content(
        source.values, files, partial(_write, source, files), num_writers, bytes_bound([file.parts for file in files])
    )


def _shares(tensors: Mapping[str, TensorInfo], num_writers: int) -> list[list[tuple[TensorInfo, int, int]]]:
    """Return the ranges of each writer: the line of all tensors cut into equal numbers of bytes."""
    total_bytes = sum(info.numel * ITEM_BYTES[info.dtype] for info in tensors.values())
    shares: list[list[tuple[TensorInfo, int, int]]] = [[] for _ in range(num_writers)]
    begin = 0
    for info in tensors.values():
        item_bytes = ITEM_BYTES[info.dtype]
        if info.numel == 0:
            shares[0].append((info, 0, 0))
        for writer, share in enumerate(shares):
            start, stop = (
                min(max(0, (total_bytes * edge // num_writers - begin) // item_bytes), info.numel)
                for edge in (writer, writer + 1)
            )
            if start < stop:
                share.append((info, start, stop))
        begin += info.numel * item_bytes
    return shares


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a part goes: a file and the byte its values begin at."""

    file: DataFile
    part: Part
    start_byte: int


def _write(source: StoredCheckpoint, files: Sequence[DataFile], file_system: FileSystem, directory: Path) -> list[StoredFile]:
    places: list[_Place] = []
    for file in files:
        header = encode_header([(part.key, part.info.dtype, part.shape) for part in file.parts])
        with _naming(directory / file.name) as path:
            descriptor = file_system.create(path)
            try:
                write_all(file_system, descriptor, memoryview(header))
            finally:
                file_system.close(descriptor)
        position = len(header)
        for part in file.parts:
            places.append(_Place(file, part, position))
            position += part.num_bytes

    def use(copy: Copy, values: torch.Tensor) -> None:
        place = places[copy.target]
        start_byte = place.start_byte + copy.target_start * ITEM_BYTES[place.part.info.dtype]
        with _naming(directory / place.file.name) as path:
            _write_at(file_system, path, values.view(torch.uint8).numpy().data, start_byte)

    source.stream([WantedRange(place.part.info.name, place.part.start, place.part.stop) for place in places], use)
    with ThreadPoolExecutor(num_file_threads(), "megabucket-hash") as pool:
        return list(pool.map(lambda file: _finish(file_system, directory / file.name), files))


@contextmanager
def _naming(path: Path) -> Iterator[Path]:
    """Say of which file an error is."""
    try:
        yield path
    except OSError as error:
        raise FileFailedError(path, error) from error


def _write_at(file_system: FileSystem, path: Path, data: memoryview, position: int) -> None:
    descriptor = file_system.open_to_write(path)
    try:
        while data:
            count = file_system.write_at(descriptor, data, position)
            data, position = data[count:], position + count
    finally:
        file_system.close(descriptor)


def _finish(file_system: FileSystem, path: Path) -> StoredFile:
    """Hash a file that is complete, and wait until it is on the disk."""
    digest, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with _naming(path):
        descriptor = file_system.open_to_write(path)
        try:
            while count := file_system.read_into(descriptor, buffer):
                digest.update(buffer[:count])
                num_bytes += count
            file_system.sync(descriptor)
        finally:
            file_system.close(descriptor)
    return StoredFile(path.name, num_bytes, digest.hexdigest())
