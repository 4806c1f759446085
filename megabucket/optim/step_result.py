"""``StepResult``: what an optimizer step did, and why it did nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megabucket.errors import name_list
from megabucket.optim.shards import MainShard


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. All ranks agree on ``updated`` and ``grad_norm``."""

    updated: bool
    """Whether parameters were changed."""
    grad_norm: float
    """Global L2 norm of the reduced gradients, before clipping; nan where it was not computed."""
    reason: str
    """Why parameters were not changed, with the parameters at fault on this rank; empty when they were."""


def nonfinite_result(norm: float, shards: Sequence[MainShard], *, has_others: bool) -> StepResult:
    """Return the result of a step that did nothing, because the norm is not finite.

    Args:
        shards: of this rank, to name the culprits.
        has_others: whether other ranks hold more of them.
    """
    names = [name for shard in shards for name in shard.params_with_nonfinite_grad()]
    if names:
        culprit = f"not finite in this rank's shard of {name_list(names)}"
    elif has_others:
        culprit = "not finite on another rank"
    else:
        culprit = "every gradient is finite, but the sum of their squares is not"
    return StepResult(updated=False, grad_norm=norm, reason=f"the gradient norm is {norm}: {culprit}")
