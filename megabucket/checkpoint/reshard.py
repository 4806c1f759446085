"""Write a checkpoint again for another number of ranks or another file size, without a model and in bounded memory.

Any number of ranks can load any checkpoint; afterwards each of ``num_writers`` ranks finds its values in few files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megabucket.checkpoint.canonical import empty_piece, meta_piece, split_evenly
from megabucket.checkpoint.data_files import Content, cut_into_files
from megabucket.checkpoint.format import Piece
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import Save, SaveSettings
from megabucket.checkpoint.stored import StoredCheckpoint


def reshard(source: StoredCheckpoint, root: Path | str, *, num_writers: int, settings: SaveSettings) -> Path:
    """Write ``source`` into ``root`` as ``num_writers`` ranks would have, and return its directory.

    A few files at a time are in memory; a file of ``source`` is read once for each new file that holds some of its values.

    Args:
        num_writers: each gets an equal share of the bytes, in the order of the names of tensors.

    Raises:
        ValueError: ``num_writers`` is not at least 1.
        CheckpointNotSavedError: it cannot be written.
        CheckpointInvalidError: a file of ``source`` is damaged.
    """
    if num_writers < 1:
        raise ValueError(f"num_writers is {num_writers}; at least one rank must write")
    whole = [meta_piece(info) for info in source.tensors.values()]
    files: dict[str, Sequence[Piece]] = {}
    for writer in range(num_writers):
        files |= cut_into_files(writer, split_evenly(whole, rank=writer, size=num_writers), settings.max_file_bytes)

    def make(pieces: Sequence[Piece]) -> Sequence[Piece]:
        made = [empty_piece(piece.info, piece.start, piece.stop) for piece in pieces]
        source.read(made)
        return made

    content = Content(source.values, num_writers, files, make)
    return Save(Path(root), source.step, AloneRanks(), settings).run(lambda: content)
