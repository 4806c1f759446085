"""Any torch optimizer, several groups: on shards as on whole parameters, bit by bit.

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
from pool import FOUR_AT_NIGHT, ONE_AT_NIGHT, TWO_AT_NIGHT, Rank

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


@dataclass(frozen=True)
class Case:
    optimizer: str
    reduce_scatters: bool
    ranks: int = 2
    precision: str = "float32"
    bucket_size: int = 64
    groups: str = "one"


def grouped(model: torch.nn.Module, groups: str) -> Any:
    """Return what an optimizer takes: parameters, or groups that take turns within every bucket."""
    if groups == "one":
        return model.parameters()
    by_group: dict[int, list[torch.nn.Parameter]] = {0: [], 1: [], 2: []}
    for index, param in enumerate(trainable(model)):
        by_group[index % 3].append(param)
    settings = ({"weight_decay": 0.2}, {"weight_decay": 0.0}, {"lr": 0.02, "weight_decay": 0.1})
    return [{"params": by_group[index], **setting} for index, setting in enumerate(settings)]


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
    outer = mb.DistributedOptimizer(inner, ddp)
    inner.register_step_pre_hook(lambda *_: record.grads.append(grads_on_this_rank(ddp)))
    for step in range(STEPS):
        loss_of(ddp, tokens_of(step, rank.index, 0)).backward()
        outer.step()
        outer.zero_grad()
        ddp.finish_param_sync()
        record.weights.append(flat(trainable(model)))
    return record


def replay(case: Case, record: tuple[Record, ...]) -> list[torch.Tensor]:
    """Return the weights after each step of a plain optimizer that is given the recorded gradients."""
    model = OddModel(case.precision, seed=0)
    model_params = trainable(model)
    main = OddModel(case.precision, seed=0).float()
    optimizer = OPTIMIZERS[case.optimizer](grouped(main, case.groups))
    weights = []
    for step in range(STEPS):
        for param, grad in zip(trainable(main), unflatten(whole_grad(record, step), trainable(main)), strict=True):
            param.grad = grad
        optimizer.step()
        with torch.no_grad():
            for param, value in zip(model_params, trainable(main), strict=True):
                param.copy_(value)
        weights.append(flat(model_params))
    return weights


def assert_like_plain(pool: Any, cases: list[Case]) -> None:
    ranks = cases[0].ranks
    by_rank = pool.run(train_cases, cases, ranks=ranks)
    failures = []
    for case, record in zip(cases, zip(*by_rank, strict=True), strict=True):
        plain = replay(case, record)
        for rank, one in enumerate(record):
            for step in range(STEPS):
                error = float((one.weights[step] - plain[step]).abs().max())
                largest = float(plain[step].abs().max())
                allowed = 10 * (step + 1) * UNIT_ROUNDOFF * largest if "fused" in case.optimizer else 0.0
                if not error <= allowed:
                    failures.append(f"{case}, rank {rank}: weights after step {step} are off by {error}")
    assert_none(failures)


@pytest.mark.parametrize(("reduce_scatters", "ranks"), [(True, 3), pytest.param(False, 2, marks=pytest.mark.nightly)])
def test_every_torch_optimizer_steps_on_shards_as_on_whole_parameters(pool, reduce_scatters, ranks):
    assert_like_plain(pool, [Case(name, reduce_scatters, ranks) for name in OPTIMIZERS])


@pytest.mark.nightly
def test_bfloat16_weights_follow_float32_main_parameters_under_every_torch_optimizer(pool):
    assert_like_plain(pool, [Case(name, reduce_scatters=True, precision="mixed") for name in OPTIMIZERS])


@pytest.mark.parametrize("ranks", [ONE_AT_NIGHT, TWO_AT_NIGHT, 3, FOUR_AT_NIGHT])
def test_groups_that_take_turns_within_a_bucket_keep_their_settings(pool, ranks):
    cases = [
        Case("AdamW", reduce_scatters, ranks, precision, bucket_size, "three")
        for reduce_scatters, precision, bucket_size in itertools.product(
            (True, False), ("float32", "mixed"), (1, 64, 1_000_000)
        )
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
