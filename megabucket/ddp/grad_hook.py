"""The hook of one parameter: hands each gradient to the gradient sync."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from megabucket.ddp.grad_sync import GradSync
from megabucket.errors import PhaseError


def grad_hook(sync: GradSync, index: int, position: int) -> Callable[[torch.Tensor], None]:
    """Return the hook of the parameter at ``position`` of bucket group ``index``.

    The hook knows ``sync`` weakly: Python's garbage collector does not see cycles through hooks of tensors.
    """

    # As defaults, not as a closure: one tuple instead of a cell each, so thousands of hooks stay in the cache longer.
    def receive(
        _: torch.Tensor,
        reference: weakref.ref[GradSync] = weakref.ref(sync),  # noqa: B008 - one per hook is meant
        index: int = index,
        position: int = position,
    ) -> None:
        sync = reference()
        if sync is None:
            raise PhaseError(
                "a parameter received a gradient, but the DistributedDataParallel wrapper that should reduce it is gone. "
                "Keep the wrapper or the wrapped module alive, or call detach() on the wrapper before dropping it."
            )
        sync.receive(index, position)

    return receive
