"""Torch's own table of optimizers and their settings, on two ranks, beside torch DDP.

Each setting is tried as the table has it, with ``foreach=True`` and with ``fused=True`` where the optimizer has them.
``differentiable=True`` is left out: it cannot update parameters, which are leaves. Torch's fused CPU kernels round once where
they find a full vector and twice in the rest of a tensor, so on flat shards they may differ by rounding.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Rank

import megabucket as mb

pytest.importorskip("expecttest")  # torch's table imports it

pytestmark = pytest.mark.dist

STEPS = 4
TORCH_DDP, PLAIN, WHOLE, SHARDS = "torch DDP", "plain", "DistributedOptimizer, all-reduced", "DistributedOptimizer, sharded"
OURS = (PLAIN, WHOLE, SHARDS)

NEEDS_SPARSE = "SparseAdam steps on sparse gradients only, and the buffers hold dense ones"
NOT_WRAPPED = {"LBFGS": "requires a closure and calls it many times", "SparseAdam": NEEDS_SPARSE}
REFUSED = {PLAIN: {"SparseAdam": NEEDS_SPARSE}, WHOLE: NOT_WRAPPED, SHARDS: NOT_WRAPPED}
"""By optimizer, a part of the reason."""

# The whole table has 91 settings. 75 have a foreach kernel (all but 5 of LBFGS, 7 of Muon and 4 of SparseAdam), 26 a fused one
# on CPUs (Adagrad 7, Adam 5, AdamW 5, SGD 9): 91 + 75 + 26 = 192. LBFGS has 5, SparseAdam 4.
# Of each optimizer alone, as it is by default: 15 + 12 + 4 = 31.
NUM_SETTINGS = {"whole table": 192, "defaults": 31}
NUM_REFUSED = {
    ("whole table", PLAIN): 4,
    ("whole table", WHOLE): 5 + 4,
    ("whole table", SHARDS): 5 + 4,
    ("defaults", PLAIN): 1,
    ("defaults", WHOLE): 1 + 1,
    ("defaults", SHARDS): 1 + 1,
}
NUM_FUSED = {"whole table": 26, "defaults": 4}
TABLES = ["defaults", pytest.param("whole table", marks=pytest.mark.nightly)]

BITWISE, ROUNDED, IS_REFUSED = "bitwise", "within 1e-6", "refused"

Outcome = tuple[str, Any]
"""The name of an error with its text, or ``""`` with the weights after each step."""


def settings(table: str) -> list[tuple[type[torch.optim.Optimizer], str, dict[str, Any]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that torch imports for its tests
        from torch.testing._internal.common_optimizers import optim_db
    found = []
    for info in optim_db:
        inputs = info.optim_inputs_func(device="cpu")
        for one in inputs if table == "whole table" else inputs[:1]:
            name = f"{info.optim_cls.__name__}, {one.desc or 'default'}"
            found.append((info.optim_cls, name, one.kwargs))
            flags = ["foreach"] if "foreach" in info.supported_impls else []
            flags += ["fused"] if "fused" in info.supported_impls and "cpu" in info.supports_fused_on else []
            found += [(info.optim_cls, f"{name}, {flag}", {**one.kwargs, flag: True}) for flag in flags]
    return found


def model_for(kind: type[torch.optim.Optimizer]) -> torch.nn.Module:
    """Return two layers: Muon takes matrices only, SparseAdam sparse gradients only."""
    torch.manual_seed(0)
    if kind is torch.optim.SparseAdam:
        return torch.nn.Sequential(torch.nn.Embedding(12, 3, sparse=True))
    has_bias = kind is not torch.optim.Muon
    return torch.nn.Sequential(torch.nn.Linear(12, 37, bias=has_bias), torch.nn.Tanh(), torch.nn.Linear(37, 5, bias=has_bias))


def wrapped(rank: Rank, side: str, model: torch.nn.Module) -> torch.nn.Module:
    if side == TORCH_DDP:
        return torch.nn.parallel.DistributedDataParallel(model, process_group=rank.group)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=side == SHARDS, bucket_size=100)
    return mb.DistributedDataParallel(model, config, process_group=rank.group)


def batch(model: torch.nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model[0], torch.nn.Embedding):
        return torch.randint(12, (6,), generator=generator)
    return torch.randn(6, 12, generator=generator)


def play(rank: Rank, side: str, table: str) -> list[Outcome]:
    """Train with each setting from the same weights; one wrapper takes all optimizers for one form of the model."""
    outcomes, wrappers = [], {}
    for kind, _, arguments in settings(table):
        form = kind if kind in (torch.optim.SparseAdam, torch.optim.Muon) else None
        if form not in wrappers:
            model = model_for(kind)
            wrappers[form] = model, copy.deepcopy(model.state_dict()), wrapped(rank, side, model)
        model, start, module = wrappers[form]
        model.load_state_dict(start)
        module.zero_grad()
        optimizer = None
        try:
            optimizer = kind(model.parameters(), **copy.deepcopy(arguments))
            optimizer = mb.DistributedOptimizer(optimizer, module) if side in (WHOLE, SHARDS) else optimizer
            outcomes.append(("", train(rank, model, module, optimizer)))
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
    return outcomes


def train(rank: Rank, model: torch.nn.Module, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    weights = []
    # It stops to search where the loss of a rank says so; on the same batch all ranks stop at once.
    is_searching = isinstance(optimizer, torch.optim.LBFGS)
    for step in range(STEPS):
        inputs = batch(model, step if is_searching else 100 * rank.index + step)

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            value = module(inputs).square().mean()
            value.backward()
            return value

        if is_searching:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    return torch.stack(weights)


@pytest.fixture(scope="module")
def of_torch_ddp(pool: Any) -> Callable[[str], list[torch.Tensor]]:
    """Return the weights under torch DDP for each setting of a table."""

    @functools.cache
    def play_torch(table: str) -> list[torch.Tensor]:
        first, second = pool.run(play, TORCH_DDP, table, ranks=2)
        assert [name for (_, name, _), (error, _) in zip(settings(table), first, strict=True) if error] == []
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))
        return [weights for _, weights in first]

    return play_torch


@pytest.mark.parametrize("side", OURS)
@pytest.mark.parametrize("table", TABLES)
def test_every_setting_updates_as_under_torch_ddp_or_is_refused_with_its_reason(pool, of_torch_ddp, table, side):
    by_rank = pool.run(play, side, table, ranks=2)

    wrong, counts, num_fused = [], Counter(), 0
    for (kind, name, arguments), right, *ours in zip(settings(table), of_torch_ddp(table), *by_rank, strict=True):
        reason, is_fused = REFUSED[side].get(kind.__name__), bool(arguments.get("fused"))
        verdicts = {judged(outcome, right, reason, may_round=is_fused and side != PLAIN) for outcome in ours}
        counts.update(verdicts)
        num_fused += is_fused
        wrong += [f"{name}: {verdict}" for verdict in verdicts - {BITWISE, ROUNDED, IS_REFUSED}]
        wrong += [f"{name}: {sorted(verdicts)}" for _ in verdicts if IS_REFUSED in verdicts and len(verdicts) > 1]
    print(f"{side}: {dict(counts)}")
    assert wrong == []
    if torch.__version__.startswith("2.13."):  # other releases may have other settings
        assert len(of_torch_ddp(table)) == NUM_SETTINGS[table]
        assert counts[IS_REFUSED] == NUM_REFUSED[table, side]
        assert num_fused == NUM_FUSED[table]
        # How many fused settings round in another way depends on the processor's vectors.
        assert NUM_SETTINGS[table] - NUM_REFUSED[table, side] - counts[BITWISE] <= NUM_FUSED[table]


def judged(outcome: Outcome, right: torch.Tensor, reason: str | None, *, may_round: bool) -> str:
    error, found = outcome
    if error:
        is_right = error == "ConfigError" and reason is not None and reason in found
        return IS_REFUSED if is_right else f"{error}: {found}"
    off = float((found - right).abs().max())
    if reason is not None or not off <= (1e-6 if may_round else 0):
        return f"off by {off}, refused expected: {reason}"
    return ROUNDED if off else BITWISE
