"""``ChainedOptimizer``: optimizers of several wrapped modules that update together or not at all, under one norm.

The parts of a virtual pipeline stage are modules with a wrapper each. A step agrees on all wrappers, then takes one norm, clips
by one factor, updates and gathers::

    agree on each wrapper -> one norm -> clip -> update each and gather

If the step of one wrapper is dropped, those of all others are dropped as well. The class has Megatron's name.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch

from megabucket.ddp.optimizer_guard import SteppingForWrapper
from megabucket.ddp.replicas import broadcast_replica
from megabucket.ddp.report import Entry
from megabucket.ddp.step import UPDATING, GradSync, all_or_none
from megabucket.ddp.wrap import partial_entries
from megabucket.errors import ConfigError
from megabucket.optim.distributed_optimizer import NO_COPIES, DistributedOptimizer, StepResult
from megabucket.optim.norm import check_norm_settings


class ChainedOptimizer(SteppingForWrapper):
    """Steps several ``DistributedOptimizer`` together.

    An optimizer with a ``clip_grad`` of its own is clipped by its own norm and left out of the common norm.

    Args:
        optimizers: of different wrappers, in the same order on all ranks. All wrappers have the same ranks and mode, and a
            fence. The optimizers have one ``norm_type``; with a norm above the ``grad_norm_skip_threshold`` of one of them,
            no rank updates anything.
        clip_grad: clip gradients to this global norm, over all of them; 0 switches clipping off. May be changed between steps.

    A collective call: every rank constructs one at the same time.

    Raises:
        ConfigError: the optimizers do not go together, or an argument is out of range.
        LayoutMismatchError: arguments differ between ranks.
        PeerFailedError: another rank could not make its own.
    """

    _step_supports_amp_scaling = False
    __reduce_ex__ = NO_COPIES

    def __init__(self, optimizers: Iterable[DistributedOptimizer], *, clip_grad: float = 0.0) -> None:
        # No super().__init__(): groups, state and hooks are those of the members.
        self.optimizers = tuple(optimizers)
        self.clip_grad = 0.0
        self.last_step: StepResult | None = None
        """The result of the last finished call of ``step``, also if a loss scaler has skipped the call."""
        self.answered: weakref.ref[torch.Tensor] | None = None
        """See ``DistributedOptimizer``."""
        if not self.optimizers:
            raise ConfigError("a ChainedOptimizer needs at least one DistributedOptimizer")
        with self.optimizers[0].ddp.sync.call("ChainedOptimizer()") as call:
            check_norm_settings(clip_grad, 2.0, math.inf)
            self.clip_grad = float(clip_grad)
            self._check_members()
            call.entries = [(f"{len(self.optimizers)} optimizers,", "clip_grad", self.clip_grad)]
            call.by_group = self._entries_across()
            call.open()
            self._broadcast_across()
        for optimizer in self.optimizers:
            optimizer.scaled_with = self

    def _entries_across(self) -> dict[str, list[Entry]]:
        """Return entries of the parameters that have copies in other wrappers, which must be equal on their ranks."""
        found: dict[str, list[Entry]] = {}
        for ddp in (optimizer.ddp for optimizer in self.optimizers):
            params = dict(ddp.module.named_parameters())
            for key, entries in partial_entries(params, ddp.identities, ddp.layout, ddp.ranks, ddp.ranks.copies_across).items():
                found[key] = sorted([*found.get(key, ()), *entries], key=str)
        return found

    @torch.no_grad()
    def _broadcast_across(self) -> None:
        """Make tied weights in different wrappers equal, as wrapping does with those of one."""
        wrappers = [optimizer.ddp for optimizer in self.optimizers if optimizer.ddp.ddp_config.init_sync]
        for along in self.optimizers[0].ddp.ranks.copies_across if wrappers else ():
            tied = {
                (ddp.identities[name].global_name, ddp.identities[name].offset): (param, ddp)
                for ddp in wrappers
                for name, param in ddp.module.named_parameters()
                if along in ddp.identities[name].partial
            }
            for _, (param, ddp) in sorted(tied.items()):
                broadcast_replica(param, self.optimizers[0].ddp.ranks.copies_across[along])
                ddp.note_written()

    def _check_members(self) -> None:
        """Refuse optimizers that cannot agree on one step, or on one norm."""
        wrappers = [optimizer.ddp for optimizer in self.optimizers]
        if len(set(wrappers)) < len(wrappers):
            raise ConfigError("two optimizers of a ChainedOptimizer have the same wrapper, which has one update in a step")
        if not all(ddp.policy.has_fence for ddp in wrappers):
            raise ConfigError("ChainedOptimizer needs fence=True: without it a rank cannot report the failure of a part")
        for what, values in (
            ("use_distributed_optimizer", [ddp.policy.is_sharded for ddp in wrappers]),
            ("ranks that agree on steps", [tuple(ddp.ranks.step.members) for ddp in wrappers]),
            ("norm_group", [None if ddp.ranks.norm is None else tuple(ddp.ranks.norm.members) for ddp in wrappers]),
            ("reduction_order", [ddp.ddp_config.reduction_order for ddp in wrappers]),
            ("norm_type", [optimizer.global_norm.norm_type for optimizer in self.optimizers]),
        ):
            if len(set(values)) > 1:
                raise ConfigError(f"the optimizers of a ChainedOptimizer differ in {what}: {values}; they step as one")
        for optimizer in self.optimizers:
            optimizer.sharding.check_norm(is_wanted=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, for schedulers."""
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers))

    @property
    def is_unscaled(self) -> bool:
        """Whether a loss scaler has unscaled the gradients of this step."""
        return all(optimizer.is_unscaled for optimizer in self.optimizers)

    @property
    def _syncs(self) -> list[GradSync]:
        return [optimizer.ddp.sync for optimizer in self.optimizers]

    # A step #

    @torch.inference_mode(False)  # the first step makes state
    @torch.no_grad()
    def step(self) -> StepResult:  # type: ignore[override]
        """Finish all gradient syncs, take one norm, clip, update and gather; or update nothing on any rank.

        Raises:
            MegabucketError: the step of one wrapper is not whole on some rank. No rank updates anything. All raise the same
                error; a rank that could not begin raises its own.
        """
        with all_or_none(self._syncs) as agreed:
            first, *others = self.optimizers
            first.ddp.sync.settle(raises_again=True)  # with the cause, wherever on this rank it was
            first.prepare_step(also=(("clip_grad of all", float(self.clip_grad)),))
            for optimizer in others:
                optimizer.prepare_step()
            for optimizer in self.optimizers:
                optimizer.ddp.sync.finish(is_committing=optimizer.ddp.sync.updates_jointly)
                agreed.append(optimizer.ddp.sync)
        reason = self._find_reason()
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                optimizer.ddp.communicator.progress.enter(optimizer.ddp.sync.step, "optimizer")
                stack.enter_context(optimizer.ddp.sync.failing_on_all_ranks("optimizer.step()", UPDATING))
            self.last_step = self._skip(reason) if reason else self._update()
        return self.last_step

    def _update(self) -> StepResult:
        """Take the norms, which are the same on all ranks, and update everything or nothing."""
        optimizers = self.optimizers
        for optimizer in optimizers:
            optimizer.send_to_owners()
        norms_of = [optimizer.norms_of() for optimizer in optimizers]
        together = [index for index, optimizer in enumerate(optimizers) if not optimizer.clip_grad]
        common = math.nan
        if together:
            over_ranks = optimizers[together[0]].global_norm
            common = over_ranks.of(chain.from_iterable(norms_of[index] for index in together))
        norms = [
            common if index in together else optimizer.global_norm.of(norms_of[index])
            for index, optimizer in enumerate(optimizers)
        ]
        if failed := [index for index, norm in enumerate(norms) if not norm <= optimizers[index].largest_norm]:
            # Several may share the norm: name one with a bad gradient on this rank, if there is one.
            at_fault = [index for index in failed if not all(bool(norm.isfinite().all()) for norm in norms_of[index])]
            index = (at_fault or failed)[0]
            return self._skip(f"optimizer {index}: {optimizers[index].why_not(norms[index])}", norm=common)
        for optimizer, norm in zip(optimizers, norms, strict=True):
            optimizer.update(norm, max_norm=optimizer.clip_grad or self.clip_grad)
        zeros = [optimizer.last_step.num_zeros for optimizer in optimizers if optimizer.last_step is not None]
        num_zeros = None if None in zeros else sum(count for count in zeros if count is not None)
        return StepResult(updated=True, grad_norm=common, reason="", num_zeros=num_zeros)

    def _find_reason(self) -> str:
        """Return why some wrapper's step is skipped, the same on all ranks; empty if none is."""
        found = [(index, optimizer.ddp.sync.skip_reason) for index, optimizer in enumerate(self.optimizers)]
        return "; ".join(f"optimizer {index}: {reason}" for index, reason in found if reason)

    def _skip(self, reason: str, *, norm: float = math.nan) -> StepResult:
        for optimizer in self.optimizers:
            optimizer.ddp.sync.skip_update(reason)
            optimizer.skip(reason, norm=norm)
        return StepResult(updated=False, grad_norm=norm, reason=reason)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all wrappers."""
        with all_or_none(self._syncs):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def unscale_grads(self, inv_scale: float | torch.Tensor, *, in_buffer: bool = False) -> bool:
        """Finish all gradient syncs and multiply the gradients; return whether the step is skipped: of all wrappers, or none.

        As ``DistributedOptimizer.unscale_grads``, for the same loss scalers.
        """
        self.answered = None
        with all_or_none(self._syncs) as agreed:
            for optimizer in self.optimizers:
                optimizer.unscale_grads(inv_scale, in_buffer=in_buffer)
                agreed.append(optimizer.ddp.sync)
        if reason := self._find_reason():
            self.last_step = self._skip(reason)
        return bool(reason)

    # State #

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of each optimizer, under ``"optimizers"``. A collective call."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of ``state_dict``. A collective call.

        Raises:
            ConfigError: it is the state of another number of optimizers.
            MegabucketError: as ``DistributedOptimizer.load_state_dict``.
        """
        states = state_dict["optimizers"]
        if len(states) != len(self.optimizers):
            raise ConfigError(f"the state is of {len(states)} optimizers, but there are {len(self.optimizers)}")
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - torch's argument
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a ChainedOptimizer has no groups of its own: add the group to the optimizer of the module")
