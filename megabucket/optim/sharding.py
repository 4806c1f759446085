"""How flat shards take the place of whole parameters in the groups of an optimizer, and give it back.

``GroupMembers`` knows which parameters are in which group, also while shards replace them. ``Sharding`` switches: wrapping an
optimizer shards it; a rebuild restores whole parameters and shards them again for the new buffers. In between the torch
optimizer is a plain one over whole parameters: a failure loses nothing.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import torch

from megabucket.buffer import GradPhase, ParamAndGradBuffer, WithheldGrad
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.groups import copies_key
from megabucket.ddp.replicas import checksum
from megabucket.ddp.report import Entry, read_hyperparameters, texts_of
from megabucket.errors import CheckpointUnavailableError, OptimizerParametersError, PhaseError, name_list
from megabucket.layout.identity import by_place
from megabucket.layout.segments import plan_segments
from megabucket.optim.elementwise import check_elementwise
from megabucket.optim.kernels import find_kernels
from megabucket.optim.norm import check_norm_settings
from megabucket.optim.shards import MAIN, MainShard, Placeholder, StatePiece, Unscale
from megabucket.optim.state_dict import (
    ShardHolder,
    ShardState,
    StateCutter,
    WholeState,
    describe_shards,
    set_groups,
    state_pieces,
    unpack,
    unshard,
)

_params: Final = itemgetter("params")
_grad: Final = attrgetter("grad")
_WITHHELD: Final = frozenset({WithheldGrad, type(None)})
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
        in_groups = list(_tensors_in(self._optimizer))
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


class _Cut(NamedTuple):
    """New shards and their state."""

    shards: list[MainShard]
    state: dict[torch.nn.Parameter, ShardState]
    entries: dict[str, Entry]
    """By parameter, its group and state, which must be equal on all ranks that hold it."""


class Sharding:
    """The shards of one optimizer, and the state of parameters without a shard.

    Args:
        optimizer: over whole parameters, until ``shard`` is called.
        ddp: the wrapper of the parameters.
        unscale: handles a loss scaler's call on the gradients of the shards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel, unscale: Unscale) -> None:
        self._optimizer = optimizer
        self._ddp = ddp
        self._unscale = unscale
        self._is_sharded = ddp.policy.is_sharded
        self.members = GroupMembers(optimizer)
        # For parameters without a shard, beside the optimizer's own state: see WholeState.
        self._main_values: dict[torch.Tensor, torch.Tensor] = {}
        self._dtypes: dict[torch.Tensor, torch.dtype] = {p: p.dtype for group in self.members.by_group() for p in group}
        self._buffers: list[ParamAndGradBuffer] = []  # where the shards lie
        self._num_value_changes = 0  # of the wrapper, when main values last were those of its parameters
        optimizer.register_step_pre_hook(_refuse_withheld_grads)
        itself = weakref.ref(self)
        optimizer.register_state_dict_pre_hook(lambda held: _refuse_shards(itself, held, "state_dict()"))
        optimizer.register_load_state_dict_pre_hook(lambda held, _: _refuse_shards(itself, held, "load_state_dict()"))
        self.shards: list[MainShard] = []
        """Of this rank, in buffer order; none while the optimizer holds whole parameters."""
        self.stepped: list[MainShard | Placeholder] = []
        """The contents of the groups: the shards, and placeholders in groups without a shard on this rank."""
        self.counted_grads: dict[int, list[torch.Tensor]] = {}
        """The gradients in the buffers that count in the norm, by index of the bucket group."""
        self.has_stepped = False
        """Whether the optimizer has stepped on these shards."""
        self._rounded: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # 16-bit parameters, and their main values

    def _cut(self, whole: WholeState, held: Mapping[str, torch.Tensor] | None = None) -> _Cut:
        """Cut parameters and state for the buffers as they are now. Changes nothing.

        Args:
            held: see ``StateCutter.restore_main_values``.
        """
        params = {name: param for param, name in self._ddp.param_names.items()}
        cutter = StateCutter(whole, params)
        signature_of = {name: cutter.signature(name) for name in params}
        group_of = self.members.by_name(self._ddp)
        shards = self._make_shards(group_of, signature_of)
        for shard in shards:
            cutter.restore_main_values(shard, held)
        state = {shard.main: cutter.state_of(shard) for shard in shards}
        return _Cut(shards, state, {name: (name, f"in group {group_of[name]}", *signature_of[name]) for name in params})

    def _by_group(
        self, entries: Mapping[str, Entry], texts: Iterable[str], sums: Mapping[str, Entry] | None = None
    ) -> dict[str, list[Entry]]:
        """Return the entries that must be equal on the ranks of each reduction group, and of each of ``copies``.

        Args:
            sums: checksums of each parameter's state, for reduction groups only.
        """
        ranks, identities = self._ddp.ranks, self._ddp.identities
        found: dict[str, list[Entry]] = {name: [] for name in (*ranks.by_name, *map(copies_key, ranks.copies))}
        for name in by_place(entries, identities):
            identity = identities[name]
            found[identity.group].append((*entries[name], *(sums or {}).get(name, ())))
            for along in ranks.copies.keys() & identity.copies:
                found[copies_key(along)].append((identity.global_name, *entries[name][1:]))
        return {name: [*of_group, *((text,) for text in texts)] for name, of_group in found.items()}

    def _make_shards(self, group_of: Mapping[str, int], signature_of: Mapping[str, Hashable]) -> list[MainShard]:
        ranks, is_sharded, identities = self._ddp.ranks, self._is_sharded, self._ddp.identities
        counts = {name: ranks.counts(identities[name], is_sharded=is_sharded) for name in self._ddp.param_names.values()}
        signatures = {name: (counts[name], signature_of.get(name)) for name in counts}
        return [
            MainShard(segment, buffer, counts=counts[segment.params[0]], unscale=self._unscale)
            for buffer in self._ddp.param_and_grad_buffers
            for segment in plan_segments(
                buffer.layout,
                group_of,
                rank=ranks.by_name[buffer.layout.key.group].communicator.rank,
                is_sharded=is_sharded,
                signature_of=signatures,
            )
        ]

    def _take(self, cut: _Cut) -> None:
        """Replace the parameters by shards. Parameters without a shard keep their state; those gone from the module lose it."""
        ddp, state = self._ddp, self._optimizer.state
        empty = set(range(len(self._optimizer.param_groups))).difference(shard.segment.group for shard in cut.shards)
        device = ddp.param_and_grad_buffers[0].param_data.device
        placeholders = {index: Placeholder(device=device, unscale=self._unscale) for index in sorted(empty)}
        stand_ins = [(shard.segment.group, shard.main) for shard in cut.shards]
        stand_ins += [(index, placeholder.main) for index, placeholder in placeholders.items()]
        self.members.replace(stand_ins, set(ddp.module.parameters()))
        # Python copies and pickles an object by this method, also one that belongs to the object alone.
        self._optimizer.__getstate__ = partial(_refuse_copies, weakref.ref(self), weakref.ref(self._optimizer))  # type: ignore[method-assign]
        staying = self._others()
        for key in [key for key in state if isinstance(key, torch.Tensor) and key not in staying]:
            del state[key]
        state.update({main: values for main, values in cut.state.items() if values})
        self._main_values = {param: values for param, values in self._main_values.items() if param in staying}
        self._dtypes = {param: dtype for param, dtype in self._dtypes.items() if param in staying}
        self.shards, self.stepped = cut.shards, [*cut.shards, *placeholders.values()]
        self.has_stepped = False
        self._buffers = ddp.param_and_grad_buffers
        self.counted_grads = {group.index: [] for group in ddp.bucket_groups}
        index_of = {slot.name: group.index for group in ddp.bucket_groups for slot in group.slots}
        for shard in cut.shards:
            if shard.counts:
                self.counted_grads[index_of[shard.segment.params[0]]].append(shard.buffer_grads)  # no segment crosses buckets
        with_main = [shard for shard in cut.shards if shard.has_own_values]
        self._rounded = [shard.model_values for shard in with_main], [shard.main for shard in with_main]
        # Weights loaded after this point reach the main parameters at the next step.
        self._num_value_changes = ddp.num_value_changes

    @torch.no_grad()
    def store_values(self) -> None:
        """Round the stepped main parameters into the parameter buffers, all in one operation.

        The parameters count as changed in place, also those that other ranks have stepped, so autograd refuses graphs of their
        old values. Not when a gather ends: that would refuse graphs of the next forward.
        """
        if self._rounded[0]:
            torch._foreach_copy_(*self._rounded)
        torch.autograd.graph.increment_version(self._ddp.param_names)

    def undo(self) -> None:
        """Put whole parameters with their state back into the groups. A collective call; a second one does nothing.

        Raises:
            OptimizerParametersError: the state of a shard cannot be split by parameter. Nothing was changed.
            PeerFailedError: another rank has failed.
        """
        if not self._buffers:
            return
        state = self._optimizer.state
        found = unshard(self.shards, state, self.holder)
        for shard in self.shards:
            state.pop(shard.main, None)
        state.update(found.values)
        self._main_values |= found.main_values
        self._dtypes |= found.dtypes
        self.members.restore()
        vars(self._optimizer).pop("__getstate__", None)
        self.shards, self._buffers = [], []
        self.counted_grads.clear()

    def shard(self, settings: Mapping[str, Any], *, label: str) -> None:
        """Replace the parameters by shards, with their state and earlier main values. A collective call.

        Args:
            settings: the arguments of ``DistributedOptimizer`` by name, the same on all ranks.

        Raises:
            ConfigError: the optimizer cannot work on flat shards, a setting is out of range, the kernels are not installed, or
                the norm would be wrong.
            OptimizerParametersError: the groups do not hold the trainable parameters, or some state cannot be cut. Nothing was
                changed.
            LayoutMismatchError: groups, hyperparameters, step counts or kinds of state are not the same on all ranks.
            PeerFailedError: another rank could not shard.
        """
        with self._ddp.sync.call(label) as call:
            clip_grad, threshold = settings["clip_grad"], settings["grad_norm_skip_threshold"]
            check_norm_settings(clip_grad, settings["norm_type"], threshold)
            find_kernels(settings["kernels"], self._ddp.param_and_grad_buffers[0].grad_data.device)
            returns_some = settings["returns_grad_norm"] or settings["returns_num_zeros"]
            self.check_norm(is_wanted=clip_grad > 0 or threshold < math.inf or returns_some)
            numbers = read_hyperparameters(self._optimizer.param_groups, waits=True)
            cut = self._cut(WholeState(self._optimizer.state, self._main_values, self._dtypes))
            check_elementwise(self._optimizer)  # after the errors about its parameters
            own = [f"{name}={float(value) if type(value) is int else value}" for name, value in settings.items()]
            call.by_group = self._by_group(cut.entries, (type(self._optimizer).__name__, *own, *texts_of([numbers])))
            call.open()
            self._take(cut)

    def check_norm(self, *, is_wanted: bool) -> bool:
        """Return whether a norm over these parameters can be computed.

        Raises:
            ConfigError: it is wanted and cannot be computed.
        """
        obstacle = self._ddp.ranks.find_norm_obstacle(self._ddp.identities, self._ddp.param_names)
        if obstacle is not None and is_wanted:
            raise obstacle
        return obstacle is None

    # Main values follow the parameters #

    def refresh(self) -> None:
        """Bring parameters and main parameters up to date with the last step, or a later load."""
        self._ddp.finish_param_sync()  # a gather that no forward has waited for may still be running
        if self._num_value_changes != self._ddp.num_value_changes:
            self.reload()

    def reload(self) -> None:
        """Copy parameter values from the model after a write there by other code.

        A main value that still rounds to the value in the buffer keeps its precision.
        """
        self.check_is_current()
        for shard in self.shards:
            if shard.has_own_values:
                shard.follow_buffer()
        self._num_value_changes = self._ddp.num_value_changes

    def settle(self, operation: str) -> None:
        """Bring parameters and main parameters up to date, between two steps.

        Raises:
            PhaseError: a step is open, or the optimizer is not the current one.
        """
        self.check_is_current()
        self._ddp.sync.check_between_steps(operation)
        self.refresh()

    # State of whole parameters, to save and to load #

    @property
    def holder(self) -> ShardHolder:
        """The buffers and ranks of the shards."""
        return ShardHolder(self._buffers, self._ddp.sync, self._is_sharded)

    def _others(self) -> set[torch.nn.Parameter]:
        """Return the members of groups without a shard: frozen and added parameters."""
        return {param for group in self.members.by_group() for param in group if param not in self._ddp.param_names}

    @property
    def state_of_others(self) -> WholeState:
        """The state of parameters without a shard."""
        kept = self._others()
        state = {param: values for param, values in self._optimizer.state.items() if param in kept}
        mains = {param: values for param, values in self._main_values.items() if param in kept}
        return WholeState(state, mains, self._dtypes)

    def state_pieces(self) -> Iterator[StatePiece]:
        """Return the values per element of all shards, main values included, by parameter and key. Local."""
        return state_pieces(self.shards, self._optimizer.state)

    def describe(self) -> list[Any]:
        """Return descriptions of the state of all shards, as ``describe_shards``."""
        return describe_shards(self.shards, self._optimizer.state)

    def whole_state(self) -> WholeState:
        """Return the state of all parameters, on every rank. A collective call; changes nothing.

        Raises:
            OptimizerParametersError: the state of a shard cannot be split by parameter.
            PeerFailedError: another rank has failed.
        """
        found = unshard(self.shards, self._optimizer.state, self.holder._replace(label="state_dict()"))
        kept = self.state_of_others
        beside = {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)}
        return WholeState(
            {**found.values, **kept.values, **beside},
            {**found.main_values, **kept.main_values},
            {**found.dtypes, **kept.dtypes},
        )

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of whole parameters, main values and hyperparameters. A collective call.

        Main values are loaded without comparing them to the weights. Without main values the current ones stay.

        Raises:
            CheckpointMismatchError: the state does not fit. As with all other errors, nothing was changed.
            PhaseError: a step is open, or the optimizer is not the current one.
            LayoutMismatchError: the state is not the same on all ranks.
            PeerFailedError: another rank has failed.
        """
        with self._ddp.sync.call("load_state_dict()") as call:
            self.settle("load_state_dict()")
            names: dict[torch.Tensor, str] = {param: name for name, param in self._ddp.module.named_parameters()}
            whole, groups = unpack(self._optimizer, self.members.by_group(), names, state_dict)
            # The layout is the same, so this rank holds the same range of each parameter.
            cut = self._cut(whole, held={piece.param: piece.values for piece in self.state_pieces() if piece.key is MAIN})
            sums = _checksums(whole, self._ddp.param_names)
            call.by_group = self._by_group(cut.entries, texts_of([read_hyperparameters(groups, waits=True)]), sums)
            call.open()
            self._take(cut)
            self._take_others(whole, groups)
        # Weights may be loaded later: the next step replaces main values that do not round to them.
        self._num_value_changes = -1

    def plan_load(self, signature_of: Mapping[str, Hashable]) -> list[MainShard]:
        """Return new shards to load state into. Before ``take_loaded`` nothing uses them; float32 ones lie in the buffers.

        Args:
            signature_of: by parameter; equal for parameters that may share a shard.
        """
        return self._make_shards(self.members.by_name(self._ddp), signature_of)

    def take_loaded(
        self, state: Mapping[MainShard, ShardState], groups: Sequence[Mapping[str, Any]], others: WholeState
    ) -> None:
        """Replace the current shards by loaded ones with their state. The parameters were loaded as well.

        Args:
            groups: hyperparameters by group, without ``params``.
            others: the state of parameters without a shard.
        """
        self._take(_Cut(list(state), {shard.main: values for shard, values in state.items()}, {}))
        self._take_others(others, groups)
        self._dtypes |= others.dtypes

    def _take_others(self, whole: WholeState, groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of parameters without a shard and of no parameter, and hyperparameters by group."""
        state = self._optimizer.state
        others = self._others()
        for key in [key for key in state if key in others or not isinstance(key, torch.Tensor)]:
            del state[key]
        for key, values in whole.values.items():
            if key in others or not isinstance(key, torch.Tensor):
                state[key] = copy.deepcopy(values)  # torch would keep the caller's tensors
        self._main_values = {param: main.clone() for param, main in whole.main_values.items() if param in others}
        set_groups(self._optimizer, groups)

    def check_is_current(self) -> None:
        """Check that the shards cover all that is trained.

        Raises:
            PhaseError: the wrapper was rebuilt without this optimizer, or must be rebuilt before the next step.
        """
        if self._ddp.param_and_grad_buffers is not self._buffers:
            raise PhaseError(
                "the wrapper was rebuilt, but this optimizer was not: a later DistributedOptimizer has replaced it, and its "
                "shards are no longer part of the module. Use the later one. If there is none, before_rebuild() has put "
                "whole parameters back: call ddp.rebuild() on every rank, or use the torch optimizer and the module after "
                "ddp.detach()."
            )
        waiting = self.members.waiting()
        if waiting:
            names = {param: name for name, param in self._ddp.module.named_parameters()}
            shown = [names.get(param, f"one of shape {tuple(param.shape)}, not in the module") for param in waiting]
            raise PhaseError(
                f"trainable parameters were added to the optimizer and have no shard yet: {name_list(shown)}. Their gradients "
                "are not reduced, so they would be updated differently on every rank. Call ddp.rebuild() on every rank."
            )

    def check_shards_are_untouched(self) -> None:
        """Refuse a step after shards have left the groups or gradients were replaced to no effect.

        Raises:
            PhaseError: a shard is not in its group, or its gradient was cleared or replaced since the last step; or the
                gradient of a parameter was replaced after it was sent.
        """
        for group in self._ddp.sync.groups if self._is_sharded else ():
            if group.grad_phase is GradPhase.ACCUMULATING or _WITHHELD.issuperset(map(type, map(_grad, group.params))):
                continue
            for slot in group.slots:
                grad = slot.param.grad
                if not (grad is None or grad is slot.in_buffer or type(grad) is WithheldGrad):
                    raise PhaseError(
                        f"the gradient of {slot.name!r} was replaced after it was sent, to no effect: gradients are "
                        "reduce-scattered while backward runs. Replace it before step() with overlap_grad_reduce=False, when "
                        "step() sends gradients, or with use_distributed_optimizer=False."
                    )
        held = list(map(set, map(_params, self._optimizer.param_groups)))
        touched = None
        for shard in self.shards:
            index = shard.segment.group
            if index >= len(held) or shard.main not in held[index]:
                raise PhaseError(
                    f"the flat shard of {name_list(shard.segment.params)} is no longer in parameter group {index} of the "
                    "optimizer, so it would never be updated again. Do not remove tensors from the groups: freeze parameters "
                    "with requires_grad_(False) and call ddp.rebuild(), or set the group's learning rate to 0."
                )
            if shard.main.grad is not shard.withheld:
                touched = shard
                shard.withhold_grad()
        if touched is not None:
            raise PhaseError(
                f"the gradient of a flat shard ({name_list(touched.segment.params)}) was cleared or replaced between two "
                "steps, to no effect: a DistributedOptimizer steps on the reduced gradients in the buffers. Call its "
                "zero_grad(), not the torch optimizer's; change gradients of the model's parameters before the sync."
            )


