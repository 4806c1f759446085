"""``DistributedOptimizer``: any elementwise torch optimizer on this rank's flat float32 shards (ZeRO-1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from megabucket.buffer import GradPhase
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.step_report import Failure
from megabucket.errors import (
    CheckpointUnavailableError,
    ConfigError,
    OptimizerParametersError,
    PhaseError,
    UnreducedGradientsError,
    name_list,
)
from megabucket.optim.adopt import adopt_state
from megabucket.optim.norm import GlobalNorm, clip_by_norm
from megabucket.optim.shards import MainShard, plan_runs

_NEEDS_WHOLE_TENSORS: Final = frozenset(
    {"adafactor", "lbfgs", "muon", "shampoo", "lamb", "fusedlamb", "lars", "sparseadam"}  # names in lower case
)
"""Optimizers whose update of one element depends on others of the same tensor; a flat shard would change the result."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. All ranks agree on ``updated`` and ``grad_norm``."""

    updated: bool
    """Whether parameters were changed."""
    grad_norm: float
    """Global L2 norm of the reduced gradients, before clipping."""
    reason: str
    """Why parameters were not changed, with the parameters at fault on this rank; empty when they were."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Step on this rank's shards and gather the result.

    The given optimizer keeps its hyperparameters, its groups and its class; only the tensors in ``group["params"]`` are
    exchanged, in place, for flat float32 shards. Schedulers built on either optimizer, before or after, keep working.

    With ``use_distributed_optimizer=False`` the shard is everything: each rank steps on all parameters, which adds float32 main
    parameters for 16-bit models, clipping and the step result to a plain optimizer.

    Args:
        torch_optimizer: over the parameters of the wrapped module (all trainable ones, each once). State it has already, from
            steps or from a checkpoint of plain torch, moves along.
        ddp: the wrapped module.
        clip_grad: clip gradients to this global L2 norm; 0 switches clipping off.

    Raises:
        OptimizerParametersError: the optimizer's parameters are not the wrapper's, or its state does not fit into shards.
        ConfigError: ``clip_grad`` is negative or not finite, or the optimizer cannot work on flat shards.
    """

    def __init__(self, torch_optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel, *, clip_grad: float = 0.0) -> None:
        # No super().__init__(): this object forwards to torch_optimizer, which owns groups, state and defaults.
        if isinstance(clip_grad, bool) or not math.isfinite(clip_grad) or clip_grad < 0:
            raise ConfigError(f"clip_grad must be a finite number >= 0 (0 switches clipping off), got {clip_grad!r}")
        self.torch_optimizer = torch_optimizer
        self.ddp = ddp
        self.clip_grad = float(clip_grad)
        self._is_sharded = ddp.ddp_config.use_distributed_optimizer
        self._shards = self._exchange_params()
        device = ddp.param_and_grad_buffers[0].grad_data.device
        self._global_norm = GlobalNorm(ddp.communicator, device=device, is_sharded=self._is_sharded)
        # Weights loaded after this point reach the main parameters at the next step.
        self._num_value_changes = ddp.num_value_changes

    def _exchange_params(self) -> list[MainShard]:
        """Put shards in place of the parameters, group by group."""
        group_of = _groups_by_name(self.torch_optimizer, self.ddp)
        rank = self.ddp.communicator.rank
        state, adopted = self.torch_optimizer.state, {}
        shards = []
        for buffer in self.ddp.param_and_grad_buffers:
            for run in plan_runs(buffer.layout, group_of, rank=rank, is_sharded=self._is_sharded):
                shard = MainShard(run, buffer)
                shards.append(shard)
                adopted[shard.main] = adopt_state(shard, buffer.layout, buffer.params, state)
        state.clear()
        state.update({main: values for main, values in adopted.items() if values})
        for index, group in enumerate(self.torch_optimizer.param_groups):
            group["params"][:] = [shard.main for shard in shards if shard.run.group == index]
        return shards

    # The optimizer that does the arithmetic shows through #

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the torch optimizer, holding shards; hyperparameters may be read and written."""
        return self.torch_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the torch optimizer, by shard."""
        return self.torch_optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the torch optimizer."""
        return self.torch_optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        """Forward what ``torch.optim.Optimizer`` would have set up in its constructor (hooks and the like)."""
        if name in ("torch_optimizer", "ddp"):
            raise AttributeError(name)
        return getattr(self.torch_optimizer, name)

    def __repr__(self) -> str:
        kind = "shards" if self._is_sharded else "whole buffers"
        return f"DistributedOptimizer on {kind} ({len(self._shards)} flat tensors on this rank) of\n{self.torch_optimizer!r}"

    # A step #

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Finish the gradient sync, clip, update the shards and gather the parameters.

        Nothing is updated on any rank when the gradient norm is not finite; the result says why.

        Raises:
            ConfigError: a closure was given; it could not know which backward is the last of the step.
            UnreducedGradientsError: no backward outside ``no_sync`` has run in this step.
            MegabucketError: the step is not whole on some rank; all ranks raise the same error and none updates.
            PhaseError: a gradient was cleared after the all-reduce, or an error about the gradients was caught before.
        """
        if closure is not None:
            raise ConfigError("DistributedOptimizer.step() takes no closure; run forward and backward before calling it")
        sync = self.ddp.sync
        self._check_backward_has_run()
        sync.commit()
        if sync.skip_reason:
            return StepResult(updated=False, grad_norm=math.nan, reason=sync.skip_reason)
        if not self._is_sharded:
            self._take_published_grads()
        for shard in self._shards:
            shard.load_grad()
        grads = [shard.grad for shard in self._shards]
        norm = self._global_norm.of(grads)
        if not math.isfinite(norm):
            return StepResult(updated=False, grad_norm=norm, reason=self._describe_nonfinite(norm))
        self._update(grads, norm)
        return StepResult(updated=True, grad_norm=norm, reason="")

    def _update(self, grads: list[torch.Tensor], norm: float) -> None:
        """Step on the shards and gather what came out."""
        if self.clip_grad > 0:
            clip_by_norm(grads, norm=norm, max_norm=self.clip_grad)
        self.ddp.finish_param_sync()  # a bucket that no forward waited for may still be on its way into the buffer
        if self._num_value_changes != self.ddp.num_value_changes:
            self.reload_main_params()
        try:
            self.torch_optimizer.step()
        except BaseException as error:
            self.ddp.sync.tally.failure = Failure("optimizer", f"{type(error).__name__}: {error}")  # told at the next fence
            raise
        finally:  # the others gather, whatever happened here
            for shard in self._shards:
                shard.store_values()
            if self._is_sharded:
                for group in self.ddp.bucket_groups:
                    group.mark_params_stale()
                self.ddp.start_param_sync()
        self.ddp.sync.note_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients of the wrapped module; see ``DistributedDataParallel.zero_grad``."""
        self.ddp.zero_grad(set_to_none=set_to_none)

    def reload_main_params(self) -> None:
        """Take parameter values over from the model, after weights were written by other means than the optimizer.

        ``load_state_dict`` on the module needs no call: it is noticed.
        """
        for shard in self._shards:
            shard.reload_values()
        self._num_value_changes = self.ddp.num_value_changes

    def _check_backward_has_run(self) -> None:
        sync = self.ddp.sync
        sync.check_not_failed()
        if sync.is_finished:
            return
        in_flight = any(group.grad_phase is GradPhase.IN_FLIGHT for group in self.ddp.bucket_groups)
        has_run = sync.awaits_finish or in_flight
        if self.ddp.ddp_config.finish == "explicit" or not has_run:
            error = UnreducedGradientsError(rank=self.ddp.communicator.rank)
            if not has_run:
                sync.fail("optimizer.step()", error)  # ranks that did run their last backward are waiting
            raise error

    def _take_published_grads(self) -> None:
        """Let what the caller did to ``param.grad`` after the sync count, as it would with a plain optimizer.

        Raises:
            PhaseError: a gradient was cleared; a flat shard cannot leave single parameters out of a step.
        """
        for slot in (slot for group in self.ddp.bucket_groups for slot in group.slots):
            grad = slot.param.grad
            if grad is slot.view:
                continue
            if grad is None:
                raise PhaseError(
                    f"the gradient of {slot.name!r} was cleared between the gradient sync and step(). A DistributedOptimizer "
                    "steps on flat shards and cannot leave single parameters out. Zero the gradient in place, or use a plain "
                    "torch optimizer, which skips parameters without a gradient."
                )
            slot.view.copy_(grad)
            slot.publish()

    def _describe_nonfinite(self, norm: float) -> str:
        names: list[str] = []
        for buffer in self.ddp.param_and_grad_buffers:
            for shard in self._shards:
                if shard.run.params[0] in buffer.layout.params:
                    names += shard.params_with_nonfinite_grad(buffer.layout)
        if names:
            culprit = f"not finite in this rank's shard of {name_list(names)}"
        elif self._is_sharded and self.ddp.communicator.size > 1:
            culprit = "not finite on another rank"
        else:
            culprit = "every gradient is finite, but the sum of their squares is not"
        return f"the gradient norm is {norm}: {culprit}"

    # State #

    def state_dict(self) -> dict[str, Any]:
        """Refuse: one rank's shards are not the optimizer's state.

        Raises:
            CheckpointUnavailableError: always in this version.
        """
        raise self._no_checkpoint()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002 - the signature is torch's
        """Refuse, for the same reason as ``state_dict``.

        Raises:
            CheckpointUnavailableError: always in this version.
        """
        raise self._no_checkpoint()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the shards are cut for the groups that were there at construction.

        Raises:
            OptimizerParametersError: always.
        """
        raise OptimizerParametersError(
            problem="parameters cannot be added to a DistributedOptimizer",
            params=[f"a group of {len(list(param_group.get('params', ())))}"],
            remedy="Add the group to the torch optimizer before wrapping it.",
        )

    def _no_checkpoint(self) -> CheckpointUnavailableError:
        communicator = self.ddp.communicator
        return CheckpointUnavailableError(rank=communicator.rank, num_shards=communicator.size if self._is_sharded else 1)


