"""``DistributedOptimizer``: a torch optimizer over whole parameters that updates this rank's part of them (ZeRO-1)."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, Final, Literal, NoReturn, Protocol, TypeVar, overload

import torch

from megabucket.buffer import CHECK_AND_UNSCALE
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.backward import refuse_in_backward
from megabucket.ddp.offload import Memory
from megabucket.ddp.optimizer_guard import SteppingForWrapper, check_learning_rates, only_makes_state
from megabucket.ddp.report import Hyperparameters, read_hyperparameters
from megabucket.ddp.step import AGREED, REPORTED, UPDATING, StepState
from megabucket.errors import ConfigError, PhaseError, UnreducedGradientsError, name_list, refuse_copies
from megabucket.optim.kernels import find_kernels
from megabucket.optim.norm import ExactNorm, GlobalNorm, check_norm_settings, clip_by_norm
from megabucket.optim.sharding import Sharding
from megabucket.optim.shards import GradShard
from megabucket.optim.state_dict import join, pack

_Loss = TypeVar("_Loss")
_grad: Final = attrgetter("grad")
_shards: Final = attrgetter("shards")
_load_grad: Final = methodcaller("load_grad")
_LOSS_SCALE: Final = "loss scale"
_SWITCHES: Final = ("train", "eval")
"""Methods of schedule-free optimizers that write to the weights."""
NO_COPIES: Final = refuse_copies(
    "a {} cannot be copied or pickled: it steps on flat shards in the buffers of a wrapper, and a copy would update no module. "
    "Save state_dict(), called on every rank, and load it with load_state_dict(); or call save_checkpoint(). Of what holds it, "
    "such as a learning rate scheduler, save its own state_dict()."
)
"""``__reduce_ex__`` of optimizers. Torch would make a copy without the constructor and patch ``step`` of the class."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step. ``updated`` and ``grad_norm`` are equal on all ranks."""

    updated: bool
    """Whether parameters were changed."""
    grad_norm: float
    """Global norm of the reduced gradients before ``clip_grad`` clips them; nan if it was not computed."""
    reason: str
    """Why parameters were not changed, with the parameters at fault on this rank; empty if they were."""
    num_zeros: int | None = None
    """Zeros in the whole gradient, each counted once; ``None`` if they were not counted."""


class Unscaling(Protocol):
    """An optimizer that handles the calls of loss scalers."""

    answered: weakref.ref[torch.Tensor] | None

    def unscale_grads(self, inv_scale: float | torch.Tensor, *, in_buffer: bool = False) -> bool:
        """Finish the gradient sync and multiply the gradients; return whether all ranks skip the step."""


