"""Megatron-Core's wrapper and optimizer, with its names and calls, over megabucket's buffers and shards.

Megatron's schedules, ``finalize_model_grads`` and training loop drive both. Docs: ``docs/megatron-core.md``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from megabucket import ddp, optim
from megabucket.comm.torch import default_group_of
from megabucket.config.ddp import DistributedDataParallelConfig as Config
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.errors import ConfigError
from megabucket.integrations import Framework, require
from megabucket.layout.identity import ParamIdentity, megatron_identity
from megabucket.optim.chained import ChainedOptimizer

require(Framework("megatron-core", (0, 16), (0, 17)), adapter=__name__, extra="megatron")

from megatron.core.distributed import DistributedDataParallel as MegatronDDP  # noqa: E402 - after the line that says how to install it
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.data_parallel_base import _BaseDataParallel  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, _get_param_groups, check_config_overrides_consistency  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as MegatronDistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer as MegatronChainedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megabucket.integrations import megatron_checkpoint  # noqa: E402 - imports Megatron as well

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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

_SAME_LATER: Final = ("num_buckets", "param_name_patterns_for_fp32_local_accumulation")
"""The same, of versions after 0.16."""

_TAKEN_DDP: Final = frozenset(
    {
        *_SAME,
        *_SAME_LATER,
        "align_param_gather",  # optimizer.step() begins the gather
        "bucket_size",
        "check_for_nan_in_grad",
        "delay_wgrad_compute",
        "num_distributed_optimizer_instances",
    }
)
_ONE_TRANSFORMER: Final = {"cuda_graph_impl": "none", "defer_embedding_wgrad_compute": False}
"""Fields of which one value is supported. Those of ``_KNOWN`` have any; all others of ``TransformerConfig`` are the layers'."""

_KNOWN: Final = """
    _cpu_offloading_context async_tensor_model_parallel_allreduce autocast_dtype barrier_with_L1_time batch_p2p_comm
    batch_p2p_sync bf16 context_parallel_size cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering
    cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights cross_entropy_fusion_impl
    cross_entropy_loss_fusion deallocate_pipeline_outputs delay_wgrad_compute deterministic_mode enable_autocast
    ep_overlap_early_attn_memory_release expert_model_parallel_size expert_tensor_parallel_size finalize_model_grads_func fp16
    grad_scale_func grad_sync_func gradient_accumulation_fusion hierarchical_context_parallel_sizes hybrid_context_parallel
    max_seqlen_per_dp_cp_rank microbatch_group_size_per_vp_stage moe_extended_tp moe_grad_scale_func mtp_grad_scale_func
    mtp_standalone no_sync_func num_microbatches_with_partial_activation_checkpoints overlap_moe_expert_parallel_comm
    overlap_p2p_comm overlap_p2p_comm_warmup_flush param_sync_func params_dtype perform_initialization pipeline_dtype
    pipeline_model_parallel_comm_backend pipeline_model_parallel_size sequence_parallel tensor_model_parallel_size timers
    tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
    tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
    tp_comm_split_ag tp_comm_split_rs use_cpu_initialization use_ring_exchange_p2p use_te_rng_tracker variable_seq_lengths
    virtual_pipeline_model_parallel_size wgrad_deferral_limit
"""
"""Fields of ``ModelParallelConfig`` that are supported, or change nothing about gradients and groups. Unknown ones may."""

_GATED: Final = frozenset({"linear_fc1", "weight1"})
_FUSED: Final = frozenset({"in_proj", "conv1d"})
"""Layers whose output has several parts (gate and up, ...), each cut over the ranks: what a rank holds is no block of the
whole, and goes into checkpoints under a name with the number of ranks."""

_EMBEDDING: Final = {"output_layer": "embedding.word_embeddings"}
"""The name of a tied head."""

_MARKS: Final = {
    "grad_norm_group": "there is one norm of the whole model",
    "is_gtp_weight_remat": "weights are not gathered over ranks of their own",
}
"""Attributes of parameters by which later versions ask for what the adapter lacks."""

