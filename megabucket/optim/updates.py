"""The optimizers that a ``DistributedOptimizer`` was given, and their twins over the tensors that this rank updates.

A given optimizer keeps its groups, with whole parameters, and nothing in it is replaced. Its twin, of the same class and
attributes, has groups and state of its own. Before each step the twin takes over hyperparameters and attributes, and afterwards
the given one gets back what the step has written to them (schedule-free optimizers count in their groups).
"""

from __future__ import annotations

import copy
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Final

import torch

from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, OptimizerParametersError, UpdateFailedError
from megabucket.optim.param_state import ParamState, is_per_element
from megabucket.optim.shards import MainShard, WholeShard

Step = Callable[[torch.optim.Optimizer], object]
"""A method of an optimizer's class."""

_OWN: Final = frozenset({"param_groups", "state", "step", "__getstate__", "_opt_called"})
"""Attributes that the two do not share; hooks are further ones."""
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
_TWICE: Final = ("the optimizer has the same parameter twice", "Put each parameter into one group.")
_IN_SEVERAL: Final = ("several optimizers have the same parameter", "Give each parameter to one of them.")


class GroupMembers:
    """The parameters of each group of one optimizer, in the caller's order."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._cut: list[list[torch.nn.Parameter]] = []  # as they were cut into shards
        self._once_in_module: set[torch.nn.Parameter] = set()

    def by_group(self) -> list[list[torch.nn.Parameter]]:
        """Return the parameters by group."""
        return list(map(list, map(_params, self._optimizer.param_groups)))

    def are_as_cut(self) -> bool:
        """Return whether the groups hold the parameters that were cut into shards, in the same order."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._cut):
            return False
        for group, known in zip(groups, self._cut, strict=True):
            if len(group["params"]) != len(known) or not all(map(is_, group["params"], known)):
                return False
        return True

    def waiting(self) -> list[torch.nn.Parameter]:
        """Return added trainable parameters without a shard."""
        known = set(chain.from_iterable(self._cut))
        return [tensor for tensor in chain.from_iterable(self.by_group()) if tensor not in known and tensor.requires_grad]

    def moved(self, names: Mapping[torch.nn.Parameter, str]) -> list[str]:
        """Return the names of parameters that have left the group they were cut in."""
        now = list(map(set, self.by_group()))
        return [
            names[param]
            for index, of_group in enumerate(self._cut)
            for param in of_group
            if param in names and (index >= len(now) or param not in now[index])
        ]

    def note_cut(self, params: Collection[torch.nn.Parameter]) -> None:
        """Note that the members were cut into shards. Drop those that have left the module: they keep old buffers alive.

        Args:
            params: all parameters of the module, frozen ones included.
        """
        for group in self._optimizer.param_groups:
            group["params"][:] = [tensor for tensor in group["params"] if not self.has_left(tensor, params)]
        self._cut = self.by_group()
        self._once_in_module = {tensor for group in self._cut for tensor in group if tensor in params}

    def has_left(self, tensor: torch.nn.Parameter, params: Collection[torch.nn.Parameter]) -> bool:
        """Return whether a member was in the module when it was cut into shards, and is not now."""
        return tensor in self._once_in_module and tensor not in params