def _checksums(whole: WholeState, names: Mapping[torch.nn.Parameter, str]) -> dict[str, Entry]:
    """Return checksums of all tensors of each parameter's state, for a comparison of ranks."""
    found: dict[str, Entry] = {}
    for param, name in names.items():
        held = [*(whole.values.get(param) or {}).values(), whole.main_values.get(param)]
        sums = [checksum(value) for value in held if isinstance(value, torch.Tensor) and value.numel()]
        found[name] = (f"checksum of the state of {name!r}:", *sums)
    return found


def _tensors_in(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    return chain.from_iterable(map(_params, optimizer.param_groups))


def _refuse_shards(reference: weakref.ref[Sharding], held: torch.optim.Optimizer, method: str) -> None:
    """Refuse to save or load flat shards as the state of a model. Shells over whole parameters share the hook."""
    sharding = reference()
    if sharding is not None and sharding._optimizer is held and sharding._buffers:
        rank = sharding._ddp.communicator.rank
        num_shards = sharding._buffers[0].layout.num_shards if sharding._is_sharded else 1
        raise CheckpointUnavailableError(optimizer=type(held).__name__, method=method, rank=rank, num_shards=num_shards)


def _refuse_copies(sharding: weakref.ref[Sharding], of: weakref.ref[torch.optim.Optimizer]) -> dict[str, Any]:
    """Refuse to copy or pickle flat shards as the optimizer of a model."""
    optimizer = of()
    assert optimizer is not None  # noqa: S101 - for mypy: this is called for it
    _refuse_shards(sharding, optimizer, "a copy or pickle")
    return type(optimizer).__getstate__(optimizer)


def _refuse_withheld_grads(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step outside ``DistributedOptimizer.step()`` before it begins and changes weights or step counts."""
    for param in _tensors_in(optimizer):
        if isinstance(param.grad, WithheldGrad):
            param.grad.refuse(f"{type(optimizer).__name__}.step()")
