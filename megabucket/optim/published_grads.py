"""Gradients that an all-reduce has published, and that the caller may have changed since."""

from __future__ import annotations

from collections.abc import Sequence

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.errors import PhaseError


def take_published_grads(groups: Sequence[_ParamAndGradBucketGroup]) -> None:
    """Let what the caller did to ``param.grad`` after the sync count, as it would with a plain optimizer.

    Raises:
        PhaseError: a gradient was cleared; a flat shard cannot leave single parameters out of a step.
    """
    for slot in (slot for group in groups for slot in group.slots):
        grad = slot.param.grad
        if grad is slot.view:
            continue
        if grad is None:
            raise PhaseError(
                f"the gradient of {slot.name!r} was cleared between the gradient sync and step(). A DistributedOptimizer "
                "steps on flat shards and cannot leave single parameters out. Zero the gradient in place, or use a plain "
                "torch optimizer, which skips parameters without a gradient."
            )
        slot.view.copy_(grad)
        slot.publish()
