"""Training in which nothing but the order of sums over ranks can change a bit: random models, plans, and an oracle.

The gradient of each parameter is a number of its rank, its step and each of its elements, plus a part of the weight, so that a
wrong bit stays. Magnitudes span four powers of ten: with three ranks or more almost every order has sums of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.testing import LoopbackWorld

STEPS = 3
EXPERT = "expert"
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
}


@dataclass(frozen=True)
class Case:
    """A model, and the ranks that train it."""

    size: int = 3
    numels: tuple[int, ...] = (100, 300, 50)
    form: str = "dense"
    """``experts``: every second parameter belongs to every second rank. ``replicas``: sharded over pairs, replicated."""
    dtype: torch.dtype = torch.float32
    is_narrow: bool = False
    """Whether 16-bit gradients are reduced in 16 bits."""
    reduction: str = "mean"
    optimizer: str = "sgd"
    clip_grad: float = 0.0
    seed: int = 0

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.dtype if self.is_narrow else torch.float32

    @property
    def names(self) -> list[str]:
        is_expert = [self.form == "experts" and index % 2 == 1 for index in range(len(self.numels))]
        return [f"{EXPERT if expert else 'dense'}_{index}" for index, expert in enumerate(is_expert)]

    def holders(self, name: str, rank: int) -> list[int]:
        """Return the ranks that hold the same parameter of that name as ``rank``."""
        return [other for other in range(self.size) if not name.startswith(EXPERT) or other % 2 == rank % 2]


@dataclass(frozen=True)
class Trained:
    """The weights after each step by name, and the norms."""

    weights: list[dict[str, torch.Tensor]]
    norms: list[float]

    def difference(self, other: Trained) -> str:
        """Say where the first bit differs; empty if none does."""
        for step, (ours, theirs) in enumerate(zip(self.weights, other.weights, strict=True)):
            if self.norms[step] != other.norms[step]:
                return f"step {step}: norms {self.norms[step]!r} and {other.norms[step]!r}"
            for name, values in ours.items():
                if not torch.equal(values, theirs[name]):
                    index = int((values != theirs[name]).nonzero()[0])
                    return f"step {step}: {name}[{index}] is {values[index]} and {theirs[name][index]}"
        return ""


class Vectors(torch.nn.Module):
    """The model of a rank."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self.case, self.rank = case, rank
        for index, (name, numel) in enumerate(zip(case.names, case.numels, strict=True)):
            values = 1e-4 * _random(numel, case.seed, index, case.holders(name, rank)[0])  # an update changes all of their bits
            self.register_parameter(name, torch.nn.Parameter(values.to(case.dtype)))

    def forward(self, step: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32)
        for index, param in enumerate(self.parameters()):
            seeds = (self.case.seed, 10 + step, self.rank, index)
            factors = _random(param.numel(), *seeds) * torch.exp(2 * _random(param.numel(), *seeds, 1))
            if param.dtype == torch.float16:
                factors /= 64  # no sum overflows
            total = total + (param * factors.to(param.dtype)).sum() + 0.05 * param.square().sum()
        return total


def _random(numel: int, *seeds: int) -> torch.Tensor:
    seed = 0
    for one in seeds:
        seed = (1_000_003 * seed + one + 1) % 2**31
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# Ranks #


def train(
    case: Case, rank: int, fields: dict[str, Any], ranks: dict[str, Any], *, rebuilt: dict[str, Any] | None = None
) -> Trained:
    """Train a rank with ``reduction_order="rank"``, if ``fields`` do not have another.

    Args:
        rebuilt: cuts other buckets from the second step on.
        ranks: arguments of the wrapper that say which ranks there are.
    """
    settings = {"reduction_order": "rank", "grad_reduction": case.reduction, "grad_reduce_in_fp32": not case.is_narrow}
    config = DistributedDataParallelConfig(**{**settings, **fields})
    ddp = DistributedDataParallel(Vectors(case, rank), config, **ranks)
    optimizer = DistributedOptimizer(OPTIMIZERS[case.optimizer](ddp.parameters()), ddp, clip_grad=case.clip_grad)
    found = Trained([], [])
    for step in range(STEPS):
        if step == 1 and rebuilt:
            cut_anew = {"bucket_size": None, "num_buckets": None, "bucket_cuts": None, **rebuilt}
            ddp.rebuild(DistributedDataParallelConfig(**{**config.model_dump(), **cut_anew}))
        ddp(step).backward()
        found.norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
        ddp.finish_param_sync()
        found.weights.append({name: param.detach().clone() for name, param in ddp.module.named_parameters()})
    ddp.detach()
    return found


