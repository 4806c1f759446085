"""Finds changes of a wrapped module, once a step: replaced, moved, frozen or added parameters, and detached gradients.

The check costs at most one pass in C over the parameters. What it finds is a ``Problem``, which the fence reports to all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Final

import torch

from megabucket.buffer import _ParamAndGradBucketGroup, dtype_name
from megabucket.ddp.report import Problem
from megabucket.errors import DetachedGradError, ParametersChangedError, StorageMovedError, TrainabilityChangedError

_requires_grad: Final = attrgetter("requires_grad")
_main_grad: Final = attrgetter("main_grad")
_values: Final = methodcaller("values")


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
        # Others are left alone while they are frozen, as parameters that no rank has used.
        skipped = {slot.name for group in groups if group.policy.skips_unused for slot in group.slots}
        self._stay_trainable = {name: param for name, param in trainable.items() if name not in skipped}
        self._frozen = [param for name, param in self._all_params.items() if name not in self._trainable]
        slots = [slot for group in groups for slot in group.slots]
        self._slots = slots
        self._views = [slot.view for slot in slots]
        self._slot_params = [slot.param for slot in slots]
        self._view_pointers: list[int] = []
        self.note_places()
        modules = list(module.modules())
        # The dicts in which torch looks names up. Their values are kept alive, so no object's identity is reused.
        self._children: list[Mapping[str, Any]] = [submodule._parameters for submodule in modules]
        self._children += [submodule._modules for submodule in modules]
        self._kept = [child for children in self._children for child in children.values()]

    def note_places(self) -> None:
        """Note where the gradients lie."""
        self._view_pointers = [view.data_ptr() for view in self._views]

    def find_change(self) -> Problem | None:
        """Return the change of the module since it was wrapped, or ``None``.

        Added and replaced parameters come first, because they explain other changes.
        """
        # No Python code runs per parameter: with thousands of them these few lines are most of the cost of the check.
        if not self._has_same_children():
            change = self._changed_params()
            if change is not None:
                return change
        if not all(map(_requires_grad, self._stay_trainable.values())) or any(map(_requires_grad, self._frozen)):
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
        frozen = [name for name, param in self._stay_trainable.items() if not param.requires_grad]
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


def only_freezes(change: Problem) -> bool:
    """Return whether parameters were frozen, and nothing else has changed."""
    return change.kind == TrainabilityChangedError.__name__ and not change.fields["unfrozen"]


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
