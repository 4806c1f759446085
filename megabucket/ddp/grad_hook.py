"""The hooks of parameters: they hand each gradient to the gradient sync, let it wait, or only put its parameter on a list.

The last is ``list.append`` itself, so hardly anything happens in Python. A small parameter gets it when the last backward has
shown which gradients come together: then the hook of the last of these calls the roll. When somebody is left on the roll at the
end of a backward, all hooks are as before, and a later backward teaches anew: each time after twice as many.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.errors import PhaseError

GradHook = Callable[[torch.Tensor], object]


class ReceivesGrads(Protocol):
    """Where the hooks bring gradients."""

    def receive(self, index: int, position: int) -> None:
        """Take the gradient of one parameter of a bucket group."""

    def receive_roll(self, index: int) -> None:
        """Take the gradients on the roll of a bucket group."""


class GradHooks:
    """The hooks on the parameters of one bucket group.

    They know ``sync`` weakly: Python's garbage collector does not see cycles through hooks of tensors.
    """

    def __init__(self, sync: ReceivesGrads, group: _ParamAndGradBucketGroup) -> None:
        self._intake = group.intake
        self._params = group.params
        self._hook_of_each = _hooks_of_each(weakref.ref(sync), group)
        self._call_roll = _hook_that_calls(weakref.ref(sync), group)
        self._handles: list[RemovableHandle] = []
        self._dicts: list[dict[int, Any]] = []  # of torch, where the hooks are
        self._calls_roll = False
        self._num_passed, self._num_needed = 0, 1  # backwards since the last mistake

    def install(self) -> None:
        """Put a hook on each parameter."""
        for param, hook in zip(self._params, self._hook_of_each, strict=True):
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
            self._dicts.append(param._post_accumulate_grad_hooks)

    def remove(self) -> None:
        """Take all hooks off. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._dicts = [], []

    def begin_backward(self, *, may_wait: bool, may_learn: bool) -> None:
        """Prepare for a backward that has just begun.

        Args:
            may_wait: whether gradients may wait, if nobody else has hooks on the parameters.
            may_learn: whether autograd has called this from the backward itself, and not from what is rerun in it.
        """
        may_wait = may_wait and self._intake.streams is None and self._intake.is_alone()
        if self._calls_roll and (self._intake.came_twice or not may_wait):
            self.stop_roll()
        self._intake.came_twice = False
        if may_wait and may_learn and not self._calls_roll:
            self._num_passed += 1
            if self._num_passed >= self._num_needed:
                self._intake.lesson.begin()

    def end_backward(self) -> None:
        """Change the hooks if this backward was learned from."""
        if not self._intake.lesson.is_on:
            return
        together = self._intake.lesson.end()
        for positions in together:
            for position in positions:
                self._set(position, self._intake.roll.append)
            self._set(positions[-1], self._call_roll)
        self._calls_roll = bool(together)
        if not together:
            self._wait_longer()

    def stop_roll(self) -> None:
        """Let each parameter speak for itself again, because this backward is not like the one that was learned from."""
        if self._calls_roll:
            for position, hook in enumerate(self._hook_of_each):
                self._set(position, hook)
            self._calls_roll = False
            self._wait_longer()

    def _wait_longer(self) -> None:
        self._num_passed, self._num_needed = 0, 2 * self._num_needed

    def _set(self, position: int, hook: GradHook) -> None:
        number = self._handles[position].id
        if number in self._dicts[position]:
            self._dicts[position][number] = hook


def _hooks_of_each(reference: weakref.ref[ReceivesGrads], group: _ParamAndGradBucketGroup) -> Sequence[GradHook]:
    """Return the hook of each parameter: a few functions for all. Thousands of them do not stay in the cache."""
    index, intake = group.index, group.intake
    position_of, waiting, streams = intake.position_of, intake.waiting, intake.streams  # none of them leads to a parameter

    def receive(param: torch.Tensor) -> None:
        _follow(reference).receive(index, position_of[id(param)])

    def let_wait(param: torch.Tensor) -> None:
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


def _hook_that_calls(reference: weakref.ref[ReceivesGrads], group: _ParamAndGradBucketGroup) -> GradHook:
    index, roll = group.index, group.intake.roll

    def call_roll(param: torch.Tensor) -> None:
        roll.append(param)
        _follow(reference).receive_roll(index)

    return call_roll


def _follow(reference: weakref.ref[ReceivesGrads]) -> ReceivesGrads:
    sync = reference()
    if sync is None:
        raise PhaseError(
            "a parameter received a gradient, but the DistributedDataParallel wrapper that should reduce it is gone. "
            "Keep the wrapper or the wrapped module alive, or call detach() on the wrapper before dropping it."
        )
    return sync
