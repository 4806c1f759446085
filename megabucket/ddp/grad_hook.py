"""The hooks of parameters: they hand each gradient to the gradient sync, or let it wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.ddp.grad_sync import GradSync
from megabucket.errors import PhaseError

GradHook = Callable[[torch.Tensor], None]


def grad_hooks(sync: GradSync, group: _ParamAndGradBucketGroup) -> list[GradHook]:
    """Return the hook of each parameter of a bucket group.

    They know ``sync`` weakly: Python's garbage collector does not see cycles through hooks of tensors. And they are the same
    few functions for all parameters, not one for each: thousands of functions do not stay in the cache.
    """
    reference, index, intake = weakref.ref(sync), group.index, group.intake
    position_of, waiting, streams = intake.position_of, intake.waiting, intake.streams  # none of them leads to a parameter

    def receive(param: torch.Tensor) -> None:
        sync = reference()
        if sync is None:
            raise PhaseError(
                "a parameter received a gradient, but the DistributedDataParallel wrapper that should reduce it is gone. "
                "Keep the wrapper or the wrapped module alive, or call detach() on the wrapper before dropping it."
            )
        sync.receive(index, position_of[id(param)])

    def let_wait(param: torch.Tensor) -> None:
        # All that most small gradients cost in Python, so not a call more.
        if len(waiting) < waiting.room and not param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            waiting.add(param)
        else:
            receive(param)

    def let_wait_on_stream(param: torch.Tensor) -> None:
        if streams is not None and streams.is_here():
            let_wait(param)
        else:
            receive(param)

    hook_of_small = let_wait if streams is None else let_wait_on_stream
    return [hook_of_small if is_small else receive for is_small in intake.is_small]
