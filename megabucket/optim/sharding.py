"""Changes over between whole parameters and flat shards in the groups and the state of a torch optimizer.

Wrapping an optimizer shards it; a rebuild takes that back, and shards it anew for the buffers that the wrapper has then. In
between the torch optimizer is a plain one over whole parameters, so whatever fails there loses nothing.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megabucket.buffer import ParamAndGradBuffer, WithheldGrad
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.agreement import Entry, agree
from megabucket.ddp.hyperparameters import read_hyperparameters, texts_of
from megabucket.ddp.replicas import checksum
from megabucket.errors import CheckpointUnavailableError, InvariantError, PhaseError, name_list
from megabucket.layout.runs import plan_runs
from megabucket.optim.adopt import ShardState, StateCutter, in_memory_order
from megabucket.optim.groups import GroupMembers, check_elementwise
from megabucket.optim.norm import check_clip_grad
from megabucket.optim.shards import MainShard
from megabucket.optim.torch_format import Unpacked, set_groups
from megabucket.optim.unshard import ShardHolder, unshard
from megabucket.optim.whole_state import KNOWN_NUMBERS, WholeState, state_of_empty_params


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Shards and their state, before anything steps on them."""

    shards: list[MainShard]
    state: dict[torch.nn.Parameter, ShardState]
    entries: list[Entry]
    """What must be equal on all ranks: group and state of each parameter."""


