"""The shards behind optimizers over whole parameters.

``Sharding`` makes the shards and the twins that step on them, and moves state: wrapping an optimizer moves its state into
shards; a rebuild moves it back and cuts it again for the new buffers. In between the given optimizers are plain ones with all
of their state: a failure loses nothing.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from megabucket.buffer import GradPhase, ParamAndGradBuffer, Unscale, WithheldGrad, view_like
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.groups import copies_key
from megabucket.ddp.offload import Memory, tensors_in
from megabucket.ddp.replicas import checksum
from megabucket.ddp.report import Entry, read_hyperparameters, texts_of
from megabucket.errors import (
    CheckpointUnavailableError,
    ConfigError,
    OptimizerParametersError,
    PhaseError,
    name_list,
)
from megabucket.layout import ModelLayout
from megabucket.layout.identity import by_place
from megabucket.layout.layout import Span
from megabucket.layout.owners import plan_owners
from megabucket.layout.segments import Segment, plan_segments
from megabucket.optim.kernels import find_kernels
from megabucket.optim.norm import check_norm_settings
from megabucket.optim.owner_exchange import OwnerExchange
from megabucket.optim.param_state import MAIN_PARAM, ParamState, is_per_element
from megabucket.optim.shards import MAIN, GradShard, MainShard, ReducedGrad, StatePiece, WholeShard, main_dtype
from megabucket.optim.state_dict import (
    ShardHolder,
    ShardState,
    StateCutter,
    WholeState,
    describe_shards,
    set_groups,
    split,
    state_pieces,
    unpack,
    unshard,
)
from megabucket.optim.update_kind import UpdateKind, find_update_kind, refuse_coupled
from megabucket.optim.updates import GroupMembers, Update, check_can_step, group_of_params

_grad: Final = attrgetter("grad")
_members: Final = attrgetter("members")
_given: Final = attrgetter("given")
_param_groups: Final = attrgetter("param_groups")
_WITHHELD: Final = frozenset({WithheldGrad})


class _Cut(NamedTuple):
    """New shards and their state."""

    shards: list[MainShard]
    state: dict[torch.nn.Parameter, ShardState]
    entries: dict[str, Entry]
    """By parameter, its group and state, which must be equal on all ranks that hold it."""


class Sharding:
    """The shards of the given optimizers, the twins that step on them, and the state of parameters without a shard.

    Args:
        optimizers: over whole parameters. Their own state is that of frozen parameters while there are shards.
        ddp: the wrapper of the parameters.
        unscale: handles a loss scaler's call on the gradients of the parameters.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], ddp: DistributedDataParallel, unscale: Unscale) -> None:
        self._ddp = ddp
        self._unscale = unscale
        self._is_sharded = ddp.policy.is_sharded
        self.updates = [Update(optimizer, rank=ddp.communicator.rank) for optimizer in optimizers]
        self.state = ParamState(self)
        # For parameters without a shard, beside the optimizer's own state: see WholeState.
        self._main_values: dict[torch.Tensor, torch.Tensor] = {}
        self._dtypes: dict[torch.Tensor, torch.dtype] = {p: p.dtype for group in self.by_group() for p in group}
        self._buffers: list[ParamAndGradBuffer] = []  # where the shards lie
        self._num_value_changes = 0  # of the wrapper, when main values last were those of its parameters
        itself = weakref.ref(self)
        for optimizer in optimizers:
            optimizer.register_state_dict_pre_hook(lambda held: _refuse_shards(itself, held, "state_dict()"))
            optimizer.register_load_state_dict_pre_hook(lambda held, _: _refuse_shards(itself, held, "load_state_dict()"))
        self.shards: list[MainShard] = []
        """What this rank updates, in buffer order; nothing while the optimizers hold whole parameters."""
        self.grad_shards: list[GradShard] = []
        """The reduced gradients of this rank, for the updates of any rank."""
        self._held: list[GradShard] = []  # those of parameters that are updated whole, by some rank
        self.exchange: OwnerExchange | None = None
        """The way to the owners of parameters that are updated whole, and back; ``None`` if each rank updates what it holds."""
        self.owner_of: Mapping[str, int] = {}
        """The rank in its reduction group that updates a parameter whole, for parameters that one rank updates."""
        self.skips_some = any(reduction.policy.skips_unused for reduction in ddp.ranks.by_name.values())
        """Whether a step may leave parameters as they are."""
        self.flat_params: Mapping[torch.nn.Parameter, str] = {}
        """The parameters whose state is in shards."""
        self._shard_of: dict[str, MainShard] = {}  # by parameter; not of those of which this rank has nothing
        self._group_of: dict[str, int] = {}
        self.counted_grads: dict[int, list[torch.Tensor]] = {}
        """The gradients in the buffers that count in the norm, by index of the bucket group."""
        self._rounded: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # 16-bit parameters, and their main values

    # The given optimizers together #

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all given optimizers; of a single one, its own list."""
        lists: list[list[dict[str, Any]]] = list(map(_param_groups, map(_given, self.updates)))
        return lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))

    def by_group(self) -> list[list[torch.nn.Parameter]]:
        """Return the parameters by group, of all given optimizers."""
        return list(chain.from_iterable(update.members.by_group() for update in self.updates))

    def update_of(self, name: str) -> Update:
        """Return the update of a parameter in the buffers."""
        return self._update_at(self._group_of[name])

    def is_of(self, shard: GradShard, part: int) -> bool:
        """Return whether a gradient is of the parameters of one given optimizer."""
        return self._update_at(shard.segment.group) is self.updates[part]

    def _update_at(self, group: int) -> Update:
        return next(update for update in reversed(self.updates) if update.first_group <= group)

    def _find_groups(self) -> dict[str, int]:
        """Return the group of each parameter as groups are now, among those of all optimizers. Errors: ``group_of_params``."""
        return group_of_params(self.updates, self._ddp)

    def _number_groups(self) -> None:
        """Count groups as they are now. Those that were added to one optimizer move those of the next."""
        self._group_of, first_group = self._find_groups(), 0
        for update in self.updates:
            update.first_group, first_group = first_group, first_group + len(update.given.param_groups)

    @property
    def stepped_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of the shards that have some, by main parameter."""
        return {main: of for update in self.updates for main, of in update.twin.state.items() if isinstance(main, torch.Tensor)}

    def state_of(self, shard: MainShard) -> dict[str, Any]:
        """Return the state of a shard, to be changed by the caller."""
        state: dict[str, Any] = self.update_of(shard.segment.params[0]).twin.state[shard.main]
        return state

    # Making shards #

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
            group_of: of the parameters to cut; ``None``: of all, as the groups are now.
        """
        group_of = self._find_groups() if group_of is None else group_of
        params = {name: param for param, name in self._ddp.param_names.items() if name in group_of}
        cutter = StateCutter(whole, params, held_numels, uncut=self._whole_names(group_of))
        signature_of = {name: cutter.signature(name) for name in params}
        shards = self._make_shards(group_of, signature_of)
        for shard in shards:
            cutter.restore_main_values(shard, held)
        state = {shard.main: cutter.state_of(shard) for shard in shards}
        return _Cut(shards, state, {name: (name, f"in group {group_of[name]}", *signature_of[name]) for name in params})

    def _whole_names(self, names: Container[str]) -> set[str]:
        """Return those of some parameters that are updated whole."""
        members = chain.from_iterable(update.members.by_group() for update in self.updates if update.is_whole)
        found = (self._ddp.param_names.get(param) for param in chain.from_iterable(members))
        return {name for name in found if name is not None and name in names}

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
        """Return what this rank updates, in buffer order."""
        found: list[MainShard] = []
        whole = self._whole_names(group_of)
        owner_of = self._plan_owners(whole)
        flat = {name: group for name, group in group_of.items() if name not in whole}
        for buffer in self._ddp.param_and_grad_buffers:
            made: list[MainShard] = [
                MainShard(segment, buffer, counts=counts) for segment, counts in self._segments(buffer, flat, signature_of)
            ]
            for name, place in buffer.layout.params.items():
                is_owned = owner_of.get(name) == self._rank_in(buffer)
                if name in whole and place.numel and (is_owned or name not in owner_of):
                    segment = Segment(group_of[name], Span(place.start, place.stop), (name,))
                    made.append(WholeShard(segment, buffer, counts=self._counts(name), is_received=is_owned))
            found += sorted(made, key=lambda shard: shard.segment.span)
        return found

    def _plan_owners(self, whole: Collection[str]) -> Mapping[str, int]:
        """Return the owner of each parameter that is updated whole; of none where each rank has all of a gradient."""
        if not self._is_sharded:
            return {}
        layouts = [buffer.layout for buffer in self._ddp.param_and_grad_buffers if buffer.layout.num_shards > 1]
        return plan_owners(ModelLayout(tuple(layouts)), whole).owner_of

    def _rank_in(self, buffer: ParamAndGradBuffer) -> int:
        """Return the rank of this process in the reduction group of a buffer."""
        return self._ddp.ranks.by_name[buffer.layout.key.group].communicator.rank

    def _segments(
        self, buffer: ParamAndGradBuffer, group_of: Mapping[str, int], signature_of: Mapping[str, Hashable]
    ) -> Iterator[tuple[Segment, bool]]:
        """Yield the segments of some parameters in this rank's shards, and whether they count in the norm."""
        # An optimizer leaves a tensor without a gradient alone, so a parameter that may be skipped has one of its own.
        signatures = {
            name: (self._counts(name), signature_of.get(name), name if self._may_skip(name) else "") for name in buffer.params
        }
        rank, is_sharded = self._rank_in(buffer), self._is_sharded
        for segment in plan_segments(buffer.layout, group_of, rank=rank, is_sharded=is_sharded, signature_of=signatures):
            yield segment, self._counts(segment.params[0])

    def _counts(self, name: str) -> bool:
        return self._ddp.ranks.counts(self._ddp.identities[name], is_sharded=self._is_sharded)

    def _may_skip(self, name: str) -> bool:
        """Return whether steps leave the parameter alone if no rank has used it."""
        return self._ddp.ranks.by_name[self._ddp.identities[name].group].policy.skips_unused

    def _take(self, cut: _Cut) -> None:
        """Move the state of the given optimizers into shards. Parameters without a shard keep theirs."""
        ddp = self._ddp
        for update in self.updates:
            given = update.given
            update.members.note_cut(set(ddp.module.parameters()))
            # Python copies and pickles an object by this method, also one that belongs to the object alone.
            given.__getstate__ = partial(_refuse_copies, weakref.ref(self), weakref.ref(given))
            ddp.sync.given_optimizers.add(given)
        staying = self._others()
        for state in [update.given.state for update in self.updates]:
            for key in [key for key in state if isinstance(key, torch.Tensor) and key not in staying]:
                del state[key]
        self._main_values = {param: values for param, values in self._main_values.items() if param in staying}
        self._dtypes = {param: dtype for param, dtype in self._dtypes.items() if param in staying}
        self.flat_params = ddp.param_names
        self._number_groups()
        self._take_grads_of(cut.shards)
        self._place(cut)
        # Weights loaded after this point reach the main parameters at the next step.
        self._num_value_changes = ddp.num_value_changes

    def _place(self, cut: _Cut) -> None:
        """Make twins that step on these shards."""
        ddp, device = self._ddp, self._ddp.param_and_grad_buffers[0].param_data.device
        self.shards, self._buffers = cut.shards, ddp.param_and_grad_buffers
        for update in self.updates:
            groups = [group for group in self._group_of.values() if self._update_at(group) is update]
            own = [shard for shard in cut.shards if self._update_at(shard.segment.group) is update]
            update.place(own, cut.state, num_groups=max(groups, default=-1) + 1 - update.first_group, device=device)
        self._shard_of = {name: shard for shard in cut.shards for name in shard.segment.params}
        self.grad_shards = [*(shard for shard in cut.shards if not shard.is_received), *self._held]
        self.counted_grads = {group.index: [] for group in ddp.bucket_groups}
        index_of = {slot.name: group.index for group in ddp.bucket_groups for slot in group.slots}
        for shard in self.grad_shards:
            if shard.counts:
                self.counted_grads[index_of[shard.segment.params[0]]].append(shard.buffer_grads)  # no segment crosses buckets
        with_main = [shard for shard in cut.shards if shard.has_own_values]
        self._rounded = [shard.model_values for shard in with_main], [shard.main for shard in with_main]

    def _take_grads_of(self, shards: Sequence[MainShard]) -> None:
        """Find the gradients of whole parameters in this rank's shards, and plan their way to the owners."""
        self.owner_of = self._plan_owners(self._whole_names(self._group_of))
        owned = [shard for shard in shards if isinstance(shard, WholeShard) and shard.is_received]
        self._held = [
            GradShard(segment, buffer, counts=counts)
            for buffer in self._ddp.param_and_grad_buffers
            for segment, counts in self._segments(buffer, {name: self._group_of[name] for name in self.owner_of}, {})
        ]
        self.exchange = OwnerExchange(self._ddp, self.owner_of, self._held, owned) if self.owner_of else None

    def switch(self, method: str) -> None:
        """Call a method that writes to the parameters on the twins of those optimizers that have it."""
        for update in self.updates:
            if (of_class := getattr(type(update.given), method, None)) is not None:
                update.call(of_class)

    def make_state(self) -> None:
        """Step the twins on gradients of zero, as torch does with a plain optimizer. Ranks need not agree on that."""
        self.check_is_current()
        self.state.fold()
        for shard in self.shards:
            shard.main.grad = torch.zeros_like(shard.main)
        for update in self.updates:
            update.call(update.step_of_class)
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
        found = unshard(self.shards, self.stepped_state, self.holder)
        for update in self.updates:
            members = set(chain.from_iterable(update.members.by_group()))
            update.given.state.update({param: of for param, of in found.values.items() if param in members})
            vars(update.given).pop("__getstate__", None)
            self._ddp.sync.given_optimizers.discard(update.given)
            update.forget()
        self._main_values |= found.main_values
        self._dtypes |= found.dtypes
        self.shards, self.grad_shards, self._held, self.exchange = [], [], [], None
        self._buffers, self.flat_params, self._shard_of = [], {}, {}
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
            is_exact = self._ddp.policy.sums_in_rank_order
            check_norm_settings(clip_grad, settings["norm_type"], threshold, is_exact=is_exact)
            find_kernels(settings["kernels"], self._ddp.param_and_grad_buffers[0].grad_data.device)
            returns_some = settings["returns_grad_norm"] or settings["returns_num_zeros"]
            self.check_norm(is_wanted=clip_grad > 0 or threshold < math.inf or returns_some)
            numbers = read_hyperparameters(self.param_groups, waits=True)
            # A plain optimizer that has loaded a state_dict() of this one has main values in its state.
            given_state = chain.from_iterable(update.given.state.items() for update in self.updates)
            state = {key: dict(of) if isinstance(of, Mapping) else of for key, of in given_state}
            mains = {key: of.pop(MAIN_PARAM) for key, of in state.items() if isinstance(of, dict) and MAIN_PARAM in of}
            group_of = self._find_groups()  # its errors come first
            for update in self.updates:
                self._find_kind(update)
            cut = self._cut(WholeState(state, self._main_values | mains, self._dtypes), group_of=group_of)
            kinds = [f"{type(one.given).__name__}{' on whole parameters' if one.is_whole else ''}" for one in self.updates]
            own = [f"{name}={float(value) if type(value) is int else value}" for name, value in settings.items()]
            call.by_group = self._by_group(cut.entries, (*kinds, *own, *texts_of([numbers])))
            call.open()
            self._take(cut)
            self._watch_scalers()

    def _find_kind(self, update: Update) -> None:
        """Find out how an optimizer updates, and whether it can here.

        Raises:
            ConfigError: it cannot.
        """
        given, ddp = update.given, self._ddp
        found = find_update_kind(given)
        check_can_step(given)
        update.is_whole = found.kind is not UpdateKind.ELEMENTWISE
        if found.kind is UpdateKind.COUPLED and (self._is_sharded or not ddp.ranks.has_same_params):
            refuse_coupled(given, found)
        if update.is_whole and not getattr(given, "works_on_pieces", False):
            names = [
                ddp.param_names[param] for group in given.param_groups for param in group["params"] if param in ddp.param_names
            ]
            shapes = {name: param.shape for param, name in ddp.param_names.items()}
            if pieces := [name for name in names if ddp.identities[name].global_shape != tuple(shapes[name])]:
                raise ConfigError(
                    f"{type(given).__name__} updates whole tensors, and these are pieces of tensors that are cut over other "
                    f"ranks: {name_list(pieces)}. Its update of a piece is not that of the whole. Give them to an "
                    "elementwise optimizer; or, if an update of each piece by itself is meant, set "
                    "optimizer.works_on_pieces = True, in it or in its class."
                )

    def _watch_scalers(self) -> None:
        """Let gradients that a loss scaler meets call the optimizer: withheld ones, and of each optimizer one of each dtype."""
        for buffer in self._ddp.param_and_grad_buffers:
            slots = list(buffer.slots.values())
            for slot in slots:
                if slot.withheld is not None:
                    slot.withheld.unscale = self._unscale
            # Which of the parameters that may be skipped will have a gradient is not known.
            may_skip = any(map(self._may_skip, buffer.slots))  # all or none
            firsts = {self._update_at(self._group_of[slot.name]).first_group: slot for slot in reversed(slots)}
            for slot in () if self._is_sharded else slots if may_skip else firsts.values():
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

    def memory(self, *, settles: bool) -> Iterator[Memory]:
        """Yield the memory of this rank that grows with the model, for ``ddp.offload()``.

        Args:
            settles: bring all of it up to date first.
        """
        if settles:
            self.settle("offload()")
        names_of: dict[Any, Sequence[str]] = {shard.main: shard.segment.params for shard in self.shards}
        for shard in self.shards:
            yield Memory("grads", shard.grad, shard.segment.params, fill=0.0)
            if shard.has_own_values:
                yield Memory("main_params", shard.main, shard.segment.params)
        states = [item for update in self.updates for of in (update.twin.state, update.given.state) for item in of.items()]
        for key, state in [*states, *self._main_values.items()]:
            for tensor in tensors_in([state]):
                if tensor.dim():
                    yield Memory("optimizer", tensor, names_of.get(key, ()))

    # State of whole parameters, to save and to load #

    @property
    def holder(self) -> ShardHolder:
        """The buffers and ranks of the shards."""
        return ShardHolder(self._buffers, self._ddp.sync, self._is_sharded, self.owner_of)

    def _others(self) -> set[torch.nn.Parameter]:
        """Return the members of groups without a shard: frozen and added parameters."""
        return {param for group in self.by_group() for param in group if param not in self._ddp.param_names}

    @property
    def state_of_others(self) -> WholeState:
        """The state of parameters without a shard."""
        kept = self._others()
        given_state = chain.from_iterable(update.given.state.items() for update in self.updates)
        state = {param: values for param, values in given_state if param in kept}
        mains = {param: values for param, values in self._main_values.items() if param in kept}
        return WholeState(state, mains, self._dtypes)

    @property
    def whole_shards(self) -> list[WholeShard]:
        """The parameters that this rank updates whole."""
        return [shard for shard in self.shards if isinstance(shard, WholeShard)]

    def flat_pieces(self) -> Iterator[StatePiece]:
        """Return the values per element of flat shards, main values included, by parameter and key. Local."""
        return state_pieces((one for one in self.shards if not isinstance(one, WholeShard)), self.stepped_state)

    def state_pieces(self) -> Iterator[StatePiece]:
        """Return the values per element of all shards, main values included, by parameter and key. Local."""
        return state_pieces(self.shards, self.stepped_state)

    def describe(self) -> list[Any]:
        """Return descriptions of the state of all flat shards, as ``describe_shards``."""
        return describe_shards(self.shards, self.stepped_state)

    def whole_state(self) -> WholeState:
        """Return the state of all parameters, on every rank. A collective call; changes nothing.

        Raises:
            OptimizerParametersError: the state of a shard cannot be split by parameter.
            PeerFailedError: another rank has failed.
        """
        found = unshard(self.shards, self.stepped_state, self.holder._replace(label="state_dict()"))
        kept = self.state_of_others
        given_state = chain.from_iterable(update.given.state.items() for update in self.updates)
        beside = {key: value for key, value in given_state if not isinstance(key, torch.Tensor)}
        return WholeState(
            {**found.values, **kept.values, **beside},
            {**found.main_values, **kept.main_values},
            {**found.dtypes, **kept.dtypes},
        )

    def load(self, state_dict: Any, *, parts: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Load the state of whole parameters, main values and hyperparameters. A collective call.

        Main values are loaded without comparing them to the weights. Where a ``state_dict`` of this library has none they are
        the weights; with one of plain torch the current ones stay.

        Args:
            parts: the state dict of each given optimizer, in place of one of all together.

        Raises:
            CheckpointMismatchError: the state does not fit. As with all other errors, nothing was changed.
            PhaseError: a step is open, or the optimizer is not the current one.
            LayoutMismatchError: the state is not the same on all ranks.
            PeerFailedError: another rank has failed.
        """
        with self._ddp.sync.call("load_state_dict()") as call:
            self.settle("load_state_dict()")
            names: dict[torch.Tensor, str] = {param: name for name, param in self._ddp.module.named_parameters()}
            given = [update.given for update in self.updates]
            states = split(state_dict, given) if parts is None else parts
            if (dtensors := self._ddp.dtensors) is not None:
                states = [dtensors.hide_state(*one) for one in zip(given, map(dict, states), strict=True)]
            uncut = self.uncut
            of_each = [unpack(*one, names, uncut=uncut) for one in zip(given, states, strict=True)]
            whole, groups = WholeState.of_all([one for one, _ in of_each]), list(chain.from_iterable(of for _, of in of_each))
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
        return self._make_shards(self._find_groups(), signature_of)

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
        others = self._others()
        for state in [update.given.state for update in self.updates]:
            for key in [key for key in state if key in others or not isinstance(key, torch.Tensor)]:
                del state[key]
        for key, values in whole.values.items():
            if key in others or not isinstance(key, torch.Tensor):
                self.loose_of(key)[key] = copy.deepcopy(values)  # torch would keep the caller's tensors
        self._main_values = {param: main.clone() for param, main in whole.main_values.items() if param in others}
        set_groups(self.param_groups, groups)

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
        if all(map(GroupMembers.are_as_cut, map(_members, self.updates))):
            return
        if waiting := [param for update in self.updates for param in update.members.waiting()]:
            names = {param: name for name, param in self._ddp.module.named_parameters()}
            shown = [names.get(param, f"one of shape {tuple(param.shape)}, not in the module") for param in waiting]
            raise PhaseError(
                f"trainable parameters were added to the optimizer and have no shard yet: {name_list(shown)}. Their gradients "
                "are not reduced, so they would be updated differently on every rank. Call ddp.rebuild() on every rank."
            )
        if moved := [name for update in self.updates for name in update.members.moved(self._ddp.param_names)]:
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
        for update in self.updates:
            if "step" in vars(update.given):
                check_can_step(update.given)
        for group in self._ddp.sync.groups if self._is_sharded else ():
            if _WITHHELD.issuperset(map(type, map(_grad, group.params))):
                continue
            is_sent = group.grad_phase is not GradPhase.ACCUMULATING
            for slot in group.slots:
                grad = slot.param.grad
                is_clear = slot.name in self._ddp.sync.skipped or self._ddp.sync.resets_late
                if grad is None and group.is_withheld and not is_clear:
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
    def uncut(self) -> set[torch.nn.Parameter]:
        """The parameters whose state is kept whole, whatever it is."""
        return {param for param, name in self.flat_params.items() if self.update_of(name).is_whole} | self._others()

    def loose_of(self, key: Any) -> MutableMapping[Any, Any]:
        """Return the mapping for state that is in no shard, under a key: of frozen parameters, and of no parameter."""
        first, *others = self.updates
        state: MutableMapping[Any, Any] = first.given.state
        for update in others:
            if key in update.given.state or any(key is param for param in chain.from_iterable(update.members.by_group())):
                state = update.given.state
        return state

    @property
    def loose_keys(self) -> Iterator[Any]:
        """The keys of state that is in no shard."""
        return chain.from_iterable(update.given.state for update in self.updates)

    def has_state(self, param: torch.nn.Parameter) -> bool:
        """Return whether a step or a load has made state for a parameter."""
        name = self.flat_params[param]
        return bool(self._state_of(name, self._main_of(name)))

    def _main_of(self, name: str) -> torch.nn.Parameter:
        """Return the tensor with the state of a parameter; one of the same group where this rank has nothing of it."""
        update, shard = self.update_of(name), self._shard_of.get(name)
        of_group = update.twin.param_groups[self._group_of[name] - update.first_group]
        main: torch.nn.Parameter = of_group["params"][0] if shard is None else shard.main
        return main

    def _state_of(self, name: str, main: torch.nn.Parameter) -> Mapping[str, Any]:
        """Return the state of ``main``; empty if this rank has nothing of the parameter and others may have other steps."""
        is_elsewhere = name not in self._shard_of and (self.skips_some or name in self.owner_of)
        return {} if is_elsewhere else self.update_of(name).twin.state.get(main) or {}

    def read(self, param: torch.nn.Parameter) -> dict[str, Any]:
        """Return this rank's state of a parameter: views of its tensors, and copies of numbers."""
        name = self.flat_params[param]
        main, shard = self._main_of(name), self._shard_of.get(name)
        state = self._state_of(name, main)
        if isinstance(shard, WholeShard):
            found = {key: _detached(value) for key, value in state.items()}
            return found | {MAIN_PARAM: main.detach()} if shard.has_own_values else found
        flats = {key: value.detach() for key, value in state.items() if is_per_element(key, value, main)}
        found = {key: flats[key][:0] if key in flats else copy.deepcopy(value) for key, value in state.items()}
        if main_dtype(param.dtype) != param.dtype:
            found[MAIN_PARAM] = main.detach().flatten()[:0]
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
        whole = {param: values for param, values in changed.items() if self.update_of(self.flat_params[param]).is_whole}
        if flat := {param: values for param, values in changed.items() if param not in whole}:
            self._write_flat(flat)
        for param, values in whole.items():
            shard = self._shard_of.get(self.flat_params[param])
            if shard is not None:
                state = self.state_of(shard)
                kept = {key: _as_before(value, state.get(key), param) for key, value in values.items() if key != MAIN_PARAM}
                state.clear()
                state.update(kept)
                if MAIN_PARAM in values:
                    shard.main.detach().copy_(values[MAIN_PARAM])

    def _write_flat(self, changed: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> None:
        """Cut flat shards again, with changed state."""
        names = {param: name for param, name in self.flat_params.items() if not self.update_of(name).is_whole}
        old = [shard for shard in self.shards if not isinstance(shard, WholeShard)]
        local: dict[torch.Tensor, dict[str, Any]] = {}
        held = {piece.param: piece.values for shard in old for piece in shard.pieces({MAIN: shard.main.detach()})}
        numels: dict[torch.Tensor, int] = {param: held[name].numel() if name in held else 0 for param, name in names.items()}
        for param, name in names.items():
            local[param] = self.read(param)
            if param in changed:
                before = self.update_of(name).twin.state.get(self._main_of(name)) or {}
                local[param] = {key: _as_before(value, before.get(key), param) for key, value in changed[param].items()}
            main = local[param].pop(MAIN_PARAM, None)
            if main is not None and main.shape not in (param.shape, (numels[param],)):
                shapes = f"{MAIN_PARAM} of {name}: shape {tuple(main.shape)} for {tuple(param.shape)}"
                raise OptimizerParametersError(
                    problem="main values do not fit", params=[shapes], remedy="Keep the shape that optimizer.state shows."
                )
            if main is not None and name in held:
                held[name] = main
        state = WholeState(local, dtypes={param: main_dtype(param.dtype) for param in local})
        grads = {piece.param: piece.values for shard in old for piece in shard.pieces({"grad": shard.grad})}
        has_stepped = {name: shard.has_stepped for shard in old for name in shard.segment.params}
        cut = self._cut(state, held, numels, group_of={name: self._group_of[name] for name in names.values()})
        state_of_whole = {shard.main: self.state_of(shard) for shard in self.whole_shards}
        self._place(_Cut([*cut.shards, *self.whole_shards], {**cut.state, **state_of_whole}, {}))
        for shard in cut.shards:
            shard.has_stepped = has_stepped[shard.segment.params[0]]
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


def _detached(value: Any) -> Any:
    """Return a value of state without the graph; numbers as copies, lists and the like as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.numel() != 1 else value.detach().clone()
    return value


def _refuse_shards(reference: weakref.ref[Sharding], held: torch.optim.Optimizer, method: str) -> None:
    """Refuse to save or load flat shards as the state of a model. Shells over whole parameters share the hook."""
    sharding = reference()
    is_given = sharding is not None and any(update.given is held for update in sharding.updates)  # shells share the hook
    if sharding is not None and is_given and sharding._buffers:
        rank = sharding._ddp.communicator.rank
        num_shards = sharding._buffers[0].layout.num_shards if sharding._is_sharded else 1
        raise CheckpointUnavailableError(optimizer=type(held).__name__, method=method, rank=rank, num_shards=num_shards)


def _refuse_copies(sharding: weakref.ref[Sharding], of: weakref.ref[torch.optim.Optimizer]) -> dict[str, Any]:
    """Refuse to copy or pickle flat shards as the optimizer of a model."""
    optimizer = of()
    assert optimizer is not None  # noqa: S101 - for mypy: this is called for it
    _refuse_shards(sharding, optimizer, "a copy or pickle")
    return type(optimizer).__getstate__(optimizer)
