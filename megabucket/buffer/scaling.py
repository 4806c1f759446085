"""How a sum over ranks becomes a mean: exactly once, without overflow or underflow on a 16-bit wire.

A float32 or float64 sum is divided once, at the end. In a 16-bit buffer that could overflow before the division, and
dividing everything first would flush small float16 gradients to zero; so a power of two near the square root of the number
of ranks, which is exact, is divided out before, and the rest after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap

import torch

from megabucket.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GradScale:
    """Divisors around one collective; their product is the number of ranks (or 1 for a sum)."""

    divisor_before: float
    divisor_after: float

    @staticmethod
    def mean_of(num_ranks: int, dtype: torch.dtype) -> GradScale:
        """Return the divisors for a mean over ``num_ranks`` in a buffer of ``dtype``.

        >>> GradScale.mean_of(6, torch.float32)
        GradScale(divisor_before=1.0, divisor_after=6.0)
        >>> GradScale.mean_of(6, torch.float16)
        GradScale(divisor_before=2.0, divisor_after=3.0)
        """
        before = 2.0 ** math.floor(math.log2(math.sqrt(num_ranks))) if dtype.itemsize == 2 else 1.0
        return GradScale(before, num_ranks / before)

    def before(self, values: torch.Tensor) -> None:
        """Scale in place what goes into the collective."""
        if self.divisor_before != 1:
            values.div_(self.divisor_before)

    def divisions(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return an iterator that scales in place what came out of it, in one call in C."""
        return starmap(torch.Tensor.div_, [(values, self.divisor_after)] if self.divisor_after != 1 else [])


def check_grad_factor(factor: float | torch.Tensor) -> None:
    """Refuse to multiply gradients by nan or inf.

    Raises:
        ConfigError: the factor is not finite.
    """
    if not math.isfinite(factor):
        raise ConfigError(
            f"scale_gradients() needs a finite factor, got {float(factor)}: every gradient would be nan or inf, and the "
            "weights after it. One over the number of tokens is infinite for a batch without any: leave such a step out on all "
            "ranks, with zero_grad() in place of the optimizer's step."
        )
