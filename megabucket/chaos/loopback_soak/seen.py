"""What one rank saw while it played a block."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megabucket.errors import CollectiveError, MegabucketError


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """All gradients of the wrapper's parameters: values in order of registration, and whose ``param.grad`` is ``None``."""

    values: torch.Tensor  # 1D, float64
    absent: tuple[str, ...]


@dataclass(slots=True, eq=False)
class BlockSeen:
    """What one block of one rank came to."""

    step: int
    """Steps agreed on before the block, as far as this rank knew."""
    num_played: int = 0
    """Acts that have returned."""
    error: BaseException | None = None
    at: str = ""
    """The act that raised."""
    cause: BaseException | None = None
    losses: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    updates: list[bool | None] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)  # 1D, float64
    last_errors: list[MegabucketError | None] = field(default_factory=list)
    step_after: int = -1
    skip_reason: str = ""
    broken: CollectiveError | None = None
    """A collective that could not give the right result, wherever it came up."""

    def describe(self) -> str:
        """Return the end of the block in words."""
        if self.error is None:
            return "no error"
        return f"{type(self.error).__name__} at {self.at}: {self.error}"
