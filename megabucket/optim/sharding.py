"""The flat shards behind an optimizer over whole parameters.

``GroupMembers`` knows which parameters were in which group when they were cut. ``Sharding`` makes the shards and the twin that
steps on them, and moves state: wrapping an optimizer moves its state into shards; a rebuild moves it back and cuts it again for
the new buffers. In between the given optimizer is a plain one with all of its state: a failure loses nothing.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import defaultdict
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from megabucket.buffer import GradPhase, ParamAndGradBuffer, Unscale, WithheldGrad, view_like
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.groups import copies_key
from megabucket.ddp.replicas import checksum
from megabucket.ddp.report import Entry, read_hyperparameters, texts_of
from megabucket.errors import CheckpointUnavailableError, OptimizerParametersError, PhaseError, name_list
from megabucket.layout.identity import by_place
from megabucket.layout.segments import plan_segments
from megabucket.optim.kernels import find_kernels
from megabucket.optim.norm import check_norm_settings
from megabucket.optim.param_state import MAIN_PARAM, ParamState
from megabucket.optim.shards import MAIN, MainShard, ReducedGrad, StatePiece, main_dtype
from megabucket.optim.state_dict import (
    ShardHolder,
    ShardState,
    StateCutter,
    WholeState,
    describe_shards,
    is_per_element,
    set_groups,
    state_pieces,
    unpack,
    unshard,
)
from megabucket.optim.twin import Step, carry, check_can_step, twin_of, unhooked_step
from megabucket.optim.update_kind import check_elementwise

_params: Final = itemgetter("params")
_grad: Final = attrgetter("grad")
_WITHHELD: Final = frozenset({WithheldGrad})
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
            group["params"][:] = [tensor for tensor in group["params"] if not self._has_left(tensor, params)]
        self._cut = self.by_group()
        self._once_in_module = {tensor for group in self._cut for tensor in group if tensor in params}

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
    """The shards of one optimizer, the twin that steps on them, and the state of parameters without a shard.

    Args:
        optimizer: over whole parameters. Its own state is that of frozen parameters while there are shards.
        ddp: the wrapper of the parameters.
        unscale: handles a loss scaler's call on the gradients of the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel, unscale: Unscale) -> None:
        self._optimizer = optimizer
        self._ddp = ddp
        self._unscale = unscale
        self._is_sharded = ddp.policy.is_sharded
        self.members = GroupMembers(optimizer)
        self.twin = twin_of(optimizer, [], defaultdict(dict))
        """The optimizer that steps on the shards."""
        self.state = ParamState(self)
        # For parameters without a shard, beside the optimizer's own state: see WholeState.
        self._main_values: dict[torch.Tensor, torch.Tensor] = {}
        self._dtypes: dict[torch.Tensor, torch.dtype] = {p: p.dtype for group in self.members.by_group() for p in group}
        self._buffers: list[ParamAndGradBuffer] = []  # where the shards lie
        self._num_value_changes = 0  # of the wrapper, when main values last were those of its parameters
        itself = weakref.ref(self)
        optimizer.register_state_dict_pre_hook(lambda held: _refuse_shards(itself, held, "state_dict()"))
        optimizer.register_load_state_dict_pre_hook(lambda held, _: _refuse_shards(itself, held, "load_state_dict()"))
        self.shards: list[MainShard] = []
        """Of this rank, in buffer order; none while the optimizer holds whole parameters."""
        self._step_of_class = unhooked_step(optimizer)
        self.skips_some = any(reduction.policy.skips_unused for reduction in ddp.ranks.by_name.values())
        """Whether a step may leave parameters as they are."""
        self.flat_params: Mapping[torch.nn.Parameter, str] = {}
        """The parameters whose state is in shards."""
        self._shard_of: dict[str, MainShard] = {}  # by parameter; not of those of which this rank has nothing
        self._group_of: dict[str, int] = {}
        self.counted_grads: dict[int, list[torch.Tensor]] = {}
        """The gradients in the buffers that count in the norm, by index of the bucket group."""
        self._rounded: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # 16-bit parameters, and their main values

    def _cut(
        self,
        whole: WholeState,
        held: Mapping[str, torch.Tensor] | None = None,
        held_numels: Mapping[torch.Tensor, int] = MappingProxyType({}),
        *,
        group_of: Mapping[str, int] | None = None,
    ) -> _Cut:
        """Cut parameters and state for the buffers as they are now. Changes nothing.

        Args:
            held: see ``StateCutter.restore_main_values``.
            held_numels: see ``StateCutter``.
            group_of: by parameter; ``None``: as the groups are now.
        """
        params = {name: param for param, name in self._ddp.param_names.items()}
        cutter = StateCutter(whole, params, held_numels)
        signature_of = {name: cutter.signature(name) for name in params}
        group_of = self.members.by_name(self._ddp) if group_of is None else group_of
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
        # An optimizer leaves a tensor without a gradient alone, so a parameter that may be skipped has one of its own.
        signatures = {name: (counts[name], signature_of.get(name), name if self._may_skip(name) else "") for name in counts}
        return [
            MainShard(segment, buffer, counts=counts[segment.params[0]])
            for buffer in self._ddp.param_and_grad_buffers
            for segment in plan_segments(
                buffer.layout,
                group_of,
                rank=ranks.by_name[buffer.layout.key.group].communicator.rank,
                is_sharded=is_sharded,
                signature_of=signatures,
            )
        ]

    def _may_skip(self, name: str) -> bool:
        """Return whether steps leave the parameter alone if no rank has used it."""
        return self._ddp.ranks.by_name[self._ddp.identities[name].group].policy.skips_unused

    def _take(self, cut: _Cut) -> None:
        """Move the state of the given optimizer into shards. Parameters without a shard keep theirs."""
        ddp, given = self._ddp, self._optimizer
        self.members.note_cut(set(ddp.module.parameters()))
        # Python copies and pickles an object by this method, also one that belongs to the object alone.
        given.__getstate__ = partial(_refuse_copies, weakref.ref(self), weakref.ref(given))  # type: ignore[method-assign]
        staying = self._others()
        for key in [key for key in given.state if isinstance(key, torch.Tensor) and key not in staying]:
            del given.state[key]
        self._main_values = {param: values for param, values in self._main_values.items() if param in staying}
        self._dtypes = {param: dtype for param, dtype in self._dtypes.items() if param in staying}
        ddp.sync.given_optimizers.add(given)
        self.flat_params, self._group_of = ddp.param_names, self.members.by_name(ddp)
        self._place(cut)
        # Weights loaded after this point reach the main parameters at the next step.
        self._num_value_changes = ddp.num_value_changes

    def _place(self, cut: _Cut) -> None:
        """Make a twin that steps on these shards."""
        ddp, given = self._ddp, self._optimizer
        # A fold before a rebuild finds groups as they were cut, which the caller may have removed since.
        num_groups = max([len(given.param_groups), *(index + 1 for index in self._group_of.values())])
        groups: list[dict[str, Any]] = [{"params": []} for _ in range(num_groups)]
        for group, hyperparameters in zip(groups, given.param_groups, strict=False):
            group.update({key: value for key, value in hyperparameters.items() if key != "params"})
        for shard in cut.shards:
            groups[shard.segment.group]["params"].append(shard.main)
        for group in groups:
            if not group["params"]:
                group["params"].append(_placeholder(ddp.param_and_grad_buffers[0].param_data.device))
        state = defaultdict(dict, {main: values for main, values in cut.state.items() if values})
        self.twin = twin_of(given, groups, state)
        self.shards = cut.shards
        self._shard_of = {name: shard for shard in cut.shards for name in shard.segment.params}
        self._buffers = ddp.param_and_grad_buffers
        self.counted_grads = {group.index: [] for group in ddp.bucket_groups}
        index_of = {slot.name: group.index for group in ddp.bucket_groups for slot in group.slots}
        for shard in cut.shards:
            if shard.counts:
                self.counted_grads[index_of[shard.segment.params[0]]].append(shard.buffer_grads)  # no segment crosses buckets
        with_main = [shard for shard in cut.shards if shard.has_own_values]
        self._rounded = [shard.model_values for shard in with_main], [shard.main for shard in with_main]

    def step(self, *, skipped: Container[str]) -> None:
        """Step the twin on the gradients of the shards, with the hooks of the given optimizer around it.

        Args:
            skipped: parameters to leave as they are; each has a shard of its own.
        """
        given: Any = self._optimizer
        for hook in list(given._optimizer_step_pre_hooks.values()):
            hook(given, (given,), {})
        if self.state.shown:  # by a hook
            self.state.fold()
        for shard in self.shards:
            is_used = shard.segment.params[0] not in skipped
            shard.main.grad, shard.has_stepped = shard.grad if is_used else None, is_used or shard.has_stepped
        carry(given, self.twin)
        self._step_of_class(self.twin)
        carry(self.twin, given)
        given._opt_called = True  # a scheduler of the given optimizer looks for it
        for hook in list(given._optimizer_step_post_hooks.values()):
            hook(given, (given,), {})

    def call_on_shards(self, method: Step) -> None:
        """Call a method of the given optimizer's class that writes to its parameters."""
        carry(self._optimizer, self.twin)
        method(self.twin)
        carry(self.twin, self._optimizer)

    def make_state(self) -> None:
        """Step the twin on gradients of zero, as torch does with a plain optimizer. Ranks need not agree on that."""
        self.check_is_current()
        self.state.fold()
        for shard in self.shards:
            shard.main.grad = torch.zeros_like(shard.main)
        self.call_on_shards(self._step_of_class)
        for shard in self.shards:
            shard.main.grad = None

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
        """Give the state of whole parameters back to the given optimizer. A collective call; a second one does nothing.

        Raises:
            OptimizerParametersError: the state of a shard cannot be split by parameter. Nothing was changed.
            PeerFailedError: another rank has failed.
        """
        if not self._buffers:
            return
        with self._ddp.sync.call(self.holder.label):
            self.state.fold()
        found = unshard(self.shards, self.twin.state, self.holder)
        self._optimizer.state.update(found.values)
        self._main_values |= found.main_values
        self._dtypes |= found.dtypes
        vars(self._optimizer).pop("__getstate__", None)
        self._ddp.sync.given_optimizers.discard(self._optimizer)
        self.shards, self._buffers, self.flat_params, self._shard_of = [], [], {}, {}
        self.counted_grads.clear()
        self.twin = twin_of(self._optimizer, [], defaultdict(dict))

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
            # A plain optimizer that has loaded a state_dict() of this one has main values in its state.
            state = {key: dict(of) if isinstance(of, Mapping) else of for key, of in self._optimizer.state.items()}
            mains = {key: of.pop(MAIN_PARAM) for key, of in state.items() if isinstance(of, dict) and MAIN_PARAM in of}
            cut = self._cut(WholeState(state, self._main_values | mains, self._dtypes))
            check_elementwise(self._optimizer)  # after the errors about its parameters
            check_can_step(self._optimizer)
            own = [f"{name}={float(value) if type(value) is int else value}" for name, value in settings.items()]
            call.by_group = self._by_group(cut.entries, (type(self._optimizer).__name__, *own, *texts_of([numbers])))
            call.open()
            self._take(cut)
            self._watch_scalers()

    def _watch_scalers(self) -> None:
        """Let gradients that a loss scaler meets call the optimizer: withheld ones, and one reduced one of each dtype."""
        for buffer in self._ddp.param_and_grad_buffers:
            slots = list(buffer.slots.values())
            for slot in slots:
                if slot.withheld is not None:
                    slot.withheld.unscale = self._unscale
            # Which of the parameters that may be skipped will have a gradient is not known.
            may_skip = any(map(self._may_skip, buffer.slots))  # all or none
            for slot in () if self._is_sharded else slots if may_skip else slots[:1]:
                shown = ReducedGrad.over(slot.in_buffer, self._unscale)
                if slot.param.grad is slot.in_buffer:
                    slot.param.grad = shown
                slot.in_buffer = shown

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
        if self.state.shown:
            self.state.fold()
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
        return state_pieces(self.shards, self.twin.state)

    def describe(self) -> list[Any]:
        """Return descriptions of the state of all shards, as ``describe_shards``."""
        return describe_shards(self.shards, self.twin.state)

    def whole_state(self) -> WholeState:
        """Return the state of all parameters, on every rank. A collective call; changes nothing.

        Raises:
            OptimizerParametersError: the state of a shard cannot be split by parameter.
            PeerFailedError: another rank has failed.
        """
        found = unshard(self.shards, self.twin.state, self.holder._replace(label="state_dict()"))
        kept = self.state_of_others
        beside = {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)}
        return WholeState(
            {**found.values, **kept.values, **beside},
            {**found.main_values, **kept.main_values},
            {**found.dtypes, **kept.dtypes},
        )

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of whole parameters, main values and hyperparameters. A collective call.

        Main values are loaded without comparing them to the weights. Where a ``state_dict`` of this library has none they are
        the weights; with one of plain torch the current ones stay.

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
        if self.members.are_as_cut():
            return
        if waiting := self.members.waiting():
            names = {param: name for name, param in self._ddp.module.named_parameters()}
            shown = [names.get(param, f"one of shape {tuple(param.shape)}, not in the module") for param in waiting]
            raise PhaseError(
                f"trainable parameters were added to the optimizer and have no shard yet: {name_list(shown)}. Their gradients "
                "are not reduced, so they would be updated differently on every rank. Call ddp.rebuild() on every rank."
            )
        if moved := self.members.moved(self._ddp.param_names):
            raise PhaseError(
                f"{name_list(moved)} have left their parameter group since the optimizer was wrapped, and would be updated "
                "with its hyperparameters all the same. To change groups, call ddp.rebuild() on every rank afterwards; to stop "
                "updates, freeze parameters with requires_grad_(False) and call ddp.rebuild(), or set the group's learning "
                "rate to 0."
            )

    def check_is_untouched(self) -> None:
        """Refuse a step after gradients, or ``step`` of the given optimizer, were cleared or replaced to no effect.

        Raises:
            ConfigError: ``step`` was replaced.
            PhaseError: the gradient of a parameter was cleared in this step, or replaced after it was sent.
        """
        if "step" in vars(self._optimizer):
            check_can_step(self._optimizer)
        for group in self._ddp.sync.groups if self._is_sharded else ():
            if _WITHHELD.issuperset(map(type, map(_grad, group.params))):
                continue
            is_sent = group.grad_phase is not GradPhase.ACCUMULATING
            for slot in group.slots:
                grad = slot.param.grad
                if grad is None and group.is_withheld and slot.name not in self._ddp.sync.skipped:
                    raise PhaseError(
                        f"the gradient of {slot.name!r} was cleared between backward and step(), to no effect or a wrong one: "
                        "zero_grad() of the torch optimizer or of the module does so. Call zero_grad() of the "
                        "DistributedOptimizer, after step()."
                    )
                if is_sent and not (grad is None or grad is slot.in_buffer or type(grad) is WithheldGrad):
                    raise PhaseError(
                        f"the gradient of {slot.name!r} was replaced after it was sent, to no effect: gradients are "
                        "reduce-scattered while backward runs. Replace it before step() with overlap_grad_reduce=False, when "
                        "step() sends gradients, or with use_distributed_optimizer=False."
                    )

    # By parameter, for ``optimizer.state`` #

    @property
    def loose(self) -> MutableMapping[Any, Any]:
        """State that is in no shard: of frozen parameters, and under keys that are no parameters."""
        return self._optimizer.state

    def has_state(self, param: torch.nn.Parameter) -> bool:
        """Return whether a step or a load has made state for a parameter."""
        name = self.flat_params[param]
        return bool(self._state_of(name, self._main_of(name)))

    def _main_of(self, name: str) -> torch.nn.Parameter:
        """Return the tensor with the state of a parameter; one of the same group where this rank has nothing of it."""
        shard = self._shard_of.get(name)
        main: torch.nn.Parameter = self.twin.param_groups[self._group_of[name]]["params"][0] if shard is None else shard.main
        return main

    def _state_of(self, name: str, main: torch.nn.Parameter) -> Mapping[str, Any]:
        """Return the state of ``main``; empty if this rank has nothing of the parameter and others may have other steps."""
        is_elsewhere = name not in self._shard_of and self.skips_some
        return {} if is_elsewhere else self.twin.state.get(main) or {}

    def read(self, param: torch.nn.Parameter) -> dict[str, Any]:
        """Return this rank's state of a parameter: views of flat tensors, and copies of numbers."""
        name = self.flat_params[param]
        main, shard = self._main_of(name), self._shard_of.get(name)
        state = self._state_of(name, main)
        flats = {key: value.detach() for key, value in state.items() if is_per_element(key, value, main)}
        found = {key: flats[key][:0] if key in flats else copy.deepcopy(value) for key, value in state.items()}
        if main_dtype(param.dtype) != param.dtype:
            found[MAIN_PARAM] = main.detach()[:0]
        for piece in () if shard is None else shard.pieces_of(name, {**flats, **shard.own_values}):
            is_whole, like = piece.in_param.numel == param.numel(), piece.like
            values = view_like(piece.values, 0, like.shape, like.stride()) if is_whole else piece.values
            found[MAIN_PARAM if piece.key is MAIN else piece.key] = values
        return found

    def write(self, changed: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> None:
        """Replace this rank's state of parameters: values per element are of the whole parameter or of this rank's part.

        Raises:
            OptimizerParametersError: a value is neither, nor one number. Nothing was changed.
        """
        old, names = self._shard_of, self.flat_params
        local: dict[torch.Tensor, dict[str, Any]] = {}
        held = {piece.param: piece.values for shard in self.shards for piece in shard.pieces({MAIN: shard.main.detach()})}
        numels: dict[torch.Tensor, int] = {param: held[name].numel() if name in held else 0 for param, name in names.items()}
        for param, name in names.items():
            local[param] = self.read(param)
            if param in changed:
                before = self.twin.state.get(self._main_of(name)) or {}
                local[param] = {key: _as_before(value, before.get(key), param) for key, value in changed[param].items()}
            main = local[param].pop(MAIN_PARAM, None)
            if main is not None and main.shape not in (param.shape, (numels[param],)):
                shapes = f"{MAIN_PARAM} of {name}: shape {tuple(main.shape)} for {tuple(param.shape)}"
                raise OptimizerParametersError(
                    problem="main values do not fit", params=[shapes], remedy="Keep the shape that optimizer.state shows."
                )
            if main is not None and name in held:
                held[name] = main
        whole = WholeState(local, dtypes={param: main_dtype(param.dtype) for param in local})
        grads = {piece.param: piece.values for shard in self.shards for piece in shard.pieces({"grad": shard.grad})}
        self._place(self._cut(whole, held, numels, group_of=self._group_of))
        for shard in self.shards:
            shard.has_stepped = old[shard.segment.params[0]].has_stepped
            for piece in shard.pieces({"grad": shard.grad}):  # widened, and perhaps clipped since
                piece.values.copy_(grads[piece.param])


def _as_before(value: Any, before: Any, param: torch.nn.Parameter) -> Any:
    """Convert floating values to the dtype of the entry that they replace, or of computation if they have the parameter's."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if isinstance(before, torch.Tensor):
        return value.to(before.dtype)
    return value.to(main_dtype(param.dtype)) if value.dtype == param.dtype else value


def _checksums(whole: WholeState, names: Mapping[torch.nn.Parameter, str]) -> dict[str, Entry]:
    """Return checksums of all tensors of each parameter's state, for a comparison of ranks."""
    found: dict[str, Entry] = {}
    for param, name in names.items():
        held = [*(whole.values.get(param) or {}).values(), whole.main_values.get(param)]
        sums = [checksum(value) for value in held if isinstance(value, torch.Tensor) and value.numel()]
        found[name] = (f"checksum of the state of {name!r}:", *sums)
    return found


def _placeholder(device: torch.device) -> torch.nn.Parameter:
    """Return a tensor without elements for a group of which this rank has nothing, so that steps are counted there as well."""
    made = torch.nn.Parameter(torch.zeros(0, dtype=torch.float32, device=device))
    made.grad = torch.zeros_like(made)
    return made


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