def members_of(case: Case) -> dict[str, list[list[int]]]:
    """Return the groups of a form by name, each as lists of ranks."""
    ranks, half = list(range(case.size)), case.size // 2
    if case.form == "experts":
        return {"all": [ranks], "expert": [ranks[::2], ranks[1::2]]}
    if case.form == "replicas":
        return {
            "all": [ranks],
            "inside": [ranks[at : at + 2] for at in range(0, case.size, 2)],
            "over": [ranks[::2], ranks[1::2]],
        }
    return {"all": [ranks]} if half else {}


def groups_of(case: Case, group_of: dict[str, Any]) -> ParallelGroups | None:
    """Return the groups of a rank, from its communicators or process groups by the names of ``members_of``."""
    if case.form == "experts":
        return ParallelGroups({"dense": group_of["all"], EXPERT: group_of["expert"]}, group_of={f"{EXPERT}*": EXPERT})
    if case.form == "replicas":
        dense = ReductionGroup(group_of["inside"], replicate=group_of["over"])
        return ParallelGroups({"dense": dense}, step_group=group_of["all"])
    return None


def in_loopback(case: Case, fields: dict[str, Any], *, rebuilt: dict[str, Any] | None = None) -> list[Trained]:
    """Train on ranks in threads."""
    world = LoopbackWorld(case.size, timeout_s=60)
    everybody = {rank: world.communicator(rank) for rank in range(case.size)}
    lines: dict[str, dict[int, Any]] = {"all": everybody}
    for name, lists in members_of(case).items():
        if name != "all":
            lines[name] = {rank: one for ranks in lists for rank, one in world.subgroup(ranks).items()}

    def program(rank: int) -> Trained:
        groups = groups_of(case, {name: line[rank] for name, line in lines.items()})
        ranks = {"communicator": everybody[rank]} if groups is None else {"groups": groups}
        return train(case, rank, fields, ranks, rebuilt=rebuilt)

    return world.run(program)


# The oracle #


def in_rank_order(values: list[torch.Tensor]) -> torch.Tensor:
    """Add up one after the other; 16-bit values in float32."""
    total = values[0].float() if values[0].itemsize == 2 else values[0].clone()
    for value in values[1:]:
        total = total + value
    return total.to(values[0].dtype)


def alone(case: Case, norms: list[float]) -> list[Trained]:
    """Train in one process: sums of the gradients of all ranks in rank order, and torch's optimizer on whole parameters.

    Args:
        norms: by which gradients are clipped. Those that are returned are computed here.
    """
    modules = [Vectors(case, rank) for rank in range(case.size)]
    mains = [{name: param.detach().float().requires_grad_() for name, param in one.named_parameters()} for one in modules]
    optimizers = [OPTIMIZERS[case.optimizer](list(main.values())) for main in mains]
    found = [Trained([], []) for _ in modules]
    for step, norm in enumerate(norms):
        clip = min(case.clip_grad / (norm + 1e-6), 1.0) if case.clip_grad else 1.0
        reduced = _reduced(case, [_scaled_grads(module, step) for module in modules])
        for rank, (module, main, optimizer) in enumerate(zip(modules, mains, optimizers, strict=True)):
            for name, param in main.items():
                param.grad = reduced[rank][name] * clip
            optimizer.step()
            with torch.no_grad():
                for name, param in module.named_parameters():
                    param.copy_(main[name])
            found[rank].norms.append(_norm(case, reduced))
            found[rank].weights.append({name: param.detach().clone() for name, param in module.named_parameters()})
    return found


def _scaled_grads(module: Vectors, step: int) -> dict[str, torch.Tensor]:
    case = module.case
    module.zero_grad()
    module(step).backward()
    factor = 1 / case.size if case.reduction == "mean" else 1.0
    if case.grad_dtype == torch.float16 and case.reduction == "mean":
        factor = 1 / _power_before(case)
    return {name: param.grad.to(case.grad_dtype) * factor for name, param in module.named_parameters()}


