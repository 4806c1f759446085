"""Megatron-Core's schedule and finalize_model_grads over megabucket's buffers: clipping, a checkpoint, a run that goes on.

torchrun --standalone --nproc-per-node 2 examples/megatron_loop.py FOLDER
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import megabucket as mb
from megabucket.integrations.megatron import DistributedDataParallel, DistributedOptimizer

SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True}
SHAPE = {"num_microbatches": 2, "seq_length": 1, "micro_batch_size": 8}


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    inputs = next(batches)
    return model(inputs), lambda output: ((output - inputs.sum(1, keepdim=True)).square().mean(), {})


def train(first: int, last: int, root: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module: Any = torch.nn.Linear(16, 1)
    module.model_type, module.set_input_tensor = ModelType.encoder_or_decoder, lambda _: None  # the schedule asks for both
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True, **SHARDED), module)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), OptimizerConfig(clip_grad=1.0, **SHARDED), [model])
    config.no_sync_func, config.finalize_model_grads_func = model.no_sync, finalize_model_grads
    if first:
        mb.load_checkpoint(root, model.wrapper, optimizer.optimizer)  # on any number of ranks
    for step in range(first, last):
        torch.manual_seed(100 * step + dist.get_rank())
        batches = iter(torch.randn(2, 8, 16))
        model.zero_grad_buffer()
        get_forward_backward_func()(forward_step_func=forward_step, data_iterator=batches, model=[model], **SHAPE)
        optimizer.step()
    mb.save_checkpoint(root, model.wrapper, optimizer.optimizer, step=last)
    return list(model.wrapper.detach().parameters())


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
    dist.init_process_group()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    whole, half = f"{sys.argv[1]}/whole", f"{sys.argv[1]}/half"
    expected, _, resumed = train(0, 6, whole), train(0, 3, half), train(3, 6, half)
    print("the same weights, bit by bit:", all(torch.equal(*pair) for pair in zip(expected, resumed, strict=True)))
    dist.destroy_process_group()
