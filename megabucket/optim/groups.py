"""Which parameters are in which group of the torch optimizer, also while flat shards stand in their place.

A group knows parameters that have no shard, too: frozen ones, which may be unfrozen later, and those that were added and wait
for a rebuild.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch

from megabucket.errors import ConfigError, OptimizerParametersError

_NEEDS_WHOLE_TENSORS: Final = frozenset(
    {"adafactor", "lbfgs", "muon", "shampoo", "lamb", "fusedlamb", "lars", "sparseadam"}  # names in lower case
)
"""Optimizers whose update of one element depends on others of the same tensor; a flat shard would change the result."""


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is known to look at whole tensors.

    Raises:
        ConfigError: it is.
    """
    kind = type(optimizer).__name__
    if any(base.__name__.lower() in _NEEDS_WHOLE_TENSORS for base in type(optimizer).__mro__):
        raise ConfigError(
            f"{kind} uses the shape of whole parameters, and a DistributedOptimizer steps on flat shards cut across them, so "
            "the result would be silently different. Use an elementwise optimizer (Adam, AdamW, SGD, Lion, ...), or "
            f"{kind} as a plain optimizer with use_distributed_optimizer=False."
        )


class GroupMembers:
    """The parameters of each group of one optimizer, in the caller's order.

    The groups hold either them or stand-ins; ``replace`` and ``restore`` change over.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._replaced: list[list[torch.nn.Parameter]] = []  # by group, of those that hold stand-ins
        self._stand_ins: set[torch.nn.Parameter] = set()
        self._once_in_module: set[torch.nn.Parameter] = set()

    def by_group(self) -> list[list[torch.nn.Parameter]]:
        """Return the parameters by group; those that were added since the last ``replace`` come last."""
        members = [list(group) for group in self._replaced]
        for index, group in enumerate(self._optimizer.param_groups):
            if index == len(members):
                members.append([])
            known = set(members[index])
            members[index] += [tensor for tensor in group["params"] if tensor not in self._stand_ins and tensor not in known]
        return members

    def waiting(self) -> list[torch.nn.Parameter]:
        """Return trainable parameters that were added and have no shard yet."""
        in_groups = [group["params"] for group in self._optimizer.param_groups]
        if sum(map(len, in_groups)) == len(self._stand_ins):
            return []  # the usual case costs nothing
        return [tensor for group in in_groups for tensor in group if tensor not in self._stand_ins and tensor.requires_grad]

    def add_group(self, group: dict[str, object]) -> None:
        """Add a group to the optimizer.

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
                remedy="Leave them out; ddp.rebuild() alone takes notice of parameters that were unfrozen.",
            )

    def replace(self, stand_ins: Sequence[tuple[int, torch.nn.Parameter]], params: Collection[torch.nn.Parameter]) -> None:
        """Put stand-ins into the groups, given with the index of their group. Members that left the module leave the groups.

        Args:
            params: those of the module, frozen ones included.
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

    def by_name(self, names: Mapping[torch.nn.Parameter, str], params: Collection[torch.nn.Parameter]) -> dict[str, int]:
        """Return the group of each parameter of the wrapper, or say what does not fit.

        Args:
            names: of the parameters in the buffers.
            params: those of the module, frozen ones included.

        Raises:
            OptimizerParametersError: groups and wrapper do not hold the same trainable parameters, each once.
        """
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
        self._check_none(foreign, twice, left_out=[name for name in names.values() if name not in group_of])
        return group_of

    def _check_none(self, foreign: Sequence[str], twice: Sequence[str], *, left_out: Sequence[str]) -> None:
        is_rebuilding = bool(self._once_in_module)
        if foreign:
            raise OptimizerParametersError(
                problem="the optimizer has parameters that the wrapper does not hold, so their gradients are never reduced",
                params=foreign,
                remedy="Put them into the wrapped module, or take them out of the group, and call ddp.rebuild() again."
                if is_rebuilding
                else "Build the optimizer over the parameters of the wrapped module, after wrapping it.",
            )
        if twice:
            raise OptimizerParametersError(
                problem="the optimizer has the same parameter twice", params=twice, remedy="Put each parameter into one group."
            )
        if left_out:
            raise OptimizerParametersError(
                problem="trainable parameters of the wrapper are in no group of the optimizer and would never be updated",
                params=left_out,
                remedy="Add them with optimizer.add_param_group(), or freeze them with requires_grad_(False), and call "
                "ddp.rebuild() again."
                if is_rebuilding
                else "Add them to a group, or freeze them with requires_grad_(False) before wrapping.",
            )
