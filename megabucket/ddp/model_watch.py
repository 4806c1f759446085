"""Is the module still the one that was wrapped? Asked once per step.

Neither a moved storage nor an unfrozen parameter makes torch complain: the optimizer updates memory nobody reads, or a gradient
is never reduced. Comparing places and lists of identities finds them; the slow part runs only when one of them differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Final

import torch

from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.buffer.views import dtype_name
from megabucket.ddp.step_report import ModelChange

_requires_grad: Final = attrgetter("requires_grad")
_main_grad: Final = attrgetter("main_grad")
_values: Final = methodcaller("values")


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
        self._params_by_group = [group.params for group in groups]
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

    def find_change(self) -> ModelChange | None:
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
        for group, params in zip(self._groups, self._params_by_group, strict=True):
            if not _are_set_to(params, group.param_values):
                return self._moved()
        if list(map(torch.Tensor.data_ptr, self._views)) != self._view_pointers or not self._has_own_main_grads():
            return ModelChange("main_grad", params=tuple(self._detached_grads()))
        return None

    def forget_foreign_grads(self) -> None:
        """Drop, with the step, the gradients of parameters that are in no buffer: those that came after wrapping."""
        if self._has_same_children() and not any(map(_requires_grad, self._frozen)):
            return
        held = {id(slot.param) for slot in self._slots}
        for param in self._module.parameters():
            if id(param) not in held:
                param.grad = None

    def _has_same_children(self) -> bool:
        # One view at a time: thousands of them in a list would make the garbage collector run.
        children = chain.from_iterable(map(_values, self._children))
        return sum(map(len, self._children)) == len(self._kept) and all(map(is_, children, self._kept))

    def _has_own_main_grads(self) -> bool:
        try:
            return all(map(is_, map(_main_grad, self._slot_params), self._views))
        except AttributeError:
            return False

    def _changed_params(self) -> ModelChange | None:
        """Return which parameters came and went; ``None`` when only modules without parameters did."""
        now = dict(self._module.named_parameters())
        before = self._all_params
        replaced = tuple(name for name, param in now.items() if name in before and before[name] is not param)
        added = tuple(name for name in now if name not in before)
        removed = tuple(name for name in before if name not in now)
        if replaced or added or removed:
            return ModelChange("parameters", params=replaced, added=added, removed=removed)
        return None

    def _changed_trainability(self) -> ModelChange:
        frozen = tuple(name for name, param in self._trainable.items() if not param.requires_grad)
        unfrozen = tuple(
            name for name, param in self._all_params.items() if name not in self._trainable and param.requires_grad
        )
        return ModelChange("trainability", removed=frozen, added=unfrozen)

    def _moved(self) -> ModelChange:
        values_of = {
            slot.name: values
            for group in self._groups
            for slot, values in zip(group.slots, group.param_values, strict=True)
            if not is_set_to(slot.param, values)
        }
        in_order = tuple(name for name in self._trainable if name in values_of)
        param, values = self._trainable[in_order[0]], values_of[in_order[0]]
        has_other_form = (param.shape, param.stride()) != (values.shape, values.stride())
        return ModelChange(
            "moved",
            params=in_order,
            found=f"{_kind(param)}{_form(param) if has_other_form else ''}{_place(param, values)}",
            expected=f"{_kind(values)}{_form(values) if has_other_form else ''} at its place",
        )

    def _detached_grads(self) -> Iterator[str]:
        for slot, view, pointer in zip(self._slots, self._views, self._view_pointers, strict=True):
            if getattr(slot.param, "main_grad", None) is not view or view.data_ptr() != pointer:
                yield slot.name


def is_set_to(param: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether a parameter looks at the memory of ``values``, in the same shape and memory order."""
    try:
        return param.is_set_to(values)
    except RuntimeError:  # not even comparable: on another device, say
        return False


def _are_set_to(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
    try:
        return all(map(torch.Tensor.is_set_to, params, values))
    except RuntimeError:
        return False


def _kind(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} on {tensor.device}"


def _form(tensor: torch.Tensor) -> str:
    return f" of shape {tuple(tensor.shape)} with strides {tensor.stride()}"


def _place(param: torch.Tensor, values: torch.Tensor) -> str:
    return " at its place" if param.data_ptr() == values.data_ptr() else " in memory of its own"
