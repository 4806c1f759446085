"""Canonical tensors: the names, shapes and orders of a model's tensors in a checkpoint, and the part that each rank writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch

from megabucket.buffer import dtype_name, dtype_named
from megabucket.checkpoint.format import Piece, TensorInfo
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError
from megabucket.layout.identity import ParamIdentity, plain_identity

_WRAPPED_IN: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, activation checkpointing


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers of single modules add.

    >>> canonical_name("_orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    for part in _WRAPPED_IN:
        name = name.replace(part, "")
    return name


def named_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers that have values, by canonical name; one that is registered twice once.

    Raises:
        ConfigError: a buffer is a DTensor that is cut over ranks: it has no identity that says where its piece belongs.
    """
    found = {}
    for name, buffer in module.named_buffers():
        owner, _, key = name.rpartition(".")
        if not buffer.is_meta and key not in module.get_submodule(owner)._non_persistent_buffers_set:
            found[canonical_name(name)] = _held(name, buffer)
    return found


def _held(name: str, buffer: Any) -> torch.Tensor:
    """Return the values of a module buffer on this rank, which are whole."""
    if type(buffer).__name__ != "DTensor":
        return cast("torch.Tensor", buffer)
    if not all(placement.is_replicate() for placement in buffer.placements):
        raise ConfigError(
            f"the module buffer {name!r} is a DTensor with the placements {buffer.placements}, and a checkpoint holds whole "
            "buffers. Replicate it, or register it with persistent=False."
        )
    return cast("torch.Tensor", buffer.to_local())


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
        self._prefixes = _global_prefixes(self.local)
        self.buffers = {self._global(name): buffer for name, buffer in named_buffers(ddp.module).items()}
        """The persistent buffers."""
        base = torch.nn.Module.get_extra_state
        extra = {
            canonical_name(name): part for name, part in ddp.module.named_modules() if type(part).get_extra_state is not base
        }
        self.stateful = {self._global(f"{name}.")[:-1] if name else "": module for name, module in extra.items()}
        """The modules with extra state in their ``state_dict``."""

    def of(self, name: str) -> ParamIdentity:
        """Return the identity of a parameter by its local name, as layouts have it."""
        return self.local[canonical_name(name)]

    def _global(self, name: str) -> str:
        """Return the global name of a buffer or module: it lies where the parameters beside or around it lie."""
        end = max(end for end in _module_ends(name) if name[:end] in self._prefixes or not end)
        return self._prefixes.get(name[:end], "") + name[end:]


def _global_prefixes(identities: dict[str, ParamIdentity]) -> dict[str, str]:
    """Return the global name of each module with its dot, by its local one; the local one if that is ambiguous."""
    found: dict[str, str] = {}
    for name, identity in identities.items():
        for local, rest in ((name[:end], name[end:]) for end in _module_ends(name)):
            there = identity.global_name.removesuffix(rest) if identity.global_name.endswith(rest) else local
            found[local] = there if found.get(local, there) == there else local
    num_with = Counter(found.values())
    return {local: there if num_with[there] == 1 else local for local, there in found.items()}


def _module_ends(name: str) -> list[int]:
    """Return where the names of the modules in a name end, each with its dot."""
    return [0, *(index + 1 for index, letter in enumerate(name) if letter == ".")]


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
