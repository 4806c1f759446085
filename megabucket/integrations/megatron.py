"""Megatron-Core's wrapper and optimizer, with its names and calls, over megabucket's buffers and shards.

Megatron's schedules, ``finalize_model_grads`` and training loop drive both. Docs: ``docs/megatron-core.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from megabucket import ddp, optim
from megabucket.config.ddp import DistributedDataParallelConfig as Config
from megabucket.ddp.groups import ParallelGroups
from megabucket.errors import ConfigError
from megabucket.integrations import Framework, require

require(Framework("megatron-core", (0, 16), (0, 17)), adapter=__name__, extra="megatron")

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402 - after the line that says how to install it
from megatron.core.distributed.data_parallel_base import _BaseDataParallel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megabucket.integrations import megatron_checkpoint  # noqa: E402 - imports Megatron as well

_SAME: Final = (
    "average_in_collective",
    "check_for_large_grads",
    "grad_reduce_in_fp32",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation",
    "use_distributed_optimizer",
)
"""Fields that have the same name and meaning."""

_TAKEN_DDP: Final = frozenset({*_SAME, "bucket_size", "check_for_nan_in_grad", "delay_wgrad_compute"})
_MODEL_PARALLEL: Final = "not compared with Megatron yet; megabucket.ParallelGroups does it (docs/parallel-groups.md)"
_TAKEN_TRANSFORMER: Final = {
    "cuda_graph_impl": "none",  # backward runs Python hooks, which a captured graph leaves out
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_tensor_parallel_size"), 1),
}
"""The only values that are supported. The other fields belong to the layers."""

_TAKEN_OPTIMIZER: Final = frozenset(
    {
        "barrier_with_L1_time",  # an update is one call without timers
        "bf16",  # parameters keep the dtypes of the module
        "clip_grad",
        "fp16",
        "hysteresis",
        "initial_loss_scale",
        "log_num_zeros_in_grad",
        "loss_scale",
        "loss_scale_window",
        "min_loss_scale",
        "min_lr",  # Megatron's scheduler has its own
        "overlap_param_gather",  # read from the wrapper's config
        "params_dtype",
        "timers",
    }
)
_UNREAD_OPTIMIZER: Final = (
    *("exp_avg_", "main_", "store_param_"),  # use_precision_aware_optimizer
    "muon_",  # optimizer="muon"
    *("optimizer_offload_", "overlap_cpu_", "pin_cpu_", "use_torch_optimizer_for_cpu_offload"),  # optimizer_cpu_offload
)
"""Beginnings of fields that Megatron reads only with the values in the comments, which are refused."""

_HYPERPARAMETERS: Final = (
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "decoupled_weight_decay",
    "lr",
    "sgd_momentum",
    "weight_decay",
)
"""Fields that the torch optimizer must agree with, where they are set."""

_REASONS: Final = {
    ("num_distributed_optimizer_instances", "tensor_model_", "pipeline_model_", "expert_tensor_"): _MODEL_PARALLEL,
    ("use_megatron_fsdp", "use_custom_fsdp", "fsdp_", "data_parallel_sharding", "outer_dp_"): "parameters are not sharded",
    ("suggested_communication_unit", "preserve_fp32_", "keep_fp8_", "gradient_reduce_div_"): "parameters are not sharded",
    ("nccl_ub", "disable_symmetric_registration"): "memory is not registered with NCCL",
    ("fp8_", "reuse_grad_buf_for_mxfp8_"): "there are no fp8 parameters",
    ("align_param_gather",): "there are no later pipeline stages",
    ("cuda_graph_impl",): "backward runs Python hooks, which a captured graph leaves out",
    ("decoupled_lr", "decoupled_min_lr", "apply_wd_to_qk_"): "use groups of the torch optimizer",
    ("use_distributed_optimizer",): "as in the config of the wrapper",
    _HYPERPARAMETERS: "as in the torch optimizer",
    ("optimizer", "use_precision_aware_", "overlap_param_gather_with_", "config_logger_dir"): "there is no such update",
}
"""Why fields are refused, by the beginnings of their names; the first that fits."""

_CHECKPOINT: Final = "call megabucket.{}_checkpoint(path, ddp.wrapper, optimizer.optimizer), which also has the weights"
_INSTEAD: Final = {
    "bucket_groups": "read ddp.wrapper.bucket_groups",
    "expert_parallel_bucket_groups": "read ddp.wrapper.bucket_groups, which has those of experts as well",
    "expert_parallel_buffers": "read ddp.wrapper.param_and_grad_buffers, which has those of experts as well",
    "load_parameter_state": _CHECKPOINT.format("load"),
    "param_to_bucket_group": "read ddp.wrapper.bucket_groups",
    "remove_forward_pre_hook_handles": "drop it: forward always waits for the parameter gather",
    "save_parameter_state": _CHECKPOINT.format("save"),
    "split_state_dict_if_needed": "drop it: state_dict() and load_state_dict() are about whole parameters",
}
"""Names of Megatron's that the adapter lacks, and what to do instead."""


