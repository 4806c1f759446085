"""Any torch optimizer, several groups, any scheduler: on shards as on whole parameters, bit by bit.

Five steps on the ranks are recorded; a plain optimizer on the whole parameters of one process is given the recorded gradients
and must arrive at the same weights. Torch's fused CPU kernels are the exception: they round once where they find a full vector
and twice in the rest of a tensor, so a flat shard and a small parameter may differ by a rounding per operation. With at most 10
operations per step, each on values no larger than the largest weight, that is ``10 * steps * u * max|w|``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from cells import STEPS, UNIT_ROUNDOFF, Record, assert_none, grads_on_this_rank, whole_grad
from odd_model import OddModel, flat, loss_of, tokens_of, trainable, unflatten
from pool import Rank
from torch.optim import lr_scheduler

import megabucket as mb

pytestmark = pytest.mark.dist

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: MappingProxyType[str, MakeOptimizer] = MappingProxyType(
    {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01),
        "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
        "SGD, Nesterov, foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        "SGD, fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
        "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
        "Adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
        "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
        "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        "AdamW, maximize": lambda params: torch.optim.AdamW(params, lr=0.01, maximize=True),
        "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
        "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.25, lr_decay=0.1),
        "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
        "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
        "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
        "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
        "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
        "ASGD": lambda params: torch.optim.ASGD(params, lr=0.05, t0=2),
    }
)

SCHEDULERS: MappingProxyType[str, Callable[[torch.optim.Optimizer], Any]] = MappingProxyType(
    {
        "none": lambda _: None,
        "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        "warm-up, then cosine": lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)],
            milestones=[2],
        ),
        "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
        "on plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    }
)


@dataclass(frozen=True)
class Case:
    optimizer: str
    reduce_scatters: bool
    ranks: int = 2
    precision: str = "float32"
    bucket_size: int = 64
    groups: str = "one"
    scheduler: str = "none"
    built_on: str = "outer, after wrapping"


def grouped(model: torch.nn.Module, groups: str) -> Any:
    """Return what an optimizer takes: parameters, or groups that take turns within every bucket."""
    if groups == "one":
        return model.parameters()
    by_group: dict[int, list[torch.nn.Parameter]] = {0: [], 1: [], 2: []}
    for index, param in enumerate(trainable(model)):
        by_group[index % 3].append(param)
    settings = ({"weight_decay": 0.2}, {"weight_decay": 0.0}, {"lr": 0.02, "weight_decay": 0.1})
    return [{"params": by_group[index], **setting} for index, setting in enumerate(settings)]


def advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(float(step))  # it never gets better, so the rate is halved in every step but the first
    elif scheduler is not None:
        scheduler.step()


def train_cases(rank: Rank, cases: list[Case]) -> list[Record]:
    return [train_or_name_it(rank, case) for case in cases]


def train_or_name_it(rank: Rank, case: Case) -> Record:
    try:
        return train(rank, case)
    except Exception as error:
        raise RuntimeError(f"in {case}") from error


def train(rank: Rank, case: Case) -> Record:
    record = Record()
    model = OddModel(case.precision, seed=0)
    config = mb.DistributedDataParallelConfig(
        use_distributed_optimizer=case.reduce_scatters, bucket_size=case.bucket_size, overlap_param_gather=case.reduce_scatters
    )
    ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
    inner = OPTIMIZERS[case.optimizer](grouped(model, case.groups))
    scheduler = SCHEDULERS[case.scheduler](inner) if case.built_on == "inner, before wrapping" else None
    outer = mb.DistributedOptimizer(inner, ddp)
    if scheduler is None:
        scheduler = SCHEDULERS[case.scheduler](inner if case.built_on == "inner, after wrapping" else outer)
    inner.register_step_pre_hook(lambda *_: record.grads.append(grads_on_this_rank(ddp)))
    for step in range(STEPS):
        loss_of(ddp, tokens_of(step, rank.index, 0)).backward()
        outer.step()
        outer.zero_grad()
        advance(scheduler, step)
        ddp.finish_param_sync()
        record.weights.append(flat(trainable(model)))
        record.norms += [group["lr"] for group in outer.param_groups]
    return record


def replay(case: Case, record: tuple[Record, ...]) -> Record:
    """Return the weights and learning rates of a plain optimizer that is given the recorded gradients."""
    model = OddModel(case.precision, seed=0)
    model_params = trainable(model)
    main = OddModel(case.precision, seed=0).float()
    optimizer = OPTIMIZERS[case.optimizer](grouped(main, case.groups))
    scheduler = SCHEDULERS[case.scheduler](optimizer)
    replayed = Record()
    for step in range(STEPS):
        for param, grad in zip(trainable(main), unflatten(whole_grad(record, step), trainable(main)), strict=True):
            param.grad = grad
        optimizer.step()
        advance(scheduler, step)
        with torch.no_grad():
            for param, value in zip(model_params, trainable(main), strict=True):
                param.copy_(value)
        replayed.weights.append(flat(model_params))
        replayed.norms += [group["lr"] for group in optimizer.param_groups]
    return replayed


def assert_like_plain(pool: Any, cases: list[Case]) -> None:
    ranks = cases[0].ranks
    by_rank = pool.run(train_cases, cases, ranks=ranks)
    failures = []
    for case, record in zip(cases, zip(*by_rank, strict=True), strict=True):
        plain = replay(case, record)
        for rank, one in enumerate(record):
            for step in range(STEPS):
                error = float((one.weights[step] - plain.weights[step]).abs().max())
                largest = float(plain.weights[step].abs().max())
                allowed = 10 * (step + 1) * UNIT_ROUNDOFF * largest if "fused" in case.optimizer else 0.0
                if not error <= allowed:
                    failures.append(f"{case}, rank {rank}: weights after step {step} are off by {error}")
            if one.norms != plain.norms:
                failures.append(f"{case}, rank {rank}: learning rates {one.norms} instead of {plain.norms}")
    assert_none(failures)


@pytest.mark.parametrize(("reduce_scatters", "ranks"), [(True, 2), (True, 3), (False, 2)])
def test_every_torch_optimizer_steps_on_shards_as_on_whole_parameters(pool, reduce_scatters, ranks):
    assert_like_plain(pool, [Case(name, reduce_scatters, ranks) for name in OPTIMIZERS])


def test_bfloat16_weights_follow_float32_main_parameters_under_every_torch_optimizer(pool):
    assert_like_plain(pool, [Case(name, reduce_scatters=True, precision="mixed") for name in OPTIMIZERS])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_groups_that_take_turns_within_a_bucket_keep_their_settings(pool, ranks):
    cases = [
        Case("AdamW", reduce_scatters, ranks, precision, bucket_size, "three")
        for reduce_scatters, precision, bucket_size in itertools.product(
            (True, False), ("float32", "mixed"), (1, 64, 1_000_000)
        )
    ]

    assert_like_plain(pool, cases)


@pytest.mark.parametrize("built_on", ["inner, before wrapping", "inner, after wrapping", "outer, after wrapping"])
def test_schedulers_keep_working_wherever_they_were_built(pool, built_on):
    cases = [
        Case("SGD, momentum", reduce_scatters, groups=groups, scheduler=scheduler, built_on=built_on)
        for reduce_scatters, groups, scheduler in itertools.product((True, False), ("one", "three"), SCHEDULERS)
    ]

    assert_like_plain(pool, cases)


def test_the_list_of_optimizers_is_complete():
    """Every optimizer of torch is tried above, or one element of its update depends on others."""
    known = {name.split(",")[0] for name in OPTIMIZERS}
    needs_whole_tensors = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}

    of_torch = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }

    assert of_torch - needs_whole_tensors == known
