"""``unused_parameters="skip"`` beside torch DDP with ``find_unused_parameters=True``, on real ranks that leave out layers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Rank

import megabucket as mb

pytestmark = pytest.mark.dist

NUM_LAYERS, STEPS, RESUMED_AT = 5, 7, 4
ATOL = 1e-6

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, weight_decay=0.1),
}


class Layers(torch.nn.Module):
    """A head, and layers of which each forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(NUM_LAYERS))
        self.head = torch.nn.Linear(6, 2)

    def forward(self, hidden: torch.Tensor, used: frozenset[int]) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index in used:
                hidden = hidden + torch.tanh(layer(hidden))
        result: torch.Tensor = self.head(hidden)
        return result


def is_of_expert(name: str) -> bool:
    return name.startswith((f"layers.{NUM_LAYERS - 2}.", f"layers.{NUM_LAYERS - 1}."))


def group_of(name: str, _: torch.Tensor) -> str:
    return "expert" if is_of_expert(name) else "dense"


def left_out(pattern: str, step: int, rank: Rank, microbatch: int) -> set[int]:
    if pattern == "on all":  # one in every other step, one from the second step on, one always
        return {3} | ({0} if step % 2 else set()) | ({1} if step else set())
    if pattern == "on some":  # one on all ranks but one, one on a single rank, one in the last microbatches
        return {step % 2} & {int(rank.index != step % rank.size)} | ({3} if rank.index == 1 else set()) | {4} & {4 * microbatch}
    draw = random.Random(f"{step} {rank.index} {microbatch}")
    return {index for index in range(NUM_LAYERS) if draw.random() < 0.7}


@dataclass(frozen=True)
class Case:
    """How one training goes.

    ``wraps``: the optimizer is a ``DistributedOptimizer``. ``clears``: gradients are removed, zeroed by the optimizer, the
    module or the wrapper, or kept in two of three steps. ``expert``: each rank has the last two layers for itself.
    """

    optimizer: str
    pattern: str
    clears: str
    microbatches: int = 1
    sharded: bool = False
    wraps: bool = False
    resumes: bool = False
    expert: bool = False


def clear(case: Case, step: int, module: torch.nn.Module, optimizer: torch.optim.Optimizer, ddp: Any) -> None:
    if case.clears == "module":
        module.zero_grad(set_to_none=False)
    elif case.clears == "wrapper" and isinstance(ddp, mb.DistributedDataParallel):
        ddp.zero_grad(set_to_none=False)
    elif case.clears != "kept" or step % 3 == 2:
        optimizer.zero_grad(set_to_none=case.clears in ("none", "kept"))


