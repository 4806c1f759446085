"""What plain torch code does to gradients while no backward is running, as far as values tell.

``optimizer.zero_grad()`` of plain torch clears gradients without telling us. That is right between two steps and wrong within
one, and what matters is that all ranks do the same. Which gradients were cleared by ``None`` is seen by their slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megabucket.buffer import GradPhase, _ParamAndGradBucketGroup


class BetweenBackwards:
    """Compares the gradients at the beginning of a backward with those at the end of the one before.

    Args:
        groups: bucket groups in launch order.
        keeps: whether reduced gradients that were not cleared are accumulated on.
    """

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], *, keeps: bool) -> None:
        self._groups = groups
        self._keeps = keeps
        self._flats = list(
            {id(bucket.buffer): bucket.buffer.grad_data for group in groups for bucket in group.buckets}.values()
        )
        self._versions: list[int] | None = None  # at the end of a backward that only accumulated
        self.kept: tuple[str, ...] = ()
        """Parameters whose reduced gradient was neither cleared nor zeroed when the last backward began."""

    def note_end(self, *, accumulates: bool) -> None:
        """Note the end of a backward.

        Args:
            accumulates: whether its gradients wait for those of a later one.
        """
        self._versions = [flat._version for flat in self._flats] if accumulates else None

    def look(self, *, is_finished: bool) -> None:
        """Look at the gradients before a backward adds the first one to them.

        Args:
            is_finished: whether they are reduced.
        """
        if is_finished:
            self.kept = kept_grads(self._groups) if self._keeps else ()
        elif self._versions is not None and self._versions != [flat._version for flat in self._flats]:
            self._look_for_zeros()

    def _look_for_zeros(self) -> None:
        """Find gradients that were zeroed in place: all of them, since single ones may have been zero before."""
        if any(group.grad_phase is not GradPhase.ACCUMULATING for group in self._groups):
            return  # what has changed is a buffer in flight
        accumulated = [(group, slot) for group in self._groups for slot in group.slots if slot.has_received]
        if accumulated and not any(_are_nonzero([slot.view for _, slot in accumulated])):
            for group, slot in accumulated:
                group.interrupted.append(slot.name)


def kept_grads(groups: Sequence[_ParamAndGradBucketGroup]) -> tuple[str, ...]:
    """Return the parameters whose gradient of the last step was neither cleared nor zeroed. One that replaces it counts, too.

    Looks at values, in one pass, only where there are gradients still: ``zero_grad()`` leaves none.
    """
    grads = [(slot.name, slot.param.grad) for group in groups for slot in group.slots if slot.param.grad is not None]
    are_kept = _are_nonzero([grad for _, grad in grads])
    return tuple(name for (name, _), is_kept in zip(grads, are_kept, strict=True) if is_kept)


@torch.no_grad()
def _are_nonzero(grads: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each gradient whether it has an element that is not zero."""
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    filled = [index for index, of_grad in enumerate(values) if of_grad.numel()]
    result = [False] * len(grads)
    if filled:
        # The largest element, not the sum of squares, which is zero for small values.
        norms = torch._foreach_norm([values[index] for index in filled], torch.inf)
        for index, is_nonzero in zip(filled, torch.stack([norm.bool() for norm in norms]).tolist(), strict=True):
            result[index] = is_nonzero
    return result
