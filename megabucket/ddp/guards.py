"""Checks once a step that torch does not make: of the module, plain optimizers, and hyperparameters.

Each check costs at most one pass in C over the parameters. Its result is a ``Problem``, which the fence reports to all ranks,
or an error if this rank's own call is wrong.
"""

from __future__ import annotations

import math
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from numbers import Real
from operator import attrgetter, is_, is_not, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import _ParamAndGradBucketGroup, dtype_name
from megabucket.errors import (
    ConfigError,
    DetachedGradError,
    ParametersChangedError,
    PlainOptimizerError,
    StorageMovedError,
    TrainabilityChangedError,
)

if TYPE_CHECKING:
    from megabucket.ddp.step import GradSync

_requires_grad: Final = attrgetter("requires_grad")
_main_grad: Final = attrgetter("main_grad")
_PLACES: Final = ("main_grad", "main_grad_copy_in_grad_buffer")
_values: Final = methodcaller("values")
_params: Final = itemgetter("params")
_grad: Final = attrgetter("grad")

_ADAMS: Final = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)  # AdamW is an Adam


class Problem(NamedTuple):
    """A problem on one rank: the name of its error class, and the error's fields except step and rank."""

    kind: str
    fields: dict[str, Any]


# Changes of the module #


class ModelWatch:
    """Finds changes of a module since this object was made.

    Args:
        trainable: the parameters in the buffers, by name.
        groups: their bucket groups.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        trainable: Mapping[str, torch.nn.Parameter],
        groups: Sequence[_ParamAndGradBucketGroup],
    ) -> None:
        self._module = module
        self._groups = groups
        self._trainable = dict(trainable)
        self._all_params = dict(module.named_parameters())
        self._trained = list(trainable.values())
        self._frozen = [param for name, param in self._all_params.items() if name not in self._trainable]
        slots = [slot for group in groups for slot in group.slots]
        self._slots = slots
        self._views = [slot.view for slot in slots]
        self._slot_params = [slot.param for slot in slots]
        self._view_pointers = [view.data_ptr() for view in self._views]
        modules = list(module.modules())
        # The dicts in which torch looks names up. Their values are kept alive, so no object's identity is reused.
        self._children: list[Mapping[str, Any]] = [submodule._parameters for submodule in modules]
        self._children += [submodule._modules for submodule in modules]
        self._kept = [child for children in self._children for child in children.values()]

    def find_change(self) -> Problem | None:
        """Return the change of the module since it was wrapped, or ``None``.

        Added and replaced parameters come first, because they explain other changes.
        """
        # No Python code runs per parameter: with thousands of them these few lines are most of the cost of the check.
        if not self._has_same_children():
            change = self._changed_params()
            if change is not None:
                return change
        if not all(map(_requires_grad, self._trained)) or any(map(_requires_grad, self._frozen)):
            return self._changed_trainability()
        for group in self._groups:
            if not _are_set_to(group.params, group.param_values):
                return self._moved()
        if list(map(torch.Tensor.data_ptr, self._views)) != self._view_pointers or not self._has_own_main_grads():
            return Problem(DetachedGradError.__name__, {"params": list(self._detached_grads())})
        return None

    def forget_other_grads(self) -> None:
        """Clear gradients of parameters in no buffer, such as an unfrozen one: an optimizer may hold these parameters."""
        for param in set(self._module.parameters()).difference(self._trained):
            param.grad = None

    def _has_same_children(self) -> bool:
        # An iterator, because a list of thousands of objects would trigger the garbage collector.
        children = chain.from_iterable(map(_values, self._children))
        return sum(map(len, self._children)) == len(self._kept) and all(map(is_, children, self._kept))

    def _has_own_main_grads(self) -> bool:
        try:
            return all(map(is_, map(_main_grad, self._slot_params), self._views))
        except AttributeError:
            return False

    def _changed_params(self) -> Problem | None:
        """Return the added, removed and replaced parameters; ``None`` if only modules without parameters changed."""
        now = dict(self._module.named_parameters())
        before = self._all_params
        replaced = [name for name, param in now.items() if name in before and before[name] is not param]
        added = [name for name in now if name not in before]
        removed = [name for name in before if name not in now]
        if not (replaced or added or removed):
            return None
        return Problem(ParametersChangedError.__name__, {"added": added, "removed": removed, "replaced": replaced})

    def _changed_trainability(self) -> Problem:
        frozen = [name for name, param in self._trainable.items() if not param.requires_grad]
        unfrozen = [name for name, param in self._all_params.items() if name not in self._trainable and param.requires_grad]
        return Problem(TrainabilityChangedError.__name__, {"frozen": frozen, "unfrozen": unfrozen})

    def _moved(self) -> Problem:
        values_of = moved_params(self._groups)
        in_order = tuple(name for name in self._trainable if name in values_of)
        param, values = self._trainable[in_order[0]], values_of[in_order[0]]
        has_other_form = (param.shape, param.stride()) != (values.shape, values.stride())
        place = "at its place" if param.data_ptr() == values.data_ptr() else "in memory of its own"
        found = _described(param, place, with_form=has_other_form)
        expected = _described(values, "at its place", with_form=has_other_form)
        return Problem(StorageMovedError.__name__, {"params": list(in_order), "found": found, "expected": expected})

    def _detached_grads(self) -> Iterator[str]:
        for slot, view, pointer in zip(self._slots, self._views, self._view_pointers, strict=True):
            if getattr(slot.param, "main_grad", None) is not view or view.data_ptr() != pointer:
                yield slot.name


def moved_params(groups: Iterable[_ParamAndGradBucketGroup]) -> dict[str, torch.Tensor]:
    """Return the values in the buffer of each parameter that no longer points at them, by name."""
    places = chain.from_iterable(zip(group.slots, group.param_values, strict=True) for group in groups)
    return {slot.name: values for slot, values in places if not _are_set_to((slot.param,), (values,))}


def _are_set_to(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
    """Return whether parameters point at the memory of ``values``, with the same shapes and strides."""
    try:
        return all(map(torch.Tensor.is_set_to, params, values))
    except RuntimeError:  # not comparable, for example on another device
        return False


def _described(tensor: torch.Tensor, place: str, *, with_form: bool) -> str:
    form = f" of shape {tuple(tensor.shape)} with strides {tensor.stride()}" if with_form else ""
    return f"{dtype_name(tensor.dtype)} on {tensor.device}{form} {place}"


# Hyperparameters #

Hyperparameters = tuple[tuple[str, Any], ...]
"""Names and values. A value is a float, a tuple of values, or the text of an integer that a float cannot represent."""

# These change only how an update is computed, or belong to schedulers.
_NOT_COMPARED: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})


def read_hyperparameters(groups: Iterable[Mapping[str, Any]], *, waits: bool = False) -> Hyperparameters:
    """Return all numbers of an optimizer's groups: learning rates, betas and so on.

    Args:
        waits: whether to read numbers on a device, which waits for it. Otherwise they are left out.

    >>> read_hyperparameters([{"params": [], "lr": 1, "betas": (0.5, 1), "foreach": True}, {"lr": 0.25}])
    (('betas of group 0', (0.5, 1.0)), ('lr of group 0', 1.0), ('lr of group 1', 0.25))
    """
    numbers = []
    for index, group in enumerate(groups):
        for key in sorted(group):  # a group from a checkpoint may have its keys in another order
            if key not in _NOT_COMPARED:
                value = number_of(group[key], waits=waits)
                if value is not None:
                    numbers.append((f"{key} of group {index}", value))
    return tuple(numbers)


def number_of(value: Any, *, waits: bool = False) -> Any:
    """Return a number as a float, several as a tuple, and ``None`` for everything else."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return float(value) if abs(value) <= 1 << 53 else str(value)
    if isinstance(value, tuple | list):
        return tuple(map(partial(number_of, waits=waits), value))
    if isinstance(value, torch.Tensor):
        can_read = value.numel() == 1 and not value.is_complex() and (waits or value.device.type == "cpu")
        return float(value) if can_read else None
    return float(value) if isinstance(value, Real) else None


