"""Tensor and sequence parallelism beside data parallelism: layers cut over two ranks, tokens between them as well.

torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megabucket as mb

VOCABULARY, WIDTH, TOKENS, STEPS = 64, 32, 256, 60


class Gather(torch.autograd.Function):
    """Gather the tokens of all ranks. Every rank uses all of them, so backward sums over the ranks and keeps its own part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, tp: dist.ProcessGroup) -> torch.Tensor:
        ctx.tp = tp
        parts = [torch.empty_like(part) for _ in range(tp.size())]
        dist.all_gather(parts, part.contiguous(), group=tp)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return SumAndCut.apply(grad, ctx.tp), None


class SumAndCut(torch.autograd.Function):
    """Sum over all ranks, and keep this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, tp: dist.ProcessGroup) -> torch.Tensor:
        ctx.tp = tp
        dist.all_reduce(total := whole.clone(), group=tp)
        return total.chunk(tp.size())[tp.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Gather.apply(grad, ctx.tp), None


class Mlp(torch.nn.Module):
    """Predict a token from another one, with two layers that are cut over the ranks of ``tp``."""

    def __init__(self, tp: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same whole weights on all ranks, of which each keeps its part
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        param: Any  # with attributes
        for param in self.parameters():  # Megatron's names, as in its layers
            param.sequence_parallel = True  # on each rank the gradient is of its own tokens only
        column, row = torch.randn(4 * WIDTH, WIDTH) / 6, torch.randn(WIDTH, 4 * WIDTH) / 12
        self.column = torch.nn.Parameter(column.chunk(tp.size())[tp.rank()].clone())
        self.row = torch.nn.Parameter(row.chunk(tp.size(), dim=1)[tp.rank()].clone())
        for param, dim in ((self.column, 0), (self.row, 1)):
            param.tensor_model_parallel, param.partition_dim = True, dim
        self.tp = tp

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        wide = (Gather.apply(self.norm(hidden), self.tp) @ self.column.T).relu()
        return self.head(hidden + SumAndCut.apply(wide @ self.row.T, self.tp))


def main() -> None:
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    shape = (dist.get_world_size() // 2, 2) if dist.get_world_size() % 2 == 0 else (dist.get_world_size(), 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    groups = mb.ParallelGroups({"dense": dp}, copies={"tp": tp}, norm_group=dist.group.WORLD)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduction="sum", bucket_size=2000)
    model = mb.DistributedDataParallel(Mlp(tp), config, groups=groups)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model, clip_grad=1.0)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dp.rank())
        own = torch.randint(VOCABULARY, (TOKENS,)).chunk(tp.size())[tp.rank()]
        (loss := torch.nn.functional.cross_entropy(model(own), own * 7 % VOCABULARY, reduction="sum")).backward()
        mb.finalize_grads(model, num_tokens=TOKENS)  # of all tp ranks together: they share one sequence
        losses.append(loss.item() / len(own))
        norm = optimizer.step().grad_norm
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, gradient norm of the whole model {norm:.4f}")
    model.check_replicas()  # over dp, and over tp where its ranks hold copies
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
