"""What is in a checkpoint: canonical tensors by name, and flat ranges of them. No torch at run time.

Owns the types that the two halves of this package share: what captures and restores state (by name) and what writes
and reads files (by range). A name says what a tensor is, never where it was: no rank, bucket or padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""What JSON can hold; nan and the infinities excepted."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One canonical tensor of a checkpoint.

    Args:
        dtype: torch's name without ``torch.``: "float32", "bfloat16", "uint8", "bool", ...
        order: the dimensions from slowest to fastest as the flat values are stored; ``(0, 1, ...)`` is row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a tensor without dimensions."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The elements ``start:stop`` of a tensor, flat in the order of its ``info``.

    Args:
        values: 1D, contiguous, ``stop - start`` elements, on any device.
    """

    info: TensorInfo
    start: int
    stop: int
    values: torch.Tensor  # 1D, info.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What one rank writes.

    Args:
        pieces: over all ranks they cover each tensor exactly once; a tensor without elements has one piece ``0:0``.
        values: everything that is not a tensor, as JSON; the same on every rank.
    """

    pieces: Sequence[Piece]
    values: Mapping[str, Json]