def texts_of(updates: Sequence[Hyperparameters]) -> tuple[str, ...]:
    """Return the numbers of one or several updates as ``name=value``, for reports.

    >>> texts_of([(("lr of group 0", 0.5),)])
    ('lr of group 0=0.5',)
    >>> texts_of([(("lr of group 0", 0.5),), (("lr of group 0", 1.0),)])
    ('lr of group 0 in update 0=0.5', 'lr of group 0 in update 1=1.0')
    """
    return tuple(
        f"{name}{f' in update {index}' if len(updates) > 1 else ''}={value}"
        for index, update in enumerate(updates)
        for name, value in update
    )


# Plain optimizers #

_Method = Callable[..., None]


class _SharedHook:
    """A hook in one of torch's process-wide lists that serves all guards.

    Torch iterates over that list when it calls the hooks, and raises if it changes meanwhile. But wrappers are made, detached
    and collected at any time, also in other threads, so this hook stays and has its own list. Its references to the guards are
    weak, so it keeps no model alive.
    """

    def __init__(self) -> None:
        self._methods: tuple[weakref.WeakMethod[_Method], ...] = ()
        self._changing = threading.Lock()

    def add(self, method: _Method) -> None:
        with self._changing:
            self._methods = (*(known for known in self._methods if known() is not None), weakref.WeakMethod(method))

    def __call__(self, *args: Any) -> None:
        for known in self._methods:
            method = known()
            if method is not None:
                method(*args)


