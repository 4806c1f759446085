"""``Linear``: a ``torch.nn.Linear`` whose weight gradient goes straight into the gradient buffer.

A plain layer writes its weight gradient into memory of its own, and the hook copies or adds it into the buffer: for 16-bit
gradients and a float32 buffer 6 bytes an element are moved to store it and 10 to add it, besides the 2 to write it. Here the
matrix product itself writes there, and in the first microbatch of a step it overwrites, so nothing is zeroed.

Outside a wrapper, and wherever the buffer must not be written, the layer is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megabucket.buffer.grad_slot import GradSlot
from megabucket.fused.kernels import add_weight_grad


class Linear(torch.nn.Linear):
    """A ``torch.nn.Linear`` in every other respect: arguments, parameters, names, results.

    It has no second derivative with respect to anything while it is wrapped. A weight that is used in yet another way (tied to
    an embedding, or read by the loss) needs ``weight.zero_out_wgrad = True``; without it such a backward is a ``PhaseError``.
    From one microbatch to the next the gradient is in ``weight.main_grad`` alone: ``ddp.zero_grad()`` forgets it, but clearing
    ``weight.grad``, as the ``zero_grad()`` of a plain torch optimizer does, does not.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Return ``input @ weight.T + bias``."""
        return linear(input, self.weight, self.bias)


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``inputs @ weight.T + bias``; in backward add the weight's gradient to ``weight.main_grad``.

    Args:
        weight: out features x in features. A parameter of a wrapped module, or the function is ``torch.nn.functional.linear``.
    """
    has_place = weight.requires_grad and weight.is_leaf and _slot_of(weight) is not None
    if not (has_place and torch.is_grad_enabled()):
        return torch.nn.functional.linear(inputs, weight, bias)
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        inputs, bias = inputs.to(dtype), None if bias is None else bias.to(dtype)
    result: torch.Tensor = _AddingLinear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return result


def _slot_of(weight: torch.Tensor) -> GradSlot | None:
    find: Callable[[], GradSlot | None] | None = getattr(weight, "main_grad_slot", None)
    return None if find is None else find()


class _AddingLinear(torch.autograd.Function):
    """The product and its gradients; that of the weight is a dummy where the real one is in the buffer."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        factor = weight.to(inputs.dtype)  # the weight itself outside autocast
        ctx.save_for_backward(inputs, factor)
        # Not saved: only the parameter itself has main_grad. It does not lead back here, so this makes no cycle.
        ctx.weight, ctx.bias_dtype = weight, None if bias is None else bias.dtype
        return torch.nn.functional.linear(inputs, factor, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        inputs, factor = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        rows, grad_rows = inputs.reshape(-1, factor.shape[1]), grad_out.reshape(-1, factor.shape[0])
        return (
            grad_out.matmul(factor) if needs_inputs else None,
            _weight_grad(ctx.weight, rows, grad_rows) if needs_weight else None,
            grad_rows.sum(0, dtype=ctx.bias_dtype) if needs_bias else None,
        )


def _weight_grad(weight: torch.Tensor, rows: torch.Tensor, grad_rows: torch.Tensor) -> torch.Tensor | None:
    """Return the weight's gradient, or a dummy for it, or nothing where a dummy is on its way in this backward."""
    slot = _slot_of(weight)
    keep = None if slot is None or not weight.numel() or not _is_accumulated(weight) else slot.prepare_kernel()
    if slot is None or keep is None:
        return grad_rows.t().mm(rows).to(weight.dtype)
    add_weight_grad(slot.view, rows, grad_rows, keep=keep)
    if slot.param.grad_added_to_main_grad:  # type: ignore[attr-defined]
        return None  # the layer was used twice, and one dummy calls the hook
    is_read = getattr(weight, "zero_out_wgrad", False)
    dummy = torch.zeros_like(weight) if is_read else torch.empty_like(weight)
    slot.note_kernel(dummy)
    return dummy


def _is_accumulated(weight: torch.Tensor) -> bool:
    """Whether the backward that is running brings the weight a gradient; ``torch.autograd.grad`` does not."""
    try:
        node = torch.autograd.graph.get_gradient_edge(weight).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # torch.autograd.grad asks for the weight itself: autograd cannot tell, and the gradient must be real