class Sharding:
    """The shards of one optimizer, and what belongs to no shard.

    Args:
        optimizer: over whole parameters, until ``shard`` is called.
        ddp: the wrapper of the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel) -> None:
        self._optimizer = optimizer
        self._ddp = ddp
        self._is_sharded = ddp.ddp_config.use_distributed_optimizer
        self._members = GroupMembers(optimizer)
        # Of parameters that are in no shard, beside the optimizer's own state: see WholeState.
        self._main_values: dict[torch.Tensor, torch.Tensor] = {}
        self._dtypes: dict[torch.Tensor, torch.dtype] = {p: p.dtype for group in self._members.by_group() for p in group}
        self._numbers = KNOWN_NUMBERS
        self._buffers: list[ParamAndGradBuffer] = []  # where the shards lie
        optimizer.register_step_pre_hook(_refuse_withheld_grads)
        itself = weakref.ref(self)
        optimizer.register_state_dict_pre_hook(lambda held: _refuse_shards(itself(), held, "state_dict()"))
        optimizer.register_load_state_dict_pre_hook(lambda held, _: _refuse_shards(itself(), held, "load_state_dict()"))
        self.shards: list[MainShard] = []
        """Of this rank, in buffer order; none while the optimizer holds whole parameters."""
        self.shards_of_group: dict[int, list[MainShard]] = {}
        """Those in the buckets of each bucket group, by its index."""

    def _cut(self, whole: WholeState) -> _Cut:
        """Cut parameters and state for the buffers as they are now. Changes nothing."""
        params = {name: param for param, name in self._ddp.param_names.items()}
        cutter = StateCutter(whole, params)
        signature_of = {name: cutter.signature(name) for name in params}
        group_of = self._group_of()
        shards = self._make_shards(group_of, signature_of)
        for shard in shards:
            cutter.restore_main_values(shard)
        state = {shard.main: cutter.state_of(shard) for shard in shards}
        return _Cut(shards, state, [(name, f"in group {group_of[name]}", *signature_of[name]) for name in params])

    def _group_of(self) -> dict[str, int]:
        return self._members.by_name(self._ddp.param_names, set(self._ddp.module.parameters()))

    def _make_shards(self, group_of: Mapping[str, int], signature_of: Mapping[str, Hashable]) -> list[MainShard]:
        rank, is_sharded = self._ddp.communicator.rank, self._is_sharded
        return [
            MainShard(run, buffer)
            for buffer in self._ddp.param_and_grad_buffers
            for run in plan_runs(buffer.layout, group_of, rank=rank, is_sharded=is_sharded, signature_of=signature_of)
        ]

    def _take(self, cut: _Cut) -> None:
        """Put shards in place of the parameters. Those without a shard keep their state, those gone from the module leave."""
        ddp, state = self._ddp, self._optimizer.state
        self._members.replace([(shard.run.group, shard.main) for shard in cut.shards], set(ddp.module.parameters()))
        staying = {param for group in self._members.by_group() for param in group if param not in ddp.param_names}
        for key in [key for key in state if isinstance(key, torch.Tensor) and key not in staying]:
            del state[key]
        state.update({main: values for main, values in cut.state.items() if values})
        self._main_values = {param: values for param, values in self._main_values.items() if param in staying}
        self._dtypes = {param: dtype for param, dtype in self._dtypes.items() if param in staying}
        self.shards, self._buffers = cut.shards, ddp.param_and_grad_buffers
        self.shards_of_group = {group.index: [] for group in ddp.bucket_groups}
        index_of = {slot.name: group.index for group in ddp.bucket_groups for slot in group.slots}
        for shard in cut.shards:
            self.shards_of_group[index_of[shard.run.params[0]]].append(shard)  # no run crosses buckets

    def undo(self) -> None:
        """Put whole parameters, with their state, back into the groups. A collective call; a second one does nothing.

        Raises:
            OptimizerParametersError: the state of a shard cannot be told apart by parameter. Nothing was changed.
            PeerFailedError: another rank's cannot.
        """
        if not self._buffers:
            return
        state = self._optimizer.state
        found = unshard(self.shards, state, ShardHolder(self._buffers, self._ddp.communicator, self._is_sharded))
        for shard in self.shards:
            state.pop(shard.main, None)
        state.update({**found.values, **state_of_empty_params(found, self.members)})
        self._main_values |= found.main_values
        self._dtypes |= found.dtypes
        self._numbers = found.numbers
        self._members.restore()
        self.shards, self._buffers = [], []
        self.shards_of_group.clear()

    def shard(self, *, clip_grad: float, returns_grad_norm: bool, label: str) -> None:
        """Shard, with the state there is and the main values from before. A collective call.

        Raises:
            ConfigError: the optimizer cannot work on flat shards, or ``clip_grad`` is no norm.
            OptimizerParametersError: the groups do not hold the trainable parameters, or some state cannot be cut. Nothing was
                changed.
            LayoutMismatchError: groups, hyperparameters, step counts or kinds of state are not the same on all ranks.
            PeerFailedError: another rank could not shard.
        """
        cut, failure = None, None
        entries: list[Entry] = []
        try:
            check_elementwise(self._optimizer)
            check_clip_grad(clip_grad)
            numbers = read_hyperparameters(self._optimizer.param_groups, waits=True)
            cut = self._cut(WholeState(self._optimizer.state, self._main_values, self._dtypes, self._numbers))
            entries = [*cut.entries, (type(self._optimizer).__name__,), (f"clip_grad={float(clip_grad)}",)]
            entries.append((f"returns_grad_norm={bool(returns_grad_norm)}",))
            entries += [(text,) for text in texts_of([numbers])]
        except Exception as error:
            failure = error
        device = self._ddp.param_and_grad_buffers[0].grad_data.device
        agree(self._ddp.communicator, entries, failure=failure, device=device, label=label)
        if cut is None:
            raise InvariantError("agree() has not raised the failure")
        self._take(cut)

    # State of whole parameters, to save and to load #

    @property
    def members(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each group, in the caller's order."""
        return self._members.by_group()

    @property
    def holder(self) -> ShardHolder:
        """Where the shards lie."""
        return ShardHolder(self._buffers, self._ddp.communicator, self._is_sharded)

    @property
    def state_of_others(self) -> WholeState:
        """What is kept for parameters that are in no shard: frozen ones, those that were added."""
        kept = {param for group in self.members for param in group if param not in self._ddp.param_names}
        state = {param: values for param, values in self._optimizer.state.items() if param in kept}
        mains = {param: values for param, values in self._main_values.items() if param in kept}
        return WholeState(state, mains, self._dtypes, self._numbers)

    def whole_state(self) -> WholeState:
        """Return the state of all parameters, on every rank. A collective call; changes nothing.

        Raises:
            OptimizerParametersError: the state of a shard cannot be told apart by parameter.
            PeerFailedError: another rank's cannot.
        """
        found = unshard(self.shards, self._optimizer.state, self.holder._replace(label="state_dict()"))
        kept = self.state_of_others
        beside = {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)}
        return WholeState(
            {**found.values, **state_of_empty_params(found, self.members), **kept.values, **beside},
            {**found.main_values, **kept.main_values},
            {**found.dtypes, **kept.dtypes},
            found.numbers,
        )

    def load(self, unpack: Callable[[], Unpacked]) -> None:
        """Take state of whole parameters, main values and hyperparameters. A collective call.

        Main values are taken as they are. Where there are none, those of now stay.

        Args:
            unpack: returns what to load, or raises.

        Raises:
            CheckpointMismatchError: it does not fit. As with all other errors, nothing was changed.
            LayoutMismatchError: it is not the same on all ranks.
            PeerFailedError: another rank cannot load it.
        """
        cut, found, failure = None, None, None
        entries: list[Entry] = []
        try:
            found = unpack()
            cut = self._cut(found.whole)
            self._fill_main_values(cut.shards, found.whole)
            entries = [*cut.entries, *_checksums(found.whole, self._ddp.param_names)]
            entries += [(text,) for text in texts_of([read_hyperparameters(found.groups, waits=True)])]
        except Exception as error:
            failure = error
        device = self._ddp.param_and_grad_buffers[0].grad_data.device
        agree(self._ddp.communicator, entries, failure=failure, device=device, label="load_state_dict()")
        if cut is None or found is None:
            raise InvariantError("agree() has not raised the failure")
        self._take(cut)
        self._keep_others(found.whole)
        set_groups(self._optimizer, found.groups)

    def plan_load(self, signature_of: Mapping[str, Hashable]) -> list[MainShard]:
        """Return shards to load state into. They are of no effect until ``take_loaded``; float32 ones lie in the buffers.

        Args:
            signature_of: by parameter; those that share a shard have the same.
        """
        return self._make_shards(self._group_of(), signature_of)

    def take_loaded(
        self, state: Mapping[MainShard, ShardState], groups: Sequence[Mapping[str, Any]], others: WholeState
    ) -> None:
        """Put shards that were loaded, and their state, in place of those of now.

        Args:
            groups: hyperparameters by group, without ``params``.
            others: what belongs to parameters without a shard.
        """
        self._take(_Cut(list(state), {shard.main: values for shard, values in state.items()}, []))
        self._keep_others(others)
        self._dtypes |= others.dtypes
        set_groups(self._optimizer, groups)

    def _fill_main_values(self, shards: Sequence[MainShard], whole: WholeState) -> None:
        """Give new shards the main values that were loaded, and else those that the shards of now hold."""
        params = {name: param for param, name in self._ddp.param_names.items()}
        # The layout is the same, so what a rank owns of a parameter is the same piece.
        held = {piece.param: shard.main[slice(*piece.in_run)] for shard in self.shards for piece in shard.pieces()}
        with torch.no_grad():
            for shard in (shard for shard in shards if shard.has_own_values):
                for piece in shard.pieces():
                    param = params[piece.param]
                    given = whole.main_values.get(param)
                    values = held.get(piece.param)
                    if given is not None:
                        values = in_memory_order(given, param, shard.main)[slice(*piece.in_param)]
                    if values is not None:
                        shard.main[slice(*piece.in_run)] = values

    def _keep_others(self, whole: WholeState) -> None:
        """Take the state of parameters without a shard, and what belongs to no parameter."""
        state = self._optimizer.state
        others = {param for group in self.members for param in group if param not in self._ddp.param_names}
        for key in [key for key in state if key in others or not isinstance(key, torch.Tensor)]:
            del state[key]
        for key, values in whole.values.items():
            if key in others or not isinstance(key, torch.Tensor):
                state[key] = copy.deepcopy(values)  # torch would hold the caller's own tensors
        self._main_values = {param: main.clone() for param, main in whole.main_values.items() if param in others}

    def add_param_group(self, group: dict[str, object]) -> None:
        """Add parameters that get shards when the optimizer is sharded next.

        Raises:
            OptimizerParametersError: one of them is in a group already.
        """
        self._members.add_group(group)

    def refuse_shards_of(self, held: torch.optim.Optimizer, method: str) -> None:
        """Refuse to speak of shards as if they were parameters.

        Raises:
            CheckpointUnavailableError: the optimizer is the one that holds them.
        """
        if held is self._optimizer and self._buffers:
            communicator = self._ddp.communicator
            num_shards = communicator.size if self._is_sharded else 1
            raise CheckpointUnavailableError(
                optimizer=type(held).__name__, method=method, rank=communicator.rank, num_shards=num_shards
            )

    def check_is_current(self) -> None:
        """Refuse to go on with shards that are not the whole of what is trained.

        Raises:
            PhaseError: the wrapper was rebuilt without this optimizer, or has to be before the next step.
        """
        if self._ddp.param_and_grad_buffers is not self._buffers:
            raise PhaseError(
                "the wrapper was rebuilt, but this optimizer was not: a DistributedOptimizer that was built after it has taken "
                "its place, and what it steps on is no longer part of the module. Use the later one."
            )
        waiting = self._members.waiting()
        if waiting:
            names = {param: name for name, param in self._ddp.module.named_parameters()}
            shown = [names.get(param, f"one of shape {tuple(param.shape)}, not in the module") for param in waiting]
            error = PhaseError(
                f"trainable parameters were added to the optimizer and have no shard yet: {name_list(shown)}. Their gradients "
                "are not reduced, so they would be updated differently on every rank. Call ddp.rebuild() on every rank."
            )
            self._ddp.sync.fail("optimizer.step()", error)  # ranks that added none are waiting
            raise error

    def check_grads_are_withheld(self) -> None:
        """Refuse to go on as if nothing had happened when somebody has meant to change the gradients of the shards.

        Raises:
            PhaseError: the gradient of a shard was cleared or replaced since the last step.
        """
        touched = [shard for shard in self.shards if not shard.is_grad_withheld]
        if not touched:
            return
        for shard in touched:
            shard.withhold_grad()
        error = PhaseError(
            f"the gradient of a flat shard ({name_list(touched[0].run.params)}) was cleared or replaced between two steps, to "
            "no effect: a DistributedOptimizer steps on what the gradient sync has left in the buffers. If it was zero_grad() "
            "of the torch optimizer in it, call that of the DistributedOptimizer instead; set gradients of the model's "
            "parameters, before the sync, rather than those of shards."
        )
        self._ddp.sync.fail("optimizer.step()", error)  # ranks where nobody did so are waiting
        raise error


def _checksums(whole: WholeState, names: Mapping[torch.nn.Parameter, str]) -> list[Entry]:
    """Return a checksum of all values per element of each parameter, which ranks compare."""
    return [
        (f"checksum of the state of {name!r}:", *(checksum(value) for value in _tensors_of(whole, param)))
        for param, name in names.items()
    ]


def _tensors_of(whole: WholeState, param: torch.nn.Parameter) -> list[torch.Tensor]:
    held = [*(whole.values.get(param) or {}).values(), whole.main_values.get(param)]
    return [value for value in held if isinstance(value, torch.Tensor) and value.numel()]


def _refuse_shards(sharding: Sharding | None, held: torch.optim.Optimizer, method: str) -> None:
    """Refuse to let flat shards pass for the state of a model. A shell that holds whole parameters shares the hook."""
    if sharding is not None:
        sharding.refuse_shards_of(held, method)


def _refuse_withheld_grads(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step that ``DistributedOptimizer.step()`` has not asked for.

    Before it begins: an optimizer that fails on a gradient may have decayed weights or counted a step by then.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if isinstance(param.grad, WithheldGrad):
            param.grad.refuse(f"{type(optimizer).__name__}.step()")
