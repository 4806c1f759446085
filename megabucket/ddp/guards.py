"""What is looked at once a step, because torch would not complain: the module, the optimizer, the numbers it updates by.

Each check costs one pass in C over the parameters, or less. What they find is a ``Problem``, which the fence tells to all
ranks, or an error where this rank asks for something it must not do.
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
    """Something that is wrong on one rank: the class of the error about it, and the fields of that but step and rank."""

    kind: str
    fields: dict[str, Any]


# Is the module still the one that was wrapped? #


class ModelWatch:
    """Compares a module with what it was when this object was made.

    Args:
        trainable: the parameters in the buffers, by name.
        groups: where they live.
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
        # These dicts are what torch looks names up in; the objects in them are kept, so no address is used twice.
        self._children: list[Mapping[str, Any]] = [submodule._parameters for submodule in modules]
        self._children += [submodule._modules for submodule in modules]
        self._kept = [child for children in self._children for child in children.values()]

    def find_change(self) -> Problem | None:
        """Return what has changed since the module was wrapped, or ``None``.

        Parameters that were added or replaced come first: they explain the rest.
        """
        # With thousands of parameters these few lines are most of what the check costs, so no Python code runs per parameter.
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

    def _has_same_children(self) -> bool:
        # One view at a time: thousands of them in a list would make the garbage collector run.
        children = chain.from_iterable(map(_values, self._children))
        return sum(map(len, self._children)) == len(self._kept) and all(map(is_, children, self._kept))

    def _has_own_main_grads(self) -> bool:
        try:
            return all(map(is_, map(_main_grad, self._slot_params), self._views))
        except AttributeError:
            return False

    def _changed_params(self) -> Problem | None:
        """Return which parameters came and went; ``None`` when only modules without parameters did."""
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
    """Return, for each parameter that looks elsewhere than it must, where it must look."""
    places = chain.from_iterable(zip(group.slots, group.param_values, strict=True) for group in groups)
    return {slot.name: values for slot, values in places if not _are_set_to((slot.param,), (values,))}


def _are_set_to(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
    """Return whether parameters look at the memory of ``values``, in the same shape and memory order."""
    try:
        return all(map(torch.Tensor.is_set_to, params, values))
    except RuntimeError:  # not even comparable: on another device, say
        return False


def _described(tensor: torch.Tensor, place: str, *, with_form: bool) -> str:
    form = f" of shape {tuple(tensor.shape)} with strides {tensor.stride()}" if with_form else ""
    return f"{dtype_name(tensor.dtype)} on {tensor.device}{form} {place}"


# By which numbers does an optimizer update? #

Hyperparameters = tuple[tuple[str, Any], ...]
"""Names and values. A value is a float, a tuple of values, or the text of an integer that no float can hold."""

# How the same update is computed, and where a scheduler has started from.
_NOT_COMPARED: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})


def read_hyperparameters(groups: Iterable[Mapping[str, Any]], *, waits: bool = False) -> Hyperparameters:
    """Return all numbers of an optimizer's groups: learning rates, betas, what else there is.

    Args:
        waits: whether to wait for numbers that are on a device. They are left out otherwise.

    >>> read_hyperparameters([{"params": [], "lr": 1, "betas": (0.5, 1), "foreach": True}, {"lr": 0.25}])
    (('betas of group 0', (0.5, 1.0)), ('lr of group 0', 1.0), ('lr of group 1', 0.25))
    """
    numbers = []
    for index, group in enumerate(groups):
        for key in sorted(group):  # a group that comes from a checkpoint has its keys in another order
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
    """Return the numbers of one or several updates as ``name=value``, to be told to other ranks.

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


# Does a plain optimizer step on gradients that are what it takes them for? #

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

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for known in self._methods:
            method = known()
            if method is not None:
                method(optimizer)


class _Held(NamedTuple):
    """What a plain optimizer holds of a wrapper."""

    sizes: tuple[int, ...]  # of its groups, when it was looked at
    names: list[str]
    params: list[torch.nn.Parameter]
    members: Hyperparameters  # tell the parameters of each group


class PlainOptimizerGuard:
    """Watches optimizer steps on the parameters of one wrapper until it is removed or garbage collected."""

    def __init__(self, params: Mapping[str, torch.nn.Parameter], sync: GradSync, *, rank: int) -> None:
        self._names = {id(param): name for name, param in params.items()}
        self._has_mixed_dtypes = any(slot.view.dtype != slot.param.dtype for group in sync.groups for slot in group.slots)
        self._sync = sync
        self._rank = rank
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Held] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # in which step
        _hook_in(_global_optimizer_pre_hooks, register_optimizer_step_pre_hook).add(self.check)
        _hook_in(_global_optimizer_post_hooks, register_optimizer_step_post_hook).add(self.note_update)

    def remove(self) -> None:
        """Stop watching."""
        self._names.clear()  # no optimizer holds anything of the wrapper any more
        self._held.clear()

    def note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that has updated parameters of the wrapper: all ranks must have made as many."""
        held = self._held_by(optimizer)
        if held.params:
            # Ranks that agree on steps need not hold the same parameters, where there are several groups.
            members = held.members if self._sync.ranks.has_same_params else ()
            self._sync.counters.note_update((*read_hyperparameters(optimizer.param_groups), *members))
            self._stepped[optimizer] = self._sync.step
            self._sync.pause()

    def _held_by(self, optimizer: torch.optim.Optimizer) -> _Held:
        """Look at an optimizer once, and again when a group has grown."""
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

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step that would use gradients of the wrapper that no finished sync has left.

        Raises:
            PlainOptimizerError: the gradients are reduce-scattered.
            PhaseError: an error was raised about these gradients and caught.
            UnreducedGradientsError: no sync has finished on them, whatever has brought them.
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
        # A second step on the same gradients is as good as the first one; a step on others, put in their place, is not.
        is_stale = self._stepped.get(optimizer) == self._sync.step and any(
            grad is not None and all(grad is not getattr(param, name, None) for name in _PLACES)  # a swapped one has none
            for grad, param in zip(grads, held.params, strict=True)
        )
        self._sync.check_may_update(has_grads=any(map(is_not, grads, repeat(None))), is_stale=is_stale)
        is_picky = isinstance(optimizer, _ADAMS) or any(group.get("fused") for group in optimizer.param_groups)
        if not (self._has_mixed_dtypes and is_picky):
            return
        for name, param in zip(held.names, held.params, strict=True):
            if param.grad is not None and param.grad.dtype != param.dtype:  # torch would fail on it with an internal text
                raise ConfigError(
                    f"torch's {type(optimizer).__name__} cannot mix dtypes in a step, and {name!r} is "
                    f"{dtype_name(param.dtype)} with a {dtype_name(param.grad.dtype)} gradient (grad_reduce_in_fp32=True). "
                    "Wrap the optimizer: megabucket.DistributedOptimizer(optimizer, ddp) works in both modes and keeps float32 "
                    "main parameters; or set grad_reduce_in_fp32=False."
                )


def check_learning_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a learning rate with which all weights would be nan or infinite after the step. A tensor on a device is not read.

    Raises:
        ConfigError: it is not finite.
    """
    for index, group in enumerate(groups):
        rate = number_of(group.get("lr"))
        if isinstance(rate, float) and not math.isfinite(rate):
            raise ConfigError(
                f"the learning rate of parameter group {index} is {rate}: every weight of the group would be nan or infinite "
                "after this step. Look at the scheduler, or at what has computed the rate; nothing was updated."
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
