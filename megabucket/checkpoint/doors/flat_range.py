"""``FlatRange``: pieces of a tensor as ``torch.distributed.checkpoint`` takes them, for writing and for reading.

That format stores boxes of tensors, so a flat range becomes a few boxes, each a view of the values: nothing is copied, and what
is on the disk is the tensor in its own shape, whoever has written which part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megabucket.checkpoint.boxes import boxes_of
from megabucket.checkpoint.pieces import Piece


class _Part(NamedTuple):
    """A box of the tensor, in its own dimensions, and its values."""

    offsets: torch.Size
    sizes: torch.Size
    values: torch.Tensor


def _parts_of(piece: Piece) -> list[_Part]:
    info, parts, position = piece.info, [], 0
    order = list(info.order)
    back = [order.index(dim) for dim in range(len(order))]
    # Flat in memory order: boxes of the tensor with its dimensions in that order.
    for box in boxes_of([info.shape[dim] for dim in order], piece.start, piece.stop):
        values = piece.values.detach()[position : position + box.numel].view(box.sizes).permute(back)
        parts.append(_Part(torch.Size(box.offsets[dim] for dim in back), values.shape, values))
        position += box.numel
    return parts


class FlatRange(torch.Tensor):
    """Pieces of one tensor, of the tensor's shape and without memory of its own: only good to be saved or loaded.

    Args:
        pieces: of the same tensor; they do not overlap.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _parts: list[_Part]

    def __new__(cls, pieces: Sequence[Piece]) -> FlatRange:  # noqa: PYI034 - Python 3.10 has no Self
        """Make a tensor without memory."""
        info, values = pieces[0].info, pieces[0].values
        made = torch.Tensor._make_wrapper_subclass(cls, info.shape, dtype=values.dtype, device=values.device)
        made._parts = [part for piece in pieces for part in _parts_of(piece)]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse to compute.

        Raises:
            TypeError: always, but for being looked at.
        """
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} on a FlatRange, which stands for a part of a tensor and is only good to be saved or loaded")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatRange({len(self._parts)} boxes of {tuple(self.shape)}, {self.dtype})"

    def _properties(self) -> TensorProperties:
        return TensorProperties(dtype=self.dtype)

    # The protocol of torch.distributed._checkpointable #

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return what is to be written of it."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, part.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=part.offsets, sizes=part.sizes),
                    properties=self._properties(),
                    size=self.shape,
                ),
            )
            for part in self._parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return which boxes of it are wanted."""
        return [ChunkStorageMetadata(offsets=part.offsets, sizes=part.sizes) for part in self._parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of one box."""
        return next(part.values for part in self._parts if part.offsets == index.offset)
