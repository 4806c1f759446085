"""A small model under torch's tensor parallelism, its batches, and meshes of the pool's ranks that end with a test."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import cross_entropy

import megabucket as mb

VOCABULARY, WIDTH, HIDDEN, LENGTH = 18, 8, 36, 4
"""The vocabulary is cut unevenly by four ranks, as 5, 5, 5, 3 rows."""
CLIP, LR = 0.3, 1e-2
FORMS = ("tensor parallel", "sequence parallel")


class Tied(nn.Module):
    """Two residual layers between an embedding and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.emb(tokens)
        return self.out(hidden + self.down(torch.relu(self.up(self.norm(hidden))))).clone()  # FSDP2 warns of views


def plain_model(dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(0)
    return Tied().to(dtype)


def parallel_model(tp: DeviceMesh, form: str, dtype: torch.dtype = torch.float32) -> Tied:
    """The same model, cut by ``parallelize_module``. Without sequence parallelism the norm stays a plain module."""
    model = plain_model(dtype)
    whole, cut = Replicate(), Shard(1)
    plan: dict[str, Any] = {
        "emb": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "out": ColwiseParallel(output_layouts=whole),
    }
    if form == "sequence parallel":
        plan |= {
            "emb": RowwiseParallel(input_layouts=whole, output_layouts=cut),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=cut),
            "down": RowwiseParallel(output_layouts=cut),
            "out": ColwiseParallel(input_layouts=cut, output_layouts=whole),
        }
    parallelize_module(model, tp, plan)
    model.out.weight = model.emb.weight  # parallelize_module unties them
    return model


@functools.cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of the pool's ranks. Once per process: torch caches what it knows of equal meshes, groups included."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def batches_of(step: int, num_ranks: int, num_microbatches: int) -> list[torch.Tensor]:
    """Microbatches of two sequences for each data-parallel rank."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(VOCABULARY, (2 * num_ranks, LENGTH), generator=generator) for _ in range(num_microbatches)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def wrapped(
    mesh: DeviceMesh, form: str, *, dtype: torch.dtype = torch.float32, **fields: Any
) -> tuple[mb.DistributedDataParallel, mb.DistributedOptimizer]:
    config = mb.DistributedDataParallelConfig(bucket_size=200, **fields)
    ddp = mb.DistributedDataParallel(parallel_model(mesh["tp"], form, dtype), config, process_group=mesh["dp"])
    return ddp, mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LR), ddp, clip_grad=CLIP)


def train(
    ddp: Any, optimizer: Any, dp: DeviceMesh, steps: range, *, num_microbatches: int = 1, check: Any = None
) -> list[float]:
    """Train on this rank's part of each microbatch, and return the norms."""
    norms, rank = [], dp.get_local_rank()
    for step in steps:
        optimizer.zero_grad()
        batches = batches_of(step, dp.size(), num_microbatches)
        for index, tokens in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else ddp.no_sync():
                (loss_of(ddp, tokens[2 * rank : 2 * rank + 2]) / len(batches)).backward()
        if check is not None:
            check()
        optimizer.step()
        norms.append(optimizer.last_step.grad_norm if isinstance(optimizer, mb.DistributedOptimizer) else float("nan"))
    return norms
