"""Is the module still the one that was wrapped? Asked once per step.

Neither a moved storage nor an unfrozen parameter makes torch complain: the optimizer updates memory nobody reads, or a gradient
is never reduced. Comparing places and lists of identities finds them; the slow part runs only when one of them differs.

With thousands of parameters nearly all of the time goes into fetching them from memory. So a backward that ends with the check
looks at small ones when their gradients come, and they are in the cache anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Final

import torch

from megabucket.buffer import GradSlot, _ParamAndGradBucketGroup
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
        self._frozen = [param for name, param in self._all_params.items() if name not in self._trainable]
        slots = [slot for group in groups for slot in group.slots]
        self._slots = slots
        self._places = {group.index: _Places(group.slots, group.param_values) for group in groups}
        self._places_of: dict[tuple[int, tuple[int, ...]], _Places] = {}  # by group and positions in it
        self._looked_at: dict[int, list[tuple[int, ...]]] = {group.index: [] for group in groups}
        self._rests: dict[int, tuple[list[tuple[int, ...]], _Places]] = {}  # by group, with what was looked at before
        modules = list(module.modules())
        # These dicts are what torch looks names up in; the objects in them are kept, so no address is used twice.
        self._children: list[Mapping[str, Any]] = [submodule._parameters for submodule in modules]
        self._children += [submodule._modules for submodule in modules]
        self._kept = [child for children in self._children for child in children.values()]

    def find_change(self) -> ModelChange | None:
        """Return what has changed since the module was wrapped, or ``None``.

        Parameters that were added or replaced come first: they explain the rest.
        """
        has_same_children = self._has_same_children()
        is_frozen = not any(map(_requires_grad, self._frozen))
        if has_same_children and is_frozen and all(map(self._is_unchanged, self._groups)):
            return None
        if not has_same_children:
            change = self._changed_params()
            if change is not None:
                return change
        if not (is_frozen and all(map(_requires_grad, self._trainable.values()))):
            return self._changed_trainability()
        return self._moved() or self._detached_grads()

    def look_at(self, group: _ParamAndGradBucketGroup, positions: tuple[int, ...]) -> None:
        """Look now at parameters whose gradients have come. ``find_change`` need not, until ``forget_looks``."""
        key = group.index, positions
        places = self._places_of.get(key)
        if places is None:
            if len(self._places_of) > len(self._slots):
                self._places_of.clear()  # gradients come in ever new orders
            places = self._places_of[key] = self._places[group.index].some(positions)
        if group.shows_params and places.are_unchanged():
            self._looked_at[group.index].append(positions)

    def forget_looks(self) -> None:
        """Look at everything in ``find_change``, because time has passed since ``look_at``."""
        for looks in self._looked_at.values():
            looks.clear()

    def _is_unchanged(self, group: _ParamAndGradBucketGroup) -> bool:
        """Return whether the parameters of a group and their gradients are where they were; of those not looked at."""
        places, looks = self._places[group.index], self._looked_at[group.index]
        if not group.shows_params:
            return places.are_unchanged(group.param_values)
        if looks:
            before, rest = self._rests.get(group.index, (None, places))
            if before != looks:
                taken = set(chain.from_iterable(looks))
                rest = places.some([position for position in range(len(group.slots)) if position not in taken])
                self._rests[group.index] = looks.copy(), rest
            places = rest
        return places.are_unchanged()

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

    def _moved(self) -> ModelChange | None:
        values_of = {
            slot.name: values
            for group in self._groups
            for slot, values in zip(group.slots, group.param_values, strict=True)
            if not is_set_to(slot.param, values)
        }
        if not values_of:
            return None
        in_order = tuple(name for name in self._trainable if name in values_of)
        param, values = self._trainable[in_order[0]], values_of[in_order[0]]
        has_other_form = (param.shape, param.stride()) != (values.shape, values.stride())
        return ModelChange(
            "moved",
            params=in_order,
            found=f"{_kind(param)}{_form(param) if has_other_form else ''}{_place(param, values)}",
            expected=f"{_kind(values)}{_form(values) if has_other_form else ''} at its place",
        )

    def _detached_grads(self) -> ModelChange | None:
        names = [name for places in self._places.values() for name in places.detached_grads()]
        return ModelChange("main_grad", params=tuple(names)) if names else None


class _Places:
    """Where parameters and their gradients were when the module was wrapped, for a check without a line of Python for each."""

    def __init__(self, slots: Sequence[GradSlot], values: Sequence[torch.Tensor], pointers: Sequence[int] = ()) -> None:
        self._slots = slots
        self._values = values
        self._params = [slot.param for slot in slots]
        self._views = [slot.view for slot in slots]
        self._pointers = list(pointers) or [view.data_ptr() for view in self._views]

    def some(self, positions: Sequence[int]) -> _Places:
        """Return those of some parameters."""
        slots = [self._slots[position] for position in positions]
        values = [self._values[position] for position in positions]
        return _Places(slots, values, [self._pointers[position] for position in positions])

    def are_unchanged(self, values: Sequence[torch.Tensor] | None = None) -> bool:
        """Return whether everything is where it was, and trained.

        Args:
            values: what the parameters must look at for the time being.
        """
        return (
            all(map(_requires_grad, self._params))
            and _are_set_to(self._params, self._values if values is None else values)
            and list(map(torch.Tensor.data_ptr, self._views)) == self._pointers
            and self._have_own_main_grads()
        )

    def _have_own_main_grads(self) -> bool:
        try:
            return all(map(is_, map(_main_grad, self._params), self._views))
        except AttributeError:
            return False

    def detached_grads(self) -> Iterator[str]:
        """Return the names of parameters whose gradient has another place than it had."""
        for slot, view, pointer in zip(self._slots, self._views, self._pointers, strict=True):
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
