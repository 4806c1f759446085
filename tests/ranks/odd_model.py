"""A small model with every kind of parameter that buffers find hard, its data, and a single process that trains it.

Plain torch: nothing here knows the library under test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch.nn import functional

VOCABULARY, WIDTH = 11, 6
Precision = Literal["float32", "bfloat16", "mixed"]


class OddModel(torch.nn.Module):
    """Predicts the next token. Has tied, frozen, zero-size and 0-dim parameters and, if ``mixed``, two dtypes.

    The first parameter has no element and is the last one to enter the buffer: with tiny buckets, its bucket is empty.
    """

    def __init__(self, precision: Precision, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        outer = torch.bfloat16 if precision == "bfloat16" else torch.float32
        inner = torch.float32 if precision == "float32" else torch.bfloat16
        self.empty = torch.nn.Parameter(torch.zeros(0, 3, dtype=outer))
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH, dtype=outer)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH, dtype=outer).requires_grad_(False)
        self.hidden = torch.nn.Linear(WIDTH, 7, dtype=inner)
        self.also_empty = torch.nn.Parameter(torch.zeros(0, dtype=inner))
        self.scale = torch.nn.Parameter(torch.tensor(1.25, dtype=inner))
        self.norm = torch.nn.LayerNorm(7, dtype=inner)
        self.out = torch.nn.Linear(7, WIDTH, dtype=outer)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, dtype=outer)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        mixed = functional.gelu(self.frozen(embedded) + embedded).to(self.hidden.weight.dtype)
        inner = self.norm(self.hidden(mixed)) * self.scale + self.also_empty.sum()
        outer = self.out(inner.to(self.out.weight.dtype)) + self.empty.sum()
        return self.head(outer).float()


def tokens_of(step: int, rank: int, microbatch: int) -> torch.Tensor:
    """Return one microbatch: 3 sequences of 5 tokens, different everywhere and the same in every process."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + microbatch)
    return torch.randint(VOCABULARY, (3, 5), generator=generator)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trainable parameters in registration order, tied ones once."""
    return [param for param in model.parameters() if param.requires_grad]


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return all values behind each other, in float32 (which holds bfloat16 exactly)."""
    return torch.cat([tensor.detach().flatten().float() for tensor in tensors])


def unflatten(values: torch.Tensor, like: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Return the pieces of a flat tensor in the shapes of ``like``: the inverse of ``flat``."""
    like = list(like)
    for piece, tensor in zip(values.split([tensor.numel() for tensor in like]), like, strict=True):
        yield piece.view(tensor.shape)


def set_weights(model: torch.nn.Module, values: torch.Tensor) -> None:
    """Write flat values into the trainable parameters."""
    params = trainable(model)
    with torch.no_grad():
        for param, piece in zip(params, unflatten(values, params), strict=True):
            param.copy_(piece)


def local_grads(model: torch.nn.Module, *, step: int, ranks: int, microbatches: int) -> torch.Tensor:
    """Return the gradient of each microbatch of each rank, as plain torch computes it alone: shape (terms, elements)."""
    rows = []
    for rank in range(ranks):
        for microbatch in range(microbatches):
            model.zero_grad()
            loss_of(model, tokens_of(step, rank, microbatch)).backward()
            rows.append(flat(param.grad for param in trainable(model)))
    return torch.stack(rows)
