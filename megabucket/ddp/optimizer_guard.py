"""Watches the steps of plain torch optimizers on the parameters of a wrapper. Checks the learning rates of every optimizer."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megabucket.buffer import dtype_name
from megabucket.ddp.hooks import shared_hook_in
from megabucket.ddp.report import Hyperparameters, number_of, read_hyperparameters
from megabucket.ddp.step import AGREED, GradSync, StepState
from megabucket.errors import ConfigError, PhaseError, PlainOptimizerError, UnreducedGradientsError, name_list

_requires_grad: Final = attrgetter("requires_grad")
_PLACES: Final = ("main_grad", "main_grad_copy_in_grad_buffer")
_params: Final = itemgetter("params")
_grad: Final = attrgetter("grad")

_NOTHING_SENT: Final = (StepState.IDLE, StepState.OPEN, StepState.PUBLISHED)
"""States in which no other rank waits for gradients of this one."""

_ADAMS: Final = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)  # AdamW is an Adam


_Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Of a ``step``: by position and by name."""


class SteppingForWrapper(torch.optim.Optimizer):
    """An optimizer that agrees with all ranks on each step by itself: nobody has to watch it."""


class _Held(NamedTuple):
    """The parameters of a wrapper in a plain optimizer."""

    sizes: tuple[int, ...]  # of its groups, when they were read
    names: list[str]
    params: list[torch.nn.Parameter]
    members: Hyperparameters  # a checksum of the parameter names of each group


