"""Brings several gradients into the buffer, in one call of torch as far as they are plain."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megabucket.buffer.grad_slot import GradSlot


def store_all(
    slots: Sequence[GradSlot], grads: Sequence[torch.Tensor | None], *, released: list[GradSlot], interrupted: list[str]
) -> None:
    """Do what ``GradSlot.store`` does for one gradient after the other, with those that were taken out of ``param.grad``.

    Args:
        slots: one for each gradient; a slot may come twice. They are released: ``param.grad`` stays ``None``.
        released: slots that are released here are added.
        interrupted: the names of slots of which ``store`` says so are added.

    Raises:
        PhaseError: a fused kernel has added to ``main_grad`` where a gradient was on its way.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for slot, grad in zip(slots, grads, strict=True):
        if (
            type(grad) is torch.Tensor
            and not (slot.is_clean or slot.is_released or slot.added_by_kernel or grad.is_sparse)
            and grad.numel() == slot.numel  # a copy could broadcast if the parameter's shape has changed
        ):
            if grad is not slot.view:
                if slot.has_received:
                    interrupted.append(slot.name)
                targets.append(slot.view)
                sources.append(grad)
            released.append(slot)
            slot.is_released = slot.has_received = True
            continue
        _copy_all(targets, sources)  # what comes now may be added to them
        slot.put_back(grad)
        if slot.store():
            interrupted.append(slot.name)
        if slot.param.grad is slot.view:
            released.append(slot)
            slot.release()
    _copy_all(targets, sources)


@torch.no_grad()
def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
        targets.clear()
        sources.clear()
