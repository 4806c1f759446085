"""What the ranks train: a small chain of layers whose gradients and weights are exact in float32, and its batches.

All numbers are dyadic and small, so sums come out the same in any order and the oracle can ask for equality. Gradients
depend on the weights through the slopes of leaky ReLUs and through rounded activations, but do not grow with them, so that
ten thousand steps stay exact. Targets are multiples of 36, which makes a mean over 2, 3 or 4 ranks exact, and also the
mean of means when gradients are reduced twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .acts import NUM_LAYERS

WIDTH = 4
BUCKET_NUMEL = 20
"""Elements of one layer, weight and bias: one bucket each."""
NUM_SAMPLES = 2
EXPERT = f"layers.{NUM_LAYERS - 1}."
"""The parameters that are an expert's where there are experts: no other gradient depends on their values."""
DELAYED = "layers.1.weight"
"""The parameter whose gradient comes after backward where one does."""
LEARNING_RATE = 0.25


class OwnedMuon(torch.optim.Muon):
    """Muon that calls something behind the update of each matrix."""

    update_kind = "tensor"

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.on_update: Callable[[torch.Tensor], None] = lambda _: None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update one matrix after the other."""
        del closure
        groups = self.param_groups
        try:
            for group in groups:
                for param in [param for param in group["params"] if param.grad is not None]:
                    self.param_groups = [{**group, "params": [param]}]
                    super().step()
                    self.on_update(param)
        finally:
            self.param_groups = groups


def muon_and_adamw(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon over the weights, and AdamW over the rest. They give the same bits in one process and at owners."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [OwnedMuon(matrices, lr=LEARNING_RATE), torch.optim.AdamW(others, lr=LEARNING_RATE)]


def layer_of_bucket(bucket: int) -> int:
    """Return the layer whose parameters are in a bucket: the last layer is sent first."""
    return NUM_LAYERS - 1 - bucket


class FaultModel(torch.nn.Module):
    """Layers that add up; each sees the input and a clipped, rounded and detached version of what came before."""

    def __init__(
        self, *, registration: Sequence[int] = tuple(range(NUM_LAYERS)), odd_layer: torch.nn.Module | None = None
    ) -> None:
        """Make a model with the values of seed 0, whatever the order of registration.

        Args:
            registration: the order in which layers become submodules, by number.
            odd_layer: stands in for the last layer.
        """
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(index): torch.nn.Linear(WIDTH, WIDTH) for index in registration})
        if odd_layer is not None:
            self.layers[str(NUM_LAYERS - 1)] = odd_layer
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, param in sorted(self.named_parameters()):
                param.copy_(torch.randint(-4, 5, param.shape, generator=generator).float() / 2)

    def forward(
        self,
        inputs: torch.Tensor,
        layers: Sequence[int] = tuple(range(NUM_LAYERS)),
        checkpointed: Sequence[int] = (),
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run ``layers`` in the given order, those in ``checkpointed`` inside reentrant checkpointing.

        Args:
            hidden: of the layers before, in another part of the model.
        """
        hidden = torch.zeros_like(inputs) if hidden is None else hidden
        for index in layers:
            layer = self.layers[str(index)]
            seen = inputs + hidden.detach().float().round().clamp(-2, 2).to(inputs.dtype)
            if index in checkpointed:
                # Reentrant checkpointing differentiates only what depends on an input that requires a gradient.
                out: Any = checkpoint(layer, seen.detach().requires_grad_(), use_reentrant=True)
            else:
                out = layer(seen)
            hidden = hidden + torch.nn.functional.leaky_relu(out[..., :WIDTH], 0.5)
        return hidden


class Part(FaultModel):
    """Some layers of a model, which keep their names."""

    def __init__(self, model: FaultModel, layers: Sequence[int]) -> None:
        torch.nn.Module.__init__(self)
        self.layers = torch.nn.ModuleDict({str(index): model.layers[str(index)] for index in layers})


class DelayedLinear(torch.nn.Linear):
    """A linear layer whose weight gets its gradient after backward, as under some pipeline schedules."""

    def __init__(self, other: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = other.in_features, other.out_features
        self.weight, self.bias = other.weight, other.bias
        self.weight.skip_backward_post_hook = True  # type: ignore[assignment]
        self.waiting: list[torch.Tensor] = []
        """Stand-ins for the weight, one per forward, which get the gradient in backward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply a stand-in for the weight."""
        stand_in = self.weight.detach().clone().requires_grad_()
        self.waiting.append(stand_in)
        return torch.nn.functional.linear(inputs, stand_in, self.bias)

    def take_grads(self) -> list[torch.Tensor]:
        """Return the gradients that have come since the last call, and forget the forwards without a backward."""
        waiting, self.waiting = self.waiting, []
        return [stand_in.grad for stand_in in waiting if stand_in.grad is not None]


class FoldedLinear(torch.nn.Module):
    """A linear layer that keeps its weight in another shape of as many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(WIDTH // 2, WIDTH * 2))
        self.bias = torch.nn.Parameter(torch.empty(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Unfold and apply."""
        return torch.nn.functional.linear(inputs, self.weight.view(WIDTH, WIDTH), self.bias)


def make_batch(*, seed: int, batch: int, rank: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one microbatch: whole numbers, different for every argument."""
    mixed = ((seed * 1_000_003 + batch) * 64 + rank) * 64 + microbatch
    generator = torch.Generator().manual_seed(mixed % 2**63)
    inputs = torch.randint(-2, 3, (NUM_SAMPLES, WIDTH), generator=generator).float()
    targets = torch.randint(1, 3, (NUM_SAMPLES, WIDTH), generator=generator).float() * 36
    signs = torch.randint(0, 2, (NUM_SAMPLES, WIDTH), generator=generator).float() * 2 - 1
    return inputs, targets * signs


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient with respect to the outputs is the targets."""
    return (outputs * targets.to(outputs.dtype)).sum()
