"""Hugging Face: ``MegabucketAccelerator`` for a loop with accelerate, ``MegabucketTrainer`` for transformers.

Both are subclasses; nothing of either library is patched. Files are those of the libraries: ``optimizer.pt`` and
``optimizer.bin`` hold the complete state for any number of ranks. Docs: ``docs/hugging-face.md``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import CheckpointMismatchError, ConfigError, PhaseError
from megabucket.integrations import (
    NO_CLIP_BY_VALUE,
    SHARDED,
    Framework,
    FrameworkOptimizer,
    config_for,
    require,
    sharded_by_wrapper,
    whole_of,
    with_torch_arguments,
)

require(
    Framework("transformers", (5, 23), (5, 24)),
    Framework("accelerate", (1, 15), (1, 16)),
    adapter=__name__,
    extra="hf",
)

from accelerate import Accelerator  # noqa: E402 - after the line that says how to install it
from accelerate.utils import DistributedDataParallelKwargs, DistributedType  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import Trainer  # noqa: E402

_OTHER_WAYS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class MegabucketAccelerator(Accelerator):
    """An ``Accelerator`` whose models are wrapped by megabucket and whose optimizers step on shards.

    Call ``prepare(model, optimizer, ...)``, ``accumulate``, ``clip_grad_norm_``, ``save_state`` and ``load_state`` on every
    rank. ``end_training()`` restores plain models.

    Args:
        ddp_config: shards the optimizer's state if not given. With ``use_distributed_optimizer=False`` gradients are
            all-reduced, and any torch optimizers step on them as under torch DDP.

    Raises:
        ConfigError: ``DistributedDataParallelKwargs`` has other arguments of torch DDP than ``find_unused_parameters``.
    """

    ddp_config: DistributedDataParallelConfig | None = None
    _given: Sequence[torch.optim.Optimizer] = ()  # the optimizers of one call of ``prepare``, and what steps for each
    _made: Sequence[torch.optim.Optimizer] = ()

    def __init__(self, *args: Any, ddp_config: DistributedDataParallelConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        handler = self.ddp_handler or DistributedDataParallelKwargs()
        defaults = vars(DistributedDataParallelKwargs())
        given = {name: value for name, value in vars(handler).items() if value != defaults[name]}
        self.ddp_config = with_torch_arguments(ddp_config, given)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers and the rest, given in any order. The optimizers of one model are sharded together.

        Raises:
            ConfigError: an optimizer's model was not prepared.
            OptimizerParametersError: the optimizers of a model do not hold each of its trainable parameters once.
        """
        order = sorted(range(len(args)), key=lambda index: not isinstance(args[index], torch.nn.Module))  # models first
        ordered = [args[index] for index in order]
        placement = device_placement and [device_placement[index] for index in order]
        optimizers = [one for one in ordered if isinstance(one, torch.optim.Optimizer)]
        self._given = [one for one in optimizers if not getattr(one, "_is_accelerate_prepared", False)]
        try:
            prepared = super().prepare(*ordered, device_placement=placement)
        finally:
            self._given = self._made = ()
        if len(args) == 1:
            return prepared
        return tuple(prepared[order.index(index)] for index in range(len(args)))

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Apply device, precision and compilation as accelerate does, and wrap models with trainable parameters.

        Raises:
            ConfigError: accelerate is configured for FSDP, DeepSpeed or the like.
        """
        is_trained = not evaluation_mode and any(param.requires_grad for param in model.parameters())
        if isinstance(model, DistributedDataParallel) or not is_trained:
            return super().prepare_model(model, device_placement, evaluation_mode)
        if self.distributed_type in _OTHER_WAYS:
            raise ConfigError(
                f"accelerate is configured for {self.distributed_type.value}, and megabucket replaces it; start with "
                "torchrun, or `accelerate launch --multi_gpu`."
            )
        ready = super().prepare_model(model, device_placement, evaluation_mode=True)
        wrapper = DistributedDataParallel(ready, config_for(self.ddp_config, self.scaler))
        self._models[-1] = wrapper
        return wrapper

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Shard the optimizer of a prepared model, if the config says so.

        Raises:
            ConfigError: its model was not prepared.
        """
        if not self._is_sharded:
            return super().prepare_optimizer(optimizer, device_placement)
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = self._sharded(optimizer)
        # Moving it would gather the state and load it again; it is on the model's device already.
        return super().prepare_optimizer(optimizer, device_placement=False)

    def _sharded(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if not any(optimizer is one for one in self._given):  # outside prepare()
            self._given, self._made = [optimizer], ()
        if not self._made:
            remedy = "prepare(model, optimizer, ...) together; models of other frameworks need their own Accelerator."
            self._made = sharded_by_wrapper(self._given, self._models, remedy=remedy, returns_grad_norm=False)
        return next(made for given, made in zip(self._given, self._made, strict=True) if given is optimizer)

    @property
    def _is_sharded(self) -> bool:
        return (self.ddp_config or SHARDED).use_distributed_optimizer

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Accumulate gradients without a sync, also on one rank."""
        context = model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model)
        with context:
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip to ``max_norm`` by the norm of the whole gradient, and return that norm.

        Args:
            parameters: all parameters of a model, or all of one of its optimizers.

        Raises:
            ConfigError: parameters are missing, or ``norm_type`` is below 1.
            PhaseError: gradients are still accumulated.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        of_whole: dict[FrameworkOptimizer, list[Any]] = {}
        for prepared in self._optimizers:
            if (found := whole_of(prepared.optimizer)) is not None:
                of_whole.setdefault(found[0], []).append(prepared)
        for whole, of_model in of_whole.items():
            if whole.ddp.param_names.keys().isdisjoint(given):
                continue
            clipped, stepping = self._clipped_by(whole, of_model, set(given))
            if not self.sync_gradients:
                raise PhaseError("gradients are still accumulated: call clip_grad_norm_ if accelerator.sync_gradients.")
            self.unscale_gradients(stepping)
            norm: torch.Tensor = clipped.clip_grad_norm_(max_norm, norm_type)
            return norm
        return super().clip_grad_norm_(given, max_norm, norm_type)  # type: ignore[no-any-return]

    @staticmethod
    def _clipped_by(whole: FrameworkOptimizer, of_model: list[Any], given: set[Any]) -> tuple[Any, list[Any]]:
        """Return the optimizer that clips these parameters, and the prepared ones that step on them."""
        params = whole.ddp.param_names.keys()
        if params <= given:
            return whole, of_model
        for prepared in of_model:
            held = {param for group in prepared.param_groups for param in group["params"]} & params
            if held == params & given:
                return prepared.optimizer, [prepared]
        raise ConfigError(
            f"clip_grad_norm_ got {len(given)} parameters, and {len(params - given)} of the model are missing: an optimizer "
            "has one norm over all of its parameters, and a part cannot be clipped alone. Pass model.parameters(), or all "
            "parameters of one optimizer."
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip by value, unless gradients are sharded.

        Raises:
            ConfigError: they are.
        """
        if self._is_sharded:
            raise ConfigError(NO_CLIP_BY_VALUE)
        super().clip_grad_value_(parameters, clip_value)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model inside our wrapper, and inside accelerate's."""
        return super().unwrap_model(model.module if isinstance(model, DistributedDataParallel) else model, *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return copies of the weights: accelerate mistakes all weights in one buffer for one tied weight and saves one."""
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}  # one of each tied weight
        found: OrderedDict[str, Any] = OrderedDict()  # accelerate finds tied weights in this type only
        for name, value in super().get_state_dict(model, unwrap).items():
            found[name] = value
            if isinstance(value, torch.Tensor):
                key = (value.data_ptr(), value.shape)
                found[name] = copies[key] = copies[key] if key in copies else value.clone()
        return found

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **load_model_kwargs: Any) -> None:
        """Load a checkpoint of ``save_state``, on any number of ranks."""
        handle = self.register_load_state_pre_hook(_load_weights)
        try:
            super().load_state(input_dir, load_kwargs, **load_model_kwargs)
        finally:
            handle.remove()

    def end_training(self) -> None:
        """Restore plain models, then end the process group."""
        self.wait_for_everyone()
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                model.detach()
        super().end_training()


def _load_weights(models: list[torch.nn.Module], input_dir: str) -> None:
    """Load our wrappers and remove them from the list: accelerate mistakes weights in one buffer for tied ones.

    Raises:
        CheckpointMismatchError: the file has other weights than the model.
    """
    paths = [
        Path(input_dir) / ("model.safetensors" if index == 0 else f"model_{index}.safetensors") for index in range(len(models))
    ]
    if not all(isinstance(model, DistributedDataParallel) for model in models) or not all(path.exists() for path in paths):
        return  # accelerate loads the models that stay in the list
    for model, path in zip(models, paths, strict=True):
        missing, unexpected = model.load_state_dict(load_file(path), strict=False)
        held = model.state_dict(keep_vars=True)
        loaded = {id(value) for name, value in held.items() if name not in missing}
        problems = [f"{name} is missing" for name in missing if id(held[name]) not in loaded]
        problems += [f"{name} is unknown" for name in unexpected]
        if problems:
            raise CheckpointMismatchError(path=str(path), problems=problems)
    models.clear()


class MegabucketTrainerMixin:
    """Lets a subclass of ``transformers.Trainer`` train with megabucket: ``class T(MegabucketTrainerMixin, SFTTrainer)``.

    Args:
        ddp_config: as that of ``MegabucketAccelerator``.

    Raises:
        ConfigError: training arguments are meant for torch DDP. It takes ``ddp_find_unused_parameters``.
    """

    args: Any
    accelerator: Any
    optimizer: Any

    def __init__(self, *args: Any, ddp_config: DistributedDataParallelConfig | None = None, **kwargs: Any) -> None:
        self._ddp_config = ddp_config
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Let the trainer make its accelerator, then change its class to ours."""
        names = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
        values = {name: getattr(self.args, f"ddp_{name}", None) for name in names}
        given = {name: value for name, value in values.items() if value is not None}
        ddp_config = with_torch_arguments(self._ddp_config, given, prefix="ddp_")
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # The trainer chooses the class and passes on bound methods of the object, so the object must stay. Our class adds
        # methods and one attribute.
        self.accelerator.__class__ = MegabucketAccelerator
        self.accelerator.ddp_config = ddp_config

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of all ranks. The trainer calls ``state_dict()`` on one rank; gathering takes all."""
        state, optimizer = self.optimizer.state_dict(), self.optimizer
        self.optimizer = SimpleNamespace(state_dict=lambda: state)
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            self.optimizer = optimizer


class MegabucketTrainer(MegabucketTrainerMixin, Trainer):
    """``transformers.Trainer`` with megabucket: the same arguments, and ``ddp_config``.

    ``max_grad_norm`` clips by the norm of the whole gradient, and ``grad_norm`` in the logs is that norm. Checkpoints are the
    trainer's own, complete, for any number of ranks.
    """
