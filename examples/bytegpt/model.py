"""``ByteGPT``: the small language model of the demo, on bytes, with nothing of megabucket inside.

Its parameters have the names, shapes and order that ``megabucket.planning.architecture`` gives ``kind: gpt``, so
``megabucket plan`` shows the layout that training uses; a test compares the two.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from megabucket.planning.model_config import GptConfig

_INIT_STD: Final = 0.02


class _Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.bias)
        self.projection = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # (batch, sequence, hidden)
        batch, sequence, width = hidden.shape
        heads = self.qkv(hidden).view(batch, sequence, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, sequence, width per head)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: torch.Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return projected


class _Mlp(nn.Module):
    """Feed-forward layer with a squared ReLU: as good as GELU here and a fraction of its time on CPU."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.resolved_ffn_size, bias=config.bias)
        self.down = nn.Linear(config.resolved_ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        lowered: torch.Tensor = self.down(functional.relu(self.up(hidden)).square())
        return lowered


class _Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.attention = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.mlp = _Mlp(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: torch.Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class ByteGPT(nn.Module):
    """A GPT-2 style decoder: learned positions, pre-norm, tied or untied embeddings.

    Args:
        config: sizes.
        seed: of the initial weights. Same seed and config, same weights on every rank and machine.
    """

    def __init__(self, config: GptConfig, *, seed: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.sequence_length, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.head: nn.Linear | None = None
        if not config.tied_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialize(torch.Generator().manual_seed(seed), config.num_layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(batch, sequence, vocab_size)`` for tokens of shape ``(batch, sequence)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.final_norm(hidden)
        if self.head is not None:
            logits: torch.Tensor = self.head(hidden)
            return logits
        return functional.linear(hidden, self.token_embedding.weight)

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator, num_layers: int) -> None:
        """Draw matrices from a normal; those that write to the residual stream are smaller, so that depth adds no variance."""
        for name, param in self.named_parameters():
            if param.ndim > 1:
                writes_residual = name.endswith(("attention.projection.weight", "mlp.down.weight"))
                param.normal_(std=_INIT_STD / math.sqrt(2 * num_layers) if writes_residual else _INIT_STD, generator=generator)
            elif name.endswith(".bias"):
                param.zero_()


def next_byte_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte, computed in float32 whatever the dtype of the model.

    Args:
        model: gives logits for tokens.
        inputs: tokens of shape ``(batch, sequence)``.
        targets: the byte that follows each of them, same shape.
    """
    logits = model(inputs)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
