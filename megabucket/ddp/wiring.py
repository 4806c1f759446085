"""What wrapping makes of a module: layout, buffers, bucket groups, hooks. Made as a whole, undone as a whole.

Puts the parts together and holds no rule of its own. ``DistributedDataParallel`` has one of these at a time; rebuilding makes
another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NoReturn, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from megabucket.buffer import GradSyncPolicy, ParamAndGradBuffer, ParamPhase, _ParamAndGradBucketGroup
from megabucket.comm import Communicator, ReduceOp
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp.agreement import Entry, agree, agree_on_model, exchange_device
from megabucket.ddp.discovery import DiscoveredParams
from megabucket.ddp.forward_watch import watch_forwards
from megabucket.ddp.grad_hook import grad_hooks
from megabucket.ddp.grad_sync import GradSync
from megabucket.ddp.guard import PlainOptimizerGuard
from megabucket.ddp.model_watch import ModelWatch, is_set_to
from megabucket.ddp.param_gather import ParamGather
from megabucket.errors import (
    ConfigError,
    LateGradientError,
    ModelChangedError,
    NonFiniteGradientError,
    PhaseError,
    UnusedParameterError,
    name_list,
)
from megabucket.layout import ModelLayout, launch_order

_CUTTING_FIELDS: Final = frozenset(
    {"bucket_size", "bucket_cap_mb", "num_buckets", "bucket_cuts", "bucket_order", "bucket_groups"}
)
"""What of a config a rebuild may change: where buckets are cut and how they are batched."""


class FollowsRebuild(Protocol):
    """An optimizer whose tensors lie in the buffers."""

    def before_rebuild(self) -> None:
        """Take everything that has to be kept out of the buffers."""

    def after_rebuild(self) -> None:
        """Put it back into those that took their place."""


class Wiring:
    """The parts around one module.

    Args:
        on_load: called after a ``load_state_dict`` of the module or of any part of it.

    Raises:
        LayoutMismatchError: the ranks do not hold the same module, config and versions; nothing was moved on any rank.
        PeerFailedError: another rank could not move its parameters; they are back where they were on all ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: DistributedDataParallelConfig,
        communicator: Communicator,
        *,
        on_load: Callable[[], None],
    ) -> None:
        found, self.layout = agree_on_model(module, config, communicator)
        self.param_names = {param: name for name, param in found.trainable.items()}
        self.buffers = _attach(self.layout, found, communicator)
        self._is_attached = True
        self.groups = _make_groups(self.layout, self.buffers, config, communicator)
        self._introduce(communicator)
        watch = ModelWatch(module, found.trainable, self.groups) if config.check_model_changes else None
        modules = list(module.modules())
        backward_hooks = [hooks for part in modules for hooks in (part._backward_hooks, part._backward_pre_hooks)]
        self.sync = GradSync(self.groups, config, watch, backward_hooks=backward_hooks)
        self.gather = ParamGather(self.groups, module, overlaps=config.overlap_param_gather)
        self._guard = PlainOptimizerGuard(
            found.trainable, self.sync, reduce_scatters=config.use_distributed_optimizer, communicator=communicator
        )
        self._handles = _register_hooks(module, self.groups, self.sync, on_load)

    def _introduce(self, communicator: Communicator) -> None:
        try:
            communicator.introduce([batch for group in self.groups for batch in group.readable_batches])
        except BaseException:
            for buffer in self.buffers:
                buffer.detach()
            raise

    @property
    def description(self) -> str:
        """Return what the module is, for error texts."""
        return "a wrapped module"

    @property
    def sync_to_continue(self) -> GradSync:
        """Whose counts the next wiring continues."""
        return self.sync

    def check_is_wired(self) -> None:
        """Do nothing: it is."""

    def find_obstacle(self) -> PhaseError | None:
        """Return why the module cannot be taken as it is now, or ``None``."""
        spoiled = [
            slot.name
            for group in self.groups
            if self._is_attached and group.param_phase is not ParamPhase.GATHERED
            for slot, values in zip(group.slots, group.param_values, strict=True)
            if not is_set_to(slot.param, values)
        ]
        if not spoiled:
            return None
        return PhaseError(
            f"rebuild() cannot take {name_list(spoiled)}: moved or written while the values were on their way "
            "(overlap_param_gather=True), so what was moved is NaN. The values are back now: change the module again, then "
            "call ddp.rebuild(); and call ddp.finish_param_sync() before you touch parameters outside forward."
        )

    def drop_step(self) -> None:
        """Forget the gradients of the step that is open, together with all ranks, and wait until parameters may be read.

        Raises:
            StepMismatchError: other ranks take the step.
            PeerFailedError: another rank has failed in it.
        """
        if self._is_attached:
            # What is wrong with gradients that nobody wants, or with the module, is why the caller rebuilds.
            with suppress(ModelChangedError, LateGradientError, UnusedParameterError, NonFiniteGradientError):
                self.sync.reset()
            self.gather.finish()

    def undo(self) -> None:
        """Give the parameters storages of their own and remove all hooks. A second call does nothing."""
        if not self._is_attached:
            return
        self._is_attached = False
        try:
            self.sync.reset()
            self.gather.finish()
        finally:  # a lost peer is no reason to keep the module
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self.gather.remove()
            self._guard.remove()
            for group in self.groups:
                group.show_params()
            for buffer in self.buffers:
                buffer.detach()


