"""``torch.amp.GradScaler`` on real ranks: the scales, skips and losses of torch's own DDP with a plain optimizer.

Under autocast torch's scaler looks at float32 gradients. With a model of 16-bit parameters, as large ones are trained, the loop
that torch needs keeps float32 copies by hand; ``DistributedOptimizer`` keeps them itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cells import assert_none
from pool import FOUR_AT_NIGHT, ONE_AT_NIGHT, Rank

import megabucket as mb

pytestmark = pytest.mark.dist

STEPS = 14
OVERFLOWS = {(0, 3), (1, 6), (3, 9)}  # rank and step


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    is_sharded: bool
    max_norm: float | None = None
    is_16_bit_model: bool = False
    overlaps: bool = False
    nonfinite: str = "allow"
    is_alike: bool = False
    """Whether ranks have the same data: sums in 16 bits then do not depend on their order, however many ranks there are."""


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 8))


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def make_scaler(exponent: int = 16) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**exponent, growth_interval=3)


def loss_of(model: torch.nn.Module, rank: Rank, step: int, dtype: torch.dtype, *, is_alike: bool = False) -> torch.Tensor:
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + (0 if is_alike else rank.index)))
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(inputs)
    return outputs.float().square().mean() * (1e36 if (rank.index, step) in OVERFLOWS else 1.0)


def train_by_torch(rank: Rank, case: Case) -> list[tuple[float, float]]:
    """Return the scale and the loss of each step."""
    model = make_model().to(case.dtype if case.is_16_bit_model else torch.float32)
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=rank.group)
    params = list(model.parameters())
    mains = [torch.nn.Parameter(param.detach().float()) for param in params] if case.is_16_bit_model else params
    optimizer, scaler, seen = make_optimizer(mains), make_scaler(), []
    for step in range(STEPS):
        loss = loss_of(ddp, rank, step, case.dtype, is_alike=case.is_alike)
        seen.append((scaler.get_scale(), loss.item()))
        scaler.scale(loss).backward()
        for main, param in zip(mains, params, strict=True):
            main.grad = param.grad.float()
        if case.max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(mains, case.max_norm)
        scaler.step(optimizer)
        scaler.update()
        ddp.zero_grad()
        with torch.no_grad():
            for main, param in zip(mains, params, strict=True):
                param.copy_(main)
    return seen


def train_by_us(rank: Rank, case: Case) -> list[tuple[float, float]]:
    model = make_model().to(case.dtype if case.is_16_bit_model else torch.float32)
    config = mb.DistributedDataParallelConfig(
        use_distributed_optimizer=case.is_sharded,
        overlap_param_gather=case.overlaps,
        bucket_size=300,
        grad_reduce_in_fp32=not case.is_16_bit_model,  # torch reduces in the dtype of the parameters
        nonfinite_gradients=case.nonfinite,
    )
    ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
    optimizer = mb.DistributedOptimizer(make_optimizer(ddp.parameters()), ddp)
    scaler, seen = make_scaler(), []
    for step in range(STEPS):
        loss = loss_of(ddp, rank, step, case.dtype, is_alike=case.is_alike)
        seen.append((scaler.get_scale(), loss.item()))
        scaler.scale(loss).backward()
        if case.max_norm is not None:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(case.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


def train_cases(rank: Rank, cases: list[Case]) -> list[tuple[Any, Any]]:
    return [(train_by_us(rank, case), train_by_torch(rank, case)) for case in cases]


def assert_like_torch(pool: Any, cases: list[Case], ranks: int) -> None:
    failures = []
    for rank, of_rank in enumerate(pool.run(train_cases, cases, ranks=ranks)):
        for case, (ours, torchs) in zip(cases, of_rank, strict=True):
            scales = [scale for scale, _ in torchs]
            num_skips = sum(after < before for before, after in itertools.pairwise(scales))
            assert num_skips == sum(index < ranks for index, _ in OVERFLOWS), case
            if [scale for scale, _ in ours] != scales:
                failures.append(f"{case}, rank {rank}: scales {ours} instead of {torchs}")
            for step, ((_, loss), (_, expected)) in enumerate(zip(ours, torchs, strict=True)):
                if not abs(loss - expected) <= 1e-5 * abs(expected):
                    failures.append(f"{case}, rank {rank}: loss of step {step} is {loss} instead of {expected}")
    assert_none(failures)


@pytest.mark.parametrize("ranks", [ONE_AT_NIGHT, 2, FOUR_AT_NIGHT])
def test_scales_skips_and_losses_are_those_of_torch_ddp(pool, ranks):
    dtypes, modes, norms = (torch.float16, torch.bfloat16), (False, True), (None, 0.1)
    cases = [Case(*pair) for pair in itertools.product(dtypes, modes, norms)]
    cases += [
        Case(torch.float16, is_sharded=True, max_norm=0.1, overlaps=True),
        Case(torch.float16, is_sharded=True, nonfinite="skip_step"),
    ]

    assert_like_torch(pool, cases, ranks)


@pytest.mark.parametrize("ranks", [ONE_AT_NIGHT, 2, FOUR_AT_NIGHT])
def test_a_16_bit_model_trains_as_with_float32_copies_by_hand(pool, ranks):
    dtypes, modes, norms = (torch.float16, torch.bfloat16), (False, True), (None, 0.1)
    pairs = [(dtype, *pair) for dtype, *pair in itertools.product(dtypes, modes, norms) if pair[0] or dtype != torch.float16]
    # Torch's scaler refuses float16 gradients that it sees, as under torch DDP: test_grad_scaler.py.
    cases = [Case(*pair, is_16_bit_model=True, is_alike=ranks > 2) for pair in pairs]

    assert_like_torch(pool, cases, ranks)