class Update:
    """One of the given optimizers, and the twin that steps in its place on the tensors of this rank."""

    def __init__(self, given: torch.optim.Optimizer, *, rank: int) -> None:
        self.given: Any = given
        self._rank = rank  # in errors
        self.members = GroupMembers(given)
        self.is_whole = False
        """Whether it steps on whole parameters, and not on flat shards."""
        self.first_group = 0
        """Index of its first group among those of all given optimizers, as they were cut."""
        self.shards: Sequence[MainShard] = ()
        """What it steps on, of this rank; nothing while the given optimizer holds whole parameters."""
        self.twin = twin_of(given, [], defaultdict(dict))
        """The optimizer that steps on the shards."""
        self._empty_state = {
            index: _empty_state(group["params"], given.state) for index, group in enumerate(self.given.param_groups)
        }
        """State of a tensor without elements, by group, for optimizers that make state in their constructor only."""
        self.step_of_class: Step = unhooked_step(given)

    def place(
        self,
        shards: Sequence[MainShard],
        state: Mapping[torch.nn.Parameter, dict[str, Any]],
        *,
        num_groups: int,
        device: torch.device,
    ) -> None:
        """Make a twin that steps on these shards, with their state.

        Args:
            num_groups: as they were cut; a fold before a rebuild finds groups that the caller may have removed since.
        """
        groups: list[dict[str, Any]] = [{"params": []} for _ in range(max(num_groups, len(self.given.param_groups)))]
        for group, hyperparameters in zip(groups, self.given.param_groups, strict=False):
            group.update({key: value for key, value in hyperparameters.items() if key != "params"})
        if self.is_whole:  # where an update couples parameters, the order of its sums is that of the given optimizer
            place = {param: index for index, param in enumerate(chain.from_iterable(self.members.by_group()))}
            shards = sorted(shards, key=lambda shard: place[shard.buffer.params[shard.segment.params[0]]])
        for shard in shards:
            groups[shard.segment.group - self.first_group]["params"].append(shard.main)
        own = {shard.main: state[shard.main] for shard in shards if state.get(shard.main)}
        for index, group in enumerate(groups):
            if not group["params"]:
                group["params"].append(made := _placeholder(device, has_grad=not self.is_whole))
                own[made] = copy.deepcopy(self._empty_state.get(index, {}))
        self.twin, self.shards = twin_of(self.given, groups, defaultdict(dict, own)), shards

    def forget(self) -> None:
        """Drop the shards, whose state the given optimizer has again."""
        self.twin, self.shards = twin_of(self.given, [], defaultdict(dict)), ()

    def step(self, state: ParamState, *, skipped: Container[str]) -> None:
        """Step the twin on the gradients of the shards, with the hooks of the given optimizer around it.

        Args:
            state: of all parameters, which hooks may change.
            skipped: parameters to leave as they are; each has a shard of its own.

        Raises:
            UpdateFailedError: the code of the optimizer has failed, on a whole parameter.
        """
        given = self.given
        for hook in list(given._optimizer_step_pre_hooks.values()):
            hook(given, (given,), {})
        if state.shown:
            state.fold()
        for shard in self.shards:
            is_used = shard.segment.params[0] not in skipped
            shard.main.grad, shard.has_stepped = shard.grad if is_used else None, is_used or shard.has_stepped
        self.call(self.step_of_class)
        given._opt_called = True  # a scheduler of the given optimizer looks for it
        for hook in list(given._optimizer_step_post_hooks.values()):
            hook(given, (given,), {})

    def call(self, method: Step) -> None:
        """Call a method of the given optimizer's class on the twin."""
        carry(self.given, self.twin)
        try:
            method(self.twin)
        except Exception as error:
            if not self.is_whole:
                raise
            raise UpdateFailedError(
                kind=type(self.given).__name__, rank=self._rank, params=self._names_in(error), cause=error
            ) from error
        carry(self.twin, self.given)

    def _names_in(self, error: Exception) -> list[str]:
        """Return the parameter that the failing code had in a variable; if it had several or none, all of this rank."""
        name_of = {id(shard.main): shard.name for shard in self.shards if isinstance(shard, WholeShard)}
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            found = [name_of[id(value)] for value in frame.f_locals.values() if id(value) in name_of]
            if len(set(found)) == 1:
                return found[:1]
        return list(name_of.values())


def group_of_params(updates: Sequence[Update], ddp: DistributedDataParallel) -> dict[str, int]:
    """Return the group of each parameter in the buffers of the wrapper: its index among the groups of all optimizers.

    Raises:
        OptimizerParametersError: groups and wrapper do not hold the same trainable parameters, each once.
    """
    names, params = ddp.param_names, set(ddp.module.parameters())
    group_of: dict[str, int] = {}
    foreign: list[str] = []
    twice: list[str] = []
    in_several: list[str] = []
    by_group = [(update, of_group) for update in updates for of_group in update.members.by_group()]
    for index, (update, group) in enumerate(by_group):
        for position, tensor in enumerate(group):
            name = names.get(tensor)
            if name in group_of:
                (twice if by_group[group_of[name]][0] is update else in_several).append(name)
            elif name is not None:
                group_of[name] = index
            elif tensor.requires_grad and not update.members.has_left(tensor, params):
                foreign.append(f"group {index}, parameter {position}, shape {tuple(tensor.shape)}")
    left_out = [name for name in names.values() if name not in group_of]
    problems = ((foreign, _NOT_IN_WRAPPER), (twice, _TWICE), (in_several, _IN_SEVERAL), (left_out, _IN_NO_GROUP))
    for wrong, (problem, remedy) in problems:
        if wrong:
            raise OptimizerParametersError(problem=problem, params=wrong, remedy=remedy)
    return group_of


