"""Bytes that the wrapper and its optimizer hold on one rank, computed from a layout. No torch.

Counts what lives from step to step. Activations, the temporaries of autograd and of collectives, the process group and
the allocator's overhead are not in it, nor are frozen parameters, which stay out of the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from megabucket.layout import BufferLayout, ModelLayout, shard_slices
from megabucket.units import dtype_bytes

_MAIN_BYTES: Final = 4  # float32


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank by what they hold."""

    parameter_bytes: int = 0
    """Model parameters in the parameter buffer."""
    gradient_bytes: int = 0
    """Gradients in the gradient buffer."""
    padding_bytes: int = 0
    """What of both buffers belongs to no parameter: alignment gaps and padded bucket ends."""
    main_parameter_bytes: int = 0
    """float32 copies of the 16-bit parameters this rank updates."""
    main_gradient_bytes: int = 0
    """float32 copies of the 16-bit gradients this rank updates with."""
    moment_bytes: int = 0
    """Optimizer state of the elements this rank updates."""

    @property
    def total_bytes(self) -> int:
        """All categories together."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: RankMemory) -> RankMemory:
        """Add category by category."""
        return RankMemory(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


def rank_memory(
    layout: ModelLayout, *, rank: int, is_sharded: bool, moments_per_element: int = 2, has_main_params: bool = True
) -> RankMemory:
    """Return the bytes one rank holds for the model of ``layout``.

    Per element of a float32 model with Adam on ``n`` ranks that is ``4 + 4 + 8 / n`` bytes sharded and 16 otherwise; per
    element of a 16-bit model with float32 gradients ``2 + 4 + 12 / n`` and 18.

    Args:
        layout: of the whole model.
        rank: position in the data-parallel group. For buffers cut for fewer ranks (experts) the position is taken modulo
            their number. Ranks differ: the last ones own padding instead of parameters.
        is_sharded: whether the rank updates its shard only (the distributed optimizer), or everything.
        moments_per_element: tensors of optimizer state: 2 for Adam and AdamW, 1 for SGD with momentum, 0 for SGD.
        has_main_params: whether 16-bit parameters have float32 main parameters, as ``DistributedOptimizer`` keeps them in
            both modes. A plain torch optimizer keeps its state in the dtype of the parameters instead.

    Raises:
        LayoutError: a buffer's dtype is unknown.

    >>> from megabucket.config import DistributedDataParallelConfig
    >>> from megabucket.layout import ParamSpec, build_layout
    >>> layout = build_layout([ParamSpec("head", (200,), "bfloat16")], DistributedDataParallelConfig(), dp_size=2)
    >>> rank_memory(layout, rank=1, is_sharded=True)  # 200 elements padded to 256; rank 1 owns 128 to 200
    ... # doctest: +NORMALIZE_WHITESPACE
    RankMemory(parameter_bytes=400, gradient_bytes=800, padding_bytes=336,
               main_parameter_bytes=288, main_gradient_bytes=0, moment_bytes=576)
    """
    total = RankMemory()
    for buffer in layout.buffers:
        owned_numel = _owned_numel(buffer, rank % buffer.num_shards) if is_sharded else buffer.params_numel
        total += _buffer_memory(buffer, owned_numel, moments_per_element, has_main_params=has_main_params)
    return total


def _buffer_memory(buffer: BufferLayout, owned_numel: int, moments_per_element: int, *, has_main_params: bool) -> RankMemory:
    param_bytes, grad_bytes = dtype_bytes(buffer.key.param_dtype), dtype_bytes(buffer.key.grad_dtype)
    is_narrow = param_bytes < _MAIN_BYTES and has_main_params
    step_bytes = _MAIN_BYTES if is_narrow else param_bytes
    return RankMemory(
        parameter_bytes=buffer.params_numel * param_bytes,
        gradient_bytes=buffer.params_numel * grad_bytes,
        padding_bytes=(buffer.numel - buffer.params_numel) * (param_bytes + grad_bytes),
        main_parameter_bytes=owned_numel * _MAIN_BYTES if is_narrow else 0,
        main_gradient_bytes=owned_numel * _MAIN_BYTES if is_narrow and grad_bytes < _MAIN_BYTES else 0,
        moment_bytes=owned_numel * step_bytes * moments_per_element,
    )


def _owned_numel(buffer: BufferLayout, rank: int) -> int:
    return sum(
        piece.in_param.numel for bucket in buffer.buckets for piece in shard_slices(buffer, bucket=bucket.index, rank=rank)
    )
