"""The megatron-core wheel's DDP and DistributedOptimizer, on a CPU.

Megatron makes its buffers on "the current CUDA device" and tells float32 parameters by the name of their CUDA type. While it
builds, both answers are replaced; nothing of it is replaced while it trains. Its optimizers wrap torch's fused AdamW here,
where it would take Transformer Engine's or apex's kernel on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # no Transformer Engine, no apex
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.transformer import TransformerConfig

from peers.system import Setup, System, fused_adamw


class Megatron(System):
    def sync(self) -> None:
        self.module.finish_grad_sync()

    def step(self) -> None:
        self.optimizer.step()
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()


def ddp(module: torch.nn.Module, setup: Setup) -> System:
    return _build(module, setup, is_sharded=False, gathers_ahead=False)


def sharded(module: torch.nn.Module, setup: Setup) -> System:
    return _build(module, setup, is_sharded=True, gathers_ahead=False)


def overlapped(module: torch.nn.Module, setup: Setup) -> System:
    return _build(module, setup, is_sharded=True, gathers_ahead=True)


def _build(module: torch.nn.Module, setup: Setup, *, is_sharded: bool, gathers_ahead: bool) -> System:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        overlap_param_gather=gathers_ahead,
        use_distributed_optimizer=is_sharded,
        bucket_size=setup.bucket_bytes // 4,
    )
    transformer = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    with _on_cpu():
        wrapped = DistributedDataParallel(transformer, config, module)
        return Megatron(wrapped, _optimizer(wrapped, is_sharded=is_sharded, gathers_ahead=gathers_ahead))


def _optimizer(wrapped: DistributedDataParallel, *, is_sharded: bool, gathers_ahead: bool) -> Any:
    params = list(wrapped.parameters())
    config = OptimizerConfig(
        optimizer="adam", clip_grad=0.0, use_distributed_optimizer=is_sharded, overlap_param_gather=gathers_ahead
    )
    adamw = fused_adamw(params)
    group = parallel_state.get_data_parallel_group()
    if not is_sharded:
        optimizer = FP32Optimizer(adamw, config, None)
    else:
        optimizer = DistributedOptimizer(
            adamw,
            config,
            None,
            None,
            model_chunks=[wrapped],
            per_model_buffers={0: wrapped.buffers},
            data_parallel_group=group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
    optimizer.grad_stats_parallel_group = optimizer.tp_group = group
    return optimizer


@contextmanager
def _on_cpu() -> Iterator[None]:
    make_tensor, type_of = torch.tensor, torch.Tensor.type

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make_tensor(*args, **{**kwargs, "device": "cpu"})

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.Float", "torch.cuda.Float") if isinstance(found, str) else found

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(torch.Tensor, "type", type_as_on_cuda),
    ):
        yield
