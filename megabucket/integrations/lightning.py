"""Lightning: ``strategy="megabucket"`` for a ``Trainer`` or ``Fabric``, once this module was imported.

Both strategies are Lightning's own ``DDPStrategy`` with another wrapper, another optimizer and another norm: process group,
launcher, samplers, precision and checkpoint files stay Lightning's. Docs: ``docs/lightning.md``.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, MegabucketError
from megabucket.integrations import NO_CLIP_BY_VALUE, Framework, FrameworkOptimizer, config_for, require, wrapper_of

require(Framework("lightning", (2, 6), (2, 7)), adapter=__name__, extra="lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402 - after the line that says how to install it
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402
from lightning.pytorch.trainer.states import TrainerStatus  # noqa: E402

_OF_TORCH_DDP = frozenset({"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"})
_DESCRIPTION = "megabucket: gradients reduced in buckets while backward runs, and a sharded optimizer"


class MegabucketStrategy(DDPStrategy):
    """Train a ``LightningModule`` through megabucket's buffers and its sharded optimizer.

    ``Trainer(gradient_clip_val=)`` and ``self.clip_gradients`` clip by the norm of the whole gradient. Checkpoints are
    Lightning's: complete, in one file, for any number of devices and for ``strategy="ddp"``. After ``fit`` the module and its
    optimizer are plain ones, with complete state.

    Args:
        config: shards the optimizer's state if not given.
        **ddp_strategy: arguments of Lightning's ``DDPStrategy``, except those of torch DDP.

    Raises:
        ConfigError: an argument is meant for torch DDP.
    """

    optimizers: list[Any]  # a property of Lightning's

    def __init__(self, config: DistributedDataParallelConfig | None = None, **ddp_strategy: Any) -> None:
        super().__init__(**ddp_strategy)
        _refuse_arguments_of_torch_ddp({*self._ddp_kwargs, *(_OF_TORCH_DDP & ddp_strategy.keys())})
        self.config = config
        self._wrapper: DistributedDataParallel | None = None

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        config = config_for(self.config, getattr(self.precision_plugin, "scaler", None))
        self._wrapper = DistributedDataParallel(model, config)
        return self._wrapper

    def _register_ddp_hooks(self) -> None:
        """Register nothing: communication hooks are torch DDP's, and were refused."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizer of the module, and shard it.

        Raises:
            ConfigError: there are several.
        """
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers() gave {len(self.optimizers)} optimizers, and one steps on the shards of a module. If "
                "they step together, make them groups of one. If each has a loss of its own, as in a GAN, use Fabric with "
                "fabric.setup(module, optimizer) for each; or strategy='ddp'."
            )
        self.optimizers = [FrameworkOptimizer(self.optimizers[0], self.model)]
        # The trainer, self.clip_gradients and plugins clip through these two, which would clip by one rank's shards.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self.precision_plugin.clip_grad_by_value = self._refuse_clip_by_value

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.optimizers[0].clip_grad = float(clip_val)  # step() takes the norm, once and of the whole gradient

    def _refuse_clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        raise ConfigError(NO_CLIP_BY_VALUE)

    def teardown(self) -> None:
        """Restore a plain module, and a plain optimizer with complete state unless training has failed."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            self.model = self.lightning_module
            for name in ("clip_grad_by_norm", "clip_grad_by_value"):
                self.precision_plugin.__dict__.pop(name, None)
            trainer = self.lightning_module._trainer
            if trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED:
                with suppress(MegabucketError):  # the first error must stay visible
                    wrapper.detach()
            else:
                optimizer: FrameworkOptimizer = self.optimizers[0]
                optimizer.zero_grad()  # a last batch may not have been stepped on
                optimizer.before_rebuild()
                self.optimizers = [optimizer.torch_optimizer]
                wrapper.detach()
        super().teardown()


class MegabucketFabricStrategy(FabricDDPStrategy):
    """Train with ``Fabric`` through megabucket's buffers and its sharded optimizer.

    ``fabric.setup(model, optimizer)`` wraps both. ``fabric.clip_gradients(model, optimizer, max_norm=)`` clips by the norm of
    the whole gradient and returns it. ``fabric.save`` writes complete state. Every rank makes these calls.

    Args:
        config: shards the optimizer's state if not given.
        **ddp_strategy: arguments of Fabric's ``DDPStrategy``, except those of torch DDP.

    Raises:
        ConfigError: an argument is meant for torch DDP.
    """

    def __init__(self, config: DistributedDataParallelConfig | None = None, **ddp_strategy: Any) -> None:
        super().__init__(**ddp_strategy)
        _refuse_arguments_of_torch_ddp({*self._ddp_kwargs})
        self.config = config
        self._backward_sync_control = _NoSync()
        self._wrappers: list[DistributedDataParallel] = []

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a module."""
        config = config_for(self.config, getattr(self.precision, "scaler", None))
        self._wrappers.append(DistributedDataParallel(module, config))
        return self._wrappers[-1]

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> FrameworkOptimizer:
        """Shard the optimizer of a wrapped module.

        Raises:
            ConfigError: its module was not set up.
        """
        wrapper = wrapper_of(optimizer, self._wrappers, remedy="call fabric.setup_module(model) before setup_optimizers.")
        return FrameworkOptimizer(optimizer, wrapper)

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
        self.precision.unscale_gradients(optimizer)
        norm: torch.Tensor = optimizer.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm.item()}; with error_if_nonfinite=False the step is skipped")
        return norm

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: Any, clip_val: float) -> None:
        """Refuse to clip by value.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(NO_CLIP_BY_VALUE)

    def teardown(self) -> None:
        """Restore plain modules. Fabric does not call it: call ``fabric.strategy.teardown()``."""
        while self._wrappers:
            self._wrappers.pop().detach()
        super().teardown()


class _NoSync(_BackwardSyncControl):
    """Implements ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()


def _refuse_arguments_of_torch_ddp(given: set[str]) -> None:
    """Refuse arguments that Lightning would pass on to torch DDP.

    Raises:
        ConfigError: there are some.
    """
    if given:
        raise ConfigError(
            f"{', '.join(sorted(given))}: these are arguments of torch DDP. megabucket takes a DistributedDataParallelConfig: "
            'MegabucketStrategy(DistributedDataParallelConfig(unused_parameters="zero", bucket_cap_mb=25)), for instance.'
        )


StrategyRegistry.register("megabucket", MegabucketStrategy, description=_DESCRIPTION)
STRATEGY_REGISTRY.register("megabucket", MegabucketFabricStrategy, description=_DESCRIPTION)
