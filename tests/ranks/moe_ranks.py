"""A small model with experts that exchange tokens: on ranks that each hold some experts, or whole in one process.

``Moe`` routes each token to the expert that its number names, so rounding cannot send it elsewhere. In some steps no token goes
to the last expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

NUM_RANKS = 4
NUM_EXPERTS = 4
NUM_TOKENS = 24  # of each rank
VOCABULARY = 32
WIDTH = 12


class TokenExchange(torch.autograd.Function):
    """Sends rows to the ranks of a group; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return TokenExchange.apply(grads, ctx.received, ctx.sent, ctx.group), None, None, None


class Moe(torch.nn.Module):
    """Embedding, experts of one group or of one process, and a head.

    Args:
        experts: numbers of those that are held here.
        group: over which tokens are exchanged; ``None``: all experts are here.
    """

    def __init__(self, experts: Sequence[int] = range(NUM_EXPERTS), group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        # First, so that their parameters are gathered and waited for before all others.
        self.experts = torch.nn.ModuleDict({str(number): make_expert(number) for number in experts})
        for param in self.experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.mixer = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self._group = group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.mixer(self.embedding(tokens)))
        expert_of = tokens % NUM_EXPERTS
        order = expert_of.argsort(stable=True)
        counts = expert_of.bincount(minlength=NUM_EXPERTS)
        rows = self._through_experts(hidden[order], counts)
        return self.head(hidden + torch.zeros_like(hidden).index_copy(0, order, rows))

    def _through_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the rows as their experts make them. Rows are sorted by expert; ``counts`` has their numbers."""
        if self._group is None:
            parts = rows.split(counts.tolist())
            return torch.cat([self.experts[str(number)](part) for number, part in enumerate(parts)])
        size, num_own = self._group.size(), len(self.experts)
        theirs = torch.empty_like(counts)  # by source rank and expert of this rank
        dist.all_to_all_single(theirs, counts, group=self._group)
        sent, received = (one.view(size, num_own).sum(1).tolist() for one in (counts, theirs))
        parts = TokenExchange.apply(rows, sent, received, self._group).split(theirs.tolist())
        made = [list[torch.Tensor]() for _ in range(size)]
        for index, expert in enumerate(self.experts.values()):
            mine = parts[index::num_own]
            for source, part in enumerate(expert(torch.cat(mine)).split([len(part) for part in mine])):
                made[source].append(part)
        return TokenExchange.apply(torch.cat([part for of_source in made for part in of_source]), received, sent, self._group)


def make_expert(number: int) -> torch.nn.Module:
    torch.manual_seed(100 + number)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH))


def tokens_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a rank. Every fourth step leaves out the last expert."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, targets = torch.randint(VOCABULARY, (2, NUM_TOKENS), generator=generator)
    if step % 4 == 3:
        inputs = inputs - (inputs % NUM_EXPERTS == NUM_EXPERTS - 1).long()
    return inputs, targets


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean over the tokens of the batch."""
    inputs, targets = batch
    return torch.nn.functional.cross_entropy(model(inputs), targets)


def expert_ranks(expert_parallel: int, num_ranks: int = NUM_RANKS) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks that exchange tokens, and those that hold the same experts.

    >>> expert_ranks(2)
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    exchanging = [list(range(first, first + expert_parallel)) for first in range(0, num_ranks, expert_parallel)]
    same = [list(range(first, num_ranks, expert_parallel)) for first in range(expert_parallel)]
    return exchanging, same


def groups_of(rank: int, expert_parallel: int, num_ranks: int = NUM_RANKS) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make all groups, on all ranks, and return those of ``rank``: to exchange tokens, and to reduce experts."""
    made = [[dist.new_group(ranks) for ranks in kind] for kind in expert_ranks(expert_parallel, num_ranks)]
    return made[0][rank // expert_parallel], made[1][rank % expert_parallel]


def own_experts(rank: int, expert_parallel: int) -> range:
    """Return the numbers of the experts that a rank holds."""
    num_own = NUM_EXPERTS // expert_parallel
    first = rank % expert_parallel * num_own
    return range(first, first + num_own)
