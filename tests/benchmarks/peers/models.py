"""The models all systems train: same weights and same batches everywhere. Targets are tokens of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn import functional


class Block(torch.nn.Module):
    """One transformer layer in 12 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mixed, self.joined = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        mixed = self.mixed(self.norm_1(hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*mixed.unbind(), is_causal=True)
        hidden = hidden + self.joined(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.narrow(functional.gelu(self.wide(self.norm_2(hidden))))


class Gpt(torch.nn.Module):
    """10.8 M parameters in 77 tensors."""

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 6) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.layers = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class ManyTensors(torch.nn.Module):
    """15.9 M parameters in 1,500 tensors, and next to no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 145)
        self.bias = torch.nn.Parameter(torch.zeros(256))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(145, 145) for _ in range(749))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).mean(1, keepdim=True)
        for layer in self.layers:
            hidden = hidden + layer(hidden) * 0.01
        return hidden @ self.embedding.weight.t() + self.bias


class Dominant(torch.nn.Module):
    """10.7 M parameters in 15 tensors, 98 % of them in one: an embedding, whose gradient is ready last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(65_536, 160)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(160, 160) for _ in range(6))
        self.head = torch.nn.Linear(160, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(hidden))
        return self.head(hidden)


class Experts(torch.nn.Module):
    """A router and experts, of which each token takes two. Every expert runs, also on no token: no gradient is missing."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = torch.nn.LayerNorm(width), torch.nn.Linear(width, experts, bias=False)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = self.norm(hidden).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            tokens, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, tokens, expert(flat[tokens]) * weights[tokens, place].unsqueeze(1))
        return hidden + out.view_as(hidden)


class MixtureOfExperts(torch.nn.Module):
    """4.8 M parameters in 143 tensors; all experts on all ranks, as plain data parallel."""

    def __init__(self, width: int = 192, experts: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.layers = torch.nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.head = torch.nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Sums(torch.nn.Module):
    """Tensors of 16 elements that cost one addition each: what is left is what a wrapper does per parameter."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.terms = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(16)) for _ in range(tensors))
        self.layers = torch.nn.ModuleList()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = (tokens % 16).float().mean(1, keepdim=True).unsqueeze(2)
        for term in self.terms:
            hidden = hidden + term
        return hidden


@dataclass(frozen=True)
class ModelCase:
    """A model and its batches.

    Attributes:
        shape: samples and tokens of a rank's batch.
        vocabulary: tokens are drawn below it.
        blocks_per_group: how many layers FSDP2 shards together in its finest setting.
    """

    make: Callable[[], torch.nn.Module]
    shape: tuple[int, int]
    vocabulary: int = 256
    blocks_per_group: int = 1

    def module(self) -> torch.nn.Module:
        torch.manual_seed(0)  # the same weights on every rank and in every process
        return self.make()

    def batch(self, step: int, rank: int) -> torch.Tensor:
        return torch.randint(0, self.vocabulary, self.shape, generator=torch.Generator().manual_seed(1009 * step + rank))


MODELS = MappingProxyType(
    {
        "gpt": ModelCase(Gpt, (4, 64)),
        "tensors": ModelCase(ManyTensors, (8, 8), blocks_per_group=25),
        "dominant": ModelCase(Dominant, (4, 64), vocabulary=65_536),
        "moe": ModelCase(MixtureOfExperts, (4, 64)),
        "tiny": ModelCase(lambda: Gpt(16, 2, 2), (2, 8)),
        "sums-1500": ModelCase(lambda: Sums(1_500), (1, 4)),
        "sums-20000": ModelCase(lambda: Sums(20_000), (1, 4)),
    }
)


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rank's batch of how badly tokens are told from themselves."""
    targets = tokens[:, : output.shape[1]] % output.shape[2]
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
