"""Megatron-Core: its wrapper and its optimizer by their names and calls, over megabucket's buffers and shards.

Megatron's schedules, ``finalize_model_grads`` and training loop drive both. Neither has a mechanism of its own.
Docs: ``docs/megatron-core.md``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

import megabucket as mb
from megabucket.errors import ConfigError
from megabucket.integrations import Framework, require

require(Framework("megatron-core", (0, 16), (0, 17)), adapter=__name__, extra="megatron")

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402 - after the line that says how to install it
from megatron.core.distributed.data_parallel_base import _BaseDataParallel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

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

_FSDP: Final = "parameters are not sharded here; use Megatron's own FSDP"
_USER_BUFFERS: Final = "memory is allocated by torch, not registered with NCCL"
_NO_FP8: Final = "there are no fp8 parameters"
_TAKEN_DDP: Final = (*_SAME, "bucket_size", "check_for_nan_in_grad", "delay_wgrad_compute")
_REFUSED_DDP: Final = {
    "align_param_gather": "there are no later pipeline stages to align with",
    "num_distributed_optimizer_instances": "not compared with Megatron yet; megabucket.ReductionGroup(replicate=) does it",
    **dict.fromkeys(("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"), _NO_FP8),
    **dict.fromkeys(("disable_symmetric_registration", "nccl_ub"), _USER_BUFFERS),
    **dict.fromkeys(
        (
            "data_parallel_sharding_strategy",
            "fsdp_double_buffer",
            "fsdp_manual_registration",
            "gradient_reduce_div_fusion",
            "keep_fp8_transpose_cache",
            "outer_dp_sharding_strategy",
            "preserve_fp32_weights",
            "suggested_communication_unit_size",
            "use_custom_fsdp",
            "use_megatron_fsdp",
        ),
        _FSDP,
    ),
}
_MODEL_PARALLEL: Final = "not compared with Megatron yet; megabucket.ParallelGroups does it (docs/parallel-groups.md)"
_REFUSED_TRANSFORMER: Final = {
    "cuda_graph_impl": "backward runs Python hooks, which a captured graph leaves out",
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_tensor_parallel_size"), _MODEL_PARALLEL
    ),
}
"""The rest of a transformer's config is its layers' own."""

_TAKEN_OPTIMIZER: Final = (
    "clip_grad",
    "fp16",
    "hysteresis",
    "initial_loss_scale",
    "log_num_zeros_in_grad",
    "loss_scale",
    "loss_scale_window",
    "min_loss_scale",
    "use_distributed_optimizer",
)
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

_IGNORED_OPTIMIZER: Final = {
    **dict.fromkeys(("bf16", "params_dtype"), "parameters keep the dtypes of the module"),
    **dict.fromkeys(
        ("barrier_with_L1_time", "timers"), "an update is one call with no timers in it; no result depends on them"
    ),
    "min_lr": "Megatron's scheduler has its own",
    "overlap_param_gather": "the wrapper's config says it",
    **dict.fromkeys(
        ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype", "store_param_remainders"),
        "read with use_precision_aware_optimizer, which is refused",
    ),
    **dict.fromkeys(
        (
            "optimizer_offload_fraction",
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
            "use_torch_optimizer_for_cpu_offload",
        ),
        "read with optimizer_cpu_offload, which is refused",
    ),
    **dict.fromkeys(
        (
            "muon_extra_scale_factor",
            "muon_fp32_matmul_prec",
            "muon_momentum",
            "muon_num_ns_steps",
            "muon_scale_mode",
            "muon_split_qkv",
            "muon_tp_mode",
            "muon_use_nesterov",
        ),
        "read with optimizer='muon', which is refused",
    ),
}
_GROUPS: Final = "put parameters into groups of the torch optimizer, with max_lr, min_lr or wd_mult for Megatron's scheduler"
_REFUSED_OPTIMIZER: Final = {
    **dict.fromkeys(("apply_wd_to_qk_layernorm", "decoupled_lr", "decoupled_min_lr"), _GROUPS),
    "config_logger_dir": "configs are not written to files",
    **dict.fromkeys(("fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"), _NO_FP8),
    "optimizer": "the torch optimizer updates, elementwise: 'adam' or 'sgd'",
    "optimizer_cpu_offload": "state stays on the device of its parameters",
    "overlap_param_gather_with_optimizer_step": "an update ends before its gather begins",
    "use_precision_aware_optimizer": "main parameters and gradients of the update are float32",
}

_NOT_LAUNCHED_APART: Final = "buckets are launched in one order, by the wrapper; read ddp.wrapper.bucket_groups"
_HOOKS: Final = "hooks are set, and forward waits for parameters, in any case"
_IN_PARTS: Final = "ranks agree on an update inside step(): call that alone"
_FORMATS: Final = (
    "state_dict() holds the state of all ranks; megabucket.save_checkpoint(path, ddp.wrapper, optimizer.optimizer, step=...) "
    "writes shards that load on any number of ranks"
)
_ONE_SHARD: Final = "this rank's shards are no whole gradient; get_grad_norm() has the norm over all ranks"
_REFUSED_NAMES: Final = {
    **dict.fromkeys(("bucket_groups", "expert_parallel_bucket_groups", "param_to_bucket_group"), _NOT_LAUNCHED_APART),
    **dict.fromkeys(
        ("bucket_size", "expert_parallel_buffers"), "read ddp.wrapper.layout and ddp.wrapper.param_and_grad_buffers"
    ),
    **dict.fromkeys(("grad_accs", "remove_forward_pre_hook_handles", "use_forward_hook"), _HOOKS),
    **dict.fromkeys(("offload_grad_buffers", "restore_grad_buffers"), "buffers stay on the device of their parameters"),
}
"""What Megatron's wrapper has, and this one has not."""

