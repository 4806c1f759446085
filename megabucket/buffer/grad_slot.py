"""One parameter's place in the gradient buffer, and the rule that brings each gradient there in one pass over memory.

Autograd leaves a gradient in ``param.grad``. The previous value of ``param.grad`` decides how:

* ``None``: autograd stores its tensor there without copying. The first gradient of a step is then copied into the view (casting
  to the buffer's dtype): one pass, and no zeroing before it. A second one of the same backward is added. If the view was zeroed
  explicitly, the first one is added as well, because other code may have added there by hand.
* the view: autograd adds the next gradient in place, into the buffer. One pass, nothing left to store.
* anything else: the caller set it (or ``create_graph=True`` made a new sum); it contains the accumulated gradient, so it is
  copied. In a backward with ``create_graph=True`` that is not reduced it stays in ``param.grad``, because the caller may take
  a penalty on it; the next backward, or the hand-over, copies it.

While a collective owns the buffer ``param.grad`` is ``None``, so a late gradient lands in its own memory and is found. After a
backward whose gradients may not be used yet it is a ``WithheldGrad``, which stands for the gradient in the buffer.

Fused weight-gradient kernels add into ``main_grad`` themselves, set ``grad_added_to_main_grad`` and give autograd a dummy.
Their ``param.grad`` stays ``None`` (autograd must not accumulate dummies) and their view is zeroed at the start of a step. A
parameter with ``zero_out_wgrad`` gets zeros as its dummy, so a gradient that autograd has added to them (of the other end of a
tied weight) counts. Kernels that ask before they write (``megabucket.fused``) need no zeros: see ``prepare_kernel``.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from megabucket.errors import PhaseError

CHECK_AND_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""The operation of ``torch.amp.GradScaler``: set a flag if a gradient is not finite, and multiply all of them."""

Unscale = weakref.ReferenceType[Callable[[torch.Tensor, torch.Tensor], None]]
"""A weak reference to the function that unscales on all ranks: from a scaler's flag for non-finite gradients, and 1 / scale.
Weak, because a cycle through ``param.grad`` is never collected."""


class GradState(enum.Enum):
    """Contents of the view of one parameter."""

    STALE = "stale"  # values of another step: the first gradient overwrites them
    CLEAN = "clean"  # zeros, and values that were added on purpose since: the first gradient is added
    STAGED = "staged"  # gradients of this backward and earlier ones; param.grad is None until the backward ends
    HELD = "held"  # gradients of this step; param.grad is the view
    KERNEL = "kernel"  # a fused kernel has added in this step; param.grad is None


# Used for each parameter in each step: an attribute lookup on the enum would take 0.1 us (Python 3.11).
_STALE, _CLEAN, _STAGED, _HELD, _KERNEL = GradState


