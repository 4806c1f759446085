"""What a load reads, and where it goes once all ranks have read all of it. Until then nothing of the run is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.canonical import empty_piece, order_of
from megabucket.checkpoint.format import Json, Piece, TensorInfo
from megabucket.checkpoint.optim_state import MAIN_PREFIX, MODEL_PREFIX


class Stored(Protocol):
    """A checkpoint that was opened."""

    @property
    def path(self) -> object:
        """Where it lies, for texts."""

    @property
    def step(self) -> int:
        """Of which step it is."""

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What each tensor is, by name."""

    @property
    def values(self) -> Mapping[str, Json]:
        """Everything that is not a tensor."""

    def read(self, wanted: Sequence[Piece], *, cast: bool = False) -> None:
        """Fill the values of pieces."""


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """A load that is under way."""

    stored: Stored
    wanted: list[Piece] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Targets, and what is to be copied there."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """What else is to be done then, in this order; nothing that could fail."""

    def want(self, name: str, like: torch.Tensor, start: int, values: torch.Tensor) -> None:
        """Want a range of a stored tensor, in the order in which ``like`` lies in memory, in the dtype of ``values``."""
        if values.numel():
            info = TensorInfo(name, dtype_name(values.dtype), tuple(like.shape), order_of(like))
            self.wanted.append(Piece(info, start, start + values.numel(), values.detach()))

    def want_like(self, name: str, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Want a whole tensor, and return what it will be: in the shape, memory order and place of ``like``."""
        values = torch.empty(like.numel(), dtype=dtype or like.dtype, device=like.device)
        self.want(name, like, 0, values)
        return in_shape(values, tuple(like.shape), order_of(like))

    def want_stored(self, name: str) -> torch.Tensor:
        """Want a whole tensor as it is stored, and return what it will be, on the CPU."""
        info = self.stored.tensors[name]
        piece = empty_piece(info, 0, info.numel)
        if info.numel:
            self.wanted.append(piece)
        return in_shape(piece.values, info.shape, info.order)

    def read(self) -> None:
        """Read everything that is wanted."""
        # Which dtypes may change is checked before; of a tensor that is narrowed the reader still checks the values.
        self.stored.read(self.wanted, cast=True)


def in_shape(values: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return the view of flat values in a shape whose dimensions lie in memory in an order, slowest first.

    >>> in_shape(torch.arange(6), (2, 3), (1, 0)).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    back = [list(order).index(dim) for dim in range(len(shape))]
    return values.view([shape[dim] for dim in order]).permute(back)


def find_difference(info: TensorInfo | None, name: str, like: torch.Tensor, dtype: torch.dtype, *, cast: bool) -> str | None:
    """Return why a stored tensor cannot become one of the shape of ``like`` and of a dtype, or ``None``."""
    if info is None:
        return f"{name!r} is not in the checkpoint"
    if info.shape != tuple(like.shape):
        return f"{name!r} has shape {info.shape} in the checkpoint and {tuple(like.shape)} here"
    stored = dtype_named(info.dtype)
    if stored == dtype:
        return None
    if not (stored.is_floating_point and dtype.is_floating_point):
        return f"{name!r} is {info.dtype} in the checkpoint and {dtype_name(dtype)} here, and is never converted"
    return None if cast else f"{name!r} is {info.dtype} in the checkpoint and {dtype_name(dtype)} here; cast=True converts"


def source_of(tensors: Mapping[str, TensorInfo], name: str, dtype: torch.dtype) -> str:
    """Return the stored tensor from which a weight comes that is kept in a dtype here.

    A main parameter is what its 16-bit weight was rounded from, so it is the better source for what is wider than the weight.
    """
    weight, main = tensors.get(f"{MODEL_PREFIX}{name}"), tensors.get(f"{MAIN_PREFIX}{name}")
    wanted = dtype_name(dtype)
    takes_main = main is not None and main.dtype == wanted and (weight is None or weight.dtype != wanted)
    return f"{MAIN_PREFIX if takes_main else MODEL_PREFIX}{name}"
