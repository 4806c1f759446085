"""Changes over between whole parameters and flat shards in the groups and the state of a torch optimizer.

Wrapping an optimizer shards it; a rebuild takes that back, and shards it anew for the buffers that the wrapper has then. In
between the torch optimizer is a plain one over whole parameters, so whatever fails there loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megabucket.buffer import ParamAndGradBuffer, WithheldGrad
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.agreement import Entry, agree
from megabucket.ddp.hyperparameters import read_hyperparameters, texts_of
from megabucket.errors import InvariantError, PhaseError, name_list
from megabucket.layout.runs import plan_runs
from megabucket.optim.adopt import ShardState, StateCutter
from megabucket.optim.groups import GroupMembers, check_elementwise
from megabucket.optim.norm import check_clip_grad
from megabucket.optim.shards import MainShard
from megabucket.optim.unshard import ShardHolder, unshard
from megabucket.optim.whole_state import KNOWN_NUMBERS, WholeState


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
        self.shards: list[MainShard] = []
        """Of this rank, in buffer order; none while the optimizer holds whole parameters."""

    def _cut(self) -> _Cut:
        """Cut parameters and state for the buffers as they are now. Changes nothing."""
        ddp = self._ddp
        group_of = self._members.by_name(ddp.param_names, set(ddp.module.parameters()))
        params = {name: param for param, name in ddp.param_names.items()}
        whole = WholeState(self._optimizer.state, self._main_values, self._dtypes, self._numbers)
        cutter = StateCutter(whole, params)
        signature_of = {name: cutter.signature(name) for name in params}
        rank, is_sharded = ddp.communicator.rank, self._is_sharded
        shards = [
            MainShard(run, buffer)
            for buffer in ddp.param_and_grad_buffers
            for run in plan_runs(buffer.layout, group_of, rank=rank, is_sharded=is_sharded, signature_of=signature_of)
        ]
        for shard in shards:
            cutter.restore_main_values(shard)
        state = {shard.main: cutter.state_of(shard) for shard in shards}
        return _Cut(shards, state, [(name, f"in group {group_of[name]}", *signature_of[name]) for name in params])

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
        state.update(found.values)
        self._main_values |= found.main_values
        self._dtypes |= found.dtypes
        self._numbers = found.numbers
        self._members.restore()
        self.shards, self._buffers = [], []

    def shard(self, *, clip_grad: float, label: str) -> None:
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
            cut = self._cut()
            entries = [*cut.entries, (type(self._optimizer).__name__,), (f"clip_grad={float(clip_grad)}",)]
            entries += [(text,) for text in texts_of([numbers])]
        except Exception as error:
            failure = error
        device = self._ddp.param_and_grad_buffers[0].grad_data.device
        agree(self._ddp.communicator, entries, failure=failure, device=device, label=label)
        if cut is None:
            raise InvariantError("agree() has not raised the failure")
        self._take(cut)

    def add_param_group(self, group: dict[str, object]) -> None:
        """Add parameters that get shards when the optimizer is sharded next.

        Raises:
            OptimizerParametersError: one of them is in a group already.
        """
        self._members.add_group(group)

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


def _refuse_withheld_grads(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step that ``DistributedOptimizer.step()`` has not asked for.

    Before it begins: an optimizer that fails on a gradient may have decayed weights or counted a step by then.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if isinstance(param.grad, WithheldGrad):
            param.grad.refuse(f"{type(optimizer).__name__}.step()")
