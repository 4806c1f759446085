"""DeepSpeed ZeRO-1 and ZeRO-2 in float32 on a CPU. ``DS_ACCELERATOR=cpu`` must be set, and no op of DeepSpeed is built."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch

from peers.system import Setup, System, fused_adamw


class Engine(System):
    def backward(self, loss: torch.Tensor) -> None:
        self.module.backward(loss)

    def step(self) -> None:
        self.module.step()  # clears the gradients


def zero_1(module: torch.nn.Module, setup: Setup) -> System:
    return _build(module, setup, stage=1)


def zero_2(module: torch.nn.Module, setup: Setup) -> System:
    return _build(module, setup, stage=2)


def _build(module: torch.nn.Module, setup: Setup, *, stage: int) -> System:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # it only computes with it: batches are the program's
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": setup.bucket_bytes // 4,
        },
        "gradient_clipping": 0.0,  # it clips to 1.0 where nobody says so, and no other system clips
        "steps_per_print": 1_000_000,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=module, optimizer=fused_adamw(module.parameters()), config=config)
    return Engine(engine, optimizer)
