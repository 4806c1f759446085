"""Compare checkpoints and write them again for other ranks, without a model and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from megabucket.checkpoint.canonical import empty_piece, split_evenly
from megabucket.checkpoint.format import ITEM_BYTES, Json, Piece
from megabucket.checkpoint.ranks import AloneRanks
from megabucket.checkpoint.save import Content, Save, SaveSettings, cut_into_files
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.units import MIB

_BATCH_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """One tensor or value that is not the same; ``what`` has the first checkpoint first."""

    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences between two checkpoints."""

    num_equal_tensors: int
    tensors: tuple[Difference, ...]
    values: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference at all."""
        return not self.tensors and not self.values


def compare(first: StoredCheckpoint, second: StoredCheckpoint) -> Comparison:
    """Return every difference between tensors (bit by bit, whatever their layout in files) and values.

    Raises:
        CheckpointInvalidError: a file of one of them is damaged.
    """
    kinds = [{name: f"{of.dtype} {list(of.shape)}" for name, of in stored.tensors.items()} for stored in (first, second)]
    differing = list(_differences(*kinds))
    names = {one.name for one in differing}
    in_both = [empty_piece(info, device="meta") for name, info in first.tensors.items() if name not in names]
    batches = cut_into_files(0, in_both, _BATCH_BYTES).values()
    contents = [one for batch in batches for one in _contents(batch, first, second)]
    return Comparison(
        num_equal_tensors=len(in_both) - len({one.name for one in contents}),
        tensors=tuple(sorted([*differing, *contents])),
        values=tuple(_differences(_texts("", first.values), _texts("", second.values))),
    )


def _contents(batch: Sequence[Piece], first: StoredCheckpoint, second: StoredCheckpoint) -> Iterator[Difference]:
    sides = [[empty_piece(piece.info, piece.start, piece.stop) for piece in batch] for _ in range(2)]
    first.read(sides[0])
    second.read(sides[1])
    for one, other in zip(*sides, strict=True):
        item_bytes = ITEM_BYTES[one.info.dtype]
        bits = (one.values.view(torch.uint8) != other.values.view(torch.uint8)).view(-1, item_bytes).any(1)
        if num_elements := int(bits.sum()):
            first_at = one.start + int(bits.to(torch.uint8).argmax())
            gap = (one.values[bits].to(torch.complex128) - other.values[bits].to(torch.complex128)).abs()
            finite = gap[gap.isfinite()]
            largest = float(finite.max()) if len(finite) else float("nan")
            what = f"{num_elements} of elements {one.start}:{one.stop} differ, the first at {first_at}, by up to {largest:.6g}"
            yield Difference(one.info.name, what)


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            yield Difference(name, "only in the second" if name not in first else "only in the first")
        elif first[name] != second[name]:
            yield Difference(name, f"{first[name]:.100} and {second[name]:.100}")


def _texts(path: str, value: Json) -> dict[str, str]:
    """Return, by path, each value that is neither a list nor an object, in words."""
    if isinstance(value, Mapping) and value:
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: repr(value)}
    return {name: text for place, item in items for name, text in _texts(place, item).items()}


def reshard(source: StoredCheckpoint, root: Path | str, *, num_writers: int, settings: SaveSettings) -> Path:
    """Write ``source`` into ``root`` as ``num_writers`` ranks would have, and return its directory.

    Any number of ranks can load any checkpoint; afterwards each of ``num_writers`` ranks finds its values in few files. A few
    files at a time are in memory; a file of ``source`` is read once for each new file that holds some of its values.

    Args:
        num_writers: each gets an equal share of the bytes, in the order of the names of tensors.

    Raises:
        ValueError: ``num_writers`` is not at least 1.
        CheckpointNotSavedError: it cannot be written.
        CheckpointInvalidError: a file of ``source`` is damaged.
    """
    if num_writers < 1:
        raise ValueError(f"num_writers is {num_writers}; at least one rank must write")
    whole = [empty_piece(info, device="meta") for info in source.tensors.values()]
    files: dict[str, Sequence[Piece]] = {}
    for writer in range(num_writers):
        files |= cut_into_files(writer, split_evenly(whole, rank=writer, size=num_writers), settings.max_file_bytes)

    def make(pieces: Sequence[Piece]) -> Sequence[Piece]:
        made = [empty_piece(piece.info, piece.start, piece.stop) for piece in pieces]
        source.read(made)
        return made

    content = Content(source.values, num_writers, files, make)
    return Save(Path(root), source.step, AloneRanks(), settings).run(lambda: content)