def _placeholder(device: torch.device, *, has_grad: bool) -> torch.nn.Parameter:
    """Return a tensor without elements for a group of which this rank has nothing, so that steps are counted there as well.

    Args:
        has_grad: whether an update may meet it. Those of matrices fail on it.
    """
    made = torch.nn.Parameter(torch.zeros(0, dtype=torch.float32, device=device))
    made.grad = torch.zeros_like(made) if has_grad else None
    return made


def _empty_state(params: Sequence[torch.nn.Parameter], state: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a tensor without elements, in a group of these parameters: that of the first one that has any.

    Nothing if some of it is neither one value per element nor one number, since no flat shard could have it.
    """
    found: dict[str, Any] = {}
    param = next((param for param in params if state.get(param)), None)
    if param is None:
        return found
    for key, value in state[param].items():
        if is_per_element(key, value, param):
            found[key] = torch.zeros(0, dtype=value.dtype, device=value.device)
        elif value is None or isinstance(value, bool | int | float | str):
            found[key] = value
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            found[key] = value.detach().clone()
        else:
            return {}
    return found


# Twins #


def shell_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, attributes and hooks over other parameters."""
    shell = object.__new__(type(optimizer))
    shell.__dict__.update(optimizer.__dict__)
    shell.param_groups, shell.state = groups, state  # type: ignore[assignment]
    return shell


def twin_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and attributes, without hooks, over other parameters."""
    twin = shell_of(optimizer, groups, state)
    for name in [name for name in vars(twin) if name in _OWN - {"param_groups", "state"}]:
        del vars(twin)[name]
    vars(twin).update({name: OrderedDict() for name in vars(twin) if name.startswith("_optimizer_")})
    return twin


def unhooked_step(optimizer: torch.optim.Optimizer) -> Step:
    """Return the ``step`` of the class, without the function of torch around it that calls hooks."""
    step: Any = type(optimizer).step
    is_wrapped = getattr(step, "hooked", False) and step.__globals__["__name__"] == torch.optim.Optimizer.__module__
    return step.__wrapped__ if is_wrapped else step  # type: ignore[no-any-return]


def check_can_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose twin would fail, or step in another way than the optimizer itself.

    Raises:
        ConfigError: its ``step`` was replaced on the object, and not by a learning rate scheduler, which only notes the call;
            or it has an option with which torch's own step fails on such parameters.
    """
    kind = type(optimizer).__name__
    patched: Any = vars(optimizer).get("step")
    if getattr(patched, "_wrapped_by_lr_sched", False):
        patched = patched.__wrapped__
    if patched is not None and patched is not type(optimizer).step:
        raise ConfigError(
            f"step() of this {kind} was replaced by {getattr(patched, '__qualname__', patched)!r}, which would not be "
            f"called: a DistributedOptimizer steps the class {kind} on flat tensors. Put the code into a subclass, or into a "
            "hook (register_step_pre_hook, register_step_post_hook)."
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(
                f"group {index} of the {kind} has differentiable=True, with which torch cannot update the parameters of a "
                "module: it refuses to change a leaf in place while it records gradients. Leave it out."
            )
        if group.get("capturable") and any(param.device.type == "cpu" for param in group["params"][:1]):
            raise ConfigError(
                f"group {index} of the {kind} has capturable=True, which torch has for accelerators only, and its parameters "
                "are on the CPU. Leave it out, or set it to False after loading state of a run on a GPU."
            )


def carry(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy attributes and hyperparameters: to the twin before its step, and back after it."""
    own = vars(target)
    for name, value in vars(source).items():
        if name not in _OWN and not name.startswith("_optimizer_"):
            own[name] = value
    # Groups that were added since the twin was made have no trainable parameters in it.
    for group, other in zip(source.param_groups, target.param_groups, strict=False):
        other.update(group, params=other["params"])
    # State under keys that are no parameters.
    for key in list(target.state):
        if not isinstance(key, torch.Tensor):
            del target.state[key]
    for key, value in source.state.items():
        if not isinstance(key, torch.Tensor):
            target.state[key] = value
