"""Megatron-Core's GPT model on 2 tensor-parallel ranks in each replica, with its schedule, optimizer groups and scheduler.

torchrun --standalone --nproc-per-node 4 examples/megatron_tensor_parallel.py FOLDER
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import megabucket as mb
from megabucket.integrations.megatron import DistributedDataParallel, get_megatron_optimizer

WORDS, LENGTH, SHARDED = 64, 16, {"use_distributed_optimizer": True, "overlap_param_gather": True}
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "tensor_model_parallel_size": 2}
ON_CPU = dict.fromkeys(("bias_dropout_fusion", "masked_softmax_fusion"), False) | {"use_cpu_initialization": True}
RATES = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 2, "lr_decay_steps": 6, "lr_decay_style": "cosine"}
DECAY = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 6, "wd_incr_style": "constant"}


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    tokens, mask = next(batches), torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    losses = model(tokens[:, :-1], torch.arange(LENGTH).expand(4, LENGTH), mask, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.mean(), {})


def train(first: int, last: int, root: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = TransformerConfig(**SHAPE, **ON_CPU, hidden_dropout=0.0, attention_dropout=0.0)
    module = GPTModel(config, get_gpt_layer_local_spec(), WORDS, LENGTH)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True, **SHARDED), module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, min_lr=1e-3, clip_grad=1.0, **SHARDED), [model])
    scheduler = OptimizerParamScheduler(optimizer, **RATES, **DECAY)
    config.no_sync_func, config.finalize_model_grads_func = model.no_sync, finalize_model_grads
    if first:
        mb.load_checkpoint(root, model.wrapper, optimizer.optimizer, schedulers=scheduler)
    for step in range(first, last):
        torch.manual_seed(100 * step + parallel_state.get_data_parallel_rank())  # a replica's ranks have one batch
        model.zero_grad_buffer()
        microbatches = {"num_microbatches": 2, "micro_batch_size": 4, "seq_length": LENGTH}
        batches = iter(torch.randint(WORDS, (2, 4, LENGTH + 1)))
        get_forward_backward_func()(forward_step_func=forward_step, data_iterator=batches, model=[model], **microbatches)
        optimizer.step()
        scheduler.step(1)
    mb.save_checkpoint(root, model.wrapper, optimizer.optimizer, step=last, schedulers=scheduler)
    return list(model.wrapper.detach().parameters())


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
    dist.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    whole, half = f"{sys.argv[1]}/whole", f"{sys.argv[1]}/half"
    expected, _, resumed = train(0, 6, whole), train(0, 3, half), train(3, 6, half)
    print("the same weights, bit by bit:", all(torch.equal(*pair) for pair in zip(expected, resumed, strict=True)))
    dist.destroy_process_group()