_TAKEN_OPTIMIZER: Final = frozenset(
    {
        "barrier_with_L1_time",  # an update is one call without timers
        "bf16",  # parameters keep the dtypes of the module
        "clip_grad",
        "fp16",
        "grad_norm_skip_threshold",  # after 0.16
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
    *("adaptive_muon_", "lion_", "muon_", "soap_"),  # optimizer="muon" and so on
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
    ("use_megatron_fsdp", "megatron_fsdp_", "use_custom_fsdp", "fsdp_"): "parameters are not sharded",
    ("data_parallel_sharding", "outer_dp_"): "parameters are not sharded",
    ("gtp_", "expert_gtp_", "tensor_parallel_num_weight_", "expert_tensor_parallel_num_"): _MARKS["is_gtp_weight_remat"],
    ("suggested_communication_unit", "preserve_fp32_", "keep_fp8_", "gradient_reduce_div_"): "parameters are not sharded",
    ("nccl_ub", "disable_symmetric_registration"): "memory is not registered with NCCL",
    ("fp8_", "fp4_", "reuse_grad_buf_for_mxfp8_"): "there are no fp8 and no fp4 parameters",
    ("optimizer_cuda_graph",): "an update runs Python code, which a captured graph leaves out",
    ("cuda_graph_impl",): "backward runs Python hooks, which a captured graph leaves out",
    ("defer_embedding_wgrad_",): "its gradient would come after the reduction of its bucket",
    ("full_param_layout",): "megabucket makes the layout, which is Megatron's (layout='megatron')",
    ("dump_param_to_param_group_map",): "nothing is written; megabucket.save_checkpoint() has the groups",
    ("decoupled_lr", "decoupled_min_lr", "apply_wd_to_qk_"): "use groups of the torch optimizer",
    ("use_distributed_optimizer",): "as in the config of the wrapper",
    _HYPERPARAMETERS: "as in the torch optimizer",
    ("use_layer_wise_",): "shards are equal parts of buckets; DistributedOptimizer([muon, adamw], ddp) has owners of matrices",
    ("optimizer", "use_precision_aware_", "overlap_param_gather_with_", "config_logger_dir"): "there is no such update",
}
"""Why fields are refused, by the beginnings of their names; the first that fits."""

_CHECKPOINT: Final = "call megabucket.{}_checkpoint(path, ddp.wrapper, optimizer.optimizer), which also has the weights"
_INSTEAD: Final = {
    "bucket_groups": "read ddp.wrapper.bucket_groups",
    "expert_parallel_bucket_groups": "read ddp.wrapper.bucket_groups, which has those of experts as well",
    "free_overlap_buffers": "drop it: there are none",
    "load_parameter_state": _CHECKPOINT.format("load"),
    "param_to_bucket_group": "read ddp.wrapper.bucket_groups",
    "remove_forward_pre_hook_handles": "drop it: forward always waits for the parameter gather",
    "save_parameter_state": _CHECKPOINT.format("save"),
    "save_state_dict_to_file": _CHECKPOINT.format("save"),
    "split_state_dict_if_needed": "drop it: state_dict() and load_state_dict() are about whole parameters",
}
"""Names of Megatron's that the adapter lacks, and what to do instead."""


_THEIRS: Final = frozenset({*dir(MegatronDistributedOptimizer), *dir(MegatronChainedOptimizer)})
"""Names of Megatron's own optimizers."""


def _missing(owner: object, name: str) -> AttributeError:
    instead = _INSTEAD.get(name, "it is a part of Megatron's own buffers and shards")
    return AttributeError(f"{type(owner).__name__} of the adapter has no {name}; {instead}", name=name, obj=owner)


def _refuse(owner: object, *, name: str) -> NoReturn:
    raise _missing(owner, name)


class _Buffers:
    """In place of ``torch.nn.Module.buffers``, which Megatron's wrapper replaces by a list of its own; here there are none."""

    def __init__(self, call: Callable[..., Iterable[torch.Tensor]]) -> None:
        self._call = call

    def __call__(self, recurse: bool = True) -> Iterable[torch.Tensor]:
        return self._call(recurse)

    def __iter__(self) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "Megatron's buffers, which its get_megatron_optimizer() needs, are not here: call "
            "megabucket.integrations.megatron.get_megatron_optimizer(), and read model.wrapper.param_and_grad_buffers."
        )

    def __add__(self, _: object) -> list[Any]:
        return []  # at its end Megatron's train() asks those of dense and expert parameters for memory pools of NCCL


