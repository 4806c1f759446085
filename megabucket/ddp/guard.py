"""Stops a plain torch optimizer from stepping on gradients that are not what it takes them for.

Torch calls a hook before the step of every optimizer of the process. Ours looks whether the optimizer holds parameters of the
wrapper and, if so, whether their gradients are complete: never after a reduce-scatter, and not before the sync is finished.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megabucket.buffer.views import dtype_name
from megabucket.comm import Communicator
from megabucket.ddp.grad_sync import GradSync
from megabucket.ddp.hyperparameters import Hyperparameters, read_hyperparameters
from megabucket.errors import MixedDtypeOptimizerError, PlainOptimizerError, UnreducedGradientsError

_ADAMS: Final = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)  # AdamW is an Adam


class _StepHook:
    """What torch's process-wide list holds: knows the guard weakly, so the list does not keep the model alive.

    A hook whose guard is gone does nothing. It is not taken out of the list when that happens, because garbage is collected
    at any time, also while torch iterates over the list; the next guard takes it out.
    """

    __slots__ = ("_method",)

    def __init__(self, method: Callable[[torch.optim.Optimizer], None]) -> None:
        self._method = weakref.WeakMethod(method)

    @property
    def is_dead(self) -> bool:
        return self._method() is None

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        method = self._method()
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
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(_StepHook(self.check)),
            register_optimizer_step_post_hook(_StepHook(self.note_update)),
        ]
        for handle in self._handles:
            _remove_dead_hooks(handle)

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

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


def _remove_dead_hooks(handle: RemovableHandle) -> None:
    """Take the hooks of guards that are gone out of the list that ``handle`` points into."""
    hooks = handle.hooks_dict_ref() or {}
    # dict.copy is one step of the interpreter, unlike any way through an OrderedDict: another thread may be wrapping, too.
    for key, hook in dict.copy(hooks).items():
        if isinstance(hook, _StepHook) and hook.is_dead:
            hooks.pop(key, None)