def _groups_by_name(optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel) -> dict[str, int]:
    """Return the group of each parameter of the wrapper, or say what does not fit."""
    _check_optimizer(optimizer)
    group_of: dict[str, int] = {}
    foreign, twice = [], []
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            name = ddp.param_names.get(param)
            if name in group_of:
                twice.append(name)
            elif name is not None:
                group_of[name] = index
            elif param.requires_grad:
                foreign.append(f"group {index}, parameter {position}, shape {tuple(param.shape)}")
    if foreign:
        raise OptimizerParametersError(
            problem="the optimizer has parameters that the wrapper does not hold, so their gradients are never reduced",
            params=foreign,
            remedy="Build the optimizer over the parameters of the wrapped module, after wrapping it.",
        )
    if twice:
        raise OptimizerParametersError(
            problem="the optimizer has the same parameter twice", params=twice, remedy="Put each parameter into one group."
        )
    left_out = [name for name in ddp.param_names.values() if name not in group_of]
    if left_out:
        raise OptimizerParametersError(
            problem="trainable parameters of the wrapper are in no group of the optimizer and would never be updated",
            params=left_out,
            remedy="Add them to a group, or freeze them with requires_grad_(False) before wrapping.",
        )
    return group_of


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if any(base.__name__.lower() in _NEEDS_WHOLE_TENSORS for base in type(optimizer).__mro__):
        raise ConfigError(
            f"{kind} uses the shape of whole parameters, and a DistributedOptimizer steps on flat shards cut across them, so "
            "the result would be silently different. Use an elementwise optimizer (Adam, AdamW, SGD, Lion, ...), or "
            f"{kind} as a plain optimizer with use_distributed_optimizer=False."
        )
