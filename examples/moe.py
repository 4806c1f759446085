"""A mixture of experts: two experts, each on half of the ranks, tokens sent to them and back, two reduction groups.

torchrun --standalone --nproc-per-node 4 examples/moe.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megabucket as mb

VOCABULARY, WIDTH, TOKENS, STEPS = 64, 32, 256, 60


class Exchange(torch.autograd.Function):
    """Send rows to the experts' ranks; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], ranks: Any) -> torch.Tensor:
        ctx.way_back = (received, sent, ranks)
        result = rows.new_empty(sum(received), WIDTH)
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=ranks)
        return result

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return Exchange.apply(grads, *ctx.way_back), None, None, None


class Moe(torch.nn.Module):
    """Predict a token from another one. Each token goes to the expert with the highest score of the router."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)  # dense parameters are the same on all ranks
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.router = torch.nn.Linear(WIDTH, ranks.size())
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        torch.manual_seed(1 + ranks.rank())  # this rank holds one expert
        self.expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))
        self.ranks = ranks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        weight, expert = self.router(hidden).softmax(-1).max(-1)
        order = expert.argsort()
        counts = expert.bincount(minlength=self.ranks.size())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.ranks)
        sent, received = counts.tolist(), theirs.tolist()
        rows = self.expert(Exchange.apply(hidden[order], sent, received, self.ranks))
        rows = Exchange.apply(rows, received, sent, self.ranks)
        return self.head(hidden + weight[:, None] * torch.zeros_like(hidden).index_copy(0, order, rows))


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    num_experts = 2 if size % 2 == 0 else 1
    # The ranks of a column hold the same expert; the ranks of a row hold one of each.
    mesh = init_device_mesh("cpu", (size // num_experts, num_experts), mesh_dim_names=("same_expert", "experts"))

    groups = mb.ParallelGroups({"dense": dist.group.WORLD, "expert": mesh["same_expert"]}, group_of={"expert.*": "expert"})
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=2000)
    model = mb.DistributedDataParallel(Moe(mesh["experts"].get_group()), config, groups=groups)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model, clip_grad=1.0)
    if rank == 0:
        for buffer in model.layout.buffers:
            ranks = model.ranks.by_name[buffer.key.group].communicator.members
            print(f"{buffer.key.group}: {', '.join(buffer.params)}: over ranks {list(ranks)}")
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(size * step + rank)
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens * 7 % VOCABULARY)  # the mean over this rank's tokens
        loss.backward()
        result = optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, gradient norm of the whole model {result.grad_norm:.4f}")
    model.check_replicas()  # dense parameters over all ranks, each expert over the ranks that hold it
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
