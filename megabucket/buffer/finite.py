"""Is every gradient finite? Asked of each bucket before its reduction, which would spread a nan to every rank.

The smallest and the largest element tell: nan and inf pass through both, and nothing is added up, so large finite gradients
cannot overflow into a false alarm. On the CPU the answer is known at once; on a device it stays there until the fence, so that
the host need not wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megabucket.buffer.grad_slot import GradSlot


@dataclass(frozen=True, slots=True)
class NonFiniteParam:
    """A parameter whose gradient holds nan or inf."""

    param: str
    finding: str
    """What, how many of how many elements, and the first index."""


class FiniteTest:
    """Tests the flat gradients of one bucket group.

    Args:
        slots: the parameters in them, to name the culprits.
        flats: 1D gradients, one per bucket.
    """

    def __init__(self, slots: Sequence[GradSlot], flats: Sequence[torch.Tensor]) -> None:
        self._slots = slots
        self._flats = [flat for flat in flats if flat.numel()]
        self.found: tuple[NonFiniteParam, ...] = ()
        """What the last ``run`` found; on a device only after ``name_culprits``."""
        self.flag: torch.Tensor | None = None  # 0D bool on the device, or None where the host knows already

    def run(self) -> None:
        """Test the gradients as they are now: one reading pass."""
        self.found, self.flag = (), None
        for flat in self._flats:
            low, high = torch.aminmax(flat)
            if flat.device.type != "cpu":
                is_bad = torch.isfinite(low).logical_and_(torch.isfinite(high)).logical_not_()
                self.flag = is_bad if self.flag is None else self.flag.logical_or_(is_bad)
            elif not (math.isfinite(low) and math.isfinite(high)):
                self.name_culprits()

    def name_culprits(self) -> None:
        """Look for the parameters. Slow, and only after a hit. After the reduction these are the culprits of all ranks."""
        self.found = tuple(
            NonFiniteParam(slot.name, finding) for slot in self._slots if (finding := describe_nonfinite(slot.view))
        )


def describe_nonfinite(grad: torch.Tensor) -> str:
    """Return what is not finite in a gradient; empty when everything is.

    >>> describe_nonfinite(torch.tensor([[0.0, 1.0], [math.nan, math.inf]]))
    'nan and inf in 2 of 4 elements, first at [1, 0]'
    """
    is_bad = grad.isfinite().logical_not_()
    count = int(is_bad.sum())
    if not count:
        return ""
    kinds = [kind for kind, is_there in (("nan", grad.isnan().any()), ("inf", grad.isinf().any())) if is_there]
    first = is_bad.nonzero()[0].tolist()
    return f"{' and '.join(kinds)} in {count} of {grad.numel()} elements, first at {first}"