class DistributedOptimizer(SteppingForWrapper):
    """Step on this rank's shards and gather the result.

    It is a torch optimizer with the groups of the given one: the same dicts, with the parameters of the module. Schedulers,
    hooks and ``add_param_group`` work on either, and ``state`` is by parameter. The given optimizer is not changed; a twin of
    it, of the same class and with the same hyperparameters, steps on flat float32 shards.

    With ``use_distributed_optimizer=False`` each rank steps on all parameters. This adds float32 main parameters for 16-bit
    models, clipping and the step result to a plain optimizer.

    An optimizer whose update of an element depends on others (Muon, Adafactor, Shampoo, ...) steps on whole parameters. With
    shards each of them has an owner among the ranks, to which the pieces of its gradient travel, and from which its new
    values come back. ``optimizer.update_kind`` (``"elementwise"`` or ``"tensor"``) says which; without it a trial finds out.

    Args:
        torch_optimizer: over all trainable parameters of the wrapped module, each once; or several that together are. Their
            state, from steps or a checkpoint of plain torch, moves here.
        ddp: the wrapped module.
        clip_grad: clip gradients to this global norm; 0 switches clipping off.
        norm_type: p of the p-norm, at least 1; infinite for the largest magnitude, which is infinite if a gradient is nan.
        grad_norm_skip_threshold: no rank updates if the norm is above it.
        returns_num_zeros: whether to count zeros in the gradients. Costs a pass over them and a small collective per step.
        returns_grad_norm: whether to compute the norm in each step. ``False`` computes it only to clip, and to find non-finite
            gradients if the gradient sync does not (``nonfinite_gradients="allow"``, ``fence=False``, reduce-scattered
            float16). It saves a pass over the gradients and, with shards, a small collective before each update.
        kernels: ``"apex"`` takes L2 norms and clips with NVIDIA apex's ``amp_C`` on CUDA devices, in float32: the last bits of
            a norm then depend on how the gradients are cut, and a norm above 1.8e19 is infinite.

    A collective call: ranks compare groups, hyperparameters and state.

    Raises:
        OptimizerParametersError: the optimizer's parameters are not the wrapper's, or its state does not fit into shards.
        ConfigError: an argument is out of range, the kernels are not installed, or the optimizer cannot work on flat shards; or
            a norm is requested and the wrapper does not know which ranks hold the other parts of the model.
        LayoutMismatchError: the optimizer is not the same on all ranks.
        PeerFailedError: another rank has failed.
    """

    # Torch's fused optimizers can unscale gradients in their kernel. Here all ranks agree before any rank steps.
    _step_supports_amp_scaling = False
    __reduce_ex__ = NO_COPIES

    @torch.inference_mode(False)
    def __init__(
        self,
        torch_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        ddp: DistributedDataParallel,
        *,
        clip_grad: float = 0.0,
        norm_type: float = 2.0,
        grad_norm_skip_threshold: float = math.inf,
        returns_grad_norm: bool = True,
        returns_num_zeros: bool = False,
        kernels: Literal["torch", "apex"] = "torch",
    ) -> None:
        given = [torch_optimizer] if isinstance(torch_optimizer, torch.optim.Optimizer) else list(torch_optimizer)
        if any(isinstance(one, SteppingForWrapper) for one in given):
            raise ConfigError("a DistributedOptimizer cannot be inside another one: give the torch optimizer in it")
        if not given or not all(isinstance(one, torch.optim.Optimizer) for one in given):
            kinds = [type(one).__name__ for one in given]
            raise ConfigError(f"a DistributedOptimizer needs a torch optimizer, or several in a list; got {kinds}")
        defaults = given[0].defaults if len(given) == 1 else {}  # groups of several optimizers have none in common
        super().__init__([{"params": []}], defaults)
        self.torch_optimizers = tuple(given)
        """The given optimizers, over whole parameters."""
        self.ddp = ddp
        if len(given) == 1:
            # Hooks of state are called with whole parameters, whichever of the two has them; those of a step by each.
            hooks = {name: own for name, own in vars(given[0]).items() if name.startswith("_optimizer_")}
            vars(self).update({name: own for name, own in hooks.items() if not name.startswith("_optimizer_step_")})
        self._is_sharded = ddp.policy.is_sharded
        self.sharding = Sharding(given, ddp, weakref.WeakMethod(self._answer_scaler))
        """The shards, for checkpoints."""
        self._settings: dict[str, Any] = {
            "clip_grad": clip_grad,
            "norm_type": norm_type,
            "grad_norm_skip_threshold": grad_norm_skip_threshold,
            "returns_grad_norm": bool(returns_grad_norm),
            "returns_num_zeros": bool(returns_num_zeros),
            "kernels": kernels,
        }
        self.sharding.shard(self._settings, label="DistributedOptimizer()")
        self.clip_grad = float(clip_grad)
        self.last_step: StepResult | None = None
        """The result of the last finished call of ``step``, also if a loss scaler has skipped the call."""
        self._changes: tuple[tuple[str, float], ...] = ()  # to the reduced gradients of one step
        self._has_loaded = False  # the gradients of the shards, for such a change
        self._changed_step = -1
        self._done_in_step: tuple[int, frozenset[int]] = (-1, frozenset())  # parts, and the step
        self._skipped_step = -1
        self._unscaled_step, self._skips_unscaled = -1, False  # the last answer to a loss scaler
        self._versions: list[int] = []  # of the 16-bit gradients that were widened for it
        self.answered: weakref.ref[torch.Tensor] | None = None
        """The ``found_inf`` of the last scaler call. The scaler keeps it until its ``update()``."""
        self.scaled_with: Unscaling | None = None
        """The chain that handles scaler calls for this optimizer and others."""
        self._begin_on_shards()
        ddp.follow_rebuilds(self)

    def _begin_on_shards(self) -> None:
        policy, grads = self.ddp.policy, [buffer.grad_data for buffer in self.ddp.param_and_grad_buffers]
        self._has_norm = self.sharding.check_norm(is_wanted=False)
        self._kernels = find_kernels(self._settings["kernels"], grads[0].device)
        self.global_norm = self._norm_of_type(self._settings["norm_type"])
        self.ddp.sync.expect_updates(jointly=self._is_sharded or self.global_norm.is_collective)
        # In these the other ranks go on, so that a failure of this rank breaks the wrapper.
        self._final_states = UPDATING if self.ddp.sync.updates_jointly else REPORTED
        # Sums of float16 may overflow, and nothing else tests them after a reduce-scatter.
        has_untested_sums = self._is_sharded and any(grad.dtype == torch.float16 for grad in grads)
        has_untested_grads = has_untested_sums or not (policy.has_fence and policy.tests_finite)
        threshold = self._settings["grad_norm_skip_threshold"]
        self._computes_norm = self._settings["returns_grad_norm"] or has_untested_grads or threshold < math.inf
        self.largest_norm = min(threshold, sys.float_info.max)  # below any norm that is not finite

    def _norm_of_type(self, norm_type: float) -> GlobalNorm:
        ranks, device = self.ddp.ranks, self.ddp.param_and_grad_buffers[0].grad_data.device
        # Even if no norm is wanted it finds non-finite gradients, on which ranks with other parts of the model must agree.
        is_whole = ranks.norm is None and not self._is_sharded and self._has_norm
        kernel = self._kernels.l2_norm
        kind = ExactNorm if self.ddp.policy.sums_in_rank_order and norm_type != math.inf else GlobalNorm
        return kind(ranks.norm or ranks.step, device=device, is_whole=is_whole, norm_type=norm_type, l2_norm=kernel)

    # Rebuilding #

    def before_rebuild(self) -> None:
        """Become a plain optimizer over whole parameters, with their state and main values. Called by the wrapper.

        Raises:
            OptimizerParametersError: the state of a shard cannot be split by parameter. Nothing was changed.
            PeerFailedError: another rank has failed.
        """
        self.sharding.undo()

    def after_rebuild(self) -> None:
        """Shard again. Called by the wrapper.

        Raises:
            OptimizerParametersError: the groups do not hold the trainable parameters. Nothing was changed.
            LayoutMismatchError: groups or step counts are not the same on all ranks.
            PeerFailedError: another rank has failed.
        """
        self.sharding.shard({**self._settings, "clip_grad": self.clip_grad}, label="rebuild: optimizer")
        self._begin_on_shards()

    def memory(self, *, settles: bool) -> Iterator[Memory]:
        """Return the memory that ``ddp.offload`` may give back. Called by the wrapper."""
        return self.sharding.memory(settles=settles)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that are in no group yet, as the given optimizer does.

        They get shards at the next ``ddp.rebuild()``. Until then ``step`` is refused if one of them is trainable.

        Raises:
            ConfigError: there are several given optimizers: add the group to one of them.
        """
        if getattr(self, "torch_optimizers", None) is not None:  # not yet in torch's constructor
            self.torch_optimizer.add_param_group(param_group)

    # As a torch optimizer #

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the given optimizers, with the parameters of the module."""
        return self.sharding.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if getattr(self, "torch_optimizers", None) is not None:  # torch's constructor sets an empty list before there is one
            self.torch_optimizer.param_groups = groups

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The given optimizer.

        Raises:
            ConfigError: there are several.
        """
        if len(self.torch_optimizers) > 1:
            kinds = name_list([type(one).__name__ for one in self.torch_optimizers])
            raise ConfigError(f"this DistributedOptimizer has several torch optimizers ({kinds}): use torch_optimizers")
        return self.torch_optimizers[0]

    @property
    def state(self) -> Any:
        """The state of this rank by parameter, a ``ParamState``. ``state_dict()`` has it whole."""
        return self.sharding.state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        if getattr(self, "sharding", None) is not None:  # torch's constructor sets an empty one before there are shards
            values = dict(values)  # it may be the same object
            self.sharding.state.clear()
            self.sharding.state.update(values)

    def __getattr__(self, name: str) -> Any:
        """Return attributes that only a given optimizer has, such as ``train`` and ``eval`` of schedule-free ones."""
        if name in ("torch_optimizers", "sharding"):
            raise AttributeError(name)
        having = [one for one in self.torch_optimizers if getattr(one, name, None) is not None]
        found = getattr((having or self.torch_optimizers)[0], name)
        return partial(self._switch_weights, name) if name in _SWITCHES else found

    @torch.inference_mode(False)
    @torch.no_grad()
    def _switch_weights(self, name: str) -> None:
        """Switch schedule-free optimizers between weights for training and evaluation. A collective call.

        Raises:
            PhaseError: a step is open, or the optimizer is not the current one.
            PeerFailedError: another rank has failed.
        """
        of_mode = [one for one in self.torch_optimizers if getattr(one, name, None) is not None]
        if all(group.get("train_mode") is (name == "train") for one in of_mode for group in one.param_groups):
            return  # frameworks call this before each forward
        with self.ddp.sync.call(f"{name}()") as call:
            self.sharding.settle(f"{name}()")
            call.open()
            self.sharding.switch(name)
            self.sharding.store_values()
            if self.sharding.exchange is not None:
                self.sharding.exchange.return_values()
            for group in self.ddp.sync.groups if self._is_sharded else ():
                group.mark_params_stale()
            self.ddp.start_param_sync()

    def __repr__(self) -> str:
        kind, sharding = "shards" if self._is_sharded else "whole buffers", self.sharding
        num_whole = len(sharding.whole_shards)
        whole = f" and {num_whole} whole parameters" if num_whole else ""
        inner = "\n".join(map(repr, self.torch_optimizers))
        return (
            f"DistributedOptimizer on {kind} ({len(sharding.shards) - num_whole} flat tensors{whole} on this rank) of\n{inner}"
        )

    @cached_property
    def parts(self) -> tuple[OptimizerPart, ...]:
        """The given optimizers, each to be stepped by itself: for a GAN, and for frameworks that step them one by one."""
        return tuple(OptimizerPart(self, index) for index in range(len(self.torch_optimizers)))

    # A step #

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> StepResult: ...

    @overload
    def step(self, closure: Callable[[], _Loss]) -> _Loss: ...

    @torch.inference_mode(False)  # the first step makes state
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the gradient sync, clip, update the shards and gather the parameters.

        No rank updates if the gradient norm is computed and not finite, or too large; the result says why.

        Args:
            closure: called once, with gradients enabled, before anything else; may run the last backward of the step.

        Returns:
            The closure's result, or without a closure the result of the step, which is also in ``last_step``.

        Raises:
            UnreducedGradientsError: no backward outside ``no_sync`` has run in this step.
            MegabucketError: the step is not whole on some rank; all ranks raise the same error and none updates.
            PhaseError: a gradient was cleared after the all-reduce, or an error about the gradients was caught before.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        is_early = self.ddp.sync.state in (StepState.IDLE, StepState.OPEN)
        if is_early and only_makes_state(self.param_groups, self.ddp.param_names):
            self.sharding.make_state()
            return None
        if self._done_in_step[1] and self._parts_done:
            self._refuse_second_step(
                "step() of a DistributedOptimizer was called after one of its parts has stepped on the same gradients, and "
                "would step again. Step the other parts, or run backward and zero_grad() before."
            )
        self._step()
        return self.last_step if closure is None else value

    def _step(self, part: int | None = None) -> None:
        """Step without a closure and without torch's hooks.

        Args:
            part: index of the given optimizer that steps; ``None``: all.
        """
        sync = self.ddp.sync
        self.prepare_step(() if part is None else (("optimizer that steps alone", float(part)),))
        needs_norm = self._computes_norm or self.clip_grad > 0
        measures_early = needs_norm and self._is_sharded and not self._changes and part is None
        norms: list[torch.Tensor] = []
        # Where an update needs collectives, the other ranks go on after the agreement, even if this rank fails.
        with sync.failing_on_all_ranks("optimizer.step()", self._final_states):
            for group in sync.agree(is_committing=sync.updates_jointly):
                if measures_early:  # while other buckets are in flight
                    norms += map(self.global_norm.of_grad, self.sharding.counted_grads[group.index])
            self.ddp.communicator.progress.enter(sync.step, "optimizer")
            if sync.skip_reason:
                self.skip(sync.skip_reason)
            else:
                with sync.failing_on_all_ranks("optimizer.step()", UPDATING):
                    if self.sharding.exchange is not None:
                        self.send_to_owners(part)
                    norm = self.global_norm.of(norms if measures_early else self.norms_of(part)) if needs_norm else math.nan
                    if needs_norm and not norm <= self.largest_norm:
                        self.skip(self.why_not(norm), norm=norm)
                    else:
                        self.update(norm, max_norm=self.clip_grad, part=part)

    @property
    def _has_changed_grads(self) -> bool:
        """Whether the gradients of this step were unscaled or clipped by hand."""
        sync = self.ddp.sync
        return bool(self._changes) and sync.is_reduced and self._changed_step == sync.step

    @property
    def is_unscaled(self) -> bool:
        """Whether a loss scaler has unscaled the gradients of this step."""
        return self._has_changed_grads and any(name == _LOSS_SCALE for name, _ in self._changes)

    def prepare_step(self, also: Hyperparameters = ()) -> None:
        """Check and update everything a step or a change of gradients needs, while the fence can still report an error.

        Args:
            also: further hyperparameters of the update, to be compared on all ranks.

        Raises:
            MegabucketError: this rank cannot step; reported to the other ranks where they wait for it.
        """
        sync = self.ddp.sync
        refuse_in_backward("a step of the optimizer")
        sync.check_not_dropped()
        sync.check_is_trainable()
        if not self._has_changed_grads:
            self._changes, self._has_loaded = (), False  # of gradients that were cleared since
        if sync.is_reduced and sync.state not in AGREED:
            raise PhaseError(
                "step() was called twice on the same gradients, or on those of a step that a loss scaler has skipped on all "
                "ranks: no backward has run since. Run backward and zero_grad() between two steps; with a scaler call its "
                "step()."
            )
        try:
            if not self._is_sharded and sync.state in AGREED and not sync.skip_reason:
                self._take_published_grads()
            self.sharding.check_is_current()
            self._check_scaler_is_updated()
            if not self._has_norm and self.clip_grad > 0:
                self.sharding.check_norm(is_wanted=True)
            self.sharding.check_is_untouched()
            check_learning_rates(groups := self.sharding.param_groups)
            hyperparameters = read_hyperparameters(groups)
            sync.counters.announce_update((*hyperparameters, ("clip_grad", float(self.clip_grad)), *self._changes, *also))
            if self._has_loaded:
                self._check_nothing_is_lost()
            self.sharding.refresh()
        except Exception as error:
            if self.sharding.holder.buffers is self.ddp.param_and_grad_buffers:  # else a later optimizer has replaced it
                sync.refuse_update(error)
            if sync.updates_jointly and sync.state is StepState.GIVING_UP and not sync.policy.has_fence:
                self.global_norm.of([_number(math.nan)])  # the only collective of the others before they update
            raise
        if not (sync.state in AGREED or (sync.state is StepState.LAUNCHING and not sync.policy.is_explicit)):
            unreduced = UnreducedGradientsError(rank=self.ddp.communicator.rank)
            sync.refuse_update(unreduced)
            raise unreduced

    def _check_scaler_is_updated(self) -> None:
        """Refuse gradients that a torch scaler takes for unscaled because it has unscaled those of an earlier step."""
        answered = (self.scaled_with or self).answered
        if answered is not None and answered() is not None and not self.is_unscaled:
            raise PhaseError(
                "torch.amp.GradScaler has unscaled the gradients of an earlier step, which was dropped, and not those of this "
                "one: it unscales once between two calls of its update(). The update would use gradients that are still "
                "multiplied by the loss scale. Call scaler.update() and zero_grad() after every step, also after a dropped one."
            )

    def _take_published_grads(self) -> None:
        """Copy gradients that the caller has assigned to ``param.grad`` after the all-reduce into the buffers.

        Raises:
            PhaseError: a gradient was cleared; a flat shard cannot skip single parameters.
        """
        for slot in chain.from_iterable(group.slots for group in self.ddp.sync.groups):
            grad = slot.param.grad
            if grad is slot.in_buffer or (grad is None and (slot.name in self.ddp.sync.skipped or self.ddp.sync.resets_late)):
                continue
            if grad is None:
                raise PhaseError(
                    f"the gradient of {slot.name!r} was cleared between the gradient sync and step(). A DistributedOptimizer "
                    "steps on flat shards and cannot skip single parameters. To leave one out, zero its gradient in place, "
                    "or use a plain torch optimizer, which skips parameters without a gradient. To clear all, call "
                    "zero_grad() after step()."
                )
            slot.in_buffer.copy_(grad)
            slot.publish()

    def skip(self, reason: str, *, norm: float = math.nan) -> None:
        """End the step without an update, as all ranks do."""
        if self.sharding.exchange is not None:
            self.sharding.exchange.drop()
        self._skipped_step = self.ddp.sync.step
        self.ddp.sync.end_update()
        self.last_step = StepResult(updated=False, grad_norm=norm, reason=reason)

    def send_to_owners(self, part: int | None = None) -> None:
        """Send the gradients of parameters that one rank updates whole. They travel while the norm is taken.

        Args:
            part: index of the given optimizer that steps; ``None``: all.
        """
        exchange = self.sharding.exchange
        if exchange is not None and (part is None or self.sharding.updates[part].is_whole):
            exchange.launch_grads(are_widened=self._has_loaded)

    def norms_of(self, part: int | None = None) -> list[torch.Tensor]:
        """Return the norms of the gradients of this rank that count in the global norm.

        Args:
            part: index of the given optimizer whose parameters are measured; ``None``: of all.
        """
        return list(map(self.global_norm.of_grad, map(self._reduced, self._counted(part))))

    def _reduced(self, shard: GradShard) -> torch.Tensor:
        """Return a reduced gradient with the changes made to it, before it is clipped: 1D."""
        # Unless it was loaded to be changed, the buffer has the same values.
        return shard.flat_grad if self._has_loaded else shard.buffer_grads

    def update(self, norm: float, *, max_norm: float, part: int | None = None) -> None:
        """Clip, step on the shards and gather the parameters.

        Args:
            max_norm: 0 clips nothing.
            part: index of the given optimizer that steps; ``None``: all.
        """
        sync, sharding = self.ddp.sync, self.sharding
        updates = sharding.updates if part is None else sharding.updates[part : part + 1]
        exchange = sharding.exchange if part is None or updates[0].is_whole else None
        skipped = sync.skipped if sharding.skips_some else ()
        num_zeros = self._count_zeros(skipped) if self._settings["returns_num_zeros"] else None
        if exchange is not None:
            exchange.finish_grads()
        grads = list(map(_grad if self._has_loaded else _load_grad, chain.from_iterable(map(_shards, updates))))
        try:
            if max_norm > 0:
                clip_by_norm(grads, norm=norm, max_norm=max_norm, scale=self._kernels.scale)
            for update in updates:
                update.step(sharding.state, skipped=skipped)
        finally:
            sharding.store_values()
        if exchange is not None:
            exchange.return_values()
        # Before a joint update the last fence has compared the hyperparameters; otherwise the next one does.
        sync.counters.note_update(() if sync.updates_jointly else sync.counters.hyperparameters)
        if self._is_sharded:
            for group in sync.groups:
                group.mark_params_stale()
            self.ddp.start_param_sync()
        if part is None or self._note_done(part):
            sync.end_update()
            if sharding.exchange is not None:
                sharding.exchange.forget_widened()
        # Without a norm of the whole model, one over some of its ranks was taken to find non-finite gradients.
        self.last_step = StepResult(
            updated=True, grad_norm=norm if self._has_norm else math.nan, reason="", num_zeros=num_zeros
        )

    def _count_zeros(self, skipped: Container[str]) -> int:
        used = [shard for shard in self._counted(None) if shard.segment.params[0] not in skipped]
        return self.global_norm.num_zeros(map(self._reduced, used), numel=sum(shard.numel for shard in used))

    # Parts #

    @property
    def _parts_done(self) -> frozenset[int]:
        """The parts that have stepped alone on the gradients of this step, or are cleared after all ranks have skipped it."""
        sync, (step, done) = self.ddp.sync, self._done_in_step
        return done if sync.is_reduced and step == sync.step else frozenset()

    def _note_done(self, part: int) -> bool:
        """Note that a part is done; return whether all are."""
        done = self._parts_done | {part}
        self._done_in_step = self.ddp.sync.step, done
        return len(done) == len(self.torch_optimizers)

    def step_part(self, part: int) -> StepResult | None:
        """Step one of the given optimizers, on its own norm; the others may step on the same gradients after it.

        If all ranks skip the update, the parts that step after it are skipped as well.

        Raises:
            PhaseError: it has stepped on them.
            MegabucketError: as ``step``.
        """
        sync, given = self.ddp.sync, self.torch_optimizers[part]
        is_early = sync.state in (StepState.IDLE, StepState.OPEN)
        if is_early and only_makes_state(given.param_groups, self.ddp.param_names):
            self.sharding.make_state()
            return None
        if part in self._parts_done:
            self._refuse_second_step(
                f"{type(given).__name__}.step() was called twice on the same gradients: no backward has run since. Run "
                "backward and zero_grad() between two steps."
            )
        if self._is_skipped:
            sync.check_not_dropped()
            self._note_done(part)
        else:
            self._step(part)
        return self.last_step

    def _refuse_second_step(self, problem: str) -> NoReturn:
        error = PhaseError(problem)
        if self.ddp.sync.state in AGREED:
            self.ddp.sync.refuse_update(error)  # another rank may step another part, and waits
        raise error

    @property
    def _is_skipped(self) -> bool:
        """Whether all ranks have skipped the update with the gradients of this step, which are not cleared yet."""
        return self.ddp.sync.is_reduced and self._skipped_step == self.ddp.sync.step

    def zero_grad_of_part(self, part: int, *, set_to_none: bool) -> None:
        """Clear all gradients of the wrapped module; those of parts that may step on them, when the next step begins."""
        if self._is_skipped:
            self._note_done(part)
        if part in self._parts_done and len(self._parts_done) < len(self.torch_optimizers):
            for param in chain.from_iterable(group["params"] for group in self.torch_optimizers[part].param_groups):
                param.grad = None
            self.ddp.sync.reset_late()
        else:
            self.zero_grad(set_to_none)

    def why_not(self, norm: float) -> str:
        """Return why no rank updates with this norm."""
        if math.isfinite(norm):
            return f"the gradient norm {norm:g} is above grad_norm_skip_threshold={self.largest_norm:g}"
        return self._why_not_finite(f"the gradient norm is {norm}")

    def _why_not_finite(self, finding: str) -> str:
        names = [name for shard in self.sharding.grad_shards for name in shard.params_with_nonfinite_grad()]
        if names:
            culprit = f"not finite in this rank's shard of {name_list(names)}"
        elif self._is_sharded and self.ddp.communicator.size > 1:
            culprit = "not finite on another rank"
        else:
            culprit = "every gradient is finite, but the sum over them is not"
        return f"{finding}: {culprit}"

    # Reduced gradients before a step: loss scaling, and clipping by hand #

    @torch.no_grad()
    def unscale_grads(self, inv_scale: float | torch.Tensor, *, in_buffer: bool = False) -> bool:
        """Finish the gradient sync and multiply the gradients; return whether all ranks skip the step.

        They do if a gradient of any rank is not finite. The step is then over and in ``last_step``, and ``zero_grad`` begins
        the next one. For loss scalers, once per step; ``torch.amp.GradScaler`` calls it by itself.

        Args:
            inv_scale: 1 / loss scale.
            in_buffer: multiply 16-bit gradients where the caller reads them, in 16 bits, and not their float32 copies.

        Raises:
            ConfigError: infinite gradients are errors before a scaler sees them (``nonfinite_gradients="error"``).
            PhaseError: the gradients of this step were unscaled already.
            MegabucketError: as ``step``.
        """
        sync, device = self.ddp.sync, self.ddp.param_and_grad_buffers[0].grad_data.device
        if sync.policy.tests_finite and not sync.policy.skips_nonfinite:
            raise ConfigError(
                "a loss scaler such as torch.amp.GradScaler tests for infinite gradients itself, but "
                "nonfinite_gradients='error' (the default) makes each of them an error before the reduction. Wrap the module "
                "with DistributedDataParallelConfig(nonfinite_gradients='allow'), or 'skip_step'."
            )
        self.answered = None  # the caller unscales these gradients, whatever a scaler has done before
        self.prepare_step()
        if self.is_unscaled:
            raise PhaseError("the gradients of this step were unscaled already; unscale them once per step().")
        with sync.failing_on_all_ranks("unscaling gradients", self._final_states):
            grads = self._take_grads("unscale_grads()", in_buffer=in_buffer)
            found_inf = torch.full((), float(bool(sync.skip_reason)), dtype=torch.float32, device=device)
            factor = torch.as_tensor(inv_scale, dtype=torch.float32, device=device)
            for grad in grads:  # a kernel takes one dtype
                CHECK_AND_UNSCALE([grad], found_inf, factor)
            is_finite = self.global_norm.of([found_inf]) == 0
            self._changes = (*self._changes, (_LOSS_SCALE, 1 / float(factor)))  # read after the norm, which watches the ranks
            if is_finite:
                return False
            if not sync.skip_reason:
                self.load_grads()  # to name the parameters
                sync.skip_update(self._why_not_finite("the loss scaler skips the step"))
            self.skip(sync.skip_reason)
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float | None = None) -> torch.Tensor:
        """Finish the gradient sync and clip to a global norm; return the norm over all ranks before clipping.

        Replaces ``torch.nn.utils.clip_grad_norm_``: after the last backward, and after ``GradScaler.unscale_``. An infinite
        ``max_norm`` clips nothing. If the norm is not finite nothing is changed and ``step`` updates nothing; nan if all ranks
        skip the step already.

        Args:
            norm_type: p of the p-norm; ``None``: that of the optimizer.

        Raises:
            ConfigError: ``max_norm`` is negative, ``norm_type`` is below 1, or the wrapper does not know which ranks hold the
                other parts of the model.
            MegabucketError: as ``step``.
        """
        return self.clip_part(max_norm, norm_type)

    def clip_part(self, max_norm: float, norm_type: float | None = None, *, part: int | None = None) -> torch.Tensor:
        """Clip as ``clip_grad_norm_`` does, by the norm over the parameters of one given optimizer.

        Args:
            part: its index; ``None``: all of them, by one norm.
        """
        if not max_norm >= 0:
            raise ConfigError(f"max_norm must be a number >= 0, got {max_norm!r}")
        kind = self._settings["norm_type"] if norm_type is None else norm_type
        check_norm_settings(0.0, kind, math.inf, is_exact=self.ddp.policy.sums_in_rank_order)
        if not self._has_norm:
            self.sharding.check_norm(is_wanted=True)
        if self.ddp.sync.skip_reason:
            return _number(math.nan)
        self.prepare_step()
        with self.ddp.sync.failing_on_all_ranks("clip_grad_norm_()", self._final_states):
            where = "" if part is None else f" of part {part}"
            self._take_grads(f"clip_grad_norm_({float(max_norm)}, norm_type={float(kind)}){where}")
            over_ranks = self._norm_of_type(kind)
            norm = over_ranks.of([over_ranks.of_grad(shard.flat_grad) for shard in self._counted(part)])
            if math.isfinite(norm):
                grads = [shard.grad for shard in self._grad_shards_of(part)]
                clip_by_norm(grads, norm=norm, max_norm=max_norm, scale=self._kernels.scale)
            self._changes = (*self._changes, (f"clip_grad_norm_(){where}", float(max_norm)), ("its norm_type", float(kind)))
        return _number(norm)

    def _take_grads(self, call: str, *, in_buffer: bool = False) -> list[torch.Tensor]:
        """Finish the gradient sync and return the gradients to change: widened copies of 16-bit ones, others in the buffers.

        Args:
            call: the change with its arguments, which must be the same on all ranks.
            in_buffer: whether to return 16-bit gradients as well where they are.
        """
        sync = self.ddp.sync
        with sync.counters.comparing(call if sync.updates_jointly else ""):
            if sync.is_reduced and sync.updates_jointly:
                sync.vote_again()
            sync.finish()
        self._changed_step = sync.step
        if in_buffer:
            return [shard.buffer_grads for shard in self.sharding.grad_shards]
        if not self._has_loaded:
            self._versions = self._versions_of_widened()
        grads, self._has_loaded = self.load_grads(), True
        return grads

    def load_grads(self) -> list[torch.Tensor]:
        """Return the reduced gradients of this rank, 16-bit ones widened; those that were changed are not loaded again."""
        return list(map(_grad if self._has_loaded else _load_grad, self.sharding.grad_shards))

    def _versions_of_widened(self) -> list[int]:
        """Return version counters of the 16-bit gradients; changes to them after widening would be lost."""
        widened = {id(one.buffer): one.buffer for one in self.sharding.grad_shards if one.buffer_grads.dtype != one.dtype}
        return [buffer.grad_data._version for buffer in widened.values()]  # not of shards, which a change of state cuts again

    def _grad_shards_of(self, part: int | None) -> list[GradShard]:
        """Return the gradients of this rank, of one given optimizer or of all."""
        return [shard for shard in self.sharding.grad_shards if part is None or self.sharding.is_of(shard, part)]

    def _counted(self, part: int | None) -> list[GradShard]:
        """Return those that count in the norm."""
        return [shard for shard in self._grad_shards_of(part) if shard.counts]

    def _check_nothing_is_lost(self) -> None:
        if self._versions != self._versions_of_widened():
            raise PhaseError(
                "16-bit gradients were changed, by scale_gradients() or through param.grad, after they were unscaled or "
                "clipped in float32, so the change would be lost. Make it before; clip with clip_grad_norm_() of the optimizer."
            )

    def _answer_scaler(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Unscale for a torch scaler, which calls once for each dtype with the same ``found_inf``."""
        asked = self.scaled_with or self
        if asked.answered is None or asked.answered() is not found_inf:
            # A scaler calls once for each optimizer as well, and those that step alone have their gradients in common.
            is_part = len(self.torch_optimizers) > 1 and self.ddp.sync.is_reduced
            if not (is_part and self._unscaled_step == self.ddp.sync.step):
                self._skips_unscaled = asked.unscale_grads(inv_scale, in_buffer=not self._is_sharded)  # or torch's own result
                self._unscaled_step = self.ddp.sync.step
            if self._skips_unscaled:
                found_inf.fill_(1.0)
            asked.answered = weakref.ref(found_inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of the wrapped module; see ``DistributedDataParallel.zero_grad``."""
        self.ddp.zero_grad(set_to_none=set_to_none)

    def reload_main_params(self) -> None:
        """Copy parameter values from the model after other code has changed weights.

        Not needed after ``load_state_dict`` of the module.
        """
        self.sharding.reload()

    # State #

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return the state of whole parameters in torch's format, as of the optimizer without shards.

        A collective call, between two steps; complete on every rank. A plain optimizer over the same parameters loads it. The
        float32 values of 16-bit parameters are in their state, as ``"main_param"``. If the state is too large for one rank's
        memory, use ``save_checkpoint``, which gathers nothing.

        Raises:
            PhaseError: a step is open, or the optimizer is not the current one.
            OptimizerParametersError: the state of a shard cannot be split by parameter.
            PeerFailedError: another rank has failed.
        """
        if len(self.torch_optimizers) == 1:
            return self.state_dicts()[0]
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        joined = join(self.state_dicts())
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, joined)
            joined = joined if changed is None else changed
        return joined

    @torch.inference_mode(False)
    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the state of each given optimizer over whole parameters. Otherwise as ``state_dict``."""
        with self.ddp.sync.call("state_dict()"):
            self.sharding.settle("state_dict()")
        whole = self.sharding.whole_state()
        packed = [pack(optimizer, whole) for optimizer in self.torch_optimizers]
        if (dtensors := self.ddp.dtensors) is not None:
            return [dtensors.show_state(*one) for one in zip(self.torch_optimizers, packed, strict=True)]
        return packed

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``, of any number of ranks and any mode, or of plain torch.

        A collective call, between two steps, with the same state on every rank. Load weights into the module before or after;
        main parameters keep their precision if they round to the weights. If it fails, nothing was changed.

        Raises:
            CheckpointMismatchError: the state does not fit; the text names all differences.
            PhaseError: a step is open, or the optimizer is not the current one.
            LayoutMismatchError: ranks load different state.
            PeerFailedError: another rank has failed.
        """
        if len(self.torch_optimizers) == 1:
            self.sharding.load(state_dict)
            return
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.sharding.load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