_REFUSED_CALLS: Final = {
    "count_zeros": "step() counts them, with log_num_zeros_in_grad=True",
    **dict.fromkeys(("prepare_grads", "step_with_ready_grads"), _IN_PARTS),
    **dict.fromkeys(("get_grad_stats_parallel_group", "get_main_grads_for_grad_norm"), _ONE_SHARD),
    **dict.fromkeys(("offload_to_cpu", "restore_from_cpu"), "state stays on the device of its parameters"),
    **dict.fromkeys(
        ("load_parameter_state", "save_parameter_state", "sharded_state_dict", "split_state_dict_if_needed"), _FORMATS
    ),
}
"""What Megatron's optimizer has, and this one has not, without the parts of its checkpoint format."""


def _refusal(name: str, reason: str) -> property:
    def refuse(self: object) -> None:
        raise ConfigError(f"{type(self).__name__}.{name}: {reason}")

    return property(refuse)


def _refusing(reasons: dict[str, str]) -> Any:
    """Return a base class whose attributes raise ``ConfigError`` with a reason each."""
    return type("Refusing", (), {name: _refusal(name, reason) for name, reason in reasons.items()})


class DistributedDataParallel(_refusing(_REFUSED_NAMES), _BaseDataParallel):  # type: ignore[misc]
    """Megatron's wrapper, with its arguments, over megabucket's, which is ``wrapper``.

    Buffers, buckets and shards are Megatron's (``layout="megatron"``). Set ``config.no_sync_func`` to ``ddp.no_sync``, and
    ``config.finalize_model_grads_func`` to Megatron's ``finalize_model_grads``. ``ddp_config`` is not changed.

    Raises:
        ConfigError: a field asks for what is not here; the text names each one with the reason.
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
        _refuse(config, _REFUSED_TRANSFORMER, like=dict.fromkeys(_REFUSED_TRANSFORMER, 1) | {"cuda_graph_impl": "none"})
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
        groups = mb.ParallelGroups(reduction, copies=alone, norm_group=ranks["dp_cp_group"])
        # Not a submodule: names of parameters are those under Megatron's wrapper.
        self.__dict__["wrapper"] = mb.DistributedDataParallel(
            module, translated, groups=groups, disable_bucketing=disable_bucketing
        )
        self.wrapper: mb.DistributedDataParallel
        self.params_with_grad = list(self.wrapper.param_names)
        self.overlap_param_gather_with_optimizer_step = False
        if ddp_config.delay_wgrad_compute:
            self._register_delayed()

    def _register_delayed(self) -> None:
        """Let layers that compute weight gradients apart from backward say when one is there."""
        for layer in self.module.modules():
            register = getattr(layer, "register_wgrad_accumulation_and_reduce_hooks", None)
            if register is not None:
                for param in layer.parameters():
                    if param.requires_grad and getattr(param, "skip_backward_post_hook", False):
                        register(functools.partial(self.wrapper.grad_ready, param))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.wrapper(*inputs, **kwargs)

    @property
    def force_all_reduce(self) -> bool:
        """Whether gradients are all-reduced although the distributed optimizer is on."""
        return self.wrapper.force_all_reduce

    @force_all_reduce.setter
    def force_all_reduce(self, value: bool) -> None:
        self.wrapper.force_all_reduce = value

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward only accumulates."""
        return self.wrapper.no_sync()

    def start_grad_sync(self, *unused: Any) -> None:
        """Launch the reduction of every bucket that was not launched yet."""
        self.wrapper.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Leave reduced gradients in ``param.main_grad``."""
        self.wrapper.finish_grad_sync(force_all_reduce=bool(force_all_reduce))

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather updated parameters; ``optimizer.step()`` has begun it already."""
        self.wrapper.start_param_sync(force_sync=force_sync)

    def enable_forward_pre_hook(self) -> None:
        """Do nothing: forward always waits for the parameters that are being gathered."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Wait for all parameters, so that they may be read outside forward."""
        if param_sync:
            self.wrapper.finish_param_sync()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients."""
        self.wrapper.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Fill the gradient buffers with zeros, and begin a step."""
        self.wrapper.zero_grad_buffer()

    def broadcast_params(self) -> None:
        """Copy parameters from the first rank. Every rank calls it."""
        self.wrapper.broadcast_params()

    def state_dict(self, prefix: str = "", keep_vars: bool = False, destination: Any = None) -> Any:
        """Return the module's ``state_dict``, complete on every rank."""
        return self.wrapper.state_dict(prefix=prefix, keep_vars=keep_vars, destination=destination)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the module's own, once all parameters may be read."""
        self.wrapper.finish_param_sync()
        return super().state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own, once all parameters may be read."""
        self.wrapper.finish_param_sync()
        return super().sharded_state_dict(*args, **kwargs)


class DistributedOptimizer(_refusing(_REFUSED_CALLS), MegatronOptimizer):  # type: ignore[misc]
    """Megatron's optimizer calls over megabucket's ``DistributedOptimizer``, which is ``optimizer``.

    Args:
        optimizer: any elementwise torch optimizer over the parameters of the wrapped module, experts included.
        config: read for clipping (in each step) and loss scaling. The torch optimizer has its own hyperparameters; those that
            are set here must be the same.
        model_chunks: the wrapped module, alone in a list or as it is.

    Raises:
        ConfigError: a field asks for what is not here, or there are several model chunks.
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
        super().__init__(mb.DistributedOptimizer(optimizer, chunks[0].wrapper, **arguments), config)
        self.optimizer: mb.DistributedOptimizer
        self.is_stub_optimizer = False
        self.grad_scaler = _scaler_for(config)

    def step(self) -> tuple[bool, float, int | None]:
        """Clip, update and gather; return whether parameters were changed, the norm before, and the zeros if counted."""
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
        """Do nothing: gradients live in the buffers, which ``zero_grad_buffer()`` of the wrapper clears."""

    def get_loss_scale(self) -> torch.Tensor:
        """Return what losses are multiplied by, as one element."""
        scale = 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()
        return torch.full((1,), scale, device=self.optimizer.ddp.param_and_grad_buffers[0].grad_data.device)

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Finish the gradient sync, clip, and return the norm before."""
        return float(self.optimizer.clip_grad_norm_(clip_grad))

    def get_grad_norm(self) -> float:
        """Finish the gradient sync and return the norm of the whole gradient."""
        return self.clip_grad_norm(float("inf"))

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take parameter values over from the module.

        Raises:
            ConfigError: they are to come from a ``state_dict``.
        """
        if state_dict is not None:
            raise ConfigError("reload_model_params(state_dict): load it into the module, and call this without arguments")
        self.optimizer.reload_main_params()

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the state of whole parameters, on every rank, and the loss scale. A collective call."""
        scaler = {} if self.grad_scaler is None else {"grad_scaler": self.grad_scaler.state_dict()}
        return {"optimizer": self.optimizer.state_dict(), **scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` gave. A collective call."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])


def config_from(
    ddp_config: DistributedDataParallelConfig, *, is_loss_per_token: bool = False
) -> mb.DistributedDataParallelConfig:
    """Return megabucket's config of one of Megatron's.

    Args:
        is_loss_per_token: losses are sums over tokens, and gradients are divided by ``finalize_model_grads``.

    Raises:
        ConfigError: a field asks for what is not here.
    """
    _refuse(ddp_config, _REFUSED_DDP, like=vars(DistributedDataParallelConfig()), known=_TAKEN_DDP)
    return mb.DistributedDataParallelConfig(
        **{name: getattr(ddp_config, name) for name in _SAME},
        bucket_size=ddp_config.bucket_size,
        layout="megatron",
        finish="explicit",
        grad_reduction="sum" if is_loss_per_token else "mean",
        nonfinite_gradients="error" if ddp_config.check_for_nan_in_grad else "allow",
        unused_parameters="zero",
    )


def _check_optimizer_config(config: OptimizerConfig, optimizer: torch.optim.Optimizer, *, is_sharded: bool) -> None:
    defaults = dict(optimizer.defaults)
    defaults["adam_beta1"], defaults["adam_beta2"] = defaults.get("betas", (None, None))
    defaults["adam_eps"], defaults["sgd_momentum"] = defaults.get("eps"), defaults.get("momentum")
    like = vars(OptimizerConfig()) | {"use_distributed_optimizer": is_sharded}
    if config.optimizer == "sgd":
        like["optimizer"] = "sgd"
    reasons = {**_REFUSED_OPTIMIZER, "use_distributed_optimizer": f"the wrapper has use_distributed_optimizer={is_sharded}"}
    for name in _HYPERPARAMETERS:
        if getattr(config, name) == defaults.get(name):
            like[name] = defaults[name]
        reasons[name] = f"the torch optimizer has {defaults.get(name)}; leave it at {like[name]}, or make them alike"
    _refuse(config, reasons, like=like, known=(*_TAKEN_OPTIMIZER, *_IGNORED_OPTIMIZER))


def _refuse(config: Any, reasons: dict[str, str], *, like: dict[str, Any], known: Sequence[str] | None = None) -> None:
    """Refuse fields that have another value than in ``like``.

    Args:
        known: all fields that ``reasons`` leaves out; ``None``: any.

    Raises:
        ConfigError: there is one.
    """
    if known is not None:
        unknown = {field.name for field in dataclasses.fields(config)} - {*reasons, *known}
        reasons = reasons | dict.fromkeys(sorted(unknown & like.keys()), "this adapter does not know the field")
    problems = [
        f"{name}={found!r}: {reason}" for name, reason in reasons.items() if (found := getattr(config, name)) != like[name]
    ]
    if problems:
        raise ConfigError(f"{type(config).__name__}: {'; '.join(problems)}", problems=problems)


def _scaler_for(config: OptimizerConfig) -> mb.ConstantGradScaler | mb.DynamicGradScaler | None:
    if config.loss_scale:
        return mb.ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return mb.DynamicGradScaler(
        config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )
