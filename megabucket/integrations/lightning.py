"""Lightning: ``strategy="megabucket"`` for a ``Trainer`` or ``Fabric``, once this module was imported.

Both strategies are Lightning's own ``DDPStrategy`` with another wrapper and, if the optimizer is sharded, another optimizer and
another norm: process group, launcher, samplers, precision and checkpoint files stay Lightning's. Docs: ``docs/lightning.md``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, MegabucketError
from megabucket.integrations import (
    NO_CLIP_BY_VALUE,
    SHARDED,
    Framework,
    FrameworkOptimizer,
    config_for,
    require,
    sharded,
    whole_of,
    with_torch_arguments,
    wrapper_of,
)

require(Framework("lightning", (2, 6), (2, 7)), adapter=__name__, extra="lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402 - after the line that says how to install it
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402
from lightning.pytorch.trainer.states import TrainerStatus  # noqa: E402

_requires_grad: Final = attrgetter("requires_grad")
_OF_TORCH_DDP = frozenset({"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"})
_DESCRIPTION = "megabucket: gradients reduced in buckets while backward runs, and a sharded optimizer"


class MegabucketStrategy(DDPStrategy):
    """Train a ``LightningModule`` through megabucket's buffers and its sharded optimizer.

    ``Trainer(gradient_clip_val=)`` and ``self.clip_gradients`` clip by the norm of the whole gradient. Checkpoints are
    Lightning's: complete, in one file, for any number of devices and for ``strategy="ddp"``. After ``fit`` the module and its
    optimizers are plain ones, with complete state. With several optimizers (manual optimization) each is stepped by itself.

    Args:
        config: shards the optimizer's state if not given. With ``use_distributed_optimizer=False`` gradients are all-reduced,
            and any torch optimizers step on them as under ``strategy="ddp"``.
        **ddp_strategy: arguments of Lightning's ``DDPStrategy``. Of those of torch DDP it takes ``find_unused_parameters``, and
            values that describe what the wrapper does anyway.

    Raises:
        ConfigError: another argument is meant for torch DDP.
    """

    optimizers: list[Any]  # a property of Lightning's

    def __init__(self, config: DistributedDataParallelConfig | None = None, **ddp_strategy: Any) -> None:
        super().__init__(**ddp_strategy)
        of_torch_ddp = {name: ddp_strategy.get(name) for name in {*self._ddp_kwargs, *_OF_TORCH_DDP}}
        self.config = with_torch_arguments(config, _changed(of_torch_ddp))
        self._wrapper: DistributedDataParallel | None = None
        self._whole: FrameworkOptimizer | None = None
        self._frozen: list[torch.nn.Parameter] = []  # in no buffer

    @property
    def _is_sharded(self) -> bool:
        return self._wrapper is not None and self._wrapper.policy.is_sharded

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        config = config_for(self.config, getattr(self.precision_plugin, "scaler", None))
        self._wrapper = DistributedDataParallel(model, config)
        self._note_frozen(self._wrapper)
        return self._wrapper

    def _note_frozen(self, wrapper: DistributedDataParallel) -> None:
        self._frozen = [param for param in wrapper.module.parameters() if param not in wrapper.param_names]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take up parameters that were unfrozen and added to an optimizer, as ``BaseFinetuning`` does, then run the step."""
        if self._wrapper is not None and any(map(_requires_grad, self._frozen)):  # usually there are none
            unfrozen = set(filter(_requires_grad, self._frozen))
            held = (group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)
            if not unfrozen.isdisjoint(chain.from_iterable(held)):
                self._wrapper.rebuild()
                self._note_frozen(self._wrapper)
        return super().training_step(*args, **kwargs)

    def _register_ddp_hooks(self) -> None:
        """Register nothing: communication hooks are torch DDP's, and were refused."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers of the module, and shard them together if the config says so.

        Raises:
            OptimizerParametersError: they do not hold each trainable parameter once.
        """
        super().setup_optimizers(trainer)
        if not self._is_sharded:
            return
        self._whole = FrameworkOptimizer(self.optimizers, self.model)
        self.optimizers = list(self._whole.parts) if len(self.optimizers) > 1 else [self._whole]
        # The trainer, self.clip_gradients and plugins clip through these two, which would clip by one rank's shards.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self.precision_plugin.clip_grad_by_value = self._refuse_clip_by_value

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        found = whole_of(optimizer)
        if found is not None:
            whole, part = found
            whole.clip_next_step(clip_val, part=part)  # step() takes the norm, once and over the shards of all ranks

    def _refuse_clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        raise ConfigError(NO_CLIP_BY_VALUE)

    def teardown(self) -> None:
        """Restore a plain module, and plain optimizers with complete state unless training has failed."""
        wrapper, self._wrapper = self._wrapper, None
        whole, self._whole = self._whole, None
        if wrapper is not None:
            self.model = self.lightning_module
            for name in ("clip_grad_by_norm", "clip_grad_by_value"):
                self.precision_plugin.__dict__.pop(name, None)
            trainer = self.lightning_module._trainer
            if trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED:
                with suppress(MegabucketError):  # the first error must stay visible
                    wrapper.detach()
            else:
                wrapper.zero_grad()  # a last batch may not have been stepped on
                if whole is not None:
                    whole.before_rebuild()
                    self.optimizers = list(whole.torch_optimizers)
                wrapper.detach()
        super().teardown()


class MegabucketFabricStrategy(FabricDDPStrategy):
    """Train with ``Fabric`` through megabucket's buffers and its sharded optimizer.

    ``fabric.setup(model, *optimizers)`` wraps all of them. ``fabric.clip_gradients(model, optimizer, max_norm=)`` clips by the
    norm over the parameters of the optimizer on all ranks, and returns it. ``fabric.save`` writes complete state. Every rank
    makes these calls.

    Args:
        config: shards the optimizer's state if not given. With ``use_distributed_optimizer=False`` gradients are all-reduced,
            and any torch optimizers step on them as under ``strategy="ddp"``.
        **ddp_strategy: arguments of Fabric's ``DDPStrategy``. Of those of torch DDP it takes ``find_unused_parameters``.

    Raises:
        ConfigError: another argument is meant for torch DDP.
    """

    def __init__(self, config: DistributedDataParallelConfig | None = None, **ddp_strategy: Any) -> None:
        super().__init__(**ddp_strategy)
        self.config = with_torch_arguments(config, _changed(self._ddp_kwargs))
        self._backward_sync_control = _NoSync()
        self._wrappers: list[DistributedDataParallel] = []

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a module."""
        config = config_for(self.config, getattr(self.precision, "scaler", None))
        self._wrappers.append(DistributedDataParallel(module, config))
        return self._wrappers[-1]

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Any]:
        """Wrap a module, and shard its optimizers together if the config says so."""
        wrapper = self.setup_module(module)
        if self._shards:
            optimizers = sharded(optimizers, wrapper)
        return wrapper, optimizers, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Shard the optimizer of a wrapped module, if the config says so.

        Raises:
            ConfigError: its module was not set up, or it is one of several optimizers of its module.
        """
        if not self._shards:
            return optimizer
        wrapper = wrapper_of(optimizer, self._wrappers, remedy="call fabric.setup_module(model) before setup_optimizers.")
        held = {param for group in optimizer.param_groups for param in group["params"]}
        if left_out := len(wrapper.param_names.keys() - held):
            raise ConfigError(
                f"{type(optimizer).__name__} does not hold {left_out} trainable parameters of its module. Several optimizers "
                "of a module are sharded together: fabric.setup(model, first, second). Freeze what no optimizer trains before."
            )
        return FrameworkOptimizer(optimizer, wrapper)

    @property
    def _shards(self) -> bool:
        return (self.config or SHARDED).use_distributed_optimizer

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip to ``max_norm`` by the norm of the whole gradient, and return that norm.

        Raises:
            ConfigError: ``norm_type`` is below 1.
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        """
        found = whole_of(optimizer)
        if found is None:
            unsharded: torch.Tensor = super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
            return unsharded
        self.precision.unscale_gradients(optimizer)
        norm: torch.Tensor = optimizer.clip_grad_norm_(max_norm, norm_type)  # of a part, over its own parameters
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm.item()}; with error_if_nonfinite=False the step is skipped")
        return norm

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clip by value, unless gradients are sharded.

        Raises:
            ConfigError: they are.
        """
        if whole_of(optimizer) is not None:
            raise ConfigError(NO_CLIP_BY_VALUE)
        super().clip_gradients_value(module, optimizer, clip_val)

    def teardown(self) -> None:
        """Restore plain modules. Fabric does not call it: call ``fabric.strategy.teardown()``."""
        while self._wrappers:
            self._wrappers.pop().detach()
        super().teardown()


class _NoSync(_BackwardSyncControl):
    """Implements ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()


def _changed(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments without torch DDP's defaults: ``LightningCLI`` passes every argument."""
    defaults = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return {name: value for name, value in arguments.items() if value != (defaults[name].default if name in defaults else None)}


StrategyRegistry.register("megabucket", MegabucketStrategy, description=_DESCRIPTION)
STRATEGY_REGISTRY.register("megabucket", MegabucketFabricStrategy, description=_DESCRIPTION)
