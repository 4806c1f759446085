"""What differs between two checkpoints, value by value, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megabucket.checkpoint.canonical import empty_piece, meta_piece
from megabucket.checkpoint.data_files import cut_into_files
from megabucket.checkpoint.format import ITEM_BYTES, Json, Piece, TensorInfo
from megabucket.checkpoint.stored import StoredCheckpoint
from megabucket.units import MIB

_BATCH_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same.

    Args:
        name: of the tensor, or the path of the value.
        what: in words, the first checkpoint first.
        num_elements: of a tensor of the same kind and shape on both sides, how many elements have other bits.
        largest: the largest absolute difference of those that are finite.
    """

    name: str
    what: str
    num_elements: int = 0
    largest: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two checkpoints differ in."""

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
        CheckpointInvalidError: a file of one of them is not what was written.
    """
    differing = list(_kinds(first.tensors, second.tensors))
    names = {one.name for one in differing}
    in_both = [meta_piece(info) for name, info in first.tensors.items() if name not in names]
    batches = cut_into_files(0, in_both, _BATCH_BYTES).values()
    contents = [one for batch in batches for one in _contents(batch, first, second)]
    return Comparison(
        num_equal_tensors=len(in_both) - len({one.name for one in contents}),
        tensors=tuple(sorted([*differing, *contents], key=lambda one: one.name)),
        values=tuple(_values("", first.values, second.values)),
    )


def _kinds(first: Mapping[str, TensorInfo], second: Mapping[str, TensorInfo]) -> Iterator[Difference]:
    for name in first.keys() | second.keys():
        one, other = first.get(name), second.get(name)
        if one is None or other is None:
            yield Difference(name, "only in the second" if one is None else "only in the first")
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            yield Difference(name, f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}")


def _contents(batch: Sequence[Piece], first: StoredCheckpoint, second: StoredCheckpoint) -> Iterator[Difference]:
    sides = []
    for stored in (first, second):
        sides.append([empty_piece(piece.info, piece.start, piece.stop) for piece in batch])
        stored.read(sides[-1])
    for one, other in zip(*sides, strict=True):
        item_bytes = ITEM_BYTES[one.info.dtype]
        bits = (one.values.view(torch.uint8) != other.values.view(torch.uint8)).view(-1, item_bytes).any(1)
        num_elements = int(bits.sum())
        if num_elements:
            first_at = one.start + int(bits.to(torch.uint8).argmax())
            largest = _largest(one.values[bits], other.values[bits])
            what = f"{num_elements} of elements {one.start}:{one.stop} differ, the first at {first_at}, by up to {largest:.6g}"
            yield Difference(one.info.name, what, num_elements, largest)


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    gap = (one.double() - other.double()).abs()
    finite = gap[gap.isfinite()]
    return float(finite.max()) if finite.numel() else float("nan")


def _values(path: str, first: Json, second: Json) -> Iterator[Difference]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in sorted(first.keys() | second.keys()):
            place = f"{path}.{key}" if path else key
            if key not in first or key not in second:
                yield Difference(place, "only in the second" if key not in first else "only in the first")
            else:
                yield from _values(place, first[key], second[key])
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _values(f"{path}[{index}]", one, other)
    elif type(first) is not type(second) or first != second:
        yield Difference(path, f"{first!r:.100} and {second!r:.100}")
