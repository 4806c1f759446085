"""Chunks of weights, and what a receiver does with them. A receiver needs no wrapper, only tensors and headers.

::

    buffer     [ head          ]gap[ norm ]gap[ block.up             ][ block.down ]padding
    chunks     |<------- chunk 0 ------->|    |<----- chunk 1 ------>||<- chunk 2 ->|            at most max_bytes each
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megabucket.buffer import dtype_name, dtype_named, view_like
from megabucket.errors import LayoutError


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor, or a range of one, in a chunk. Plain data.

    Args:
        name: the global one; without ``identity=`` that of ``state_dict``.
        shape: of the tensor: the whole one, or a piece of it.
        stride: of the tensor where its elements lie one behind the other: channels-last stays channels-last.
        offset: start of the piece in the whole tensor, one index per dimension.
        global_shape: of the whole tensor; equal to ``shape`` unless this is a piece.
        aliases: further names of the same tensor: tied weights are in one place.
        start: first element of the range in this chunk, in the tensor's order in memory; above 0 only for a tensor that is
            larger than a chunk.
        stop: end of the range.
        position: where the range begins in the chunk, in elements.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    start: int = 0
    stop: int = 0
    position: int = 0

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """Start and stop of the piece in the whole tensor, by dimension."""
        return tuple((start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def is_complete(self) -> bool:
        """Whether the chunk holds all elements of the tensor."""
        return self.stop - self.start == self.numel


@dataclass(frozen=True, slots=True, eq=False)
class WeightChunk:
    """Weights that lie one behind the other, all of one dtype, perhaps with gaps between them.

    Without a conversion ``tensor`` is a view of the parameter buffer: the next step changes it.
    """

    tensor: torch.Tensor  # 1D, contiguous
    entries: tuple[WeightEntry, ...]

    def header(self) -> dict[str, Any]:
        """Return everything but the values, as plain data that JSON can hold."""
        entries = [dataclasses.asdict(entry) for entry in self.entries]
        return {"dtype": dtype_name(self.tensor.dtype), "numel": self.tensor.numel(), "entries": entries}

    @classmethod
    def from_header(
        cls, header: Mapping[str, Any], tensor: torch.Tensor | None = None, *, device: torch.device | str = "cpu"
    ) -> WeightChunk:
        """Rebuild a chunk in another process: the inverse of ``header``, also after JSON.

        Args:
            tensor: the values, 1D. ``None``: memory to receive them in, not initialized.
            device: of that memory.

        Raises:
            LayoutError: the tensor has not the dtype and length of the header.
        """
        shape, dtype = (header["numel"],), dtype_named(header["dtype"])
        tensor = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor
        if tensor.shape != shape or tensor.dtype != dtype:
            raise LayoutError(
                f"the header describes {shape[0]} elements of {dtype}, and the tensor has the shape {tuple(tensor.shape)} and "
                f"{tensor.dtype}: it belongs to another chunk. Send each header with its own tensor."
            )
        return cls(tensor, tuple(map(entry_of, header["entries"])))

    def tensors(self) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
        """Yield each entry with its values as a view: in the tensor's shape, or 1D if the chunk holds a range of it only."""
        for entry in self.entries:
            if entry.is_complete:
                yield entry, view_like(self.tensor, entry.position, entry.shape, entry.stride)
            else:
                yield entry, self.tensor[entry.position : entry.position + entry.stop - entry.start]


def entry_of(data: Mapping[str, Any]) -> WeightEntry:
    """Return an entry from its fields, with lists for tuples as JSON has them."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return WeightEntry(**fields)


def joined_weights(chunks: Iterable[WeightChunk]) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
    """Yield each tensor or piece in its shape: a view of its chunk, or a copy where several chunks hold ranges of it.

    Raises:
        LayoutError: a range of a tensor is missing.
    """
    begun: dict[tuple[str, tuple[int, ...]], tuple[int, torch.Tensor]] = {}
    for entry, values in itertools.chain.from_iterable(chunk.tensors() for chunk in chunks):
        if entry.is_complete:
            yield entry, values
            continue
        key = entry.name, entry.offset
        num_filled, flat = begun.pop(key) if key in begun else (0, values.new_empty(entry.numel))
        if entry.start != num_filled:
            raise _range_missing(entry.name, num_filled, entry.start)
        flat[entry.start : entry.stop] = values
        if entry.stop == entry.numel:
            yield replace(entry, start=0, position=0), view_like(flat, 0, entry.shape, entry.stride)
        else:
            begun[key] = entry.stop, flat
    for (name, _), (num_filled, flat) in begun.items():
        raise _range_missing(name, num_filled, flat.numel())


def _range_missing(name: str, start: int, stop: int) -> LayoutError:
    text = f"elements {start} to {stop} of {name!r} are not where they should be. Give all chunks of an export in their order."
    return LayoutError(text)


def named_weights(chunks: Iterable[WeightChunk]) -> dict[str, torch.Tensor]:
    """Return whole tensors by name, tied ones under each of their names: the ``state_dict`` of a plain module.

    Raises:
        LayoutError: a tensor is a piece of a larger one, or a range of one is missing.
    """
    found: dict[str, torch.Tensor] = {}
    for entry, tensor in joined_weights(chunks):
        if entry.shape != entry.global_shape:
            raise LayoutError(
                f"{entry.name!r} is a piece of shape {entry.shape} at {entry.offset} of a tensor of shape "
                f"{entry.global_shape}. Export with whole=True, or put the pieces of joined_weights() in their places."
            )
        found |= dict.fromkeys((entry.name, *entry.aliases), tensor)
    return found
