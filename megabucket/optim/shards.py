"""The flat tensors an optimizer steps on, and the values that they hold for parts of parameters.

A ``MainShard`` is the tensors of one segment of this rank's shards (``layout/segments.py`` plans them); alignment gaps inside
a segment are zeros that stay zeros. Its gradient is withheld except while the optimizer steps. Everything that saves, moves or
measures state by parameter reads it as ``StatePiece``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from megabucket.buffer import ParamAndGradBuffer, WithheldGrad
from megabucket.errors import name_list
from megabucket.layout import Span
from megabucket.layout.segments import Segment

CHECK_AND_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""The operation of ``torch.amp.GradScaler``: set a flag if a gradient is not finite, and multiply all of them."""

_WITHHELD_BECAUSE: Final = (
    "is valid only inside DistributedOptimizer.step(), and it is only this rank's shard. Clip with "
    "DistributedOptimizer(..., clip_grad=1.0) or its clip_grad_norm_(), which take the norm over all ranks. Call step() and "
    "zero_grad() of the DistributedOptimizer, not those of the torch optimizer in it. After ddp.detach() make both anew: this "
    "torch optimizer holds flat shards, not parameters of the module."
)

Unscale = weakref.ReferenceType[Callable[[torch.Tensor, torch.Tensor], None]]
"""A weak reference to the function that unscales on all ranks: from a scaler's flag for non-finite gradients, and 1 / scale.
Weak, because a cycle through ``param.grad`` is never collected."""


class ShardGrad(WithheldGrad):
    """The gradient of a flat shard outside a step. It handles the call of ``torch.amp.GradScaler``, as torch's DTensor does.

    A scaler makes one call over the gradients in an optimizer's groups: test for non-finite values and multiply. Ranks have
    different shards and would get different results, so the optimizer finishes the gradient sync and agrees on one.
    """

    unscale: Unscale | None = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Handle a scaler's call; refuse every other use.

        Raises:
            PhaseError: the gradient is used.
        """
        if func is CHECK_AND_UNSCALE:
            reference = next(grad.unscale for grad in args[0] if isinstance(grad, ShardGrad))
            unscale = None if reference is None else reference()
            if unscale is not None:
                return unscale(*args[1:])
        return super().__torch_dispatch__(func, types, args, kwargs)


def _withheld(like: torch.Tensor, what: str, unscale: Unscale | None) -> WithheldGrad:
    grad = ShardGrad(like, what=what, reason=_WITHHELD_BECAUSE, accumulates=bool)  # bool() is False: never
    grad.unscale = unscale
    return grad


def main_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computation for parameters of a dtype: at least float32."""
    return torch.float32 if param_dtype.itemsize < torch.float32.itemsize else param_dtype


MAIN: Final = None
"""The key of main values, beside the keys of an optimizer's state."""


class StatePiece(NamedTuple):
    """The values under one key that this rank holds for a range of one parameter."""

    param: str
    like: torch.Tensor
    """Has the shape and memory order of the parameter in the buffer."""
    in_param: Span
    """Counted from the start of the parameter, in memory order."""
    key: Any
    """Of a flat tensor: that of the optimizer's state, or ``MAIN``, or what the caller calls it."""
    values: torch.Tensor
    """1D, one value per element of the range: a view of the flat tensor."""


class MainShard:
    """One segment as the optimizer sees it: a flat main parameter with a flat gradient.

    A float32 (or float64) segment steps in place on the parameter buffer. A 16-bit segment steps on a float32 copy, the main
    parameter, which is rounded into the buffer after each step; a 16-bit gradient is widened before.

    ``main.grad`` is the gradient while the optimizer steps, and raises on use at other times.
    """

    def __init__(
        self, segment: Segment, buffer: ParamAndGradBuffer, *, counts: bool = True, unscale: Unscale | None = None
    ) -> None:
        self.segment = segment
        self.buffer = buffer
        self.counts = counts
        """Whether this rank counts its gradients in the norm; exactly one rank does."""
        self.model_values = buffer.param_data[segment.span.start : segment.span.stop]
        """The parameters in the buffer: 1D, parameter dtype."""
        self.buffer_grads = buffer.grad_data[segment.span.start : segment.span.stop]
        """The gradient in the buffer: 1D, gradient dtype."""
        dtype = main_dtype(self.model_values.dtype)
        self.has_own_values = self.model_values.dtype != dtype
        self.main = torch.nn.Parameter(self.model_values.to(dtype))  # 1D, float32 or float64
        same_dtype = self.buffer_grads.dtype == self.main.dtype
        self.grad = self.buffer_grads if same_dtype else torch.zeros_like(self.main)  # 1D, dtype of main
        self.withheld = _withheld(self.grad, f"the gradient of a flat shard ({name_list(segment.params)})", unscale)
        self.withhold_grad()

    def pieces(self, flats: Mapping[Any, torch.Tensor]) -> Iterator[StatePiece]:
        """Return the values of each parameter under each key, in buffer order; the gaps between parameters are left out.

        Args:
            flats: by key, tensors of one value per element of the segment.
        """
        for name in self.segment.params:
            place, span = self.buffer.layout.params[name], self.segment.span
            start, stop = max(place.start, span.start), min(place.stop, span.stop)
            in_param = Span(start - place.start, stop - place.start)
            for key, flat in flats.items():
                values = flat[start - span.start : stop - span.start]
                yield StatePiece(name, self.buffer.slots[name].view, in_param, key, values)

    @property
    def own_values(self) -> dict[Any, torch.Tensor]:
        """The main values for ``pieces``; empty if the parameter buffer holds them."""
        return {MAIN: self.main.detach()} if self.has_own_values else {}

    def load_grad(self) -> torch.Tensor:
        """Return ``grad`` after loading the reduced gradient of this step."""
        if self.grad is not self.buffer_grads:
            self.grad.copy_(self.buffer_grads)
        return self.grad

    def withhold_grad(self) -> None:
        """Make ``main.grad`` raise on use."""
        self.main.grad = self.withheld

    def follow_buffer(self) -> None:
        """Replace main values that do not round to those in the parameter buffer: it was written since. Others stay.

        Only for a shard with values of its own.
        """
        main, written = self.main.detach(), self.model_values
        torch.where(main.to(written.dtype) == written, main, written.to(main.dtype), out=main)

    def params_with_nonfinite_grad(self) -> Sequence[str]:
        """Return the parameters whose gradient in this segment is not finite. Slow; for reports."""
        return [piece.param for piece in self.pieces({"grad": self.grad}) if not bool(torch.isfinite(piece.values).all())]


class Placeholder:
    """One-element stand-in for a group with no shard here; GradScaler needs a tensor. No optimizer steps on it."""

    grad = None

    def __init__(self, *, device: torch.device, unscale: Unscale) -> None:
        self.main = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self._withheld = _withheld(self.main.detach(), "the gradient of a group without a shard here", unscale)
        self.withhold_grad()

    def withhold_grad(self) -> None:
        """Make ``main.grad`` raise on use, except by scalers."""
        self.main.grad = self._withheld
