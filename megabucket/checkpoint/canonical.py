"""Canonical tensors: the names, shapes and orders of a model's tensors in a checkpoint, and the part that each rank writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.format import Piece, TensorInfo
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.replicas import persistent_buffers
from megabucket.layout.identity import ParamIdentity, canonical_name, global_names, plain_identity


class GlobalNames:
    """The parts of the whole model that this rank of a wrapper holds, with their names in the whole model."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ranks = ddp.ranks.step
        """The ranks that write and read a checkpoint together."""
        given = {canonical_name(name): identity for name, identity in ddp.identities.items()}
        self.local: dict[str, ParamIdentity] = {}
        """By the local name of the parameter."""
        self.identities: dict[torch.Tensor, ParamIdentity] = {}
        """By parameter, those without values included; a tied one once."""
        for long_name, param in ddp.module.named_parameters():
            name = canonical_name(long_name)
            own = given.get(name) or plain_identity(name, tuple(param.shape))
            self.identities[param] = self.local[name] = replace(own, global_name=canonical_name(own.global_name))
        self.params = {param: own.global_name for param, own in self.identities.items()}
        """The names of the parameters."""
        global_name = global_names(self.local)
        self.buffers = {global_name(name): buffer for name, buffer in persistent_buffers(ddp.module).items()}
        """The persistent buffers."""
        base = torch.nn.Module.get_extra_state
        extra = {
            canonical_name(name): part for name, part in ddp.module.named_modules() if type(part).get_extra_state is not base
        }
        self.stateful = {global_name(f"{name}.")[:-1] if name else "": module for name, module in extra.items()}
        """The modules with extra state in their ``state_dict``."""

    def of(self, name: str) -> ParamIdentity:
        """Return the identity of a parameter by its local name, as layouts have it."""
        return self.local[canonical_name(name)]


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


def info_of(
    name: str, like: torch.Tensor, dtype: torch.dtype | None = None, identity: ParamIdentity | None = None
) -> TensorInfo:
    """Return the description of a tensor in the shape and order of ``like``.

    Args:
        identity: of the parameter that it belongs to.
    """
    of = dtype_name(dtype or like.dtype), tuple(like.shape), order_of(like)
    if identity is None or identity.global_shape == like.shape:
        return TensorInfo(name, *of, group="dense" if identity is None else identity.group)
    return TensorInfo(name, *of, identity.offset, identity.global_shape, identity.group)


def flat(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the values of a tensor in one dimension, in an order of its dimensions: a view where it lies so in memory."""
    if tensor.is_contiguous() and tuple(order) == tuple(range(tensor.dim())):
        return tensor.detach().flatten()
    return tensor.detach().permute(tuple(order)).reshape(-1)


def in_shape(values: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return a view of flat values in a shape.

    Args:
        order: the dimensions of the shape as they lie in memory, slowest first.

    >>> in_shape(torch.arange(6), (2, 3), (1, 0)).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    back = [list(order).index(dim) for dim in range(len(shape))]
    return values.view([shape[dim] for dim in order]).permute(back)


def whole_piece(name: str, tensor: torch.Tensor, identity: ParamIdentity | None = None) -> Piece:
    """Return a tensor as a piece: all of this rank's part."""
    info = info_of(name, tensor, identity=identity)
    return Piece(info, 0, info.numel, flat(tensor, info.order))


def empty_piece(info: TensorInfo, start: int = 0, stop: int | None = None, device: str = "cpu") -> Piece:
    """Return a range of a tensor, or all of it, without values; on ``meta`` without memory."""
    stop = info.numel if stop is None else stop
    return Piece(info, start, stop, torch.empty(stop - start, dtype=dtype_named(info.dtype), device=device))


def split_evenly(pieces: Sequence[Piece], *, rank: int, size: int) -> Iterator[Piece]:
    """Return one rank's part of pieces that every rank holds whole: about as many bytes as the others'.

    Pieces without elements belong to the first rank. Over all ranks every element is there once.
    """
    total_bytes = sum(piece.values.nbytes for piece in pieces)
    first, last = total_bytes * rank // size, total_bytes * (rank + 1) // size
    offset = 0
    for piece in pieces:
        numel, item_bytes = piece.values.numel(), piece.values.itemsize
        # An element belongs to the rank of its first byte.
        start = min(max(-((offset - first) // item_bytes), 0), numel)
        stop = min(max(-((offset - last) // item_bytes), 0), numel)
        offset += numel * item_bytes
        if start < stop or (numel == 0 and rank == 0):
            yield Piece(piece.info, start, stop, piece.values[start:stop])