class PlainOptimizerGuard:
    """Watches optimizer steps on the parameters of one wrapper until it is removed or garbage collected.

    Args:
        on_first: called with each optimizer over them, before its first step.
    """

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        sync: GradSync,
        *,
        rank: int,
        on_first: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self._names = {id(param): name for name, param in params.items()}
        self._has_mixed_dtypes = any(slot.view.dtype != slot.param.dtype for group in sync.groups for slot in group.slots)
        self._sync = sync
        self._rank, self._on_first = rank, on_first
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Held] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # in which step
        self._making_state: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # while torch makes their state
        shared_hook_in(_global_optimizer_pre_hooks, register_optimizer_step_pre_hook).add(self.check)
        shared_hook_in(_global_optimizer_post_hooks, register_optimizer_step_post_hook).add(self.note_update)

    def remove(self) -> None:
        """Stop watching."""
        self._names.clear()  # so no optimizer counts as holding parameters of the wrapper
        self._held.clear()

    def note_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count an update of parameters of the wrapper: all ranks must make equally many."""
        if isinstance(optimizer, SteppingForWrapper):
            return
        if optimizer in self._making_state:
            self._making_state.discard(optimizer)
            return
        held = self._held_by(optimizer)
        if held.params:
            # With several reduction groups, ranks may hold different parameters.
            members = held.members if self._sync.ranks.has_same_params else ()
            self._sync.counters.note_update((*read_hyperparameters(optimizer.param_groups), *members))
            self._stepped[optimizer] = self._sync.step
            self._sync.pause()

    def _held_by(self, optimizer: torch.optim.Optimizer) -> _Held:
        """Return what an optimizer holds, read once and again when the size of a group changes."""
        groups = optimizer.param_groups
        sizes = tuple(map(len, map(_params, groups)))
        known = self._held.get(optimizer)
        if known is None or known.sizes != sizes:
            names = [[self._names.get(id(param), "") for param in group["params"]] for group in groups]
            sums = [zlib.crc32("\n".join(sorted(of_group)).encode(errors="surrogatepass")) for of_group in names]
            texts = [f"{size} with CRC-32 {of_names:08x} of their names" for size, of_names in zip(sizes, sums, strict=True)]
            members = tuple((f"parameters of group {index}", text) for index, text in enumerate(texts))
            params = [param for group in groups for param in group["params"] if id(param) in self._names]
            known = _Held(sizes, [name for of_group in names for name in of_group if name], params, members)
            self._held[optimizer] = known
            if self._on_first is not None and params:
                self._on_first(optimizer)
        return known

    def check(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments | None:
        """Refuse a step that would use gradients of the wrapper that were not reduced.

        Args:
            args: of ``step``, the optimizer included. A closure makes gradients, so they are checked when it returns.

        Returns:
            other arguments for ``step``, if it has a closure.

        Raises:
            PlainOptimizerError: the gradients are reduce-scattered.
            PhaseError: an error was raised about these gradients and caught.
            UnreducedGradientsError: no sync has finished on them.
            ConfigError: a learning rate is not finite, or the optimizer needs sparse gradients, or cannot mix the dtypes of
                parameters and gradients.
        """
        if isinstance(optimizer, SteppingForWrapper):
            return None
        if optimizer in self._sync.given_optimizers:
            raise PhaseError(
                f"step() of the {type(optimizer).__name__} inside a DistributedOptimizer was called, which has its state and "
                "clips and updates with all ranks. Call step() of the DistributedOptimizer. After ddp.detach() make both anew."
            )
        held = self._held_by(optimizer)
        if not any(map(_requires_grad, held.params)):
            if held.params:
                self._sync.check_is_trainable()
            return None
        if self._sync.policy.is_sharded:
            raise PlainOptimizerError(optimizer=type(optimizer).__name__, params=held.names, rank=self._rank)
        self._making_state.discard(optimizer)  # if its last step failed
        if self._sync.state in _NOTHING_SENT and only_makes_state(optimizer.param_groups, held.params):
            self._making_state.add(optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._check_grads(optimizer, held)
            return None

        def closure_then_check() -> Any:
            value = closure()
            self.check(optimizer, args[:1], {})  # from the beginning: the closure may have changed the groups, or the wrapper
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_check}
        return (args[0], closure_then_check, *args[2:]), kwargs

    def _check_grads(self, optimizer: torch.optim.Optimizer, held: _Held) -> None:
        try:
            check_learning_rates(optimizer.param_groups)
        except ConfigError as error:
            self._sync.refuse_update(error)
            raise
        grads = list(map(_grad, held.params))
        # A second step on the same gradients is allowed, but not on others that have replaced them.
        is_stale = self._stepped.get(optimizer) == self._sync.step and any(
            grad is not None
            and all(grad is not getattr(param, name, None) for name in _PLACES)  # a replaced parameter has none
            for grad, param in zip(grads, held.params, strict=True)
        )
        self._check_is_reduced(has_grads=any(map(is_not, grads, repeat(None))), is_stale=is_stale)
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ConfigError(
                f"SparseAdam steps on sparse gradients only, and the buffers hold dense ones, so it cannot update "
                f"{name_list(held.names)}. Use Adam for them, or freeze them while wrapping."
            )
        is_picky = isinstance(optimizer, _ADAMS) or any(group.get("fused") for group in optimizer.param_groups)
        if not (self._has_mixed_dtypes and is_picky):
            return
        for name, param in zip(held.names, held.params, strict=True):
            if param.grad is not None and param.grad.dtype != param.dtype:  # torch's error would be unclear
                raise ConfigError(
                    f"torch's {type(optimizer).__name__} cannot mix dtypes in a step, and {name!r} is "
                    f"{dtype_name(param.dtype)} with a {dtype_name(param.grad.dtype)} gradient (grad_reduce_in_fp32=True). "
                    "Wrap the optimizer: megabucket.DistributedOptimizer(optimizer, ddp) works in both modes and keeps float32 "
                    "main parameters; or set grad_reduce_in_fp32=False."
                )

    def _check_is_reduced(self, *, has_grads: bool, is_stale: bool) -> None:
        """Refuse a step on gradients that were not reduced. If only zeros of this rank are missing, finish the reduction.

        Args:
            has_grads: whether the optimizer would find any.
            is_stale: whether it has already stepped on the reduced gradients, and would now find others.

        Raises:
            PhaseError: an error about the gradients was raised before, and caught.
            UnreducedGradientsError: they are local.
        """
        sync = self._sync
        sync.check_not_dropped()
        if sync.state is StepState.LAUNCHING and sync.policy.finishes_with_backward and sync.policy.allows_unused:
            sync.finish()  # a backward had no gradient, and the other ranks wait for zeros
        elif sync.state is StepState.LAUNCHING or (has_grads and (sync.state not in AGREED or is_stale)):
            error = UnreducedGradientsError(rank=self._rank, in_backward=sync.backward is not None)
            sync.refuse_update(error)
            raise error
        sync.ranks.step.progress.enter(sync.step, "optimizer")


def only_makes_state(groups: Sequence[Mapping[str, Any]], params: Iterable[torch.Tensor]) -> bool:
    """Return whether a step only makes state: on plain tensors of zeros, with learning rates of zero.

    ``torch.distributed.checkpoint.state_dict`` makes such a step before it reads or loads the state of an optimizer that has
    none. Parameters and gradients in the buffers stay as they are, so the other ranks need not know about it. A learning rate
    on a device is not read, and counts as another number.

    Args:
        params: those in the buffers.
    """
    for group in groups:
        if "lr" in group and number_of(group["lr"]) != 0:
            return False
    if any(map(_has_grad_in_buffer, params)):
        return False
    grads = [param.grad for group in groups for param in group["params"] if param.requires_grad]
    return all(type(grad) is torch.Tensor and not grad.any() for grad in grads)


def _has_grad_in_buffer(param: torch.Tensor) -> bool:
    """Return whether the gradient lies in the memory of a gradient buffer."""
    places = (getattr(param, name, None) for name in _PLACES)
    pointers = [place.untyped_storage().data_ptr() for place in places if place is not None]
    return param.grad is not None and param.grad.untyped_storage().data_ptr() in pointers


def check_learning_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a learning rate that is not finite. A tensor on a device is not read.

    Raises:
        ConfigError: it is not finite.
    """
    for index, group in enumerate(groups):
        rate = number_of(group.get("lr"))
        if isinstance(rate, float) and not math.isfinite(rate):
            raise ConfigError(
                f"the learning rate of parameter group {index} is {rate}: every weight of the group would be nan or infinite "
                "after this step. Look at the scheduler, or at the code that computes the rate; nothing was updated."
            )
