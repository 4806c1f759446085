"""The global gradient norm over shards, clipping by it, and the count of zeros.

Squares are summed in float64 and the norm is rounded to float32, so it does not depend on how the gradients are cut into
shards, buckets or modes: float32 sums over different cuts differ in the last bit in most cases, and clipping would carry the
difference into the weights. This holds with torch's kernels; ``kernels.py`` says what those of apex do. Float64 sums differ
in their own last bits, so about one norm in 10**8 is still rounded another way: ``ExactNorm`` adds integers instead.
"""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch.nn.functional import pad

from megabucket.comm import Accelerator, AllReduce, Batch, Communicator, ReduceOp
from megabucket.errors import ConfigError

Scale = Callable[[list[torch.Tensor], float], object]
"""Multiplies tensors by a number, in place."""

_FLOAT32: Final = struct.Struct("f")
_LARGEST: Final = torch.finfo(torch.float32).max

_CHUNK_NUMEL: Final = 1 << 17
"""Elements summed at a time on CPU: the float64 copy torch makes of them (1 MiB) stays in the core's own cache."""


_DEVICE_CHUNK_NUMEL: Final = 1 << 22
"""The same on devices, for few launches: 32 MiB."""

_BITS: Final = 52
"""Of the integer of an element, which float64 can hold."""

_ROW_NUMEL: Final = 1 << 10
"""Integers that are added in 64 bits at a time; their sum has 62 bits."""

_HALF_BITS: Final = 31
_LARGEST_EXPONENT: Final = 1000  # of a scale; larger ones are near the end of float64's range


def l2_norm(grad: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of all elements: float64, 0D, on the device of the gradient. One operation there."""
    if grad.device.type != "cpu":
        # The kernel for many tensors widens each element as it reads it; that of vector_norm makes a float64 copy of all.
        norms: list[torch.Tensor] = list(torch._foreach_norm([grad], dtype=torch.float64))
    else:
        norms = list(map(partial(torch.linalg.vector_norm, dtype=torch.float64), grad.split(_CHUNK_NUMEL)))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def p_norm(grad: torch.Tensor, *, norm_type: float) -> torch.Tensor:
    """Return a p-norm of all elements, as ``l2_norm`` does for p = 2."""
    parts = list(grad.split(_CHUNK_NUMEL)) if grad.device.type == "cpu" else [grad]
    norms = torch._foreach_norm(parts, norm_type, dtype=torch.float64)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return total


class GlobalNorm:
    """The norm over the gradients of all ranks' shards, step after step.

    Args:
        communicator: the ranks that hold parts of the gradients, or the same gradients. One all-reduce of 8 bytes.
        is_whole: whether each rank holds all gradients.
        device: of the gradients and the collective.
        norm_type: p of the p-norm, at least 1; infinite for the largest magnitude, which is infinite where a gradient is nan.
        l2_norm: the function of this name, or a kernel in its place.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        device: torch.device,
        is_whole: bool = False,
        norm_type: float = 2.0,
        l2_norm: Callable[[torch.Tensor], torch.Tensor] = l2_norm,
    ) -> None:
        self.accelerator = Accelerator.of(device)
        self._communicator, self.is_collective = communicator, not is_whole
        self.norm_type = float(norm_type)
        self.of_grad = l2_norm if norm_type == 2 else partial(p_norm, norm_type=norm_type)
        """Returns the norm of one of this rank's gradients."""
        op = ReduceOp.MAX if norm_type == math.inf else ReduceOp.SUM
        self._power = 1.0 if norm_type == math.inf else norm_type  # of local norms in the collective
        self._total = torch.zeros(1, dtype=torch.float64, device=device)
        self._calls = communicator.prepare([AllReduce(self._total, op)])

    def of(self, norms: Iterable[torch.Tensor]) -> float:
        """Return the norm over this rank's gradients and those of the other ranks.

        Args:
            norms: ``of_grad`` of each of this rank's gradients; alignment gaps and padding in them are zero and do not
                count. May be empty: a rank can own padding only.
        """
        if not (found := list(norms)):
            self._total.zero_()
        elif self.norm_type == math.inf:  # a MAX over ranks may drop a nan
            self._total.copy_(torch.stack(found).max().nan_to_num_(nan=math.inf, posinf=math.inf))
        else:
            self._total.copy_(torch.stack(found).pow_(self._power).sum())
        total = self._total
        if self.is_collective:
            total = self._communicator.launch(self._calls, label="grad norm").read(total)
        elif self.accelerator is not None:
            total = self._communicator.read(total, label="grad norm")
        norm = math.sqrt(float(total)) if self._power == 2 else float(total) ** (1 / self._power)
        # Float64 sums over different cuts still differ in their last bits; rounded to float32 they do not.
        return _FLOAT32.unpack(_FLOAT32.pack(norm))[0] if norm <= _LARGEST else norm

    def num_zeros(self, grads: Iterable[torch.Tensor], *, numel: int) -> int:
        """Return how many elements of the gradients of all ranks are zero. One all-reduce of 8 bytes.

        Args:
            grads: of this rank.
            numel: their elements without alignment gaps, which are zeros that do not count.
        """
        total = torch.full_like(self._total, numel)  # exact up to 2**53
        for grad in grads:
            total -= grad.count_nonzero()
        label = "zeros in gradients"
        if not self.is_collective:
            return int(self._communicator.read(total, label=label))
        return int(self._communicator.launch([AllReduce(total)], label=label).read(total))


