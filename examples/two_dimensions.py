"""A pre-training loop on a mesh (dp, tp): a transformer cut by torch's parallelize_module, with sequence parallelism.

torchrun --standalone --nproc-per-node 4 examples/two_dimensions.py
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import megabucket as mb

VOCABULARY, WIDTH, HEADS, BLOCKS, TOKENS, STEPS, CLIP, LR = 32, 16, 4, 1, 8, 12, 0.1, 1e-2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The number of heads is left open: with tensor parallelism a rank has some of them.
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH, eps=1e-5), Attention()
        self.mlp_norm, self.up, self.down = (
            nn.RMSNorm(WIDTH, eps=1e-5),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_module() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def cut(module: Transformer, tp: dist.DeviceMesh) -> Transformer:
    """Apply tensor and sequence parallelism: between layers each rank has a part of the tokens, at the end of the logits."""
    tokens = Shard(1)
    whole = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    of_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=tokens),
        "mlp_norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    for block in module.blocks:
        parallelize_module(block, tp, of_block)
    parallelize_module(module, tp, whole)
    return module


def backward(model: Any, step: int, rank: int, size: int, microbatches: int) -> None:
    """Run this rank's microbatches of one batch, which all ranks share. A single rank may have a module without a wrapper."""
    text = torch.randint(VOCABULARY, (12, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    for index, tokens in enumerate(text.chunk(size)[rank].chunk(microbatches)):
        is_last = index == microbatches - 1
        with nullcontext() if is_last or size == 1 else model.no_sync(), loss_parallel():
            logits = model(tokens[:, :-1])
            (nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / microbatches).backward()


class Run:
    """A model, its optimizer and its schedule on a mesh with the dimensions dp and tp."""

    def __init__(self, mesh: dist.DeviceMesh, *, microbatches: int, sharded: bool = True) -> None:
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=1000)
        self.model = mb.DistributedDataParallel(cut(make_module(), mesh["tp"]), config, process_group=mesh["dp"])
        self.optimizer = mb.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), LR), self.model, clip_grad=CLIP)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.mesh, self.microbatches, self.norms = mesh, microbatches, list[float]()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            backward(self.model, step, self.mesh.get_local_rank("dp"), self.mesh["dp"].size(), self.microbatches)
            self.norms.append(self.optimizer.step().grad_norm)
            self.optimizer.zero_grad()
            self.schedule.step()
            if dist.get_rank() == 0:
                print(f"step {step}: gradient norm of the whole model {self.norms[-1]:.3f}, clipped to {CLIP}")

    def save(self, folder: str) -> None:
        weights, state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": state, "schedule": self.schedule.state_dict()}, checkpoint_id=folder)

    def load(self, folder: str) -> int:
        """Load a checkpoint, of any mesh; return how many steps it has done."""
        weights, state = get_state_dict(self.model, self.optimizer)
        found: dict[str, Any] = {"model": weights, "optimizer": state, "schedule": self.schedule.state_dict()}
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        self.schedule.load_state_dict(found["schedule"])
        return self.schedule.last_epoch


def main() -> None:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    run = Run(mesh, microbatches=3)
    run.train(0, STEPS // 2)
    run.save("runs/two_dimensions")
    run = Run(mesh, microbatches=3)  # as a new process would, on any mesh
    run.train(run.load("runs/two_dimensions"), STEPS)
    run.model.check_replicas()  # over dp, and over tp where its ranks hold copies
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
