"""Stops a plain torch optimizer from stepping on gradients that are not what it takes them for.

Torch calls a hook before the step of every optimizer of the process. Ours looks whether the optimizer holds parameters of the
wrapper and, if so, whether their gradients are complete: never after a reduce-scatter, and not before the sync is finished.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megabucket.ddp.grad_sync import GradSync
from megabucket.errors import PlainOptimizerError, UnreducedGradientsError


class PlainOptimizerGuard:
    """Watches optimizer steps on the parameters of one wrapper until it is removed or garbage collected."""

    def __init__(self, params: Mapping[str, torch.nn.Parameter], sync: GradSync, *, reduce_scatters: bool, rank: int) -> None:
        self._names = {id(param): name for name, param in params.items()}
        self._sync = sync
        self._reduce_scatters = reduce_scatters
        self._rank = rank
        # Weak: the hook lives in torch's process-wide list and must not keep the model alive.
        reference = weakref.WeakMethod(self.check)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            check = reference()
            if check is not None:
                check(optimizer)

        self._handle: RemovableHandle = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, self._handle.remove)

    def remove(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step that would use gradients of the wrapper that are not complete.

        Raises:
            PlainOptimizerError: the gradients are reduce-scattered.
            UnreducedGradientsError: gradients were accumulated that no sync has reduced.
        """
        held = [
            self._names[id(param)]
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in self._names and param.requires_grad
        ]
        if not held:
            return
        if self._reduce_scatters:
            raise PlainOptimizerError(optimizer=type(optimizer).__name__, params=held, rank=self._rank)
        if self._sync.has_local_grads:
            raise UnreducedGradientsError(rank=self._rank)