class _Held(NamedTuple):
    """The parameters of a wrapper in a plain optimizer."""

    sizes: tuple[int, ...]  # of its groups, when they were read
    names: list[str]
    params: list[torch.nn.Parameter]
    members: Hyperparameters  # a checksum of the parameter names of each group


class PlainOptimizerGuard:
    """Watches optimizer steps on the parameters of one wrapper until it is removed or garbage collected."""

    def __init__(self, params: Mapping[str, torch.nn.Parameter], sync: GradSync, *, rank: int) -> None:
        self._names = {id(param): name for name, param in params.items()}
        self._has_mixed_dtypes = any(slot.view.dtype != slot.param.dtype for group in sync.groups for slot in group.slots)
        self._sync = sync
        self._rank = rank
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Held] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # in which step
        shared_hook_in(_global_optimizer_pre_hooks, register_optimizer_step_pre_hook).add(self.check)
        shared_hook_in(_global_optimizer_post_hooks, register_optimizer_step_post_hook).add(self.note_update)

    def remove(self) -> None:
        """Stop watching."""
        self._names.clear()  # so no optimizer counts as holding parameters of the wrapper
        self._held.clear()

    def note_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count an update of parameters of the wrapper: all ranks must make equally many."""
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
        return known

    def check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step that would use gradients of the wrapper that were not reduced.

        Raises:
            PlainOptimizerError: the gradients are reduce-scattered.
            PhaseError: an error was raised about these gradients and caught.
            UnreducedGradientsError: no sync has finished on them.
            ConfigError: a learning rate is not finite, or the optimizer cannot mix the dtypes of parameters and gradients.
        """
        held = self._held_by(optimizer)
        if not any(map(_requires_grad, held.params)):
            return
        if self._sync.policy.is_sharded:
            raise PlainOptimizerError(optimizer=type(optimizer).__name__, params=held.names, rank=self._rank)
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
        self._sync.check_may_update(has_grads=any(map(is_not, grads, repeat(None))), is_stale=is_stale)
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


def shared_hook_in(hooks: dict[int, Any], register: Callable[[Any], RemovableHandle]) -> _SharedHook:
    """Return our hook in one of torch's lists; the first guard of the process adds it."""
    # dict.copy is atomic, unlike iteration over an OrderedDict: another thread may register a hook meanwhile.
    for hook in dict.copy(hooks).values():
        if isinstance(hook, _SharedHook):
            return hook
    hook = _SharedHook()
    register(hook)
    return hook