class Detached:
    """In the place of a wiring after ``detach()``: whoever uses the wrapper is told so. The module is a plain one.

    Args:
        text: what to tell.
    """

    def __init__(
        self,
        text: str = (
            "this wrapper was detached: the module is a plain one again, and nothing would be reduced. Call the module itself, "
            "or wrap it anew with DistributedDataParallel(module, ...)."
        ),
    ) -> None:
        self._text = text

    def check_is_wired(self) -> NoReturn:
        """Refuse.

        Raises:
            PhaseError: always.
        """
        raise PhaseError(self._text)

    def find_obstacle(self) -> PhaseError | None:
        """Refuse to be wrapped again by a rebuild: the ranks of this wrapper may be gone.

        Raises:
            PhaseError: always.
        """
        raise PhaseError(self._text)

    def undo(self) -> None:
        """Do nothing: it is undone."""

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to give what a wiring has.

        Raises:
            PhaseError: for every name.
        """
        if name.startswith("_"):
            raise AttributeError(name)  # what Python asks for is not what a caller uses
        raise PhaseError(self._text)


class Unwired(Detached):
    """In the place of a wiring when a rebuild has failed: whoever uses the wrapper, or calls the module, is told so.

    Args:
        sync_to_continue: whose counts the next wiring continues.
        reason: why the rebuild failed.
    """

    def __init__(self, module: torch.nn.Module, sync_to_continue: GradSync, *, reason: str) -> None:
        text = (
            "the module is not wrapped, because rebuild() has failed; gradients would not be reduced. Repair what the error "
            "has named and call ddp.rebuild() again on every rank; parameters, moments and main parameters are kept. "
            f"The error was {reason}"
        )
        super().__init__(text)
        self.sync_to_continue = sync_to_continue

        def refuse(called: torch.nn.Module, _: Any) -> None:
            if called is module:  # a deepcopy of the module shares the hook
                raise PhaseError(text)

        self.description = "a module that no rebuild has wrapped yet"
        self._handle = module.register_forward_pre_hook(refuse, prepend=True)

    def find_obstacle(self) -> None:
        """Return that nothing keeps the module from being wrapped again."""

    def drop_step(self) -> None:
        """Do nothing: there is no step."""

    def undo(self) -> None:
        """Let the module be called again. A second call does nothing."""
        self._handle.remove()


def find_difference(before: DistributedDataParallelConfig, after: DistributedDataParallelConfig) -> ConfigError | None:
    """Return what keeps a rebuild from taking another config: fields that say more than where buckets are cut."""
    old, new = (config.model_dump(exclude=set(_CUTTING_FIELDS)) for config in (before, after))
    different = [f"{name}={old[name]} to {name}={new[name]}" for name in old if old[name] != new[name]]
    if not different:
        return None
    allowed = ", ".join(sorted(_CUTTING_FIELDS))
    return ConfigError(
        f"rebuild() cannot change {'; '.join(different)}. It may only cut buckets anew, by {allowed}; for the rest, detach and "
        "wrap again."
    )


def prepare_rebuild(
    wiring: Wiring | Detached,
    module: torch.nn.Module,
    communicator: Communicator,
    *,
    num_optimizers: int,
    obstacle: ConfigError | None = None,
) -> None:
    """Return when every rank has come here with as many optimizers, and no step is open. Changes nothing else.

    Args:
        obstacle: why this rank cannot rebuild.

    Raises:
        ConfigError: the obstacle.
        LayoutMismatchError: a rank takes other optimizers along, or is in another state.
        PhaseError: the module cannot be taken as it is now, or the wrapper was detached.
        StepMismatchError: other ranks take a step.
        PeerFailedError: another rank cannot take its module, or has failed in the step.
    """
    failure = obstacle or wiring.find_obstacle()
    # First of all: of a step that is open, ranks may have launched more or fewer buckets.
    wiring.drop_step()
    entries: list[Entry] = [("optimizers to take along:", num_optimizers), (wiring.description,)]
    agree(communicator, entries, failure=failure, device=exchange_device(module), label="rebuild")


def _attach(layout: ModelLayout, found: DiscoveredParams, communicator: Communicator) -> list[ParamAndGradBuffer]:
    """Move the parameters into buffers, on all ranks or on none."""
    buffers: list[ParamAndGradBuffer] = []
    failure = None
    try:
        try:
            buffers.extend(ParamAndGradBuffer(buffer, found.trainable) for buffer in layout.buffers)
        except Exception as error:
            failure = error
        device = next(iter(found.trainable.values())).device
        agree(communicator, [], failure=failure, device=device, label="wrap: buffers")
    except BaseException:
        for buffer in buffers:
            buffer.detach()
        raise
    return buffers


def _make_groups(
    layout: ModelLayout, buffers: list[ParamAndGradBuffer], config: DistributedDataParallelConfig, communicator: Communicator
) -> list[_ParamAndGradBucketGroup]:
    policy = GradSyncPolicy(
        reduce_scatters=config.use_distributed_optimizer,
        op=ReduceOp.AVG if config.average_in_collective else ReduceOp.SUM,
        average=config.grad_reduction == "mean",
        tests_finite=config.nonfinite_gradients != "allow",
        accumulates_in_fp32=config.reduce_scatter_with_fp32_accumulation,
        reduces_in_place=config.reduce_in_place,
        # Without a fence nothing but gloo finds ranks that are out of step, and it does not see who waits over other sockets.
        reads_peers=config.read_peer_memory and config.fence,
        withholds_because=_why_withheld(config),
    )
    buckets = [buffers[i].buckets[j] for i, j in launch_order(layout)]
    batches = [buckets] if config.bucket_groups == "single" else [[bucket] for bucket in buckets]
    return [
        _ParamAndGradBucketGroup(batch, index=index, num_groups=len(batches), communicator=communicator, policy=policy)
        for index, batch in enumerate(batches)
    ]


def _why_withheld(config: DistributedDataParallelConfig) -> str:
    if config.use_distributed_optimizer:
        return (
            "is reduce-scattered (use_distributed_optimizer=True): from backward to the optimizer's step each rank has a "
            "gradient of its own there, or one shard of the reduced one, in memory that a collective may own. Its norm, and "
            "what is clipped by it, would differ between ranks. Clip with DistributedOptimizer(..., clip_grad=1.0), and read "
            "the norm over all ranks from what its step() returns; scale with ddp.scale_gradients() after finish_grad_sync(). "
            "With ddp.force_all_reduce = True before backward, finish_grad_sync() leaves whole gradients in param.grad."
        )
    if config.finish == "explicit":
        return (
            "is not reduced yet (finish='explicit'), and a collective may own its memory. Call ddp.finish_grad_sync() first; "
            "then read, scale or clip it."
        )
    return ""


def _register_hooks(
    module: torch.nn.Module, groups: list[_ParamAndGradBucketGroup], sync: GradSync, on_load: Callable[[], None]
) -> list[RemovableHandle]:
    handles: list[RemovableHandle] = [
        slot.param.register_post_accumulate_grad_hook(hook)
        for group in groups
        for slot, hook in zip(group.slots, grad_hooks(sync, group), strict=True)
    ]
    handles += watch_forwards(module, sync)
    submodules = set(module.modules())

    def note_load(loaded: torch.nn.Module, _: Any) -> None:
        if loaded in submodules:  # a deepcopy of the module shares the hook
            on_load()

    handles += [submodule.register_load_state_dict_post_hook(note_load) for submodule in submodules]
    return handles


def restore_prefix(_: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    """Let an outer module that contains the wrapper load what its ``state_dict`` gave: names without ``module.``."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