def _power_before(case: Case) -> int:
    """Return the power of two by which float16 gradients are divided before the sum; the rest divides the sum."""
    return 2 if case.size >= 4 else 1


def _reduced(case: Case, scaled: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return the reduced gradients of each rank, in float32."""
    found: list[dict[str, torch.Tensor]] = []
    for rank in range(case.size):
        found.append({})
        for name in case.names:
            parts = [scaled[other][name] for other in case.holders(name, rank)]
            if case.form == "replicas":
                parts = [in_rank_order(parts[at : at + 2]) for at in range(0, case.size, 2)]
            total = in_rank_order(parts)
            if case.grad_dtype == torch.float16 and case.reduction == "mean":
                total = total / (case.size / _power_before(case))
            found[rank][name] = total.float()
    return found


def _norm(case: Case, reduced: list[dict[str, torch.Tensor]]) -> float:
    first = [(rank, name) for rank in range(case.size) for name in case.names if case.holders(name, rank)[0] == rank]
    return math.sqrt(math.fsum(value**2 for rank, name in first for value in reduced[rank][name].tolist()))


# What is drawn #


@st.composite
def cases(draw: st.DrawFn, sizes: tuple[int, ...] = (2, 3, 4, 8), *, max_numel: int = 1_500) -> Case:
    """Models on any number of ranks. Every second one is clipped, to less than any norm."""
    size = draw(st.sampled_from(sizes))
    forms = ["dense", "experts", "replicas"] if size >= 4 else ["dense"]
    precision = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)]
    dtype, is_narrow = draw(st.sampled_from(precision))
    return Case(
        size=size,
        numels=tuple(draw(st.lists(st.integers(1, max_numel), min_size=2, max_size=6))),
        form=draw(st.sampled_from(forms)),
        dtype=dtype,
        is_narrow=is_narrow,
        reduction=draw(st.sampled_from(["mean", "sum"])),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        clip_grad=draw(st.sampled_from([0.0, 1e-2])),
        seed=draw(st.integers(0, 10**6)),
    )


@st.composite
def plans(draw: st.DrawFn, case: Case) -> dict[str, Any]:
    """Ways to cut and to order buckets, and modes, of a case."""
    names = case.names
    sizing = draw(
        st.one_of(
            st.builds(lambda numel: {"bucket_size": numel}, st.integers(1, sum(case.numels))),
            st.builds(lambda count: {"num_buckets": count}, st.integers(1, len(names))),
            st.builds(lambda cuts: {"bucket_cuts": tuple(cuts)}, st.lists(st.sampled_from(names), unique=True)),
        )
    )
    is_sharded = case.form == "replicas" or draw(st.booleans())
    overlaps = draw(st.booleans())
    return {
        **sizing,
        "bucket_order": tuple(draw(st.permutations(names))),
        "use_distributed_optimizer": is_sharded,
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": is_sharded and overlaps and draw(st.booleans()),
        "bucket_groups": draw(st.sampled_from(["per_bucket", "single"])),
    }


@st.composite
def cases_and_plans(draw: st.DrawFn, *, num_plans: int = 2, **bounds: Any) -> tuple[Case, list[dict[str, Any]]]:
    """A case, and several ways to train it."""
    case = draw(cases(**bounds))
    return case, [draw(plans(case)) for _ in range(num_plans)]


def check(case: Case, by_plan: list[list[Trained]]) -> None:
    """Assert that all plans have trained alike, and as the oracle."""
    first = by_plan[0]
    for other in by_plan[1:]:
        for ours, theirs in zip(first, other, strict=True):
            assert ours.difference(theirs) == ""
    expected = alone(case, first[0].norms)
    for rank, (ours, theirs) in enumerate(zip(first, expected, strict=True)):
        for norm, exact in zip(ours.norms, theirs.norms, strict=True):
            assert abs(norm - exact) <= 2**-24 * exact
            assert not case.clip_grad or norm > case.clip_grad
        assert Trained(ours.weights, [0.0] * STEPS).difference(Trained(theirs.weights, [0.0] * STEPS)) == "", f"rank {rank}"
