"""What a benchmark asks of every system: a wrapped model with its optimizer, and a step in parts."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LEARNING_RATE = 1e-3
EPSILON = 1e-3
"""Of AdamW. As large as gradients are: with a small one AdamW steps alike for gradients, their sum and their mean, and turns
rounding errors into full steps. So equal losses say that gradients were averaged, once."""


@dataclass(frozen=True)
class Setup:
    """What systems are built for.

    Attributes:
        bucket_bytes: of a bucket, for all systems that have one.
        cuts: names of the tensors that close the planner's buckets; empty where nothing was planned.
        moves_data: whether ranks can be made equal: not on a fabric that only takes time.
    """

    bucket_bytes: int
    blocks_per_group: int = 1
    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    moves_data: bool = True


class System:
    """A step in four parts, each timed from outside. The base is plain torch without any synchronization."""

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        self.module, self.optimizer = module, optimizer

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def sync(self) -> None:
        """Do what the program must call between backward and the optimizer."""

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Wait for what is under way between two steps."""

    def memory_bytes(self) -> int | None:
        """Return the bytes that the system's own formula says a rank holds; None where there is none."""
        return None


def fused_adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, eps=EPSILON, fused=True)


def or_reason(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns, or, as text, why it failed: whatever keeps a peer from running is what a result reports."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