class ExactNorm(GlobalNorm):
    """The norm whose bits do not depend on how gradients are cut: each element becomes an integer, and integers are added.

    The largest magnitude of all ranks, with p = 2, is scaled by a power of two to less than 2**26. Then the square of each
    element is rounded to an integer below 2**52. This rounding depends on the element alone, and sums of integers are exact in
    any order. It changes the sum by at most 2**-51 of the largest square for each element. Two all-reduces of 16 bytes, after
    all gradients are reduced.

    Args:
        norm_type: 1 or 2. The largest magnitude itself is exact already.
    """

    def __init__(self, communicator: Communicator, *, norm_type: float = 2.0, **arguments: Any) -> None:
        super().__init__(communicator, norm_type=norm_type, **{**arguments, "l2_norm": _itself})
        self.of_grad = _itself
        self._largest = self._total.new_zeros(2)  # the magnitude, and whether there is a nan
        self._halves = torch.zeros(2, dtype=torch.int64, device=self._total.device)  # of the sum: times 2**31, and the rest
        self._calls = communicator.prepare([AllReduce(self._largest, ReduceOp.MAX)])
        self._calls_of_sum = communicator.prepare([AllReduce(self._halves)])

    def of(self, norms: Iterable[torch.Tensor]) -> float:
        """Return the norm over this rank's gradients, which ``of_grad`` returns as they are, and those of the other ranks."""
        grads = [grad.view(-1) for grad in norms if grad.numel()]
        self._largest.zero_()
        if grads:
            bounds = torch.stack([bound.double() for grad in grads for bound in torch.aminmax(grad)]).abs_()
            largest = bounds.max()  # a MAX over ranks may drop a nan
            self._largest.copy_(torch.stack([largest.nan_to_num(nan=math.inf, posinf=math.inf), largest.isnan().double()]))
        largest, has_nan = self._over_ranks(self._calls, self._largest)
        if has_nan or largest in (0.0, math.inf):
            return math.nan if has_nan else largest
        exponent = min(int(_BITS / self.norm_type) - math.frexp(largest)[1], _LARGEST_EXPONENT)
        self._halves.zero_()
        chunk_numel = _CHUNK_NUMEL if self.accelerator is None else _DEVICE_CHUNK_NUMEL
        for part in chain.from_iterable(grad.split(chunk_numel) for grad in grads):
            scaled = part.to(torch.float64, copy=True).mul_(2.0**exponent)
            terms = (scaled.square_() if self.norm_type == 2 else scaled.abs_()).round_().long()
            rows = pad(terms, (0, -terms.numel() % _ROW_NUMEL)).view(-1, _ROW_NUMEL).sum(1)  # below 2**62
            self._halves += torch.stack([(rows >> _HALF_BITS).sum(), (rows & ((1 << _HALF_BITS) - 1)).sum()])
        high, low = self._over_ranks(self._calls_of_sum, self._halves)
        total = (high << _HALF_BITS) + low
        norm = (math.sqrt(total) if self.norm_type == 2 else float(total)) * 2.0**-exponent
        return float(_FLOAT32.unpack(_FLOAT32.pack(norm))[0]) if norm <= _LARGEST else norm

    def _over_ranks(self, calls: Batch, values: torch.Tensor) -> list[Any]:
        if self.is_collective:
            values = self._communicator.launch(calls, label="grad norm").read(values)
        elif self.accelerator is not None:
            values = self._communicator.read(values, label="grad norm")
        return list(values.tolist())


def _itself(grad: torch.Tensor) -> torch.Tensor:
    return grad


def clip_by_norm(grads: Sequence[torch.Tensor], *, norm: float, max_norm: float, scale: Scale = torch._foreach_mul_) -> None:
    """Scale gradients in place so that their global norm is at most ``max_norm``; leave smaller ones unchanged.

    The factor is ``max_norm / (norm + 1e-6)``, as in ``torch.nn.utils.clip_grad_norm_`` and in Megatron.
    """
    factor = max_norm / (norm + 1e-6)
    if factor < 1 and grads:
        scale(list(grads), factor)


def check_norm_settings(clip_grad: Any, norm_type: float, grad_norm_skip_threshold: float, *, is_exact: bool = False) -> None:
    """Check the three settings.

    Args:
        is_exact: whether the norm must not depend on how gradients are cut, as ``ExactNorm``.

    Raises:
        ConfigError: one of them is not a number, or out of range.
    """
    if not _is_number(clip_grad) or not 0 <= clip_grad < math.inf:
        raise ConfigError(f"clip_grad must be a finite number >= 0 (0 switches clipping off), got {clip_grad!r}")
    if not _is_number(norm_type) or not norm_type >= 1:
        raise ConfigError(f"norm_type must be a number >= 1, or infinite, got {norm_type!r}")
    if is_exact and norm_type not in (1, 2, math.inf):
        raise ConfigError(
            f"reduction_order='rank' adds integers in a norm, for norm_type 1, 2 or infinite, got norm_type={norm_type!r}. "
            "Use one of these, or reduction_order='backend'."
        )
    if not _is_number(grad_norm_skip_threshold) or not grad_norm_skip_threshold > 0:
        raise ConfigError(f"grad_norm_skip_threshold must be a number > 0, or infinite, got {grad_norm_skip_threshold!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
