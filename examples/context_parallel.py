"""Context parallelism beside data parallelism: two ranks hold the same weights and share each sequence.

Sequences end in padding, so ranks have unequal numbers of tokens: losses are sums, and gradients are divided by the tokens of
all ranks.

torchrun --standalone --nproc-per-node 4 examples/context_parallel.py
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import megabucket as mb

VOCABULARY, WIDTH, LENGTH, SEQUENCES, PADDING = 16, 32, 24, 12, -100
STEPS, CLIP, LR = 60, 0.2, 1e-2


class GatherSequence(torch.autograd.Function):
    """Gather the parts of all ranks. Every rank uses all of them, so backward sums over the ranks and keeps its own part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, cp: dist.ProcessGroup) -> torch.Tensor:
        ctx.cp = cp
        parts = [torch.empty_like(part) for _ in range(cp.size())]
        dist.all_gather(parts, part.contiguous(), group=cp)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.cp)
        return total.chunk(ctx.cp.size(), dim=1)[ctx.cp.rank()], None


class Attention(torch.nn.Module):
    """Causal attention of this rank's tokens to those of all ranks of ``cp``."""

    def __init__(self, cp: dist.ProcessGroup) -> None:
        super().__init__()
        self.query_key_value = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.cp = cp

    def forward(self, hidden: torch.Tensor, positions: list[torch.Tensor]) -> torch.Tensor:
        query, key_value = self.query_key_value(hidden).split([WIDTH, 2 * WIDTH], dim=-1)
        key, value = GatherSequence.apply(key_value, self.cp).chunk(2, dim=-1)
        sees = positions[self.cp.rank()][:, None] >= torch.cat(positions)
        return scaled_dot_product_attention(query, key, value, attn_mask=sees)


class Model(torch.nn.Module):
    """Tell at each token which one the sequence began with, which only one rank knows."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, own: torch.Tensor, positions: list[torch.Tensor]) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places(own)
        return self.head(self.norm(hidden + self.attention(hidden, positions)))


def make_model(cp: Any, attention: Callable[[Any], torch.nn.Module] = Attention) -> Model:
    torch.manual_seed(0)
    return Model(attention(cp))


def batch_of(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of whole sequences, of different lengths."""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (SEQUENCES, 1), generator=generator)
    return tokens, tokens[:, :1].expand_as(tokens).masked_fill(torch.arange(LENGTH) >= lengths, PADDING)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction="sum")


class Run:
    def __init__(self, mesh: dist.DeviceMesh, *, process_group: Any = None, microbatches: int = 3, **fields: Any) -> None:
        self.cp, self.dp_rank, self.microbatches = mesh["cp"].get_group(), mesh.get_local_rank("dp"), microbatches
        # A rank gets an early and a late part, so that causal attention is as much work for each.
        parts = torch.arange(LENGTH).chunk(2 * self.cp.size())
        self.positions = [torch.cat((parts[rank], parts[-1 - rank])) for rank in range(self.cp.size())]
        config = mb.DistributedDataParallelConfig(grad_reduction="sum", bucket_size=1000, **fields)
        # Without a process group of its own the wrapper reduces over all ranks, those of dp and of cp.
        self.model = mb.DistributedDataParallel(make_model(self.cp), config, process_group=process_group)
        self.optimizer = mb.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), LR), self.model, clip_grad=CLIP)

    def step(self, step: int) -> tuple[float, int, float]:
        """Return the loss and the number of tokens of this rank, and the norm of the gradient of the mean over all tokens."""
        own = self.positions[self.cp.rank()]
        tokens, labels = (whole[:, own] for whole in batch_of(step, self.dp_rank))
        pieces, total = (whole.chunk(self.microbatches) for whole in (tokens, labels)), 0.0
        for index, (inputs, targets) in enumerate(zip(*pieces, strict=True)):
            with nullcontext() if index == self.microbatches - 1 else self.model.no_sync():
                (loss := loss_of(self.model(inputs, own, self.positions), targets)).backward()
            total += loss.item()
        num_tokens = int((labels != PADDING).sum())  # of this rank, in all microbatches
        mb.finalize_grads(self.model, num_tokens=num_tokens)
        norm = self.optimizer.step().grad_norm
        self.optimizer.zero_grad()
        return total, num_tokens, norm


def main() -> None:
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    shape = (dist.get_world_size() // 2, 2) if dist.get_world_size() % 2 == 0 else (dist.get_world_size(), 1)
    run = Run(dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")), use_distributed_optimizer=True)
    losses = []
    for step in range(STEPS):
        loss, num_tokens, norm = run.step(step)
        losses.append(loss / max(num_tokens, 1))
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {losses[-1]:.4f} over {num_tokens} tokens of this rank, gradient norm {norm:.4f}")
    run.model.check_replicas()
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
