"""Write a checkpoint again for another number of ranks or another file size, without a model and in bounded memory.

Any number of ranks can load any checkpoint; what this gains is that each of ``num_writers`` ranks then finds what it needs
in few files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from megabucket.checkpoint.canonical import empty_piece
from megabucket.checkpoint.data_files import Content, DataFile, Part, Range, files_of_rank, write_files
from megabucket.checkpoint.file_system import FileSystem
from megabucket.checkpoint.format import ITEM_BYTES, StoredFile, TensorInfo
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import Save, SaveSettings
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.units import MIB

_BATCH_BYTES: Final = 256 * MIB
"""How much is in memory at a time; a source file is read once for each batch that takes something of it."""


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
    return Save(Path(root), source.step, AloneRanks(), settings).run(
        lambda: _content(source, num_writers, settings.max_file_bytes)
    )


def _content(source: StoredCheckpoint, num_writers: int, max_file_bytes: int) -> Content:
    shares = enumerate(_shares(source.tensors, num_writers))
    files = [file for writer, ranges in shares for file in files_of_rank(writer, ranges, max_file_bytes)]

    def write(file_system: FileSystem, directory: Path) -> list[StoredFile]:
        return [file for batch in _batches(files) for file in _write(source, batch, file_system, directory)]

    return Content(source.values, num_writers, files, write)


def _shares(tensors: Mapping[str, TensorInfo], num_writers: int) -> list[list[Range]]:
    """Return the ranges of each writer: the line of all tensors cut into equal numbers of bytes."""
    total_bytes = sum(info.numel * ITEM_BYTES[info.dtype] for info in tensors.values())
    shares: list[list[Range]] = [[] for _ in range(num_writers)]
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


def _batches(files: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    batch: list[DataFile] = []
    num_bytes = 0
    for file in files:
        batch.append(file)
        num_bytes += sum(part.num_bytes for part in file.parts)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    yield batch


def _write(source: StoredCheckpoint, files: Sequence[DataFile], file_system: FileSystem, directory: Path) -> list[StoredFile]:
    pieces = {
        (part.info.name, part.start): empty_piece(part.info, part.start, part.stop) for file in files for part in file.parts
    }
    source.read(list(pieces.values()))

    def values_of(part: Part) -> torch.Tensor:
        return pieces[part.info.name, part.start].values

    return write_files(files, values_of, file_system, directory)
