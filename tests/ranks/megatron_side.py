"""The megatron-core wheel's DDP and optimizers with experts, on a CPU: what Megatron itself would have trained.

Megatron makes tensors on "the current CUDA device" and tells dtypes by the names of CUDA types; while it builds, both answers
are replaced. Its norm and its clipping use CUDA kernels of float32; theirs are replaced by the same formulas on a CPU, with the
norm taken in float64 as ours is. All else is Megatron's own code.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # no Transformer Engine, no apex
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
    from megatron.core.optimizer import optimizer as megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig


class MegatronSide:
    """A model in Megatron's wrapper, with an optimizer of dense parameters and one of experts, chained as Megatron does.

    Args:
        module: its parameters with ``allreduce=False`` are experts.
        expert_parallel: ranks that hold different experts.
        is_sharded: with Megatron's ``DistributedOptimizer``.
        transformer: what the wrapper passes on to schedules; nothing else of it is read.
        spares_vectors: no weight decay for parameters of one dimension, in a group of their own.
        make_adam: a class of AdamW.
        options: further fields of Megatron's ``DistributedDataParallelConfig``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        expert_parallel: int,
        learning_rate: float,
        is_sharded: bool,
        transformer: TransformerConfig | None = None,
        spares_vectors: bool = False,
        make_adam: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=expert_parallel, create_gloo_process_groups=False
            )
        config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded, **options)
        self._spares_vectors, self._make_adam = spares_vectors, make_adam
        self._is_bf16 = any(param.dtype == torch.bfloat16 for param in module.parameters())
        with on_cpu():
            transformer = transformer or TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
            self.ddp = DistributedDataParallel(transformer, config, module)
            dense = [param for param in module.parameters() if getattr(param, "allreduce", True)]
            experts = [param for param in module.parameters() if not getattr(param, "allreduce", True)]
            self.optimizers = [
                self._optimizer(params, buffers, learning_rate, is_expert=is_expert)
                for params, buffers, is_expert in (
                    (dense, self.ddp.buffers, False),
                    (experts, self.ddp.expert_parallel_buffers, True),
                )
                if params
            ]
            self.optimizer = ChainedOptimizer(self.optimizers)

    def _optimizer(self, params: Sequence[torch.nn.Parameter], buffers: Any, learning_rate: float, *, is_expert: bool) -> Any:
        is_sharded = self.ddp.ddp_config.use_distributed_optimizer
        config = OptimizerConfig(
            optimizer="adam",
            clip_grad=1.0,  # as a step says
            bf16=self._is_bf16,
            params_dtype=torch.bfloat16 if self._is_bf16 else torch.float32,
            use_distributed_optimizer=is_sharded,
            overlap_param_gather=self.ddp.ddp_config.overlap_param_gather,
        )
        shared = {"is_expert_parallel": is_expert, "is_decoupled_lr": False, "lr_mult": 1.0}
        groups = [{"params": list(params), "wd_mult": 1.0, **shared}]
        if self._spares_vectors:
            groups[0]["params"] = [param for param in params if param.ndim > 1]
            if vectors := [param for param in params if param.ndim == 1]:
                groups.append({"params": vectors, "wd_mult": 0.0, "weight_decay": 0.0, **shared})
        adamw = self._make_adam(groups, lr=learning_rate)

        def init_state(_: Any, __: Any = None) -> None:
            """Nothing: torch's AdamW makes its state in the first step."""

        if is_sharded:
            reduced = parallel_state.get_expert_data_parallel_group() if is_expert else parallel_state.get_data_parallel_group()
            made: Any = DistributedOptimizer(
                adamw,
                config,
                None,
                init_state,
                model_chunks=[self.ddp],
                per_model_buffers={0: buffers},
                data_parallel_group=reduced,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
            made.grad_stats_parallel_group = dist.group.WORLD
        else:
            made = (
                Float16OptimizerWithFloat16Params(adamw, config, None, init_state)
                if self._is_bf16
                else FP32Optimizer(adamw, config, init_state)
            )
            made.grad_stats_parallel_group = (
                parallel_state.get_expert_model_parallel_group() if is_expert else parallel_state.get_model_parallel_group()
            )
        made.tp_group = parallel_state.get_tensor_model_parallel_group()
        return made

    def step(self, threshold: float) -> float:
        """Finish the sync, clip to a norm (0: not at all), update, clear; return the norm."""
        self.ddp.finish_grad_sync()
        norm = self.update(threshold)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        return norm

    def update(self, threshold: float) -> float:
        """Clip gradients that are reduced, and update; return the norm."""
        for optimizer in self.optimizers:
            optimizer.config.clip_grad = threshold
        return step_on_cpu(self.optimizer)

    def close(self) -> None:
        """Forget Megatron's global groups."""
        parallel_state.destroy_model_parallel()


def step_on_cpu(optimizer: Any) -> float:
    """Take a step of one of Megatron's optimizers, and return the norm before clipping."""
    with (
        on_cpu(),
        mock.patch.object(megatron_optimizer, "get_grad_norm_fp32", _norm_in_float64),
        mock.patch.object(megatron_optimizer, "clip_grad_by_total_norm_fp32", _clip),
    ):
        updated, norm, _ = optimizer.step()
    assert updated
    return _rounded(norm)


def _norm_in_float64(grads_for_norm: Iterable[torch.Tensor], *, grad_stats_parallel_group: dist.ProcessGroup) -> float:
    total = torch.zeros(1, dtype=torch.float64)
    for grad in grads_for_norm:
        total += grad.double().square().sum()
    dist.all_reduce(total, group=grad_stats_parallel_group)
    return math.sqrt(float(total))


def _clip(parameters: Iterable[torch.Tensor], *, max_norm: float, total_norm: float, use_decoupled_grad: bool) -> None:
    assert not use_decoupled_grad
    factor = max_norm / (_rounded(total_norm) + 1.0e-6)
    if factor < 1.0:
        for param in parameters:
            if param.grad is not None:
                param.grad.mul_(factor)


def _rounded(norm: float) -> float:
    return float(torch.tensor(norm, dtype=torch.float64).float())


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace what Megatron asks CUDA for: the current device, tensors on it (the schedule counts tokens in one of zeros), the
    names of its tensor types, streams (a CPU has one) and their random numbers (no layer of the tests drops anything)."""
    make_tensor, make_zeros, type_of = torch.tensor, torch.zeros, torch.Tensor.type
    stream = mock.Mock()

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make_tensor(*args, **{**kwargs, "device": "cpu"})

    def zeros(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make_zeros(*args, **kwargs, device="cpu" if device == "cuda" else device)

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(torch, "zeros", zeros),
        mock.patch.object(torch.Tensor, "type", type_as_on_cuda),
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
        mock.patch.multiple(torch.cuda, Stream=stream, default_stream=stream, current_stream=stream),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(CudaRNGStatesTracker, "fork", return_value=nullcontext()),
    ):
        yield