class GradSlot:
    """The gradient side of one parameter in its buffer."""

    __slots__ = (
        "__weakref__",
        "_dummy_address",
        "_needs_zeros",
        "_plain_backward",
        "accumulates",
        "in_buffer",
        "name",
        "numel",
        "param",
        "settle",
        "state",
        "view",
        "withheld",
    )

    def __init__(self, name: str, param: torch.nn.Parameter, view: torch.Tensor, in_buffer: torch.Tensor | None = None) -> None:
        self.name = name
        self.param = param
        self.view = view  # ND, gradient dtype (float32 for local sums), memory order of the parameter
        self.in_buffer = view if in_buffer is None else in_buffer
        """The place in the gradient buffer: ``view``, unless that holds float32 sums that are rounded before they are sent."""
        self.numel = view.numel()
        self.state = _CLEAN
        self.accumulates: Callable[[], bool] | None = None
        """Returns whether the view may be written to; ``None``: always. It must not refer back to the parameter."""
        self._needs_zeros = False  # a fused kernel adds here without asking
        self._dummy_address = 0  # of the dummy that a kernel which asks has given to autograd
        self._plain_backward = -1  # autograd's id of a backward in which such a kernel must not write
        self.settle: Callable[[torch.Tensor], None] | None = None
        """Stores staged gradients of the parameter."""
        self.withheld: WithheldGrad | None = None
        """Replaces ``param.grad`` from backward to its reduction, if the caller must not use it."""

    @property
    def has_grad(self) -> bool:
        """Whether there is a gradient of this step, or an uncleared one of the last step."""
        return self.param.grad is not None or self.state in (_STAGED, _KERNEL)

    @property
    def old_grad(self) -> torch.Tensor | None:
        """The memory of a gradient that an earlier step has left in ``param.grad``, if there is none of this step."""
        grad = self.param.grad
        if self.state not in (_STALE, _CLEAN) or grad is None:
            return None
        return grad if grad is self.in_buffer else self.view if grad is self.view or type(grad) is WithheldGrad else None

    def store(self, *, keeps_graph: bool = False) -> None:
        """Store the gradient that autograd has just left in ``param.grad`` in the buffer.

        Args:
            keeps_graph: leave it in ``param.grad``, with its graph, unless a fused kernel writes gradients of this parameter.

        Raises:
            PhaseError: a fused kernel added its gradient to values of an earlier step, or another gradient was added to its
                dummy.
        """
        if self.param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            self._store_fused()
        elif self.param.grad is not None and not (keeps_graph and self.state in (_STALE, _CLEAN, _HELD)):
            self._store_grad(self.param.grad)

    def _store_grad(self, grad: torch.Tensor) -> None:
        """Copy or add a gradient that is not in the view."""
        state = self.state
        if grad is self.view or type(grad) is WithheldGrad:  # autograd has added in place
            self.state, self.param.grad = _HELD, self.view
            return
        if grad.requires_grad:
            grad = grad.detach()  # create_graph=True: the graph must not grow into the buffer
        if state in (_KERNEL, _STAGED):
            self.view.add_(grad)  # the view holds other gradients of this step
            self.param.grad = None
            return
        if state is _CLEAN:
            self.view.add_(grad)
        elif grad.is_sparse:
            self.view.zero_().add_(grad)
        else:
            self.view.copy_(grad)
        self.state, self.param.grad = _HELD, self.view

    def store_delayed(self) -> None:
        """Add a gradient that was computed outside backward: that in ``param.grad``, or else one that is in the view already.

        ``param.grad`` is ``None`` afterwards.

        Raises:
            PhaseError: it was added to values of an earlier step.
        """
        grad = self.param.grad
        if grad is None or self.param.grad_added_to_main_grad or getattr(self.param, "zero_out_wgrad", False):  # type: ignore[attr-defined]
            self._store_fused()
        else:
            self._store_grad(grad)
        self.state, self.param.grad = _KERNEL, None

    def show(self) -> None:
        """Set ``param.grad`` to the view, which holds a gradient of this step."""
        self.state = _HELD
        self.param.grad = self.view

    # Fused kernels #

    def prepare_kernel(self) -> float | None:
        """Return the factor by which a kernel must multiply ``main_grad`` before it adds a gradient: 0 overwrites, 1 adds.

        ``None`` if it must not write, because a collective owns the view, autograd has accumulated in this step, or other code
        has hooks on the parameter. Then this gradient, and all later ones of this backward, go through autograd.
        """
        if self.settle is not None:
            self.settle(self.param)
        # Other hooks expect a real gradient.
        has_other_hooks = len(self.param._post_accumulate_grad_hooks or ()) > 1 or bool(self.param._backward_hooks)
        if has_other_hooks and self.state is _KERNEL and not self.param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            self.show()
        is_free = not has_other_hooks and self.param.grad is None and self.state is not _STAGED
        backward = torch._C._current_graph_task_id()
        if backward == self._plain_backward >= 0 or not is_free or not (self.accumulates is None or self.accumulates()):
            self._plain_backward = backward
            return None
        return 1.0 if self.state in (_CLEAN, _KERNEL) else 0.0

    def note_kernel(self, dummy: torch.Tensor) -> None:
        """Note that a kernel which asked has added a gradient, and the dummy that it gives to autograd."""
        self.param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        self.state = _KERNEL
        self._dummy_address = dummy.data_ptr()

    def _store_fused(self) -> None:
        param, grad, dummy_address = self.param, self.param.grad, self._dummy_address
        holds_zeros = getattr(param, "zero_out_wgrad", False)  # the dummy is zeros, so a gradient added to them counts
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self._dummy_address = 0
        if not dummy_address:
            self._needs_zeros = True  # from the next forget() on
        elif not (holds_zeros or grad is None or (grad.data_ptr() == dummy_address and not grad._version)):
            raise PhaseError(
                f"{self.name!r} received a gradient through autograd in the same backward in which a fused kernel added its "
                "own to main_grad: a tied weight, or a term of the loss that reads it. The two were mixed. Set "
                "zero_out_wgrad = True on the parameter, or use torch.nn.Linear for this layer."
            )
        has_graph = not holds_zeros and grad is not None and grad.requires_grad  # an earlier gradient that is not in the view
        if grad is self.view or has_graph or self.state not in (_CLEAN, _KERNEL):
            raise PhaseError(
                f"a fused kernel added the gradient of {self.name!r} to main_grad, which was not prepared for it: "
                "the first gradient of a parameter that sometimes comes from a fused kernel needs zeros to add to. "
                "Call zero_grad_buffer() before each step of such a model, and use the fused kernel in every microbatch."
            )
        self.state = _KERNEL
        if grad is not None and holds_zeros:
            self.view.add_(grad.detach())
        param.grad = None

    # Between backward and the next step #

    def scale_outside(self, factor: float) -> None:
        """Multiply a gradient that is in ``param.grad`` only."""
        grad = self.param.grad
        if not (grad is None or grad is self.view or grad is self.in_buffer or type(grad) is WithheldGrad):
            grad.mul_(factor)

    def hand_over(self) -> bool:
        """Release the view to a collective; return whether there is a gradient of this step.

        A ``param.grad`` that the caller set since the last backward counts. Without a gradient the view is zero afterwards,
        unless values were written into a clean view on purpose.
        """
        grad, state = self.param.grad, self.state
        self.state = _STALE
        if type(grad) is WithheldGrad:  # it stands for the view, and stays
            return state in (_STAGED, _HELD, _KERNEL)
        if grad is self.view:
            has_grad = state in (_HELD, _KERNEL)
        elif grad is None:
            has_grad = state in (_STAGED, _KERNEL)
            if state in (_STALE, _HELD):
                self.view.zero_()
        elif grad is self.in_buffer:  # reduced in an earlier step, and kept or zeroed since
            has_grad = False
            self.view.copy_(grad)
        else:  # set by the caller
            has_grad = True
            self.state = state
            self._store_grad(grad)
            self.state = _STALE
        self.param.grad = None
        return has_grad

    def withhold(self, *, is_sent: bool) -> None:
        """Make the gradient unusable until the next ``publish``, ``forget`` or ``withdraw``.

        Args:
            is_sent: whether it was handed over. Otherwise only an existing gradient is withheld.
        """
        if is_sent or self.param.grad is self.view or self.state is _KERNEL:
            self.param.grad = self.withheld

    def show_withheld(self, *, has_other_hooks: bool) -> None:
        """Stop withholding a gradient that was not sent: a further backward of its step begins."""
        if self.param.grad is self.withheld:
            if self.state is _KERNEL:
                self.param.grad = None  # or autograd would add the dummy of a kernel
            elif has_other_hooks:
                self.show()

    def withdraw(self) -> None:
        """Stop withholding, and show no gradient."""
        if self.param.grad is self.withheld:
            self.param.grad = None

    def publish(self) -> None:
        """Set ``param.grad`` to the reduced values."""
        self.param.grad = self.in_buffer

    def forget(self, *, is_zeroed: bool = False) -> None:
        """Start a step: the next gradient overwrites. Costs no pass over memory, except for fused kernels.

        Args:
            is_zeroed: whether the view was filled with zeros; the next gradient is added then.
        """
        self.param.grad = None
        self.param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self._dummy_address = 0
        if self._needs_zeros and not is_zeroed:
            self.view.zero_()
        if self._needs_zeros or is_zeroed:
            self.state = _CLEAN
        elif self.state is not _CLEAN:
            self.state = _STALE


