"""The hooks of parameters: they hand each gradient to the gradient sync, or let it wait, or speak for a run of others.

A hook costs more than anything else that is done for a small gradient. So what came into the buffer together in one backward
(``buffer.Run``) gets a single hook for the next one, on the parameter that came last. It finds the other gradients in
``param.grad``. Nobody notices a backward that takes another way at once, but nothing is lost by that: what is missing at the
hook gets its own one back, and what has come without one is found at the end of the backward. Both only cost overlap, and
after each such mistake it takes twice as many regular backwards until runs are tried again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, Final, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.errors import PhaseError

GradHook = Callable[[torch.Tensor], None]

_hooks: Final = attrgetter("_post_accumulate_grad_hooks")


class ReceivesGrads(Protocol):
    """Where the hooks bring gradients."""

    def receive(self, index: int, position: int) -> None:
        """Take the gradient of one parameter of a bucket group."""

    def receive_run(self, index: int, positions: Sequence[int]) -> None:
        """Take the gradients of a run of them."""


class GradHooks:
    """The hooks on the parameters of one bucket group: one on each, or one on each run.

    They know ``sync`` weakly: Python's garbage collector does not see cycles through hooks of tensors.
    """

    def __init__(self, sync: ReceivesGrads, group: _ParamAndGradBucketGroup) -> None:
        self._sync = weakref.ref(sync)
        self._index, self._intake = group.index, group.intake
        self._params = group.params
        self._hook_of_each = _hooks_of_each(self._sync, group)
        self._handles: dict[int, RemovableHandle] = {}  # by position
        self._expected: list[Any] = [None] * len(self._params)
        self._num_regular = 0  # backwards, since the last mistake
        self._num_needed = 1

    def install(self) -> None:
        """Put a hook on each parameter."""
        for position in range(len(self._params)):
            self._put(position, self._hook_of_each[position])

    def remove(self) -> None:
        """Take all hooks off."""
        for position in list(self._handles):
            self._take_off(position)

    def begin_backward(self, *, may_wait: bool, may_run: bool) -> None:
        """Prepare for a backward that has just begun.

        Args:
            may_wait: whether small gradients may wait, if nobody else has hooks on the parameters.
            may_run: whether gradients may come without a hook, if besides there were none before this backward.
        """
        may_wait = may_wait and self._is_alone()
        is_regular = may_run and may_wait and self._intake.streams is None
        if self._intake.runs and not is_regular:
            self.hook_each()
        self._num_regular = self._num_regular + 1 if is_regular else 0
        learns = is_regular and not self._intake.runs and self._num_regular >= self._num_needed
        self._intake.begin_backward(may_wait=may_wait, learns=learns)

    def end_backward(self) -> None:
        """Leave the hooks that the next backward needs, after one whose gradients are in the buffer."""
        runs = self._intake.learned_runs()
        for run in runs:
            for position in run.positions:
                self._take_off(position)
            self._put(run.positions[-1], _hook_of_run(self._sync, self._index, run.positions))
        if runs:
            self._intake.use_runs(runs)

    def hook_each(self) -> None:
        """Put a hook on each parameter again, because this backward is another one than the last."""
        if not self._intake.runs:
            return
        for run in self._intake.runs.values():
            self._take_off(run.positions[-1])
            for position in run.positions:
                self._put(position, self._hook_of_each[position])
        self._intake.use_runs([])
        self._num_regular, self._num_needed = 0, 2 * self._num_needed

    def _put(self, position: int, hook: GradHook) -> None:
        param = self._params[position]
        handle = param.register_post_accumulate_grad_hook(hook)
        hooks = _hooks(param)
        others = [item for item in hooks.items() if item[0] != handle.id]
        for number, _ in others:  # they have come meanwhile, and find the gradient in main_grad
            del hooks[number]
        hooks.update(others)
        self._handles[position], self._expected[position] = handle, hooks

    def _take_off(self, position: int) -> None:
        handle = self._handles.pop(position)
        handle.remove()
        param = self._params[position]
        if not _hooks(param):
            param._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # an empty dict costs nearly as much as a hook
        self._expected[position] = None

    def _is_alone(self) -> bool:
        """Return whether nobody else has hooks on the parameters."""
        has_same = all(map(is_, map(_hooks, self._params), self._expected))
        return has_same and sum(map(len, filter(None, self._expected))) == len(self._handles)


def _hooks_of_each(reference: weakref.ref[ReceivesGrads], group: _ParamAndGradBucketGroup) -> list[GradHook]:
    """Return the hook of each parameter: a few functions for all. Thousands of them do not stay in the cache."""
    index, intake = group.index, group.intake
    position_of, waiting, streams = intake.position_of, intake.waiting, intake.streams  # none of them leads to a parameter

    def receive(param: torch.Tensor) -> None:
        _follow(reference).receive(index, position_of[id(param)])

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


def _hook_of_run(reference: weakref.ref[ReceivesGrads], index: int, positions: Sequence[int]) -> GradHook:
    def receive_run(_: torch.Tensor) -> None:
        _follow(reference).receive_run(index, positions)

    return receive_run


def _follow(reference: weakref.ref[ReceivesGrads]) -> ReceivesGrads:
    sync = reference()
    if sync is None:
        raise PhaseError(
            "a parameter received a gradient, but the DistributedDataParallel wrapper that should reduce it is gone. "
            "Keep the wrapper or the wrapped module alive, or call detach() on the wrapper before dropping it."
        )
    return sync
