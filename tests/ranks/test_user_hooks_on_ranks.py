"""Post-accumulate hooks that are registered after wrapping, on real ranks: they do what they do with torch's own DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Rank

import megabucket as mb

pytestmark = pytest.mark.dist


def clip(param: torch.Tensor) -> None:
    torch.nn.utils.clip_grad_norm_([param], 0.5)


def center(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad - param.grad.mean()


def drop_first(param: torch.Tensor) -> None:
    if param.ndim == 1:
        param.grad = None


def log(param: torch.Tensor) -> None:
    assert param.grad is not None


HOOKS: dict[str, Callable[[torch.Tensor], None]] = {"clip": clip, "center": center, "drop": drop_first, "log": log}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Tanh(), torch.nn.Linear(400, 4))


def train(
    rank: Rank, model: torch.nn.Module, wrapped: Any, optimizer: Any, kind: str
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the weights, and the norms that the hooks have seen."""
    norms: list[float] = []

    def call(param: torch.Tensor) -> None:
        norms.append(float("nan") if param.grad is None else float(param.grad.norm()))
        HOOKS[kind](param)

    for name, param in model.named_parameters():
        if rank.index == 0 or name == "0.weight":  # rank 0 has more hooks than the others
            param.register_post_accumulate_grad_hook(call)
    generator = torch.Generator().manual_seed(rank.index)
    for _ in range(3):
        with wrapped.no_sync():
            wrapped(torch.randn(2, 400, generator=generator)).square().mean().backward()
        wrapped(torch.randn(2, 400, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()], norms


def differences(rank: Rank, kinds: list[tuple[str, bool]]) -> list[float]:
    found = []
    for kind, is_sharded in kinds:
        theirs = make_model()
        torch_ddp = torch.nn.parallel.DistributedDataParallel(theirs, process_group=rank.group)
        expected, expected_norms = train(rank, theirs, torch_ddp, torch.optim.SGD(theirs.parameters(), lr=0.1), kind)

        ours = make_model()
        config = mb.DistributedDataParallelConfig(
            use_distributed_optimizer=is_sharded, bucket_size=1000, unused_parameters="zero"
        )
        ddp = mb.DistributedDataParallel(ours, config, process_group=rank.group)
        optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
        params, norms = train(rank, ours, ddp, mb.DistributedOptimizer(optimizer, ddp) if is_sharded else optimizer, kind)

        pairs = [*zip(params, expected, strict=True)]
        pairs.append((torch.tensor(sorted(norms)), torch.tensor(sorted(expected_norms))))
        found.append(max(float((a - b).abs().max()) for a, b in pairs))
    return found


def test_weights_and_what_hooks_see_equal_those_of_torch_ddp_within_1e_6(pool):
    kinds = [(kind, is_sharded) for kind in HOOKS for is_sharded in (False, True)]

    by_rank = pool.run(differences, kinds, ranks=2)

    for rank, found in enumerate(by_rank):
        for kind, difference in zip(kinds, found, strict=True):
            assert difference <= 1e-6, f"{kind}, rank {rank}: {difference}"