class WithheldGrad(torch.Tensor):
    """A gradient that may not be used now. Its metadata can be read and it can be converted; all else is a ``PhaseError``.

    With ``None`` in ``.grad``, functions such as ``torch.nn.utils.clip_grad_norm_`` would silently do nothing; with the
    gradient there, they would work on one rank's part of it, in memory that a collective may own. It has no memory of its own.
    See docs/decisions/gradients.md.

    The one operation of ``torch.amp.GradScaler`` goes to the optimizer, for all gradients at once: ranks have different parts
    and would find different results. A float16 gradient says that it is float32, because a scaler refuses float16 and the
    optimizer unscales in float32.

    Args:
        like: the tensor that it replaces.
        what: its name in error texts.
        reason: why it is withheld, and what to do instead.
        accumulates: returns whether a gradient of a running backward is to be added to ``like``; otherwise it is dropped, and
            the hook of the parameter, which runs afterwards, reports it.
    """

    # Refuse at the dispatcher, because calls that begin in C++ pass through it as well.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _what: str
    _reason: str
    _like: torch.Tensor
    _accumulates: Callable[[], bool]
    unscale: Unscale | None = None
    """Handles the call of a scaler; ``None`` without an optimizer that does."""
    is_delayed: bool = False
    """Whether the gradient is computed outside backward. Then ``param.grad += ...`` outside backward adds to ``like``."""

    def __new__(cls, like: torch.Tensor, *, what: str, reason: str, accumulates: Callable[[], bool]) -> WithheldGrad:  # noqa: PYI034 - Python 3.10 has no Self
        """Create a tensor without memory."""
        dtype = torch.float32 if like.dtype is torch.float16 else like.dtype
        made = _without_memory(cls, like, dtype=dtype, device=like.device)
        made._what, made._reason, made._like, made._accumulates = what, reason, like, accumulates
        return made

    def refuse(self, operation: str) -> NoReturn:
        """Refuse an operation, with the reason.

        Raises:
            PhaseError: always.
        """
        raise PhaseError(f"{operation} was called on {self._what}, which {self._reason}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let autograd accumulate, ``module.to()`` convert and a scaler unscale; refuse everything else.

        Raises:
            PhaseError: the gradient is used.
        """
        if func is CHECK_AND_UNSCALE:
            reference = next(grad.unscale for grad in args[0] if isinstance(grad, WithheldGrad))
            unscale = None if reference is None else reference()
            if unscale is not None:
                return unscale(*args[1:])
        if func is torch.ops.aten._to_copy.default and kwargs is not None:
            return args[0]._converted(**kwargs)
        if torch._C._current_graph_task_id() >= 0 and isinstance(args[0], WithheldGrad):
            if func is torch.ops.aten.add_.Tensor:
                return args[0]._accumulate(args[1])
            if func is torch.ops.aten.add.Tensor:  # create_graph=True
                return args[0]._like + args[1] if args[0]._accumulates() else args[1].clone()
        withheld = next(used for used in tree_leaves((args, kwargs)) if isinstance(used, WithheldGrad))
        if func is torch.ops.aten.add_.Tensor and withheld is args[0] and withheld.is_delayed and withheld._accumulates():
            withheld._like.add_(args[1], **kwargs or {})
            return withheld
        return withheld.refuse(str(func.overloadpacket).removeprefix("aten."))

    def _converted(self, *, dtype: Any = None, device: Any = None, **_: Any) -> WithheldGrad:
        made = _without_memory(type(self), self, dtype=dtype or self.dtype, device=device or self.device)
        made.__dict__.update(self.__dict__)
        return made

    def _accumulate(self, grad: torch.Tensor) -> WithheldGrad:
        if self._accumulates():
            self._like.add_(grad)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._what}: withheld, because it {self._reason}>"


def _without_memory(cls: type[WithheldGrad], like: torch.Tensor, *, dtype: torch.dtype, device: torch.device) -> WithheldGrad:
    made: WithheldGrad = torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=device)
    return made
