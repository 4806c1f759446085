"""One parameter's place in the gradient buffer, and the rule that brings each gradient there in one pass over memory.

The rule needs no flag between backwards, because ``param.grad`` is the state:

* ``None`` before backward: nothing accumulated in this step. Autograd hands its gradient over without copying, and ``store``
  copies it into the buffer (casting to the buffer's dtype). One pass, and no zeroing before it. Into a view that was zeroed on
  purpose it is added instead, because others may have added there by hand.
* the buffer view: autograd adds the next gradient in place, into the buffer. One pass, nothing left to store.
* anything else: the caller put it there (or ``create_graph=True`` made a new sum); it already contains what was accumulated,
  so it is copied.

Within a backward a gradient may be released: the view holds it, and ``param.grad`` is ``None`` already, for the launch.

While a collective owns the buffer ``param.grad`` is ``None``, so a late gradient lands in memory of its own and is found. After
a backward that leaves gradients nobody may use yet it is a ``WithheldGrad``, which stands for what the buffer has.

Fused weight-gradient kernels add into ``main_grad`` themselves, set ``grad_added_to_main_grad`` and hand autograd a dummy.
Their ``param.grad`` stays ``None`` (autograd must not add dummies up) and their view is zeroed at the start of a step. A
parameter with ``zero_out_wgrad`` gets zeros as its dummy, so what autograd has added to them (the other end of a tied
weight) is a gradient and counts.

Kernels that ask before they write (``megabucket.fused``) need no zeros: ``prepare_kernel`` says whether to overwrite or to add.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megabucket.buffer.withheld_grad import WithheldGrad
from megabucket.errors import PhaseError


class GradSlot:
    """The gradient side of one parameter in its buffer."""

    __slots__ = (
        "__weakref__",
        "_dummy_address",
        "_kernel_asks",
        "_uses_fused_kernel",
        "accumulates",
        "added_by_kernel",
        "has_received",
        "is_clean",
        "is_released",
        "name",
        "numel",
        "param",
        "settle",
        "view",
        "was_cleared",
        "withheld",
    )

    def __init__(self, name: str, param: torch.nn.Parameter, view: torch.Tensor) -> None:
        self.name = name
        self.param = param
        self.view = view  # ND, gradient dtype, memory order of the parameter
        self.numel = view.numel()
        self.is_clean = True
        """Whether the view holds nothing but zeros and what was added on purpose since; false means stale values."""
        self.accumulates: Callable[[], bool] | None = None
        """Whether the view may be written to; ``None``: always. It must not lead back to the parameter."""
        self._uses_fused_kernel = False
        self.added_by_kernel = False
        """Whether a fused kernel has added to the view in this step."""
        self._kernel_asks = False
        self._dummy_address = 0
        self.has_received = False
        """Whether a backward of this step brought a gradient. A view that was zeroed in place is one that brought nothing."""
        self.is_released = False
        """Whether the view holds the gradient of this step and ``param.grad`` shows it no more. Only within a backward."""
        self.was_cleared = False
        """Whether ``hand_over`` found nothing any more of what this step had brought."""
        self.settle: Callable[[torch.Tensor], None] | None = None
        """Brings here what has come for the parameter and waits elsewhere."""
        self.withheld: WithheldGrad | None = None
        """Stands in for ``param.grad`` from backward to its reduction, where the caller must not use it."""

    @property
    def has_grad(self) -> bool:
        """Whether there is a gradient: of this step, or of the last one, if nobody has cleared it."""
        return self.added_by_kernel or self.is_released or self.param.grad is not None

    def store(self) -> bool:
        """Bring the gradient that autograd has just accumulated into the buffer.

        Returns whether it takes the place of what earlier backwards of this step had brought: somebody has cleared or replaced
        that meanwhile.

        Raises:
            PhaseError: a fused kernel added its gradient to values of an earlier step.
        """
        is_first = not self.has_received
        self.has_received = True
        if self.param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            self._store_fused()
            return False
        if self.is_released:
            self._store_again()
            return False
        # With create_graph=True autograd makes a new sum instead of adding in place.
        return self._store_grad() and not (is_first or torch.is_grad_enabled())

    def _store_grad(self) -> bool:
        """Copy or add a gradient that is not in the view; return whether it takes the place of what was there, if anything."""
        grad = self.param.grad
        if grad is self.view or grad is None:
            return False
        if type(grad) is WithheldGrad:
            self.param.grad = self.view  # autograd has added to it through what stood in for it
            return False
        if grad.requires_grad:
            grad = grad.detach()  # create_graph=True: the graph must not grow into the buffer
        if self.added_by_kernel:
            self.view.add_(grad)  # this layer's kernel ran for another microbatch or another use; this one came by autograd
            self.param.grad = None
            return False
        if self.is_clean:
            self.view.add_(grad)
        elif grad.is_sparse:
            self.view.zero_().add_(grad)
        else:
            self.view.copy_(grad)
        self.is_clean = False
        self.param.grad = self.view
        return True

    def _store_again(self) -> None:
        """Add a second gradient of one backward, which autograd could not add itself."""
        grad = self.param.grad
        if grad is not None:
            self.view.add_(grad.detach())
            self.param.grad = None

    def put_back(self, grad: torch.Tensor | None) -> None:
        """Give back to ``param.grad`` what was taken out of it before a kernel can have written, for ``store``."""
        self.param.grad = self.view if self.param.grad_added_to_main_grad else grad  # type: ignore[attr-defined]

    def release(self) -> None:
        """Show a gradient that is in the view no more."""
        self.is_released = True
        self.param.grad = None

    def reclaim(self) -> None:
        """Show a released gradient again."""
        self.is_released = False
        self.param.grad = self.view

    def prepare_kernel(self) -> float | None:
        """Return what a kernel must multiply ``main_grad`` by before it adds a gradient: 0 overwrites, 1 adds.

        ``None`` where it must not write: a collective owns the view, or autograd has accumulated in this step, or what has is
        still to be looked at. Then the gradient goes the way of any other.
        """
        if self.settle is not None:
            self.settle(self.param)
        if self.is_released or self.param.grad is not None or not (self.accumulates is None or self.accumulates()):
            return None
        return 1.0 if self.is_clean or self.added_by_kernel else 0.0

    def note_kernel(self, dummy: torch.Tensor) -> None:
        """Note that a kernel which has asked has added a gradient, and what it hands to autograd in its place."""
        self.param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        self.added_by_kernel = self._kernel_asks = True
        self.is_clean = False  # so if this step is dropped, the next one overwrites
        self._dummy_address = dummy.data_ptr()

    def _check_dummy(self) -> None:
        """Refuse a dummy that autograd has added a gradient to.

        Raises:
            PhaseError: the weight was used in another way, too, and that gradient is lost in the dummy.
        """
        grad, address = self.param.grad, self._dummy_address
        self._dummy_address = 0
        if address and grad is not None and (grad.data_ptr() != address or grad._version):
            raise PhaseError(
                f"{self.name!r} received a gradient through autograd in the same backward in which a fused kernel added its "
                "own to main_grad: a tied weight, or a term of the loss that reads it. The two were mixed. Set "
                "zero_out_wgrad = True on the parameter, or use torch.nn.Linear for this layer."
            )

    def _store_fused(self) -> None:
        param = self.param
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if self._kernel_asks:
            self._kernel_asks = False
            if not getattr(param, "zero_out_wgrad", False):
                self._check_dummy()
        else:
            self._uses_fused_kernel = True  # from the next forget() on there are zeros to add to
        if param.grad is self.view or not (self.is_clean or self.added_by_kernel):
            raise PhaseError(
                f"a fused kernel added the gradient of {self.name!r} to main_grad, which was not prepared for it: "
                "the first gradient of a parameter that sometimes comes from a fused kernel needs zeros to add to. "
                "Call zero_grad_buffer() before each step of such a model, and use the fused kernel in every microbatch."
            )
        self.added_by_kernel = True
        if param.grad is not None and getattr(param, "zero_out_wgrad", False):
            self.view.add_(param.grad.detach())
        param.grad = None

    def hand_over(self) -> bool:
        """Let go of the view so that a collective can own it; return whether this step brought a gradient.

        A ``param.grad`` that the caller set since the last backward is what counts. Without a gradient the view is zero
        afterwards, unless somebody wrote into a clean view on purpose.
        """
        grad = self.param.grad
        if grad is self.view and not self.added_by_kernel:  # nearly always, so without what is for the other cases
            self.param.grad = None
            has_received, self.has_received = self.has_received, False
            self.was_cleared = self.is_clean = False
            return has_received
        is_withheld = isinstance(grad, WithheldGrad)
        is_set_by_caller = not (grad is None or grad is self.view or is_withheld)
        if is_set_by_caller:
            self._store_grad()
        has_grad = self.has_grad
        has_brought = (self.has_received and has_grad) or self.added_by_kernel or is_set_by_caller
        self.was_cleared = self.has_received and not has_grad
        if not has_grad and not self.is_clean:
            self.view.zero_()
        if not is_withheld:
            self.param.grad = None
        self.added_by_kernel = self.has_received = False
        self.is_clean = False
        return has_brought

    def withhold(self, *, is_sent: bool) -> None:
        """Let nobody use the gradient until the next of ``publish``, ``forget`` and ``withdraw``.

        Args:
            is_sent: whether it was handed over. Otherwise nothing but a gradient that is there is withheld.
        """
        if is_sent or self.param.grad is self.view:
            self.param.grad = self.withheld

    def withdraw(self) -> None:
        """Withhold nothing any more, and show nothing."""
        if self.param.grad is self.withheld:
            self.param.grad = None

    def publish(self) -> None:
        """Show the reduced values to plain torch code as ``param.grad``."""
        self.param.grad = self.view

    def forget(self) -> None:
        """Start a step: the next gradient overwrites. Costs no pass over memory, except for fused kernels."""
        self.param.grad = None
        self.param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self.added_by_kernel = self.has_received = self._kernel_asks = False
        if self._uses_fused_kernel:
            self.view.zero_()
            self.is_clean = True
