"""One rank is plain torch, bit by bit: wrapping costs a single process nothing in accuracy."""

from __future__ import annotations

import math

import pytest
import torch
from odd_model import OddModel, flat, loss_of, tokens_of, trainable

import megabucket as mb

STEPS = 5
MICROBATCHES = 3


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same values, signs of zeros included, and NaN at the same places."""
    integers = {4: torch.int32, 2: torch.int16}[a.itemsize]
    return bool(((a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())).all())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, clip: float | None) -> list[torch.Tensor]:
    """Return the gradients and the weights of every step."""
    seen = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            is_last = microbatch == MICROBATCHES - 1
            context = torch.enable_grad() if is_last or not hasattr(model, "no_sync") else model.no_sync()
            with context:
                loss_of(model, tokens_of(step, 0, microbatch)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if isinstance(optimizer, torch.optim.AdamW):
            seen.append(flat(param.grad for param in trainable(model)))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(flat(trainable(model)))
    return seen


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_size", [1, 64, 1_000_000])
def test_a_plain_loop_around_a_wrapped_model_has_the_gradients_and_weights_of_plain_torch(overlap, bucket_size):
    plain, wrapped = OddModel("float32", seed=0), OddModel("float32", seed=0)
    config = mb.DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=bucket_size)
    ddp = mb.DistributedDataParallel(wrapped, config)

    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), clip=0.5)
    seen = train(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2), clip=0.5)

    assert len(seen) == 2 * STEPS
    assert all(map(same_bits, seen, expected))


@pytest.mark.parametrize("reduces_scatter", [True, False])
@pytest.mark.parametrize("bucket_size", [1, 64, 1_000_000])
def test_a_distributed_optimizer_has_the_weights_of_plain_torch(reduces_scatter, bucket_size):
    plain, wrapped = OddModel("float32", seed=0), OddModel("float32", seed=0)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=reduces_scatter, bucket_size=bucket_size)
    ddp = mb.DistributedDataParallel(wrapped, config)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)

    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), clip=None)
    seen = train(ddp, optimizer, clip=None)

    assert len(seen) == STEPS
    assert all(map(same_bits, seen, expected[1::2]))


class Times(torch.nn.Module):
    """The gradient of the weights is the input."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


STRANGE = [-0.0, 0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-40, 3e38, 1.0]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("clears", ["optimizer.zero_grad()", "ddp.zero_grad()"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_zeros_subnormals_infinities_and_nan_survive_in_gradients_as_in_plain_torch(microbatches, clears, dtype):
    x = torch.tensor(STRANGE, dtype=dtype)
    plain, wrapped = Times(len(STRANGE), dtype), Times(len(STRANGE), dtype)
    config = mb.DistributedDataParallelConfig(grad_reduce_in_fp32=False, nonfinite_gradients="allow")
    ddp = mb.DistributedDataParallel(wrapped, config)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)

    for step in range(3):
        plain.zero_grad()
        for microbatch in range(microbatches):
            plain(x).sum().backward()
            with torch.enable_grad() if microbatch == microbatches - 1 else ddp.no_sync():
                ddp(x).sum().backward()

        assert same_bits(wrapped.weight.grad, plain.weight.grad), f"step {step}: {wrapped.weight.grad}, {plain.weight.grad}"
        optimizer.zero_grad() if clears.startswith("optimizer") else ddp.zero_grad()
