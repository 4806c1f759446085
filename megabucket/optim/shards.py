"""The flat tensors an optimizer steps on: this rank's shards, cut where the optimizer's parameter groups change.

Where they are cut is planned in ``layout.runs``; here a run becomes tensors. Alignment gaps inside a run are zeros that stay
zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from megabucket.buffer import ParamAndGradBuffer, WithheldGrad
from megabucket.errors import name_list
from megabucket.layout import Span
from megabucket.layout.runs import ShardRun

_WITHHELD_BECAUSE: Final = (
    "is there only while DistributedOptimizer.step() runs: at other times it is out of date, or part of a reduction that is "
    "under way, and one rank's shard at that. Clip with DistributedOptimizer(..., clip_grad=1.0), and read the norm over all "
    "ranks from what step() returns; after an all-reduce torch.nn.utils.clip_grad_norm_(ddp.parameters(), ...) is right, too. "
    "Call step() and zero_grad() of the DistributedOptimizer, not those of the torch optimizer in it."
)


class RunPiece(NamedTuple):
    """The part of one parameter that lies in one run: two ranges of equal length."""

    param: str
    in_param: Span  # counted from the start of the parameter, in its memory order
    in_run: Span


def main_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """Return what parameters of a dtype are stepped in: float32 where they are narrower."""
    return torch.float32 if param_dtype.itemsize < torch.float32.itemsize else param_dtype


class MainShard:
    """One run as the optimizer sees it: a flat main parameter with a flat gradient.

    A float32 (or float64) run steps in place on the parameter buffer. A 16-bit run steps on a float32 copy, the main
    parameter, which is rounded into the buffer after each step; a 16-bit gradient is widened before.

    ``main.grad`` is the gradient inside of ``shown_grads`` and refuses to be used outside of it.
    """

    def __init__(self, run: ShardRun, buffer: ParamAndGradBuffer) -> None:
        self.run = run
        self.buffer = buffer
        self._model_values = buffer.param_data[run.span.start : run.span.stop]  # 1D, parameter dtype
        self.buffer_grads = buffer.grad_data[run.span.start : run.span.stop]
        """The gradient in the buffer: 1D, gradient dtype."""
        dtype = main_dtype(self._model_values.dtype)
        self.has_own_values = self._model_values.dtype != dtype
        self.main = torch.nn.Parameter(self._model_values.to(dtype))  # 1D, float32 or float64
        same_dtype = self.buffer_grads.dtype == self.main.dtype
        self.grad = self.buffer_grads if same_dtype else torch.zeros_like(self.main)  # 1D, dtype of main
        self._widens_grad = not same_dtype
        self._withheld = WithheldGrad(
            self.grad,
            what=f"the gradient of a flat shard ({name_list(run.params)})",
            reason=_WITHHELD_BECAUSE,
            accumulates=bool,  # never
        )
        self.withhold_grad()

    def pieces(self) -> Iterator[RunPiece]:
        """Return what this run holds of each of its parameters, in buffer order."""
        for name in self.run.params:
            slot, span = self.buffer.layout.params[name], self.run.span
            start, stop = max(slot.start, span.start), min(slot.stop, span.stop)
            yield RunPiece(name, Span(start - slot.start, stop - slot.start), Span(start - span.start, stop - span.start))

    def load_grad(self) -> None:
        """Make ``grad`` the reduced gradient of this step."""
        if self._widens_grad:
            self.grad.copy_(self.buffer_grads)

    def show_grad(self) -> None:
        """Make ``grad`` what the optimizer steps on."""
        self.main.grad = self.grad

    def withhold_grad(self) -> None:
        """Let nobody use ``main.grad``."""
        self.main.grad = self._withheld

    @property
    def is_grad_withheld(self) -> bool:
        """Whether ``main.grad`` is as ``withhold_grad`` has left it, neither cleared nor replaced."""
        return self.main.grad is self._withheld

    @torch.no_grad()
    def store_values(self) -> None:
        """Write the stepped values into the parameter buffer."""
        if self.has_own_values:
            self._model_values.copy_(self.main)

    @torch.no_grad()
    def reload_values(self) -> None:
        """Take the values over from the parameter buffer, after somebody else wrote there.

        A main parameter that still rounds to what the buffer holds keeps its precision: nobody wrote there.
        """
        if self.has_own_values:
            self.restore_values(self.main.clone(), Span(0, self.run.span.numel))

    @torch.no_grad()
    def restore_values(self, earlier: torch.Tensor, in_run: Span) -> None:
        """Make main values of earlier those of a range, where they still round to what the buffer holds.

        Where they do not, somebody has written into the buffer since, and what is there counts.

        Args:
            earlier: 1D, dtype of main, one value per element of the range.
        """
        if self.has_own_values:
            written = self._model_values[in_run.start : in_run.stop]
            is_kept = earlier.to(written.dtype) == written
            self.main[in_run.start : in_run.stop] = torch.where(is_kept, earlier, written.to(earlier.dtype))

    def params_with_nonfinite_grad(self) -> Sequence[str]:
        """Return the names of the parameters whose gradient piece in this run is not finite. Slow; for reports."""
        return [
            piece.param
            for piece in self.pieces()
            if not bool(torch.isfinite(self.grad[piece.in_run.start : piece.in_run.stop]).all())
        ]


def load_grads(shards: Sequence[MainShard]) -> None:
    """Make the gradient of each shard the reduced one of this step. May be begun again."""
    for shard in shards:
        shard.load_grad()


@contextmanager
def shown_grads(shards: Sequence[MainShard]) -> Iterator[None]:
    """Let an optimizer see the gradients of its shards."""
    try:
        for shard in shards:
            shard.show_grad()
        yield
    finally:
        for shard in shards:
            shard.withhold_grad()
