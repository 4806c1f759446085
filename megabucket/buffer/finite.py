"""Tests that gradients and their sum over the ranks are finite, before the reduction of a bucket would spread a nan.

The smallest and the largest element decide: both propagate nan and inf, and nothing is summed, so large finite gradients cannot
overflow into a false alarm. In float32 a gradient so large that the sum over the ranks may overflow counts as infinite. In
float16 such gradients are common, so there the sum is tested as well (``_ParamAndGradBucketGroup``). On the CPU the answer is
known at once; on a device it stays there until the fence, so that the host does not wait.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from megabucket.buffer.grad_slot import GradSlot
from megabucket.comm import Accelerator, Communicator

# On a host the norm takes two thirds of the time of the extremes. It is at least as large as any element (the factor of one
# half covers rounding) and propagates nan and inf. If it overflows, the extremes decide.
_NORM_TELLS: Final = (torch.float32, torch.float64)
_LOGGER: Final = logging.getLogger("megabucket")
_NORMS_LEARNT: Final = 100
_LARGE: Final = 10.0


@dataclass(frozen=True, slots=True)
class NonFiniteParam:
    """A parameter whose gradient holds nan or inf, or is too large to be summed."""

    param: str
    finding: str
    """The kind of value, the number of elements, and the first index."""


class FiniteTest:
    """Tests the flat gradients of one bucket group.

    Args:
        slots: their parameters, to name the culprits.
        flats: 1D gradients, one per bucket.
        headrooms: for each of them, the factor by which its largest element must stay below the dtype's maximum; powers of two.
    """

    def __init__(
        self, slots: Sequence[GradSlot], flats: Sequence[torch.Tensor], headrooms: Sequence[float] | None = None
    ) -> None:
        self._slots = slots
        headrooms = [1.0] * len(flats) if headrooms is None else headrooms
        # Exact in the dtype: its maximum divided by a power of two.
        limits = [torch.finfo(flat.dtype).max / headroom for flat, headroom in zip(flats, headrooms, strict=True)]
        self._has_headroom = any(headroom > 1 for headroom in headrooms)
        self.flats = [(flat, limit) for flat, limit in zip(flats, limits, strict=True) if flat.numel()]
        """The tested tensors, each with its largest allowed magnitude."""
        self._is_on_host = not flats or Accelerator.of(flats[0].device) is None
        self.found: tuple[NonFiniteParam, ...] = ()
        """The culprits found by the last ``run``; on a device only after ``name_culprits``."""
        self.peaks: list[torch.Tensor] = []
        """On a device the largest magnitude in each of ``flats`` (0D), or nan; empty on a host."""

    def run(self) -> None:
        """Test the gradients as they are now: one reading pass."""
        self.found, self.peaks = (), []
        for flat, limit in self.flats:
            if not self._is_on_host:
                self.peaks.append(torch.linalg.vector_norm(flat, torch.inf))
            elif flat.dtype in _NORM_TELLS and float(torch.linalg.vector_norm(flat)) <= limit / 2:
                continue
            elif not all(-limit <= float(extreme) <= limit for extreme in torch.aminmax(flat)):  # nan is not, either
                self.name_culprits()
                return

    def name_culprits(self) -> None:
        """Find the parameters. Slow, and only after a hit. After the reduction the culprits are those of all ranks."""
        self.found = tuple(
            NonFiniteParam(slot.name, finding) for slot in self._slots if (finding := describe_nonfinite(slot.in_buffer))
        )
        if self._has_headroom and not self.found:
            # All are finite, so the largest is too large to be summed. On a device a mean may have shrunk it meanwhile.
            largest = {slot.name: float(slot.in_buffer.abs().max()) for slot in self._slots if slot.numel}
            name = max(largest, key=largest.__getitem__)
            self.found = (NonFiniteParam(name, f"values of {largest[name]:.3g}, too large to be summed over the ranks"),)


class LargeTest:
    """Warns of gradients of one bucket group that are far larger than before, as after a bit flip in an exponent.

    Megatron's rule: the norm before the reduction is at least ten times the largest of the first hundred.
    """

    def __init__(self, slots: Sequence[GradSlot], communicator: Communicator, where: str) -> None:
        self._slots, self._communicator, self._where = slots, communicator, where
        self._num_seen, self._largest = 0, 0.0

    def run(self) -> None:
        """Test the gradients as they are now: one reading pass, and the host waits for it."""
        norms = torch.stack(list(torch._foreach_norm([slot.view for slot in self._slots], dtype=torch.float32)))
        norm = float(self._communicator.read(torch.linalg.vector_norm(norms), label="gradient norm"))
        if not norm or not math.isfinite(norm):
            return  # no gradient, or one that ``FiniteTest`` finds
        if self._num_seen < _NORMS_LEARNT:
            self._num_seen, self._largest = self._num_seen + 1, max(self._largest, norm)
        elif norm >= _LARGE * self._largest:
            name, largest = self._slots[int(norms.argmax())].name, float(norms.max())
            _LOGGER.warning(
                "megabucket: the gradients of %s have a norm of %.3g before they are reduced; in its first %d steps it was at "
                "most %.3g. The largest is %r with %.3g. The batch may be unusual, or the device faulty: try another one.",
                self._where,
                norm,
                _NORMS_LEARNT,
                self._largest,
                name,
                largest,
            )


def any_beyond(tests: Iterable[FiniteTest]) -> torch.Tensor | None:
    """Return a 0D tensor: whether a test has found a value that is not finite. ``None`` if the host knows already."""
    peaks_of: dict[float, list[torch.Tensor]] = {}
    for test in tests:
        for peak, (_, limit) in zip(test.peaks, test.flats, strict=False):
            peaks_of.setdefault(limit, []).append(peak)
    # One comparison per limit. A nan is not below any limit.
    are_within = [(torch.stack(peaks) <= limit).all() for limit, peaks in peaks_of.items()]
    return functools.reduce(torch.logical_and, are_within).logical_not_() if are_within else None


def find_nonfinite(
    tests: Sequence[tuple[int, FiniteTest]], communicator: Communicator, *, num_buckets: int
) -> dict[str, str | int]:
    """Return the fields of a ``NonFiniteGradientError`` about the findings of tests; empty if all gradients are finite.

    Args:
        tests: each with the index of its bucket group.
    """
    is_bad = any_beyond(test for _, test in tests)
    if is_bad is not None and communicator.read(is_bad, label="finite test"):
        for _, test in tests:
            if bool(any_beyond([test])):
                test.name_culprits()  # only now does the host know of them
    found = [(index, one) for index, test in tests for one in test.found]
    if not found:
        return {}
    bucket, first = found[0]
    counts = {"num_buckets": num_buckets, "num_others": len(found) - 1}
    return {"param": first.param, "bucket": bucket, "finding": first.finding, **counts}


def describe_nonfinite(grad: torch.Tensor) -> str:
    """Describe the values of a gradient that are not finite; empty if all are.

    >>> describe_nonfinite(torch.tensor([[0.0, 1.0], [torch.nan, torch.inf]]))
    'nan and inf in 2 of 4 elements, first at [1, 0]'
    """
    is_bad = grad.isfinite().logical_not_()
    count = int(is_bad.sum())
    if not count:
        return ""
    kinds = [kind for kind, is_there in (("nan", grad.isnan().any()), ("inf", grad.isinf().any())) if is_there]
    first = is_bad.nonzero()[0].tolist()
    return f"{' and '.join(kinds)} in {count} of {grad.numel()} elements, first at {first}"
