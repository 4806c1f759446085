"""Views of a flat buffer in the shape and memory order of a parameter."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides a dense copy of ``param`` has: its own when it is dense, so channels-last stays channels-last."""
    return torch.empty_like(param, device="meta").stride()


def view_like(flat: torch.Tensor, start: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return the view of ``flat`` that begins at element ``start``.

    Args:
        flat: a 1D contiguous tensor, perhaps a view itself.
        shape: sizes of the view; ``flat`` must hold that many elements from ``start``.
        strides: a permutation of contiguous strides, from ``dense_strides``.
    """
    return flat.as_strided(tuple(shape), tuple(strides), flat.storage_offset() + start)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module, as layouts use it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a layout's dtype name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101 - names come from a checked BufferKey
    return dtype
