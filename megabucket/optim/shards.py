"""The tensors an optimizer steps on, and the values that they hold for parts of parameters.

A ``MainShard`` is the flat tensors of one segment of this rank's shards (``layout/segments.py`` plans them); alignment gaps
inside a segment are zeros that stay zeros. A ``WholeShard`` is one parameter as it is, for optimizers that need whole tensors.
Everything that saves, moves or measures state by parameter reads it as ``StatePiece``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from megabucket.buffer import ParamAndGradBuffer, Unscale, view_like
from megabucket.layout import Span
from megabucket.layout.segments import Segment


class ReducedGrad(torch.Tensor):
    """The reduced gradient of one parameter, which passes a call of ``torch.amp.GradScaler`` on to the optimizer.

    A scaler makes one call over all gradients of a dtype: test for non-finite values and multiply. One of them is of this
    class, so that ranks with other parts of the model learn the result. In every other operation it is a plain tensor.
    """

    unscale: Unscale | None = None

    @classmethod
    def over(cls, grad: torch.Tensor, unscale: Unscale) -> ReducedGrad:
        """Return the same memory."""
        made = grad.as_subclass(cls)
        made.unscale = unscale
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Handle a scaler's call; compute everything else as torch does."""
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            reference = next(grad.unscale for grad in args[0] if isinstance(grad, ReducedGrad))
            unscale = None if reference is None else reference()
            if unscale is not None:
                return unscale(*args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def main_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computation for parameters of a dtype: at least float32."""
    return torch.float32 if param_dtype.itemsize < torch.float32.itemsize else param_dtype


_ALIGNMENT_BYTES: Final = 64  # of memory that torch allocates on a host

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


class GradShard:
    """The reduced gradient of one segment on this rank."""

    def __init__(self, segment: Segment, buffer: ParamAndGradBuffer, *, counts: bool = True) -> None:
        self.segment = segment
        self.buffer = buffer
        self.counts = counts
        """Whether this rank counts its gradients in the norm; exactly one rank does."""
        self.buffer_grads = buffer.grad_data[segment.span.start : segment.span.stop]
        """The gradient in the buffer: 1D, gradient dtype."""
        self.dtype = main_dtype(buffer.param_data.dtype)
        """Of the update."""
        self.grad = self.buffer_grads
        self.numel = sum(piece.in_param.numel for piece in self.pieces({None: self.buffer_grads}))
        """Elements of parameters, without the gaps between them."""

    def pieces(self, flats: Mapping[Any, torch.Tensor]) -> Iterator[StatePiece]:
        """Return the values of each parameter under each key, in buffer order; the gaps between parameters are left out.

        Args:
            flats: by key, tensors of one value per element of the segment.
        """
        for name in self.segment.params:
            yield from self.pieces_of(name, flats)

    def pieces_of(self, name: str, flats: Mapping[Any, torch.Tensor]) -> Iterator[StatePiece]:
        """Return the values of one parameter of the segment under each key."""
        place, span = self.buffer.layout.params[name], self.segment.span
        start, stop = max(place.start, span.start), min(place.stop, span.stop)
        in_param = Span(start - place.start, stop - place.start)
        for key, flat in flats.items():
            yield StatePiece(name, self.buffer.slots[name].view, in_param, key, flat[start - span.start : stop - span.start])

    def range_of(self, in_buffer: Span) -> slice:
        """Return the place of a range of the buffer in the tensors of the segment."""
        return slice(in_buffer.start - self.segment.span.start, in_buffer.stop - self.segment.span.start)

    @property
    def flat_grad(self) -> torch.Tensor:
        """``grad`` in one dimension, in memory order."""
        return self.grad

    def load_grad(self) -> torch.Tensor:
        """Return ``grad`` after loading the reduced gradient of this step."""
        if self.buffer_grads.dtype != self.dtype:
            self.grad = self.buffer_grads.to(self.dtype)
        return self.grad

    def params_with_nonfinite_grad(self) -> Sequence[str]:
        """Return the parameters whose gradient in this segment is not finite. Slow; for reports."""
        return [piece.param for piece in self.pieces({"grad": self.grad}) if not bool(torch.isfinite(piece.values).all())]


class MainShard(GradShard):
    """One segment as the optimizer sees it: a flat main parameter with a flat gradient.

    A float32 (or float64) segment steps in place on the parameter buffer. A 16-bit segment steps on a float32 copy, the main
    parameter, which is rounded into the buffer after each step; a 16-bit gradient is widened before.
    """

    def __init__(self, segment: Segment, buffer: ParamAndGradBuffer, *, counts: bool = True) -> None:
        super().__init__(segment, buffer, counts=counts)
        self.model_values = self.shaped(buffer.param_data[segment.span.start : segment.span.stop])
        """The parameters in the buffer, in the shape of ``main``: parameter dtype."""
        self.has_own_values = self.model_values.dtype != self.dtype
        self.main = torch.nn.Parameter(self.model_values.to(self.dtype))  # float32 or float64
        self.has_stepped = False
        """Whether the optimizer has stepped on it."""
        self.is_received = False
        """Whether its gradient arrives from other ranks, and new values go back to them."""
        same_dtype = self.buffer_grads.dtype == self.dtype
        self.grad = self.shaped(self.buffer_grads) if same_dtype else torch.zeros_like(self.main)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a 1D tensor of the segment as the optimizer sees it."""
        return flat

    @property
    def own_values(self) -> dict[Any, torch.Tensor]:
        """The main values for ``pieces``; empty if the parameter buffer holds them."""
        return {MAIN: self.main.detach()} if self.has_own_values else {}

    def load_grad(self) -> torch.Tensor:
        """Return ``grad`` after loading the reduced gradient of this step."""
        if self.buffer_grads.dtype != self.dtype:
            self.grad.copy_(self.shaped(self.buffer_grads))
        return self.grad

    def follow_buffer(self) -> None:
        """Replace main values that do not round to those in the parameter buffer: it was written since. Others stay.

        Only for a shard with values of its own.
        """
        main, written = self.main.detach(), self.model_values
        torch.where(main.to(written.dtype) == written, main, written.to(main.dtype), out=main)


class WholeShard(MainShard):
    """One whole parameter as the optimizer sees it, in its shape and memory order.

    Args:
        is_received: whether its gradient arrives from other ranks, to which this one, the owner, sends the new values.
    """

    def __init__(self, segment: Segment, buffer: ParamAndGradBuffer, *, counts: bool = True, is_received: bool = False) -> None:
        self.name = segment.params[0]
        self._like = buffer.slots[self.name].view
        super().__init__(segment, buffer, counts=counts)
        self.is_received = is_received
        if is_received:
            self.receive(self.buffer_grads[:0])

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a 1D tensor of the parameter in its shape and memory order."""
        return view_like(flat, 0, self._like.shape, self._like.stride())

    @property
    def flat_grad(self) -> torch.Tensor:
        """``grad`` in one dimension, in memory order."""
        return in_memory_order(self.grad, self._like)

    def receive(self, grads: torch.Tensor) -> None:
        """Take the gradient of this step, or an empty one after it: 1D, in memory order."""
        if grads.data_ptr() % _ALIGNMENT_BYTES:
            # Libraries round products of matrices by the alignment of their memory. In a buffer all parameters are aligned.
            grads = grads.clone()
        self.buffer_grads = grads
        self.grad = self.shaped(grads).to(self.dtype) if grads.numel() else grads

    def load_grad(self) -> torch.Tensor:
        """Return ``grad`` after loading the reduced gradient of this step, if that lies in the buffer."""
        return self.grad if self.is_received else super().load_grad()

    def pieces_of(self, name: str, flats: Mapping[Any, torch.Tensor]) -> Iterator[StatePiece]:
        """Return the values of the parameter under each key; copies, if an optimizer has chosen another memory order."""
        for key, whole in flats.items():
            yield StatePiece(name, self._like, Span(0, self._like.numel()), key, in_memory_order(whole, self._like))


def in_memory_order(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in the memory order of another one of its shape, 1D; a view if it has that order."""
    if whole.dim() != 1 and whole.stride() != like.stride():
        whole = torch.empty_like(like, dtype=whole.dtype, device=whole.device).copy_(whole)
    return whole.as_strided((whole.numel(),), (1,))
