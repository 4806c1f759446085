"""The global gradient norm over shards, and clipping by it.

Squares are summed in float64 and the norm is rounded to float32, so it does not depend on how the gradients are cut into
shards, buckets or modes: float32 sums over different cuts differ in the last bit in most cases, and clipping would carry the
difference into the weights.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import torch

from megabucket.comm import Accelerator, AllReduce, Communicator
from megabucket.errors import ConfigError

Scale = Callable[[list[torch.Tensor], float], object]
"""Multiplies tensors by a number, in place."""

_FLOAT32: Final = struct.Struct("f")
_LARGEST: Final = torch.finfo(torch.float32).max

_CHUNK_NUMEL: Final = 1 << 17
"""Elements summed at a time on CPU: the float64 copy torch makes of them (1 MiB) stays in the core's own cache."""


class GlobalNorm:
    """The L2 norm over the gradients of all ranks' shards, step after step.

    Args:
        communicator: the ranks that hold parts of the gradients (one all-reduce of 8 bytes); ``None``: this one holds all.
        device: where the gradients of all ranks live, and the collective runs.
    """

    def __init__(self, communicator: Communicator | None, *, device: torch.device) -> None:
        self.accelerator = Accelerator.of(device)
        self._communicator = communicator
        self._total = torch.zeros(1, dtype=torch.float64, device=device)
        self._calls = () if communicator is None else communicator.prepare([AllReduce(self._total)])

    def of(self, norms: Iterable[torch.Tensor]) -> float:
        """Return the norm over this rank's gradients and those of the other ranks.

        Args:
            norms: the ``l2_norm`` of each of this rank's gradients; alignment gaps and padding in them are zero and count
                nothing. May be empty: a rank can own nothing but padding.
        """
        if found := list(norms):
            self._total.copy_(torch.stack(found).square_().sum())
        else:
            self._total.zero_()
        total = self._total
        if self._communicator is not None:
            total = self._communicator.launch(self._calls, label="grad norm").read(total)
        norm = math.sqrt(float(total))
        # Float64 sums over different cuts still differ in their last bits; rounded to float32 they do not.
        return _FLOAT32.unpack(_FLOAT32.pack(norm))[0] if norm <= _LARGEST else norm


def l2_norm(grad: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of all elements: float64, 0D, on the device of the gradient. One operation there."""
    if grad.device.type != "cpu":
        # The kernel for many tensors widens each element as it reads it; that of vector_norm makes a float64 copy of all.
        norms: list[torch.Tensor] = list(torch._foreach_norm([grad], dtype=torch.float64))
    else:
        norms = list(map(partial(torch.linalg.vector_norm, dtype=torch.float64), grad.split(_CHUNK_NUMEL)))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_by_norm(grads: Sequence[torch.Tensor], *, norm: float, max_norm: float, scale: Scale = torch._foreach_mul_) -> None:
    """Scale gradients in place so that their global norm is at most ``max_norm``; leave smaller ones untouched.

    The factor is ``max_norm / (norm + 1e-6)``, as in ``torch.nn.utils.clip_grad_norm_`` and in Megatron.
    """
    factor = max_norm / (norm + 1e-6)
    if factor < 1 and grads:
        scale(list(grads), factor)


def check_clip_grad(clip_grad: float) -> None:
    """Refuse what is no norm to clip to.

    Raises:
        ConfigError: it is negative or not finite.
    """
    if isinstance(clip_grad, bool) or not math.isfinite(clip_grad) or clip_grad < 0:
        raise ConfigError(f"clip_grad must be a finite number >= 0 (0 switches clipping off), got {clip_grad!r}")
