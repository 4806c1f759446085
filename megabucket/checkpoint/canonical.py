"""Canonical tensors: which names, shapes and orders a model's tensors have in a checkpoint, and which part each rank writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.format import Piece, TensorInfo

_WRAPPED_IN: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, activation checkpointing


def canonical_name(name: str) -> str:
    """Return a parameter's name without what wrappers of single modules add to it.

    >>> canonical_name("_orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    for part in _WRAPPED_IN:
        name = name.replace(part, "")
    return name


def named_params(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that have values, by canonical name; a tied one once, under its first name."""
    return {canonical_name(name): param for name, param in module.named_parameters() if not param.is_meta}


def named_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers that have values, by canonical name; one that is registered twice once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, submodule in module.named_modules():
        for key, buffer in submodule._buffers.items():
            if buffer is None or buffer.is_meta or key in submodule._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[canonical_name(f"{prefix}.{key}" if prefix else key)] = buffer
    return found


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor from slowest to fastest in memory; ``(0, 1, ...)`` when it is row-major.

    Dimensions of one element have no place in memory: they come first, unless the tensor is row-major without them.

    >>> order_of(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    (0, 2, 3, 1)
    >>> order_of(torch.zeros(4, 1, 5).transpose(0, 2))
    (1, 2, 0)
    """
    row_major = tuple(range(tensor.dim()))
    if tensor.is_contiguous():  # also when it has no elements
        return row_major
    wide = [dim for dim in row_major if tensor.shape[dim] > 1]
    by_stride = sorted(wide, key=tensor.stride, reverse=True)
    if by_stride == wide:
        return row_major
    return (*(dim for dim in row_major if tensor.shape[dim] == 1), *by_stride)


def info_of(name: str, like: torch.Tensor, dtype: torch.dtype | None = None) -> TensorInfo:
    """Return what a checkpoint says of a tensor in the shape and order of ``like``."""
    return TensorInfo(name, dtype_name(dtype or like.dtype), tuple(like.shape), order_of(like))


def flat(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the values of a tensor in one dimension, in an order of its dimensions: a view where it lies so in memory."""
    if tensor.is_contiguous() and tuple(order) == tuple(range(tensor.dim())):
        return tensor.detach().flatten()
    return tensor.detach().permute(tuple(order)).reshape(-1)


def in_shape(values: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return the view of flat values in a shape whose dimensions lie in memory in an order, slowest first.

    >>> in_shape(torch.arange(6), (2, 3), (1, 0)).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    back = [list(order).index(dim) for dim in range(len(shape))]
    return values.view([shape[dim] for dim in order]).permute(back)


def whole_piece(name: str, tensor: torch.Tensor) -> Piece:
    """Return a whole tensor as a piece."""
    info = info_of(name, tensor)
    return Piece(info, 0, info.numel, flat(tensor, info.order))


def empty_piece(info: TensorInfo, start: int, stop: int) -> Piece:
    """Return a range of a tensor to be filled, on the CPU."""
    return Piece(info, start, stop, torch.empty(stop - start, dtype=dtype_named(info.dtype)))


def split_evenly(tensors: Mapping[str, torch.Tensor], *, rank: int, size: int) -> Iterator[Piece]:
    """Return one rank's part of tensors that every rank holds: about as many bytes as the others'.

    Tensors without elements belong to the first rank. Over all ranks every element is there once.
    """
    total_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    first, last = total_bytes * rank // size, total_bytes * (rank + 1) // size
    offset = 0
    for name, tensor in tensors.items():
        numel, item_bytes = tensor.numel(), tensor.itemsize
        # An element belongs to whom its first byte belongs to.
        start = min(max(-((offset - first) // item_bytes), 0), numel)
        stop = min(max(-((offset - last) // item_bytes), 0), numel)
        offset += numel * item_bytes
        if start < stop or (numel == 0 and rank == 0):
            info = info_of(name, tensor)
            values = flat(tensor, info.order)
            yield Piece(info, start, stop, values if stop - start == numel else values[start:stop])
