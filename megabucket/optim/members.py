"""Which parameters are in which group of an optimizer, also while shards replace them there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Final

import torch

from megabucket.ddp import DistributedDataParallel
from megabucket.errors import OptimizerParametersError

_params: Final = itemgetter("params")
_NOT_IN_WRAPPER: Final = (
    "the optimizer has parameters that the wrapper does not hold, so their gradients are never reduced",
    "Build the optimizer over the wrapped parameters; before ddp.rebuild(), put new ones into the module or out of the group.",
)
_IN_NO_GROUP: Final = (
    "trainable parameters of the wrapper are in no group of the optimizer and would never be updated",
    (
        "Add them with optimizer.add_param_group(), also those of another optimizer, or freeze them with requires_grad_(False) "
        "before wrapping or ddp.rebuild()."
    ),
)


class GroupMembers:
    """The parameters of each group of one optimizer, in the caller's order.

    The groups hold the parameters or stand-ins for them; ``replace`` and ``restore`` switch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._replaced: list[list[torch.nn.Parameter]] = []  # by group; none while groups hold the parameters
        self._stand_ins: set[torch.nn.Parameter] = set()
        self._once_in_module: set[torch.nn.Parameter] = set()

    def by_group(self) -> list[list[torch.nn.Parameter]]:
        """Return the parameters by group; parameters added since the last ``replace`` come last."""
        members = [list(group) for group in self._replaced]
        for index, group in enumerate(self._optimizer.param_groups):
            if index == len(members):
                members.append([])
            known = set(members[index])
            members[index] += [tensor for tensor in group["params"] if tensor not in self._stand_ins and tensor not in known]
        return members

    def waiting(self) -> list[torch.nn.Parameter]:
        """Return added trainable parameters without a shard."""
        in_groups = list(tensors_in(self._optimizer))
        if len(in_groups) == len(self._stand_ins):
            return []  # the usual case costs nothing
        return [tensor for tensor in in_groups if tensor not in self._stand_ins and tensor.requires_grad]

    def add_group(self, group: dict[str, object]) -> None:
        """Add a group to the optimizer; its parameters get shards at the next sharding.

        Raises:
            OptimizerParametersError: some of its parameters are in a group already.
        """
        before = {tensor for members in self.by_group() for tensor in members}
        self._optimizer.add_param_group(group)
        added = self._optimizer.param_groups[-1]["params"]
        twice = [f"parameter {index}, shape {tuple(tensor.shape)}" for index, tensor in enumerate(added) if tensor in before]
        if twice:
            del self._optimizer.param_groups[-1]
            raise OptimizerParametersError(
                problem="the added group has parameters that are in a group already, frozen ones included",
                params=twice,
                remedy="Leave them out; ddp.rebuild() alone shards parameters that were unfrozen.",
            )

    def replace(self, stand_ins: Sequence[tuple[int, torch.nn.Parameter]], params: Collection[torch.nn.Parameter]) -> None:
        """Put stand-ins, given with their group's index, into the groups. Drop members that have left the module.

        Args:
            params: all parameters of the module, frozen ones included.
        """
        self._replaced = [[tensor for tensor in group if not self._has_left(tensor, params)] for group in self.by_group()]
        self._once_in_module = {tensor for group in self._replaced for tensor in group if tensor in params}
        self._stand_ins = {tensor for _, tensor in stand_ins}
        for index, group in enumerate(self._optimizer.param_groups):
            group["params"][:] = [tensor for group_index, tensor in stand_ins if group_index == index]

    def restore(self) -> None:
        """Put the parameters back into the groups."""
        members = self.by_group()
        self._replaced, self._stand_ins = [], set()
        for group, of_group in zip(self._optimizer.param_groups, members, strict=True):
            group["params"][:] = of_group

    def _has_left(self, tensor: torch.nn.Parameter, params: Collection[torch.nn.Parameter]) -> bool:
        return tensor in self._once_in_module and tensor not in params

    def by_name(self, ddp: DistributedDataParallel) -> dict[str, int]:
        """Return the group of each parameter in the buffers of the wrapper.

        Raises:
            OptimizerParametersError: groups and wrapper do not hold the same trainable parameters, each once.
        """
        names, params = ddp.param_names, set(ddp.module.parameters())
        group_of: dict[str, int] = {}
        foreign, twice = [], []
        for index, group in enumerate(self.by_group()):
            for position, tensor in enumerate(group):
                name = names.get(tensor)
                if name in group_of:
                    twice.append(name)
                elif name is not None:
                    group_of[name] = index
                elif tensor.requires_grad and not self._has_left(tensor, params):
                    foreign.append(f"group {index}, parameter {position}, shape {tuple(tensor.shape)}")
        left_out = [name for name in names.values() if name not in group_of]
        for wrong, problem, remedy in (
            (foreign, *_NOT_IN_WRAPPER),
            (twice, "the optimizer has the same parameter twice", "Put each parameter into one group."),
            (left_out, *_IN_NO_GROUP),
        ):
            if wrong:
                raise OptimizerParametersError(problem=problem, params=wrong, remedy=remedy)
        return group_of


def tensors_in(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    """Return the tensors in all groups of an optimizer."""
    return chain.from_iterable(map(_params, optimizer.param_groups))
