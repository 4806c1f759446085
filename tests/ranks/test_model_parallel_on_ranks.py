"""Tensor and pipeline parallelism beside data parallelism on four real ranks, against the whole model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from moe_ranks import NUM_RANKS, groups_of
from pool import Rank
from torch.nn.functional import cross_entropy, linear

import megabucket as mb
from examples.tensor_parallel import VOCABULARY, WIDTH, Mlp
from megabucket.layout import megatron_identity

pytestmark = pytest.mark.dist

STEPS, TOKENS = 20, 32
SGD = {"lr": 0.05, "momentum": 0.9}
Weights = dict[str, torch.Tensor]


def tokens_of(step: int, dp_rank: int, microbatch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dp_rank)
    return torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, tokens * 7 % VOCABULARY, reduction="sum")


def values_of(model: torch.nn.Module) -> Weights:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


class Run(NamedTuple):
    initial: Weights
    weights: Weights
    norms: list[float]
    thresholds: list[float]  # in every other step gradients shrink to two fifths


def in_one_process(model: torch.nn.Module, num_microbatches: int = 1) -> Run:
    run, optimizer = Run(values_of(model), {}, [], []), torch.optim.SGD(model.parameters(), **SGD)
    for step in range(STEPS):
        tokens = torch.cat([tokens_of(step, dp_rank, micro) for dp_rank in range(2) for micro in range(num_microbatches)])
        (loss_of(model(tokens), tokens) / len(tokens)).backward()
        run.norms.append(float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])))
        run.thresholds.append(0.4 * run.norms[-1] if step % 2 else 0.0)
        if run.thresholds[-1]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.thresholds[-1])
        optimizer.step()
        optimizer.zero_grad()
    run.weights.update(values_of(model))
    return run


def train(
    ddp: mb.DistributedDataParallel, thresholds: Sequence[float], backward: Callable[[int], int]
) -> tuple[list[float], Weights]:
    """Return norms and weights. ``backward`` runs the backwards of a step and returns the number of tokens."""
    optimizer, norms = mb.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), **SGD), ddp), []
    for step, threshold in enumerate(thresholds):
        mb.finalize_grads(ddp, num_tokens=backward(step))
        optimizer.clip_grad = threshold
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    ddp.check_replicas()
    ddp.detach()
    return norms, values_of(ddp.module)


def assert_as_in_one_process(norms: list[float], weights: Weights, expected: Run) -> None:
    assert norms == pytest.approx(expected.norms, rel=1e-4)
    for name, value in expected.weights.items():
        moved = (value - expected.initial[name]).abs().max()
        assert (weights[name] - value).abs().max() <= 1e-4 * moved, name


# Tensor parallelism: layers and tokens are cut #


class OneRank:
    """In place of a tensor-parallel group."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class WholeMlp(Mlp):
    """What the ranks of ``Mlp`` compute together."""

    def __init__(self) -> None:
        super().__init__(OneRank())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + (self.norm(hidden) @ self.column.T).relu() @ self.row.T)


def train_tensor_parallel(rank: Rank, fields: dict[str, Any], thresholds: list[float]) -> tuple[list[float], Weights]:
    tp, dp = groups_of(rank.index, 2)
    groups = mb.ParallelGroups({"dense": dp}, copies={"tp": tp}, norm_group=rank.group)
    config = mb.DistributedDataParallelConfig(grad_reduction="sum", bucket_size=2000, **fields)
    ddp = mb.DistributedDataParallel(Mlp(tp), config, groups=groups)

    def backward(step: int) -> int:
        tokens = tokens_of(step, dp.rank()).chunk(2)[tp.rank()]
        loss_of(ddp(tokens), tokens).backward()
        return TOKENS  # of both ranks together: they share one sequence

    return train(ddp, thresholds, backward)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_two_tensor_parallel_ranks_in_two_replicas_train_as_one_process(pool, is_sharded):
    expected = in_one_process(WholeMlp())

    results = pool.run(train_tensor_parallel, {"use_distributed_optimizer": is_sharded}, expected.thresholds, ranks=NUM_RANKS)

    for first in (0, 2):
        (norms, weights), (_, others) = results[first : first + 2]
        joined = {name: torch.cat([weights[name], others[name]], dim) for name, dim in (("column", 0), ("row", 1))}
        assert_as_in_one_process(norms, {**weights, **joined}, expected)


# Pipeline parallelism: the last stage has the weight of the embedding as its head #


class WholeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return linear(hidden, self.embedding.weight)


class Stage(torch.nn.Module):
    """One half of ``WholeModel``, under local names."""

    def __init__(self, whole: WholeModel, index: int) -> None:
        super().__init__()
        self.layer = copy.deepcopy(whole.layers[index])
        self.ends = copy.deepcopy(whole.embedding)
        self.is_last = index == 1
        if self.is_last:
            torch.nn.init.zeros_(self.ends.weight)  # until the stages make it equal
        self.ends.weight.shared = self.ends.weight.shared_embedding = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(inputs if self.is_last else self.ends(inputs)))
        return linear(hidden, self.ends.weight) if self.is_last else hidden


def global_name(stage: int, name: str) -> str:
    return "embedding.weight" if name == "ends.weight" else name.replace("layer.", f"layers.{stage}.")


def train_pipeline(rank: Rank, fields: dict[str, Any], thresholds: list[float]) -> tuple[list[float], Weights]:
    pp, dp = groups_of(rank.index, 2)
    stage, other = rank.index % 2, rank.index ^ 1
    identity = megatron_identity(tp_rank=0, tp_size=1, name_of=partial(global_name, stage))
    groups = mb.ParallelGroups({"dense": dp}, copies={"embd": pp, "pp": pp}, norm_group=rank.group, identity=identity)
    config = mb.DistributedDataParallelConfig(grad_reduction="sum", finish="explicit", bucket_size=700, **fields)
    ddp = mb.DistributedDataParallel(Stage(WholeModel(), stage), config, groups=groups, disable_bucketing=stage == 1)

    def microbatch(tokens: torch.Tensor) -> None:
        if stage == 0:
            hidden = ddp(tokens)
            dist.send(hidden.detach(), other, group=pp)
            dist.recv(grad := torch.empty_like(hidden), other, group=pp)
            hidden.backward(grad)
        else:
            dist.recv(hidden := torch.empty(len(tokens), WIDTH), other, group=pp)
            loss_of(ddp(hidden.requires_grad_()), tokens).backward()
            dist.send(hidden.grad, other, group=pp)

    def backward(step: int) -> int:
        for index in range(2):
            with ddp.no_sync() if index == 0 else nullcontext():
                microbatch(tokens_of(step, dp.rank(), index))
        return 2 * TOKENS if stage == 1 else 0  # those of the last stage count

    norms, weights = train(ddp, thresholds, backward)
    return norms, {global_name(stage, name): value for name, value in weights.items()}


@pytest.mark.parametrize("is_sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_two_pipeline_stages_with_tied_embeddings_in_two_replicas_train_as_one_process(pool, is_sharded):
    expected = in_one_process(WholeModel(), num_microbatches=2)

    results = pool.run(train_pipeline, {"use_distributed_optimizer": is_sharded}, expected.thresholds, ranks=NUM_RANKS)

    for first in (0, 2):
        (norms, weights), (_, others) = results[first : first + 2]
        assert torch.equal(weights["embedding.weight"], others["embedding.weight"])
        assert_as_in_one_process(norms, weights | others, expected)
