"""Stops a plain torch optimizer from stepping on gradients that are not what it takes them for.

Torch calls a hook before the step of every optimizer of the process. Ours looks whether the optimizer holds parameters of the
wrapper and, if so, whether their gradients are complete: never after a reduce-scatter, and not before the sync is finished.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from megabucket.buffer.views import dtype_name
from megabucket.comm import Communicator
from megabucket.ddp.grad_sync import GradSync
from megabucket.ddp.hyperparameters import Hyperparameters, read_hyperparameters
from megabucket.errors import MixedDtypeOptimizerError, PlainOptimizerError, UnreducedGradientsError

_ADAMS: Final = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)  # AdamW is an Adam


_Method = Callable[[torch.optim.Optimizer], None]


class _StepHook:
    """What stands in torch's process-wide list, once, on behalf of all guards.

    Torch walks through that list while an optimizer steps, and raises when it changes meanwhile. But wrappers come, are
    detached and garbage collected at any time, also in other threads, so this hook stays and has a list of its own. It knows
    the guards weakly and does not keep a model alive.
    """

    def __init__(self) -> None:
        self._methods: tuple[weakref.WeakMethod[_Method], ...] = ()
        self._changing = threading.Lock()

    def add(self, method: _Method) -> None:
        with self._changing:
            self._methods = (*(known for known in self._methods if known() is not None), weakref.WeakMethod(method))

    def discard(self, method: _Method) -> None:
        with self._changing:
            self._methods = tuple(known for known in self._methods if known() not in (None, method))

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for known in self._methods:
            method = known()
            if method is not None:
                method(optimizer)


class PlainOptimizerGuard:
    """Watches optimizer steps on the parameters of one wrapper until it is removed or garbage collected."""

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        sync: GradSync,
        *,
        reduce_scatters: bool,
        communicator: Communicator,
    ) -> None:
        self._params = params
        self._names = {id(param): name for name, param in params.items()}
        self._sync = sync
        self._reduce_scatters = reduce_scatters
        self._communicator = communicator
        self._rank = communicator.rank
        self._members: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, ...], Hyperparameters]]
        self._members = weakref.WeakKeyDictionary()
        self._before = _hook_in(_global_optimizer_pre_hooks, register_optimizer_step_pre_hook)
        self._after = _hook_in(_global_optimizer_post_hooks, register_optimizer_step_post_hook)
        self._before.add(self.check)
        self._after.add(self.note_update)

    def remove(self) -> None:
        """Stop watching."""
        self._before.discard(self.check)
        self._after.discard(self.note_update)

    def note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that has updated parameters of the wrapper: all ranks must have made as many."""
        if self._held_by(optimizer):
            self._sync.note_update((*read_hyperparameters(optimizer.param_groups), *self._members_of(optimizer)))
            self._communicator.tell_pause()

    def _members_of(self, optimizer: torch.optim.Optimizer) -> Hyperparameters:
        """Return what tells the parameters of each group, looked at once per optimizer and again when a group has grown."""
        sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
        known = self._members.get(optimizer)
        if known is None or known[0] != sizes:
            names = [sorted(self._names.get(id(param), "") for param in group["params"]) for group in optimizer.param_groups]
            sums = [zlib.crc32("\n".join(of_group).encode(errors="surrogatepass")) for of_group in names]
            texts = [f"{size} with CRC-32 {of_names:08x} of their names" for size, of_names in zip(sizes, sums, strict=True)]
            known = sizes, tuple((f"parameters of group {index}", text) for index, text in enumerate(texts))
            self._members[optimizer] = known
        return known[1]

    def _held_by(self, optimizer: torch.optim.Optimizer) -> list[str]:
        return [
            self._names[id(param)]
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in self._names and param.requires_grad
        ]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step that would use gradients of the wrapper that are not complete.

        Raises:
            PlainOptimizerError: the gradients are reduce-scattered.
            PhaseError: an error was raised about these gradients and caught.
            UnreducedGradientsError: gradients were accumulated that no sync has reduced.
            MixedDtypeOptimizerError: the optimizer cannot mix the dtypes of parameters and gradients.
        """
        held = self._held_by(optimizer)
        if not held:
            return
        if self._reduce_scatters:
            raise PlainOptimizerError(optimizer=type(optimizer).__name__, params=held, rank=self._rank)
        self._sync.check_not_failed()
        if self._sync.has_local_grads:
            error = UnreducedGradientsError(rank=self._rank)
            if not self._sync.awaits_finish:
                self._sync.fail("optimizer.step()", error)  # ranks that did run their last backward are waiting
            raise error
        if isinstance(optimizer, _ADAMS) or any(group.get("fused") for group in optimizer.param_groups):
            self._check_dtypes(optimizer, held)
        self._communicator.tell_phase("optimizer")

    def _check_dtypes(self, optimizer: torch.optim.Optimizer, held: Sequence[str]) -> None:
        """Say what torch's Adams and fused kernels would fail on with an internal text."""
        for name in held:
            param, grad = self._params[name], self._params[name].grad
            if grad is not None and grad.dtype != param.dtype:
                raise MixedDtypeOptimizerError(
                    optimizer=type(optimizer).__name__,
                    param=name,
                    param_dtype=dtype_name(param.dtype),
                    grad_dtype=dtype_name(grad.dtype),
                    rank=self._rank,
                )


def _hook_in(hooks: dict[int, Any], register: Callable[[Any], RemovableHandle]) -> _StepHook:
    """Return our hook in one of torch's lists; the first guard of the process puts it there."""
    # dict.copy is one step of the interpreter, unlike any way through an OrderedDict: another thread may register, too.
    for hook in dict.copy(hooks).values():
        if isinstance(hook, _StepHook):
            return hook
    hook = _StepHook()
    register(hook)
    return hook