def _missing(owner: object, name: str) -> AttributeError:
    return AttributeError(f"{type(owner).__name__} of the adapter has no {name}; {_INSTEAD[name]}", name=name, obj=owner)


class DistributedDataParallel(_BaseDataParallel):
    """Megatron's wrapper, with its arguments, over megabucket's, which is ``wrapper``.

    Buffers, buckets and shards are Megatron's (``layout="megatron"``). Set ``config.no_sync_func`` to ``ddp.no_sync``, and
    ``config.finalize_model_grads_func`` to Megatron's ``finalize_model_grads``. ``ddp_config`` is not changed.

    Raises:
        ConfigError: a field has a value that is not supported; the text names each one.
        MegabucketError: what wrapping raises.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        translated = config_from(ddp_config, is_loss_per_token=config.calculate_per_token_loss)
        _check_fields(config, _TAKEN_TRANSFORMER)
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config
        ranks = ProcessGroupCollection.setup_process_groups_for_ddp(pg_collection, config, ddp_config)
        for name, group in ranks.items():  # dp_group, expt_dp_group, ...
            setattr(self, name, group)
        reduction = {"dense": ranks["dp_cp_group"]}
        if not all(getattr(param, "allreduce", True) for param in module.parameters()):
            reduction["expert"] = ranks["expt_dp_group"]
        # Megatron's layers mark parameters as tensor-parallel also where that has one rank.
        alone = dict.fromkeys(("tp", "expert_tp"), ranks["tp_group"])
        groups = ParallelGroups(reduction, copies=alone, norm_group=ranks["dp_cp_group"])
        # Not a submodule: names of parameters are those under Megatron's wrapper.
        self.__dict__["wrapper"] = ddp.DistributedDataParallel(
            module, translated, groups=groups, disable_bucketing=disable_bucketing
        )
        self.wrapper: ddp.DistributedDataParallel
        self.params_with_grad = list(self.wrapper.param_names)
        self.overlap_param_gather_with_optimizer_step = False
        if ddp_config.delay_wgrad_compute:
            self._register_delayed()

    def _register_delayed(self) -> None:
        """Have layers that compute weight gradients apart from backward report each gradient."""
        for layer in self.module.modules():
            register = getattr(layer, "register_wgrad_accumulation_and_reduce_hooks", None)
            if register is not None:
                for param in layer.parameters():
                    if param.requires_grad and getattr(param, "skip_backward_post_hook", False):
                        register(functools.partial(self.wrapper.grad_ready, param))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute as torch's modules do, or say what stands in for one of Megatron's."""
        if name in _INSTEAD:
            raise _missing(self, name)
        return super().__getattr__(name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.wrapper(*inputs, **kwargs)

    @property
    def force_all_reduce(self) -> bool:
        """Whether gradients are all-reduced although the optimizer is sharded."""
        return self.wrapper.force_all_reduce

    @force_all_reduce.setter
    def force_all_reduce(self, value: bool) -> None:
        self.wrapper.force_all_reduce = value

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward only accumulates."""
        return self.wrapper.no_sync()

    def start_grad_sync(self, *unused: Any) -> None:
        """Launch the reduction of the remaining buckets."""
        self.wrapper.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish the reduction of gradients into ``param.main_grad``."""
        self.wrapper.finish_grad_sync(force_all_reduce=bool(force_all_reduce))

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather updated parameters; ``optimizer.step()`` begins this itself."""
        self.wrapper.start_param_sync(force_sync=force_sync)

    def enable_forward_pre_hook(self) -> None:
        """Do nothing: forward always waits for the parameter gather."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Wait for the parameter gather, so that parameters may be read outside forward."""
        if param_sync:
            self.wrapper.finish_param_sync()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients."""
        self.wrapper.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Zero the gradient buffers and begin a step."""
        self.wrapper.zero_grad_buffer()

    def broadcast_params(self) -> None:
        """Copy parameters from the first rank. A collective call."""
        self.wrapper.broadcast_params()

    def state_dict(self, prefix: str = "", keep_vars: bool = False, destination: Any = None) -> Any:
        """Return the module's ``state_dict``, complete on every rank."""
        return self.wrapper.state_dict(prefix=prefix, keep_vars=keep_vars, destination=destination)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the module's own after the parameter gather."""
        self.wrapper.finish_param_sync()
        return super().state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own after the parameter gather."""
        self.wrapper.finish_param_sync()
        return super().sharded_state_dict(*args, **kwargs)


class DistributedOptimizer(MegatronOptimizer):
    """Megatron's optimizer calls over megabucket's ``DistributedOptimizer``, which is ``optimizer``.

    Args:
        optimizer: any elementwise torch optimizer over the parameters of the wrapped module, experts included.
        config: for clipping (in each step) and loss scaling. Hyperparameters that it sets must equal the torch optimizer's.
        model_chunks: the wrapped module, or a list of it.

    Raises:
        ConfigError: a field has a value that is not supported, or there are several model chunks.
        MegabucketError: what ``megabucket.DistributedOptimizer`` raises.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        model_chunks: DistributedDataParallel | Sequence[DistributedDataParallel],
    ) -> None:
        chunks = [model_chunks] if isinstance(model_chunks, DistributedDataParallel) else list(model_chunks)
        if len(chunks) != 1:
            raise ConfigError(f"{len(chunks)} model chunks: {_MODEL_PARALLEL}")
        _check_optimizer_config(config, optimizer, is_sharded=chunks[0].ddp_config.use_distributed_optimizer)
        arguments = {"clip_grad": config.clip_grad, "returns_num_zeros": config.log_num_zeros_in_grad}
        super().__init__(optim.DistributedOptimizer(optimizer, chunks[0].wrapper, **arguments), config)
        self.optimizer: optim.DistributedOptimizer
        self.is_stub_optimizer = False
        self.grad_scaler = _scaler_for(config)

    def __getattr__(self, name: str) -> Any:
        """Say what stands in for an attribute of Megatron's."""
        if name in _INSTEAD:
            raise _missing(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def step(self) -> tuple[bool, float, int | None]:
        """Clip, update and gather; return whether parameters changed, the norm before clipping, and the zeros if counted."""
        self.optimizer.clip_grad = float(self.config.clip_grad)
        if self.grad_scaler is None:
            self.optimizer.step()
        else:
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        result = self.optimizer.last_step
        assert result is not None  # noqa: S101 - for mypy: a step has just ended
        return result.updated, result.grad_norm, result.num_zeros

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: ``zero_grad_buffer()`` of the wrapper clears gradients."""

    def get_loss_scale(self) -> torch.Tensor:
        """Return the loss scale as a tensor of one element."""
        scale = 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()
        return torch.full(
            (1,), scale, dtype=torch.float32, device=self.optimizer.ddp.param_and_grad_buffers[0].grad_data.device
        )

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Finish the gradient sync, clip, and return the norm before clipping."""
        return float(self.optimizer.clip_grad_norm_(clip_grad))

    def get_grad_norm(self) -> float:
        """Finish the gradient sync and return the norm of the whole gradient."""
        return self.clip_grad_norm(float("inf"))

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Copy parameter values from the module.

        Raises:
            ConfigError: ``state_dict`` is given.
        """
        if state_dict is not None:
            raise ConfigError("reload_model_params(state_dict): load it into the module, and call this without arguments")
        self.optimizer.reload_main_params()

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the state of whole parameters, on every rank, and the loss scale. A collective call."""
        scaler = {} if self.grad_scaler is None else {"grad_scaler": self.grad_scaler.state_dict()}
        return {"optimizer": self.optimizer.state_dict(), **scaler}

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        """Load a result of ``state_dict``, or of ``dist_checkpointing.load`` into ``sharded_state_dict``. A collective call.

        Raises:
            CheckpointMismatchError: it lacks values, or has other groups.
        """
        if "state" in state_dict.get("optimizer", ()):
            self.optimizer.load_state_dict(state_dict["optimizer"])
        else:
            optimizers = [self.optimizer]
            for one, state in zip(optimizers, megatron_checkpoint.whole_states(optimizers, state_dict), strict=True):
                one.load_state_dict(dict(state))
            state_dict = state_dict.get(0, state_dict)
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[Any, Any]:
        """Return the state for Megatron's ``dist_checkpointing``, in its format ``fully_reshardable``. Collective, to save.

        Raises:
            ConfigError: another format is asked for, the optimizer is not torch's Adam or AdamW, its groups cannot be told
                apart, or the model's state lacks a parameter.
        """
        asked = {"distrib_optim_sharding_type": sharding_type} if sharding_type else {}
        # Megatron's scale is a tensor.
        own = {} if self.grad_scaler is None else {**self.grad_scaler.state_dict(), "scale": self.get_loss_scale()}
        common = {"grad_scaler": own} if own else {}
        return megatron_checkpoint.sharded_state(
            [self.optimizer], model_sharded_state_dict, common, is_loading=is_loading, metadata={**(metadata or {}), **asked}
        )

    def _refuse_call(self, *_: object, **__: object) -> Any:
        """Refuse the parts of an update, which the ranks agree on as a whole.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "Megatron's method is not supported: an update is one call of step(), and no rank holds the whole "
            "gradient or all state. step() counts zeros with log_num_zeros_in_grad=True, get_grad_norm() returns the norm over "
            "all ranks, and megabucket.save_checkpoint(path, ddp.wrapper, optimizer.optimizer, step=...) writes shards."
        )

    count_zeros = get_grad_stats_parallel_group = get_main_grads_for_grad_norm = _refuse_call
    offload_to_cpu = restore_from_cpu = prepare_grads = step_with_ready_grads = _refuse_call


def config_from(ddp_config: DistributedDataParallelConfig, *, is_loss_per_token: bool = False) -> Config:
    """Return megabucket's config for Megatron's.

    Args:
        is_loss_per_token: losses are sums over tokens, and ``finalize_model_grads`` divides gradients.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    defaults = vars(DistributedDataParallelConfig())
    _check_fields(ddp_config, {name: value for name, value in defaults.items() if name not in _TAKEN_DDP})
    return Config(
        **{name: getattr(ddp_config, name) for name in _SAME},
        bucket_size=ddp_config.bucket_size,
        layout="megatron",
        finish="explicit",
        grad_reduction="sum" if is_loss_per_token else "mean",
        nonfinite_gradients="error" if ddp_config.check_for_nan_in_grad else "allow",
        unused_parameters="zero",
    )


def _check_optimizer_config(config: OptimizerConfig, optimizer: torch.optim.Optimizer, *, is_sharded: bool) -> None:
    own = dict(optimizer.defaults)
    own["adam_beta1"], own["adam_beta2"] = own.get("betas", (None, None))
    own["adam_eps"], own["sgd_momentum"] = own.get("eps"), own.get("momentum")
    supported = vars(OptimizerConfig()) | {"use_distributed_optimizer": is_sharded}
    if config.optimizer == "sgd":
        supported["optimizer"] = "sgd"
    for name in _HYPERPARAMETERS:
        if getattr(config, name) != supported[name]:  # set by the caller
            supported[name] = own.get(name)
    names = [name for name in supported if name not in _TAKEN_OPTIMIZER and not name.startswith(_UNREAD_OPTIMIZER)]
    _check_fields(config, {name: supported[name] for name in names})


def _check_fields(config: Any, supported: Mapping[str, Any]) -> None:
    """Refuse other values than the supported ones.

    Raises:
        ConfigError: there is one.
    """
    found = {name: getattr(config, name) for name in supported}
    problems = [
        f"{name}={found[name]!r} (must be {value!r}: {_reason(name)})"
        for name, value in supported.items()
        if found[name] != value
    ]
    if problems:
        text = f"{type(config).__name__} has values that are not supported: {', '.join(problems)}"
        raise ConfigError(f"{text}. All refused fields are in docs/migrate/megatron.md.", problems=problems)


def _reason(field: str) -> str:
    return next((why for beginnings, why in _REASONS.items() if field.startswith(beginnings)), "not known to the adapter")


def _scaler_for(config: OptimizerConfig) -> optim.ConstantGradScaler | optim.DynamicGradScaler | None:
    if config.loss_scale:
        return optim.ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return optim.DynamicGradScaler(
        config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )
