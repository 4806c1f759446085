"""``DistributedOptimizer``: any elementwise torch optimizer on this rank's flat float32 shards (ZeRO-1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from megabucket.buffer import GradPhase
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.agreement import agree
from megabucket.ddp.capture import check_not_capturing
from megabucket.ddp.hyperparameters import read_hyperparameters
from megabucket.ddp.patience import insist
from megabucket.ddp.step_agreement import describe
from megabucket.ddp.step_report import Failure
from megabucket.errors import (
    ConfigError,
    MegabucketError,
    UnreducedGradientsError,
)
from megabucket.optim.norm import GlobalNorm, clip_by_norm
from megabucket.optim.published_grads import take_published_grads
from megabucket.optim.sharding import Sharding
from megabucket.optim.shards import MainShard, load_grads, shown_grads
from megabucket.optim.squares import Squares
from megabucket.optim.step_result import StepResult, nonfinite_result
from megabucket.optim.torch_format import pack, unpack


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
        returns_grad_norm: whether ``step`` returns the norm in any case. ``False`` computes it only where it is needed: to
            clip, and to find what is not finite where the gradient sync does not (``nonfinite_gradients="allow"``,
            ``fence=False``, reduce-scattered float16). It saves a pass over the gradients and, with shards, the wait
            for a small collective before each update.

    Every rank makes one at the same time: they compare groups, hyperparameters and state.

    Raises:
        OptimizerParametersError: the optimizer's parameters are not the wrapper's, or its state does not fit into shards.
        ConfigError: ``clip_grad`` is negative or not finite, or the optimizer cannot work on flat shards.
        LayoutMismatchError: the optimizer is not the same on all ranks.
        PeerFailedError: another rank could not make its own.
    """

    def __init__(
        self,
        torch_optimizer: torch.optim.Optimizer,
        ddp: DistributedDataParallel,
        *,
        clip_grad: float = 0.0,
        returns_grad_norm: bool = True,
    ) -> None:
        # No super().__init__(): this object forwards to torch_optimizer, which owns groups, state and defaults.
        self.torch_optimizer = torch_optimizer
        self.ddp = ddp
        self._is_sharded = ddp.ddp_config.use_distributed_optimizer
        self._sharding = Sharding(torch_optimizer, ddp)
        self._returns_grad_norm = returns_grad_norm
        self._sharding.shard(clip_grad=clip_grad, returns_grad_norm=returns_grad_norm, label="DistributedOptimizer()")
        self.clip_grad = float(clip_grad)
        self._global_norm = self._make_norm()
        # Weights loaded after this point reach the main parameters at the next step.
        self._num_value_changes = ddp.num_value_changes
        ddp.follow_rebuilds(self)

    def _make_norm(self) -> GlobalNorm:
        return GlobalNorm(self.ddp.communicator, device=self._device, is_sharded=self._is_sharded)

    @property
    def _device(self) -> torch.device:
        return self.ddp.param_and_grad_buffers[0].grad_data.device

    @property
    def _shards(self) -> list[MainShard]:
        """What this rank steps on."""
        return self._sharding.shards

    # Rebuilding #

    def before_rebuild(self) -> None:
        """Become a plain optimizer over whole parameters, with their state and main values. Called by the wrapper.

        Raises:
            OptimizerParametersError: the state of a shard cannot be told apart by parameter. Nothing was changed.
            PeerFailedError: another rank's cannot.
        """
        self._sharding.undo()

    def after_rebuild(self) -> None:
        """Shard anew. Called by the wrapper.

        Raises:
            OptimizerParametersError: the groups do not hold the trainable parameters. Nothing was changed.
            LayoutMismatchError: groups or step counts are not the same on all ranks.
            PeerFailedError: another rank could not shard.
        """
        self._sharding.shard(clip_grad=self.clip_grad, returns_grad_norm=self._returns_grad_norm, label="rebuild: optimizer")
        self._global_norm = self._make_norm()
        self._num_value_changes = self.ddp.num_value_changes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that are new to the optimizer: added to the module, or in no group so far.

        They get shards at the next ``ddp.rebuild()``, on every rank. Until then nothing steps on them, and ``step`` is refused
        when one of them is trainable.

        Raises:
            OptimizerParametersError: one of the parameters is in a group already.
        """
        self._sharding.add_param_group(param_group)

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
        kind, num_shards = "shards" if self._is_sharded else "whole buffers", len(self._shards)
        return f"DistributedOptimizer on {kind} ({num_shards} flat tensors on this rank) of\n{self.torch_optimizer!r}"

    # A step #

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Finish the gradient sync, clip, update the shards and gather the parameters.

        Nothing is updated on any rank when the gradient norm is computed and not finite; the result says why.

        Raises:
            ConfigError: a closure was given; it could not know which backward is the last of the step.
            UnreducedGradientsError: no backward outside ``no_sync`` has run in this step.
            MegabucketError: the step is not whole on some rank; all ranks raise the same error and none updates.
            PhaseError: a gradient was cleared after the all-reduce, an error about the gradients was caught before, or a CUDA
                graph is being captured.
        """
        if closure is not None:
            raise ConfigError("DistributedOptimizer.step() takes no closure; run forward and backward before calling it")
        remedy = "Capture a plain optimizer with capturable=True in its place (docs/gpu.md)."
        check_not_capturing(self._device, reader="DistributedOptimizer.step() decides on the host what to do", remedy=remedy)
        self._sharding.check_is_current()
        self._sharding.check_grads_are_withheld()
        self._check_backward_has_run()
        hyperparameters = read_hyperparameters(self.param_groups)
        self.ddp.sync.tally.hyperparameters = (*hyperparameters, ("clip_grad", float(self.clip_grad)))
        squares = Squares(self._sharding.shards_of_group) if self._needs_norm() else None
        is_second_call = self.ddp.sync.is_between_steps  # on the same gradients, which commit() refuses
        if squares is None and self._is_sharded and not is_second_call:
            self._refresh_before_fence()
        interrupt = self.ddp.sync.commit() if squares is None else squares.take_during(self.ddp.sync.commit)
        # From here on the others run norm and gather, whatever happens on this rank, so this rank runs them, too.
        if self.ddp.sync.skip_reason:
            self.ddp.sync.end_step()
            result = StepResult(updated=False, grad_norm=math.nan, reason=self.ddp.sync.skip_reason)
            interrupt = interrupt or (None if squares is None else squares.failure)
        else:
            another = self._prepare(squares)
            interrupt = interrupt or another
            if squares is None:
                result = self._update(math.nan)
            else:
                self._global_norm.launch()
                norm, another = insist(self._global_norm.finish)
                result = self._update_if_finite(norm)
                interrupt = interrupt or another
        self.ddp.communicator.tell_pause()
        if interrupt is not None:
            raise interrupt
        return result

    def _needs_norm(self) -> bool:
        """Whether the norm is computed in this step: the same on all ranks, as the fence compares what it depends on."""
        config = self.ddp.ddp_config
        if self._returns_grad_norm or self.clip_grad > 0 or not config.fence or config.nonfinite_gradients == "allow":
            return True
        # Sums of float16 may overflow, and behind a reduce-scatter nothing else looks at them.
        grads = [buffer.grad_data for buffer in self.ddp.param_and_grad_buffers]
        return self._is_sharded and any(grad.dtype == torch.float16 for grad in grads)

    def _refresh(self) -> None:
        """Let parameters and main parameters be what the last step, or a load since, has left."""
        self.ddp.finish_param_sync()  # a bucket that no forward waited for may still be on its way into the buffer
        if self._num_value_changes != self.ddp.num_value_changes:
            self.reload_main_params()

    def _refresh_before_fence(self) -> None:
        """Refresh where there is no norm, behind the fence, that could keep the others from updating if this fails."""
        try:
            self._refresh()
        except BaseException as error:
            self.ddp.sync.fail("optimizer.step()", error)
            raise

    def _prepare(self, squares: Squares | None) -> BaseException | None:
        """Make ready what is stepped on and this rank's part of the norm, all that can fail; return what has interrupted it."""
        try:
            if not self._is_sharded:
                take_published_grads(self.ddp.bucket_groups)
            if squares is not None or not self._is_sharded:
                self._refresh()
            _, interrupt = insist(lambda: load_grads(self._shards))
            if squares is not None:
                self._global_norm.add(squares.all())
        except BaseException as error:
            self._give_up(error, awaits_norm=squares is not None)
            raise
        return interrupt

    def _give_up(self, error: BaseException, *, awaits_norm: bool) -> None:
        """Let the others know that this rank does not update, although it was whole at the fence.

        Those that wait for its part of the norm find it to be nan, and ask why before anybody updates. Where they wait for
        nothing, they update, and are told at the next fence.
        """
        sync = self.ddp.sync
        if not self._is_sharded:
            sync.note_missed_update(error)
        elif awaits_norm:
            with suppress(MegabucketError):  # what has brought us here is on its way already
                self._global_norm.spoil()
                self._global_norm.launch()
                self._global_norm.finish()
            sync.fail("optimizer.step()", error)
        else:
            sync.end_step()
            self._fail_update(error)

    def _fail_update(self, error: BaseException) -> None:
        """Note an update that has failed, for the next fence, and gather as the others do, whatever happened here."""
        self.ddp.sync.tally.failure = Failure("optimizer", describe(error))
        if self._is_sharded:
            with suppress(MegabucketError):  # the error is on its way already
                self._gather()

    def _update_if_finite(self, norm: float) -> StepResult:
        if self._is_sharded and math.isnan(norm):
            self.ddp.sync.vote_on_update()
        if math.isfinite(norm):
            return self._update(norm)
        self.ddp.sync.end_step()
        return nonfinite_result(norm, self._shards, has_others=self._is_sharded and self.ddp.communicator.size > 1)

    def _update(self, norm: float) -> StepResult:
        """Step on the shards, and gather what has come of it."""
        sync = self.ddp.sync
        sync.end_step()
        try:
            self._step_on_shards(norm)
            # Shards are updated after the fence has compared the hyperparameters, whole parameters before the next one does.
            sync.note_update(() if self._is_sharded else sync.tally.hyperparameters)
        except BaseException as error:
            self._fail_update(error)
            raise
        if self._is_sharded:
            self._gather()
        return StepResult(updated=True, grad_norm=norm, reason="")

    def _step_on_shards(self, norm: float) -> None:
        try:
            if self.clip_grad > 0:
                clip_by_norm([shard.grad for shard in self._shards], norm=norm, max_norm=self.clip_grad)
            with shown_grads(self._shards):
                self.torch_optimizer.step()
        finally:
            for shard in self._shards:
                shard.store_values()

    def _gather(self) -> None:
        for group in self.ddp.bucket_groups:
            group.mark_params_stale()
        try:
            self.ddp.start_param_sync()
        except BaseException:
            self.ddp.finish_param_sync()  # what an interrupted wait has left in the buffer, a forward must not read
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients of the wrapped module; see ``DistributedDataParallel.zero_grad``."""
        self.ddp.zero_grad(set_to_none=set_to_none)

    def reload_main_params(self) -> None:
        """Take parameter values over from the model, after weights were written by other means than the optimizer.

        ``load_state_dict`` on the module needs no call: it is noticed.
        """
        self._sharding.check_is_current()
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

    # State #

    def state_dict(self) -> dict[str, Any]:
        """Return the state of whole parameters in torch's format: what the optimizer would give without shards.

        A collective call, between two steps; complete on every rank. A plain optimizer over the same parameters loads it. Main
        parameters of 16-bit parameters, which plain torch does not have, are under a key of their own. Where the state is too
        large for one rank's memory, use ``save_checkpoint``, which gathers nothing.

        Raises:
            PhaseError: a step is open, the last update has failed on this rank, or the optimizer is not the current one.
            OptimizerParametersError: the state of a shard cannot be told apart by parameter.
            PeerFailedError: another rank cannot give its part.
        """
        self._settle_together("state_dict()", self.ddp.sync.check_has_updated)
        return pack(self.torch_optimizer, self._sharding.members, self._sharding.whole_state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state that ``state_dict`` gave, with any number of ranks, in any mode, or one of plain torch.

        A collective call, between two steps, with the same state on every rank. Weights are loaded into the module, before or
        after; main parameters keep their precision where they round to them. When it fails, nothing was changed.

        Raises:
            CheckpointMismatchError: the state does not fit; the text names everything that does not.
            PhaseError: a step is open, or the optimizer is not the current one.
            LayoutMismatchError: ranks load different state.
            PeerFailedError: another rank cannot load it.
        """
        self._settle_together("load_state_dict()")
        names: dict[torch.Tensor, str] = {param: name for name, param in self.ddp.module.named_parameters()}
        self._sharding.load(lambda: unpack(self.torch_optimizer, self._sharding.members, names, state_dict))
        # Main values that do not round to the weights, now or after these were loaded, go at the next step.
        self._num_value_changes = -1

    def _settle_together(self, operation: str, check: Callable[[str], None] | None = None) -> None:
        failure: MegabucketError | None = None
        try:
            self.settle_values(operation)
            if check is not None:
                check(operation)
        except MegabucketError as error:
            failure = error
        agree(self.ddp.communicator, [], failure=failure, device=self._device, label=f"optimizer: {operation}")

    def settle_values(self, operation: str) -> None:
        """Make parameters and main parameters what the last step has left, for whoever reads them all.

        Raises:
            PhaseError: a step is open, or the optimizer is not the current one.
        """
        self._sharding.check_is_current()
        self.ddp.sync.check_between_steps(operation)
        self._refresh()

    def note_values_are_loaded(self) -> None:
        """Note that main parameters and parameters were written alike."""
        self._num_value_changes = self.ddp.num_value_changes

    @property
    def sharding(self) -> Sharding:
        """The shards, for checkpoints."""
        return self._sharding