class DistributedDataParallel(MegatronDDP):
    """Megatron's wrapper, with its arguments, over megabucket's, which is ``wrapper``.

    Buffers, buckets and shards are Megatron's (``layout="megatron"``), and so are the groups of ranks, of ``parallel_state`` or
    ``pg_collection``. Set ``config.no_sync_func`` to ``ddp.no_sync``, and ``config.finalize_model_grads_func`` to Megatron's
    ``finalize_model_grads``. ``ddp_config`` is not changed. For ``isinstance`` it is Megatron's class, of which it inherits
    nothing.

    Raises:
        ConfigError: a field, argument or mark of a parameter is not supported; the text names each one.
        MegabucketError: what wrapping raises.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        **later: Any,
    ) -> None:
        _check_arguments("DistributedDataParallel", later)
        translated = config_from(ddp_config, is_loss_per_token=config.calculate_per_token_loss)
        known = vars(ModelParallelConfig()) | _ONE_TRANSFORMER
        _check_fields(config, {name: value for name, value in known.items() if name not in _KNOWN.split()})
        _check_marks(module)
        _BaseDataParallel.__init__(self, config=config, module=module)
        self.ddp_config = ddp_config
        ranks = ProcessGroupCollection.setup_process_groups_for_ddp(pg_collection, config, ddp_config)
        for name, group in ranks.items():  # dp_group, expt_dp_group, ...
            setattr(self, name, group)
        groups = _groups_of(module, config, ranks, pg_collection)
        # Not a submodule: names of parameters are those under Megatron's wrapper.
        self.__dict__["wrapper"] = ddp.DistributedDataParallel(
            module, translated, groups=groups, disable_bucketing=disable_bucketing or ranks["pp_group"].rank() > 0
        )
        self.__dict__["buffers"] = self.__dict__["expert_parallel_buffers"] = _Buffers(super().buffers)
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

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Free the gradient buffers, between two steps. A collective call, unlike Megatron's: see ``wrapper.offload``.

        Args:
            synchronize: has no effect; the call waits for what it copies.
            empty_cache: give what torch's allocator keeps back to the device.
        """
        self.wrapper.offload(optimizer=False, main_params=False)
        if empty_cache:
            _empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Take gradient buffers again. A collective call. Steps are refused while other memory is given back."""
        self.wrapper.onload(optimizer=False, main_params=False, params=False)

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


# Whatever of Megatron's class, of any version, the adapter does not have is missing; nothing of it runs.
for _name in vars(MegatronDDP).keys() - vars(DistributedDataParallel).keys():
    if not _name.startswith("__"):
        setattr(DistributedDataParallel, _name, property(functools.partial(_refuse, name=_name)))


class DistributedOptimizer(MegatronOptimizer):
    """Megatron's optimizer calls over megabucket's ``DistributedOptimizer``, which is ``optimizer``.

    With several model chunks (of a virtual pipeline) ``optimizer`` is a ``ChainedOptimizer`` of one for each.

    Args:
        optimizer: any elementwise torch optimizer over the parameters of the wrapped module, experts included; a list of them,
            one for each model chunk, where there are several.
        config: for clipping (in each step) and loss scaling. Hyperparameters that it sets must equal the torch optimizer's.
        model_chunks: the wrapped module, or a list of it.

    Raises:
        ConfigError: a field has a value that is not supported, or there is not one optimizer for each model chunk.
        MegabucketError: what ``megabucket.DistributedOptimizer`` and ``megabucket.ChainedOptimizer`` raise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        config: OptimizerConfig,
        model_chunks: DistributedDataParallel | Sequence[DistributedDataParallel],
    ) -> None:
        chunks = _as_chunks(model_chunks)
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if len(given) != len(chunks):
            raise ConfigError(
                f"{len(given)} torch optimizers for {len(chunks)} model chunks: each chunk needs one over its own parameters. "
                "get_megatron_optimizer(config, model_chunks) makes them."
            )
        for one in given:
            _check_optimizer_config(config, one, is_sharded=chunks[0].ddp_config.use_distributed_optimizer)
        threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
        arguments = {"returns_num_zeros": config.log_num_zeros_in_grad, "grad_norm_skip_threshold": threshold}
        self.parts = [
            optim.DistributedOptimizer(one, chunk.wrapper, **arguments) for one, chunk in zip(given, chunks, strict=True)
        ]
        whole = self.parts[0] if len(chunks) == 1 else ChainedOptimizer(self.parts)
        super().__init__(whole, config)
        self.optimizer: Any
        self.model_chunks = chunks
        self.chained_optimizers = [self]
        self.is_stub_optimizer = False
        self.grad_scaler = _scaler_for(config)

    def __getattr__(self, name: str) -> Any:
        """Say what stands in for an attribute of Megatron's."""
        if name in _INSTEAD or name in _THEIRS:
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
        return torch.full((1,), scale, dtype=torch.float32, device=self.parts[0].ddp.param_and_grad_buffers[0].grad_data.device)

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Finish the gradient sync, clip, and return the norm before clipping.

        Raises:
            ConfigError: there are several model chunks.
        """
        if len(self.parts) > 1:
            raise ConfigError("clip_grad_norm() and get_grad_norm() take one model chunk: step() clips and returns the norm")
        return float(self.parts[0].clip_grad_norm_(clip_grad))

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
        for part in self.parts:
            part.reload_main_params()

    def offload_to_cpu(self) -> None:
        """Move state and main parameters to the host, between two steps. A collective call: see ``ddp.wrapper.offload``."""
        for part in self.parts:
            part.ddp.offload(grads=False)
        _empty_cache()

    def restore_from_cpu(self) -> None:
        """Take back what ``offload_to_cpu`` has moved. A collective call."""
        for part in self.parts:
            part.ddp.onload(grads=False, params=False)

    def prepare_model_params_for_param_sync(self) -> None:
        """Do nothing: updated values lie where the parameter gather takes them."""

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
            for one, state in zip(self.parts, megatron_checkpoint.whole_states(self.parts, state_dict), strict=True):
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
            self.parts, model_sharded_state_dict, common, is_loading=is_loading, metadata={**(metadata or {}), **asked}
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
    prepare_grads = step_with_ready_grads = _refuse_call


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: DistributedDataParallel | Sequence[DistributedDataParallel],
    config_overrides: Mapping[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,  # noqa: ARG001 - Megatron's argument; state is gathered over the wrappers' groups
    pg_collection: ProcessGroupCollection | None = None,
    **later: Any,
) -> DistributedOptimizer:
    """Return an optimizer with Megatron's own parameter groups, for its ``OptimizerParamScheduler``.

    Megatron's function of this name, over torch's AdamW, Adam or SGD. A collective call of all ranks.

    Args:
        config: all hyperparameters, ``decoupled_lr`` and ``apply_wd_to_qk_layernorm`` included.
        model_chunks: wrapped by the adapter.
        pg_collection: must be that of the wrappers.

    Raises:
        ConfigError: a field, an argument or a wrapper is not supported.
        MegabucketError: as ``DistributedOptimizer``.
    """
    _check_arguments("get_megatron_optimizer", later)
    chunks = _as_chunks(model_chunks)
    if pg_collection is not None and any(pg_collection.dp is not chunk.dp_group for chunk in chunks):
        raise ConfigError("get_megatron_optimizer() got pg_collection= with another dp group than that of the wrappers")
    check_config_overrides_consistency(config, config_overrides)
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    own: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    if config.optimizer == "sgd":
        make, own = torch.optim.SGD, {"momentum": config.sgd_momentum}
    # The groups have these three.
    grouped = dataclasses.replace(config, decoupled_lr=None, decoupled_min_lr=None, apply_wd_to_qk_layernorm=False)
    groups = [_get_param_groups([chunk], config, config_overrides) for chunk in chunks]
    optimizers = [make(of_chunk, lr=config.lr, weight_decay=config.weight_decay, **own) for of_chunk in groups]
    made = DistributedOptimizer(optimizers, grouped, chunks)
    made.config = config
    return made


def _empty_cache() -> None:
    """Give free memory of torch's allocator back to the device."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _as_chunks(given: DistributedDataParallel | Sequence[DistributedDataParallel]) -> list[DistributedDataParallel]:
    chunks = [given] if isinstance(given, torch.nn.Module) else list(given)
    if not chunks or not all(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        kinds = [f"{type(chunk).__module__}.{type(chunk).__name__}" for chunk in chunks]
        raise ConfigError(f"model chunks must be wrapped by megabucket.integrations.megatron, got {kinds}")
    return chunks


def _groups_of(
    module: torch.nn.Module, config: TransformerConfig, ranks: Mapping[str, Any], given: ProcessGroupCollection | None
) -> ParallelGroups:
    """Return the ranks of a wrapper from Megatron's process groups.

    Args:
        ranks: as from ``setup_process_groups_for_ddp``.

    Raises:
        ConfigError: the groups lack one that the model needs.
    """
    tp, pp, dp = ranks["tp_group"], ranks["pp_group"], ranks["dp_cp_group"]
    others = ProcessGroupCollection.use_mpu_process_groups(["embd", "expt_tp", "intra_dist_opt"]) if given is None else given
    replicate = ranks["inter_dist_opt_group"]
    reduction = {"dense": ReductionGroup(ranks["intra_dp_cp_group"], replicate)}
    # Megatron's layers mark parameters as tensor-parallel also where that has one rank.
    copies, expert_tp = {"tp": tp}, getattr(others, "expt_tp", None) or tp
    if not all(getattr(param, "allreduce", True) for param in module.parameters()):
        reduction["expert"] = ReductionGroup(ranks["intra_expt_dp_group"], replicate)
        copies["expert_tp"] = expert_tp
    ends = getattr(others, "embd", None) if pp.size() > 1 else None
    tied = {} if ends is None or ends.size() == 1 else {"embd": ends}
    if pp.size() > 1 and not tied and any(getattr(param, "shared_embedding", False) for param in module.parameters()):
        raise ConfigError(
            "the embedding is tied to the head on another pipeline stage: pass pg_collection.embd, the group of both"
        )
    is_virtual = config.virtual_pipeline_model_parallel_size is not None  # then the two may be in different chunks
    size = tp.size() * pp.size() * dp.size()
    candidates = (dp, getattr(others, "intra_dist_opt", None), default_group_of(size))
    whole = next((group for group in candidates if group is not None and group.size() == size), None)
    if whole is None:
        raise ConfigError(
            f"no process group has all {size} ranks of the model (tp {tp.size()}, pp {pp.size()}, dp {dp.size()}), so they "
            "could not agree on a step and take one norm. Pass pg_collection.intra_dist_opt, a group of all of them."
        )
    return ParallelGroups(
        reduction,
        copies=copies if is_virtual else copies | tied,
        copies_across=tied if is_virtual else {},
        identity=_identities(module, config, tp=tp, expert_tp=expert_tp, has_stages=pp.size() > 1),
        norm_group=whole,
        step_group=whole,
    )


def _identities(
    module: torch.nn.Module,
    config: TransformerConfig,
    *,
    tp: ProcessGroup,
    expert_tp: ProcessGroup,
    has_stages: bool,
) -> Callable[[str, Any], ParamIdentity | None]:
    """Return a function of name and parameter: Megatron's attributes, and names of the whole model.

    Layers are numbered by their ``layer_number``, and experts by the ``local_expert_indices`` of the layer around them. Experts
    without it keep the local name, which must be a global one already.
    """
    modules = dict(module.named_modules())
    place = (expert_tp.rank(), expert_tp.size())
    read = megatron_identity(tp_rank=tp.rank(), tp_size=tp.size(), expert_tp=place)

    def identity(name: str, param: Any) -> ParamIdentity | None:
        found = read(name, SimpleNamespace(**vars(param) | {"shape": param.shape, "partition_stride": 1}))
        assert found is not None  # noqa: S101 - for mypy
        path, is_numbered = name.split("."), False
        parts, experts = list(path), None
        for index in range(len(path) - 1):
            here = modules[".".join(path[: index + 1])]
            if path[index].isdigit() and isinstance(number := getattr(here, "layer_number", None), int):
                parts[index] = str(number - 1)
            elif path[index].isdigit() and experts is not None:
                parts[index], is_numbered = str(experts[int(path[index])]), True
            experts = getattr(here, "local_expert_indices", experts)
        if found.group == "expert" and experts is None and place[1] == 1:
            return None
        if found.group == "expert" and experts is not None and not is_numbered:  # one tensor for all of them
            parts.append(f"of_experts_{experts[0]}_to_{experts[-1]}")
        is_gated = config.gated_linear_unit and not _GATED.isdisjoint(path)
        is_fused = is_gated or not _FUSED.isdisjoint(path) or getattr(param, "partition_stride", 1) != 1
        if is_fused and found.global_shape != tuple(param.shape):
            parts.append(f"cut_over_{place[1] if found.group == 'expert' else tp.size()}")
        copies, partial = found.copies, found.partial
        if has_stages and getattr(param, "shared_embedding", False):
            # Megatron marks the first stage by this alone, the others as shared as well.
            copies, partial = ((*dict.fromkeys((*along, "embd")),) for along in (copies, partial))
            parts = [_EMBEDDING.get(part, part) for part in parts]
        return dataclasses.replace(found, global_name=".".join(parts), copies=copies, partial=partial)

    return identity


def config_from(ddp_config: DistributedDataParallelConfig, *, is_loss_per_token: bool = False) -> Config:
    """Return megabucket's config for Megatron's.

    Args:
        is_loss_per_token: losses are sums over tokens, and ``finalize_model_grads`` divides gradients.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    defaults = _defaults_of(ddp_config)
    _check_fields(ddp_config, {name: value for name, value in defaults.items() if name not in _TAKEN_DDP})
    later = {name: getattr(ddp_config, name) for name in _SAME_LATER if name in defaults}
    if ddp_config.bucket_size is not None:  # Megatron has computed it from the number
        later.pop("num_buckets", None)
    return Config(
        **{name: getattr(ddp_config, name) for name in _SAME},
        **later,
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
    supported = _defaults_of(config) | {"use_distributed_optimizer": is_sharded}
    if config.optimizer == "sgd":
        supported["optimizer"] = "sgd"
    for name in _HYPERPARAMETERS:
        if getattr(config, name) != supported[name]:  # set by the caller
            supported[name] = own.get(name)
    names = [name for name in supported if name not in _TAKEN_OPTIMIZER and not name.startswith(_UNREAD_OPTIMIZER)]
    _check_fields(config, {name: supported[name] for name in names})


def _defaults_of(config: Any) -> dict[str, Any]:
    """Return the defaults of all fields of a config, those of later versions and of subclasses included."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config)
    }


def _check_arguments(function: str, later: Mapping[str, Any]) -> None:
    """Refuse arguments of later versions.

    Raises:
        ConfigError: one is given.
    """
    if given := {name: value for name, value in later.items() if value is not None}:
        problems = [f"{name}={type(value).__name__} ({_reason(name)})" for name, value in given.items()]
        raise ConfigError(f"{function}() got arguments that are not supported: {', '.join(problems)}", problems=problems)


def _check_marks(module: torch.nn.Module) -> None:
    """Refuse parameters that later versions of Megatron have marked for something else than the adapter does.

    Raises:
        ConfigError: there is one.
    """
    for name, param in module.named_parameters():
        for mark, reason in _MARKS.items():
            if getattr(param, mark, None):
                raise ConfigError(f"parameter {name!r} has {mark}={getattr(param, mark)!r}, which is not supported: {reason}")


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