class OptimizerPart(SteppingForWrapper):
    """One of the torch optimizers of a ``DistributedOptimizer``, to be stepped by itself.

    A step reduces the gradients of the whole wrapper and updates the parameters of this optimizer, under their own norm. The
    other optimizers may step on the same gradients, each once, before the next backward. ``zero_grad`` clears all gradients of
    the wrapper.

    Args:
        whole: the optimizer that it is a part of.
        index: its place in ``whole.torch_optimizers``.
    """

    _step_supports_amp_scaling = False
    __reduce_ex__ = NO_COPIES

    def __init__(self, whole: DistributedOptimizer, index: int) -> None:
        self.whole, self.index = whole, index
        self.given = whole.torch_optimizers[index]
        super().__init__([{"params": []}], self.given.defaults)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the given optimizer, with the parameters of the module."""
        return self.given.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if groups:  # torch's constructor sets an empty list
            self.given.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of this rank by parameter, of all optimizers."""
        return self.whole.state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        if values:  # torch's constructor sets an empty one
            self.whole.state.update(values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that are in no group yet; they get shards at the next ``ddp.rebuild()``."""
        if param_group["params"]:  # torch's constructor adds an empty one
            self.given.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of this optimizer. See ``DistributedOptimizer.step``."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        with torch.inference_mode(False), torch.no_grad():
            result = self.whole.step_part(self.index)
        return result if closure is None else value

    def clip_grad_norm_(self, max_norm: float, norm_type: float | None = None) -> torch.Tensor:
        """Clip the gradients of this optimizer by their own norm, and return it. See ``DistributedOptimizer``."""
        with torch.inference_mode(False), torch.no_grad():
            return self.whole.clip_part(max_norm, norm_type, part=self.index)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of the wrapped module.

        After a step of this optimizer, those of parts that have not stepped on the same gradients go when the next step begins.
        """
        self.whole.zero_grad_of_part(self.index, set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the given optimizer over whole parameters. Collective; see ``DistributedOptimizer``."""
        return self.whole.state_dicts()[self.index]

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``. Collective; see ``DistributedOptimizer``."""
        parts = self.whole.state_dicts()
        parts[self.index] = state_dict
        self.whole.sharding.load(None, parts=parts)


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")