def wrap_torch(case: Case, rank: Rank, module: torch.nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    if case.expert:
        names = [name for name, _ in module.named_parameters() if is_of_expert(name)]
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    ddp = torch.nn.parallel.DistributedDataParallel(module, process_group=rank.group, find_unused_parameters=True)
    return ddp, OPTIMIZERS[case.optimizer](module.parameters())


def wrap_ours(case: Case, rank: Rank, module: torch.nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=case.sharded, bucket_size=60, unused_parameters="skip")
    ranks: dict[str, Any] = {"process_group": rank.group}
    if case.expert:
        alone = dist.new_group([rank.index], use_local_synchronization=True)
        expert = mb.ReductionGroup(alone, divisor=1.0)
        ranks = {"groups": mb.ParallelGroups({"dense": rank.group, "expert": expert}, group_of=group_of)}
    ddp = mb.DistributedDataParallel(module, config, **ranks)
    optimizer = OPTIMIZERS[case.optimizer](ddp.parameters())
    return ddp, mb.DistributedOptimizer(optimizer, ddp) if case.wraps else optimizer


def train(case: Case, rank: Rank, wrap: Callable[..., tuple[Any, torch.optim.Optimizer]]) -> list[dict[str, Any]]:
    """Return after each step the weights, and with a plain optimizer what else must be equal."""
    module = Layers()
    ddp, optimizer = wrap(case, rank, module)
    found = []
    for step in range(STEPS):
        if case.resumes and step == RESUMED_AT:
            weights = {name: value.clone() for name, value in module.state_dict().items()}
            state = optimizer.state_dict()
            if isinstance(ddp, mb.DistributedDataParallel):
                ddp.detach()
            module = Layers()
            module.load_state_dict(weights)
            ddp, optimizer = wrap(case, rank, module)
            optimizer.load_state_dict(state)
        for microbatch in range(case.microbatches):
            generator = torch.Generator().manual_seed(10_000 * step + 100 * rank.index + microbatch)
            used = frozenset(range(NUM_LAYERS)) - left_out(case.pattern, step, rank, microbatch)
            batch = torch.randn(3, 6, generator=generator)
            if microbatch < case.microbatches - 1:
                with ddp.no_sync():
                    ddp(batch, used).square().mean().backward()
            else:
                ddp(batch, used).square().mean().backward()
        optimizer.step()
        values: dict[str, Any] = {name: param.detach().clone() for name, param in module.named_parameters()}
        if not case.wraps:
            for name, param in module.named_parameters():
                values[f"gradient of {name}"] = None if param.grad is None else param.grad.clone()
                state = {key: value.clone() for key, value in optimizer.state.get(param, {}).items() if value is not None}
                values |= {f"{key} of {name}": value for key, value in state.items()}
        found.append(values)
        clear(case, step, module, optimizer, ddp)
    if isinstance(ddp, mb.DistributedDataParallel):
        ddp.detach()
    return found


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference, relative for values above 1; infinity if something is there on one side only."""
    if ours.keys() != theirs.keys():
        return float("inf")
    found = 0.0
    for name, value in ours.items():
        if (value is None) != (theirs[name] is None):
            return float("inf")
        if value is not None:
            found = max(found, float(((value - theirs[name]).abs() / theirs[name].abs().clamp(min=1.0)).max()))
    return found


def differences(rank: Rank, cases: list[Case]) -> list[float]:
    """Return for each case the largest difference in all steps."""
    found = []
    for case in cases:
        pairs = zip(train(case, rank, wrap_ours), train(case, rank, wrap_torch), strict=True)
        found.append(max(difference(ours, theirs) for ours, theirs in pairs))
    return found


def check(pool: Any, cases: list[Case], *, ranks: int) -> None:
    # With two ranks dividing before the sum, as torch does, and after it, as we do, gives the same bits.
    limit = 0.0 if ranks == 2 else ATOL
    for found in pool.run(differences, cases, ranks=ranks, timeout_s=250):
        odd = {str(case): value for case, value in zip(cases, found, strict=True) if value > limit}
        assert not odd, f"more than {limit}: {odd}"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_plain_optimizers_make_the_steps_that_they_make_with_torch_ddp(pool, ranks, microbatches):
    ways = itertools.product(("on all", "on some", "at random"), ("none", "zeros", "module", "wrapper", "kept"))
    optimizers = itertools.islice(itertools.cycle(OPTIMIZERS), ranks + microbatches, None)  # each one with each way, in all
    cases = [Case(next(optimizers), *way, microbatches) for way in ways]

    check(pool, cases, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_they_do_so_with_weights_and_state_that_were_saved_and_loaded(pool, ranks):
    cases = [Case(*case, resumes=True) for case in itertools.product(OPTIMIZERS, ("at random",), ("none", "zeros"))]

    check(pool, cases, ranks=ranks)


def test_they_do_so_with_experts_that_a_rank_has_for_itself(pool):
    patterns, clears = ("on all", "on some", "at random"), ("none", "zeros")
    cases = [Case("AdamW", *way, microbatches=2, expert=True) for way in itertools.product(patterns, clears)]

    check(pool, cases, ranks=2)
